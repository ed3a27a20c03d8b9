"""Read the log of an agent: which blocks and tool outputs did a message rely on?

Place in the flow: messages as OpenAI's or Anthropic's API takes them → **sources and an answer** →
request.py.

Sources are the blocks of the system prompt, what tools returned, and earlier messages of the user.
The user's last message, and earlier messages of the model itself, stay in view.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from olmo_sparsity.analysis.explain.prompt import read_text
from olmo_sparsity.base.conform import DuplicateKey, unique
from olmo_sparsity.base.errors import ConfigError, DataError, one_line, printable
from olmo_sparsity.sources.documents import Segment

HEADING = re.compile(r"^(?=#{1,6} |<\w[\w-]*>\s*$)", re.MULTILINE)
"""Before a heading of Markdown, or a tag that is alone in its line."""

NAME_ATTRIBUTE = re.compile(r"""\b(?:title|name|source|id|index)=["']([^"']+)["']""")

NAME_LENGTH = 32
"""Characters of the name of a block at most."""

KEYS_OF_THE_API = {
    *("role", "content"),  # read by themselves
    *("id", "type", "model", "stop_reason", "stop_sequence", "refusal"),  # written by no template
}

Messages = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A list of messages; or a request with `messages`, and with `system` as Anthropic writes it."""

Message = dict[str, Any]
"""A message as chat templates take it, with a list `texts` in place of `content`."""


def read_messages(
    messages: Messages, number: int = -1, passages: str | None = None
) -> tuple[list[Any], str, str | None]:
    """Return what precedes the message of this number, as sources, its text, and its reasoning.
    `passages`: a tag or a regular expression of passages in the last message of the user, which are
    sources, too."""
    log = _as_log(messages)
    if type(number) is not int or not -len(log) <= number < len(log):
        raise ConfigError(f"message={number}: the log has messages 0 to {len(log) - 1}")
    number = range(len(log))[number]
    message = log[number]
    answer = "\n\n".join(text.strip() for text in message["texts"] if text.strip())
    if message["role"] != "assistant" or not answer:
        without = "" if answer else ", without text"
        raise ConfigError(
            f"message={number} is of {printable(message['role'])}{without}; give the number of a "
            "message that is text of the assistant"
        )
    sources = _as_sources(log[:number], passages)
    thought = message.get("reasoning_content")
    reasoning = f"<think>\n{thought.strip()}\n</think>\n\n" if thought else None
    return sources, answer, reasoning


def _as_sources(log: Sequence[Message], passages: str | None) -> list[Any]:
    """Return the messages with named parts as sources."""
    tools = dict[str, Any]()
    for message in log:
        for call in message.get("tool_calls", ()):
            tools[str(call["id"])] = call["function"].get("name")
    users = [number for number, message in enumerate(log) if message["role"] == "user"]
    counts = Counter[str]()

    def named(name: str, text: str) -> Segment:
        counts[name] += 1
        return Segment(name if counts[name] == 1 else f"{name} ({counts[name]})", text)

    sources = list[Any]()
    for number, message in enumerate(log):
        role = message["role"]
        texts = [text for text in message["texts"] if text.strip()]
        parts = list[Any](texts)
        if role in ("system", "developer"):
            parts = [named(f"{role}: {_title(block)}", block) for block in _blocks_of(texts)]
        elif role in ("tool", "function"):
            tool = message.get("name") or tools.get(str(message.get("tool_call_id"))) or "result"
            parts = [named(f"{role}: {tool}", text) for text in texts]
        elif role == "user" and number != users[-1]:
            parts = [named(f"user: {_title(text)}", text) for text in texts]
        elif role == "user" and passages is not None:
            pairs = _split_all(texts, passages)
            parts = [text if name is None else named(name, text) for name, text in pairs]
        others = {key: value for key, value in message.items() if key != "texts"}
        sources.append(others | {"content": parts})
    return sources


def _split_all(texts: Sequence[str], passages: str) -> list[tuple[str | None, str]]:
    pairs = list[tuple[str | None, str]]()
    for text in texts:
        pairs += _split(text, passages)
    if all(name is None for name, _ in pairs):
        raise ConfigError(
            f"passages={passages!r:.40} matches nothing in the last message of the user"
        )
    return pairs


def _split(text: str, passages: str) -> list[tuple[str | None, str]]:
    """Return the parts of a text: each passage with a name, and what stays in view with None."""
    is_tag = re.fullmatch(r"\w[\w-]*", passages) is not None
    pattern = rf"<{passages}\b(?P<attributes>[^>]*)>(.*?)</{passages}>" if is_tag else passages
    try:
        matches = list(re.finditer(pattern, text, re.DOTALL))
    except re.error as error:
        raise ConfigError(
            f"passages={passages!r:.40} is neither a tag nor a regular expression ({error})"
        ) from None
    parts = list[tuple[str | None, str]]()
    last_end = 0
    for match in matches:
        # Of a regular expression, the passage is its first group, or all that it matches.
        group = 2 if is_tag else min(1, match.re.groups)
        passage = match[group]
        if not passage or not passage.strip():
            continue
        name = NAME_ATTRIBUTE.search(match["attributes"]) if is_tag else None
        first, end = match.span(group)
        parts.append((None, text[last_end:first]))
        parts.append((name[1] if name else "passage", passage))
        last_end = end
    parts.append((None, text[last_end:]))
    return [(name, part.strip()) for name, part in parts if part.strip()]


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
            log.append({"role": "system", "texts": _read_content(system, "system")[0]})
        messages = messages.get("messages") or ()
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise ConfigError(
            'messages must be a list of {"role": …, "content": …}, or a request with `messages`'
        )
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise ConfigError(f"messages: number {number} has no role: {message!r:.80}")
        where = f"messages: number {number}"
        texts, others = _read_content(message.get("content"), where)
        kept = {
            key: value
            for key, value in message.items()
            if key not in KEYS_OF_THE_API and value is not None
        }
        results = others.pop("results", [])
        calls = _as_list(kept.pop("tool_calls", []), "tool_calls", where)
        calls = [*calls, *others.pop("calls", [])]
        read = {"role": role, "texts": texts} | kept | others
        if calls:
            read["tool_calls"] = [_read_call(call, where) for call in calls]
        log += results
        # Anthropic's results of tools are in a message of the user, which may hold nothing else.
        if texts or calls or not results:
            log.append(read)
    return log


def _read_content(content: Any, where: str) -> tuple[list[str], dict[str, Any]]:
    """Return the texts of a content, and what else it holds: `calls` of tools, their `results`,
    `reasoning_content`."""
    if content is None or isinstance(content, str):
        return ([content] if content else []), {}
    texts = list[str]()
    others = dict[str, Any]()
    for block in _as_list(content, "content", where):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(block, str):
            texts.append(block)
        elif kind in ("text", "input_text", "output_text") and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input", {})}
            others.setdefault("calls", []).append({"id": block.get("id"), "function": function})
        elif kind == "tool_result":
            result_texts = _read_content(block.get("content"), where)[0]
            others.setdefault("results", []).append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "texts": result_texts}
            )
        elif kind in ("thinking", "reasoning"):
            others["reasoning_content"] = str(block.get("thinking") or block.get("text") or "")
        else:
            raise DataError(f"{where} holds {printable(str(block))[:60]}; pass text only")
    return texts, others


def _as_list(value: Any, name: str, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {name}={value!r:.60} must be a list")
    return value


def _read_call(call: Any, where: str) -> dict[str, Any]:
    """Return a call of a tool with its arguments as an object, which templates write as JSON."""
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        return {"type": "function", "id": call.get("id"), "function": function}
    except (KeyError, TypeError, ValueError, RecursionError):
        raise DataError(
            f"{where} has a call without a function and JSON arguments: {printable(str(call))[:80]}"
        ) from None


def _title(text: str) -> str:
    """Return the beginning of a text, as its name."""
    first_line = text.strip().splitlines()[0]
    title = " ".join(first_line.strip("#<> ").split()) or text.strip()[:8]
    if len(title) <= NAME_LENGTH:
        return title
    return title[: NAME_LENGTH - 1].rstrip() + "…"
