"""Score documents for long-context training: what does distant text add, and does it have to be
this document's?

The same tokens of a document, one random block (or several), get their loss with several numbers of
tokens before them: `local`, and each of `contexts` that the document is long enough for.

    gain            mean loss with the local context − that with the longest context
    gain_unrelated  the same with another document in place of all but the local tokens
    net_gain        gain − gain_unrelated: what an unrelated text of this length cannot give

Every number is the loss of a plain forward pass over consecutive tokens, from position 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from olmo_sparsity.analysis.options import ModelOptions, Request, ScoreSettings
from olmo_sparsity.analysis.results.statistics import LCL_NATS, LSD_NATS
from olmo_sparsity.analysis.results.tables import plain
from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.analysis.scoring.scorer import Context, Row, Scorer, bigrams, refuse_no_numbers
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.files import refuse_suffix, writing
from olmo_sparsity.base.folders import Pieces, WorkFolder, locked
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.base.streams import VERSION, stream
from olmo_sparsity.models.load import load_model
from olmo_sparsity.models.loaded import LoadedModel, identity_of
from olmo_sparsity.text.corpus import list_inputs
from olmo_sparsity.text.inputs import open_text
from olmo_sparsity.text.windows import Windows

POOL = 32
"""Documents that unrelated text is taken from: the first ones that have more than local tokens, so
that a document's score does not depend on which process computes it."""

LOOKED_AT = 512
"""Number of documents that the pool is chosen from, at most."""

PART_DOCUMENTS, PART_CHARACTERS = 64, 2**17
"""A part of the output, which a killed process loses, ends after so many of either."""


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(Request):
    """A call of the command `score`, checked."""

    model: LoadedModel | str | Path
    text: str
    out: str | Path
    """A .parquet file."""

    field: str = "text"
    shard: tuple[int, int] = (0, 1)
    """The i-th of n processes that write parts of one file."""

    settings: ScoreSettings = dataclasses.field(default_factory=ScoreSettings)
    loading: ModelOptions = dataclasses.field(default_factory=ModelOptions)

    def checked(self) -> Self:
        self.settings.check()
        refuse_suffix("out", self.out, ".parquet")
        index, of = self.shard
        if not 0 <= index < of:
            raise ConfigError(f"shard={self.shard} must be (i, n) with 0 <= i < n")
        return self


@dataclass(frozen=True)
class _Text:
    number: int
    text: str
    file: str = ""
    row: int = 0


def score(
    model: LoadedModel | str | Path,
    documents: Iterable[str | Mapping[str, Any]],
    *,
    contexts: Sequence[int] = (1024, 4096),
    local: int = 512,
    blocks: int = 1,
    field: str = "text",
    prefix: str = "auto",
    seed: int = 0,
    batch_tokens: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the scores of each document, in order.

    `documents`: strings, or mappings that hold the text in `field`. They are read a few dozen at a
    time. `contexts`: numbers of tokens before a scored token; of a document, those it is long
    enough for. `local`: tokens before a scored token that count as local, and tokens of a block of
    scored tokens. `blocks`: scored blocks of a document, at random places. A document costs
    blocks × (Σ contexts + largest context + local · (number of contexts + 3)) token-forwards.
    """
    settings = ScoreSettings(contexts=tuple(contexts), local=local, blocks=blocks, seed=seed)
    settings.check()
    texts = _in_memory(documents, field)
    first = next(texts, None)
    if first is None:
        return
    options = ModelOptions(prefix=prefix, batch_tokens=batch_tokens)
    scoring = _Scoring(model, settings, options, first.text)
    for part in scoring.parts(chain([first], texts)):
        yield from scoring.rows(part)


def _in_memory(documents: Iterable[str | Mapping[str, Any]], field: str) -> Iterator[_Text]:
    if isinstance(documents, str):
        raise ConfigError("documents is one string; pass a list of strings or mappings")
    for number, given in enumerate(documents):
        text = given.get(field) if isinstance(given, Mapping) else given
        if not isinstance(text, str):
            raise DataError(f"documents[{number}] holds no text in the field '{field}'")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise DataError(f"documents[{number}] holds half of a surrogate pair")
        yield _Text(number, text, row=number)


class _Scoring:
    """One model with its settings, and the texts that unrelated tokens are taken from."""

    def __init__(
        self,
        model: LoadedModel | str | Path,
        settings: ScoreSettings,
        options: ModelOptions,
        beginning: str,
    ) -> None:
        """`beginning`: a text, before which the tokenizer puts its prefix."""
        if not isinstance(model, LoadedModel):
            model = load_model(model, **options.loading)
        if model.tokenizer is None:
            raise ConfigError(f"'{model.name}' has no tokenizer, and documents are texts")
        self.model, self.settings = model, settings
        self.prefix = tuple(model.prefix_ids(options.prefix, beginning))
        longest = len(self.prefix) + max(settings.contexts) + settings.local
        model.check_positions(longest, "give smaller contexts")
        self.scorer = Scorer(model.model, far_states="isolated", batch_tokens=options.batch_tokens)
        self.pool: list[tuple[bytes, np.ndarray]] = []

    # --- documents in parts ---

    def parts(self, texts: Iterator[_Text]) -> Iterator[list[_Text]]:
        """Choose the pool, and cut the stream where a part is full."""
        first = list[_Text]()
        for batch in iter(lambda: list(islice(texts, POOL)), []):
            first += batch
            for one, tokens in zip(batch, self.tokens(batch), strict=True):
                if len(tokens) > self.settings.local and len(self.pool) < POOL:
                    self.pool.append((_digest(one.text), tokens))
            if len(self.pool) == POOL or len(first) >= LOOKED_AT:
                break
        if sum(len(tokens) for _, tokens in self.pool) < 2 * max(self.settings.contexts):
            say("few long documents: gain_unrelated and net_gain will be empty for some")
        part, size = list[_Text](), 0
        for one in chain(first, texts):
            part.append(one)
            size += len(one.text)
            if len(part) == PART_DOCUMENTS or size >= PART_CHARACTERS:
                yield part
                part, size = [], 0
        if part:
            yield part

    def digest(self, part: Sequence[_Text]) -> str:
        """Return a hash of what the rows of a part depend on, as texts may change."""
        found = hashlib.sha256(b"".join(digest for digest, _ in self.pool))
        for one in part:
            found.update(_digest(json.dumps([*vars(one).values()])))
        return found.hexdigest()

    def tokens(self, texts: Sequence[_Text]) -> list[np.ndarray]:
        encoded = self.model.encode([one.text for one in texts], control_tokens=False)
        return [np.array(ids, np.int64) for ids in encoded]

    # --- the scores of a part ---

    def rows(self, part: Sequence[_Text]) -> list[dict[str, Any]]:
        """Rows of equal length share forwards, whichever documents they are of."""
        tokens = self.tokens(part)
        plans = [self.plan(one, of_one) for one, of_one in zip(part, tokens, strict=True)]
        every = self.scorer.losses([row for plan in plans for row in plan.values()])
        refuse_no_numbers(np.concatenate([np.empty(0), *every]), "tokens")
        losses = iter(every)
        rows = []
        for one, of_one, plan in zip(part, tokens, plans, strict=True):
            found = {key: next(losses).astype(float) for key in plan}
            rows.append(self._scores(one, len(of_one), plan, found))
        return rows

    def plan(self, one: _Text, tokens: np.ndarray) -> dict[tuple[int, int | str], Row]:
        """(block, context) → the row that is forwarded; "unrelated" for the control."""
        local, size = self.settings.local, len(tokens)
        fits = [context for context in sorted(self.settings.contexts) if context + local <= size]
        if not fits:
            return {}
        longest, draws = max(fits), stream(self.settings.seed, "score", one.number)
        starts = self._starts(longest, size, draws)
        other = self._unrelated(one, longest - local, draws)
        plan: dict[tuple[int, int | str], Row] = {}
        for number, start in enumerate(starts):
            for context in (local, *fits):
                windows = Windows(context, local, local, self.prefix)
                block = windows.block(tokens, start, start + local)
                plan[number, context] = Context(block).dense_row()
            if other is not None:  # the last block has the longest context
                plan[number, "unrelated"] = Context(block.with_far(other)).dense_row()
        return plan

    def _starts(self, longest: int, size: int, draws: np.random.Generator) -> list[int]:
        """Random places, one in each of equal parts of what has the longest context before it."""
        room = (size - longest) // self.settings.local
        num = min(self.settings.blocks, room)
        edges = np.linspace(longest, size, num + 1).astype(int)
        return [
            int(draws.integers(first, end - self.settings.local + 1))
            for first, end in pairwise(edges)
        ]

    def _unrelated(self, one: _Text, length: int, draws: np.random.Generator) -> np.ndarray | None:
        """Tokens of another document; of several, if it is shorter."""
        own, parts = _digest(one.text), list[np.ndarray]()
        for index in draws.permutation(len(self.pool)):
            digest, tokens = self.pool[index]
            if digest == own:
                continue
            room = 0 if parts else max(len(tokens) - length, 0)
            parts.append(tokens[int(draws.integers(room + 1)) :])
            if sum(map(len, parts)) >= length:
                return np.concatenate(parts)[:length]
        return None

    def _scores(
        self,
        one: _Text,
        num_tokens: int,
        plan: dict[tuple[int, int | str], Row],
        found: dict[tuple[int, int | str], np.ndarray],
    ) -> dict[str, Any]:
        data = one.text.encode()
        scores: dict[str, Any] = dict.fromkeys(_columns(self.settings))
        scores |= {"file": one.file, "row": one.row, "tokens": num_tokens, "scored_tokens": 0}
        of = {c: _joined(found, c) for c in (self.settings.local, *self.settings.contexts)}
        scores |= {f"loss_{c}": float(loss_T.mean()) for c, loss_T in of.items() if len(loss_T)}
        scores["gzip"] = len(zlib.compress(data, 6)) / len(data) if data else None
        if not found:
            return scores
        longest = max(c for c in self.settings.contexts if len(of[c]))
        local_T, long_T = of[self.settings.local], of[longest]
        gain_T, unrelated_T = local_T - long_T, _joined(found, "unrelated")
        scores |= {"scored_tokens": len(gain_T), "context": longest, "gain": float(gain_T.mean())}
        is_key = (gain_T > LSD_NATS) & (long_T < LCL_NATS)
        scores["key_share"] = float(is_key.mean())
        positive_T = gain_T.clip(min=0)
        if positive_T.any():
            even = positive_T.sum() ** 2 / (len(gain_T) * (positive_T**2).sum())
            scores["spread"] = float(even)
        if gain_T.sum() > 0:
            blocks = [row.context.block for (_, context), row in plan.items() if context == longest]
            repeats_T = np.concatenate([bigrams(block) for block in blocks])
            scores["recurs"] = float(gain_T[repeats_T].sum() / gain_T.sum())
        if len(unrelated_T):
            scores["loss_unrelated"] = float(unrelated_T.mean())
            scores["gain_unrelated"] = float((local_T - unrelated_T).mean())
            scores["net_gain"] = float((unrelated_T - long_T).mean())
        return scores


def _joined(found: dict[tuple[int, int | str], np.ndarray], context: int | str) -> np.ndarray:
    """The losses of all blocks with one context."""
    parts = [loss_T for (_, of), loss_T in found.items() if of == context]
    return np.concatenate([np.empty(0), *parts])


def _columns(settings: ScoreSettings) -> dict[str, pa.DataType]:
    """The columns of the scores."""
    about = ("row", "tokens", "scored_tokens", "context")
    losses = [f"loss_{number}" for number in (settings.local, *settings.contexts)]
    gains = ("gain", "key_share", "spread", "recurs", "loss_unrelated", "gain_unrelated")
    numbers = dict.fromkeys((*losses, *gains, "net_gain", "gzip"), pa.float64())
    return {"file": pa.string(), **dict.fromkeys(about, pa.int64()), **numbers}


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()


# --- files ----------------------------------------------------------------------------------------


def score_files(request: ScoreRequest) -> Path | None:
    """Score the documents of files into one file. The same command resumes from the parts in
    `OUT.parts`. Returns None if parts are left to other processes; the last one joins them."""
    scoring, texts = _opened(request)
    out, (index, of) = Path(request.out), request.shard
    work = WorkFolder(_parts_of(out), "out", "identity.json")
    work.create()
    identity: dict[str, Any] = {
        "text": request.text,
        "field": request.field,
        "prefix": list(scoring.prefix),
    }
    identity |= {"random_streams": VERSION, "settings": plain(asdict(request.settings))}
    work.identify(identity_of(scoring.model) | identity)
    pieces, digests, done = Pieces(work.path), list[str](), 0
    with Progress("scoring", None, "documents") as progress:
        for number, part in enumerate(scoring.parts(texts)):
            digests.append(scoring.digest(part))
            if number % of == index and pieces.read(number, digests[-1]) is None:
                pieces.write(number, digests[-1], {"rows": scoring.rows(part)})
            done += len(part)
            progress.update(done, token_forwards=f"{scoring.scorer.token_forwards:.2e}")
    if missing := sum(pieces.read(*piece) is None for piece in enumerate(digests)):
        say(f"shard {index}/{of} is done; {missing} of {len(digests)} parts are left to others")
        return None
    schema = pa.schema(list(_columns(request.settings).items()))
    with (
        locked(work.path, waits=True),
        writing(out) as partial,
        pq.ParquetWriter(partial, schema, compression="zstd") as writer,
    ):
        for piece in enumerate(digests):
            rows = (pieces.read(*piece) or {})["rows"]
            writer.write_table(pa.Table.from_pylist(rows, schema))
    return out


def _parts_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.parts")


def _opened(request: ScoreRequest) -> tuple[_Scoring, Iterator[_Text]]:
    """The model, and the documents, none of which may be what `score` writes."""
    corpus, records = open_text(request.text, request.field)
    out = Path(request.out).resolve()
    is_inside = bool(corpus.path) and Path(corpus.path or "").resolve() in out.parents
    inputs = [path.resolve() for path in list_inputs(corpus)]
    if is_inside or any({out, _parts_of(out)} & {path, *path.parents} for path in inputs):
        raise ConfigError(f"out={request.out} is read by text={request.text}; name another file")
    texts = _numbered(records)
    first = next(texts, None)
    if first is None:
        raise DataError(f"{request.text} holds no documents with a field '{request.field}'")
    scoring = _Scoring(request.model, request.settings, request.loading, first.text)
    return scoring, chain([first], texts)


def _numbered(records: Iterable[Any]) -> Iterator[_Text]:
    """`row`: the number of the record in its file, from 0."""
    for number, record in enumerate(records):
        file, _, row = record.name.rpartition(":")
        if not row.isdecimal():
            file, row = record.name, "1"
        shown = file.encode(errors="replace").decode()  # a name may be no text
        yield _Text(number, record.text, shown, int(row) - 1)


COUNTED_DOCUMENTS = 256
"""The most documents that a dry run counts."""


def count_score(request: ScoreRequest) -> Cost:
    """Count what the first documents cost."""
    scoring, texts = _opened(request)
    some = [*islice(texts, COUNTED_DOCUMENTS)]
    parts = [*scoring.parts(iter(some))]
    plans = [
        scoring.plan(one, tokens)
        for part in parts
        for one, tokens in zip(part, scoring.tokens(part), strict=True)
    ]
    forwards = sum(len(row.places) for plan in plans for row in plan.values())
    cost, shortest = Cost(forwards, scoring.scorer.num_parameters), min(request.settings.contexts)
    of = "all" if next(texts, None) is None else "the first"
    return replace(
        cost,
        details=f"documents       {len(some):,} ({of} of {request.text}), of which "
        f"{plans.count({}):,} have less than {shortest + request.settings.local:,} tokens and get "
        f"no gain\n{cost}\ncheaper         smaller contexts; the largest one costs twice, with "
        "the unrelated text",
    )
