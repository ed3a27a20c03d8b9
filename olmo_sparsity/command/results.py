"""Run the commands that draw finished results: `figure` and `report`.

    figure RUN RUN --out=losses.png       losses of runs as they train      `draw_curves`
    figure EXPERIMENT --out=figure.pdf    the figure of an experiment       `draw_if_experiment`
    figure RESULTS RESULTS --out=…        Figure 2 of measurements          `_draw_measurements`
    report RESULTS --out=page.html        a page of a measurement           `write_report`
    report EXPERIMENT --out=page.html     a page for each of its models: page_NAME.html

cli.py calls `run_figure` and `run_report`; the command `compare` is in compare.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.path_options import check_suffix
from olmo_sparsity.base.progress import say


def run_figure(options: argparse.Namespace) -> int:
    """Draw the losses of runs, or Figure 2 of an experiment or of measurements; return the exit
    code."""
    from olmo_sparsity.command.experiment import draw_if_experiment

    labels = _read_labels(options.labels)
    # Runs have a log of their training, measurements have not.
    if all((Path(folder) / "metrics.jsonl").is_file() for folder in options.results):
        from olmo_sparsity.training.metrics.curves import draw_curves

        draw_curves(options.results, Path(options.out), labels)
    elif len(options.results) == 1 and draw_if_experiment(options.results[0], options.out):
        if labels is not None:
            raise ConfigError(f"--labels={options.labels}: an experiment's file has its labels")
    else:
        _draw_measurements(options.results, Path(options.out), labels)
    print(options.out)
    return 0


def _read_labels(text: str | None) -> list[str] | None:
    """Return the labels of --labels; None if the option was not given."""
    if not text:
        return None
    labels = text.split(",")
    if not all(labels) or len(set(labels)) < len(labels):
        raise ConfigError(f"--labels={text} must name each model, each otherwise")
    return labels


def _draw_measurements(folders: list[str], out: Path, labels: list[str] | None) -> None:
    """Draw Figure 2 of several measurements. One that is not finished is an empty point with its
    reason.

    Args:
        folders: The folders of the measurements.
        out: The file of the figure.
        labels: Names of the models, as the user has passed them. None means the names of the
            folders.
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


def run_report(options: argparse.Namespace) -> int:
    """Write a page for each measurement; return the exit code."""
    from olmo_sparsity.analysis.report.report import write_report
    from olmo_sparsity.analysis.results.stored_results import read_results
    from olmo_sparsity.command.experiment import main_measurement_folders

    if options.max_documents is not None and options.max_documents < 1:
        raise ConfigError(f"--max-documents={options.max_documents} must be at least 1")
    check_suffix("--out", options.out, ".html")
    out = Path(options.out)
    # A folder that is no experiment is that of one measurement, whose page needs no name.
    folders = main_measurement_folders(options.results) or {"": options.results}
    for name, folder in folders.items():
        page = out if len(folders) == 1 else out.with_stem(f"{out.stem}_{name}")
        write_report(read_results(folder), page, options.max_documents)
        print(page)
    return 0
