"""Turn the log of an agent into sources and an answer, to ask on what the answer relies.

Place in the flow: chat_log.py → **`read_messages`** → request.py. passages.py finds the passages of
the user's last message. What the messages of a log become:

    message of             becomes
    system                 sources: its blocks, named "system: Rules" by their headings
    user                   a source, named "user: What is …"
    assistant              a text that stays in view
    tool                   a source, named "tool: search"
    user, the last one     a text that stays in view, but for its `passages`, which are sources
    assistant              the answer
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from olmo_sparsity.base.errors import ConfigError, printable
from olmo_sparsity.sources.reading.chat_log import (
    LAST_MESSAGE,
    LogMessage,
    Messages,
    normalize_messages,
)
from olmo_sparsity.sources.reading.passages import (
    UNNAMED_PASSAGE,
    Passage,
    split_at_passages,
    warnings_about,
)
from olmo_sparsity.sources.reading.prompt_parts import Segment
from olmo_sparsity.sources.reading.reasoning import CLOSING, OPENING

HEADING = re.compile(r"^(?=#{1,6} |<\w[\w-]*>\s*$)", re.MULTILINE)
"""Matches the place before a heading of Markdown, or a tag that is alone in its line."""

NAME_LENGTH = 32
"""Largest number of characters of the name of a block."""


class LoggedAnswer(NamedTuple):
    """A message of a log as the answer to what precedes it."""

    sources: list[Any]
    """The messages before it, as `attribute` takes `sources`: their named parts are sources."""

    answer: str
    reasoning: str | None
    """The reasoning of the message, in tags. None means that it has none."""

    warnings: list[str]
    """Warnings about passages that may hold more than they should."""


def read_messages(
    messages: Messages, number: int = LAST_MESSAGE, passages: str | None = None
) -> LoggedAnswer:
    """Return a message of a log as an answer, with the messages before it as sources.

    Args:
        number: The index of the message, from 0, or from the end if it is negative.
        passages: A tag or a regular expression of passages in the last message of the user, which
            are sources, too.
    """
    log = normalize_messages(messages)
    if type(number) is not int or not -len(log) <= number < len(log):
        raise ConfigError(f"message={number}: the log has messages 0 to {len(log) - 1}")
    # From 0 from here on, also if it was counted from the end.
    number = range(len(log))[number]
    message = log[number]
    content = "\n\n".join(text.strip() for text in message.texts if text.strip())
    thought, answer = _split_reasoning(message.reasoning, content)

    if message.role != "assistant" or not answer:
        condition = "" if answer else ", without text"
        raise ConfigError(
            f"message={number} is of {printable(message.role)}{condition}; give the number of a "
            "message that is text of the assistant"
        )

    namer = _SourceNamer(log[:number], passages)
    sources = namer.named_messages()
    # In the tags by which `attribute` tells reasoning from the answer.
    reasoning = f"<think>\n{thought.strip()}\n</think>\n\n" if thought else None
    return LoggedAnswer(sources, answer, reasoning, namer.warnings)


class _SplitContent(NamedTuple):
    """The content of a message of the assistant."""

    reasoning: str | None
    """Without tags. None means that there is none, or it is still part of the answer, in its
    tags."""

    answer: str


def _split_reasoning(logged: str | None, content: str) -> _SplitContent:
    """Return reasoning and answer of a message. A server that writes the reasoning by itself may
    leave it in the content, too: it is then taken once. Other reasoning in the content follows it.
    `logged`: the reasoning that the message has by itself. Without it, the content stays as it is:
    the block `<think>` of an answer is found when its tokens are known."""
    before, closing, answer = content.partition(CLOSING)
    if not logged or not closing:
        return _SplitContent(logged, content)
    reasoning = logged.strip()
    in_content = before.strip().removeprefix(OPENING).strip()
    if in_content and in_content != reasoning:
        reasoning = f"{reasoning}\n\n{in_content}"
    return _SplitContent(reasoning, answer.strip())


class _SourceNamer:
    """Divides messages into sources with different names, and texts that stay in view."""

    def __init__(self, log: Sequence[LogMessage], passages: str | None) -> None:
        """Find the names of tools, and the last message of the user.

        Args:
            log: The messages before the answer.
            passages: As in `read_messages`.
        """
        self.log = log
        self.passages = passages
        self.name_counts: Counter[str] = Counter()
        """How often each name was given."""

        self.warnings: list[str] = []
        """Warnings about the passages."""

        self.tool_names: dict[str, Any] = {}
        """Names of called tools by the IDs of the calls: their results have only the ID."""

        for message in log:
            for call in message.tool_calls:
                self.tool_names[str(call["id"])] = call["function"].get("name")
        user_indices = [index for index, message in enumerate(log) if message.role == "user"]
        self.last_user_index = user_indices[-1] if user_indices else None
        if passages is not None and not user_indices:
            roles = ", ".join(printable(message.role) for message in log) or "none"
            raise ConfigError(
                f"passages={passages!r:.40} are in the last message of the role user, and no "
                f"message before the answer has it (their roles: {roles:.80})"
            )

    def named_messages(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates take them, but with a list of parts as the content
        of each."""
        return [
            {"role": message.role} | message.keys | {"content": self._parts(index, message)}
            for index, message in enumerate(self.log)
        ]

    def _parts(self, index: int, message: LogMessage) -> list[Any]:
        """Return the parts of a message: a `Segment` if it is a source, a text if it stays in
        view."""
        role = message.role
        texts = [text for text in message.texts if text.strip()]
        # Instructions are long, and a statement usually relies on a section of them.
        if role in ("system", "developer"):
            return [
                self._source(f"{role}: {_title(block)}", block)
                for text in texts
                for block in blocks(text)
            ]
        if role in ("tool", "function"):
            # OpenAI's messages have the name themselves, or only the ID of the call.
            called_name = self.tool_names.get(str(message.keys.get("tool_call_id")))
            tool_name = message.keys.get("name") or called_name or "result"
            return [self._source(f"{role}: {tool_name}", text) for text in texts]
        # Earlier messages of the user may state facts. The last one asks, so it must stay in view.
        if role == "user" and index != self.last_user_index:
            return [self._source(f"user: {_title(text)}", text) for text in texts]
        if role == "user" and self.passages is not None:
            return self._parts_with_passages(texts, self.passages)
        return texts

    def _parts_with_passages(self, texts: Sequence[str], passages: str) -> list[Any]:
        """Return the parts of the last message of the user, whose passages are sources."""
        split_parts = split_at_passages(texts, passages)
        self.warnings += warnings_about(texts, split_parts, passages)
        parts: list[Any] = []
        for part in split_parts:
            if not isinstance(part, Passage):
                parts.append(part)
            elif part.own_name:
                parts.append(self._source(part.name, part.text))
            else:
                # `expect` of a questions file may take the name without its number.
                parts.append(self._source(part.name, part.text, UNNAMED_PASSAGE))
        return parts

    def _source(self, name: str, text: str, *ids: str) -> Segment:
        """Return a source of this name. The second one of the same name gets the number 2. `ids`:
        other names that `expect` of a questions file takes, besides the name without a number."""
        self.name_counts[name] += 1
        count = self.name_counts[name]
        numbered_name = name if count == 1 else f"{name} ({count})"
        return Segment(numbered_name, text, ids=(name, *ids))


def blocks(text: str) -> list[str]:
    """Split a prompt at its headings (`# …` or a tag alone in its line), or at blank lines if it
    has none. A heading belongs to what follows."""
    parts = HEADING.split(text) if HEADING.search(text) else re.split(r"\n\s*\n", text)
    return [part.strip() for part in parts if part.strip()]


def _title(text: str) -> str:
    """Return the first line of a text, shortened, as its name."""
    first_line = text.strip().splitlines()[0]
    # A first line of marks alone, such as a rule of hyphens, has no words.
    title = " ".join(first_line.strip("#<> ").split()) or text.strip()[:8]
    if len(title) <= NAME_LENGTH:
        return title
    return title[: NAME_LENGTH - 1].rstrip() + "…"
