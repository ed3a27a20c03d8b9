"""Read a finished measurement from its folder, and compare two of them.

    results = read_results("results/mine")
    results.summary                      # a row for each target set, units, selector and k
    compare(results, read_results("results/other"))    # net excess of one minus the other's
    transfer(results, read_results("results/other"))   # two models that evaluate each other's units

A measurement of an earlier version lacks columns of the summary; `read_results` computes them from
the other tables (`complete_summary`). Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.results.chosen_units import median_distances, shares_of_all
from olmo_sparsity.analysis.results.columns import later_columns
from olmo_sparsity.analysis.results.intervals import Interval
from olmo_sparsity.analysis.results.loss_statistics import (
    SavingColumn,
    gap_difference,
    mean_saving,
    saving_difference,
    savings_of_longer_window,
)
from olmo_sparsity.analysis.results.meta import SETS, Meta
from olmo_sparsity.analysis.results.pairing import pair
from olmo_sparsity.analysis.results.reported import STUDENT, as_reported, without_few_intervals
from olmo_sparsity.analysis.results.statistics import GROUPS, summarize
from olmo_sparsity.analysis.results.tables import SCHEMAS, absent_columns, read_table
from olmo_sparsity.analysis.results.target_rows import Parts, half_of
from olmo_sparsity.analysis.results.two_measurements import both_ways, net_differences
from olmo_sparsity.analysis.results.view import spell
from olmo_sparsity.base.errors import DataError, check_type
from olmo_sparsity.base.files import read_json
from olmo_sparsity.base.manifest import MANIFEST, find_damage, read_entries
from olmo_sparsity.base.path_options import path_of
from olmo_sparsity.base.renamed import with_current_names


@dataclass(repr=False)
class Results:
    """One finished measurement. `SCHEMAS` and docs/measure.md list the columns of its tables."""

    documents: pd.DataFrame
    tokens: pd.DataFrame
    losses: pd.DataFrame
    targets: pd.DataFrame
    influence: pd.DataFrame
    recovery: pd.DataFrame
    lds: pd.DataFrame
    costs: pd.DataFrame
    summary: pd.DataFrame
    meta: Meta

    def __repr__(self) -> str:
        return (
            f"Results of {self.meta.model.get('name')}: {len(self.targets):,} targets in "
            f"{self.targets.document.nunique():,} documents. Tables: {', '.join(SCHEMAS)}"
        )

    @property
    def missing(self) -> str:
        """Return a warning that the measurement is partial; empty if it is complete."""
        num_left = self.meta.counts.get("documents_left", 0)
        if not num_left:
            return ""
        num_documents = num_left + self.meta.counts.get("documents_measured", 0)
        return f"partial: {num_left:,} of {num_documents:,} documents are not finished"

    @property
    def parts(self) -> Parts:
        """Return the numbers of the parts of each document that was split; empty if none was."""
        return self.meta.data.get("parts", {})

    @property
    def reported(self) -> pd.DataFrame:
        """Return the losses of the documents that the summary covers."""
        documents = self.losses.document
        # Only one half of the documents is reported if the other half has set the threshold.
        if self.meta.targets.get("threshold") is not None:
            return self.losses[documents.map(half_of) == "report"]
        return self.losses[documents.isin(self.targets.document)]

    def plot(self, path: str | Path) -> None:
        """Draw Figure 2 as .png, .pdf or .svg."""
        from olmo_sparsity.analysis.report.figures import draw_figure2  # imports matplotlib

        draw_figure2([self], path_of("path", path))

    def spell_set(self, name: str) -> str:
        """Return a readable name of a target set."""
        spelled = SETS.get(name, spell(name))
        if "given" in self.meta.targets:
            return spelled.replace("large gap", "chosen in other results")
        if self.meta.targets.get("share") == 1:
            return spelled.replace("large gap", "all")
        return spelled


ResultsOrFolder = Results | str | Path
"""Results, or the folder that holds them."""


def compare(first: ResultsOrFolder, second: ResultsOrFolder) -> pd.DataFrame:
    """Return net excess of the first measurement minus net excess of the second: a row for each
    target set, units, selector and k. Both must be of the same text in the same tokens. Intervals
    are paired, and by Student's t if documents are few.

    The columns `mean_gap`, `mean_gap_low` and `mean_gap_high` are the difference of the mean gap
    over all tokens that both measured; they are the same in each row."""
    first = _read_if_folder("first", first)
    second = _read_if_folder("second", second)
    # Net excess, which is compared, subtracts the placebo's excess.
    for results in (first, second):
        if "placebo" not in set(results.targets.distant_part):
            remedy = "measure it with the default --control and without --targets"
            if "choices" in results.meta.targets:
                remedy = "pass --transfer"
            name = results.meta.model.get("name")
            raise DataError(f"{name} has no placebo to compare; {remedy}")
    table = as_reported(net_differences(*_pairs(first, second)))
    gap = gap_difference(first.reported, second.reported, first.parts)
    return table.assign(mean_gap=gap.value, mean_gap_low=gap.low, mean_gap_high=gap.high)


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
    units, selector and k."""
    first = _read_if_folder("first", first)
    second = _read_if_folder("second", second)
    for results in (first, second):
        if "choices" not in results.meta.targets:
            name = results.meta.model.get("name")
            raise DataError(f"{name} evaluated its own choices; pass the other's with --choices")
    # Each must have evaluated what the other chose: a third model's choices would be something
    # else.
    for evaluated, other in ((first, second), (second, first)):
        chooser = evaluated.meta.targets.get("chosen_by", other.meta.model)
        if chooser.get("fingerprint") != other.meta.model.get("fingerprint"):
            raise DataError(
                f"{evaluated.meta.model.get('name')} evaluated what {chooser['name']} chose, not "
                f"{other.meta.model.get('name')}; pass both directions of one pair of models"
            )
    return as_reported(both_ways(*_pairs(first, second)))


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


def _conditions(meta: Meta) -> dict[str, Any]:
    """Return the settings that two measurements to compare should share."""
    names = ("long", "short", "stride", "prefix", "distant_states")
    values: dict[str, Any] = {name: meta.windows.get(name) for name in names}
    values["control"] = meta.controls.get("control")
    values["seed"] = meta.seed
    values["dtype"] = meta.dtype
    return values


def _pairs(first: Results, second: Results) -> list[pd.DataFrame]:
    """Return the rows of `pair` of each of two measurements. DataError if their targets have no
    partners, or have gaps of another kind."""
    states = differing_conditions(first, second).get("distant_states")
    if states is not None and "replaced" in states:
        raise DataError(
            f"distant_states: {states[0]} and {states[1]} ask other questions, whose gaps differ; "
            "measure both in one way"
        )
    _check_same_tokens(first, second)
    return [
        pair(results.losses, results.targets, results.recovery, results.parts)
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


FILES = ("meta.json", *(f"{name}.parquet" for name in SCHEMAS))
"""The files of a finished measurement, which its manifest lists."""

REMEDY = "the same `olmo-sparsity measure` command makes it again; or copy the complete folder"
"""What an error advises to do about a damaged measurement."""


def read_results(folder: str | Path) -> Results:
    """Read the folder of a finished measurement. If it is something else, or lacks something,
    DataError says what."""
    check_type("folder", folder, (str, PathLike), "the name of a folder of `measure`")
    folder = path_of("folder", folder)
    _check_holds_measurement(folder)
    _check_intact(folder)

    meta = read_json(folder / "meta.json", Meta, REMEDY)
    meta.windows = with_current_names(meta.windows)
    # A summary without final intervals is of an earlier version. All columns that came later are
    # then computed again, also those that it stores, as their intervals are not final either.
    is_final = meta.intervals == STUDENT
    missing_columns = later_columns()
    if is_final:
        missing_columns = absent_columns(folder / "summary.parquet", missing_columns)
    tables = {}
    for name in SCHEMAS:
        omitted = missing_columns if name == "summary" else ()
        tables[name] = read_table(folder / f"{name}.parquet", name, omitted).to_pandas()
    if missing_columns:
        tables["summary"] = complete_summary(tables["summary"], tables, meta, is_final)
    return Results(**tables, meta=meta)


def _check_holds_measurement(folder: Path) -> None:
    """Raise DataError if a folder holds something else than a measurement, and say what."""
    if (folder / "statements.parquet").exists():
        raise DataError(f"{folder} holds answers to questions; pandas reads statements.parquet")
    if (folder / "accuracy.parquet").exists():
        raise DataError(f"{folder} holds results of a task; only `figure` draws them")
    if not (folder / "identity.json").exists() and not (folder / MANIFEST).exists():
        if (folder / "metrics.jsonl").exists():
            raise DataError(
                f"{folder} is a training run, not a measurement; pass the folder of `measure`, or "
                "runs alone to `figure`"
            )
        raise DataError(f"{folder} holds no measurement, and no run that made a step")


def _check_intact(folder: Path) -> None:
    """Raise DataError if a measurement is not finished, or a file differs from the manifest."""
    if not (folder / MANIFEST).exists():
        remedy = "run the same `measure` command again, or with --partial"
        raise DataError(f"{folder}: not finished ({MANIFEST} is missing); {remedy}")
    # Each version lists all files that it writes. So a folder whose list lacks one is of another
    # version, and not damaged.
    listed = read_entries(folder)
    unlisted = sorted(set(FILES) - listed.files.keys())
    if listed.problem is None and unlisted:
        raise DataError(
            f"{folder} is of another version: {MANIFEST} does not list {unlisted[0]}; use another "
            "folder"
        )
    problem = find_damage(folder, FILES)
    if problem is not None:
        raise DataError(f"{folder} is damaged: {problem}; {REMEDY}")


def complete_summary(
    summary: pd.DataFrame, tables: Mapping[str, pd.DataFrame], meta: Meta, is_final: bool = False
) -> pd.DataFrame:
    """Return a summary as it is stored and shown: with all columns, in their order, and with final
    intervals.

    Args:
        summary: A summary that may lack columns.
        tables: The other tables of the measurement, by their names.
        meta: Its meta.json.
        is_final: Whether the intervals that the summary has are final already.
    """
    names = SCHEMAS["summary"].names
    if summary.empty:
        return summary.reindex(columns=names)
    summary = _with_later_columns(summary, tables, meta)
    # `as_reported` would stretch a final interval a second time.
    summary = without_few_intervals(summary) if is_final else as_reported(summary)
    return summary[[name for name in names if name in summary]]


def _with_later_columns(
    summary: pd.DataFrame, tables: Mapping[str, pd.DataFrame], meta: Meta
) -> pd.DataFrame:
    """Add the columns that a summary lacks and the other tables determine."""
    targets = tables["targets"]
    recovery = tables["recovery"]
    if "distance" not in summary:
        ks = sorted(summary.k.unique().tolist())
        distance = median_distances(targets, tables["influence"], ks)
        summary = summary.merge(distance, how="left", on=GROUPS)
    if "share_all" not in summary:
        shares = shares_of_all(targets, recovery, meta.windows)
        summary = summary.merge(shares, how="left", on=GROUPS)
    absent = [name for name in later_columns() if name not in summary]
    if absent:
        computed = summarize(tables["losses"], targets, recovery, meta.data.get("parts"))
        summary = summary.merge(computed[[*GROUPS, *absent]], how="left", on=GROUPS)
    return summary
