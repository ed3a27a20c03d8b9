"""Attribute the answers to many questions of a .jsonl file, and write tables of all statements.

Place in the flow: suite.py, or the command without a gate → **`measure_questions`**, which calls

    questions_file.py   reads the file: a request for each line
    run_request.py      answers each question
    answers.py          stores the answer: one file for each question
    index_page.py       lists the pages, if they are wanted

For example, two questions whose answers have two statements and one. The folder then holds

    identity.json            model, settings, questions
    questions/000000.json    answer 0      statements.parquet   question  text                …
    questions/000001.json    answer 1                                  0  It opened in 1921.
                                                                       0  Anna Weiss opened it.
                                                                       1  Tickets cost 4 euros.

Since each finished question is one file, a killed run resumes where it stopped, and several
processes can share a folder: the one that finds all files there writes the tables.

A question's *index* is from 0, in names of files and in tables. People read its number, from 1.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.base.errors import ConfigError, DataError, naming
from olmo_sparsity.base.files import writing
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.base.provenance import versions_of_numbers
from olmo_sparsity.base.share import Share
from olmo_sparsity.base.streams import VERSION as STREAMS
from olmo_sparsity.base.work_folder import WorkFolder
from olmo_sparsity.models.loaded import LoadedModel, identity_of, using
from olmo_sparsity.sources.cost import cost_of
from olmo_sparsity.sources.gate.answers import (
    IDENTITY,
    VERSION,
    StoredAnswer,
    answer_file,
    hash_of,
    read_stored,
    write_answer,
)
from olmo_sparsity.sources.gate.index_page import page_file, write_index, write_page_without_sources
from olmo_sparsity.sources.gate.questions_file import MOST_DECOYS, read_lines, read_questions
from olmo_sparsity.sources.prompt.answer_tokens import statement_texts
from olmo_sparsity.sources.reading.prompt_parts import parts_of
from olmo_sparsity.sources.reading.read_sources import list_sources, read_turns
from olmo_sparsity.sources.request import AttributeRequest
from olmo_sparsity.sources.run_request import LoadedRequest
from olmo_sparsity.text.inputs import open_documents


def measure_questions(
    common: AttributeRequest,
    questions: str | Path,
    out: str | Path,
    *,
    shard: tuple[int, int] = (0, 1),
    pages: Path | None = None,
) -> pd.DataFrame | None:
    """Attribute the answer to each question of a .jsonl file (docs/sources.md). Write
    statements.parquet and matrix.parquet into `out`, and return the table of statements. Return
    None if other processes have questions left: the last one writes the tables.

    Args:
        common: What all questions have in common: a loaded model, options, and `decoys` (default:
            the sources of other questions).
        questions: The .jsonl file.
        out: The folder of the results.
        shard: Index of this process, from 0, and number of all that share the questions.
        pages: A folder that gets a page for each question. A question without its page is answered
            again.
    """
    if pages is not None and pages.is_file():
        raise ConfigError(f"pages (--html): '{pages}' is a file; pass a folder, for several pages")
    # All lines are read first: a mistake in the last one is an error before hours of work.
    requests = read_questions(common, questions)
    folder = WorkFolder(Path(out), "out", IDENTITY, own_key="questions")
    folder.create("questions")
    own_indices = Share(*shard).of(range(len(requests)))
    _answer_questions(common, questions, requests, own_indices, folder, pages)

    # Another process may still have questions. The last one to finish finds all files; if two end
    # at once, both write the same tables.
    if not all(answer_file(folder.path, index).exists() for index in range(len(requests))):
        return None
    statements = _write_tables(folder.path, len(requests))
    if pages is not None:
        write_index(pages, out)
    return statements


def _answer_questions(
    common: AttributeRequest,
    questions: str | Path,
    requests: Sequence[AttributeRequest],
    own_indices: Sequence[int],
    folder: WorkFolder,
    pages: Path | None,
) -> None:
    """Answer the questions of this process that are not finished, and store each answer.

    Args:
        common, questions, pages: As in `measure_questions`.
        requests: The requests of all questions.
        own_indices: Indices of the questions of this process.
        folder: The folder of the results.
    """
    model = common.model
    lines = [*read_lines(questions)]
    unfinished = [index for index in own_indices if not _is_finished(folder.path, pages, index)]
    with using(model), Progress("explaining", len(own_indices), "questions") as progress:
        # Raises if the folder is of other questions, another model or other settings.
        identity_keys = identity_of_questions(common, questions)
        identity = folder.identify(identity_keys, versions=versions_of_numbers())
        if model.prompt_model is not None:
            # A server may have loaded another model since the folder was begun.
            model.prompt_model.recognize_in(folder.path)

        progress.resume_at(len(own_indices) - len(unfinished))
        for index in unfinished:
            line = lines[index]
            progress.begin(_describe_question(requests[index], index, line.id))
            with naming(line.location):  # errors name the line of the question
                answered = _answer_question(model, requests[index], index, line.id, pages)
            write_answer(folder.path, identity, answered.answer, answered.tables)
            progress.update(progress.done + 1)


SHOWN_SOURCES = 3
"""Names of sources in a line of progress."""


def _describe_question(request: AttributeRequest, index: int, id: str) -> str:
    """Return which question is read next, for a line of progress, by id or number, with the names
    of its sources."""
    names = [part.name for part in parts_of(read_turns(request.sources)) if part.is_source]
    shown = ", ".join(names[:SHOWN_SOURCES])
    num_left = len(names) - SHOWN_SOURCES
    and_more = f" and {num_left} more" if num_left > 0 else ""
    return f"reading {id or f'question {index + 1}'}: {shown or 'no sources'}{and_more}"


def _is_finished(folder: Path, pages: Path | None, index: int) -> bool:
    """Return whether a question has its answer, and its page where pages are written."""
    has_page = pages is None or page_file(pages, index).exists()
    return has_page and answer_file(folder, index).exists()


@dataclass(frozen=True)
class _Answered:
    """What is stored of a question, in two forms: for the gate, and for the tables."""

    answer: StoredAnswer
    tables: dict[str, Any]
    """What `Attribution.to_dict` returns."""


def _answer_question(
    model: LoadedModel, request: AttributeRequest, index: int, id: str, pages: Path | None
) -> _Answered:
    """Attribute the answer to a question, and write its page.

    Args:
        index, id: The question's index in the file, and its id; empty if it has none.
        pages: The folder of the pages, if they are wanted.
    """
    if not read_turns(request.sources):
        # A prompt builder that finds nothing must not end the suite.
        return _answer_without_sources(model, request, index, id, pages)

    began = time.monotonic()
    attribution = LoadedRequest(model, request, quiet=True).run()
    seconds = time.monotonic() - began
    if pages is not None:
        attribution.to_html(page_file(pages, index))
    answer = StoredAnswer.of(index, request.question_text, attribution, id, seconds)
    return _Answered(answer, attribution.to_dict())


def _answer_without_sources(
    model: LoadedModel, request: AttributeRequest, index: int, id: str, pages: Path | None
) -> _Answered:
    """Return verdicts of "no source" on the statements of an answer whose prompt has no sources. No
    model is run."""
    assert request.answer is not None  # `read_questions` requires it
    texts = statement_texts(model, request.answer)
    answer = StoredAnswer.without_sources(index, request.question_text, texts, id)
    if pages is not None:
        write_page_without_sources(pages, index, request.question_text)
    # Columns of other answers that these lack, such as `p`, are empty in the table.
    columns = ("text", "nats", "kind", "sources", "open", "verdict", "origins")
    rows = [
        {key: getattr(row, key) for key in columns} | {"by_word": ""} for row in answer.statements
    ]
    return _Answered(answer, {"statements": rows, "matrix": []})


def _write_tables(folder: Path, num_questions: int) -> pd.DataFrame:
    """Write the tables of all questions, and return the table of statements."""
    answers = [file.record for file in read_stored(folder, num_questions)]
    _write_table(folder, "matrix", answers)
    return _write_table(folder, "statements", answers)


def _write_table(folder: Path, name: str, answers: list[dict[str, Any]]) -> pd.DataFrame:
    """Write the rows of all answers into one table, and return it. `name`: "statements" or
    "matrix", as in stored answers."""
    rows = [
        pd.DataFrame(stored[name]).assign(question=index) for index, stored in enumerate(answers)
    ]
    table = pd.concat(rows, ignore_index=True)
    with writing(folder / f"{name}.parquet") as partial:
        table.to_parquet(partial)
    return table


def count_questions(common: AttributeRequest, questions: str | Path) -> Cost:
    """Count what `measure_questions` costs in all, and print which sources each log has: they were
    marked and not named, so the user sees whether they are the right ones."""
    requests = read_questions(common, questions)
    counted: list[LoadedRequest] = []
    for line, request in zip(read_lines(questions), requests, strict=True):
        if "messages" in line.record:
            for source_line in list_sources(request.sources, title=f"{line.location}: "):
                say(source_line)
        if read_turns(request.sources):
            with naming(line.location):
                question = LoadedRequest(common.model, request, quiet=True)
                # `cost_of` asks for it, too, and gets what is kept. An error here names the line.
                _ = question.layouts
                counted.append(question)
    if not counted:
        raise DataError(f"{questions}: no question has sources, so there is nothing to count")
    return cost_of(counted)


def identity_of_questions(common: AttributeRequest, questions: str | Path) -> dict[str, Any]:
    """Return what determines the results: model, tokenizer, template, questions, settings, decoys.
    A folder of results is of one identity, and another run cannot go on in it."""
    # These fields change no number, so they may be added to questions that were answered.
    may_change = ("expect", "id")
    records: list[dict[str, Any]] = []
    for line in read_lines(questions):
        record = {key: value for key, value in line.record.items() if key not in may_change}
        records.append(record)
    return identity_of(common.model) | {
        "version": VERSION,
        "random_streams": STREAMS,
        "questions": hash_of(records),
        "num_questions": len(records),
        "settings": asdict(common.settings),
        "prefix": common.loading.prefix,
        "decoys": _fingerprint_of_decoys(common),
    }


def _fingerprint_of_decoys(common: AttributeRequest) -> str | None:
    """Return a hash of the unrelated texts, as their file may change while its name stays; None if
    decoys are the sources of other questions, which the identity has anyway."""
    decoys = common.decoys
    if decoys is None:
        return None
    texts = list(decoys.values()) if isinstance(decoys, Mapping) else decoys
    return open_documents(texts, common.model, limit=MOST_DECOYS).fingerprint


def describe(statements: pd.DataFrame) -> str:
    """Return how many of all statements have each kind of verdict, as text for a terminal."""
    words_of_kinds = {
        "one": "rest on one source",
        "either": "rest on either of several",
        "both": "rest on several together",
        "none": "rest on no source",
        "undecided": "are undecided",
    }
    fractions = statements.kind.value_counts(normalize=True)
    lines = [f"{len(statements):,} statements of {statements.question.nunique():,} questions"]
    for kind, words in words_of_kinds.items():
        lines.append(f"  {fractions.get(kind, 0.0):6.1%} {words}")
    return "\n".join(lines)
