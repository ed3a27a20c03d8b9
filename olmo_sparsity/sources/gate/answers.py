"""Store the answers to questions, one file each, and read them again.

Place in the flow: questions.py writes answers (**`write_answer`**); gate.py and index_page.py read
them (**`read_answers`**). A folder of results holds

    identity.json           model, tokenizer, questions and settings that the answers are of
    questions/000000.json   the first answer:
        question, identity  its index, and the hash of identity.json
        gate                what the gate needs of it: a `StoredAnswer`
        statements, matrix  tables of its attribution, and more (`Attribution.to_dict`)
    …

A number is null in these files where an effect was not evaluated. Questions and statements are
stored by their index, from 0; a `Check` (gate/report.py) has their numbers, from 1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from olmo_sparsity.analysis.results.json_values import to_json_value, write_as_json
from olmo_sparsity.base.conform import conform
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import read_json, sha256_of
from olmo_sparsity.base.json_text import with_crc
from olmo_sparsity.sources.attribution import Attribution
from olmo_sparsity.sources.report.table_rows import StatementRow

VERSION = 3
"""Version of stored answers. It grows when a verdict may become another one, or a key changes."""

IDENTITY = "identity.json"
"""In a folder of results: what the answers are of."""


class Effect(NamedTuple):
    """What a source gives, or what is lost without it: a mean over decoys, and its standard
    error."""

    nats: float
    se: float


@dataclass(frozen=True)
class StoredCell:
    """Numbers of a statement and a source, in nats. None if it was not evaluated."""

    gives: float | None
    """What the source gives when decoys replace all others."""

    lost: float | None
    """What is lost when a decoy replaces the source."""

    se_gives: float | None
    se_lost: float | None
    """Standard errors of both."""

    above: float | None
    """By how much the larger effect exceeds the threshold of a named source."""

    @property
    def effects(self) -> list[Effect | None]:
        """What the source gives, and what is lost without it. None if it was not evaluated."""
        pairs = (self.gives, self.se_gives), (self.lost, self.se_lost)
        return [None if nats is None or se is None else Effect(nats, se) for nats, se in pairs]

    @property
    def largest_effect(self) -> float:
        """The larger of both effects, in nats; minus infinity if none was evaluated."""
        evaluated = [nats for nats in (self.gives, self.lost) if nats is not None]
        return max(evaluated, default=-inf)


@dataclass(frozen=True)
class StoredStatement:
    """A statement with its verdict: a row of `Attribution.statements`, with the rows of the matrix
    that belong to it."""

    number: int
    """The index of the statement in its answer, from 0."""

    text: str
    kind: str
    nats: float
    """Nats that all sources give together."""

    sources: list[str]
    open: list[str]
    """Sources that are neither named nor excluded."""

    origins: list[str]
    """Sources that it relies on, also through reasoning."""

    is_undecided: bool
    """Whether the statement, or a sentence of the reasoning that it relies on, is undecided."""

    verdict: str
    cells: dict[str, StoredCell]
    """The numbers of each source, by its name."""

    @property
    def rests_on_none(self) -> bool:
        """Whether no source is named, and none may matter."""
        return not self.origins and not self.is_undecided

    @property
    def largest_effect(self) -> float:
        """The largest effect, in nats: of all sources together, or of one of them."""
        return max([self.nats, *(cell.largest_effect for cell in self.cells.values())])


@dataclass(frozen=True)
class StoredAnswer:
    """An answer with the verdicts on its statements, as the gate compares it."""

    question: int
    """The index of the question in its file, from 0."""

    id: str
    """The question's id in the file; empty if it has none."""

    asked: str
    """The text of the question."""

    seconds: float
    """How long the question took."""

    source_texts: dict[str, str]
    """A hash of the text of each source, by its name: whether a text has changed is all that is
    compared."""

    statements: list[StoredStatement]

    @staticmethod
    def of(
        index: int, asked: str, attribution: Attribution, id: str = "", seconds: float = 0.0
    ) -> StoredAnswer:
        """Return what the gate needs of an attribution.

        Args:
            index: The index of the question in its file.
            asked: The text of the question.
            attribution: The attribution of its answer.
            id: The question's id.
            seconds: How long the question took.
        """
        hashes = {
            name: hash_of(attribution.source_text(i)) for i, name in enumerate(attribution.names)
        }
        return StoredAnswer(
            question=index,
            id=id,
            asked=asked,
            seconds=seconds,
            source_texts=hashes,
            statements=[
                _stored_statement(attribution, row) for row in attribution.statements.itertuples()
            ],
        )

    @staticmethod
    def without_sources(index: int, asked: str, texts: Sequence[str], id: str = "") -> StoredAnswer:
        """Return the answer to a question whose prompt has no sources: statements rest on none."""
        return StoredAnswer(
            question=index,
            id=id,
            asked=asked,
            seconds=0.0,
            source_texts={},
            statements=[_statement_without_sources(i, text) for i, text in enumerate(texts)],
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of each statement."""
        return tuple(statement.text for statement in self.statements)


def _stored_statement(attribution: Attribution, row: StatementRow) -> StoredStatement:
    """Return a statement with its verdict and the numbers of its sources."""
    # The fields of a cell are columns of the matrix, in the order of the fields.
    columns = [field.name for field in fields(StoredCell)]
    numbers = attribution.matrix[columns].loc[row.Index]
    return StoredStatement(
        number=row.Index,
        text=row.text,
        kind=row.kind,
        nats=row.nats,
        sources=[*row.sources],
        open=[*row.open],
        origins=[*row.origins],
        is_undecided=attribution.is_undecided(row),
        verdict=row.verdict,
        cells={name: StoredCell(*values) for name, *values in numbers.itertuples()},
    )


def _statement_without_sources(index: int, text: str) -> StoredStatement:
    """Return a statement of an answer whose prompt has no sources."""
    return StoredStatement(
        number=index,
        text=text,
        kind="none",
        nats=0.0,
        sources=[],
        open=[],
        origins=[],
        is_undecided=False,
        verdict="rests on no source (the prompt has none)",
        cells={},
    )


def identity_in(folder: str | Path) -> dict[str, Any]:
    """Return what the results in a folder are of: what `identity_of_questions` returned when they
    were begun. Raise DataError if another version has written them."""
    identity = read_json(Path(folder) / IDENTITY, dict, "measure the questions again")
    if identity.get("version") != VERSION or not isinstance(identity.get("num_questions"), int):
        raise DataError(f"{folder} is not of version {VERSION}; measure the questions again")
    return identity


def read_answers(folder: str | Path) -> list[StoredAnswer]:
    """Return the answers of finished results."""
    answers: list[StoredAnswer] = []
    for file in read_stored(Path(folder), identity_in(folder)["num_questions"]):
        try:
            answers.append(conform(file.record.get("gate"), StoredAnswer))
        except ValueError as error:
            raise DataError(f"{file.path}: {error}; measure the questions again") from None
    return answers


def write_answer(folder: Path, identity: str, answer: StoredAnswer, tables: dict[str, Any]) -> None:
    """Write the file of a question.

    Args:
        folder: The folder of the results.
        identity: The hash of the folder's identity.json.
        answer: What the gate needs.
        tables: What `Attribution.to_dict` returns.
    """
    # What `read_stored` compares comes first: a file of another folder must not be taken for its
    # own.
    stored = {"question": answer.question, "identity": identity, "gate": asdict(answer)} | tables
    write_as_json(answer_file(folder, answer.question), with_crc(to_json_value(stored)))


class StoredFile(NamedTuple):
    """The file of a question."""

    path: Path
    record: dict[str, Any]
    """What it holds, as `write_answer` has written it."""


def read_stored(folder: Path, num_questions: int) -> Iterator[StoredFile]:
    """Yield each question's file. Raise DataError for a file that was written for another question
    or with other settings."""
    identity = sha256_of(folder / IDENTITY)
    for index in range(num_questions):
        file = answer_file(folder, index)
        stored = read_json(file, dict, "delete it, and run again")
        if (stored.get("question"), stored.get("identity")) != (index, identity):
            raise DataError(f"{file} is of other questions or settings; delete it, and run again")
        yield StoredFile(file, stored)


def answer_file(folder: Path, index: int) -> Path:
    """Return the file of the answer to the question with this index."""
    # With leading zeros, so that a listing of the folder is in the order of the questions.
    return folder / "questions" / f"{index:06d}.json"


def hash_of(value: Any) -> str:
    """Return the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
