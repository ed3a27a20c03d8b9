"""Attribute the answers to many questions: a .jsonl file → **tables of all statements**.
Each finished question is one file, so that a killed run resumes, and processes share a folder."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.explain.prompt import read_text
from olmo_sparsity.analysis.results.tables import plain, write_json
from olmo_sparsity.analysis.results.view import escape
from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.base.conform import conform, unique, with_crc
from olmo_sparsity.base.errors import DataError, UserError
from olmo_sparsity.base.files import read_json, sha256_of, write_atomically, writing
from olmo_sparsity.base.folders import WorkFolder
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.base.provenance import versions_of_numbers
from olmo_sparsity.base.streams import VERSION as STREAMS
from olmo_sparsity.models.loaded import LoadedModel, identity_of, using
from olmo_sparsity.sources.documents import Answer, Segment, read_turns
from olmo_sparsity.sources.segments import AttributeRequest, statement_texts
from olmo_sparsity.sources.statements import Attributing, Attribution, cost_of
from olmo_sparsity.text.inputs import open_documents

MOST_DECOYS = 200  # sources of other questions, by default
VERSION = 3  # of stored answers; grows when a verdict may become another one, or a key changes

IDENTITY = "identity.json"
FIELDS = (
    *("id", "sources", "question", "answer", "reasoning", "expect"),
    *("messages", "message", "passages"),
)
"""Fields of a question. A request to a chat API, with `messages`, may have others of its own."""

FORM = '{"text": …, "spans": [[first, end], …]}'


def measure_questions(
    common: AttributeRequest,
    questions: str | Path,
    out: str | Path,
    *,
    shard: tuple[int, int] = (0, 1),
    pages: Path | None = None,
) -> pd.DataFrame | None:
    """Explain each question of a .jsonl file (docs/sources.md). Writes statements.parquet and
    matrix.parquet into `out`, and returns the first; None: other processes have questions left.
    `common`: a loaded model, options, and `decoys`; default: the sources of other questions.
    `pages`: a folder that gets a page for each question; a question without its page is asked
    again."""
    requests, model = read_questions(common, questions), common.model
    ids = [str(record.get("id", "")) for _, record, _ in read_objects(questions)]
    folder = WorkFolder(Path(out), "out", IDENTITY)
    folder.create("questions")
    files = [_file(folder.path, number) for number in range(len(requests))]
    mine = range(len(requests))[shard[0] :: shard[1]]
    written = [
        file.exists() and (not pages or _page(pages, n).exists()) for n, file in enumerate(files)
    ]
    with using(model), Progress("explaining", len(mine), "questions") as progress:
        about = identity_of_questions(common, questions)
        identity = folder.identify(about, versions=versions_of_numbers())
        if model.engine is not None:
            model.engine.recognize_in(folder.path)
        progress.resume_at(sum(written[number] for number in mine))
        for number in (number for number in mine if not written[number]):
            answer, tables = _answered(model, requests[number], number, ids[number], pages)
            stored = {"question": number, "identity": identity, "gate": asdict(answer)} | tables
            write_json(files[number], with_crc(plain(stored)))
            progress.update(progress.done + 1)
    if not all(file.exists() for file in files):
        return None
    statements = _sum_up(folder.path, len(files))
    if pages is not None:
        write_index(pages, out)
    return statements


def _answered(
    model: LoadedModel, request: AttributeRequest, number: int, id: str, pages: Path | None
) -> tuple[StoredAnswer, dict[str, Any]]:
    """Return a question's answer as it is stored, and its tables."""
    if not read_turns(request.sources):
        assert request.answer is not None
        texts = statement_texts(model, request.answer)
        answer = StoredAnswer.without_sources(number, request.asked, texts, id)
        if pages is not None:
            said = f"{request.asked}: the prompt has no sources, so no statement rests on one"
            write_atomically(_page(pages, number), f"{HEAD}<p>{escape(said)}</p></html>\n")
        columns = ("text", "nats", "kind", "sources", "open", "verdict", "origins")
        rows = [{key: getattr(row, key) for key in columns} for row in answer.statements]
        return answer, {"statements": rows, "matrix": []}
    began = time.monotonic()
    found = Attributing(model, request, quiet=True).run()
    seconds = time.monotonic() - began
    if pages is not None:
        found.to_html(_page(pages, number))
    return StoredAnswer.of(number, request.asked, found, id, seconds), found.to_dict()


def count_questions(common: AttributeRequest, questions: str | Path) -> Cost:
    """Count what `measure_questions` costs in all."""
    requests, model = read_questions(common, questions), common.model
    with_sources = [request for request in requests if read_turns(request.sources)]
    if not with_sources:
        raise DataError(f"{questions}: no question has sources, so there is nothing to count")
    return cost_of([Attributing(model, request, quiet=True) for request in with_sources])


def identity_of_questions(common: AttributeRequest, questions: str | Path) -> dict[str, Any]:
    """Return what results are of: model, tokenizer, template, questions, settings, decoys."""
    asked = [
        # These may change later.
        {key: value for key, value in record.items() if key not in ("expect", "id")}
        for _, record, _ in read_objects(questions)
    ]
    texts, decoys = common.decoys, None
    if texts is not None:
        texts = list(texts.values()) if isinstance(texts, Mapping) else texts
        decoys = open_documents(texts, common.model, limit=MOST_DECOYS).fingerprint
    return identity_of(common.model) | {
        "version": VERSION,
        "random_streams": STREAMS,
        "questions": _sha256(asked),
        "num_questions": len(asked),
        "settings": asdict(common.settings),
        "prefix": common.loading.prefix,
        "decoys": decoys,
    }


def describe(statements: pd.DataFrame) -> str:
    """Return the shares of verdicts as text for a terminal."""
    spelt = {"one": "one source", "either": "either of several", "both": "several together"}
    lines = [f"{len(statements):,} statements of {statements.question.nunique():,} questions"]
    shares = statements.kind.value_counts(normalize=True)
    for kind, words in (spelt | {"none": "no source"}).items():
        lines.append(f"  {shares.get(kind, 0.0):6.1%} rest on {words}")
    lines.append(f"  {shares.get('undecided', 0.0):6.1%} are undecided")
    return "\n".join(lines)


def read_questions(common: AttributeRequest, path: str | Path) -> list[AttributeRequest]:
    """Return a request for each line. Without `decoys`, these are the sources of other lines."""
    found = list[AttributeRequest]()
    for where, record, line in read_objects(path):
        try:
            found.append(replace(common, **_own_fields(record, line)).checked())
        except (UserError, ValueError) as error:
            raise DataError(f"{where}: {error}") from None
    if not found:
        raise DataError(f"{path} has no questions; write one JSON object a line")
    if common.decoys is not None:
        return found
    named = [[p.text for t in read_turns(one.sources) for p in t.parts if p.name] for one in found]
    return [
        replace(one, decoys=[*chain(*named[i + 1 :], *named[:i])][:MOST_DECOYS])
        for i, one in enumerate(found)
    ]


def _own_fields(record: dict[str, Any], line: bytes) -> dict[str, Any]:
    if "messages" in record:
        if given := record.keys() & {"sources", "question", "answer", "reasoning"}:
            raise DataError(f"it has messages and {min(given)}; omit one")
        found = {"messages": record, "message": record.get("message", -1)}
        return found | {"passages": record.get("passages")}
    if missing := [name for name in ("sources", "question") if name not in record]:
        raise DataError(f"it has no {missing[0]}; it has {', '.join(record)}")
    if record["sources"] in ({}, []) and record.get("answer") is None:
        raise DataError("it has no sources and no answer; give the answer that is checked")
    found = {name: record.get(name) for name in ("question", "reasoning")}
    sources, answer = _as_sources(record["sources"]), _as_answer(record.get("answer"), line)
    return found | {"sources": sources, "answer": answer}


def _as_answer(answer: Any, line: bytes) -> str | list[str] | Answer | None:
    """Return an answer from JSON; a number is the text that the file has."""
    if isinstance(answer, dict) and set(answer) == {"text", "spans"}:
        spans = conform(answer["spans"], list[list[int]], "answer.spans")
        text = conform(answer["text"], str, "answer.text")
        return Answer(text, [(first, end) for first, end in spans])
    found = json.loads(line, parse_int=str, parse_float=str).get("answer")
    texts = found if isinstance(found, list) else [found]
    if found is None or all(isinstance(text, str) for text in texts):
        return found
    raise DataError(f"answer={json.dumps(answer)[:60]} must be null, text, number, list, or {FORM}")


def _as_sources(sources: Any) -> Any:
    """Return sources from JSON: {"name": …, "text": …} is a Segment, also within messages; a list
    of texts alone has no names of its own."""
    if isinstance(sources, list):
        if all(isinstance(item, str) for item in sources):
            return {f"source {i}": text for i, text in enumerate(sources, start=1)}
        return [_as_sources(item) for item in sources]
    if isinstance(sources, Mapping) and set(sources) == {"name", "text"}:
        return Segment(sources["name"], sources["text"])
    if isinstance(sources, Mapping) and isinstance(sources.get("content"), list):
        return {**sources, "content": [*map(_as_sources, sources["content"])]}
    return sources


def read_objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any], bytes]]:
    """Yield the place of each line that is not blank, its JSON object, and the line."""
    # Not splitlines: a text in JSON may hold U+2028.
    for number, line in enumerate(read_text(str(path)).encode().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=unique)
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(f"{path}:{number} holds half of a surrogate pair, no text") from None
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number} is not a JSON object")
        _refuse_unknown(record, f"{path}:{number}")
        yield f"{path}:{number}", record, line


def _refuse_unknown(record: dict[str, Any], where: str) -> None:
    """Raise where a field has no effect: a misspelt `expect` would check nothing."""
    for name in record:
        near = get_close_matches(name, FIELDS, n=1)
        # A request to a chat API has fields of its own, such as `model` and `tools`.
        if name in FIELDS or ("messages" in record and not near):
            continue
        remedy = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(FIELDS)}"
        raise DataError(f"{where} has the unknown field {name!r:.40}; {remedy}")
    id = record.get("id", "")
    if not isinstance(id, str | int) or isinstance(id, bool):
        raise DataError(f"{where}: id={id!r:.40} must be a text or a whole number")


@dataclass(frozen=True)
class StoredCell:
    """Numbers of a statement and a source; see docs/sources.md."""

    gives: float | None
    lost: float | None
    se_gives: float | None
    se_lost: float | None
    above: float | None

    @property
    def means(self) -> list[tuple[float, float] | None]:
        """What the source gives, and what is lost, with standard errors; None: not evaluated."""
        pairs = (self.gives, self.se_gives), (self.lost, self.se_lost)
        return [None if nats is None or se is None else (nats, se) for nats, se in pairs]

    @property
    def most(self) -> float:
        return max((nats for nats in (self.gives, self.lost) if nats is not None), default=-inf)


@dataclass(frozen=True)
class StoredStatement:
    number: int
    text: str
    kind: str
    nats: float  # that all sources give
    sources: list[str]
    open: list[str]  # sources that are neither named nor excluded
    origins: list[str]
    is_undecided: bool  # the statement, or a sentence of the reasoning that it relies on
    verdict: str
    cells: dict[str, StoredCell]  # by source

    @property
    def rests_on_none(self) -> bool:
        return not self.origins and not self.is_undecided

    @property
    def most(self) -> float:
        """The largest effect: of all sources together, or of one of them."""
        return max([self.nats, *(cell.most for cell in self.cells.values())])


@dataclass(frozen=True)
class StoredAnswer:
    """The key `gate` of a file of `questions/`."""

    question: int
    id: str
    asked: str
    seconds: float
    source_texts: dict[str, str]  # hashes, by source
    statements: list[StoredStatement]

    @staticmethod
    def of(
        number: int, asked: str, found: Attribution, id: str = "", seconds: float = 0.0
    ) -> StoredAnswer:
        numbers = found.matrix[[item.name for item in fields(StoredCell)]]
        statements = [
            StoredStatement(
                number=row.Index,
                text=row.text,
                kind=row.kind,
                nats=row.nats,
                sources=row.sources,
                open=row.open,
                origins=row.origins,
                is_undecided=found.is_undecided(row),
                verdict=row.verdict,
                cells={n: StoredCell(*cell) for n, *cell in numbers.loc[row.Index].itertuples()},
            )
            for row in found.statements.itertuples()
        ]
        hashes = {name: _sha256(found.source_text(i)) for i, name in enumerate(found.names)}
        return StoredAnswer(number, id, asked, seconds, hashes, statements)

    @staticmethod
    def without_sources(
        number: int, asked: str, texts: Sequence[str], id: str = ""
    ) -> StoredAnswer:
        """Return the answer to a question whose prompt has no sources: statements rest on none."""
        statements = [
            StoredStatement(
                number=i,
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
            for i, text in enumerate(texts)
        ]
        return StoredAnswer(number, id, asked, 0.0, {}, statements)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(statement.text for statement in self.statements)


def identity_in(folder: str | Path) -> dict[str, Any]:
    """Return what `identity_of_questions` was of the results in a folder."""
    found = read_json(Path(folder) / IDENTITY, dict, "measure the questions again")
    if found.get("version") != VERSION or not isinstance(found.get("num_questions"), int):
        raise DataError(f"{folder} is not of version {VERSION}; measure the questions again")
    return found


def read_answers(folder: str | Path) -> list[StoredAnswer]:
    """Return the answers of finished results."""
    found = list[StoredAnswer]()
    for file, stored in _stored(Path(folder), identity_in(folder)["num_questions"]):
        try:
            found.append(conform(stored.get("gate"), StoredAnswer))
        except ValueError as error:
            raise DataError(f"{file}: {error}; measure the questions again") from None
    return found


HEAD = '<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>Questions</title>\n'


def _stored(folder: Path, num_questions: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    identity = sha256_of(folder / IDENTITY)
    for number in range(num_questions):
        file = _file(folder, number)
        stored = read_json(file, dict, "delete it, and run again")
        if (stored.get("question"), stored.get("identity")) != (number, identity):
            raise DataError(f"{file} is of other questions or settings; delete it, and run again")
        yield file, stored


def _file(folder: Path, number: int) -> Path:
    return folder / "questions" / f"{number:06d}.json"


def _page(pages: Path, number: int) -> Path:
    return pages / f"{number:06d}.html"


def write_index(
    pages: str | Path, out: str | Path, passes: Mapping[int, bool] | None = None
) -> None:
    """Write the page that lists the questions: how many statements rest on a source, how many are
    undecided. `passes`: by question, from 0, whether its checks passed."""
    titles = ["question", "statements", "rest on a source", "undecided"]
    titles += [] if passes is None else ["checks"]
    lines = ["".join(f"<th>{title}</th>" for title in titles)]
    for answer in read_answers(out):
        rows = answer.statements
        num_undecided = sum(row.is_undecided for row in rows)
        num_sourced = sum(not row.is_undecided and bool(row.sources) for row in rows)
        asked = f"{answer.id}: {answer.asked}" if answer.id else answer.asked
        page = _page(Path(), answer.question)
        cells = [f'<a href="{page}">{escape(asked)}</a>', len(rows), num_sourced, num_undecided]
        if passes is not None:
            words = {True: "passed", False: "failed", None: "none"}
            cells.append(words[passes.get(answer.question)])
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    text = "\n".join(f"<tr>{line}</tr>" for line in lines)
    write_atomically(Path(pages) / "index.html", f"{HEAD}<table>\n{text}\n</table></html>\n")


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _sum_up(folder: Path, num_questions: int) -> pd.DataFrame:
    read, tables = [one for _, one in _stored(folder, num_questions)], {}
    for name in ("statements", "matrix"):
        rows = [pd.DataFrame(one[name]).assign(question=i) for i, one in enumerate(read)]
        tables[name] = pd.concat(rows, ignore_index=True)
        with writing(folder / f"{name}.parquet") as partial:
            tables[name].to_parquet(partial)
    return tables["statements"]
