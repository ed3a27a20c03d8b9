"""Compare two finished measurements of one text.

    compare(first, second)       net excess of one minus the other's, such as of two models
    transfer(first, second)      two models that evaluate each other's units: the mean of both
    loss_saved(windows, column)  one model with two lengths of its long window

A model that was trained with PoSE and one without, measured on the same text:

    compare("results/pose", "results/rope")
    target_set  units   selector  k    net  net_low  net_high  mean_gap  …
    gap         tokens  add_one   1   0.21     0.05      0.37      0.04

Differences are paired: of tokens that both measured, over documents that a resample draws for both.
two_measurements.py and loss_statistics.py compute them from tables; here it is checked that the
measurements can be compared. comparison_text.py prints them. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.results.doubts import with_remarks
from olmo_sparsity.analysis.results.intervals import Interval
from olmo_sparsity.analysis.results.loss_statistics import (
    SavingColumn,
    gap_difference,
    mean_saving,
    saving_difference,
    savings_of_longer_window,
)
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.pairing import join_by_target
from olmo_sparsity.analysis.results.reported import as_reported
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.stored_results import read_results
from olmo_sparsity.analysis.results.target_rows import PLACEBO
from olmo_sparsity.analysis.results.two_measurements import both_ways, net_differences
from olmo_sparsity.base.errors import DataError, check_type
from olmo_sparsity.base.progress import say

ResultsOrFolder = Results | str | Path

COMPARED_WINDOWS = ("long", "short", "stride", "prefix", "distant_states")
"""The entries of `Meta.windows` that two measurements to compare should share."""
"""Results, or the folder that holds them."""


def compare(first: ResultsOrFolder, second: ResultsOrFolder) -> pd.DataFrame:
    """Return net excess of the first measurement minus net excess of the second: a row for each
    target set, units, selector and k. Both must be of the same text in the same tokens. Intervals
    are paired, and by Student's t if documents are few. If other settings differ, such as the
    stride, a line on stderr names them.

    The columns `mean_gap`, `mean_gap_low` and `mean_gap_high` are the difference of the mean gap
    over all tokens that both measured; they are the same in each row. The column `remark` says what
    makes the intervals of a row doubtful, or is empty."""
    first_results = _read_if_folder("first", first)
    second_results = _read_if_folder("second", second)
    table = compare_results(first_results, second_results)
    _say_differing_conditions(first_results, second_results)
    return table


def compare_results(first_results: Results, second_results: Results) -> pd.DataFrame:
    """Return what `compare` returns, and print nothing."""
    # Net excess, which is compared, subtracts the placebo's excess.
    for results in (first_results, second_results):
        if PLACEBO not in set(results.targets.distant_part):
            remedy = "measure it with the default --control and without --targets"
            if "choices" in results.meta.targets:
                remedy = "pass --transfer"
            name = results.meta.model.get("name")
            raise DataError(f"{name} has no placebo to compare; {remedy}")
    table = as_reported(net_differences(*_pairs(first_results, second_results)))
    gap = gap_difference(first_results.reported, second_results.reported, first_results.parts)
    table = table.assign(mean_gap=gap.value, mean_gap_low=gap.low, mean_gap_high=gap.high)
    return with_remarks(table, has_net=True)


@dataclass(frozen=True)
class WindowPair:
    """Two measurements of one model that differ in their long window."""

    longer: Results
    shorter: Results

    @property
    def savings(self) -> pd.DataFrame:
        """Return the rows of `savings_of_longer_window`."""
        _check_same_tokens(self.longer, self.shorter)
        # No token was chosen by its loss, so the documents that set the threshold count, too.
        return savings_of_longer_window(self.longer.losses, self.shorter.losses)


def loss_saved(windows: WindowPair, column: SavingColumn) -> Interval:
    """Return the mean of L_shorter − L_longer of a model, in nats a token, with its interval; or
    how much more it is than with unrelated text as distant text."""
    return mean_saving(windows.savings, column, windows.longer.parts)


def difference_of_loss_saved(
    first: WindowPair, second: WindowPair, column: SavingColumn
) -> Interval:
    """Return `loss_saved` of a first model minus that of a second one, over the tokens that all
    four measurements have, with its interval, which is paired over documents."""
    _check_same_tokens(first.longer, second.longer)
    return saving_difference(first.savings, second.savings, column, first.longer.parts)


def transfer(first: ResultsOrFolder, second: ResultsOrFolder) -> pd.DataFrame:
    """Return the mean of two measurements in which two models evaluate each other's choices
    (`measure` with `choices`): their mean recovery, removal and so on, a row for each target set,
    units, selector and k. The column `remark` and a line on stderr are those of `compare`."""
    first_results = _read_if_folder("first", first)
    second_results = _read_if_folder("second", second)
    table = transfer_results(first_results, second_results)
    _say_differing_conditions(first_results, second_results)
    return table


def transfer_results(first_results: Results, second_results: Results) -> pd.DataFrame:
    """Return what `transfer` returns, and print nothing."""
    for results in (first_results, second_results):
        if "choices" not in results.meta.targets:
            name = results.meta.model.get("name")
            raise DataError(f"{name} evaluated its own choices; pass the other's with --choices")
    # Each must have evaluated what the other chose: a third model's choices would be something
    # else.
    both_directions = (first_results, second_results), (second_results, first_results)
    for evaluated, other in both_directions:
        chooser = evaluated.meta.targets.get("chosen_by", other.meta.model)
        if chooser.get("fingerprint") != other.meta.model.get("fingerprint"):
            raise DataError(
                f"{evaluated.meta.model.get('name')} evaluated what {chooser['name']} chose, not "
                f"{other.meta.model.get('name')}; pass both directions of one pair of models"
            )
    return with_remarks(as_reported(both_ways(*_pairs(first_results, second_results))))


def _read_if_folder(name: str, results: ResultsOrFolder) -> Results:
    """Return results as they are, or read them from their folder.

    Args:
        name: The argument that an error names.
    """
    if isinstance(results, str | PathLike):
        return read_results(results)
    check_type(name, results, Results, "what `measure` returned, or its folder")
    return results


def differing_conditions(first: Results, second: Results) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two measurements differ, without their models: name → the value
    of the first, and that of the second."""
    first_values = _conditions(first.meta)
    second_values = _conditions(second.meta)
    return {
        name: (value, second_values[name])
        for name, value in first_values.items()
        if value != second_values[name]
    }


def describe_differing_conditions(first: Results, second: Results) -> str:
    """Return a line that names the settings in which two measurements differ, or nothing."""
    differences = [
        f"{name} {first_value} and {second_value}"
        for name, (first_value, second_value) in differing_conditions(first, second).items()
    ]
    return f"measured with different {'; '.join(differences)}" if differences else ""


def _say_differing_conditions(first: Results, second: Results) -> None:
    """Tell the user of a Python function in which settings two measurements differ."""
    differing = describe_differing_conditions(first, second)
    if differing:
        say(differing)


def _conditions(meta: Meta) -> dict[str, Any]:
    """Return the settings that two measurements to compare should share."""
    values: dict[str, Any] = {name: meta.windows.get(name) for name in COMPARED_WINDOWS}
    values["control"] = meta.controls.get("control")
    values["seed"] = meta.seed
    values["dtype"] = meta.dtype
    return values


def _pairs(first: Results, second: Results) -> list[pd.DataFrame]:
    """Return the rows of `join_by_target` of each of two measurements. Raise DataError if their
    targets cannot be paired, or have gaps of another kind."""
    states = differing_conditions(first, second).get("distant_states")
    if states is not None and "replaced" in states:
        raise DataError(
            f"distant_states: {states[0]} and {states[1]} ask other questions, whose gaps differ; "
            "measure both in one way"
        )
    _check_same_tokens(first, second)
    return [
        join_by_target(results.losses, results.targets, results.recovery, results.parts)
        for results in (first, second)
    ]


def _check_same_tokens(first: Results, second: Results) -> None:
    """Raise DataError if two measurements are of different texts, or of other tokens of one."""
    if first.meta.data["fingerprint"] != second.meta.data["fingerprint"]:
        if _have_same_text(first, second):
            reason = (
                "have other tokens of one text, by their tokenizers, and differences are paired by "
                "token; measure one with --targets of the other, and compare their summaries"
            )
        else:
            reason = (
                "are of other texts, and differences are paired by target; measure both on one "
                "text, or compare their net_nats"
            )
        names = " and ".join(str(results.meta.model.get("name")) for results in (first, second))
        raise DataError(f"{names} {reason} (`figure` draws both)")


def _have_same_text(first: Results, second: Results) -> bool:
    """Return whether documents that both measurements have begin with the same characters."""
    first_texts, second_texts = (
        results.tokens.sort_values("place").groupby("document").text.agg("".join)
        for results in (first, second)
    )
    shared = first_texts.index.intersection(second_texts.index)
    # One measurement may have read less of a document than the other.
    return len(shared) > 0 and all(
        first_text.startswith(second_text) or second_text.startswith(first_text)
        for first_text, second_text in zip(first_texts[shared], second_texts[shared], strict=True)
    )
