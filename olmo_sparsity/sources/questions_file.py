"""Read a .jsonl file of questions: one JSON object a line → **a request for each**.

Place in the flow: questions.py answers the requests; gate.py reads what the lines expect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from olmo_sparsity.analysis.explain.prompt import read_text
from olmo_sparsity.base.conform import conform, unique
from olmo_sparsity.base.errors import DataError, UserError
from olmo_sparsity.sources.documents import Answer, Segment, read_turns
from olmo_sparsity.sources.request import AttributeRequest

MOST_DECOYS = 200
"""Without decoys, so many sources of other questions are a question's decoys at most."""

FIELDS = (
    *("id", "sources", "question", "answer", "reasoning", "expect"),
    *("messages", "message", "passages"),
)
"""Fields of a question. A request to a chat API, with `messages`, may have others of its own."""

ANSWER_WITH_SPANS = '{"text": …, "spans": [[first, end], …]}'


def read_questions(common: AttributeRequest, path: str | Path) -> list[AttributeRequest]:
    """Return a request for each line: `common` with the line's sources, question and answer.
    Without `decoys`, these are the sources of other lines."""
    requests = list[AttributeRequest]()
    for where, record, line in read_objects(path):
        try:
            requests.append(replace(common, **_request_fields(record, line)).checked())
        except (UserError, ValueError) as error:
            raise DataError(f"{where}: {error}") from None
    if not requests:
        raise DataError(f"{path} has no questions; write one JSON object a line")
    if common.decoys is None:
        return _with_decoys(requests)
    return requests


def read_objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any], bytes]]:
    """Yield the place of each line that is not blank, its JSON object, and the line."""
    # Not splitlines: a text in JSON may hold U+2028.
    for number, line in enumerate(read_text(str(path)).encode().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line, object_pairs_hook=unique)
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(f"{where} holds half of a surrogate pair, no text") from None
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise DataError(f"{where} is not a JSON object; write one object a line, no key twice")
        _refuse_unknown(record, where)
        yield where, record, line


def _refuse_unknown(record: dict[str, Any], where: str) -> None:
    """Raise where a field has no effect: a misspelt `expect` would check nothing."""
    for name in record:
        if name in FIELDS:
            continue
        similar = get_close_matches(name, FIELDS, n=1)
        # A request to a chat API has fields of its own, such as `model` and `tools`.
        if "messages" in record and not similar:
            continue
        remedy = f"the fields are {', '.join(FIELDS)}"
        if similar:
            remedy = f"did you mean {similar[0]}?"
        raise DataError(f"{where} has the unknown field {name!r:.40}; {remedy}")
    id = record.get("id", "")
    if not isinstance(id, str | int) or isinstance(id, bool):
        raise DataError(f"{where}: id={id!r:.40} must be a text or a whole number")


def _request_fields(record: dict[str, Any], line: bytes) -> dict[str, Any]:
    """Return the fields of `AttributeRequest` that a line gives."""
    if "messages" in record:
        excluded = record.keys() & {"sources", "question", "answer", "reasoning"}
        if excluded:
            raise DataError(f"it has messages and {min(excluded)}; omit one")
        return {
            "messages": record,
            "message": record.get("message", -1),
            "passages": record.get("passages"),
        }
    for name in ("sources", "question"):
        if name not in record:
            raise DataError(f"it has no {name}; it has {', '.join(record)}")
    if record["sources"] in ({}, []) and record.get("answer") is None:
        raise DataError("it has no sources and no answer; give the answer that is checked")
    return {
        "question": record["question"],
        "reasoning": record.get("reasoning"),
        "sources": _as_sources(record["sources"]),
        "answer": _as_answer(record.get("answer"), line),
    }


def _as_answer(answer: Any, line: bytes) -> str | list[str] | Answer | None:
    """Return an answer from JSON; a number is the text that the file has."""
    if isinstance(answer, dict) and set(answer) == {"text", "spans"}:
        spans = conform(answer["spans"], list[list[int]], "answer.spans")
        text = conform(answer["text"], str, "answer.text")
        return Answer(text, [(first, end) for first, end in spans])
    # Read again with numbers as texts: 1.50 would become 1.5.
    as_written = json.loads(line, parse_int=str, parse_float=str).get("answer")
    statements = as_written if isinstance(as_written, list) else [as_written]
    if as_written is None or all(isinstance(text, str) for text in statements):
        return as_written
    forms = f"null, text, number, list, or {ANSWER_WITH_SPANS}"
    raise DataError(f"answer={json.dumps(answer)[:60]} must be {forms}")


def _as_sources(sources: Any) -> Any:
    """Return sources from JSON: {"name": …, "text": …} is a Segment, also within messages; a list
    of texts alone has no names of its own, so they are numbered."""
    if isinstance(sources, list):
        if all(isinstance(item, str) for item in sources):
            return {f"source {i}": text for i, text in enumerate(sources, start=1)}
        return [_as_sources(item) for item in sources]
    if isinstance(sources, Mapping) and set(sources) == {"name", "text"}:
        return Segment(sources["name"], sources["text"])
    if isinstance(sources, Mapping) and isinstance(sources.get("content"), list):
        return {**sources, "content": [*map(_as_sources, sources["content"])]}
    return sources


def _with_decoys(requests: list[AttributeRequest]) -> list[AttributeRequest]:
    """Return the requests with the named sources of the others as decoys, later lines first, so
    that neighbours do not all get the same."""
    texts = [_named_texts(request) for request in requests]
    return [
        replace(request, decoys=_joined([*texts[i + 1 :], *texts[:i]])[:MOST_DECOYS])
        for i, request in enumerate(requests)
    ]


def _named_texts(request: AttributeRequest) -> list[str]:
    return [
        part.text
        for turn in read_turns(request.sources)
        for part in turn.parts
        if part.name  # a text without a name is no source
    ]


def _joined(lists: list[list[str]]) -> list[str]:
    return [text for texts in lists for text in texts]
