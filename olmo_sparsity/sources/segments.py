"""Lay out a request as tokens, and draw the decoys of each source.

Place in the flow: request → **tokens, a unit for each source, a target for each statement** →
statements.py. Sources are encoded one by one, so that the others keep their tokens if one is
replaced. Dimension key: S sources, D decoys of a source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.analysis.explain.prompt import (
    SAME_TEXT,
    generate,
    passages,
    split_template,
    through_template,
)
from olmo_sparsity.analysis.options import ModelOptions, Request
from olmo_sparsity.base.errors import ConfigError, DataError, UserError, printable
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.sources.documents import Answer, Segment, Sources, Turn, read_turns
from olmo_sparsity.sources.messages import Messages, read_messages
from olmo_sparsity.sources.options import ServerOptions, SourceSettings
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.text.windows import Block, Spans, Units, Windows, span_width


@dataclass(frozen=True, kw_only=True)
class AttributeRequest(Request):
    model: Any
    tokenizer: Any = None
    sources: Sources | None = None
    question: str | None = None  # None: sources are messages, the last of which is the question
    messages: Messages | None = None  # `checked` turns them into sources and an answer
    message: int = -1
    passages: str | None = None  # in the last message of the user: a tag or regular expression
    answer: str | Sequence[str] | Answer | None = None  # None: generated
    reasoning: str | None = None  # None: the answer up to `</think>`, if it has that
    candidates: Sequence[str] | None = None
    decoys: Any = None
    settings: SourceSettings = field(default_factory=SourceSettings)
    loading: ModelOptions = field(default_factory=ModelOptions)
    serving: ServerOptions = field(default_factory=ServerOptions)

    def checked(self) -> Self:
        self.settings.check()
        own = {name: getattr(self, name) for name in ("sources", "question", "answer", "reasoning")}
        if self.messages is not None:
            if unfit := [name for name, value in own.items() if value is not None]:
                raise ConfigError(f"{unfit[0]} cannot be combined with messages; leave it out")
            sources, answer, reasoning = read_messages(self.messages, self.message, self.passages)
            read = replace(self, messages=None, sources=sources, answer=answer, reasoning=reasoning)
            return replace(read, message=-1, passages=None).checked()
        if self.passages is not None:
            raise ConfigError(f"passages={self.passages!r:.40} belongs to `messages`; leave it out")
        if self.message != -1:
            raise ConfigError(f"message={self.message} belongs to `messages`; leave it out")
        turns = read_turns(self.sources)
        is_log = self.question is None and bool(turns and turns[-1].role)
        if not is_log and (not isinstance(self.question, str) or not self.question.strip()):
            raise ConfigError(f"question={self.question!r:.60} must be a text, after the sources")
        if self.reasoning is not None and not isinstance(self.reasoning, str):
            raise ConfigError(f"reasoning={self.reasoning!r:.60} must be a text")
        return self

    @property
    def asked(self) -> str:
        """The question, or the last message of the user."""
        if self.question is not None:
            return self.question
        turns = read_turns(self.sources)
        last = next((turn for turn in reversed(turns) if turn.role == "user"), turns[-1])
        words = [part.text for part in last.parts if not part.name]
        return "\n".join(words or [part.text for part in last.parts])


AFTER_SOURCE, AFTER_QUESTION = "\n\n", "\n"
TRIES = 20  # attempts for each decoy, before an error reports that no more differ


@dataclass(frozen=True)
class AnswerIds:
    """Tokens of the pieces of an answer."""

    pieces: list[list[int]]
    are_statements: list[bool] | None = None  # None: one piece, which is split into sentences
    reasoning: list[int] = field(default_factory=list)  # between the question and the answer


@dataclass(frozen=True)
class Piece:
    """Tokens of a part of the prompt, and of what separates it from the next."""

    text_ids: list[int]
    after_ids: list[int]
    source: int | None = None  # None: it stays in view
    whole: int | None = None  # the source that it is a part of, or that it is


@dataclass(frozen=True)
class Layout:
    """A prompt with its answer."""

    document: Document
    windows: Windows
    statements: Spans  # within the answer
    units: Units  # places of each source, with what separates it from the next
    text_ends: np.ndarray  # one past each source's own text, which decoys replace

    @cached_property
    def block(self) -> Block:
        """The answer as targets; all sources lie in the distant part."""
        start = int(self.windows.short) + self.num_distant
        return self.windows.block(self.document.tokens, start, len(self.document.tokens))

    @property
    def num_distant(self) -> int:
        return int(self.units.end.max())

    @property
    def before_question(self) -> np.ndarray:
        """Tokens up to the last source."""
        return self.block.tokens[: self.block.num_prefix + self.block.num_distant]

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
    near_ids: list[int]  # the question, and what a chat template puts behind it
    prefix_ids: list[int]
    num_reasoning: int = 0  # sources at the end that are sentences of the model's reasoning

    @staticmethod
    def of(model: LoadedModel, request: AttributeRequest) -> SourcePrompt:
        turns, settings = read_turns(request.sources), request.settings
        names = _candidates([part for turn in turns for part in turn.parts], request.candidates)
        if settings.chat or any(turn.role for turn in turns):
            parts, closing = _through_template(model, turns, request.question)
            prefix_ids = list[int]()
        else:
            parts = [(part, AFTER_SOURCE) for turn in turns for part in turn.parts]
            closing = f"{request.question}{AFTER_QUESTION}"
            prefix_ids = model.prefix_ids(request.loading.prefix, parts[0][0].text)
        afters = [closing, *(after for _, after in parts)]
        near_ids, *after_ids = model.encode(afters, follow=True)
        encode = partial(model.encode, control_tokens=settings.control_tokens)
        named = iter(encode([part.text for part, _ in parts if part.name]))
        texts = [part.text for part, _ in parts if not part.name]
        begins = [] if parts[0][0].name else texts[:1]
        followers = model.encode(texts[len(begins) :], follow=True)
        unnamed = iter([*model.encode(begins), *followers])
        pieces = []
        for (part, _), after in zip(parts, after_ids, strict=True):
            number = names.index(part.name) if part.name in names else None
            pieces.append(Piece(next(named if part.name else unnamed), after, number, number))
        if settings.units != "sources":
            names, pieces = _parted(model, names, pieces, settings.units)
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
    def wholes(self) -> list[list[list[int]]]:
        """Tokens of the judged parts of each source, in order."""
        found = dict[int | None, list[list[int]]]()
        for piece in self.pieces:
            if piece.source is not None:
                found.setdefault(piece.whole, []).append(piece.text_ids)
        return [*found.values()]

    @cached_property
    def whole_ids(self) -> list[np.ndarray]:
        """Tokens of each source, also where its parts are judged."""
        return [np.array([*chain(*parts)]) for parts in self.wholes]

    @property
    def longest(self) -> int:
        return max(map(len, self.whole_ids))

    def lay_out(self, answer: AnswerIds) -> Layout:
        first, end, text_ends = np.zeros((3, len(self.names)), dtype=np.int64)
        tokens = list[int]()
        for piece in self.pieces:
            places = range(len(tokens), len(tokens) + len(piece.text_ids) + len(piece.after_ids))
            tokens += [*piece.text_ids, *piece.after_ids]
            if piece.source is not None:
                first[piece.source], end[piece.source] = places.start, places.stop
                text_ends[piece.source] = places.start + len(piece.text_ids)
        num_distant = int(end.max())
        tokens += self.near_ids
        start = len(tokens)
        tokens += [token for piece in answer.pieces for token in piece]
        document = Document(np.array(tokens, dtype=np.int64), tokenizer=self.model.tokenizer)
        windows = Windows("all", start - num_distant, len(tokens) - start, tuple(self.prefix_ids))
        windows.check()
        self.model.check_positions(windows.num_positions(len(tokens)), "give fewer sources")
        statements = _statements(document, start, answer)
        return Layout(document, windows, statements, Units(first, end), text_ends)

    def answer_ids(
        self, answer: Any, max_new_tokens: int, quiet: bool = False, reasoning: str | None = None
    ) -> AnswerIds:
        encode = partial(self.model.encode, follow=True)
        before = encode([reasoning or ""])[0]
        if answer is None or isinstance(answer, str):
            own = encode([answer or ""])[0]
            if answer is None:
                own = self._generate(before, max_new_tokens, quiet)
            num = 0 if before else num_reasoning(own, self.model.tokenizer)
            found = AnswerIds([own[num:]], None, before or own[:num])
        elif isinstance(answer, Answer):
            pieces = answer.pieces()
            ids = encode([text for text, _ in pieces])
            found = AnswerIds(ids, [is_statement for _, is_statement in pieces], before)
        elif isinstance(answer, Sequence) and all(isinstance(text, str) for text in answer):
            # A space between statements belongs to the later one.
            texts = [" " * (i > 0) + text.strip() for i, text in enumerate(answer)]
            found = AnswerIds(encode(texts), [True] * len(texts), before)
        else:
            said = printable(repr(answer))[:60]
            raise ConfigError(f"answer={said} must be a text, a list of texts or an Answer")
        if not found.pieces or not all(found.pieces):
            raise DataError("the answer is empty, or the model ends the text at once; give one")
        return found

    def _generate(self, reasoning: list[int], max_new_tokens: int, quiet: bool) -> list[int]:
        pieces = [token for p in self.pieces for token in (*p.text_ids, *p.after_ids)]
        before = [*self.prefix_ids, *pieces, *self.near_ids, *reasoning]
        with Progress("answering", max_new_tokens, "tokens", enabled=not quiet) as progress:
            return generate(
                self.model,
                before,
                max_new_tokens,
                lambda generated: progress.update(len(generated)),
            )


def _through_template(
    model: LoadedModel, turns: Sequence[Turn], question: str | None
) -> tuple[list[tuple[Segment, str]], str]:
    """Parts with what separates each from the next, and the question, which ends the last message
    of the user, with what follows it. A line reports what the template leaves out of a message."""
    turns = [
        Turn(one.role or "user", [replace(p, text=p.text.strip()) for p in one.parts], one.others)
        for one in turns
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
        raise ConfigError("sources: none has a name, so all stay in view; give {name: text, …}")
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


def statement_texts(model: LoadedModel, answer: str | Sequence[str] | Answer) -> list[str]:
    """Return the statements of an answer without a prompt, split as in `SourcePrompt.lay_out`."""
    if isinstance(answer, Answer):
        return [text.strip() for text, is_statement in answer.pieces() if is_statement]
    if not isinstance(answer, str):
        return [text.strip() for text in answer]
    ids = model.encode([answer])[0]
    document = Document(
        np.array(ids[num_reasoning(ids, model.tokenizer) :]), tokenizer=model.tokenizer
    )
    units = document.units("sentences", 0, len(document.tokens))
    spans = zip(units.first.tolist(), units.end.tolist(), strict=True)
    return ["".join(document.texts[first:end]).strip() for first, end in spans]


def read_decoys(model: LoadedModel, prompt: SourcePrompt, decoys: Any) -> list[np.ndarray]:
    """Return different texts that share no passage with a source."""
    longest, passages_of = prompt.longest, _passages(prompt)
    given = list(decoys.values()) if isinstance(decoys, Mapping) else decoys
    if isinstance(given, list) and all(isinstance(text, str) for text in given):
        encoded = model.encode(given, control_tokens=False)
        texts = [np.array(ids, dtype=np.int64) for ids in encoded]
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
        found = f"{num_tokens:,} tokens share no passage with a source, of {longest:,} needed"
        raise DataError(f"decoys: {found}; give more texts")
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
    """Return decoys_DL of each judged part: texts joined in random order, without their middle, so
    that a decoy is as long as its source and begins and ends as texts do: an end within a sentence
    would change how the question is read."""
    num_tokens, needed = sum(map(len, texts)), draws * prompt.longest
    if len(texts) < draws or num_tokens < needed:
        of_texts = f"{len(texts)} texts of {num_tokens:,} tokens"
        say(f"{draws} decoys, {needed:,} tokens, are drawn from {of_texts}: some share text")
    drawn = list[np.ndarray]()
    for number, (parts, own) in enumerate(zip(prompt.wholes, prompt.whole_ids, strict=True)):
        decoys_DL = _different(texts, own, draws, stream(seed, "decoys", number))
        if len(decoys_DL) < draws:
            found = f"only {len(decoys_DL)} different ones of {len(own)} tokens, and {draws=}"
            raise DataError(f"decoys: the texts make {found}; give more texts")
        drawn += np.split(decoys_DL, np.cumsum([len(ids) for ids in parts])[:-1], axis=1)
    return drawn


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


CLOSING = "</think>"
TAGGED = re.compile(r"(\s*<[\w-]+>)?(.*?)(</[\w-]+>\s*)?", re.DOTALL)
LEAST = 5  # tokens of a sentence; a shorter one is joined to the next, or to that before


def num_reasoning(ids: Sequence[int], tokenizer: Tokenizer | None) -> int:
    """Return how many tokens precede the answer, up to `</think>` and white space, or 0."""
    texts = Document(np.array(ids), tokenizer=tokenizer).texts
    before, closing, _ = "".join(texts).partition(CLOSING)
    if not closing:
        return 0
    num = 1 + int(np.searchsorted(_ends(texts), len(before + closing)))
    while num < len(texts) and not texts[num].strip():
        num += 1
    return num


def sentences(ids: Sequence[int], tokenizer: Tokenizer | None) -> Spans:
    """Return first and end token of each sentence, without tags around all of them."""
    texts = Document(np.array(ids), tokenizer=tokenizer).texts
    found, ends = TAGGED.fullmatch("".join(texts)), _ends(texts)
    assert found is not None
    first = int(np.searchsorted(ends, found.start(2), side="right"))
    last = int(np.searchsorted(ends, found.end(2), side="right"))
    if last <= first or not found[2].strip():
        return []
    # By themselves, as statements are.
    inner = Document(np.array(ids[first:last]), tokenizer=tokenizer)
    spans, begin = list[tuple[int, int]](), first
    for end in (first + inner.units("sentences", 0, last - first).end).tolist():
        if end - begin >= LEAST:
            spans.append((begin, end))
            begin = end
    if begin < last:
        spans[-1:] = [(spans[-1][0] if spans else begin, last)]
    return spans


def _ends(texts: Sequence[str]) -> np.ndarray:
    return np.cumsum([len(text) for text in texts], dtype=int)
