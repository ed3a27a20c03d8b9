"""Lay out named sources, a question and an answer as tokens, and draw the decoys of each source.

Place in the flow: sources + question + answer → **tokens, with a unit for each source and a target
for each statement** → statements.py.

Sources are encoded one by one, so that one can be replaced or moved and the others keep their
tokens. What is no candidate stays in view: the question, earlier statements, texts without a name.

Dimension key: S sources, D decoys of a source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from olmo_sparsity.analysis.explain.check import SAME_TEXT, passages
from olmo_sparsity.analysis.explain.prompt import generate, through_template
from olmo_sparsity.analysis.inputs.documents import Document
from olmo_sparsity.analysis.inputs.texts import open_documents
from olmo_sparsity.analysis.inputs.windows import Block, Spans, Units, Windows, span_width
from olmo_sparsity.analysis.models.load import LoadedModel
from olmo_sparsity.errors import ConfigError, DataError, UserError
from olmo_sparsity.runtime import Progress, say

AFTER_SOURCE, AFTER_QUESTION = "\n\n", "\n"

TRIES = 20
"""As many times as decoys are drawn, before it is said that no more differ."""


@dataclass(frozen=True)
class Segment:
    """A named part of a prompt: a source, a message, what a tool returned."""

    name: str
    text: str


Sources = Mapping[str, str] | Sequence[Segment | str | Mapping[str, Any]]
Turn = tuple[str, list[Segment]]
"""Role and parts of a message."""


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
        """Far places in view if only these sources are shown."""
        return np.union1d(self.in_view, self.units.places(*sources))


@dataclass(frozen=True)
class SourcePrompt:
    """Sources and question, encoded, with an answer once there is one."""

    model: LoadedModel
    names: list[str]
    pieces: list[Piece]
    near_ids: list[int]
    """The question, and what a chat template puts behind it."""

    prefix_ids: list[int]

    @staticmethod
    def of(
        model: LoadedModel,
        sources: Sources,
        question: str,
        candidates: Sequence[str] | None = None,
        prefix: str = "auto",
        chat: bool = False,
        units: str = "sources",
    ) -> SourcePrompt:
        """`units`: what is judged, sources or parts of each."""
        turns = _turns(sources)
        names = _candidates([part for _, parts in turns for part in parts], candidates)
        if chat or any(role for role, _ in turns):
            parts, closing, prefix_ids = *_through_template(model, turns, question), list[int]()
        else:
            parts = [(part, AFTER_SOURCE) for _, inside in turns for part in inside]
            closing, prefix_ids = (
                question + AFTER_QUESTION,
                model.prefix_ids(prefix, parts[0][0].text),
            )
        texts = [text for part, after in parts for text in (part.text, after)]
        near_ids, *of_parts = model.encode([closing, *texts])
        numbers = [names.index(part.name) if part.name in names else None for part, _ in parts]
        encoded = zip(of_parts[::2], of_parts[1::2], numbers, numbers, strict=True)
        pieces = [Piece(*of_part) for of_part in encoded]
        for piece in pieces:
            if piece.source is not None and not piece.text_ids:
                raise DataError(f"source '{names[piece.source]}' is empty; leave it out")
        if units != "sources":
            names, pieces = _parted(model, names, pieces, units)
        return SourcePrompt(model, names, pieces, near_ids, prefix_ids)

    @cached_property
    def wholes(self) -> list[list[Piece]]:
        """The parts of each source, in order."""
        found = dict[int | None, list[Piece]]()
        for piece in self.pieces:
            if piece.source is not None:
                found.setdefault(piece.whole, []).append(piece)
        return [*found.values()]

    @cached_property
    def whole_ids(self) -> list[np.ndarray]:
        """Tokens of each source, also where its parts are judged."""
        return [
            np.array([token for piece in parts for token in piece.text_ids])
            for parts in self.wholes
        ]

    @property
    def longest(self) -> int:
        return max(map(len, self.whole_ids))

    def _arranged(self, order: Sequence[int]) -> list[Piece]:
        """The sources in this order at the places of sources."""
        by_source = {piece.source: piece for piece in self.pieces if piece.source is not None}
        moved = iter([by_source[source] for source in order])
        return [piece if piece.source is None else next(moved) for piece in self.pieces]

    def lay_out(self, answer: Sequence[Sequence[int]], order: Sequence[int]) -> Layout:
        """`answer`: tokens of each statement, or of all as one, which is split into sentences."""
        first, end, text_ends = dict[int, int](), dict[int, int](), dict[int, int]()
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
        num_far = max(end.values())
        tokens += self.near_ids
        start = len(tokens)
        tokens += [token for statement in answer for token in statement]
        document = Document(np.array(tokens, dtype=np.int64), tokenizer=self.model.tokenizer)
        windows = Windows("all", start - num_far, len(tokens) - start, tuple(self.prefix_ids))
        windows.check()
        self.model.check_positions(
            windows.num_positions(len(tokens)), "give fewer or shorter sources, or a shorter answer"
        )
        sources = range(len(self.names))
        units = Units(*(np.array([ends[s] for s in sources]) for ends in (first, end)))
        return Layout(
            document,
            windows,
            _statements(document, start, [len(ids) for ids in answer]),
            units,
            np.array([text_ends[s] for s in sources]),
            np.array(in_view, dtype=np.int64),
        )

    def answer_ids(
        self, answer: str | Sequence[str] | None, max_new_tokens: int, quiet: bool = False
    ) -> list[list[int]]:
        """Tokens of the answer in one piece, or of each given statement; None: generated."""
        if answer is None:
            ids = [self._generate(max_new_tokens, quiet)]
        elif isinstance(answer, str):
            ids = self.model.encode([answer])
        else:  # a space between statements belongs to the later one
            ids = self.model.encode([" " * (i > 0) + text.strip() for i, text in enumerate(answer)])
        if not ids or not all(ids):
            raise DataError("the answer is empty, or the model ends the text at once; give one")
        return ids

    def _generate(self, max_new_tokens: int, quiet: bool) -> list[int]:
        """The model's own answer, each sentence said when the next one begins."""
        pieces = [token for p in self.pieces for token in (*p.text_ids, *p.after_ids)]
        before, said = [*self.prefix_ids, *pieces, *self.near_ids], 0
        with Progress("answering", max_new_tokens, "tokens", enabled=not quiet) as progress:

            def show(generated: list[int]) -> None:
                nonlocal said
                document = Document(np.array(generated), tokenizer=self.model.tokenizer)
                ends = document.units("sentences", 0, len(generated)).end
                if len(ends) > said + 1:
                    first = 0 if said == 0 else ends[said - 1]
                    progress.note("".join(document.texts[first : ends[said]]).strip())
                    said += 1
                progress.update(len(generated))

            return generate(self.model, before, max_new_tokens, show)


def _turns(sources: Sources) -> list[Turn]:
    """Messages and their parts; without messages, one turn without a role."""
    if isinstance(sources, Mapping):
        sources = [Segment(name, text) for name, text in sources.items()]
    if isinstance(sources, str) or not isinstance(sources, Sequence):
        raise ConfigError(
            "sources must be {name: text, …}, or a list of Segment(name, text), of texts that stay "
            'in view, and of messages {"role": …, "content": text or a list of these}; of a folder '
            "{path.name: path.read_text() for path in Path(folder).iterdir()}"
        )
    turns: list[Turn] = []
    for item in sources:
        if isinstance(item, Mapping):
            content = item.get("content")
            parts = content if isinstance(content, list) else [content]
            turns.append((str(item.get("role")), [_part(part) for part in parts]))
        else:
            if not turns or turns[-1][0]:
                turns.append(("", []))
            turns[-1][1].append(_part(item))
    return turns


def _part(item: Any) -> Segment:
    part = Segment("", item) if isinstance(item, str) else item
    if not isinstance(part, Segment) or not all(isinstance(x, str) for x in (part.name, part.text)):
        raise ConfigError(f"sources: {item!r} is neither a text nor a Segment of name and text")
    return part


def _through_template(
    model: LoadedModel, turns: Sequence[Turn], question: str
) -> tuple[list[tuple[Segment, str]], str]:
    """Parts with what separates each from the next, and the question with what stands behind it.
    The question ends the last message of the user. What the template writes stays in view."""
    turns = [(role or "user", [Segment(p.name, p.text.strip()) for p in ps]) for role, ps in turns]
    if not turns or turns[-1][0] != "user":
        turns.append(("user", []))
    turns[-1][1].append(Segment("", question.strip()))
    parts, marks = [part for _, parts in turns for part in parts], iter(range(10**6))

    def shown(spell: Callable[[Segment], str]) -> str:
        contents = [(role, AFTER_SOURCE.join(map(spell, inside))) for role, inside in turns]
        messages = [{"role": role, "content": content} for role, content in contents]
        return through_template(model, messages)

    # Unique placeholders show where the template puts the parts.
    first, *between = re.split(r"⟦\d+⟧", shown(lambda _: f"⟦{next(marks)}⟧"))
    found = [part.text + after for part, after in zip(parts, between, strict=False)]
    if len(between) != len(parts) or first + "".join(found) != shown(lambda part: part.text):
        raise DataError("the chat template changes the messages; write its text into `sources`")
    pairs = [(Segment("", first), "")]
    for part, after in zip(parts[:-1], between, strict=False):
        own = AFTER_SOURCE if after.startswith(AFTER_SOURCE) else ""
        pairs += [(part, own), (Segment("", after.removeprefix(own)), "")]
    return pairs, parts[-1].text + between[-1]


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


def _statements(document: Document, start: int, lengths: list[int]) -> Spans:
    """Of an answer in one piece, its sentences."""
    if len(lengths) > 1:
        ends = np.cumsum(lengths)
        return list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))
    # By itself, so that an open quotation or code of a source does not reach into it.
    answer = Document(document.tokens[start:], tokenizer=document.tokenizer)
    units = answer.units("sentences", 0, len(answer.tokens))
    return list(zip(units.first.tolist(), units.end.tolist(), strict=True))


# --- decoys ---------------------------------------------------------------------------------------


def read_decoys(model: LoadedModel, prompt: SourcePrompt, decoys: Any) -> list[np.ndarray]:
    """Different texts that say nothing that a source says. `decoys`: in any form that
    open_documents reads, or {name: text, …}."""
    longest, said = prompt.longest, _said(prompt)
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
        and all(runs.isdisjoint(passages(text, length)) for length, runs in said.items())
    }
    there = sum(map(len, kept.values()))
    if there < longest:
        raise DataError(
            f"the decoys have {there:,} tokens that share no passage with a source, "
            f"and the longest source has {longest:,}; give more texts (decoys)"
        )
    return [*kept.values()]


def _said(prompt: SourcePrompt) -> dict[int, set[bytes]]:
    """By length: passages of sources and of what stays in view, and all of a shorter source."""
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
    """decoys_DL of each source, all different: texts joined in random order, of which the middle is
    left out to make them as long as the source. So a decoy begins and ends as texts do; an end
    within a sentence would change how the question behind it is read. A part of a source has the
    same part of its source's decoy."""
    there, wanted = sum(map(len, texts)), draws * prompt.longest
    if len(texts) < draws or there < wanted:
        of_texts = f"{len(texts)} texts of {there:,} tokens"
        say(f"{draws} decoys, {wanted:,} tokens, are drawn from {of_texts}: some share text")
    drawn = dict[int | None, np.ndarray]()
    for number, (parts, own) in enumerate(zip(prompt.wholes, prompt.whole_ids, strict=True)):
        decoys_DL = _different(texts, own, draws, np.random.default_rng([seed, number]))
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
        # Each draw begins with another text; where there are no more, within one.
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
