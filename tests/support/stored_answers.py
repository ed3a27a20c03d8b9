"""Stored answers with made-up verdicts, for tests of the gate.

A test writes the results of a run, and of an earlier one, and checks them:

    write_run(tmp_path / "out", RESTS_ON_A, RESTS_ON_NONE)   # one question with two statements
    check(questions(["a", "none"]), tmp_path / "out")
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from olmo_sparsity.base.files import sha256_of
from olmo_sparsity.sources.gate.answers import VERSION, StoredAnswer, StoredCell, StoredStatement
from olmo_sparsity.sources.gate.gate import check
from olmo_sparsity.sources.gate.report import GateReport

MODEL = {"model": "m", "dtype": "d", "tokenizer": "t", "chat_template": "c", "prefix": "auto"}
"""Keys of identity.json that must be equal in two runs that are compared."""

NatsBySource = dict[str, float]

RESTS_ON_A: NatsBySource = {"a": 4.0, "b": 0.0}
RESTS_ON_NONE: NatsBySource = {"a": 0.2, "b": 0.1}


def cell(nats: float, above: float) -> StoredCell:
    """Return the cell of a source without which so many nats are lost.

    above: Nats above the threshold of a named source.
    """
    return StoredCell(gives=None, lost=nats, se_gives=None, se_lost=0.3, above=above)


def statement_of(
    text: str, named: list[str], cells: dict[str, StoredCell], **changed: Any
) -> StoredStatement:
    """Return a statement that rests on the named sources.

    changed: Other values of fields.
    """
    statement = StoredStatement(
        number=0,
        text=text,
        kind=["none", "one", "both"][len(named)],
        nats=max((cell.largest_effect for cell in cells.values()), default=0.0),
        sources=named,
        open=[],
        origins=named,
        is_undecided=False,
        verdict=f"rests on {', '.join(named) or 'no source'}",
        cells=cells,
    )
    return replace(statement, **changed)


def answer_of(
    statements: list[StoredStatement],
    texts: dict[str, str],
    number: int = 0,
    id: str = "",
    asked: str = "q",
) -> StoredAnswer:
    """Return the answer to a question.

    texts: Text (in place of its hash) of each source.
    """
    return StoredAnswer(
        question=number,
        id=id,
        asked=asked,
        seconds=0.0,
        source_texts=texts,
        statements=statements,
    )


def write_answers(folder: Path, answers: list[StoredAnswer], **identity: Any) -> None:
    """Write the results of a run. `identity`: keys of identity.json that differ from `MODEL`."""
    (folder / "questions").mkdir(parents=True, exist_ok=True)
    keys = {"version": VERSION, "num_questions": len(answers), "settings": {"draws": 8}}
    (folder / "identity.json").write_text(json.dumps(MODEL | keys | identity))
    for number, answer in enumerate(answers):
        stored = {
            "question": number,
            "identity": sha256_of(folder / "identity.json"),
            "gate": asdict(answer),
        }
        (folder / "questions" / f"{number:06d}.json").write_text(json.dumps(stored))


def write_run(
    folder: Path,
    *statements: NatsBySource,
    asked: str = "q",
    se: float = 0.1,
    early: bool = False,
    **identity: Any,
) -> Path:
    """Write the results of one question, and return their folder.

    statements: What each source gives to the statement; above 1 the statement rests on it.
    early: What is lost without the sources decides, so that what they give was not evaluated.
    """
    rows = list[StoredStatement]()
    for number, nats_by_source in enumerate(statements):
        named = [name for name, nats in nats_by_source.items() if nats > 1]
        cells = {
            name: StoredCell(
                gives=None if early else nats,
                lost=nats if early else 0.0,
                se_gives=None if early else se,
                se_lost=se,
                above=nats - 1,
            )
            for name, nats in nats_by_source.items()
        }
        rows.append(statement_of(f"text {number}", named, cells, number=number))
    names = {name for row in rows for name in row.cells}
    texts = {name: f"hash of {name}" for name in names}
    write_answers(folder, [answer_of(rows, texts, asked=asked)], **identity)
    return folder


def write_statement(
    folder: Path,
    cells: dict[str, StoredCell],
    named: list[str] | None = None,
    **changed: Any,
) -> Path:
    """Write the results of one question with one statement, and return their folder."""
    statement = statement_of("text", named or [], cells, **changed)
    texts = {name: f"hash of {name}" for name in cells}
    write_answers(folder, [answer_of([statement], texts)])
    return folder


def compare_answers(
    folder: Path, answer: StoredAnswer, earlier: StoredAnswer, /, **question: Any
) -> GateReport:
    """Compare an answer with that of an earlier run.

    question: Fields of the question in its file. By default it expects nothing.
    """
    write_answers(folder / "earlier", [earlier])
    write_answers(folder / "now", [answer])
    path = folder / "q.jsonl"
    record = {"sources": {}, "question": "q", "expect": None} | question
    path.write_text(json.dumps(record))
    return check(path, folder / "now", folder / "earlier")
