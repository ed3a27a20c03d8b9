"""Encode the sources and the question of a request as pieces of tokens.

Place in the flow: request → **prompt** (`encode_prompt`) → layout.py, which adds an answer.

Sources are encoded one by one, so that the others keep their tokens if a decoy replaces one. All
that is not a source stays in view: the question, earlier messages, texts without a name. Of two
sources, with a text in view between them, a prompt has

    pieces      source 0 │ "\\n\\n" │ text in view │ "\\n\\n" │ source 1 │ "\\n\\n"
    local_ids   question, and what follows it until the answer begins
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np

from olmo_sparsity.analysis.explain.prompt import split_template, through_template
from olmo_sparsity.base.errors import ConfigError, check_type, printable
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.sources.documents import Segment, Turn, parts_of, read_turns
from olmo_sparsity.sources.request import AttributeRequest
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.windows import Spans, span_width

AFTER_SOURCE = "\n\n"
"""Separates a source from what follows it."""

AFTER_QUESTION = "\n"
"""Separates the question from the answer."""


@dataclass(frozen=True)
class Piece:
    """Tokens of a part of the prompt, and of what separates it from the next."""

    text_ids: list[int]
    after_ids: list[int]
    source: int | None = None
    """The number of the source, or of the judged part of a source. None: it stays in view."""

    whole_source: int | None = None
    """The number of the source that contains this part. Equal to `source` where sources are judged
    as wholes."""


@dataclass(frozen=True)
class SourcePrompt:
    """Sources and question, encoded, without an answer."""

    model: LoadedModel
    names: list[str]
    """Names of the sources, or of the parts of them that are judged."""

    pieces: list[Piece]
    local_ids: list[int]
    """The question, and what a chat template puts after it."""

    prefix_ids: list[int]
    """Tokens before every window, such as a beginning-of-text token."""

    num_reasoning: int = 0
    """Number of sources at the end that are sentences of the model's reasoning."""

    def with_reasoning(self, ids: list[int], spans: Spans) -> SourcePrompt:
        """Return the prompt continued by the tokens of the reasoning. Its sentences become further
        sources.

        ids: Tokens of the reasoning.
        spans: First and end token of each sentence. Empty: the reasoning only stays in view.
        """
        if not spans:
            return replace(self, local_ids=[*self.local_ids, *ids])
        sentence_names = [f"reasoning {i + 1}" for i in range(len(spans))]
        duplicates = sorted(set(self.names) & set(sentence_names))
        if duplicates:
            raise ConfigError(
                f"sources: '{duplicates[0]}' names a sentence of the reasoning; rename it"
            )

        # The last token stays in view: the local window must not be empty, and precedes the answer.
        last_end = min(spans[-1][1], len(ids) - 1)
        ends = [*(end for _, end in spans[:-1]), last_end]

        # The question is no longer next to the answer, so it becomes a piece like others in view.
        first_sentence = spans[0][0]
        pieces = [*self.pieces, Piece([*self.local_ids, *ids[:first_sentence]], [])]
        for number, (first, _) in enumerate(spans):
            source = len(self.names) + number
            pieces.append(Piece(ids[first : ends[number]], [], source, source))
        return replace(
            self,
            names=[*self.names, *sentence_names],
            pieces=pieces,
            local_ids=ids[last_end:],
            num_reasoning=len(spans),
        )

    @cached_property
    def parts_of_sources(self) -> list[list[list[int]]]:
        """The tokens of each judged part, for each source in order."""
        parts_by_source = dict[int | None, list[list[int]]]()
        for piece in self.pieces:
            if piece.source is not None:
                parts_by_source.setdefault(piece.whole_source, []).append(piece.text_ids)
        return list(parts_by_source.values())

    @cached_property
    def ids_of_sources(self) -> list[np.ndarray]:
        """The tokens of each source, joined where its parts are judged."""
        return [np.array([*chain(*parts)]) for parts in self.parts_of_sources]

    @property
    def longest_length(self) -> int:
        """Number of tokens of the longest source."""
        return max(map(len, self.ids_of_sources))

    @property
    def ids_before_answer(self) -> list[int]:
        """All tokens that precede the answer, without the prefix."""
        ids = list[int]()
        for piece in self.pieces:
            ids += piece.text_ids
            ids += piece.after_ids
        return ids + self.local_ids


@dataclass(frozen=True)
class _Part:
    """A text of the prompt, and what separates it from the next."""

    segment: Segment
    after: str


@dataclass(frozen=True)
class _PromptTexts:
    """The texts of a prompt, before they are encoded."""

    parts: list[_Part]
    closing: str
    """The question, and what follows it until the answer begins."""


def encode_prompt(model: LoadedModel, request: AttributeRequest) -> SourcePrompt:
    """Encode the sources and the question of a request."""
    settings = request.settings
    turns = read_turns(request.sources)
    names = _candidate_names(parts_of(turns), request.candidates)
    is_chat = settings.chat or any(turn.role for turn in turns)
    if is_chat:
        texts = _through_template(model, turns, request.question)
        prefix_ids = list[int]()  # the template writes its own
    else:
        parts = [_Part(segment, AFTER_SOURCE) for segment in parts_of(turns)]
        texts = _PromptTexts(parts, f"{request.question}{AFTER_QUESTION}")
        prefix_ids = model.prefix_ids(request.loading.prefix, parts[0].segment.text)

    after_texts = [part.after for part in texts.parts]
    local_ids, *after_ids = model.encode([texts.closing, *after_texts], follow=True)
    segments = [part.segment for part in texts.parts]
    text_ids = _encode_segments(model, segments, settings.control_tokens)
    pieces = list[Piece]()
    for number, segment in enumerate(segments):
        source = names.index(segment.name) if segment.name in names else None
        pieces.append(Piece(text_ids[number], after_ids[number], source, source))
    prompt = SourcePrompt(model, names, pieces, local_ids, prefix_ids)
    if settings.units != "sources":
        return _divide_sources(prompt, settings.units)
    return prompt


def _encode_segments(
    model: LoadedModel, segments: Sequence[Segment], control_tokens: bool
) -> list[list[int]]:
    """Return the tokens of each part of a prompt.

    A source is encoded as a text of its own, and may hold no control tokens unless they are wanted.
    A part without a name is encoded as what it is: the beginning of the prompt, or a text that
    follows another, before which a tokenizer puts no space."""
    sources = [number for number, segment in enumerate(segments) if segment.name]
    in_view = [number for number, segment in enumerate(segments) if not segment.name]
    beginning = [number for number in in_view if number == 0]
    following = [number for number in in_view if number > 0]
    ids = dict[int, list[int]]()
    # One call for each kind of text, as tokenizers encode many texts faster than one by one.
    for numbers, options in (
        (sources, {"control_tokens": control_tokens}),
        (beginning, {}),
        (following, {"follow": True}),
    ):
        encoded = model.encode([segments[number].text for number in numbers], **options)
        ids.update(zip(numbers, encoded, strict=True))
    return [ids[number] for number in range(len(segments))]


# --- chat templates -------------------------------------------------------------------------------


def _through_template(
    model: LoadedModel, turns: Sequence[Turn], question: str | None
) -> _PromptTexts:
    """Return the texts of a prompt as the chat template writes it. The question ends the last
    message of the user. What the template itself writes stays in view. Report keys of messages that
    the template leaves out."""
    turns = [_stripped(turn) for turn in turns]
    if question is not None:
        if not turns or turns[-1].role != "user":
            turns.append(Turn("user", []))
        turns[-1].parts.append(Segment("", question.strip()))
    segments = parts_of(turns)
    texts = [segment.text for segment in segments]

    def messages(texts: Iterable[str], without_key: str = "") -> list[dict[str, Any]]:
        """Return the messages with these texts as their parts."""
        remaining = iter(texts)
        filled = list[dict[str, Any]]()
        for turn in turns:
            message = {key: value for key, value in turn.others.items() if key != without_key}
            content = AFTER_SOURCE.join(islice(remaining, len(turn.parts)))
            filled.append(message | {"role": turn.role, "content": content})
        return filled

    beginning, *between = split_template(model, messages, texts)

    # A template that writes the same without a key does not show it to the model.
    whole_prompt = through_template(model, messages(texts))
    keys = sorted(set(chain(*(turn.others for turn in turns))))
    unseen = [key for key in keys if through_template(model, messages(texts, key)) == whole_prompt]
    if unseen:
        say(f"the chat template leaves out what messages say as {', '.join(unseen)}")

    parts = [_Part(Segment("", beginning), "")]
    for segment, after in zip(segments, between, strict=True):
        # What separates parts of one message moves with the part; the template's own text does not.
        separator = AFTER_SOURCE if after.startswith(AFTER_SOURCE) else ""
        parts.append(_Part(segment, separator))
        parts.append(_Part(Segment("", after.removeprefix(separator)), ""))
    if question is None:
        return _PromptTexts(parts[:-1], parts[-1].segment.text)
    # The last two parts are the question and what follows it.
    return _PromptTexts(parts[:-2], segments[-1].text + between[-1])


def _stripped(turn: Turn) -> Turn:
    """Return the turn without white space around its parts, which templates remove, too."""
    parts = [replace(part, text=part.text.strip()) for part in turn.parts]
    return Turn(turn.role or "user", parts, turn.others)


# --- what is judged -------------------------------------------------------------------------------


def _candidate_names(parts: Sequence[Segment], candidates: Sequence[str] | None) -> list[str]:
    """Return the names of the sources that a verdict may name, in the order of the prompt."""
    names = [part.name for part in parts if part.name]
    duplicates = [name for number, name in enumerate(names) if name in names[:number]]
    if duplicates:
        raise ConfigError(f"two sources have one name, '{printable(duplicates[0])}'; rename one")
    if isinstance(candidates, str):
        candidates = [candidates]
    if candidates is not None:
        check_type("candidates", candidates, str, "a list of names of sources", several=True)
    unknown = sorted(set(candidates or ()) - set(names))
    if unknown:
        raise ConfigError(
            f"candidates: no source is named {', '.join(unknown)}; the names are {', '.join(names)}"
        )
    chosen = [name for name in names if candidates is None or name in candidates]
    if not chosen:
        raise ConfigError(
            "sources: none has a name, and a text without one stays in view; give {name: text, …}, "
            "or a list with Segment(name, text)"
        )
    return chosen


def _divide_sources(prompt: SourcePrompt, units: str) -> SourcePrompt:
    """Return the prompt with each source divided into parts, which are judged instead of it. The
    second part of notes.txt is named "notes.txt §2"."""
    names = list[str]()
    pieces = list[Piece]()
    for piece in prompt.pieces:
        if piece.source is None:
            pieces.append(piece)
            continue
        document = Document(np.array(piece.text_ids), tokenizer=prompt.model.tokenizer)
        ends = _ends_of_parts(document, units)
        first = 0
        for number, end in enumerate(ends, start=1):
            after_ids = piece.after_ids if end == ends[-1] else []
            ids = piece.text_ids[first:end]
            pieces.append(Piece(ids, after_ids, len(names), piece.source))
            names.append(f"{prompt.names[piece.source]} §{number}")
            first = end
    return replace(prompt, names=names, pieces=pieces)


def _ends_of_parts(document: Document, units: str) -> list[int]:
    """Return one past the last token of each part of a document."""
    num_tokens = len(document.tokens)
    width = span_width(units)
    if width is None:
        ends: list[int] = document.units(units, 0, num_tokens).end.tolist()
        return ends
    # Side by side; spans of other commands may overlap.
    return [*range(width, num_tokens, width), num_tokens]
