"""Read the log of an agent, as OpenAI's or Anthropic's API takes it, as **sources and an answer**.
Sources are the blocks of the system prompt, what tools returned, and earlier ones of the user."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from olmo_sparsity.analysis.explain.prompt import read_text
from olmo_sparsity.base.errors import ConfigError, DataError, printable
from olmo_sparsity.sources.documents import Segment

HEADING = re.compile(r"^(?=#{1,6} |<\w[\w-]*>\s*$)", re.MULTILINE)

_NAME_LENGTH = 32

# Keys that no template writes, and keys that are read by themselves.
_OF_THE_API = {"role", "content", "id", "type", "model", "stop_reason", "stop_sequence", "refusal"}

Messages = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A list of messages; or a request with `messages`, and with `system` as Anthropic writes it."""


def read_messages(messages: Messages, number: int = -1) -> tuple[list[Any], str, str | None]:
    """Return what precedes the message of this number, as sources, its text, and its reasoning."""
    turns = _turns(messages)
    numbers = range(len(turns))
    if type(number) is not int or not -len(turns) <= number < len(turns):
        raise ConfigError(f"message={number}: the log has messages 0 to {len(turns) - 1}")
    number = numbers[number]
    answer = "\n\n".join(text.strip() for text in turns[number]["texts"] if text.strip())
    if turns[number]["role"] != "assistant" or not answer:
        role = turns[number]["role"]
        raise ConfigError(f"message={number} is of {role}; it must be text of the assistant")
    before = turns[:number]
    users = [i for i, turn in enumerate(before) if turn["role"] == "user"]
    names, found = Counter[str](), list[Any]()
    calls = [call for turn in before for call in turn.get("tool_calls", ())]
    tools = {str(call["id"]): call["function"].get("name") for call in calls}

    def named(base: str, text: str) -> Segment:
        names[base] += 1
        return Segment(base if names[base] == 1 else f"{base} ({names[base]})", text)

    for i, turn in enumerate(before):
        role, texts = turn["role"], turn["texts"]
        parts: list[Any] = [text for text in texts if text.strip()]
        if role in ("system", "developer"):
            parts = [named(f"{role}: {_title(b)}", b) for text in parts for b in blocks(text)]
        elif role in ("tool", "function"):
            name = turn.get("name") or tools.get(str(turn.get("tool_call_id"))) or "result"
            parts = [named(f"{role}: {name}", text) for text in parts]
        elif role == "user" and i != users[-1]:
            parts = [named(f"user: {_title(text)}", text) for text in parts]
        found.append({key: turn[key] for key in turn if key != "texts"} | {"content": parts})
    thought = turns[number].get("reasoning_content")
    return found, answer, f"<think>\n{thought.strip()}\n</think>\n\n" if thought else None


def read_log(path: str | Path) -> Messages:
    """Read a .json file of messages or of a request, or a .jsonl file with one message a line."""
    text = read_text(str(path))
    try:
        if str(path).endswith(".jsonl"):
            return [json.loads(line) for line in text.encode().split(b"\n") if line.strip()]
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); give a log as it was sent") from None


def blocks(text: str) -> list[str]:
    """Split a prompt at its headings (`# …` or a tag alone in its line), or else at blank lines."""
    parts = HEADING.split(text) if HEADING.search(text) else re.split(r"\n\s*\n", text)
    return [part.strip() for part in parts if part.strip()]


def _turns(messages: Messages) -> list[dict[str, Any]]:
    """Return messages as chat templates take them, with `texts` in place of `content`."""
    found: list[dict[str, Any]] = []
    if isinstance(messages, Mapping):
        if system := messages.get("system"):
            found.append({"role": "system", "texts": _texts(system, "system")[0]})
        messages = messages.get("messages") or ()
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ConfigError("messages must be a list of messages, or a request with `messages`")
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise ConfigError(f"messages: number {number} has no role: {message!r:.80}")
        where = f"messages: number {number}"
        texts, others = _texts(message.get("content"), where)
        kept = {k: v for k, v in message.items() if k not in _OF_THE_API and v is not None}
        results = others.pop("results", [])
        calls = _list(kept.pop("tool_calls", []), "tool_calls", where)
        calls = [*calls, *others.pop("calls", [])]
        turn = {"role": role, "texts": texts} | kept | others
        if calls:
            turn["tool_calls"] = [_call(call, where) for call in calls]
        found += results
        if texts or calls or not results:
            found.append(turn)
    return found


def _texts(content: Any, where: str) -> tuple[list[str], dict[str, Any]]:
    """Texts of a content, and what else it holds: calls of tools and what they returned."""
    if content is None or isinstance(content, str):
        return ([content] if content else []), {}
    texts, others = list[str](), dict[str, Any]()
    for block in _list(content, "content", where):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(block, str):
            texts.append(block)
        elif kind in ("text", "input_text", "output_text") and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input", {})}
            others.setdefault("calls", []).append({"id": block.get("id"), "function": function})
        elif kind == "tool_result":
            own = _texts(block.get("content"), where)[0]
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "texts": own}
            others.setdefault("results", []).append(result)
        elif kind in ("thinking", "reasoning"):
            others["reasoning_content"] = str(block.get("thinking") or block.get("text") or "")
        else:
            raise DataError(f"{where} holds {printable(str(block))[:60]}; pass text only")
    return texts, others


def _list(value: Any, name: str, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {name}={value!r:.60} must be a list")
    return value


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return the call with its arguments as an object, which templates write as JSON."""
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        return {"type": "function", "id": call.get("id"), "function": function}
    except (KeyError, TypeError, ValueError, RecursionError):
        said = printable(str(call))[:80]
        raise DataError(f"{where} has a call without function and JSON arguments: {said}") from None


def _title(text: str) -> str:
    """Return the beginning of a text, as its name."""
    line = " ".join(text.strip().splitlines()[0].strip("#<> ").split()) or text.strip()[:8]
    return line if len(line) <= _NAME_LENGTH else line[: _NAME_LENGTH - 1].rstrip() + "…"
