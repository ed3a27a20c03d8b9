"""Which targets are asked about: rows of the losses table, chosen by pure functions of it.

Place in the flow: losses → **targets** → questions. Never imports torch.

Thresholds are fitted on the documents with an even index and used on those with an odd one. That
frees the threshold from the targets that are reported, not the choice of the targets: those chosen
by their gap are chosen by their own outcome, which is what the placebo measures. The placebo's
targets are chosen by the same rules from what an unrelated text does in place of the far part.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.documents import Document, Documents
from analysis.pieces import first_characters
from analysis.statistics import KEYS, far_part_losses, half_of
from analysis.windows import Spans, Windows, span_width
from olmo_sparsity.errors import ConfigError, DataError

At = str | int | slice | re.Pattern[str] | Sequence["At"]
"""What names targets: words, a regular expression, tokens by number, or several of these."""

MIN_GAP = 0.1
"""Nats: a target with a smaller gap has nothing to recover."""

CHOSEN_SETS = ("gap", "kl", "recurs", "new")
"""Sets of targets: by their gap (all of them, and by stratum), by how much the prediction changes,
and by the text alone."""

COLUMNS = [*KEYS, "far_part", "target_set"]


def parse_share(text: str) -> float:
    """`all` → 1.0, `top10%` → 0.1."""
    if text == "all":
        return 1.0
    try:
        share = float(text.removeprefix("top").removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not (text.startswith("top") and text.endswith("%") and 0 < share <= 1):
        raise ConfigError(
            f"targets={text} is neither `all`, nor like `top10%`, nor a folder of results"
        )
    return share


@dataclass(frozen=True)
class Thresholds:
    gap: float | None
    """From this gap on a target is chosen; None: all are."""

    kl: float | None


def fit_thresholds(losses: pd.DataFrame, share: float, min_gap: float) -> Thresholds:
    """From the losses of the threshold half."""
    if share == 1.0:
        return Thresholds(None, None)
    gap = float(np.quantile((losses.loss_short - losses.loss_long).to_numpy(), 1 - share))
    return Thresholds(max(gap, min_gap), float(np.quantile(losses.kl.to_numpy(), 1 - share)))


def choose_targets(
    losses: pd.DataFrame,
    thresholds: Thresholds,
    share: float,
    seed: int = 0,
    sets: Sequence[str] = CHOSEN_SETS,
    max_targets: int | None = None,
) -> pd.DataFrame:
    """Of the documents of the report half. Strata are fixed by the text alone, and of each a
    `share` of all targets of the document is drawn. Of a set, no more than `max_targets` of a
    document are kept, drawn at random."""
    reported = losses[losses.document.map(half_of) == "report"]
    rows = far_part_losses(reported)
    sizes = reported.groupby("document").size()
    most = len(losses) if max_targets is None else max_targets
    least = -np.inf if thresholds.gap is None else thresholds.gap
    least_kl = -np.inf if thresholds.kl is None else thresholds.kl
    by_gap = _sample(rows[rows.gap >= least], "gap", lambda _: most, seed)
    found = [by_gap, _sample(rows[rows.kl >= least_kl], "kl", lambda _: most, seed)]
    for stratum in ("recurs", "new"):
        found.append(by_gap[by_gap.stratum == stratum].assign(target_set=f"gap_{stratum}"))
        found.append(
            _sample(
                rows[rows.stratum == stratum], stratum,
                lambda document: min(int(np.ceil(share * sizes[document])), most), seed,
            )
        )  # fmt: skip
    chosen = pd.concat(found)[COLUMNS]
    asked = chosen.target_set.str.split("_").str[0].isin(sets)
    return chosen[asked].sort_values(COLUMNS, ignore_index=True)


def _sample(
    rows: pd.DataFrame, target_set: str, wanted: Callable[[int], int], seed: int
) -> pd.DataFrame:
    """As many targets of each document as are `wanted`, of the own far part and of the placebo."""
    found = [rows[:0]]
    for (document, part), some in rows.groupby(["document", "far_part"]):
        draw = np.random.default_rng([seed, int(document), len(target_set), len(part)])
        found.append(some.iloc[np.sort(draw.permutation(len(some))[: wanted(int(document))])])
    return pd.concat(found).assign(target_set=target_set)


def planted_targets(documents: Documents) -> pd.DataFrame:
    """The last token of each document: what is planted, and its twin, are made for it."""
    return pd.DataFrame(
        [
            (
                d.number,
                len(d.tokens) - 1,
                "document",
                "planted" if len(d.truth) else "planted_removed",
            )
            for d in documents
            if d.truth is not None
        ],
        columns=COLUMNS,
    )


def given_targets(targets: pd.DataFrame, windows: Windows, asked_alike: bool) -> pd.DataFrame:
    """Of another measurement of the same text, so that two models answer the same. Where that was
    asked otherwise (windows, seed, controls), its placebo is another text and its strata are other
    ones: those are left out, and so are targets that have no full long window here."""
    kept = targets.target >= windows.first_target
    if not asked_alike:
        kept &= (targets.far_part == "document") & ~targets.target_set.str.contains("recurs|new")
    return targets[kept][COLUMNS].sort_values(COLUMNS, ignore_index=True)


def named_targets(documents: Documents, at: At, windows: Windows) -> pd.DataFrame:
    """The tokens of what is named, wherever it stands behind a full long window."""
    places = [
        (document.number, place, "document", "named")
        for document in documents
        for first, end in find_spans(document, at, missing_ok=True)
        for place in range(max(first, windows.first_target), end)
    ]
    if not places:
        raise DataError(f"{documents.name}: what is named stands nowhere behind a full long window")
    return pd.DataFrame(places, columns=COLUMNS).drop_duplicates(ignore_index=True)


def find_spans(document: Document, at: At, missing_ok: bool = False) -> Spans:
    """Token spans of what is named. Words may stand in several places."""
    if isinstance(at, np.integer):
        at = int(at)
    if not isinstance(at, str | int | slice | re.Pattern | Sequence | np.ndarray | pd.Series):
        raise ConfigError(
            f"at={at!r} is neither words, a regular expression (re.compile), a token's number or "
            "slice, nor a list of these"
        )
    if isinstance(at, int | slice):
        size = len(document.tokens)
        places = range(size)[at] if isinstance(at, slice) else range(size)[at : (at + 1) or None]
        if missing_ok and not places:
            return []
        if not places or places.step != 1:
            raise ConfigError(f"at={at}: the text has {size:,} tokens")
        return [(places[0], places[-1] + 1)]
    if not isinstance(at, str | re.Pattern):
        return sorted({span for one in at for span in find_spans(document, one, missing_ok)})
    text = "".join(document.texts)
    found = [m.span() for m in re.finditer(re.escape(at) if isinstance(at, str) else at, text)]
    named = at if isinstance(at, str) else at.pattern
    if missing_ok and not found:
        return []
    if not found or not all(a < b for a, b in found):
        raise DataError(f"'{named}' does not stand in the text; check spelling and upper case")
    # White space at the beginning of a token belongs to the token: it is not what is named.
    begins = first_characters(document.texts)
    ends = np.cumsum([len(piece) for piece in document.texts])
    firsts = [int(np.searchsorted(ends, a, side="right")) for a, _ in found]
    lasts = [int(np.searchsorted(begins, b, side="left")) for _, b in found]
    return sorted({(a, max(b, a + 1)) for a, b in zip(firsts, lasts, strict=True)})


def parse_at(text: str) -> At:
    """/a regular expression/, FIRST:END of tokens, or words."""
    if len(text) > 2 and text[0] == text[-1] == "/":
        try:
            return re.compile(text[1:-1])
        except re.error as error:
            raise ConfigError(f"--at={text} is no regular expression ({error})") from None
    if re.fullmatch(r"-?\d+:-?\d+", text):
        first, end = text.split(":")
        return slice(int(first), int(end))
    return text


def first_place(windows: Windows, units: str) -> int:
    """The first place with a far unit and a full window before it."""
    return max(windows.first_target, windows.short + (span_width(units) or 1))


def largest_gaps(losses: pd.DataFrame, column: str = "loss_long", num_targets: int = 8) -> Spans:
    """The tokens of one document that gain most, of these all with a gap to speak of, or the first.
    `column`: with which far part."""
    if not len(losses):
        return []
    gaps = (losses.loss_short - losses[column]).set_axis(losses.target).nlargest(num_targets)
    large = gaps[gaps >= MIN_GAP] if (gaps >= MIN_GAP).any() else gaps[:1]
    return [(int(place), int(place) + 1) for place in sorted(large.index)]


def targets_fingerprint(targets: pd.DataFrame) -> str:
    return hashlib.sha256(targets[COLUMNS].to_csv(index=False).encode()).hexdigest()


def of_document(targets: pd.DataFrame, document: Document) -> dict[str, np.ndarray]:
    """far part → places, each once."""
    rows = targets[targets.document == document.number]
    return {str(part): np.unique(some.target.to_numpy()) for part, some in rows.groupby("far_part")}


def refuse_unanswered(folder: Path, targets: pd.DataFrame, recovery: pd.DataFrame) -> None:
    """Losses that two machines measured, or that one measured again, may differ in their last
    digits: a target beside the threshold was then chosen by one of them alone."""
    by = ["document", "target", "far_part"]
    unanswered = pd.MultiIndex.from_frame(targets[by]).difference(
        pd.MultiIndex.from_frame(recovery[by])
    )
    if len(unanswered):
        document, target, _ = unanswered[0]
        raise DataError(
            f"{folder}: {len(unanswered)} targets were not asked about, such as {target} of "
            f"document {document}: its losses were measured twice, and not to the same last digit; "
            f"delete {folder / 'parts/recovery'}, and the same command asks again"
        )
