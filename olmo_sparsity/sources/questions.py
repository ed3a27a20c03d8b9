"""Attribute the answers to many questions: a .jsonl file → **tables of all statements**.
Each finished question is one file, so that a killed run resumes, and processes share a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
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
from olmo_sparsity.models.loaded import identity_of, using
from olmo_sparsity.sources.documents import Answer, Segment, read_turns
from olmo_sparsity.sources.segments import AttributeRequest
from olmo_sparsity.sources.statements import Attributing, Attribution, cost_of
from olmo_sparsity.text.inputs import open_documents

MOST_DECOYS = 200  # sources of other questions, by default
VERSION = 2  # of stored answers; grows when a verdict may become another one, or a key changes

IDENTITY = "identity.json"
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
            found = Attributing(model, requests[number], quiet=True).run()
            if pages is not None:
                found.to_html(_page(pages, number))
            about = asdict(StoredAnswer.of(number, requests[number].asked, found))
            stored = {"question": number, "identity": identity, "gate": about} | found.to_dict()
            write_json(files[number], with_crc(plain(stored)))
            progress.update(progress.done + 1)
    if not all(file.exists() for file in files):
        return None
    statements = _sum_up(folder.path, len(files))
    if pages is not None:
        _write_index(pages, [request.asked for request in requests], statements)
    return statements


def count_questions(common: AttributeRequest, questions: str | Path) -> Cost:
    """Count what `measure_questions` costs in all."""
    requests, model = read_questions(common, questions), common.model
    return cost_of([Attributing(model, one, quiet=True) for one in requests])


def identity_of_questions(common: AttributeRequest, questions: str | Path) -> dict[str, Any]:
    """Return what results are of: model, tokenizer, template, questions, settings, decoys."""
    asked = [
        {key: value for key, value in record.items() if key != "expect"}  # that may change later
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
        return {"messages": record, "message": record.get("message", -1)}
    if missing := [name for name in ("sources", "question") if name not in record]:
        raise DataError(f"it has no {missing[0]}; it has {', '.join(record)}")
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
        yield f"{path}:{number}", record, line


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
    sources: list[str]
    origins: list[str]
    verdict: str
    cells: dict[str, StoredCell]  # by source


@dataclass(frozen=True)
class StoredAnswer:
    """The key `gate` of a file of `questions/`."""

    question: int
    asked: str
    source_texts: dict[str, str]  # hashes, by source
    statements: list[StoredStatement]

    @staticmethod
    def of(number: int, asked: str, found: Attribution) -> StoredAnswer:
        numbers = found.matrix[[item.name for item in fields(StoredCell)]]
        statements = [
            StoredStatement(
                row.Index, row.text, row.sources, row.origins, row.verdict,
                {name: StoredCell(*cell) for name, *cell in numbers.loc[row.Index].itertuples()},
            )
            for row in found.statements.itertuples()
        ]  # fmt: skip
        hashes = {name: _sha256(found.source_text(i)) for i, name in enumerate(found.names)}
        return StoredAnswer(number, asked, hashes, statements)

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


def _write_index(pages: Path, asked: list[str], statements: pd.DataFrame) -> None:
    """A line for each question: how many of its statements rest on a source."""
    rests, lines = statements.kind.ne("none").groupby(statements.question), list[str]()
    for number, (num, of) in enumerate(zip(rests.sum(), rests.size(), strict=True)):
        said = f"{asked[number]} ({num} of {of} statements rest on a source)"
        lines.append(f'<li><a href="{_page(Path(), number)}">{escape(said)}</a></li>')
    text = "\n".join(lines)
    head = '<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>Questions</title>\n'
    write_atomically(pages / "index.html", f"{head}<ol start=0>\n{text}\n</ol></html>\n")


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
