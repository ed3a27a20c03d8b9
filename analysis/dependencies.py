"""What kind of token the influential ones are, against what far tokens are anyway.

Place in the flow: influence + recovery tables → **the table of dependencies**. Never imports torch.

The kind of a far token is relative to its target: the same token, a word of the same family, else
what its own word is (a number, a name, a function word, other). Beside the kinds stand three bands
of distance. For each: its share among the influential tokens, its share among all far tokens of the
same targets (the base rate), and the excess recovery of the targets whose first token is of that
kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.recovery import interval, resample_weights

TOP = 4
"""The influential tokens of a target are its first four."""

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
    "target_set", "selector", "kind", "share", "base_share", "enrichment", "low", "high",
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
    influence: pd.DataFrame,
    recovery: pd.DataFrame,
    windows: dict,
    seed: int = 0,
) -> pd.DataFrame:
    """One row a target set, selector and kind or band."""
    own = influence[(influence.control == "own") & (influence["rank"] <= TOP)]
    membership = recovery[["document", "target", "target_set"]].drop_duplicates()
    k = max(k for k in recovery.k.unique() if k <= TOP)
    words = {
        int(document): Words.of(rows.sort_values("place"))
        for document, rows in tokens.groupby("document")
    }
    gains = _gains(losses, recovery, k)
    rows = []
    for kind_of, values in ((_kind_of(words), KINDS), (_band_of(windows), BANDS)):
        base = _base_counts(membership, windows, kind_of, values)
        places = zip(own.document, own.target, own.far_position, strict=True)
        chosen = own.assign(kind=[kind_of(*place) for place in places])
        chosen = chosen.merge(membership, on=["document", "target"])
        for (target_set, selector), some in chosen.groupby(["target_set", "selector"]):
            of_these = gains.target_set.eq(target_set) & gains.selector.eq(selector)
            for value in values:
                row = {"target_set": target_set, "selector": selector, "kind": value}
                rows.append(row | _row(some, base, gains[of_these], value, seed))
    return pd.DataFrame(rows, columns=list(COLUMNS))


KindOf = Callable[[int, int, int], str]


def _kind_of(words: dict[int, Words]) -> KindOf:
    return lambda document, target, far: words[document].kind(far, target)


def _band_of(windows: dict) -> KindOf:
    num_far, long, stride = windows["long"] - windows["short"], windows["long"], windows["stride"]

    def band(document: int, target: int, far: int) -> str:
        start = target - (target - long) % stride
        place = far - (start - long)  # 0 is the farthest
        return BANDS[min(2, (num_far - 1 - place) * 3 // num_far)]

    return band


def _base_counts(
    membership: pd.DataFrame, windows: dict, kind_of: KindOf, values: tuple[str, ...]
) -> pd.DataFrame:
    """Counts of each value among all far tokens of each target."""
    long, short, stride = windows["long"], windows["short"], windows["stride"]
    found = []
    for document, target in membership[["document", "target"]].drop_duplicates().to_numpy():
        start = target - (target - long) % stride
        kinds = [kind_of(document, target, far) for far in range(start - long, start - short)]
        found.append((document, target, *(kinds.count(value) for value in values)))
    return pd.DataFrame(found, columns=["document", "target", *values])


def _gains(losses: pd.DataFrame, recovery: pd.DataFrame, k: int) -> pd.DataFrame:
    """own − foreign recovery in nats, and the gap, of each target."""
    at_k = recovery[recovery.k == k]
    by = ["target_set", "selector", "document", "target"]
    sets = at_k.groupby([*by, "control"]).loss_set.mean().unstack("control").reset_index()
    gaps = losses.assign(gap=losses.loss_short - losses.loss_long)
    sets = sets.merge(gaps[["document", "target", "gap"]], on=["document", "target"])
    return sets.assign(gain=sets.foreign - sets.own)


def _row(
    some: pd.DataFrame, base: pd.DataFrame, gains: pd.DataFrame, value: str, seed: int
) -> dict:
    keys = ["document", "target"]
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
