"""Draw accuracy against length, one curve per scheme. Never imports torch.

Place in the flow: accuracy.parquet → **figure**.

Without k: a panel of exact match, and one of tokens and position IDs separately. With k: a panel
for each k of training (rows) and of test (columns). The lengths of training are shaded. A band
spans the lowest to the highest seed; with one seed it is Wilson's interval. Several results (an
experiment and its ablations, say) share the panels and differ in colour.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from olmo_sparsity import drawing
from olmo_sparsity.errors import ConfigError
from study.command import enter, run_command
from study.tasks.results import Row, read_results

_STYLES = {
    "rope": (drawing.RED, "s", "RoPE"),
    "nope": (drawing.GREY, "x", "NoPE"),
    "alibi": (drawing.ORANGE, "P", "ALiBi"),
    "pose": (drawing.BLUE, "o", "RoPE + PoSE"),
    "randomized": (drawing.SKY, "D", "randomized IDs"),
    "coupled": (drawing.PINK, "v", "coupled IDs, given"),
    "ppc": (drawing.GREEN, "^", "coupled IDs, predicted (PPC)"),
    "auxiliary": (drawing.BLACK, "<", "… predicted, not fed"),
    "pointers": (drawing.GREY, ">", "… as tokens"),
}
# Several results: a colour of the palette each, and a line for every scheme.
_LINES = dict(zip(_STYLES, ("--", ":", "-.", "-", ":", "--", "-", "-.", ":"), strict=True))
_MANY = 3
"""With so many results, bands would hide each other and are left out."""

_UNITS = {
    "sparse_parity": "tokens",
    "needle": "tokens",
    "scratchpad_parity": "bits",
    "variable_assignment": "statements",
    "addition": "digits",
}
"""What the length of a task counts."""

Result = tuple[list[Row], dict[str, Any]]


def draw(folders: list[Path], out: Path, labels: list[str] | None = None) -> None:
    """`labels`: names of several results."""
    results = [read_results(folder) for folder in folders]
    several = [folder.name for folder in folders] if len(folders) > 1 else [""]
    names = drawing.one_label_each(labels, several)
    tasks = {row.task for rows, _ in results for row in rows}
    if len(tasks) != 1:
        raise ConfigError(
            f"the results are of several tasks ({', '.join(sorted(tasks))}); draw one at a time"
        )
    if len(results) > len(drawing.PALETTE):
        most = len(drawing.PALETTE)
        raise ConfigError(
            f"{len(results)} results are too many for one figure; draw at most {most}"
        )
    larger = {"font.size": 8, "axes.titlesize": 8}
    drawing.save(lambda: _figure(results, names), out, **larger)


def _figure(results: list[Result], labels: list[str]) -> Figure:
    rows = [row for result, _ in results for row in result]
    train_ks = sorted({row.train_k for row in rows}, key=lambda k: k or 0)
    test_ks = sorted({row.test_k for row in rows}, key=lambda k: k or 0)
    by_k = test_ks != [None]
    # A response of one token needs no second panel.
    apart = not by_k and any(row.token_accuracy != row.exact_match for row in rows)
    shape = (len(train_ks), len(test_ks)) if by_k else (1, 2 if apart else 1)
    size = (2.0 * shape[1] + 0.8, 1.9 * shape[0] + 1.1) if by_k else (3.9 * shape[1], 3.6)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(*shape, squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat:
        first, last = results[0][1]["settings"]["train_lengths"]
        axis.axvspan(first, last, color="0.92", zorder=0, linewidth=0)
        axis.set_ylim(-0.03, 1.03)
    for axis in axes[-1]:
        unit = _UNITS.get(rows[0].task)
        axis.set_xlabel(f"length, {unit}" if unit else "length")
    if by_k:
        for line, train_k in zip(axes, train_ks, strict=True):
            line[0].set_ylabel("exact match" + (f", trained on k ≤ {train_k}" if train_k else ""))
            for axis, test_k in zip(line, test_ks, strict=True):
                unseen = train_k is not None and test_k is not None and test_k > train_k
                axis.set_title(f"k = {test_k}" + (" (unseen)" if unseen else ""))
                _curves(axis, results, labels, train_k, test_k)
    else:
        axes[0, 0].set_ylabel("share that is right")
        axes[0, 0].set_title("whole responses, free-running")
        _curves(axes[0, 0], results, labels)
    if apart:
        axis = axes[0, 1]
        axis.set_title("tokens; IDs dashed, teacher-forced tokens dotted")
        for value, style in (
            ("token_accuracy", "-"),
            ("id_accuracy", "--"),
            ("teacher_forced", ":"),
        ):
            _curves(axis, results, [""] * len(results), value=value, style=style)
    if rows[0].task == "sparse_parity":
        for axis in axes.flat:
            axis.axhline(0.5, color="0.6", linewidth=0.7, linestyle=":", zorder=0)
        axes[0, 0].text(last, 0.49, " chance", fontsize=7, va="top", color="0.4")
    handles, names = axes[0, 0].get_legend_handles_labels()
    longest = max(map(len, names), default=1)
    ncols = max(1, min(len(names), int(size[0] * 17 / (longest + 8))))
    figure.legend(handles, names, loc="outside lower center", ncols=ncols, frameon=False)
    seeds = sorted({row.seed for row in rows})
    samples = " or ".join(f"{num:,}" for num in sorted({row.num_samples for row in rows}))
    band = " (band: lowest to highest)" if len(seeds) > 1 else " (band: Wilson 95%)"
    if len(results) >= _MANY:
        band = ""
    figure.suptitle(
        f"{rows[0].task.replace('_', ' ')}: mean over seeds {', '.join(map(str, seeds))}{band}\n"
        f"{samples} samples a seed and length; training lengths shaded",
        fontsize=8,
    )
    return figure


def _curves(
    axis: Axes,
    results: list[Result],
    labels: list[str],
    train_k: int | None = None,
    test_k: int | None = None,
    value: str = "exact_match",
    style: str | None = None,
) -> None:
    for index, ((rows, _), label) in enumerate(zip(results, labels, strict=True)):
        for scheme, (color, marker, name) in _STYLES.items():
            chosen = [
                row
                for row in rows
                if (row.scheme, row.train_k, row.test_k) == (scheme, train_k, test_k)
            ]
            if not chosen or getattr(chosen[0], value) is None:
                continue
            lengths = sorted({row.length for row in chosen})
            at = [[row for row in chosen if row.length == length] for length in lengths]
            means = [np.mean([getattr(row, value) for row in group]) for group in at]
            line = "-" if len(results) == 1 else _LINES[scheme]
            color = color if len(results) == 1 else drawing.PALETTE[index]
            axis.plot(
                lengths,
                means,
                style or line,
                color=color,
                marker=marker,
                markersize=3,
                label=f"{label}{', ' if label else ''}{name}",
            )
            if len(results) >= _MANY:
                continue
            low, high = zip(*(_ends(group, value) for group in at), strict=True)
            drawing.band(axis, lengths, low, high, color)


def _ends(group: list[Row], value: str) -> tuple[float, float]:
    values = [getattr(row, value) for row in group]
    if len(group) == 1 and values[0] == group[0].exact_match:
        return group[0].low, group[0].high
    return min(values), max(values)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m study.tasks.figure", description=__doc__)
    parser.add_argument("results", metavar="RESULTS", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path, help="a .png, .pdf or .svg file")
    parser.add_argument("--labels", type=lambda text: text.split(","), help="NAME,NAME…")
    return run_command(parser, lambda given, _: draw(given.results, given.out, given.labels), words)


if __name__ == "__main__":
    enter(main)
