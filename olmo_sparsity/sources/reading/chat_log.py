"""Read messages as OpenAI's or Anthropic's API takes them into one form.

Place in the flow: a file (**`read_log`**) or Python objects → **`normalize_messages`** → a list of
`LogMessage` → messages.py, which says which of them are sources.

The two APIs differ in where they put the system prompt, calls of tools and results of tools:

                    OpenAI                              Anthropic
    system prompt   a message of the role system        `system` of the request
    call of a tool  `tool_calls` of the message         a block `tool_use` of the content
    result of it    a message of the role tool          a block `tool_result` of the user's content
    reasoning       `reasoning_content`, `reasoning`    blocks `thinking`

A `LogMessage` has OpenAI's form, as chat templates take it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_sparsity.analysis.explain.text_file import read_text
from olmo_sparsity.base.errors import ConfigError, DataError, one_line, printable
from olmo_sparsity.base.json_text import DuplicateKey, unique

KEYS_OF_THE_API = {
    *("role", "content"),  # read by themselves
    *("id", "type", "model", "stop_reason", "stop_sequence", "refusal"),  # written by no template
}
"""Keys of a message that are not given to a chat template."""

TEXT_BLOCKS = ("text", "input_text", "output_text")
"""Types of blocks that hold a text."""

REASONING_KEYS = ("reasoning_content", "reasoning")
"""Keys of a message that hold its reasoning: some servers write one, some the other, some both."""

LAST_MESSAGE = -1
"""The number of the last message of a log, counted from the end as in a list. It is the default of
`message`, the number of the answer."""

Messages = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A list of messages; or a request with `messages`, and with `system` as Anthropic writes it."""


@dataclass(frozen=True)
class LogMessage:
    """A message of a log."""

    role: str
    texts: list[str]
    """The texts of its content, one for each block."""

    keys: dict[str, Any] = field(default_factory=dict)
    """Other keys of the message, as chat templates take them, such as `name` and `tool_call_id`."""

    @property
    def reasoning(self) -> str | None:
        """What the model wrote before its answer. None means that the log has no reasoning."""
        for key in REASONING_KEYS:
            if self.keys.get(key):
                return str(self.keys[key])
        return None

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of tools, each with `id` and `function`."""
        return self.keys.get("tool_calls", [])


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
    """Parse JSON; raise DataError for a key that an object has twice, as one would be lost.
    `place`: the file or line, for the message."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except DuplicateKey as error:
        raise DataError(f"{place}: {error}") from None
    except (ValueError, RecursionError) as error:
        reason = one_line(error)
        raise DataError(f"{place} is not JSON ({reason}); give a log as it was sent") from None


def normalize_messages(messages: Messages) -> list[LogMessage]:
    """Return messages of either API in one form. A message with results of tools, as Anthropic
    writes it, becomes several."""
    log: list[LogMessage] = []
    if isinstance(messages, Mapping):
        # Anthropic's request has the system prompt next to the messages.
        system = messages.get("system")
        if system:
            log.append(LogMessage("system", _read_content(system, "system").texts))
        messages = messages.get("messages") or ()
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise ConfigError(
            'messages must be a list of {"role": …, "content": …}, or a request with `messages`'
        )
    for number, message in enumerate(messages):
        log += _normalize_message(message, number)
    return log


def _normalize_message(message: Any, number: int) -> list[LogMessage]:
    """Return a message, preceded by a message for each result of a tool that it holds.

    Args:
        message: As a user passes it.
        number: Its index in the list, from 0.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise ConfigError(f"messages: number {number} has no role: {message!r:.80}")
    place = f"messages: number {number}"
    content = _read_content(message.get("content"), place)
    keys = {
        key: value
        for key, value in message.items()
        if key not in KEYS_OF_THE_API and value is not None
    }
    for key in REASONING_KEYS:
        if not isinstance(keys.get(key, ""), str):
            raise ConfigError(f"{place}: {key}={keys[key]!r:.60} must be a text")

    # Calls and reasoning that Anthropic writes as blocks become keys, as OpenAI writes them.
    calls = [*_as_list(keys.pop("tool_calls", []), "tool_calls", place), *content.calls]
    if content.reasonings:
        keys["reasoning_content"] = "\n\n".join(filter(None, content.reasonings))
    if calls:
        keys["tool_calls"] = [_read_call(call, place) for call in calls]

    # Anthropic's results of tools are in a message of the user, which may hold nothing else.
    holds_only_results = content.results and not content.texts and not calls
    if holds_only_results:
        return content.results
    return [*content.results, LogMessage(role, content.texts, keys)]


@dataclass
class _Content:
    """The content of a message, by kinds of blocks."""

    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls of tools, as OpenAI writes them."""

    results: list[LogMessage] = field(default_factory=list)
    """What tools returned, as messages of their own."""

    reasonings: list[str] = field(default_factory=list)
    """The model may think several times, as between calls of tools."""


def _read_content(content: Any, place: str) -> _Content:
    """Sort the content of a message by kinds of blocks. Raise DataError for a block without text,
    such as an image.

    Args:
        content: None, a text, or a list of blocks.
        place: The message, for errors.
    """
    if content is None or isinstance(content, str):
        return _Content([content] if content else [])
    by_kind = _Content()
    for block in _as_list(content, "content", place):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(block, str):
            by_kind.texts.append(block)
        elif kind in TEXT_BLOCKS and isinstance(block.get("text"), str):
            by_kind.texts.append(block["text"])
        elif kind == "tool_use":
            # In OpenAI's form, except that arguments are an object already.
            function = {"name": block.get("name"), "arguments": block.get("input", {})}
            by_kind.calls.append({"id": block.get("id"), "function": function})
        elif kind == "tool_result":
            texts = _read_content(block.get("content"), place).texts
            call_id = block.get("tool_use_id")
            by_kind.results.append(LogMessage("tool", texts, {"tool_call_id": call_id}))
        elif kind in ("thinking", "reasoning"):
            reasoning = block.get("thinking") or block.get("reasoning") or block.get("text") or ""
            by_kind.reasonings.append(str(reasoning))
        else:
            raise DataError(f"{place} holds {printable(str(block))[:60]}; pass text only")
    return by_kind


def _as_list(value: Any, name: str, place: str) -> list[Any]:
    """Return the value; raise ConfigError if it is not a list."""
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
