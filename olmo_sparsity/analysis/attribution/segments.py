"""Lay out named sources, a question and an answer as tokens, and draw the decoys of each source.

Place in the flow: sources + question + answer → **tokens, with a unit for each source and a target
for each statement** → statements.py.

Sources are encoded one by one, so that one can be replaced or moved and the others keep their
tokens. Everything else stays in view: the question, earlier statements, texts without a name.

Dimension key: S sources, D decoys of a source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np

from olmo_sparsity.analysis.attribution.reasoning import num_reasoning
from olmo_sparsity.analysis.explain.check import SAME_TEXT, passages
from olmo_sparsity.analysis.explain.prompt import generate, split_template, through_template
from olmo_sparsity.analysis.inputs.documents import Document
from olmo_sparsity.analysis.inputs.texts import open_documents
from olmo_sparsity.analysis.inputs.windows import Block, Spans, Units, Windows, span_width
from olmo_sparsity.analysis.models.load import LoadedModel
from olmo_sparsity.errors import ConfigError, DataError, UserError, printable
from olmo_sparsity.runtime import Progress, say
from olmo_sparsity.streams import stream

AFTER_SOURCE, AFTER_QUESTION = "\n\n", "\n"

TRIES = 20
"""Attempts for each decoy, before an error reports that no more differ."""


@dataclass(frozen=True)
class Segment:
    """A named part of a prompt: a source, a message, what a tool returned."""

    name: str
    text: str


Sources = Mapping[str, str] | Sequence[Segment | str | Mapping[str, Any]]


@dataclass(frozen=True)
class Turn:
    """A message; without a role, texts outside messages."""

    role: str
    parts: list[Segment]
    others: dict[str, Any] = field(default_factory=dict)
    """What else it has, such as `tool_calls`."""


@dataclass(frozen=True)
class Answer:
    """An answer with the spans of characters, (first, end), of its statements. The rest of
    it stays in view."""

    text: str
    spans: Sequence[tuple[int, int]]

    def pieces(self) -> list[tuple[str, bool]]:
        """Texts that together are the answer, and whether each is a statement. White space belongs
        to the piece behind it, as tokens hold it."""
        found, at, space = list[tuple[str, bool]](), 0, ""
        for first, end in [*self._checked(), (len(self.text), len(self.text))]:
            for text, is_statement in ((self.text[at:first], False), (self.text[first:end], True)):
                words = (space + text).rstrip()
                space = (space + text)[len(words) :]
                found += [(words, is_statement)] if words else []
            at = end
        if space:
            found[-1] = (found[-1][0] + space, found[-1][1])
        return found

    def _checked(self) -> list[tuple[int, int]]:
        spans, last = sorted((int(first), int(end)) for first, end in self.spans), 0
        for first, end in spans:
            if not last <= first < end <= len(self.text) or not self.text[first:end].strip():
                raise ConfigError(
                    f"answer: the span ({first}, {end}) is empty, overlaps another, or ends after "
                    f"the {len(self.text)} characters; give (first, end) of each statement"
                )
            last = end
        if not spans:
            raise ConfigError(
                "answer: it has no spans; give (first, end) of each statement, or a text"
            )
        return spans


@dataclass(frozen=True)
class AnswerIds:
    """Tokens of the pieces of an answer."""

    pieces: list[list[int]]
    are_statements: list[bool] | None = None
    """None: there is one piece, which is split into sentences."""

    reasoning: list[int] = field(default_factory=list)
    """Tokens between the question and the answer."""


@dataclass(frozen=True)
class Piece:
    """Tokens of a part of the prompt, and of what separates it from the next."""

    text_ids: list[int]
    after_ids: list[int]
    source: int | None = None
    """None: it stays in view."""

    whole: int | None = None
    """The source that it is a part of; itself, where sources are judged."""


@dataclass(frozen=True)
class Layout:
    """A prompt with its answer, the sources in one order."""

    document: Document
    windows: Windows
    statements: Spans
    """Within the answer."""

    units: Units
    """The places of each source, with what separates it from the next."""

    text_ends: np.ndarray
    """One past the last place of each source's own text, which decoys replace."""

    in_view: np.ndarray
    """Places before the last source that belong to none."""

    @cached_property
    def block(self) -> Block:
        """The answer as targets; all sources lie in the far part."""
        start = int(self.windows.short) + self.num_far
        return self.windows.block(self.document.tokens, start, len(self.document.tokens))

    @property
    def num_far(self) -> int:
        return int(self.units.end.max())

    def shown(self, *sources: int) -> np.ndarray:
        """Return the far places in view if only these sources are shown."""
        return np.union1d(self.in_view, self.units.places(*sources))

    def by_statement(self, losses_RW: np.ndarray) -> np.ndarray:
        """losses_TR: the losses of the tokens of each statement, added up."""
        losses_RW = losses_RW.astype(float)
        return np.stack([losses_RW[:, first:end].sum(1) for first, end in self.statements])


@dataclass(frozen=True)
class SourcePrompt:
    """Sources and question, encoded, without an answer."""

    model: LoadedModel
    names: list[str]
    pieces: list[Piece]
    near_ids: list[int]
    """The question, and what a chat template puts behind it."""

    prefix_ids: list[int]
    num_reasoning: int = 0
    """Number of sources at the end that are sentences of the model's reasoning."""

    @staticmethod
    def of(
        model: LoadedModel,
        sources: Sources,
        question: str | None,
        candidates: Sequence[str] | None = None,
        prefix: str = "auto",
        chat: bool = False,
        units: str = "sources",
        control_tokens: bool = False,
    ) -> SourcePrompt:
        """`units`: what is judged, sources or parts of each. `control_tokens`: what sources say
        as `<|im_end|>` is one, and not its letters."""
        turns = read_turns(sources)
        names = _candidates([part for turn in turns for part in turn.parts], candidates)
        if chat or any(turn.role for turn in turns):
            parts, closing, prefix_ids = *_through_template(model, turns, question), list[int]()
        else:
            parts = [(part, AFTER_SOURCE) for turn in turns for part in turn.parts]
            closing = f"{question}{AFTER_QUESTION}"
            prefix_ids = model.prefix_ids(prefix, parts[0][0].text)
        near_ids, *after_ids = model.encode([closing, *(after for _, after in parts)])
        encode = partial(model.encode, control_tokens=control_tokens)
        named = iter(encode([part.text for part, _ in parts if part.name]))
        unnamed = iter(model.encode([part.text for part, _ in parts if not part.name]))
        pieces = []
        for (part, _), after in zip(parts, after_ids, strict=True):
            number = names.index(part.name) if part.name in names else None
            pieces.append(Piece(next(named if part.name else unnamed), after, number, number))
        if units != "sources":
            names, pieces = _parted(model, names, pieces, units)
        return SourcePrompt(model, names, pieces, near_ids, prefix_ids)

    def through(self, ids: list[int], spans: Spans) -> SourcePrompt:
        """Return the prompt continued by these tokens, in which these spans are sources, too."""
        if not spans:
            return replace(self, near_ids=[*self.near_ids, *ids])
        # A token in view precedes the answer.
        ends = [*(end for _, end in spans[:-1]), min(spans[-1][1], len(ids) - 1)]
        pieces = [*self.pieces, Piece([*self.near_ids, *ids[: spans[0][0]]], [])]
        for source, ((first, _), end) in enumerate(zip(spans, ends, strict=True), len(self.names)):
            pieces.append(Piece(ids[first:end], [], source, source))
        of_spans = [f"reasoning {i + 1}" for i in range(len(spans))]
        if twice := sorted({*self.names} & {*of_spans}):
            raise ConfigError(f"sources: '{twice[0]}' names a sentence of the reasoning; rename it")
        names = [*self.names, *of_spans]
        near_ids = ids[ends[-1] :]
        return replace(
            self, names=names, pieces=pieces, near_ids=near_ids, num_reasoning=len(spans)
        )

    @cached_property
    def wholes(self) -> list[list[Piece]]:
        """Return the parts of each source, in order."""
        found = dict[int | None, list[Piece]]()
        for piece in self.pieces:
            if piece.source is not None:
                found.setdefault(piece.whole, []).append(piece)
        return [*found.values()]

    @cached_property
    def whole_ids(self) -> list[np.ndarray]:
        """Return the tokens of each source, also where its parts are judged."""
        return [
            np.array([token for piece in parts for token in piece.text_ids])
            for parts in self.wholes
        ]

    @property
    def part_ids(self) -> list[list[int]]:
        """Return the tokens of each judged unit, by its number."""
        pieces = {piece.source: piece.text_ids for piece in self.pieces}
        return [pieces[source] for source in range(len(self.names))]

    @property
    def longest(self) -> int:
        return max(map(len, self.whole_ids))

    def _arranged(self, order: Sequence[int]) -> list[Piece]:
        """Return the prompt with the sources in this order."""
        by_source = {piece.source: piece for piece in self.pieces if piece.source is not None}
        moved = iter([by_source[source] for source in order])
        return [piece if piece.source is None else next(moved) for piece in self.pieces]

    def lay_out(self, answer: AnswerIds, order: Sequence[int]) -> Layout:
        first, end, text_ends = np.zeros((3, len(self.names)), dtype=np.int64)
        tokens, in_view = list[int](), list[int]()
        last = max(i for i, piece in enumerate(self.pieces) if piece.source is not None)
        for index, piece in enumerate(self._arranged(order)):
            places = range(len(tokens), len(tokens) + len(piece.text_ids) + len(piece.after_ids))
            tokens += [*piece.text_ids, *piece.after_ids]
            if piece.source is not None:
                first[piece.source], end[piece.source] = places.start, places.stop
                text_ends[piece.source] = places.start + len(piece.text_ids)
            elif index < last:
                in_view += places
        num_far = int(end.max())
        tokens += self.near_ids
        start = len(tokens)
        tokens += [token for piece in answer.pieces for token in piece]
        document = Document(np.array(tokens, dtype=np.int64), tokenizer=self.model.tokenizer)
        windows = Windows("all", start - num_far, len(tokens) - start, tuple(self.prefix_ids))
        windows.check()
        self.model.check_positions(
            windows.num_positions(len(tokens)), "give fewer or shorter sources, or a shorter answer"
        )
        statements = _statements(document, start, answer)
        in_view_F = np.array(in_view, dtype=np.int64)
        return Layout(document, windows, statements, Units(first, end), text_ends, in_view_F)

    def answer_ids(
        self,
        answer: Any,
        max_new_tokens: int,
        quiet: bool = False,
        reasoning: str | None = None,
    ) -> AnswerIds:
        """`answer`: a text, a list of statements, or an `Answer`; None: generated. `reasoning`:
        what precedes it; None: what a text has up to `</think>`."""
        before = self.model.encode([reasoning or ""])[0]
        if answer is None or isinstance(answer, str):
            own = (
                self.model.encode([answer])[0]
                if isinstance(answer, str)
                else self._generate(before, max_new_tokens, quiet)
            )
            num = 0 if before else num_reasoning(own, self.model.tokenizer)
            found = AnswerIds([own[num:]], None, before or own[:num])
        elif isinstance(answer, Answer):
            pieces = answer.pieces()
            ids = self.model.encode([text for text, _ in pieces])
            found = AnswerIds(ids, [is_statement for _, is_statement in pieces], before)
        elif isinstance(answer, Sequence) and all(isinstance(text, str) for text in answer):
            # A space between statements belongs to the later one.
            texts = [" " * (i > 0) + text.strip() for i, text in enumerate(answer)]
            found = AnswerIds(self.model.encode(texts), [True] * len(texts), before)
        else:
            raise ConfigError(
                f"answer={printable(repr(answer))[:80]} must be a text, a list of texts (its "
                "statements), or Answer(text, spans); quote a number"
            )
        if not found.pieces or not all(found.pieces):
            raise DataError("the answer is empty, or the model ends the text at once; give one")
        return found

    def _generate(self, reasoning: list[int], max_new_tokens: int, quiet: bool) -> list[int]:
        """Return the model's own answer; show each sentence when the next one begins."""
        pieces = [token for p in self.pieces for token in (*p.text_ids, *p.after_ids)]
        before, num_shown = [*self.prefix_ids, *pieces, *self.near_ids, *reasoning], 0
        with Progress("answering", max_new_tokens, "tokens", enabled=not quiet) as progress:

            def show(generated: list[int]) -> None:
                nonlocal num_shown
                document = Document(np.array(generated), tokenizer=self.model.tokenizer)
                ends = document.units("sentences", 0, len(generated)).end
                if len(ends) > num_shown + 1:
                    first = 0 if num_shown == 0 else ends[num_shown - 1]
                    progress.note("".join(document.texts[first : ends[num_shown]]).strip())
                    num_shown += 1
                progress.update(len(generated))

            return generate(self.model, before, max_new_tokens, show)


def read_turns(sources: Sources) -> list[Turn]:
    """Return messages and their parts; without messages, one turn without a role."""
    if isinstance(sources, Mapping):
        sources = [Segment(name, text) for name, text in sources.items()]
    if isinstance(sources, str) or not isinstance(sources, Sequence):
        raise ConfigError(
            "sources must be {name: text, …}, or a list of Segment(name, text), texts that stay in "
            'view, and messages {"role": …, "content": text or a list of these}'
        )
    turns: list[Turn] = []
    for item in sources:
        if isinstance(item, Mapping):
            others = {key: item[key] for key in item if key not in ("role", "content")}
            role, content = item.get("role"), item.get("content")
            if not isinstance(role, str) or not role or (content is None and not others):
                raise ConfigError(
                    f"sources: {printable(repr(item))[:80]} is not a message with role and "
                    "content; a source in a list is Segment(name, text)"
                )
            parts = content if isinstance(content, list) else [content] if content else []
            turns.append(Turn(role, [_part(part) for part in parts], others))
        else:
            if not turns or turns[-1].role:
                turns.append(Turn("", []))
            turns[-1].parts.append(_part(item))
    return turns


def _part(item: Any) -> Segment:
    part = Segment("", item) if isinstance(item, str) else item
    if not isinstance(part, Segment) or not all(isinstance(x, str) for x in (part.name, part.text)):
        raise ConfigError(f"sources: {item!r:.60} is neither a text nor a Segment of name and text")
    if any("\ud800" <= letter <= "\udfff" for letter in part.name + part.text):
        raise ConfigError(f"sources: {item!r:.60} holds half of a surrogate pair, which is no text")
    if part is item and not (part.name.strip() and part.text.strip()):
        raise ConfigError(f"sources: {item!r:.60} has an empty name or text; leave it out")
    return part


def _through_template(
    model: LoadedModel, turns: Sequence[Turn], question: str | None
) -> tuple[list[tuple[Segment, str]], str]:
    """Parts with what separates each from the next, and the question with what follows it.
    A question ends the last message of the user. What the template writes stays in view, calls of
    tools too; a line reports what it leaves out of a message."""
    turns = [
        Turn(
            turn.role or "user", [replace(p, text=p.text.strip()) for p in turn.parts], turn.others
        )
        for turn in turns
    ]
    if question is not None:
        if not turns or turns[-1].role != "user":
            turns.append(Turn("user", []))
        turns[-1].parts.append(Segment("", question.strip()))
    parts = [part for turn in turns for part in turn.parts]

    def messages(texts: Iterable[str], without: str = "") -> list[dict[str, Any]]:
        rest = iter(texts)
        return [
            {key: value for key, value in turn.others.items() if key != without}
            | {"role": turn.role, "content": AFTER_SOURCE.join(islice(rest, len(turn.parts)))}
            for turn in turns
        ]

    texts = [part.text for part in parts]
    first, *between = split_template(model, messages, texts)
    whole = through_template(model, messages(texts))
    keys = sorted({key for turn in turns for key in turn.others})
    unseen = [key for key in keys if through_template(model, messages(texts, key)) == whole]
    if unseen:
        say(f"the chat template leaves out what messages say as {', '.join(unseen)}")
    pairs = [(Segment("", first), "")]
    for part, after in zip(parts, between, strict=True):
        own = AFTER_SOURCE if after.startswith(AFTER_SOURCE) else ""
        pairs += [(part, own), (Segment("", after.removeprefix(own)), "")]
    if question is None:
        return pairs[:-1], pairs[-1][0].text
    return pairs[:-2], parts[-1].text + between[-1]


def _candidates(parts: Sequence[Segment], candidates: Sequence[str] | None) -> list[str]:
    names = [part.name for part in parts if part.name]
    if len(set(names)) < len(names):
        raise ConfigError(f"two sources have one name: {', '.join(names)}")
    if isinstance(candidates, str):
        candidates = [candidates]
    if unknown := sorted(set(candidates or ()) - set(names)):
        raise ConfigError(f"candidates: no source is named {', '.join(unknown)}")
    chosen = [name for name in names if candidates is None or name in candidates]
    if not chosen:
        raise ConfigError(
            "sources: none has a name, and a text without one stays in view and is never chosen; "
            "give {name: text, …}, or a list with Segment(name, text)"
        )
    return chosen


def _parted(
    model: LoadedModel, names: list[str], pieces: Sequence[Piece], units: str
) -> tuple[list[str], list[Piece]]:
    """Names and pieces of the parts of each source: "notes.txt §2" is the second of notes.txt."""
    new_names, new_pieces = list[str](), list[Piece]()
    width = span_width(units)
    for piece in pieces:
        if piece.source is None:
            new_pieces.append(piece)
            continue
        document = Document(np.array(piece.text_ids), tokenizer=model.tokenizer)
        if width is None:
            ends = document.units(units, 0, len(document.tokens)).end.tolist()
        else:  # side by side
            ends = [*range(width, len(document.tokens), width), len(document.tokens)]
        for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False), start=1):
            after_ids = piece.after_ids if end == ends[-1] else []
            ids = piece.text_ids[first:end]
            new_pieces.append(Piece(ids, after_ids, len(new_names), piece.source))
            new_names.append(f"{names[piece.source]} §{number}")
    return new_names, new_pieces


def _statements(document: Document, start: int, answer: AnswerIds) -> Spans:
    if answer.are_statements is not None:
        ends = np.cumsum([len(ids) for ids in answer.pieces]).tolist()
        pairs = zip([0, *ends], ends, answer.are_statements, strict=False)
        return [(first, end) for first, end, is_statement in pairs if is_statement]
    # By itself, so that an open quotation or code of a source does not reach into it.
    whole = Document(document.tokens[start:], tokenizer=document.tokenizer)
    units = whole.units("sentences", 0, len(whole.tokens))
    return list(zip(units.first.tolist(), units.end.tolist(), strict=True))


# --- decoys ---------------------------------------------------------------------------------------


def read_decoys(model: LoadedModel, prompt: SourcePrompt, decoys: Any) -> list[np.ndarray]:
    """Return different texts that share no passage with a source. `decoys`: in any form that
    open_documents reads, or {name: text, …}."""
    longest, passages_of = prompt.longest, _passages(prompt)
    given = list(decoys.values()) if isinstance(decoys, Mapping) else decoys
    if isinstance(given, list) and all(isinstance(text, str) for text in given):
        texts = [np.array(ids, dtype=np.int64) for ids in model.encode(given)]
    else:
        limit = max(100, longest // 10)
        try:
            texts = [document.tokens for document in open_documents(given, model, limit=limit)]
        except UserError as error:
            raise type(error)(f"decoys: {error}") from None
    kept = {
        text.tobytes(): text
        for text in texts
        if len(text)
        and all(runs.isdisjoint(passages(text, length)) for length, runs in passages_of.items())
    }
    num_tokens = sum(map(len, kept.values()))
    if num_tokens < longest:
        raise DataError(
            f"the decoys have {num_tokens:,} tokens that share no passage with a source, "
            f"and the longest source has {longest:,}; give more texts (decoys)"
        )
    return [*kept.values()]


def _passages(prompt: SourcePrompt) -> dict[int, set[bytes]]:
    """Return, by length, passages of sources and of what stays in view, and all of a shorter
    source."""
    found = dict[int, set[bytes]]()
    in_view = [piece.text_ids for piece in prompt.pieces if piece.source is None]
    long = [np.array(ids) for ids in in_view if len(ids) >= SAME_TEXT]
    for ids in [*prompt.whole_ids, *long]:
        length = min(SAME_TEXT, len(ids))
        found.setdefault(length, set()).update(passages(ids, length))
    return found


def draw_decoys(
    prompt: SourcePrompt, texts: Sequence[np.ndarray], draws: int, seed: int
) -> list[np.ndarray]:
    """Return decoys_DL of each source, all different: texts joined in random order. Their middle is
    left out to make them as long as the source. So a decoy begins and ends as texts do; an end
    within a sentence would change how the question behind it is read. A part of a source has the
    same part of its source's decoy."""
    num_tokens, needed = sum(map(len, texts)), draws * prompt.longest
    if len(texts) < draws or num_tokens < needed:
        of_texts = f"{len(texts)} texts of {num_tokens:,} tokens"
        say(f"{draws} decoys, {needed:,} tokens, are drawn from {of_texts}: some share text")
    drawn = dict[int | None, np.ndarray]()
    for number, (parts, own) in enumerate(zip(prompt.wholes, prompt.whole_ids, strict=True)):
        decoys_DL = _different(texts, own, draws, stream(seed, "decoys", number))
        if len(decoys_DL) < draws:
            raise DataError(
                f"of {len(own)} tokens, as source '{prompt.names[parts[0].source or 0]}' has, the "
                f"texts make only {len(decoys_DL)} different decoys of {draws}; give more and more "
                "varied texts (decoys), or join the source to another"
            )
        ends = np.cumsum([len(piece.text_ids) for piece in parts])
        for piece, of_part in zip(parts, np.split(decoys_DL, ends[:-1], axis=1), strict=True):
            drawn[piece.source] = of_part
    return [drawn[source] for source in range(len(prompt.names))]


def _different(
    texts: Sequence[np.ndarray], own: np.ndarray, draws: int, generator: np.random.Generator
) -> np.ndarray:
    """decoys_DL, fewer if it finds no more that differ from each other and from the source."""
    found, length = dict[bytes, np.ndarray](), len(own)
    firsts = np.resize(generator.permutation(len(texts)), TRIES * draws).tolist()
    for number, first in enumerate(firsts):
        rest = [other for other in generator.permutation(len(texts)).tolist() if other != first]
        # Each draw begins with another text; after the last one, within one.
        begin = 0 if number < len(texts) else int(generator.integers(len(texts[first])))
        ordered = [texts[first][begin:], *(texts[other] for other in rest), texts[first][:begin]]
        enough = np.argmax(np.cumsum([len(text) for text in ordered]) >= length) + 1
        joined = np.concatenate(ordered[:enough])
        row = np.delete(joined, slice((length + 1) // 2, len(joined) - length // 2))
        if not np.array_equal(row, own):
            found.setdefault(row.tobytes(), row)
        if len(found) == draws:
            break
    return np.array([*found.values()], dtype=np.int64).reshape(-1, length)
