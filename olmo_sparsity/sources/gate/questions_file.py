"""Read a .jsonl file of questions: one JSON object a line.

Place in the flow: **`read_questions`** makes a request of each line, which questions.py answers.
**`read_lines`** yields the lines as they are, for expectations.py and questions.py. A line is a
question with its sources, or a log that ends with the answer:

    {"id": "t1", "sources": {"faq.md": "…"}, "question": "…", "answer": "…", "expect": "faq.md"}
    {"id": "t2", "messages": [{"role": "user", …}, …], "passages": "document", "expect": "none"}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from olmo_sparsity.analysis.explain.text_file import read_text
from olmo_sparsity.base.conform import conform
from olmo_sparsity.base.errors import ConfigError, DataError, UserError, one_line, printable
from olmo_sparsity.base.json_text import DuplicateKey, unique
from olmo_sparsity.sources.reading.answer_pieces import Answer
from olmo_sparsity.sources.reading.messages import read_messages
from olmo_sparsity.sources.reading.prompt_parts import Segment, parts_of
from olmo_sparsity.sources.reading.read_sources import read_turns
from olmo_sparsity.sources.reading.surrogates import check_no_lone_surrogates
from olmo_sparsity.sources.request import AttributeRequest, check_options_are_used

MOST_DECOYS = 200
"""Largest number of sources of other questions that are a question's decoys, if none are passed.
Decoys are joined to the length of a source, and by default eight are drawn, so more would only be
encoded in vain."""

FIELDS = (
    "id",
    "sources",
    "question",
    "answer",
    "reasoning",
    "expect",
    "messages",
    "message",
    "passages",
)
"""Fields of a question. A request to a chat API, with `messages`, may have others of its own."""

# The form of an answer with spans, for messages.
ANSWER_WITH_SPANS = '{"text": …, "spans": [[first, end], …]}'


@dataclass(frozen=True)
class QuestionLine:
    """A line of a questions file."""

    location: str
    """Path and number of the line, such as `questions.jsonl:3`, for messages."""

    record: dict[str, Any]
    raw: bytes
    """The line as it is written, in which numbers have all their digits."""

    @property
    def id(self) -> str:
        """The question's id; empty if the line has none."""
        return str(self.record.get("id", ""))


def read_questions(common: AttributeRequest, path: str | Path) -> list[AttributeRequest]:
    """Return a request for each line.

    Args:
        common: What all requests have in common. Without `decoys`, the decoys of each request are
            the sources of other lines.
        path: The file.
    """
    requests: list[AttributeRequest] = []
    for line in read_lines(path):
        try:
            request = replace(common, **_request_fields(line)).checked()
        except (UserError, ValueError) as error:
            raise DataError(f"{line.location}: {error}") from None
        requests.append(request)
    if not requests:
        raise DataError(f"{path} has no questions; write one JSON object a line")
    # Of all lines together: an option has an effect if one line needs it.
    check_options_are_used(requests)
    if common.decoys is None:
        return _with_decoys(requests)
    return requests


def read_lines(path: str | Path) -> Iterator[QuestionLine]:
    """Yield each line that is not blank, parsed and with its fields checked."""
    location_of_id: dict[str, str] = {}
    # Not splitlines: a text in JSON may hold U+2028.
    for number, raw in enumerate(read_text(str(path)).encode().split(b"\n"), start=1):
        if not raw.strip():
            continue
        line = _read_line(raw, f"{path}:{number}")

        # A baseline is compared by id, so questions must not share one.
        if line.id and line.id in location_of_id:
            raise DataError(
                f"{line.location} and {location_of_id[line.id]} have the same id, {line.id!r:.40}; "
                "give each question an id of its own, or omit it"
            )
        location_of_id[line.id] = line.location
        yield line


def _read_line(raw: bytes, location: str) -> QuestionLine:
    """Parse a line, and check its fields. `location`: path and number, for messages."""
    try:
        # A key that a line has twice would silently lose its first value.
        record = json.loads(raw, object_pairs_hook=unique)
    except DuplicateKey as error:
        raise DataError(f"{location}: {error}") from None
    except (ValueError, RecursionError) as error:
        reason = one_line(error)
        raise DataError(f"{location} is not JSON ({reason}); write one object a line") from None
    if not isinstance(record, dict):
        raise DataError(f"{location} is not a JSON object; write one object a line")

    # A lone surrogate, half of an emoji, would fail in the tokenizer without naming the line.
    try:
        for name, value in record.items():
            check_no_lone_surrogates(name, f"the field {printable(name)}")
            check_no_lone_surrogates(value, printable(name))
    except ConfigError as error:
        raise DataError(f"{location}: {error}") from None
    _check_fields(record, location)
    return QuestionLine(location, record, raw)


def _check_fields(record: dict[str, Any], location: str) -> None:
    """Raise DataError if a field has no effect: a misspelt `expect` would check nothing."""
    for name in record:
        if name in FIELDS:
            continue
        # `expects` for `expect` is a slip, also in a request to a chat API.
        similar = get_close_matches(name, FIELDS, n=1)
        # A request to a chat API has fields of its own, such as `model` and `tools`.
        if "messages" in record and not similar:
            continue
        remedy = f"did you mean {similar[0]}?" if similar else f"fields are {', '.join(FIELDS)}"
        raise DataError(f"{location} has the unknown field {name!r:.40}; {remedy}")

    # Python counts True as an int.
    id = record.get("id", "")
    if not isinstance(id, str | int) or isinstance(id, bool):
        raise DataError(f"{location}: id={id!r:.40} must be a text or a whole number")


def _request_fields(line: QuestionLine) -> dict[str, Any]:
    """Return the fields of `AttributeRequest` that a line determines. Raise DataError if it has not
    what a question needs, or fields that exclude each other."""
    record = line.record
    if "messages" in record:
        excluded = record.keys() & {"sources", "question", "answer", "reasoning"}
        if excluded:
            raise DataError(
                f"it has messages and {min(excluded)}, which messages hold; omit {min(excluded)}"
            )
        return {
            "messages": record,
            "message": record.get("message", -1),
            "passages": record.get("passages"),
        }

    for name in ("message", "passages"):
        if name in record:
            raise DataError(f"it has {name}, but no messages; omit it, or give messages")
    for name in ("sources", "question"):
        if name not in record:
            raise DataError(f"it has no {name}; it has {', '.join(record)}")
    if record["sources"] in ({}, []) and record.get("answer") is None:
        raise DataError("it has no sources and no answer; give the answer that is checked")
    return {
        "question": record["question"],
        "reasoning": record.get("reasoning"),
        "sources": _as_sources(record["sources"]),
        "answer": _as_answer(record.get("answer"), line.raw),
    }


def _as_answer(answer: Any, raw: bytes) -> str | list[str] | Answer | None:
    """Return an answer from JSON.

    Args:
        answer: The parsed field.
        raw: The line. A number in place of a text is taken as it is written there.
    """
    # JSON has no tuples, so spans are lists of two numbers.
    if isinstance(answer, dict) and set(answer) == {"text", "spans"}:
        spans = conform(answer["spans"], list[list[int]], "answer.spans")
        text = conform(answer["text"], str, "answer.text")
        if any(len(span) != 2 for span in spans):
            raise DataError(f"answer.spans={spans} must be pairs [first, end]")
        return Answer(text, [(first, end) for first, end in spans])
    # Read again with numbers as texts: 1.50 would become 1.5.
    as_written = json.loads(raw, parse_int=str, parse_float=str).get("answer")
    statements = as_written if isinstance(as_written, list) else [as_written]
    if as_written is None or all(isinstance(text, str) for text in statements):
        return as_written
    forms = f"null, text, number, list, or {ANSWER_WITH_SPANS}"
    raise DataError(f"answer={json.dumps(answer)[:60]} must be {forms}")


def _as_sources(sources: Any) -> Any:
    """Return sources from JSON as `attribute` takes them. Anything of another form is returned as
    it is, and `attribute` says what is wrong with it.

    {"faq.md": "…"}                      the same
    ["…", "…"]                           texts named source 1, source 2, …
    [{"name": …, "text": …, "id": …}]    a list, with a `Segment` for this object
    [{"page_content": …, "metadata": …}] a list, with an object like a document of LangChain
    [{"role": …, "content": […]}]        a list of messages, with such objects in their contents
    """
    if isinstance(sources, list):
        if all(isinstance(item, str) for item in sources):
            return {f"source {number}": text for number, text in enumerate(sources, start=1)}
        return [_as_source(item) for item in sources]
    # A mapping of names to texts. An object that lacks its list is not mistaken for one, whose
    # sources would be called "name" and "text": `attribute` refuses it.
    return _as_source(sources)


def _as_source(item: Any) -> Any:
    """Return one item of a list of sources as `attribute` takes it."""
    if isinstance(item, list):
        return _as_sources(item)
    if not isinstance(item, Mapping):
        return item
    if set(item) - {"id"} == {"name", "text"}:
        return _as_segment(item)
    if isinstance(item.get("metadata"), Mapping):
        # LangChain's key for the text is `page_content`, LlamaIndex's is `text`. Both are known by
        # their attributes (library_documents.py), which a mapping does not have.
        text = item.get("page_content", item.get("text"))
        return SimpleNamespace(text=text, metadata=item["metadata"])
    if isinstance(item.get("content"), list):
        return {**item, "content": [_as_source(part) for part in item["content"]]}
    return item


def _as_segment(item: Mapping[str, Any]) -> Segment:
    """Return a source with its name. `id` is one id of its document, or a list of several."""
    ids = conform(item.get("id", []), str | list[str], "id of a source")
    if isinstance(ids, str):
        ids = [ids]
    return Segment(item["name"], item["text"], tuple(ids))


def names_by_id(line: QuestionLine) -> dict[str, set[str]]:
    """Return, by each id of a document, the names of the sources that are chunks of it."""
    names: dict[str, set[str]] = {}
    fields = _request_fields(line)
    # Read here, not by making a request, which would print its warnings a second time.
    if "messages" in fields:
        log = read_messages(fields["messages"], fields["message"], fields["passages"])
        sources: Any = log.sources
    else:
        sources = fields["sources"]
    for part in parts_of(read_turns(sources)):
        for id in part.ids:
            names.setdefault(id, set()).add(part.name)
    return names


def _with_decoys(requests: list[AttributeRequest]) -> list[AttributeRequest]:
    """Return the requests with the sources of other requests as decoys. Those of later lines come
    first, so that not all requests get the same ones where there are more than needed:

        request   0      1      2
        decoys    1, 2   2, 0   0, 1      the requests whose sources they are
    """
    texts_of_requests = [_source_texts(request) for request in requests]
    with_decoys: list[AttributeRequest] = []
    for index, request in enumerate(requests):
        # Its own sources are left out: a decoy that is the source would change nothing.
        decoys: list[str] = []
        for texts in [*texts_of_requests[index + 1 :], *texts_of_requests[:index]]:
            decoys += texts
        with_decoys.append(replace(request, decoys=decoys[:MOST_DECOYS]))
    return with_decoys


def _source_texts(request: AttributeRequest) -> list[str]:
    """Return the texts of a request's sources, without those that stay in view."""
    return [part.text for part in parts_of(read_turns(request.sources)) if part.is_source]
