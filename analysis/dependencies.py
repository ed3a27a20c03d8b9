"""What kind of token the influential ones are, against what far tokens are anyway.

Place in the flow: influence + recovery tables → **the table of dependencies**. Never imports torch.

The kind of a far token is relative to its target: the same token, a word of the same family, else
what its own word is (a number, a name, a function word, other). Beside the kinds stand three bands
of distance. For each, with one influential token and with four: its share among them, its share
among all far tokens of the same targets (the base rate), and the excess recovery at that k of the
targets whose first token is of that kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.statistics import KEYS, interval, resample_weights
from analysis.windows import Windows

TOP = (1, 4)
"""The influential tokens of a target are its first one, and its first four."""

KINDS = ("equal", "same_family", "number", "name", "function_word", "other")
BANDS = ("near_third", "middle_third", "far_third")

_FUNCTION_WORDS = """
a about after all also am an and any are as at be because been before being both but by can could
did do does each either for from had has have he her here hers him his how i if in into is it its
me more most much must my neither no nor not of off on one only or other our out over own same she
should so some such than that the their them then there these they this those through to too under
until up us very was we were what when where which while who whom whose why will with would you
your
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())

_ENDINGS = """
s es ed d e er ers r rs ing ings ion ions ation ations ly al als y ies ied n ns ian ians ist ists
ism ment ments ness able ible ful ity or ors ive ic ical ally
"""
ENDINGS = frozenset(["", *_ENDINGS.split()])

COLUMNS = (
    "target_set", "selector", "k", "kind", "share", "base_share", "enrichment", "low", "high",
    "excess_recovery", "excess_low", "excess_high", "num_targets",
)  # fmt: skip


@dataclass(frozen=True)
class Words:
    """One document's tokens and the word that each is part of."""

    token_id: np.ndarray
    word: list[str]
    starts_sentence: list[bool]

    @staticmethod
    def of(tokens: pd.DataFrame) -> Words:
        """`tokens`: the rows of one document, in order of place."""
        pieces = tokens.text.tolist()
        text = "".join(pieces)
        spans = [match.span() for match in re.finditer(r"\S+", text)]
        starts = np.array([start for start, _ in spans] or [0])
        words, firsts, begin = [], [], 0
        for piece in pieces:
            # A token that begins with white space belongs to the word after it.
            inside = begin + len(piece) - len(piece.lstrip()) if piece.strip() else begin
            index = int(np.searchsorted(starts, inside, side="right")) - 1
            start, end = spans[index] if spans else (0, 0)
            words.append(text[start:end].strip(".,;:!?\"'()[]“”‘’"))
            before = text[:start].rstrip()
            firsts.append(not before or before[-1] in '.!?:"”')
            begin += len(piece)
        return Words(tokens.token_id.to_numpy(), words, firsts)

    def kind(self, far: int, target: int) -> str:
        if self.token_id[far] == self.token_id[target]:
            return "equal"
        word, wanted = self.word[far], self.word[target]
        if same_family(word, wanted):
            return "same_family"
        if any(character.isdigit() for character in word):
            return "number"
        if word.lower() in FUNCTION_WORDS:
            return "function_word"
        if word[:1].isupper() and not self.starts_sentence[far]:
            return "name"
        return "other"


def same_family(one: str, other: str) -> bool:
    """Equal beginnings of at least four letters, and after them nothing but an English ending:
    teach, teacher, teaching; but not interest, internal. A rule of thumb."""
    one, other = one.lower(), other.lower()
    if not (one.isalpha() and other.isalpha()):
        return False
    pairs = enumerate(zip(one, other, strict=False))
    common = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    # The stem may end before the letters stop being equal: nation-al, nation-s.
    return any(
        one[stem:] in ENDINGS and other[stem:] in ENDINGS
        for stem in range(max(4, common - 3), common + 1)
    )


def measure_dependencies(
    tokens: pd.DataFrame,
    losses: pd.DataFrame,
    targets: pd.DataFrame,
    influence: pd.DataFrame,
    recovery: pd.DataFrame,
    windows: Windows,
    seed: int = 0,
) -> pd.DataFrame:
    """One row for each target set, selector, k and kind or band, of the single tokens that were
    chosen in the document itself."""
    targets = targets[targets.far_part == "document"][[*KEYS, "target_set"]]
    chosen = influence[_of_document(influence) & (influence.control == "own")]
    recovery = recovery[_of_document(recovery)]
    words = {
        int(document): Words.of(rows.sort_values("place"))
        for document, rows in tokens[tokens.document.isin(targets.document)].groupby("document")
    }
    known = sorted(recovery.k.unique())
    ks = [k for k in TOP if k in known] or known[:1]
    gains = {k: _gains(losses, targets, recovery[recovery.k == k]) for k in ks}
    rows = []
    for kind_of, values in ((_kind_of(words), KINDS), (_band_of(windows), BANDS)):
        base = _base_counts(targets, windows, kind_of, values)
        places = zip(chosen.document, chosen.target, chosen.far_first, strict=True)
        of_kind = chosen.assign(kind=[kind_of(*place) for place in places])
        of_kind = of_kind.merge(targets, on=KEYS)
        for (target_set, selector), some in of_kind.groupby(["target_set", "selector"]):
            for k in ks:
                of_these = gains[k].target_set.eq(target_set) & gains[k].selector.eq(selector)
                first = some[some["rank"] <= k]
                for value in values:
                    row = {"target_set": target_set, "selector": selector, "k": k, "kind": value}
                    rows.append(row | _row(first, base, gains[k][of_these], value, seed))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _of_document(rows: pd.DataFrame) -> pd.Series:
    return (rows.far_part == "document") & (rows.units == "tokens")


KindOf = Callable[[int, int, int], str]


def _kind_of(words: dict[int, Words]) -> KindOf:
    return lambda document, target, far: words[document].kind(far, target)


def _band_of(windows: Windows) -> KindOf:
    num_far = windows.num_far

    def band(document: int, target: int, far: int) -> str:
        place = far - (windows.start_of(target) - windows.long)  # 0 is the farthest
        return BANDS[min(2, (num_far - 1 - place) * 3 // num_far)]

    return band


def _base_counts(
    targets: pd.DataFrame, windows: Windows, kind_of: KindOf, values: tuple[str, ...]
) -> pd.DataFrame:
    """Counts of each value among all far tokens of each target."""
    found = []
    for document, target in targets[KEYS].drop_duplicates().to_numpy():
        start = windows.start_of(target)
        far = range(start - windows.long, start - windows.short)
        kinds = [kind_of(document, target, place) for place in far]
        found.append((document, target, *(kinds.count(value) for value in values)))
    return pd.DataFrame(found, columns=[*KEYS, *values])


def _gains(losses: pd.DataFrame, targets: pd.DataFrame, at_k: pd.DataFrame) -> pd.DataFrame:
    """own − foreign recovery in nats, and the gap, of each target."""
    by = ["selector", *KEYS]
    sets = at_k.groupby([*by, "control"]).loss_set.mean().unstack("control").reset_index()
    gaps = losses.assign(gap=losses.loss_short - losses.loss_long)
    sets = sets.merge(gaps[[*KEYS, "gap"]], on=KEYS).merge(targets, on=KEYS)
    return sets.assign(gain=sets.foreign - sets.own)


def _row(
    some: pd.DataFrame, base: pd.DataFrame, gains: pd.DataFrame, value: str, seed: int
) -> dict:
    keys = KEYS
    hits = (
        some.assign(hit=some.kind == value)
        .groupby(keys, as_index=False)
        .agg(hits=("hit", "sum"), asked=("hit", "size"))
        .merge(base, on=keys)
    )
    counts = [name for name in base.columns if name not in keys]
    hits["far"] = hits[counts].sum(axis=1)
    sums_D4 = hits.groupby("document")[["hits", "asked", value, "far"]].sum().to_numpy(float)
    weights_RD = resample_weights(len(sums_D4), seed)
    share, base_share = _shares(sums_D4.sum(0))
    enrichment = low = high = float("nan")  # a kind that does not occur is not enriched
    if base_share > 0:
        share_R, base_R = _shares((weights_RD @ sums_D4).T)
        occurs_R = base_R > 0
        enrichment, low, high = interval(share_R[occurs_R] / base_R[occurs_R], share / base_share)
    first = some[(some["rank"] == 1) & (some.kind == value)][keys]
    excess, excess_low, excess_high = _excess(gains.merge(first, on=keys), seed)
    return {
        "share": share,
        "base_share": base_share,
        "enrichment": enrichment,
        "low": low,
        "high": high,
        "excess_recovery": excess,
        "excess_low": excess_low,
        "excess_high": excess_high,
        "num_targets": len(first),
    }


def _shares(sums: np.ndarray) -> tuple:
    return sums[0] / sums[1], sums[2] / sums[3]


def _excess(gains: pd.DataFrame, seed: int) -> tuple[float, float, float]:
    nothing = float("nan")
    if gains.document.nunique() < 2 or gains.gap.sum() <= 0:
        return nothing, nothing, nothing
    sums_D2 = gains.groupby("document")[["gain", "gap"]].sum().to_numpy()
    totals_R2 = resample_weights(len(sums_D2), seed) @ sums_D2
    whole = sums_D2.sum(0)
    return interval(totals_R2[:, 0] / totals_R2[:, 1], whole[0] / whole[1])
