"""Read the log of an agent: which blocks and tool outputs did a message rely on?

Place in the flow: messages as OpenAI's or Anthropic's API takes them → **sources and an answer**
(`read_messages`) → request.py. Of a log, these become

    system                 sources: its blocks, named "system: Rules" by their headings
    user                   a source, named "user: What is …"
    assistant              in view
    tool                   a source, named "tool: search"
    user, the last one     in view, but for `passages`
    assistant              the answer
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from olmo_sparsity.analysis.explain.prompt import read_text
from olmo_sparsity.base.conform import DuplicateKey, unique
from olmo_sparsity.base.errors import ConfigError, DataError, one_line, printable
from olmo_sparsity.sources.documents import Segment

HEADING = re.compile(r"^(?=#{1,6} |<\w[\w-]*>\s*$)", re.MULTILINE)
"""Matches the place before a heading of Markdown, or a tag that is alone in its line."""

NAME_ATTRIBUTE = re.compile(r"""\b(?:title|name|source|id|index)=["']([^"']+)["']""")
"""An attribute of a passage's tag that names it."""

NAME_LENGTH = 32
"""Largest number of characters of the name of a block."""

KEYS_OF_THE_API = {
    *("role", "content"),  # read by themselves
    *("id", "type", "model", "stop_reason", "stop_sequence", "refusal"),  # written by no template
}

Messages = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A list of messages; or a request with `messages`, and with `system` as Anthropic writes it."""

Message = dict[str, Any]
"""A message as chat templates take it, with a list `texts` in place of `content`."""


class LoggedAnswer(NamedTuple):
    """A message of a log as the answer to what precedes it."""

    sources: list[Any]
    """The messages before it, whose named parts are sources."""

    answer: str
    reasoning: str | None
    """What the message says as its reasoning, in tags."""


def read_messages(
    messages: Messages, number: int = -1, passages: str | None = None
) -> LoggedAnswer:
    """Return the message of this number as an answer.

    passages: A tag or a regular expression of passages in the last message of the user, which are
        sources, too.
    """
    log = _as_log(messages)
    if type(number) is not int or not -len(log) <= number < len(log):
        raise ConfigError(f"message={number}: the log has messages 0 to {len(log) - 1}")
    number = range(len(log))[number]
    message = log[number]
    answer = "\n\n".join(text.strip() for text in message["texts"] if text.strip())
    if message["role"] != "assistant" or not answer:
        condition = "" if answer else ", without text"
        raise ConfigError(
            f"message={number} is of {printable(message['role'])}{condition}; give the number of a "
            "message that is text of the assistant"
        )
    sources = _SourceNamer(log[:number], passages).sources()
    thought = message.get("reasoning_content")
    # In the tags by which `attribute` tells reasoning from the answer.
    reasoning = f"<think>\n{thought.strip()}\n</think>\n\n" if thought else None
    return LoggedAnswer(sources, answer, reasoning)


class _SourceNamer:
    """Names the parts of messages that are sources."""

    def __init__(self, log: Sequence[Message], passages: str | None) -> None:
        self.log = log
        self.passages = passages
        self.counts = Counter[str]()
        """How often each name was given."""

        self.tool_names = dict[str, Any]()
        """Names of called tools by the IDs of the calls: their results have only the ID."""

        for message in log:
            for call in message.get("tool_calls", ()):
                self.tool_names[str(call["id"])] = call["function"].get("name")
        users = [number for number, message in enumerate(log) if message["role"] == "user"]
        self.last_user = users[-1] if users else None

    def sources(self) -> list[dict[str, Any]]:
        """Return the messages with their parts as content, of which sources have names."""
        sources = list[dict[str, Any]]()
        for number, message in enumerate(self.log):
            others = {key: value for key, value in message.items() if key != "texts"}
            sources.append(others | {"content": self._parts(number, message)})
        return sources

    def _parts(self, number: int, message: Message) -> list[Any]:
        """Return the parts of a message: a `Segment` if it is a source, a text if it stays in
        view."""
        role = message["role"]
        texts = [text for text in message["texts"] if text.strip()]
        if role in ("system", "developer"):
            return [self._named(f"{role}: {_title(block)}", block) for block in _blocks_of(texts)]
        if role in ("tool", "function"):
            called = self.tool_names.get(str(message.get("tool_call_id")))
            tool = message.get("name") or called or "result"
            return [self._named(f"{role}: {tool}", text) for text in texts]
        if role == "user" and number != self.last_user:
            return [self._named(f"user: {_title(text)}", text) for text in texts]
        if role == "user" and self.passages is not None:
            parts = _split_all(texts, self.passages)
            return [part.text if not part.name else self._named(*part) for part in parts]
        return texts

    def _named(self, name: str, text: str) -> Segment:
        """Return a source of this name, with a number if it is not the first of it."""
        self.counts[name] += 1
        count = self.counts[name]
        numbered = name if count == 1 else f"{name} ({count})"
        return Segment(numbered, text, ids=(name,))


class _Passage(NamedTuple):
    name: str
    """Empty: the text stays in view."""

    text: str


def _split_all(texts: Sequence[str], passages: str) -> list[_Passage]:
    """Return the parts of texts; raise ConfigError if none of them is a passage."""
    parts = list[_Passage]()
    for text in texts:
        parts += _split(text, passages)
    if not any(part.name for part in parts):
        raise ConfigError(
            f"passages={passages!r:.40} matches nothing in the last message of the user"
        )
    return parts


def _split(text: str, passages: str) -> list[_Passage]:
    """Return the parts of a text: each passage with a name, and what stays in view without."""
    is_tag = re.fullmatch(r"\w[\w-]*", passages) is not None
    pattern = rf"<{passages}\b(?P<attributes>[^>]*)>(.*?)</{passages}>" if is_tag else passages
    try:
        matches = list(re.finditer(pattern, text, re.DOTALL))
    except re.error as error:
        raise ConfigError(
            f"passages={passages!r:.40} is neither a tag nor a regular expression ({error})"
        ) from None
    parts = list[_Passage]()
    last_end = 0
    for match in matches:
        # Of a regular expression, the passage is its first group, or all that it matches.
        group = 2 if is_tag else min(1, match.re.groups)
        passage = match[group]
        if not passage or not passage.strip():
            continue
        name = NAME_ATTRIBUTE.search(match["attributes"]) if is_tag else None
        first, end = match.span(group)
        parts.append(_Passage("", text[last_end:first]))
        parts.append(_Passage(name[1] if name else "passage", passage))
        last_end = end
    parts.append(_Passage("", text[last_end:]))
    return [_Passage(part.name, part.text.strip()) for part in parts if part.text.strip()]


def read_log(path: str | Path) -> Messages:
    """Read a .json file of messages or of a request, or a .jsonl file with one message a line."""
    text = read_text(str(path))
    if not str(path).endswith(".jsonl"):
        log: Messages = _parse_json(text, str(path))
        return log
    # Not splitlines: a text in JSON may hold U+2028.
    lines = enumerate(text.encode().split(b"\n"), start=1)
    return [_parse_json(line, f"{path}:{number}") for number, line in lines if line.strip()]


def _parse_json(text: str | bytes, place: str) -> Any:
    """Parse JSON without duplicate keys. `place`: the file or line, for messages."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except DuplicateKey as error:
        raise DataError(f"{place}: {error}") from None
    except (ValueError, RecursionError) as error:
        reason = one_line(error)
        raise DataError(f"{place} is not JSON ({reason}); give a log as it was sent") from None


def blocks(text: str) -> list[str]:
    """Split a prompt at its headings (`# …` or a tag alone in its line), or at blank lines if it
    has none. A heading belongs to what follows."""
    parts = HEADING.split(text) if HEADING.search(text) else re.split(r"\n\s*\n", text)
    return [part.strip() for part in parts if part.strip()]


def _blocks_of(texts: Sequence[str]) -> list[str]:
    blocks_of_texts = list[str]()
    for text in texts:
        blocks_of_texts += blocks(text)
    return blocks_of_texts


def _as_log(messages: Messages) -> list[Message]:
    """Return messages of either API as chat templates take them, with `texts` in place of
    `content`. Results of tools become messages of their own."""
    log = list[Message]()
    if isinstance(messages, Mapping):
        system = messages.get("system")
        if system:
            log.append({"role": "system", "texts": _read_content(system, "system").texts})
        messages = messages.get("messages") or ()
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise ConfigError(
            'messages must be a list of {"role": …, "content": …}, or a request with `messages`'
        )
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise ConfigError(f"messages: number {number} has no role: {message!r:.80}")
        place = f"messages: number {number}"
        content = _read_content(message.get("content"), place)
        # Templates may write further keys, so they stay in the message.
        others = {
            key: value
            for key, value in message.items()
            if key not in KEYS_OF_THE_API and value is not None
        }
        calls = _as_list(others.pop("tool_calls", []), "tool_calls", place)
        calls = [*calls, *content.calls]
        log_message = {"role": role, "texts": content.texts} | others
        if content.reasoning is not None:
            log_message["reasoning_content"] = content.reasoning
        if calls:
            log_message["tool_calls"] = [_read_call(call, place) for call in calls]
        log += content.results
        # Anthropic's results of tools are in a message of the user, which may hold nothing else.
        if content.texts or calls or not content.results:
            log.append(log_message)
    return log


@dataclass
class _Content:
    """The content of a message, by kinds of blocks."""

    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls of tools."""

    results: list[Message] = field(default_factory=list)
    """What tools returned, as messages of their own."""

    reasoning: str | None = None


def _read_content(content: Any, place: str) -> _Content:
    """Read the content of a message: None, a text, or a list of blocks. `place`: the message, for
    messages of errors."""
    if content is None or isinstance(content, str):
        return _Content([content] if content else [])
    read = _Content()
    for block in _as_list(content, "content", place):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(block, str):
            read.texts.append(block)
        elif kind in ("text", "input_text", "output_text") and isinstance(block.get("text"), str):
            read.texts.append(block["text"])
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input", {})}
            read.calls.append({"id": block.get("id"), "function": function})
        elif kind == "tool_result":
            texts = _read_content(block.get("content"), place).texts
            call_id = block.get("tool_use_id")
            read.results.append({"role": "tool", "tool_call_id": call_id, "texts": texts})
        elif kind in ("thinking", "reasoning"):
            read.reasoning = str(block.get("thinking") or block.get("text") or "")
        else:
            raise DataError(f"{place} holds {printable(str(block))[:60]}; pass text only")
    return read


def _as_list(value: Any, name: str, place: str) -> list[Any]:
    """Return a value that must be a list."""
    if not isinstance(value, list):
        raise ConfigError(f"{place}: {name}={value!r:.60} must be a list")
    return value


def _read_call(call: Any, place: str) -> dict[str, Any]:
    """Return a call of a tool with its arguments as an object, which templates write as JSON."""
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        return {"type": "function", "id": call.get("id"), "function": function}
    except (KeyError, TypeError, ValueError, RecursionError):
        raise DataError(
            f"{place} has a call without a function and JSON arguments: {printable(str(call))[:80]}"
        ) from None


def _title(text: str) -> str:
    """Return the beginning of a text, as its name."""
    first_line = text.strip().splitlines()[0]
    title = " ".join(first_line.strip("#<> ").split()) or text.strip()[:8]
    if len(title) <= NAME_LENGTH:
        return title
    return title[: NAME_LENGTH - 1].rstrip() + "…"
