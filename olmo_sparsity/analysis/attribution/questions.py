"""Report which source each statement relies on, for the answers to many questions.

Place in the flow: a .jsonl file of sources, questions and answers → **tables of all statements**.

Each finished question is one file, so that a killed run resumes, and processes share a folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.attribution.segments import Answer, Segment
from olmo_sparsity.analysis.attribution.statements import Attributing, Question
from olmo_sparsity.analysis.explain.prompt import read_text
from olmo_sparsity.analysis.inputs.texts import open_documents
from olmo_sparsity.analysis.models.load import LoadedModel, using
from olmo_sparsity.analysis.results.tables import plain, write_json
from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.analysis.settings import ModelOptions, SourceSettings
from olmo_sparsity.conform import unique, with_crc
from olmo_sparsity.errors import DataError
from olmo_sparsity.folders import WorkFolder
from olmo_sparsity.io import read_json, writing
from olmo_sparsity.runtime import Progress, versions_of_numbers
from olmo_sparsity.streams import VERSION

MOST_DECOYS = 200
"""Sources of so many other texts are decoys of a question, by default."""


def measure_questions(
    model: LoadedModel,
    questions: str | Path,
    out: str | Path,
    settings: SourceSettings,
    options: ModelOptions,
    *,
    decoys: Any = None,
    shard: tuple[int, int] = (0, 1),
) -> pd.DataFrame | None:
    """Explain each question of a .jsonl file, a line for each: `sources`, {name: text, …} or a list
    of texts, or as in `attribute`, a Segment being {"name": …, "text": …}; `question`; `answer`, a
    text or a list of statements, or none; `reasoning`, or none. Writes statements.parquet and
    matrix.parquet into `out`, and returns the first; None: other processes have questions left.
    `decoys`: as in `attribute`; default: the sources of other questions.
    """
    settings.check()
    parsed = _with_decoys(read_questions(questions), decoys)
    folder = WorkFolder(Path(out), "out", "identity.json")
    folder.create("questions")
    about = {
        "questions": _fingerprint_questions(questions),
        "settings": asdict(settings),
        "prefix": options.prefix,
        "random_streams": VERSION,
    }
    files = [folder.path / "questions" / f"{number:06d}.json" for number in range(len(parsed))]
    mine = range(len(parsed))[shard[0] :: shard[1]]
    with using(model), Progress("explaining", len(mine), "questions") as progress:
        about |= {"model": model.fingerprint, "dtype": model.dtype}
        about |= {"decoys": _fingerprint(decoys, model)}
        identity = folder.identify(about, versions=versions_of_numbers())
        if model.engine is not None:
            model.engine.recognize_in(folder.path)
        progress.resume_at(sum(files[number].exists() for number in mine))
        for number in (number for number in mine if not files[number].exists()):
            found = Attributing(model, parsed[number], settings, options, quiet=True).run()
            answered = {"question": number, "identity": identity} | found.to_dict()
            write_json(files[number], with_crc(plain(answered)))
            progress.update(progress.done + 1)
    return _sum_up(folder.path, files, identity) if all(file.exists() for file in files) else None


def count_questions(
    model: LoadedModel,
    questions: str | Path,
    settings: SourceSettings,
    options: ModelOptions,
    decoys: Any = None,
) -> Cost:
    """Count what `measure_questions` costs in all."""
    parsed = _with_decoys(read_questions(questions), decoys)
    costs = [Attributing(model, one, settings, options, quiet=True).cost() for one in parsed]
    return Cost(sum(cost.token_forwards for cost in costs), model.num_parameters)


def describe(statements: pd.DataFrame) -> str:
    """Return the shares of verdicts as text for a terminal."""
    spelt = {
        "one": "one source",
        "either": "either of several",
        "both": "several together",
        "none": "no source",
    }
    lines = [f"{len(statements):,} statements of {statements.question.nunique():,} questions"]
    shares = statements.kind.value_counts(normalize=True)
    lines += [f"  {shares.get(kind, 0.0):6.1%} rest on {words}" for kind, words in spelt.items()]
    return "\n".join(lines)


def read_questions(path: str | Path) -> list[Question]:
    found = []
    for where, record, line in read_objects(path):
        if "messages" in record:
            found.append(Question.of_log(record, record.get("message", -1)))
            continue
        if missing := [name for name in ("sources", "question") if name not in record]:
            raise DataError(f"{where} has no {missing[0]}; it has {', '.join(record)}")
        as_written = json.loads(line, parse_int=str, parse_float=str)
        answer = _as_answer(as_written.get("answer"), where)
        sources = _as_sources(record["sources"])
        reasoning = record.get("reasoning")
        if reasoning is not None and not isinstance(reasoning, str):
            raise DataError(f"{where}: reasoning={reasoning!r:.60} must be a text")
        found.append(Question(sources, record["question"], answer, reasoning=reasoning))
    return found


def _as_answer(answer: Any, where: str) -> str | list[str] | Answer | None:
    """Return an answer from JSON; a number is the text that the file has."""
    texts = answer if isinstance(answer, list) else [answer]
    if answer is None or all(isinstance(text, str) for text in texts):
        return answer
    if isinstance(answer, dict) and set(answer) == {"text", "spans"}:
        return Answer(answer["text"], [(int(first), int(end)) for first, end in answer["spans"]])
    raise DataError(
        f"{where}: answer={json.dumps(answer)[:80]} must be a text, a number, a list of these (its "
        'statements), {"text": …, "spans": [[first, end], …]}, or null for the model\'s own; write '
        "other values as text"
    )


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


def _texts(sources: Any) -> list[str]:
    """Return the texts of named sources, which are decoys of other questions."""
    if isinstance(sources, Mapping) and not {"role", "content"} <= set(sources):
        return list(sources.values())
    parts = sources.get("content") if isinstance(sources, Mapping) else sources
    if isinstance(parts, list):
        return [text for part in parts for text in _texts(part)]
    return [parts.text] if isinstance(parts, Segment) else []


def _with_decoys(parsed: Sequence[Question], decoys: Any) -> list[Question]:
    if decoys is not None:
        return [replace(one, decoys=decoys) for one in parsed]
    texts = [_texts(one.sources) for one in parsed]
    given = []
    for number, one in enumerate(parsed):
        others = [text for of_one in (*texts[number + 1 :], *texts[:number]) for text in of_one]
        given.append(replace(one, decoys=others[:MOST_DECOYS]))
    return given


def _fingerprint_questions(path: str | Path) -> str:
    """Return a hash of what is measured; what a gate expects may change later."""
    kept = [
        {key: value for key, value in record.items() if key != "expect"}
        for _, record, _ in read_objects(path)
    ]
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()


def read_objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any], bytes]]:
    """Yield the place of each line that is not blank, its JSON object, and the line."""
    # Not splitlines: a text in JSON may hold U+2028.
    for number, line in enumerate(read_text(str(path)).encode().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=unique)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number} is not a JSON object")
        yield f"{path}:{number}", record, line


def _fingerprint(decoys: Any, model: LoadedModel) -> str | None:
    """Return a hash of the text, which may change while its name stays."""
    if decoys is None:
        return None
    given = list(decoys.values()) if isinstance(decoys, Mapping) else decoys
    return open_documents(given, model, limit=MOST_DECOYS).fingerprint


def _sum_up(folder: Path, files: Sequence[Path], identity: str) -> pd.DataFrame:
    remedy = "delete it, and run again"
    read = [read_json(file, dict, remedy) for file in files]
    for number, (file, one) in enumerate(zip(files, read, strict=True)):
        if (one.get("question"), one.get("identity")) != (number, identity):
            raise DataError(f"{file} is of another question or measurement; {remedy}")
    tables = {}
    for name in ("statements", "matrix"):
        rows = [pd.DataFrame(one[name]).assign(question=i) for i, one in enumerate(read)]
        tables[name] = pd.concat(rows, ignore_index=True)
        with writing(folder / f"{name}.parquet") as partial:
            tables[name].to_parquet(partial)
    return tables["statements"]
