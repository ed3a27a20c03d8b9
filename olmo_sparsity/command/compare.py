"""Run the command `compare`: how two models differ, in measurements of the same text.

    compare RESULTS RESULTS    two measurements                            `_compare_two`
    compare EXPERIMENT         all pairs of an experiment                  `_compare_experiment`

For an experiment it prints, in this order:

    L_960 - L_4032: …                    `_print_savings_of_longer_windows`, for each longer window
      RoPE + PoSE (pose_seed0): +0.031 [+0.020, +0.042]; …
    pose_seed0 minus rope_seed0, …       `_print_pair`, for each pair of one seed
    …                                    what the seeds agree on

cli.py calls `run_compare`. `analysis/results` and `experiment/comparisons.py` compute what is
printed here.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.path_options import check_suffix
from olmo_sparsity.base.progress import say

if TYPE_CHECKING:
    import pandas as pd

    from olmo_sparsity.analysis.results.compare import WindowPair
    from olmo_sparsity.analysis.results.loss_statistics import SavingColumn
    from olmo_sparsity.experiment.comparisons import Comparison, LongerWindow
    from olmo_sparsity.experiment.file import Experiment


def run_compare(options: argparse.Namespace) -> int:
    """Print the differences of pairs of measurements; return the exit code."""
    if options.out is not None:
        check_suffix("--out", options.out, ".csv")
    if options.second is None:
        tables = _compare_experiment(options.first, transfers=options.transfer)
    else:
        tables = [_compare_two(options.first, options.second, transfers=options.transfer)]
    if options.out is not None:
        _write_csv(tables, Path(options.out))
    return 0


def _write_csv(tables: list[pd.DataFrame], out: Path) -> None:
    """Write tables one below the other into a file, and print its name."""
    import pandas as pd

    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, pd.concat(tables).to_csv(index=False))
    print(out)


def _compare_two(first_folder: str, second_folder: str, *, transfers: bool) -> pd.DataFrame:
    """Print the comparison of two measurements, and return its table. With `transfers`, each was
    measured with the other's choices."""
    from olmo_sparsity.analysis.results.comparison_text import (
        compare_with_remarks,
        describe_comparison,
    )
    from olmo_sparsity.analysis.results.stored_results import read_results

    first = read_results(first_folder)
    second = read_results(second_folder)
    table = compare_with_remarks(first, second, transfers)
    print(describe_comparison(first, second, table, transfers))
    return table


# --- all pairs of an experiment -------------------------------------------------------------------


def _compare_experiment(folder: str, *, transfers: bool) -> list[pd.DataFrame]:
    """Print each comparison of an experiment whose measurements are finished, and after several
    seeds what they agree on. Return the table of each pair. `transfers`: whether --transfer was
    given, which has no meaning here."""
    from olmo_sparsity.experiment.agreement_of_seeds import describe_agreement
    from olmo_sparsity.experiment.comparisons import comparisons_of
    from olmo_sparsity.experiment.file import saved_experiment

    experiment = saved_experiment(folder)
    if experiment is None:
        raise ConfigError(
            f"{folder} is not the folder of an experiment; pass two results to compare"
        )
    if transfers:
        raise ConfigError(
            f"--transfer with the experiment {folder}: pass two folders of {folder}/measured that "
            "end in -transfer"
        )

    # Before anything is printed, as it raises an error for models that cannot be paired.
    comparisons = comparisons_of(experiment)
    _print_savings_of_longer_windows(experiment)
    tables: list[pd.DataFrame] = []
    for comparison in comparisons:
        tables_of_seeds = _print_pairs(experiment, comparison)
        has_several_seeds = len(comparison.pairs) > 1
        if has_several_seeds and tables_of_seeds:
            print("\n".join(describe_agreement(comparison, tables_of_seeds)) + "\n")
        tables += tables_of_seeds
    if not tables:
        raise DataError(f"{folder}: no two measurements that `compare` pairs are finished")
    return tables


def _print_pairs(experiment: Experiment, comparison: Comparison) -> list[pd.DataFrame]:
    """Print the pairs of a comparison, one for each seed. Return the tables of those that are
    finished, with the folders of both measurements as columns."""
    from olmo_sparsity.analysis.results.comparison_text import (
        compare_with_remarks,
        describe_comparison,
    )
    from olmo_sparsity.analysis.results.stored_results import read_results

    tables = []
    for pair in comparison.pairs:
        title = comparison.title_of(experiment, pair)
        try:
            first = read_results(pair.first.folder)
            second = read_results(pair.second.folder)
        except DataError as error:
            # The pairs that are finished are of use while others are still measured.
            say(f"{title}: not compared: {error}")
            continue
        table = compare_with_remarks(first, second, transfers=False)
        summary = describe_comparison(first, second, table, transfers=False, names=title)
        print(f"{summary}\n")
        folders = {"first": str(pair.first.folder), "second": str(pair.second.folder)}
        tables.append(table.assign(**folders))
    return tables


# --- what longer windows save ---------------------------------------------------------------------


def _print_savings_of_longer_windows(experiment: Experiment) -> None:
    """Print for each longer long window how much lower it makes the loss of each model than the
    shortest one, and the differences between schemes. Print nothing if the experiment has one
    window, or too little is finished."""
    from olmo_sparsity.experiment.comparisons import longer_windows_of

    for window in longer_windows_of(experiment):
        formula = f"L_{window.shortest} - L_{window.long}"
        lines = _describe_savings(experiment, window, formula)
        if lines:
            print(
                f"{formula}: what the text beyond {window.shortest} tokens saves, nats a token "
                "(all at the same tokens)"
            )
            print("\n".join(lines) + "\n")


def _describe_savings(experiment: Experiment, window: LongerWindow, formula: str) -> list[str]:
    """Return a line for each model whose measurements are finished, then one for each pair of
    them. `formula`: such as L_960 - L_4032, for messages about the others."""
    from olmo_sparsity.analysis.results.compare import WindowPair
    from olmo_sparsity.analysis.results.stored_results import read_results
    from olmo_sparsity.experiment.comparisons import name_of_model

    finished: dict[str, WindowPair] = {}
    lines = []
    for name, measured in window.windows.items():
        try:
            longer = read_results(measured.longer.folder)
            finished[name] = WindowPair(longer, read_results(measured.shortest.folder))
        except DataError as error:
            say(f"{name}, {formula}: not compared: {error}")
            continue
        name_and_label = name_of_model(experiment, measured.longer)
        lines.append(f"  {name_and_label}: {_describe_saving(finished[name])}")

    for first, second in window.pairs:
        if first.name in finished and second.name in finished:
            saving = _describe_saving(finished[first.name], subtracted=finished[second.name])
            lines.append(f"  {first.name} minus {second.name}: {saving}")
    return lines


def _describe_saving(windows: WindowPair, subtracted: WindowPair | None = None) -> str:
    """Return what a longer window saves a model, and how much more that is than with unrelated
    text. With `subtracted`, return the differences from another model."""
    from olmo_sparsity.analysis.results.compare import difference_of_loss_saved, loss_saved
    from olmo_sparsity.analysis.results.view import with_interval

    shown: dict[SavingColumn, str] = {}
    columns: tuple[SavingColumn, ...] = ("saved", "more_than_unrelated")
    for column in columns:
        if subtracted is None:
            interval = loss_saved(windows, column)
        else:
            interval = difference_of_loss_saved(windows, subtracted, column)
        shown[column] = with_interval(*interval, digits=3)
    return f"{shown['saved']}; more than unrelated text: {shown['more_than_unrelated']}"
