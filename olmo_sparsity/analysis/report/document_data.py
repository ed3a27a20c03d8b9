"""Build the data that the page of a measurement shows for one document, as JSON.

    tokens, losses, targets, influence, recovery of a document → `document_data` → JSON

texts_page.py writes it into the page, and report_page.js reads it. Keys are short, and names are
indices into the page's menus, as a page may hold a book:

    {"text": ["The", " night", …],
     "ends": {"61": 63},                         targets of several tokens: one past the last
     "chosen": [{"target": 61, "short": 9.1, "long": 0.4, "sets": [0],
                 "found": {"0 1": {              units 0 and selector 1 of the menus
                     "own": {"first": [12, 40], "width": [2, 1], "influence": [7.9, 0.3],
                             "loss": [1.2, 1.1]},                  a loss for each k
                     "unrelated": {"loss": [8.8, 8.1]}}}}]}

Never imports torch.

Dimension key: K ranks or numbers of units.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.meta import SETS
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.target_rows import losses_of_targets, with_ends


@dataclass(frozen=True)
class Menus:
    """The entries of the page's menus, in their order. The data of documents refer to them by their
    indices."""

    ks: list[int]
    units: list[str]
    selectors: list[str]
    sets: list[str]

    @staticmethod
    def of(results: Results) -> Menus:
        """Return the menus for a measurement."""
        meta = results.meta
        recovery = results.recovery
        influence = results.influence
        return Menus(
            ks=sorted(recovery.k.unique().tolist()),
            units=in_order(meta.units, recovery.units, influence.units),
            selectors=in_order(meta.selectors, recovery.selector, influence.selector),
            sets=in_order(SETS, results.targets.target_set),
        )

    def key_of(self, units: str, selector: str) -> str:
        """Return the key under which a target has the units that a selector ranked: "0 1" for the
        first kind of units and the second selector."""
        return f"{self.units.index(units)} {self.selectors.index(selector)}"


def in_order(order: Iterable[str], *columns: pd.Series) -> list[str]:
    """Return the names that the columns hold, each once: first those in `order`, then the others as
    they come."""
    known_names = list(order)
    names = pd.concat(columns).unique().tolist()
    names_in_order = [name for name in known_names if name in names]
    return names_in_order + [name for name in names if name not in known_names]


def document_data(results: Results, document: int, menus: Menus) -> dict[str, Any]:
    """Return the data of a document, which `openDocument` and `fillPanel` of report_page.js read.

    Args:
        results: The measurement, without placebo targets.
        document: The number of the document.
        menus: The menus of the page.
    """
    tokens = _rows_of_document(results.tokens, document)
    targets = _rows_of_document(results.targets, document)
    recovery = _rows_of_document(results.recovery, document)
    influence = _rows_of_document(results.influence, document)
    losses = losses_of_targets(_rows_of_document(results.losses, document), targets)
    # Every token has losses; the page shows those of targets alone.
    shown_targets = [*targets.target, *recovery.target, *influence.target]
    losses = losses[losses.target.isin(shown_targets)]

    entries = _entries_of_targets(losses)
    for target, name in zip(*_lists(targets, "target", "target_set"), strict=True):
        entries[target]["sets"].append(menus.sets.index(name))
    _add_influence(entries, influence, menus)
    _add_losses(entries, recovery, menus)

    # An explanation has the ends of its targets in the table of losses.
    spans = losses if "end" in losses else with_ends(targets)
    ends = zip(*_lists(spans, "target", "end"), strict=True)
    texts = tokens.text
    if not any(texts):
        # Without a tokenizer, token IDs are shown.
        texts = tokens.token_id.astype(str) + " "
    return {
        "text": texts.tolist(),
        "ends": {target: end for target, end in ends if end > target + 1},
        "chosen": [entries[target] for target in sorted(entries)],
    }


Entries = dict[int, dict[str, Any]]
"""Place of a target → its data for the page, as the head of this module shows them."""


def _entries_of_targets(losses: pd.DataFrame) -> Entries:
    """Return an entry for each target, with its losses, and without units."""
    (places,) = _lists(losses, "target")
    short = _rounded(losses.loss_short)
    long = _rounded(losses.loss_long)
    entries: Entries = {}
    for target, loss_short, loss_long in zip(places, short, long, strict=True):
        entries[target] = {
            "target": target,
            "short": loss_short,
            "long": loss_long,
            "sets": [],
            "found": {},
        }
    return entries


class _Ranking(NamedTuple):
    """The columns that tell one ranking of a document from others."""

    target: int
    units: str
    selector: str
    control: str


_RANKING_KEYS = list(_Ranking._fields)


def _add_influence(entries: Entries, influence: pd.DataFrame, menus: Menus) -> None:
    """Add the ranked units of each target to its entry: their places, widths and scores."""
    ranked = influence[influence.control == "own"].sort_values([*_RANKING_KEYS, "rank"])
    ranked = ranked.assign(width=ranked.distant_end - ranked.distant_first)
    first, width, scores = _lists(ranked, "distant_first", "width", "influence")
    # The rows of one ranking are neighbours, in the order of rank, so they are runs of the lists.
    # Lists are cut much faster than groups of a table, and a book has thousands of targets.
    num_ranked = ranked.groupby(_RANKING_KEYS, sort=False).size()
    start = 0
    for keys, num_units in num_ranked.items():
        run = slice(start, start + num_units)
        units_data = _data_of_ranking(entries, _Ranking(*keys), menus)
        units_data["first"] = first[run]
        units_data["width"] = width[run]
        # Significant digits rather than decimals, as the scores of a selector may be small.
        units_data["influence"] = [float(f"{score:.4g}") for score in scores[run]]
        start = run.stop


def _add_losses(entries: Entries, recovery: pd.DataFrame, menus: Menus) -> None:
    """Add the loss with k units to the entry of each target, for each k: the mean over draws."""
    means = recovery.groupby([*_RANKING_KEYS, "k"]).loss_set.mean().unstack("k")
    means = means.reindex(columns=menus.ks)
    for keys, loss_K in zip(means.index, means.to_numpy(), strict=True):
        _data_of_ranking(entries, _Ranking(*keys), menus)["loss"] = _rounded(loss_K)


def _data_of_ranking(entries: Entries, ranking: _Ranking, menus: Menus) -> dict[str, Any]:
    """Return the data of a ranking in its target's entry, which the caller fills. They are created
    empty."""
    key = menus.key_of(ranking.units, ranking.selector)
    data_by_control = entries[ranking.target]["found"].setdefault(key, {})
    empty: dict[str, Any] = {}
    if ranking.control == "own":
        empty = {"first": [], "width": [], "influence": []}
    return data_by_control.setdefault(ranking.control, empty)


def _lists(rows: pd.DataFrame, *names: str) -> list[list]:
    """Return columns of a table as lists, of Python's own numbers."""
    return [rows[name].tolist() for name in names]


def _rows_of_document(table: pd.DataFrame, document: int) -> pd.DataFrame:
    """Return the rows of a document."""
    # They are neighbours, as tables are sorted.
    first, end = np.searchsorted(table.document, [document, document + 1])
    return table.iloc[first:end]


def _rounded(values: Any) -> list[float | None]:
    """Round losses to a ten-thousandth of a nat, which keeps the page of a book small. Values that
    are not finite become None, as JSON has no word for them."""
    rounded = np.round(np.asarray(values, dtype=float), 4).tolist()
    return [value if np.isfinite(value) else None for value in rounded]
