"""Match targets and units of a measurement with another tokenizer, by the characters of the text.

A target matches if tokens begin and end at its first and last character here as well; a unit, if
it is a unit here, white space around it aside. Others are left out and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.inputs.documents import Document, Documents
from olmo_sparsity.analysis.inputs.windows import Windows, span_width
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.statistics import KEYS
from olmo_sparsity.analysis.settings import Settings
from olmo_sparsity.errors import ConfigError

RANKED_BY = [*KEYS, "units", "selector"]


@dataclass(frozen=True)
class Matched:
    """Targets and ranked units of another measurement, as places in this one's documents."""

    targets: pd.DataFrame
    influence: pd.DataFrame
    counts: dict[str, int] = field(default_factory=dict)
    """What is left out, with another tokenizer; see docs/formats.md."""

    def __str__(self) -> str:
        counts = [f"{number:,} {name.replace('_', ' ')}" for name, number in self.counts.items()]
        return f"another tokenizer chose the targets: {', '.join(counts)} (docs/formats.md)"


def is_other_tokenizer(results: Results, documents: Documents) -> bool:
    """Return whether a document with targets has the same text here, in other tokens."""
    for number, there in results.tokens.sort_values("place").groupby("document"):
        here = documents[int(number)] if number < len(documents) else Document(np.array([]))
        size = min(len(there), len(here.tokens))
        is_same = np.array_equal(there.token_id[:size], here.tokens[:size])
        if not is_same and _is_same_text(list(there.text), here.texts):
            return True
    return False


def match_targets(results: Results, documents: Documents, windows: Windows) -> Matched:
    """Match the targets with the documents' own distant context."""
    targets = results.targets[results.targets.far_part == "document"]
    matched, texts_of, num_elsewhere = [targets[:0].assign(there=0)], _texts_of(results), 0
    for number, rows in targets.groupby("document"):
        texts = texts_of[int(number)]
        here = documents[int(number)] if number < len(documents) else Document(np.array([]))
        if not _is_same_text(texts, here.texts):
            num_elsewhere += rows.target.nunique()
            continue
        place_B = boundaries(texts, here.texts)
        of_here = {"target": place_B[rows.target], "end": place_B[rows.end]}
        matched.append(rows.assign(there=rows.target, **of_here))
    found = pd.concat(matched)
    is_cut = (found.target < 0) | (found.end <= found.target)
    start = windows.start_of(found.target)
    is_outside = ~is_cut & (
        (found.target < windows.first_target) | (start != windows.start_of(found.end - 1))
    )
    by_target = found.assign(cut=is_cut, outside=is_outside).drop_duplicates(["document", "there"])
    kept = found[~is_cut & ~is_outside]
    counts = {
        "targets": len(kept.drop_duplicates(KEYS)),
        "of_targets": len(by_target) + num_elsewhere,
        "targets_in_other_text": num_elsewhere,
        "targets_cut_otherwise": int(by_target.cut.sum()),
        "targets_outside_windows": int(by_target.outside.sum()),
    }
    return Matched(kept, results.influence[:0], counts)


def match_choices(results: Results, documents: Documents, settings: Settings) -> Matched:
    """Match targets, and the units that rank first among those that are distant here, too, as many
    as `ks` needs. A target for which fewer remain is left out. Units of unrelated texts are not
    matched."""
    if tokens := [kind for kind in results.meta.units if span_width(kind) is not None]:
        raise ConfigError(
            f"choices: units {', '.join(tokens)} are tokens of another tokenizer; rank --units "
            "words, sentences, paragraphs or your own there"
        )
    windows, most = settings.windows, max(settings.ks)
    found, texts_of = match_targets(results, documents, windows), _texts_of(results)
    ranked = results.influence
    ranked = ranked[(ranked.far_part == "document") & (ranked.control == "own")]
    ranked = ranked[ranked.selector.isin(settings.selectors)]
    of_here = found.targets[["document", "there", "target"]].drop_duplicates()
    ranked = ranked.rename(columns={"target": "there"}).merge(of_here, on=["document", "there"])
    matched = [ranked[:0]]
    for (number, kind), rows in ranked.groupby(["document", "units"]):
        texts = texts_of[int(number)]
        units = _units(documents[int(number)], str(kind))
        keys = characters(texts, rows.far_first.to_numpy(), rows.far_end.to_numpy())
        rows = rows.drop(columns=["far_first", "far_end"])
        matched.append(rows.assign(begin=keys[0], stop=keys[1]).merge(units, "left"))
    rows = pd.concat(matched)
    start = windows.start_of(rows.target)
    is_unit = rows.far_first.notna()
    is_far = rows.far_first >= windows.first_far(start)
    is_far &= rows.far_end <= start - windows.short
    counts = found.counts | {
        "of_units": len(rows),
        "units_cut_otherwise": int((~is_unit).sum()),
        "units_not_distant": int((is_unit & ~is_far).sum()),
    }
    rows = rows[is_far].astype({"far_first": int, "far_end": int}).sort_values([*RANKED_BY, "rank"])
    rows = rows.assign(rank=rows.groupby(RANKED_BY).cumcount() + 1)
    rows = rows[rows["rank"] <= most]
    num_full = rows[rows["rank"] == most].groupby(KEYS).size()
    full = num_full.index[num_full == len(settings.units) * len(settings.selectors)]
    targets, rows = (
        table[pd.MultiIndex.from_frame(table[KEYS]).isin(full)] for table in (found.targets, rows)
    )
    counts |= {"targets": len(full), "targets_with_few_units": counts["targets"] - len(full)}
    return Matched(targets, rows, counts)


# --- one document ---------------------------------------------------------------------------------


def boundaries(there: Sequence[str], here: Sequence[str]) -> np.ndarray:
    """Return for each boundary between tokens there (before the first, …, after the last) the one
    here at the same character, or −1. Tokens that share a character have their boundary inside it:
    only the first boundary at a character is one of characters."""
    bounds, others = (np.cumsum([0, *map(len, texts)]) for texts in (there, here))
    place = np.searchsorted(others, bounds)
    is_same = np.append(others, -1)[place] == bounds
    is_first = np.diff(bounds, prepend=-1) > 0
    return np.where(is_same & is_first, place, -1)


def characters(
    texts: Sequence[str], first: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first character of each span of tokens and one past its last, without white space
    around it."""
    bounds = np.cumsum([0, *map(len, texts)])
    text = "".join(texts)
    solid = np.array([i for i, letter in enumerate(text) if not letter.isspace()] + [len(text)])
    begin = solid[np.searchsorted(solid[:-1], bounds[first])]
    last = np.searchsorted(solid[:-1], bounds[end]) - 1
    return begin, np.where(last >= 0, solid[last] + 1, 0)


def _units(document: Document, kind: str) -> pd.DataFrame:
    """All units of a document that are more than white space, by their characters."""
    units = document.units(kind, 0, len(document.tokens))
    begin, stop = characters(document.texts, units.first, units.end)
    columns = {"begin": begin, "stop": stop, "far_first": units.first, "far_end": units.end}
    table = pd.DataFrame(columns)
    return table[table.begin < table.stop]


def _texts_of(results: Results) -> dict[int, list[str]]:
    """The text of each token, by document."""
    tokens = results.tokens.sort_values(["document", "place"])
    return {int(number): list(rows.text) for number, rows in tokens.groupby("document")}


def _is_same_text(there: Sequence[str], here: Sequence[str]) -> bool:
    """Return whether one text begins the other: a shorter context ends a document earlier."""
    one, other = ("".join(texts).rstrip("\ufffd") for texts in (there, here))
    return bool(one) and bool(other) and (one.startswith(other) or other.startswith(one))
