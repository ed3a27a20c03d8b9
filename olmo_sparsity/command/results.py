"""Run the commands that show finished results: `figure`, `compare` and `report`.

    figure RUN RUN --out=losses.png       losses of runs as they train      `draw_curves`
    figure EXPERIMENT --out=figure.pdf    the figure of an experiment       `draw_folder`
    figure RESULTS RESULTS --out=…        Figure 2 of measurements          `_draw_measurements`
    compare RESULTS RESULTS               two measurements
    compare EXPERIMENT                    the pairs of an experiment        `_compare_experiment`
    report RESULTS --out=page.html        a page, or one for each model

Place in the flow: below cli.py, on top of `analysis/results` and `analysis/report`.
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
    from olmo_sparsity.experiment.file import Experiment


def run_figure(options: argparse.Namespace) -> int:
    """Draw the losses of runs, or Figure 2 of an experiment or of measurements; return the exit
    code."""
    from olmo_sparsity.command.experiment import draw_folder

    labels = options.labels.split(",") if options.labels else None
    if labels is not None and (not all(labels) or len(set(labels)) < len(labels)):
        raise ConfigError(f"--labels={options.labels} must name each model, each otherwise")
    # Runs have a log of their training, measurements have not.
    if all((Path(folder) / "metrics.jsonl").is_file() for folder in options.results):
        from olmo_sparsity.training.curves import draw_curves

        draw_curves(options.results, Path(options.out), labels)
    elif len(options.results) == 1 and draw_folder(options.results[0], options.out):
        if labels is not None:
            raise ConfigError(f"--labels={options.labels}: an experiment's file has its labels")
    else:
        _draw_measurements(options.results, Path(options.out), labels)
    print(options.out)
    return 0


def _draw_measurements(folders: list[str], out: Path, labels: list[str] | None) -> None:
    """Draw Figure 2 of several measurements. One that is not finished is an empty point with its
    reason.

    Args:
        folders: The folders of the measurements.
        out: The file of the figure.
        labels: Names of the models, as the user has passed them. None: the names of the folders.
    """
    from olmo_sparsity.analysis.report.figure_style import Missing
    from olmo_sparsity.analysis.report.figures import draw_figure2
    from olmo_sparsity.analysis.results.stored_results import read_results

    names = [Path(folder).name for folder in folders]
    # With one label for each folder, those of unfinished measurements are left out below.
    has_labels = labels is not None and len(labels) == len(folders)
    if labels is not None and has_labels:
        names = labels
    results = []
    drawn_names: list[str] = []
    missing: list[Missing] = []
    for folder, name in zip(folders, names, strict=True):
        try:
            results.append(read_results(folder))
        except DataError as error:
            if len(folders) == 1 or not (Path(folder) / "identity.json").is_file():
                raise  # nothing else is drawn, or no measurement was begun there
            say(f"{folder} is not drawn: {error}")
            missing.append(Missing(name, str(error)))
            last_error = error
        else:
            drawn_names.append(name)
    if not results:
        raise last_error
    # `draw_figure2` reports a wrong number of labels.
    draw_figure2(results, out, drawn_names if has_labels else labels, missing)


def run_compare(options: argparse.Namespace) -> int:
    """Print the differences of pairs of measurements; return the exit code."""
    from olmo_sparsity.analysis.results.comparison_text import (
        compare_with_remarks,
        describe_comparison,
    )
    from olmo_sparsity.analysis.results.stored_results import read_results

    if options.out is not None:
        check_suffix("--out", options.out, ".csv")
    if options.second is None:
        tables = _compare_experiment(options.first, options.transfer)
    else:
        first = read_results(options.first)
        second = read_results(options.second)
        table = compare_with_remarks(first, second, options.transfer)
        print(describe_comparison(first, second, table, options.transfer))
        tables = [table]
    if options.out is not None:
        import pandas as pd

        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(options.out), pd.concat(tables).to_csv(index=False))
        print(options.out)
    return 0


def _compare_experiment(folder: str, transfers: bool) -> list[pd.DataFrame]:
    """Print each comparison of an experiment whose measurements are finished, and after several
    seeds what they agree on. Return the table of each pair.

    Args:
        folder: The experiment's folder.
        transfers: Whether --transfer was given, which has no meaning here.
    """
    from olmo_sparsity.analysis.results.comparison_text import (
        compare_with_remarks,
        describe_comparison,
    )
    from olmo_sparsity.analysis.results.stored_results import read_results
    from olmo_sparsity.experiment.comparisons import comparisons_of, describe_agreement
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
    comparisons = comparisons_of(experiment)
    _print_savings_of_longer_windows(experiment)
    tables: list[pd.DataFrame] = []
    for comparison in comparisons:
        tables_of_seeds = []
        for pair in comparison.pairs:
            title = comparison.title_of(experiment, pair)
            try:
                first, second = (read_results(measurement.folder) for measurement in pair)
            except DataError as error:
                say(f"{title}: not compared: {error}")
                continue
            table = compare_with_remarks(first, second, transfers=False)
            summary = describe_comparison(first, second, table, transfers=False, names=title)
            print(f"{summary}\n")
            folders = {"first": str(pair.first.folder), "second": str(pair.second.folder)}
            tables_of_seeds.append(table.assign(**folders))
        if len(comparison.pairs) > 1 and tables_of_seeds:
            print("\n".join(describe_agreement(comparison, tables_of_seeds)) + "\n")
        tables += tables_of_seeds
    if not tables:
        raise DataError(f"{folder}: no two measurements that `compare` pairs are finished")
    return tables


def _print_savings_of_longer_windows(experiment: Experiment) -> None:
    """Print for each longer long window how much lower it makes the loss of each model than the
    shortest one, and the differences between schemes. Print nothing if the experiment has one
    window, or too little is finished."""
    from olmo_sparsity.analysis.results.compare import WindowPair
    from olmo_sparsity.analysis.results.stored_results import read_results
    from olmo_sparsity.experiment.comparisons import longer_windows_of, name_of_model

    for window in longer_windows_of(experiment):
        formula = f"L_{window.shortest} - L_{window.long}"
        finished: dict[str, WindowPair] = {}
        lines = []
        for name, measured in window.windows.items():
            try:
                finished[name] = WindowPair(
                    read_results(measured.longer.folder), read_results(measured.shortest.folder)
                )
            except DataError as error:
                say(f"{name}, {formula}: not compared: {error}")
                continue
            name_and_label = name_of_model(experiment, measured.longer)
            lines.append(f"  {name_and_label}: {_describe_saving(finished[name])}")
        for first, second in window.pairs:
            if first.name in finished and second.name in finished:
                pair = (finished[first.name], finished[second.name])
                lines.append(f"  {first.name} minus {second.name}: {_describe_saving(*pair)}")
        if lines:
            print(
                f"{formula}: what the text beyond {window.shortest} tokens saves, nats a token "
                "(all at the same tokens)"
            )
            print("\n".join(lines) + "\n")


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


def run_report(options: argparse.Namespace) -> int:
    """Write a page for each measurement; return the exit code."""
    from olmo_sparsity.analysis.report.report import write_report
    from olmo_sparsity.analysis.results.stored_results import read_results
    from olmo_sparsity.command.experiment import measurements_in

    if options.max_documents is not None and options.max_documents < 1:
        raise ConfigError(f"--max-documents={options.max_documents} must be at least 1")
    check_suffix("--out", options.out, ".html")
    out = Path(options.out)
    # The folder of an experiment, or of one measurement.
    measured = measurements_in(options.results) or {"": options.results}
    for name, folder in measured.items():
        # A page for each model of an experiment that has several.
        page = out if len(measured) == 1 else out.with_stem(f"{out.stem}_{name}")
        write_report(read_results(folder), page, options.max_documents)
        print(page)
    return 0
