"""Classify the influential far tokens by kind and distance, compared with all far tokens, and
targets by what part of a word they are.

The kind of a far token is relative to its target: the same token, a word of the same family, or
else by its own word: a number, a name, a function word, other. There are also three bands of
distance. For each kind and band, and for one and four influential tokens: its share among them, its
share among all far tokens of the same targets (the base rate), and the excess and net excess
recovery at that k of the targets with a first token of that kind.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.inputs.documents import first_characters
from olmo_sparsity.analysis.inputs.windows import Windows
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.statistics import (
    KEYS,
    PARTS,
    beyond_controls,
    has_spans,
    interval,
    pair,
    resample,
)

COLUMNS = [
    *("target_set", "selector", "k", "kind", "share", "base_share", "enrichment", "low", "high"),
    *("excess_recovery", "excess_low", "excess_high", "net", "net_low", "net_high", "num_targets"),
]

TOP = (1, 4)
"""The influential tokens of a target are its first one, or its first four."""

KINDS = ("equal", "same_family", "number", "name", "function_word", "other")
BANDS = ("near_third", "middle_third", "far_third")
PARTS_OF_WORDS = ("later_piece", "first_piece", "function_word", "word", "no_word")
"""Kinds of tokens: a piece of a word or number of several tokens, a word of one, or neither."""

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


_MARKS = ".,;:!?\"'()[]“”‘’"


class Words:
    """The tokens of one document, each with its word. `spans`: of each word its spelling, its first
    token and one past its last."""

    def __init__(self, tokens: pd.DataFrame) -> None:
        """`tokens`: the rows of one document, in order of place."""
        texts = tokens.text.tolist()
        text = "".join(texts)
        spans = [match.span() for match in re.finditer(r"\S+", text)]
        words = [text[start:end].strip(_MARKS) for start, end in spans]
        last = ["."] + [text[end - 1] for _, end in spans]  # the character before each word
        kinds = [_kind_of_word(*word) for word in zip(words, last, strict=False)]
        starts = [start for start, _ in spans]
        word_L = np.searchsorted(starts, first_characters(texts), side="right") - 1
        word_L[[text.isspace() for text in texts]] = -1  # no word, which is put last
        present_W, first_W, counts_W = np.unique(word_L, return_index=True, return_counts=True)
        self.spans = [
            (words[word], int(first), int(first + count))
            for word, first, count in zip(present_W, first_W, counts_W, strict=True)
            if word >= 0
        ]
        self.kind = np.array([*kinds, "other"])[word_L]
        spelt = np.array([*(word.lower() for word in words), ""], dtype=object)
        spelling_W, self.spellings = pd.factorize(spelt)
        self.spelling = spelling_W[word_L]
        self.token_id = tokens.token_id.to_numpy()
        self.family: dict[str, list[int]] = defaultdict(list)
        for spelling, word in enumerate(self.spellings):
            for stem in stems(word):
                self.family[stem].append(spelling)

    def kinds(self, target: int, far: slice) -> np.ndarray:
        """Kinds of the tokens `far`, relative to the target."""
        word = self.spellings[self.spelling[target]]
        relatives = [spelling for stem in stems(word) for spelling in self.family[stem]]
        is_relative = np.isin(self.spelling[far], relatives)
        kinds = np.where(is_relative, "same_family", self.kind[far])
        return np.where(self.token_id[far] == self.token_id[target], "equal", kinds)


def parts_of_words(texts: Sequence[str]) -> np.ndarray:
    """Return one of `PARTS_OF_WORDS` for each token of a document. What continues a word, or a
    number, is copied more easily than a word is chosen."""
    text = "".join(texts)
    starts = first_characters(texts)
    later = [text[max(n - 1, 0) : n].isalnum() and text[n : n + 1].isalnum() for n in starts]
    return np.array(list(map(_part_of_word, texts, later, [*later[1:], False])))


def parts_of_targets(targets: pd.DataFrame, tokens: pd.DataFrame) -> list[str]:
    """`tokens`: all tokens of the documents."""
    kept = tokens[tokens.document.isin(targets.document)].sort_values("place")
    parts = {
        document: parts_of_words(rows.text.tolist()) for document, rows in kept.groupby("document")
    }
    return [parts[row.document][row.target] for row in targets.itertuples()]


def _part_of_word(piece: str, is_later: bool, goes_on: bool) -> str:
    if is_later:
        return "later_piece"
    if not any(map(str.isalnum, piece)):
        return "no_word"
    if goes_on:
        return "first_piece"
    return "function_word" if piece.strip().strip(_MARKS).lower() in FUNCTION_WORDS else "word"


def _kind_of_word(word: str, before: str) -> str:
    """`before`: the last character of the preceding word."""
    if any(character.isdigit() for character in word):
        return "number"
    if word.lower() in FUNCTION_WORDS:
        return "function_word"
    return "name" if word[:1].isupper() and before not in '.!?:"”' else "other"


def stems(word: str) -> set[str]:
    """The beginnings, of four letters or more, that only an English ending follows. Words of one
    family share one: teach, teacher, teaching; but not interest, internal. A rule of thumb."""
    if not word.isalpha():
        return set()
    return {word[:end] for end in range(4, len(word) + 1) if word[end:] in ENDINGS}


def measure_dependencies(
    tokens: pd.DataFrame,
    losses: pd.DataFrame,
    targets: pd.DataFrame,
    influence: pd.DataFrame,
    recovery: pd.DataFrame,
    windows: Windows,
    seed: int = 0,
) -> pd.DataFrame:
    """One row for each target set, selector, k and kind or band, from the single tokens chosen in
    the document itself."""
    recovery = recovery[recovery.units == "tokens"]
    known = sorted(recovery.k.unique())
    ks = [k for k in TOP if k in known] or known[:1]
    chosen, base = _classify(tokens, influence, windows)
    pairs = pair(losses, targets, recovery[recovery.k.isin(ks)])
    first = chosen.loc[chosen["rank"] == 1, [*KEYS, "far_part", "selector", "kind", "band"]]
    pairs = pairs.merge(first, on=[*KEYS, "far_part", "selector"])
    chosen = chosen[chosen.far_part == "document"].merge(targets, on=[*KEYS, "far_part"])
    rows = []
    for (target_set, selector), group in chosen.groupby(["target_set", "selector"]):
        of_set = pairs[(pairs.target_set == target_set) & (pairs.selector == selector)]
        for k in ks:
            about = {"target_set": target_set, "selector": selector, "k": k}
            at_k = of_set[of_set.k == k]
            for kind, shares in _shares(group[group["rank"] <= k], base, seed).items():
                gains = _gains(at_k[(at_k.kind == kind) | (at_k.band == kind)], seed)
                rows.append(about | {"kind": kind} | shares | gains)
    return pd.DataFrame(rows, columns=COLUMNS)


def dependencies_of(results: Results) -> pd.DataFrame:
    """The same of a measurement; no rows if single tokens were not ranked, or targets have several
    tokens."""
    if "tokens" not in results.meta.units or not len(results.tokens) or has_spans(results.targets):
        return pd.DataFrame(columns=COLUMNS)
    windows = Windows(**{name: results.meta.windows[name] for name in ("long", "short", "stride")})
    tables = results.tokens, results.losses, results.targets, results.influence, results.recovery
    return measure_dependencies(*tables, windows)


def _classify(
    tokens: pd.DataFrame, influence: pd.DataFrame, windows: Windows
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The chosen single tokens with their kind and band; and for each target, how many of all its
    far tokens are of each.

    In the placebo only tokens equal to the target have a kind: the other kinds depend on words, and
    no table holds the words of that text.
    """
    chosen = influence[(influence.units == "tokens") & (influence.control == "own")]
    start = windows.start_of(chosen.target)
    lowest, end = windows.first_far(start), start - windows.short
    band = np.array(BANDS)[(end - 1 - chosen.far_first) * 3 // (end - lowest)]
    chosen = chosen.assign(lowest=lowest, end=end, band=band)
    target_texts = tokens[["document", "place", "text"]].set_axis([*KEYS, "text"], axis=1)
    chosen = chosen.merge(target_texts, on=KEYS)
    kinds = np.where(chosen.far_text == chosen.text, "equal", "").astype(object)
    counts, of_document = [], tokens.groupby("document")
    for document, rows in chosen[chosen.far_part == "document"].groupby("document"):
        words = Words(of_document.get_group(document).sort_values("place"))
        for target, ranked in rows.groupby("target"):
            lowest, end = ranked[["lowest", "end"]].iloc[0]
            kind_F = words.kinds(target, slice(lowest, end))
            kinds[ranked.index] = kind_F[ranked.far_first - lowest]
            of_bands = np.bincount(np.arange(end - lowest) * 3 // (end - lowest), minlength=3)
            of_kinds = [(kind_F == kind).sum() for kind in KINDS]
            counts.append((document, target, *of_kinds, *of_bands))
    base = pd.DataFrame(counts, columns=[*KEYS, *KINDS, *BANDS])
    return chosen.assign(kind=kinds), base


def _shares(chosen: pd.DataFrame, base: pd.DataFrame, seed: int) -> dict[str, dict[str, float]]:
    """For each kind and band: its share among the chosen, among all far tokens, and their ratio."""
    counts = [pd.crosstab(chosen.document, chosen[name]) for name in ("kind", "band")]
    share_RV = _share_of_all(pd.concat(counts, axis=1), seed)
    base = base.merge(chosen[KEYS].drop_duplicates(), on=KEYS)
    base_RV = _share_of_all(base.groupby("document").sum(), seed)
    shares = {}
    for kind, share_R, base_R in zip((*KINDS, *BANDS), share_RV.T, base_RV.T, strict=True):
        ratio = (np.nan,) * 3
        if base_R[0] > 0:  # a kind that does not occur is not enriched
            ratio_R = share_R[base_R > 0] / base_R[base_R > 0]
            ratio = interval(ratio_R[1:], ratio_R[0])
        shares[kind] = dict(zip(("enrichment", "low", "high"), ratio, strict=True))
        shares[kind] |= {"share": share_R[0], "base_share": base_R[0]}
    return shares


def _share_of_all(counts: pd.DataFrame, seed: int) -> np.ndarray:
    sums_RV = resample(counts.reindex(columns=[*KINDS, *BANDS], fill_value=0), seed)
    return 2 * sums_RV / sums_RV.sum(1, keepdims=True)  # each token has a kind and a band


def _gains(rows: pd.DataFrame, seed: int) -> dict[str, float]:
    """Excess and net excess of these targets, if they are of two documents or more."""
    own, placebo = (rows[rows.far_part == part] for part in PARTS)
    gains: dict[str, float] = {"num_targets": len(own)}
    if own.document.nunique() > 1:
        gains |= beyond_controls(own, placebo, seed)
        gains["excess_recovery"] = gains["excess"]
    return gains
