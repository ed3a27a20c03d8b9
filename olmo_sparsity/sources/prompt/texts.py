"""Write the texts of a prompt with sources, with or without a chat template.

Place in the flow: messages with named parts (read_sources.py) → **`plain_texts`**, or
**`template_texts`** with a chat template → prompt/encode.py, which encodes the texts one by one.

A prompt is a list of parts, each with the text that separates it from the next, and a closing text
that ends where the answer begins. One source and a question become, without a template:

    PromptPart(source "faq.md", after "\\n\\n")
    closing "When did it open?\\n"

and with a template, whose own texts are parts that stay in view (shortened):

    PromptPart(in view "<|user|>", after "")
    PromptPart(source "faq.md", after "\\n\\n")
    closing "When did it open?<|assistant|>"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from olmo_sparsity.analysis.explain.chat_template import split_template, through_template
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.sources.reading.prompt_parts import Segment, Turn, parts_of

AFTER_SOURCE = "\n\n"
"""Separates a source from what follows it."""

AFTER_QUESTION = "\n"
"""Separates the question from the answer."""


@dataclass(frozen=True)
class PromptPart:
    """A text of the prompt, and what separates it from the next."""

    segment: Segment
    """The text. With a name it is a source, without a name it stays in view."""

    after: str
    """What separates it from the next text. It stays where a decoy replaces the source."""


@dataclass(frozen=True)
class PromptTexts:
    """The texts of a prompt, before they are encoded."""

    parts: list[PromptPart]
    closing: str
    """The question, and what follows it until the answer begins."""


def plain_texts(turns: Sequence[Turn], question: str | None) -> PromptTexts:
    """Return the texts of a prompt without a chat template: sources, then the question."""
    parts = [PromptPart(segment, AFTER_SOURCE) for segment in parts_of(turns)]
    return PromptTexts(parts, f"{question}{AFTER_QUESTION}")


def template_texts(model: LoadedModel, turns: Sequence[Turn], question: str | None) -> PromptTexts:
    """Return the texts of a prompt as the chat template writes it. The question ends the last
    message of the user. What the template itself writes stays in view."""
    turns = _with_question([_stripped(turn) for turn in turns], question)
    segments = parts_of(turns)
    texts = [segment.text for segment in segments]
    _report_unseen_keys(model, turns, texts)

    # What the template writes before the first part, and after each part.
    beginning, *following = split_template(model, lambda texts: _messages(turns, texts), texts)
    parts = [PromptPart(Segment("", beginning), "")]
    for segment, after in zip(segments, following, strict=True):
        # What separates parts of one message moves with the part; the template's own text does not.
        separator = AFTER_SOURCE if after.startswith(AFTER_SOURCE) else ""
        parts.append(PromptPart(segment, separator))
        parts.append(PromptPart(Segment("", after.removeprefix(separator)), ""))

    if question is None:
        # The last text of the template closes the prompt.
        return PromptTexts(parts[:-1], parts[-1].segment.text)
    # The last two parts are the question and what follows it.
    return PromptTexts(parts[:-2], segments[-1].text + following[-1])


def _stripped(turn: Turn) -> Turn:
    """Return the turn without white space around its parts, which templates remove, too."""
    parts = [replace(part, text=part.text.strip()) for part in turn.parts]
    return Turn(turn.role or "user", parts, turn.other_keys)


def _with_question(turns: Sequence[Turn], question: str | None) -> list[Turn]:
    """Return the turns with the question as the last part of the last message of the user."""
    turns = [*turns]
    if question is None:
        return turns
    if not turns or turns[-1].role != "user":
        # Sources were messages of others, such as outputs of tools.
        turns.append(Turn("user", []))
    last = turns[-1]
    turns[-1] = replace(last, parts=[*last.parts, Segment("", question.strip())])
    return turns


def _messages(
    turns: Sequence[Turn], texts: Sequence[str], without_key: str = ""
) -> list[dict[str, Any]]:
    """Return messages as a chat template takes them.

    Args:
        turns: The messages.
        texts: The texts of all their parts in order, which replace those of the turns.
        without_key: A key of messages that is left out.
    """
    remaining_texts = iter(texts)  # each turn takes as many as it has parts
    messages: list[dict[str, Any]] = []
    for turn in turns:
        keys = {key: value for key, value in turn.other_keys.items() if key != without_key}
        content = AFTER_SOURCE.join(islice(remaining_texts, len(turn.parts)))
        messages.append(keys | {"role": turn.role, "content": content})
    return messages


def _report_unseen_keys(model: LoadedModel, turns: Sequence[Turn], texts: Sequence[str]) -> None:
    """Print which keys of messages the template leaves out, such as `tool_calls`. The model does
    not see them, which a user may not expect. A key is left out if the template writes the same
    prompt without it."""
    whole_prompt = through_template(model, _messages(turns, texts))
    keys = sorted(set(chain(*(turn.other_keys for turn in turns))))
    unseen = [
        key for key in keys if through_template(model, _messages(turns, texts, key)) == whole_prompt
    ]
    if unseen:
        say(f"the chat template leaves out what messages say as {', '.join(unseen)}")
