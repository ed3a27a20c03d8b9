"""Score documents for long-context training: what does distant text add, and does it have to be
this document's?

Place in the flow: model + any number of documents → **one row a document**. Documents are read one
after another and never kept.

The same tokens of a document, one random block (or several), get their loss with several numbers of
tokens before them: `local`, and each of `contexts` that the document is long enough for.

    gain            mean loss with the local context − that with the longest context
    gain_unrelated  the same with another document in place of all but the local tokens
    net_gain        gain − gain_unrelated: what an unrelated text of this length cannot give

Every number is the loss of a plain forward pass over consecutive tokens, from position 0.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from olmo_sparsity.analysis.inputs import records
from olmo_sparsity.analysis.inputs.texts import read_rows
from olmo_sparsity.analysis.inputs.windows import Windows
from olmo_sparsity.analysis.models.load import LoadedModel, load_model
from olmo_sparsity.analysis.results.statistics import LCL_NATS, LSD_NATS
from olmo_sparsity.analysis.scoring.scorer import Context, Row, Scorer, bigrams
from olmo_sparsity.analysis.settings import ScoreSettings
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.folders import WorkFolder, locked
from olmo_sparsity.io import refuse_suffix, writing
from olmo_sparsity.runtime import Progress, format_duration, say
from olmo_sparsity.streams import VERSION, stream

POOL = 32
"""Documents that unrelated text is taken from: the first ones that have more than local tokens, so
that a document's score does not depend on which process computes it."""

LOOKED_AT = 512
"""Number of documents that the pool is chosen from, at most."""

PART_DOCUMENTS, PART_CHARACTERS = 64, 2**17
"""A part of the output, which a killed process loses, ends after so many of either."""


@dataclass(frozen=True)
class _Text:
    number: int
    text: str
    row: Mapping[str, Any]
    where: str


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
    """Yield one row for each document, in order: its fields and its scores.

    `documents`: strings, or mappings that hold the text in `field`. They are read a few dozen at a
    time. `contexts`: numbers of tokens before a scored token; of a document, those it is long
    enough for. `local`: tokens before a scored token that count as local, and tokens of a block of
    scored tokens. `blocks`: scored blocks of a document, at random places. A document costs
    blocks × (Σ contexts + largest context + local · (number of contexts + 3)) token-forwards.
    """
    settings = ScoreSettings(contexts=tuple(contexts), local=local, blocks=blocks, seed=seed)
    texts = _of_rows(documents, field)
    first = next(texts, None)
    if first is None:
        return
    scoring = _Scoring(_loaded(model), settings, prefix, batch_tokens, first.text)
    for part in scoring.parts(chain([first], texts)):
        yield from scoring.rows(part)


def _loaded(model: LoadedModel | str | Path) -> LoadedModel:
    return model if isinstance(model, LoadedModel) else load_model(str(model))


def _of_rows(documents: Iterable[str | Mapping[str, Any]], field: str) -> Iterator[_Text]:
    if isinstance(documents, str):
        raise ConfigError("documents is one string; pass a list of strings or mappings")
    for number, given in enumerate(documents):
        row = {field: given} if isinstance(given, str) else dict(given)
        if not isinstance(row.get(field), str):
            raise DataError(
                f"document {number} has no text in its field '{field}'; its fields are "
                f"{', '.join(map(str, row))[:200]} (field names another)"
            )
        yield _Text(number, row[field], row, "")


class _Scoring:
    """One model with its settings, and the texts that unrelated tokens are taken from."""

    def __init__(
        self,
        model: LoadedModel,
        settings: ScoreSettings,
        prefix: str,
        batch_tokens: int | None,
        beginning: str,
    ) -> None:
        """`beginning`: a text, before which the tokenizer puts its prefix."""
        settings.check()
        self.model, self.settings = model, settings
        self.prefix = tuple(model.prefix_ids(prefix, beginning))
        longest = len(self.prefix) + max(settings.contexts) + settings.local
        model.check_positions(longest, "give smaller contexts")
        if model.tokenizer is None:
            raise ConfigError(f"'{model.name}' has no tokenizer, and documents are texts")
        self.scorer = Scorer(model.model, far_states="isolated", batch_tokens=batch_tokens)
        self.pool: list[tuple[bytes, np.ndarray]] = []

    # --- documents in parts ---

    def parts(self, texts: Iterator[_Text]) -> Iterator[list[_Text]]:
        """Choose the pool, and cut the stream where a part is full."""
        first = list[_Text]()
        for batch in iter(lambda: list(islice(texts, POOL)), []):
            first += batch
            for one, tokens in zip(batch, self._tokens(batch), strict=True):
                if len(tokens) > self.settings.local and len(self.pool) < POOL:
                    self.pool.append((_digest(one.text), tokens))
            if len(self.pool) == POOL or len(first) >= LOOKED_AT:
                break
        if sum(len(tokens) for _, tokens in self.pool) < 2 * max(self.settings.contexts):
            say(
                "few long documents to take unrelated text from: gain_unrelated and net_gain will "
                "be empty for some"
            )
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
        """Return a hash of all that the rows of a part depend on: a text may change between two
        runs."""
        found = hashlib.sha256(b"".join(digest for digest, _ in self.pool))
        for one in part:
            fields = json.dumps([one.number, one.where, one.text, dict(one.row)], default=str)
            found.update(_digest(fields))
        return found.hexdigest()[:16]

    def _tokens(self, texts: Sequence[_Text]) -> list[np.ndarray]:
        encoded = self.model.encode([one.text for one in texts], control_tokens=False)
        return [np.array(ids, np.int64) for ids in encoded]

    # --- the scores of a part ---

    def rows(self, part: Sequence[_Text]) -> list[dict[str, Any]]:
        """Rows of equal length share forwards, whichever documents they are of."""
        tokens = self._tokens(part)
        plans = [self._plan(one, of_one) for one, of_one in zip(part, tokens, strict=True)]
        wanted = [row for plan in plans for row in plan.values()]
        losses = iter(self.scorer.losses(wanted))
        rows = []
        for one, of_one, plan in zip(part, tokens, plans, strict=True):
            found = {key: next(losses).astype(float) for key in plan}
            scores = self._scores(one, len(of_one), plan, found)
            given = {f"{name}_input" if name in scores else name: v for name, v in one.row.items()}
            rows.append(given | scores)
        return rows

    def _plan(self, one: _Text, tokens: np.ndarray) -> dict[tuple[int, int | str], Row]:
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
        scores: dict[str, Any] = {"file": one.where, "row": one.number, "tokens": num_tokens}
        scores |= {"scored_tokens": 0, "context": None}
        of = {c: _joined(found, c) for c in (self.settings.local, *self.settings.contexts)}
        scores |= {f"loss_{context}": _mean(loss_T) for context, loss_T in of.items()}
        names = ("gain", "key_share", "spread", "recurs")
        scores |= dict.fromkeys((*names, "loss_unrelated", "gain_unrelated", "net_gain"))
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


def _mean(loss_T: np.ndarray) -> float | None:
    return float(loss_T.mean()) if len(loss_T) else None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()


# --- files ----------------------------------------------------------------------------------------


def score_files(
    model: LoadedModel | str | Path,
    text: str,
    out: str | Path,
    settings: ScoreSettings,
    *,
    field: str = "text",
    prefix: str = "auto",
    batch_tokens: int | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Path | None:
    """Score the documents of files into `out` (.parquet or .jsonl), with all their fields. What is
    finished lies in `OUT.parts`, so that the same command resumes; `shard=(i, n)`: the i-th of n
    processes. Returns None if parts are left to other processes; the last one joins them."""
    out = Path(out)
    refuse_suffix("out", out, ".parquet", ".jsonl")
    first, texts = _first_of(text, field)
    scoring = _Scoring(_loaded(model), settings, prefix, batch_tokens, first.text)
    work = WorkFolder(out.with_name(f"{out.name}.parts"), "out", "identity.json")
    work.create()
    work.identify(
        {
            "model": scoring.model.fingerprint,
            "dtype": scoring.model.dtype,
            "text": text,
            "field": field,
            "prefix": list(scoring.prefix),
            "random_streams": VERSION,
            "settings": json.loads(json.dumps(asdict(settings))),
        }
    )
    names, missing, done = list[str](), list[str](), 0
    index, of = shard
    with Progress("scoring", None, "documents") as progress:
        for number, part in enumerate(scoring.parts(texts)):
            name = f"{number:07d}-{scoring.digest(part)}{out.suffix}"
            path = work.path / name
            names.append(name)
            if not path.exists() and number % of == index:
                with writing(path) as partial:
                    _write(scoring.rows(part), partial, out.suffix)
            if not path.exists():
                missing.append(name)
            done += len(part)
            progress.update(done, token_forwards=f"{scoring.scorer.token_forwards:.2e}")
    if missing := [name for name in missing if not (work.path / name).exists()]:
        say(f"shard {index}/{of} is done; {len(missing)} of {len(names)} parts are left to others")
        return None
    with locked(work.path, waits=True):
        _join([work.path / name for name in names], out)
    return out


TRIED_DOCUMENTS, TRIED_S = 256, 5.0
"""Documents that a dry run counts, and the seconds for which it scores some of them."""


def estimate_score(
    model: LoadedModel | str | Path,
    text: str,
    settings: ScoreSettings,
    *,
    field: str = "text",
    prefix: str = "auto",
    batch_tokens: int | None = None,
) -> str:
    """Estimate what scoring costs: counted over the first documents, and timed on a few."""
    first, texts = _first_of(text, field)
    scoring = _Scoring(_loaded(model), settings, prefix, batch_tokens, first.text)
    parts, tried, num_forwards, num_short = scoring.parts(texts), [], 0, 0
    for part in parts:
        for one, tokens in zip(part, scoring._tokens(part), strict=True):
            plan = scoring._plan(one, tokens)
            num_forwards += _num_forwards(plan)
            num_short += not plan
            tried.append(plan)
        if len(tried) >= TRIED_DOCUMENTS:
            break
    is_all, scorer, began = next(parts, None) is None, scoring.scorer, time.perf_counter()
    for plan in sorted(filter(None, tried), key=_num_forwards):
        scorer.losses(list(plan.values()))
        if time.perf_counter() - began > TRIED_S:
            break
    speed = scorer.token_forwards / (time.perf_counter() - began)
    per_document = num_forwards / len(tried)
    of = "all" if is_all else "the first"
    lines = [
        f"documents       {len(tried):,} read ({of} of {text}), {num_short:,} of them shorter than "
        f"{min(settings.contexts) + settings.local:,} tokens, which get no gain",
        f"token-forwards  {per_document:,.0f} a document (mean), {num_forwards:.2e} for these",
        f"time            {format_duration(per_document * 1000 / max(speed, 1e-9))} for 1,000 "
        f"documents in one process ({speed:,.0f} token-forwards a second)",
        "cheaper         smaller contexts; the largest one costs twice, with the unrelated text",
    ]
    return "\n".join(lines)


def _num_forwards(plan: dict[tuple[int, int | str], Row]) -> int:
    return sum(len(row.places) for row in plan.values())


def _first_of(text: str, field: str) -> tuple[_Text, Iterator[_Text]]:
    """The first document, and all of them."""
    texts = _of_files(text, field)
    first = next(texts, None)
    if first is None:
        raise DataError(
            f"{text} holds no documents with a field '{field}'; pass field=NAME (--field)"
        )
    return first, chain([first], texts)


def _of_files(text: str, field: str) -> Iterator[_Text]:
    """Bad and empty records are skipped, and counted in the number of a document."""
    bad = 0
    for number, record in enumerate(read_rows(text, field)):
        if isinstance(record, records.TextRecord):
            where = record.name.rsplit(":", 1)[0]
            yield _Text(number, record.text, record.row or {field: record.text}, where)
        elif isinstance(record, records.BadRecord):
            bad += 1
            if bad == 1:
                say(f"{record.where}: {record.kind}; skipped, as all such records")


def _write(rows: list[dict[str, Any]], path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows, _schema(rows)), path, compression="zstd")
        return
    lines = (json.dumps(row, ensure_ascii=False, default=str) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _schema(rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """Names of all fields of all rows, in order of appearance."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: pa.array([row.get(name) for row in rows]) for name in names}
    return pa.schema([pa.field(name, column.type) for name, column in columns.items()])


def _join(parts: Sequence[Path], out: Path) -> None:
    with writing(out) as partial:
        if out.suffix == ".jsonl":
            with partial.open("wb") as file:
                for part in parts:
                    file.write(part.read_bytes())
            return
        schemas = [pq.read_schema(part) for part in parts]
        schema = pa.unify_schemas(schemas, promote_options="permissive").remove_metadata()
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            for part in parts:
                table = pq.read_table(part)
                missing = [field for field in schema if field.name not in table.schema.names]
                for field in missing:
                    table = table.append_column(field, pa.nulls(len(table), field.type))
                writer.write_table(table.select(schema.names).cast(schema))
