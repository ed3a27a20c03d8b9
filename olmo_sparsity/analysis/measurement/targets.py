"""Choose the targets to evaluate: by their gap, by the text alone, or by name.

Thresholds are fitted on documents with an even index and used on documents with an odd one. So the
threshold does not depend on the reported targets, but their choice does: targets with a large gap
are chosen by their own outcome. The placebo measures that effect. Its targets are chosen by the
same rules from the gaps with an unrelated text in place of the distant context.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.options import MIN_GAP, Settings
from olmo_sparsity.analysis.results.statistics import (
    KEYS,
    far_part_losses,
    half_of,
    has_spans,
    with_ends,
)
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.streams import stream
from olmo_sparsity.text.documents import Document, Documents, first_characters
from olmo_sparsity.text.windows import NOTHING, Block, Spans, Windows, span_width

At = str | int | slice | re.Pattern[str] | Sequence["At"]
"""Names of targets: words, a regular expression, tokens by number, or several of these."""

COLUMNS = [*KEYS, "far_part", "target_set"]


def fit_threshold(losses: pd.DataFrame, share: float, min_gap: float) -> float | None:
    """Return the least gap of a target, by the losses of the threshold half; None: any gap."""
    if share == 1.0:
        return None
    gap = float(np.quantile((losses.loss_short - losses.loss_long).to_numpy(), 1 - share))
    return max(gap, min_gap)


def choose_targets(
    losses: pd.DataFrame, threshold: float | None, settings: Settings
) -> pd.DataFrame:
    """Choose targets of the documents of the report half: `gap`, and `bigram`, of which a `share`
    of all targets of a document is drawn. A set keeps at most `max_targets` of a document, drawn
    at random."""
    share, seed = settings.share, settings.seed
    reported = losses[losses.document.map(half_of) == "report"]
    rows = far_part_losses(reported)
    sizes = reported.groupby("document").size()
    most = int(min(settings.most_targets, len(losses)))
    least = -np.inf if threshold is None else threshold
    parts = [
        _sample(rows[rows.gap >= least], "gap", lambda _: most, seed),
        _sample(
            rows[rows.bigram], "bigram", lambda d: min(int(np.ceil(share * sizes[d])), most), seed
        ),
    ]
    chosen = pd.concat(parts)[COLUMNS]
    chosen = chosen[chosen.target_set.isin(settings.sets)]
    return chosen.sort_values(COLUMNS, ignore_index=True)


def targets_by_text(documents: Sequence[Document], settings: Settings) -> pd.DataFrame:
    """Choose targets before any model, with the documents' own distant context: `every`, each token
    with the same chance, so that `max_targets` holds for the mean of all documents."""
    measured = [places_of(sampled_blocks(document, settings)) for document in documents]
    num = sum(map(len, measured))
    most = min(num, settings.most_targets * len(documents))
    rate = min(settings.share, most / max(num, 1)) if "every" in settings.sets else 0.0
    parts = []
    for document, places_T in zip(documents, measured, strict=True):
        draws, size = stream(settings.seed, "every", document.number), len(places_T)
        order = draws.permutation(size)
        drawn = order[: int(rate * size + draws.random())] if rate else order[:0]
        parts += [(document.number, int(place), "document", "every") for place in places_T[drawn]]
    chosen = pd.DataFrame(parts, columns=COLUMNS).astype(dict.fromkeys(KEYS, int))
    return chosen.sort_values(COLUMNS, ignore_index=True)


def sampled_blocks(document: Document, settings: Settings) -> list[Block]:
    """A random share of a document's blocks, in order. Each block of each document has the same
    chance, so that means, quantiles and shares of their targets estimate all targets'."""
    blocks = list(settings.windows.blocks(document.tokens))
    if settings.sample == 1:
        return blocks
    draws = stream(settings.seed, "blocks", document.number)
    num = int(settings.sample * len(blocks) + draws.random())
    return [blocks[index] for index in np.sort(draws.permutation(len(blocks))[:num])]


def places_of(blocks: Sequence[Block]) -> np.ndarray:
    """The targets of all blocks."""
    return np.concatenate([NOTHING, *(b.start + np.arange(b.num_targets) for b in blocks)])


def _sample(
    rows: pd.DataFrame, target_set: str, wanted: Callable[[int], int], seed: int
) -> pd.DataFrame:
    """Draw at most `wanted` targets of each document, of either kind of distant context."""
    parts = [rows[:0]]
    for (document, part), group in rows.groupby(["document", "far_part"]):
        draw = stream(seed, "targets", document, target_set, part)
        parts.append(group.iloc[np.sort(draw.permutation(len(group))[: wanted(int(document))])])
    return pd.concat(parts).assign(target_set=target_set)


def targets_of_records(documents: Documents, windows: Windows) -> pd.DataFrame:
    """The tokens of the targets of records of prompt and target."""
    places = [
        (document.number, place, "document", "named")
        for document in documents
        if document.target is not None
        for place in range(max(document.target, windows.first_target), len(document.tokens))
    ]
    return _named(places, documents, "a prompt's target")


def given_targets(targets: pd.DataFrame, windows: Windows, same_settings: bool) -> pd.DataFrame:
    """Targets of another measurement of the same text, so that two models are compared on equal
    ones. Under other settings (windows, seed, controls) its placebo differs, and is left out, as
    are targets without a full long window here."""
    kept = targets.target >= windows.first_target
    if not same_settings:
        kept &= targets.far_part == "document"
    return targets[kept].sort_values(COLUMNS, ignore_index=True)


def named_targets(documents: Documents, at: At, windows: Windows) -> pd.DataFrame:
    """All tokens that `at` names and that have a full long window."""
    spans = [(d.number, *span) for d in documents for span in find_spans(d, at, missing_ok=True)]
    if not spans:
        raise DataError(f"{documents.name}: no document contains at={at!r}; pass words of the text")
    places = [
        (number, place, "document", "named")
        for number, first, end in spans
        for place in range(max(first, windows.first_target), end)
    ]
    return _named(places, documents, "a named target")


def _named(places: list[tuple], documents: Documents, what: str) -> pd.DataFrame:
    if not places:
        raise DataError(f"{documents.name}: no token of {what} has a full long window; lower long")
    return pd.DataFrame(places, columns=COLUMNS).drop_duplicates(ignore_index=True)


def find_spans(document: Document, at: At, missing_ok: bool = False) -> Spans:
    """Token spans that `at` names; words may occur several times."""
    if isinstance(at, np.integer):
        at = int(at)
    if not isinstance(at, str | int | slice | re.Pattern | Sequence | np.ndarray | pd.Series):
        raise ConfigError(f"at={at!r} must be words, a re.Pattern, a number, a slice, or a list")
    if not isinstance(at, str | re.Pattern | int | slice):
        if not len(at):
            raise ConfigError("at is empty; omit it, or pass words")
        return sorted({span for item in at for span in find_spans(document, item, missing_ok)})
    if isinstance(at, int | slice):
        every = range(len(document.tokens))
        places = every[at] if isinstance(at, slice) else every[at : (at + 1) or None]
        spans = [(places[0], places[-1] + 1)] if places and places.step == 1 else []
        shown = f"{at.start}:{at.stop}" if isinstance(at, slice) else str(at)
    else:
        shown = at if isinstance(at, str) else at.pattern
        spans = _find_text(document, re.compile(re.escape(at)) if isinstance(at, str) else at)
        reads = getattr(document.tokenizer, "normalizer", None)  # lower-cases, composes letters, …
        if not spans and isinstance(at, str) and reads is not None:
            as_read = reads.normalize_str(at).replace("▁", " ").strip()
            spans = _find_text(document, re.compile(re.escape(as_read)))
    if not spans and not missing_ok:
        is_number = isinstance(at, str) and at.isdecimal()
        hint = f"token {at} is {at}:{int(shown) + 1}" if is_number else "check spelling and case"
        raise DataError(f"at={shown} does not occur in {len(document.tokens):,} tokens; {hint}")
    return spans


def _find_text(document: Document, pattern: re.Pattern[str]) -> Spans:
    matches = [m.span() for m in pattern.finditer("".join(document.texts)) if m.group()]
    # A token's leading white space is not part of what is named.
    begins = first_characters(document.texts)
    ends = np.cumsum([len(text) for text in document.texts])
    firsts = [int(np.searchsorted(ends, a, side="right")) for a, _ in matches]
    lasts = [int(np.searchsorted(begins, b, side="left")) for _, b in matches]
    return sorted({(a, max(b, a + 1)) for a, b in zip(firsts, lasts, strict=True)})


def parse_at(text: str) -> At:
    """Parse --at: /a regular expression/, FIRST:END of tokens, or words."""
    if len(text) > 2 and text[0] == text[-1] == "/":
        try:
            return re.compile(text[1:-1])
        except re.error as error:
            raise ConfigError(f"--at={text} is not a regular expression ({error})") from None
    if re.fullmatch(r"-?\d+:-?\d+", text):
        first, end = text.split(":")
        return slice(int(first), int(end))
    return text


def first_place(windows: Windows, units: str) -> int:
    """The first place with a far unit and a full window before it."""
    return max(windows.first_target, windows.short + (span_width(units) or 1))


def largest_gaps(losses: pd.DataFrame, column: str = "loss_long", num_targets: int = 8) -> Spans:
    """The tokens of one document with the largest gaps: of the first `num_targets`, all above
    MIN_GAP, or else the first. `column`: the loss with the long window."""
    if not len(losses):
        return []
    gaps = (losses.loss_short - losses[column]).set_axis(losses.target).nlargest(num_targets)
    large = gaps[gaps >= MIN_GAP] if (gaps >= MIN_GAP).any() else gaps[:1]
    return [(int(place), int(place) + 1) for place in sorted(large.index)]


def targets_fingerprint(targets: pd.DataFrame) -> str:
    columns = [*COLUMNS, "end"] if has_spans(targets) else COLUMNS
    return hashlib.sha256(targets[columns].to_csv(index=False).encode()).hexdigest()


def of_document(targets: pd.DataFrame, document: Document) -> dict[str, np.ndarray]:
    """Kind of distant context → this document's targets, each once, from the first place to one
    past the last."""
    rows = with_ends(targets[targets.document == document.number])
    groups = rows.groupby("far_part")[["target", "end"]]
    return {str(part): np.unique(spans.to_numpy(), axis=0) for part, spans in groups}


def check_all_evaluated(folder: Path, targets: pd.DataFrame, recovery: pd.DataFrame) -> None:
    """Losses of two runs may differ in their last digits, so that a target close to the threshold
    is chosen by only one of them."""
    by = ["document", "target", "far_part"]
    missing = pd.MultiIndex.from_frame(targets[by]).difference(
        pd.MultiIndex.from_frame(recovery[by])
    )
    if len(missing):
        document, target, _ = missing[0]
        found = f"{len(missing)} targets were not evaluated, such as {target} of {document=}"
        remedy = f"losses changed: delete {folder / 'parts/recovery'}, and run it again"
        raise DataError(f"{folder}: {found}; {remedy}")
