"""Choose the targets to evaluate: by their gap, by the text alone, or by name.

    choose_targets       by the losses: a large gap, or a bigram that recurs
    targets_by_text      by chance alone, from all tokens
    named_targets        by words, regular expressions or places (`at`)
    targets_of_records   the targets of records with a prompt and a target
    given_targets        those of another measurement

Each returns a table with the columns `COLUMNS`. Thresholds are fitted on documents with an even
number and used on documents with an odd one. So the threshold does not depend on the reported
targets, but their choice does: targets with a large gap are chosen by their own outcome. The
placebo measures that effect. Its targets are chosen by the same rules from the gaps with an
unrelated text in place of the distant context.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.options import MIN_GAP, Settings
from olmo_sparsity.analysis.results.target_rows import (
    KEYS,
    distant_part_losses,
    half_of,
    has_spans,
    with_ends,
)
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.streams import stream
from olmo_sparsity.text.documents import Document, Documents, first_characters
from olmo_sparsity.text.units import NOTHING, Spans, span_width
from olmo_sparsity.text.windows import Block, Windows

At = str | int | slice | re.Pattern[str] | Sequence["At"]
"""Names of targets: words, a regular expression, tokens by number, or several of these."""

COLUMNS = [*KEYS, "distant_part", "target_set"]
"""Columns of a table of targets: document, target (the place of its first token), kind of distant
context, target set. Targets of several tokens have the column `end`, too."""


def fit_threshold(losses: pd.DataFrame, share: float, min_gap: float) -> float | None:
    """Return the smallest gap of a target: the quantile of the gaps in the threshold half above
    which lies the `share` of targets, but at least `min_gap`. None for share=1: any gap makes a
    target."""
    if share == 1.0:
        return None
    gap = float(np.quantile((losses.loss_short - losses.loss_long).to_numpy(), 1 - share))
    return max(gap, min_gap)


def choose_targets(
    losses: pd.DataFrame, threshold: float | None, settings: Settings
) -> pd.DataFrame:
    """Choose targets in the documents of the report half, by their gap (set `gap`) or by the text
    (set `bigram`), for the document's own distant context and for the placebo's.

    Each set has at most `max_targets` targets of a document, drawn at random, and `bigram` also at
    most the `share` of all targets of the document, as `gap` has on average.
    """
    share = settings.share
    seed = settings.seed
    reported = losses[losses.document.map(half_of) == "report"]
    rows = distant_part_losses(reported)
    sizes = reported.groupby("document").size()
    max_targets = int(min(settings.max_targets_of_set, len(losses)))
    smallest_gap = -np.inf if threshold is None else threshold

    def max_bigrams(document: int) -> int:
        return min(int(np.ceil(share * sizes[document])), max_targets)

    by_gap = _sample(rows[rows.gap >= smallest_gap], "gap", lambda _: max_targets, seed)
    by_bigram = _sample(rows[rows.bigram], "bigram", max_bigrams, seed)
    chosen = pd.concat([by_gap, by_bigram])[COLUMNS]
    chosen = chosen[chosen.target_set.isin(settings.sets)]
    return chosen.sort_values(COLUMNS, ignore_index=True)


def targets_by_text(documents: Sequence[Document], settings: Settings) -> pd.DataFrame:
    """Choose the targets of the set `every`, which needs no model: each token of the documents has
    the same chance. Therefore `max_targets` limits the mean of all documents, not each of them."""
    places_of_documents = [places_of(sampled_blocks(document, settings)) for document in documents]
    num_places = sum(map(len, places_of_documents))
    max_targets = min(num_places, settings.max_targets_of_set * len(documents))
    rate = 0.0  # the share of the tokens of a document that become targets
    if "every" in settings.sets:
        rate = min(settings.share, max_targets / max(num_places, 1))

    rows = []
    for document, places_T in zip(documents, places_of_documents, strict=True):
        generator = stream(settings.seed, "every", document.number)
        order = generator.permutation(len(places_T))
        # The random number rounds up or down, so that the mean over documents is the rate.
        num_drawn = int(rate * len(places_T) + generator.random()) if rate else 0
        for place in places_T[order[:num_drawn]]:
            rows.append((document.number, int(place), "document", "every"))
    chosen = pd.DataFrame(rows, columns=COLUMNS).astype(dict.fromkeys(KEYS, int))
    return chosen.sort_values(COLUMNS, ignore_index=True)


def sampled_blocks(document: Document, settings: Settings) -> list[Block]:
    """Draw the share `sample` of a document's blocks, and return them in order. Each block of each
    document has the same chance, so that means, quantiles and shares over their targets estimate
    those over all targets."""
    blocks = list(settings.windows.blocks(document.tokens))
    if settings.sample == 1:
        return blocks
    generator = stream(settings.seed, "blocks", document.number)
    # Rounded up or down at random: rounding down would leave short documents without a block.
    num_drawn = int(settings.sample * len(blocks) + generator.random())
    drawn = np.sort(generator.permutation(len(blocks))[:num_drawn])
    return [blocks[index] for index in drawn]


def places_of(blocks: Sequence[Block]) -> np.ndarray:
    """Return the places of the targets of all blocks."""
    places = [NOTHING]
    for block in blocks:
        places.append(block.start + np.arange(block.num_targets))
    return np.concatenate(places)


def _sample(
    rows: pd.DataFrame, target_set: str, max_of_document: Callable[[int], int], seed: int
) -> pd.DataFrame:
    """Draw targets of each document, for either kind of distant context. `max_of_document`: a
    function from a document's number to how many of its targets are drawn at most."""
    parts = [rows[:0]]
    for (document, distant_part), group in rows.groupby(["document", "distant_part"]):
        generator = stream(seed, "targets", document, target_set, distant_part)
        drawn = generator.permutation(len(group))[: max_of_document(int(document))]
        parts.append(group.iloc[np.sort(drawn)])
    return pd.concat(parts).assign(target_set=target_set)


def targets_of_records(documents: Documents, windows: Windows) -> pd.DataFrame:
    """Return the targets of records that hold a prompt and a target: all tokens of the latter."""
    spans = []
    for document in documents:
        if document.target is not None:
            end = len(document.tokens)
            spans.append(_SpanOfDocument(document.number, document.target, end))
    return _table_of_named(spans, documents, windows, "a prompt's target")


def given_targets(targets: pd.DataFrame, windows: Windows, same_settings: bool) -> pd.DataFrame:
    """Return the targets of another measurement of the same text, so that two models are compared
    on equal ones, without those that have no full long window here. `same_settings`: whether
    windows, seed and controls are the same. If not, the unrelated texts differ, and so would the
    placebo: its targets are left out."""
    is_kept = targets.target >= windows.first_target
    if not same_settings:
        is_kept &= targets.distant_part == "document"
    return targets[is_kept].sort_values(COLUMNS, ignore_index=True)


def named_targets(documents: Documents, at: At, windows: Windows) -> pd.DataFrame:
    """Return a target for each token that `at` names in a document and that has a full long
    window."""
    spans = []
    for document in documents:
        for first, end in find_spans(document, at, missing_ok=True):
            spans.append(_SpanOfDocument(document.number, first, end))
    if not spans:
        raise DataError(
            f"{documents.name}: no document contains at={at!r}; pass words of the text, a regular "
            "expression, or tokens FIRST:END"
        )
    return _table_of_named(spans, documents, windows, "a named target")


class _SpanOfDocument(NamedTuple):
    """A run of tokens of one of the documents, from `first` to `end` − 1."""

    document: int
    first: int
    end: int


def _table_of_named(
    spans: Sequence[_SpanOfDocument], documents: Documents, windows: Windows, noun: str
) -> pd.DataFrame:
    """Return a target for each token of the spans that has a full long window. `noun`: how an error
    names a span."""
    rows = []
    for span in spans:
        for place in range(max(span.first, windows.first_target), span.end):
            rows.append((span.document, place, "document", "named"))
    if not rows:
        raise DataError(
            f"{documents.name}: no token of {noun} has a full long window; lower long, or name "
            "later ones"
        )
    return pd.DataFrame(rows, columns=COLUMNS).drop_duplicates(ignore_index=True)


def find_spans(document: Document, at: At, missing_ok: bool = False) -> Spans:
    """Return the token spans that `at` names: every occurrence of words, or one span for a place.
    `missing_ok`: return no span, instead of raising DataError, if the text lacks what is named."""
    if isinstance(at, np.integer):
        at = int(at)
    accepted = str | int | slice | re.Pattern | Sequence | np.ndarray | pd.Series
    # A bool is an int to Python, and bytes are a sequence.
    if isinstance(at, bytes | bool) or not isinstance(at, accepted):
        raise ConfigError(
            f"at={at!r} must be words, a regular expression (re.compile), a token's number, a "
            "slice of tokens, or a list of these"
        )
    if not isinstance(at, str | re.Pattern | int | slice):
        if not len(at):
            raise ConfigError("at is empty; omit it, or pass words")
        all_spans: set[tuple[int, int]] = set()
        for item in at:
            all_spans.update(find_spans(document, item, missing_ok))
        return sorted(all_spans)
    if isinstance(at, int | slice):
        spans = _find_numbers(document, at)
        shown = f"{at.start}:{at.stop}" if isinstance(at, slice) else str(at)
        remedy = "pass tokens FIRST:END of the text"
    elif isinstance(at, str):
        if not at.strip():
            raise ConfigError(f"at={at!r} is blank; pass the words of a target, or omit it")
        spans = _find_words(document, at)
        shown = at
        remedy = "check spelling and case"
        if at.isdecimal():
            remedy = f"for the token of that number pass {at}:{int(at) + 1}"
    else:
        spans = _find_text(document, at)
        shown = at.pattern
        remedy = "check spelling and case"
    if not spans and not missing_ok:
        raise DataError(f"at={shown} does not occur in {len(document.tokens):,} tokens; {remedy}")
    return spans


def _find_numbers(document: Document, at: int | slice) -> Spans:
    """Return the run of tokens that a number or a slice names. Negative numbers count from the end,
    as in a list of Python."""
    if isinstance(at, slice) and at.step not in (None, 1):
        raise ConfigError(f"at={at!r} has a step, and a target is a run of tokens; omit the step")
    if isinstance(at, int):
        # The slice of −1 ends at the end of the text, which is None and not 0.
        at = slice(at, (at + 1) or None)
    places = range(len(document.tokens))[at]
    if not places:
        return []
    return [(places[0], places[-1] + 1)]


def _find_words(document: Document, words: str) -> Spans:
    """Return the occurrences of words: as the user writes them, or else as the tokenizer reads
    them."""
    spans = _find_text(document, re.compile(re.escape(words)))
    # A normalizer changes a text before it is tokenized: it lower-cases, or composes letters.
    normalizer = getattr(document.tokenizer, "normalizer", None)
    if spans or normalizer is None:
        return spans
    as_read = normalizer.normalize_str(words).replace("▁", " ").strip()
    return _find_text(document, re.compile(re.escape(as_read)))


def _find_text(document: Document, pattern: re.Pattern[str]) -> Spans:
    """Return the tokens that hold each match of a regular expression, from the first to one past
    the last."""
    # A token's leading white space is not part of what is named.
    begins = first_characters(document.texts)
    ends = np.cumsum([len(text) for text in document.texts])
    spans = set()
    for match in pattern.finditer("".join(document.texts)):
        if not match.group():
            continue
        # The first token that ends after the match begins, and the first that begins after it ends.
        first = int(np.searchsorted(ends, match.start(), side="right"))
        end = int(np.searchsorted(begins, match.end(), side="left"))
        # A match of white space alone may end before its token begins.
        spans.add((first, max(end, first + 1)))
    return sorted(spans)


def parse_at(text: str) -> At:
    """Parse --at: /a regular expression/, FIRST:END of tokens, or words."""
    if len(text) > 2 and text[0] == text[-1] == "/":
        try:
            return re.compile(text[1:-1])
        except re.error as error:
            raise ConfigError(
                f"--at={text} is not a regular expression ({error}); words are written without /"
            ) from None
    if re.fullmatch(r"-?\d+:-?\d+", text):
        first, end = text.split(":")
        return slice(int(first), int(end))
    return text


def first_place(windows: Windows, units: str) -> int:
    """Return the first place with a distant unit and a full window before it."""
    return max(windows.first_target, windows.short + (span_width(units) or 1))


def largest_gaps(losses: pd.DataFrame, column: str = "loss_long", num_targets: int = 8) -> Spans:
    """Return the `num_targets` tokens of one document with the largest gaps, without those below
    MIN_GAP; if all are below, the one with the largest gap. `column`: the loss with the long
    window, which is another one for the placebo."""
    if not len(losses):
        return []
    gaps = (losses.loss_short - losses[column]).set_axis(losses.target).nlargest(num_targets)
    large = gaps[gaps >= MIN_GAP]
    if not len(large):
        large = gaps[:1]
    return [(int(place), int(place) + 1) for place in sorted(large.index)]


def targets_fingerprint(targets: pd.DataFrame) -> str:
    """Return the SHA-256 of a table of targets."""
    # Without targets of several tokens `end` is left out, as earlier versions did not store it.
    columns = [*COLUMNS, "end"] if has_spans(targets) else COLUMNS
    return hashlib.sha256(targets[columns].to_csv(index=False).encode()).hexdigest()


def targets_of_document(targets: pd.DataFrame, document: Document) -> dict[str, np.ndarray]:
    """Return the targets of one document: kind of distant context → an array with a row for each
    target, its first place and one past its last. A target in several sets is there once."""
    rows = with_ends(targets[targets.document == document.number])
    groups = rows.groupby("distant_part")[["target", "end"]]
    return {str(part): np.unique(spans.to_numpy(), axis=0) for part, spans in groups}


def check_all_evaluated(folder: Path, targets: pd.DataFrame, recovery: pd.DataFrame) -> None:
    """Raise DataError if a target was not evaluated."""
    # Losses of two runs may differ in their last digits, so that a target close to the threshold is
    # chosen by only one of them.
    keys = [*KEYS, "distant_part"]
    evaluated = pd.MultiIndex.from_frame(recovery[keys])
    missing = pd.MultiIndex.from_frame(targets[keys]).difference(evaluated)
    if len(missing):
        document, target, _ = missing[0]
        raise DataError(
            f"{folder}: {len(missing)} targets were not evaluated, such as {target} of document "
            f"{document}, as losses changed; delete {folder / 'parts/recovery'}, and run it again"
        )
