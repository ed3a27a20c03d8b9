"""Find targets and units of another measurement whose model has another tokenizer.

Both models have read the same text, in other tokens. So a target, or a unit, is found by its
characters (token_alignment.py): it exists here if tokens begin and end at the same characters.

    tokens there   The | night | train | to | Novaport
    tokens here    The | nig | ht | train | to | Nova | port      "Novaport" is two tokens here

    the target there   target=4, end=5                      the place of "Novaport", one past it
    the same here      other_target=4, target=5, end=7      its place there, and its places here

`match_targets` returns the targets of another measurement with their places here, and
`match_choices` also the units that it ranked. Both return `ReusedTargets`, with the number of
targets and units that cannot be found (`MatchCounts`). reuse.py calls them if the two models read
the same text in other tokens.

Dimension key: E boundaries between tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.reused_targets import (
    MatchCounts,
    ReusedTargets,
    UnitCounts,
)
from olmo_sparsity.analysis.measurement.token_alignment import (
    NO_BOUNDARY,
    character_spans,
    is_same_text,
    map_boundaries,
)
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, KEYS
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.units import NO_INDICES, span_width
from olmo_sparsity.text.windows import Windows

RANKING_KEYS = [*KEYS, "units", "selector"]
"""The columns that tell one ranking of the document's own units from others."""


def is_other_tokenizer(other: Results, documents: Documents) -> bool:
    """Return whether the other measurement has read the same text in other tokens."""
    for number, tokens in other.tokens.sort_values("place").groupby("document"):
        document = _document_or_empty(documents, int(number))
        num_common = min(len(tokens), len(document.tokens))
        has_same_tokens = np.array_equal(tokens.token_id[:num_common], document.tokens[:num_common])
        if not has_same_tokens and is_same_text(list(tokens.text), document.texts):
            return True
    return False


def _document_or_empty(documents: Documents, number: int) -> Document:
    """Return the document with this number, or an empty one if this text has fewer documents."""
    return documents[number] if number < len(documents) else Document(NO_INDICES)


# --- targets --------------------------------------------------------------------------------------


def match_targets(other: Results, documents: Documents, windows: Windows) -> ReusedTargets:
    """Find the targets of the other measurement in the tokens of these documents, and count those
    that are not found. Targets of the placebo are left out, as its unrelated texts differ here.

    Args:
        other: The other measurement.
        documents: The documents here.
        windows: The windows here, in tokens of these documents.
    """
    targets = other.targets[other.targets.distant_part == DOCUMENT]
    located, num_in_other_text = _locate_targets(targets, _token_texts(other), documents)

    # No token here begins, or none ends, where the target does.
    is_cut = (located.target == NO_BOUNDARY) | (located.end == NO_BOUNDARY)
    # A target needs a full window before it, and all its tokens in one block.
    is_early = located.target < windows.first_target
    is_split = windows.start_of(located.target) != windows.start_of(located.end - 1)
    is_outside = ~is_cut & (is_early | is_split)
    matching = located[~is_cut & ~is_outside]

    # A target in several sets has several rows, but is counted once.
    by_target = located.assign(is_cut=is_cut, is_outside=is_outside)
    by_target = by_target.drop_duplicates(["document", "other_target"])
    counts = MatchCounts(
        targets=len(matching.drop_duplicates(KEYS)),
        of_targets=len(by_target) + num_in_other_text,
        targets_in_other_text=num_in_other_text,
        targets_cut_otherwise=int(by_target.is_cut.sum()),
        targets_outside_windows=int(by_target.is_outside.sum()),
    )
    no_units = other.influence[:0]
    return ReusedTargets(matching, no_units, counts)


class _LocatedTargets(NamedTuple):
    """The targets of another measurement, by whether their documents have the same text here."""

    rows: pd.DataFrame
    """Targets in equal text. `target` and `end` are places here, or NO_BOUNDARY, and `other_target`
    is the place there."""

    num_in_other_text: int
    """How many targets are in documents whose text here is another one."""


def _locate_targets(
    targets: pd.DataFrame, token_texts: dict[int, list[str]], documents: Documents
) -> _LocatedTargets:
    """Find the places here of targets there.

    Args:
        targets: The targets there.
        token_texts: The texts of the tokens there, by the number of their document.
        documents: The documents here.
    """
    # The list begins with an empty table: without targets, the result then has all columns, too.
    located = [targets[:0].assign(other_target=0)]
    num_in_other_text = 0
    for number, rows in targets.groupby("document"):
        texts = token_texts[int(number)]
        document = _document_or_empty(documents, int(number))
        if not is_same_text(texts, document.texts):
            num_in_other_text += rows.target.nunique()
            continue
        # A target begins at the boundary before its first token, and ends at the one before `end`.
        boundary_E = map_boundaries(texts, document.texts)
        located.append(
            rows.assign(
                other_target=rows.target, target=boundary_E[rows.target], end=boundary_E[rows.end]
            )
        )
    return _LocatedTargets(pd.concat(located), num_in_other_text)


# --- targets and their units ----------------------------------------------------------------------


def match_choices(other: Results, documents: Documents, settings: Settings) -> ReusedTargets:
    """Find the targets of the other measurement, and the units that it ranked for them, in the
    tokens of these documents.

    Units that are distant there may lie in the local window here, and are left out. The others move
    up in rank. A target with fewer units than the largest k is left out. Units of unrelated texts
    are not matched. For ks=(1, 2):

        rank there   unit       here                 rank here
                 1   "train"    in the local window
                 2   "Anna"     distant                      1
                 3   "opened"   distant                      2
    """
    kinds_of_tokens = [kind for kind in other.meta.units if span_width(kind) is not None]
    if kinds_of_tokens:
        raise ConfigError(
            f"choices: its units, {', '.join(kinds_of_tokens)}, are tokens of another tokenizer; "
            "measure it again with --units words, sentences, paragraphs or your own"
        )
    reused = match_targets(other, documents, settings.windows)
    assert reused.match_counts is not None, "`match_targets` counts"
    units = _locate_units(other, documents, settings, reused.targets)
    is_unit = units.distant_first.notna()
    is_distant = _is_distant(units, settings.windows)

    # A ranking serves all ks, so it needs as many units as the largest.
    num_needed = max(settings.ks)
    ranked = _with_new_ranks(units[is_distant])
    ranked = ranked[ranked["rank"] <= num_needed]

    num_rankings = len(settings.units) * len(settings.selectors)
    complete_keys = _keys_with_full_rankings(ranked, num_needed, num_rankings)
    unit_counts = UnitCounts(
        of_units=len(units),
        units_cut_otherwise=int((~is_unit).sum()),
        units_not_distant=int((is_unit & ~is_distant).sum()),
        targets_with_few_units=reused.match_counts.targets - len(complete_keys),
    )
    match_counts = replace(reused.match_counts, targets=len(complete_keys), units=unit_counts)
    return ReusedTargets(
        targets=_rows_with_keys(reused.targets, complete_keys),
        ranked_units=_rows_with_keys(ranked, complete_keys),
        match_counts=match_counts,
    )


def _locate_units(
    other: Results, documents: Documents, settings: Settings, targets: pd.DataFrame
) -> pd.DataFrame:
    """Return the units that the other measurement ranked for some targets, with the places of units
    and targets here. The places of a unit are NaN if its characters are not a unit here.

    Args:
        targets: Targets with their places here and there, as `match_targets` returns them.
    """
    ranked = other.influence
    ranked = ranked[(ranked.distant_part == DOCUMENT) & (ranked.control == "own")]
    ranked = ranked[ranked.selector.isin(settings.selectors)]
    ranked = ranked.rename(columns={"target": "other_target"})
    places = targets[["document", "other_target", "target"]].drop_duplicates()
    ranked = ranked.merge(places, on=["document", "other_target"])

    token_texts = _token_texts(other)
    located = [ranked[:0]]
    for (number, kind), rows in ranked.groupby(["document", "units"]):
        characters = character_spans(
            token_texts[int(number)], rows.distant_first.to_numpy(), rows.distant_end.to_numpy()
        )
        units_here = _units_by_characters(documents[int(number)], str(kind))
        # Units are the same if their characters are, so the merge is on these. It adds the places
        # here, for which the places there are dropped.
        units_there = rows.drop(columns=["distant_first", "distant_end"])
        units_there = units_there.assign(**characters._asdict())
        located.append(units_there.merge(units_here, "left", on=list(characters._fields)))
    return pd.concat(located)


def _units_by_characters(document: Document, kind: str) -> pd.DataFrame:
    """Return a table of all units of a document, with the characters and the tokens of each. Units
    of white space alone are left out."""
    units = document.units(kind, 0, len(document.tokens))
    characters = character_spans(document.texts, units.first, units.end)
    table = pd.DataFrame(characters._asdict()).assign(
        # The whole document is taken as distant, so distant indices are places.
        distant_first=units.first,
        distant_end=units.end,
    )
    return table[table.first_character < table.end_character]


def _is_distant(units: pd.DataFrame, windows: Windows) -> pd.Series:
    """Return whether each unit lies between the first distant token and the local window of its
    target's block. It does not if its places are NaN."""
    start = windows.start_of(units.target)
    is_in_long_window = units.distant_first >= windows.first_distant(start)
    return is_in_long_window & (units.distant_end <= start - windows.short)


def _with_new_ranks(units: pd.DataFrame) -> pd.DataFrame:
    """Return ranked units with ranks 1, 2, 3, … in their order. Units that were left out had left
    gaps in the ranks."""
    # These columns held NaN where a unit was not found, so they are of floats.
    ranked = units.astype({"distant_first": int, "distant_end": int})
    ranked = ranked.sort_values([*RANKING_KEYS, "rank"])
    return ranked.assign(rank=ranked.groupby(RANKING_KEYS).cumcount() + 1)


def _keys_with_full_rankings(units: pd.DataFrame, num_needed: int, num_rankings: int) -> pd.Index:
    """Return the `KEYS` of the targets that have enough units in all their rankings.

    Args:
        units: Ranked units, with consecutive ranks.
        num_needed: The number of units that a ranking needs.
        num_rankings: The number of rankings of a target: one for each kind of units and selector.
    """
    # Ranks are consecutive, so a full ranking is one that has the last rank.
    num_full_rankings = units[units["rank"] == num_needed].groupby(KEYS).size()
    return num_full_rankings.index[num_full_rankings == num_rankings]


def _rows_with_keys(table: pd.DataFrame, keys: pd.Index) -> pd.DataFrame:
    """Return the rows of a table whose `KEYS` are among these."""
    return table[pd.MultiIndex.from_frame(table[KEYS]).isin(keys)]


def _token_texts(other: Results) -> dict[int, list[str]]:
    """Return the texts of the tokens of each document, by its number."""
    tokens = other.tokens.sort_values(["document", "place"])
    return {int(number): list(rows.text) for number, rows in tokens.groupby("document")}
