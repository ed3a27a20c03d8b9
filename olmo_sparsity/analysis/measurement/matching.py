"""Find targets and units of another measurement whose model has another tokenizer.

Both models have read the same text, in other tokens. So a target, or a unit, is found by its
characters: it exists here if tokens begin and end at the same characters.

    tokens there   The | night | train | to | Novaport
    tokens here    The | nig | ht | train | to | Nova | port      "Novaport" is two tokens here

`match_targets` finds targets, `match_choices` also the units that were ranked for them. Both count
what they could not find.

Dimension key: B boundaries between tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, KEYS
from olmo_sparsity.analysis.results.view import num_of
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.units import NOTHING, span_width
from olmo_sparsity.text.windows import Windows

RANKING_KEYS = [*KEYS, "units", "selector"]
"""The columns that tell one ranking of the document's own units from others."""


@dataclass(frozen=True)
class Matched:
    """Targets and ranked units of another measurement, as places in this one's documents."""

    targets: pd.DataFrame
    influence: pd.DataFrame
    counts: dict[str, int] = field(default_factory=dict)
    """With another tokenizer: how many targets and units are left out, and why; see
    docs/measure.md."""

    has_other_windows: bool = False
    """Whether the other measurement cut or sampled the text in another way. Then only the blocks of
    its targets need losses here."""

    def __str__(self) -> str:
        counts = self.counts
        text = (
            f"another tokenizer chose the targets: {counts['targets']:,} of "
            f"{num_of(counts['of_targets'], 'target')} matched; "
            f"{counts['targets_in_other_text']:,} lie in other text, "
            f"{counts['targets_cut_otherwise']:,} are not whole tokens here, "
            f"{counts['targets_outside_windows']:,} have no full window before them"
        )
        if "of_units" in counts:
            text += (
                f", {counts['targets_with_few_units']:,} have too few units left; of "
                f"{num_of(counts['of_units'], 'unit')}, {counts['units_cut_otherwise']:,} are not "
                f"units here and {counts['units_not_distant']:,} are not distant here"
            )
        return f"{text} (docs/measure.md)"


def is_other_tokenizer(results: Results, documents: Documents) -> bool:
    """Return whether the other measurement has read the same text in other tokens."""
    for number, tokens in results.tokens.sort_values("place").groupby("document"):
        document = _document(documents, int(number))
        size = min(len(tokens), len(document.tokens))
        has_same_tokens = np.array_equal(tokens.token_id[:size], document.tokens[:size])
        if not has_same_tokens and _is_same_text(list(tokens.text), document.texts):
            return True
    return False


def _document(documents: Documents, number: int) -> Document:
    """Return the document with this number, or an empty one if this text has fewer documents."""
    return documents[number] if number < len(documents) else Document(NOTHING)


def match_targets(results: Results, documents: Documents, windows: Windows) -> Matched:
    """Find the targets of the other measurement in the tokens of these documents, and count those
    that are not found. Only targets in the documents' own distant context are matched, as unrelated
    texts differ. `results`: the other measurement."""
    targets = results.targets[results.targets.distant_part == DOCUMENT]
    texts_of = _texts_of(results)
    # `other_target`: a target's place in the other measurement; `target` becomes its place here.
    located = [targets[:0].assign(other_target=0)]
    num_in_other_text = 0
    for number, rows in targets.groupby("document"):
        texts = texts_of[int(number)]
        document = _document(documents, int(number))
        if not _is_same_text(texts, document.texts):
            num_in_other_text += rows.target.nunique()
            continue
        place_B = boundaries(texts, document.texts)
        target_places = place_B[rows.target]
        end_places = place_B[rows.end]
        located.append(rows.assign(other_target=rows.target, target=target_places, end=end_places))
    matched = pd.concat(located)

    # `boundaries` returns −1 where no token begins here: the target begins or ends inside a token.
    is_cut = (matched.target < 0) | (matched.end <= matched.target)
    # A target needs a full window before it, and all its tokens in one block.
    is_early = matched.target < windows.first_target
    is_split = windows.start_of(matched.target) != windows.start_of(matched.end - 1)
    is_outside = ~is_cut & (is_early | is_split)
    is_kept = ~is_cut & ~is_outside

    # A target in several sets has several rows, but is counted once.
    by_target = matched.assign(cut=is_cut, outside=is_outside)
    by_target = by_target.drop_duplicates(["document", "other_target"])
    kept = matched[is_kept]
    counts = {
        "targets": len(kept.drop_duplicates(KEYS)),
        "of_targets": len(by_target) + num_in_other_text,
        "targets_in_other_text": num_in_other_text,
        "targets_cut_otherwise": int(by_target.cut.sum()),
        "targets_outside_windows": int(by_target.outside.sum()),
    }
    return Matched(kept, results.influence[:0], counts)


def match_choices(results: Results, documents: Documents, settings: Settings) -> Matched:
    """Find the targets of the other measurement, and the units that it ranked for them, in the
    tokens of these documents.

    Units that are distant there may lie in the local window here, and are left out. The others move
    up in rank. A target with fewer units than the largest k is left out. Units of unrelated texts
    are not matched.
    """
    kinds_of_tokens = [kind for kind in results.meta.units if span_width(kind) is not None]
    if kinds_of_tokens:
        raise ConfigError(
            f"choices: its units, {', '.join(kinds_of_tokens)}, are tokens of another tokenizer; "
            "measure it again with --units words, sentences, paragraphs or your own"
        )
    windows = settings.windows
    num_needed = max(settings.ks)
    matched_targets = match_targets(results, documents, windows)
    rows = _match_units(results, documents, settings, matched_targets.targets)

    # A unit is distant if it lies between the first distant token and the local window of the
    # target's block.
    start = windows.start_of(rows.target)
    is_unit = rows.distant_first.notna()
    is_distant = rows.distant_first >= windows.first_distant(start)
    is_distant &= rows.distant_end <= start - windows.short
    counts = matched_targets.counts | {
        "of_units": len(rows),
        "units_cut_otherwise": int((~is_unit).sum()),
        "units_not_distant": int((is_unit & ~is_distant).sum()),
    }
    rows = _ranked_anew(rows[is_distant])
    rows = rows[rows["rank"] <= num_needed]

    num_rankings = len(settings.units) * len(settings.selectors)
    kept_keys = _keys_with_full_rankings(rows, num_needed, num_rankings)
    targets = matched_targets.targets
    targets = targets[pd.MultiIndex.from_frame(targets[KEYS]).isin(kept_keys)]
    rows = rows[pd.MultiIndex.from_frame(rows[KEYS]).isin(kept_keys)]
    counts["targets_with_few_units"] = counts["targets"] - len(kept_keys)
    counts["targets"] = len(kept_keys)
    return Matched(targets, rows, counts)


def _ranked_anew(rows: pd.DataFrame) -> pd.DataFrame:
    """Return ranked units with ranks 1, 2, 3, … in their order. Units that were left out had left
    gaps in the ranks."""
    rows = rows.astype({"distant_first": int, "distant_end": int})
    rows = rows.sort_values([*RANKING_KEYS, "rank"])
    return rows.assign(rank=rows.groupby(RANKING_KEYS).cumcount() + 1)


def _keys_with_full_rankings(rows: pd.DataFrame, num_units: int, num_rankings: int) -> pd.Index:
    """Return the `KEYS` of the targets that have enough units in all their rankings.

    Args:
        rows: Ranked units, with consecutive ranks.
        num_units: The number of units that a ranking needs.
        num_rankings: The number of rankings of a target: one for each kind of units and selector.
    """
    # Ranks are consecutive, so a full ranking is one that has the last rank.
    num_full_rankings = rows[rows["rank"] == num_units].groupby(KEYS).size()
    return num_full_rankings.index[num_full_rankings == num_rankings]


def _match_units(
    results: Results, documents: Documents, settings: Settings, targets: pd.DataFrame
) -> pd.DataFrame:
    """Return the ranked units of matched targets, with the places of both in this measurement's
    tokens. The places of a unit are NaN if its characters are not a unit in these tokens."""
    ranked = results.influence
    ranked = ranked[(ranked.distant_part == DOCUMENT) & (ranked.control == "own")]
    ranked = ranked[ranked.selector.isin(settings.selectors)]
    ranked = ranked.rename(columns={"target": "other_target"})
    places = targets[["document", "other_target", "target"]].drop_duplicates()
    ranked = ranked.merge(places, on=["document", "other_target"])
    texts_of = _texts_of(results)
    located = [ranked[:0]]
    for (number, kind), rows in ranked.groupby(["document", "units"]):
        texts = texts_of[int(number)]
        units = _units(documents[int(number)], str(kind))
        begin, stop = characters(texts, rows.distant_first.to_numpy(), rows.distant_end.to_numpy())
        rows = rows.drop(columns=["distant_first", "distant_end"])
        # Units are the same if their characters are: the merge is on `begin` and `stop`.
        located.append(rows.assign(begin=begin, stop=stop).merge(units, "left"))
    return pd.concat(located)


def boundaries(from_texts: Sequence[str], to_texts: Sequence[str]) -> np.ndarray:
    """Map boundaries between the tokens of one tokenization to those of another.

    Boundary i lies before token i, and the last one after the last token. Return for each boundary
    of `from_texts` the boundary of `to_texts` at the same character, or −1 if there is none:

        from_texts   |The|night|train         boundaries 0 1 2 3
        to_texts     |The|ni|ght|train        boundaries 0 1 2 3 4
        returned     0 1 3 4
    """
    from_bounds = np.cumsum([0, *map(len, from_texts)])
    to_bounds = np.cumsum([0, *map(len, to_texts)])
    place = np.searchsorted(to_bounds, from_bounds)
    # A boundary behind the end of the other text is at no character of it: −1.
    is_same = np.append(to_bounds, -1)[place] == from_bounds
    # Tokens that share a character have their boundary inside it. Of several boundaries at one
    # place of the text only the first lies between characters.
    is_first = np.diff(from_bounds, prepend=-1) > 0
    return np.where(is_same & is_first, place, -1)


def characters(
    texts: Sequence[str], first: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each span of tokens the place of its first character, and one past its last,
    without white space around it. `first`, `end`: the first token of each span, and one past its
    last."""
    bounds = np.cumsum([0, *map(len, texts)])
    text = "".join(texts)
    # Places of the characters that are not white space, in order.
    visible = np.array([place for place, letter in enumerate(text) if not letter.isspace()])
    visible_or_end = np.append(visible, len(text)).astype(int)
    begin = visible_or_end[np.searchsorted(visible, bounds[first])]
    index_of_last = np.searchsorted(visible, bounds[end]) - 1
    stop = np.where(index_of_last >= 0, visible_or_end[index_of_last] + 1, 0)
    return begin, stop


def _units(document: Document, kind: str) -> pd.DataFrame:
    """Return all units of a document by their characters (`begin`, `stop`) and tokens, without
    those that are white space alone."""
    units = document.units(kind, 0, len(document.tokens))
    begin, stop = characters(document.texts, units.first, units.end)
    columns = {"begin": begin, "stop": stop, "distant_first": units.first, "distant_end": units.end}
    table = pd.DataFrame(columns)
    return table[table.begin < table.stop]


def _texts_of(results: Results) -> dict[int, list[str]]:
    """Return the texts of the tokens of each document, by its number."""
    tokens = results.tokens.sort_values(["document", "place"])
    return {int(number): list(rows.text) for number, rows in tokens.groupby("document")}


def _is_same_text(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether two texts are the same, as far as both go: a model that takes fewer tokens
    ends a document earlier."""
    # A text may end inside a character, which decodes to the replacement character.
    first_text = "".join(first).rstrip("\ufffd")
    second_text = "".join(second).rstrip("\ufffd")
    if not first_text or not second_text:
        return False
    return first_text.startswith(second_text) or second_text.startswith(first_text)
