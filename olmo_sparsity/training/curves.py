"""Show the metrics of a run: tables of held-out losses (`olmo-sparsity losses RUN`), and curves
(`olmo-sparsity figure RUN`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.training.metrics import read_metrics, read_own_lines

if TYPE_CHECKING:
    import pandas as pd


def loss_table(run_folder: str | Path) -> str:
    """Return the logged held-out losses of a run as text: the last evaluation in detail, then all
    evaluations. Each row has its numbers of documents and tokens. A note says where rows are of
    different documents, or steps were evaluated on different text, and must not be compared."""
    import pandas as pd

    rows = _evaluations(run_folder)
    last = rows[-1]
    in_detail = pd.DataFrame(
        _sample(part)
        | {
            "loss (nats)": part["loss"],
            "perplexity": math.exp(min(part["loss"], 700)),
            "bits/byte": part.get("bits_per_byte", math.nan),
        }
        for part in last["heldout"]
    )
    lines = [f"{run_folder}, step {last['step']}: held-out loss by position", _text(in_detail)]
    if len({part.get("num_documents") for part in last["heldout"]}) > 1:
        lines.append("rows are of different documents: compare runs within a row, not two rows")
    if "by_place" in last:
        by_place = pd.DataFrame(
            _sample(part) | {"loss (nats)": part["loss"], "standard error": part["standard_error"]}
            for part in last["by_place"]
        )
        lines += ["loss by place in the same documents, the farthest first", _text(by_place)]
    curves = _curves(rows)
    is_other = [_samples(row) != _samples(last) for row in rows]
    if any(is_other):
        curves["sample"] = ["other" if other else "" for other in is_other]
    lines.append("loss by step, and how far it falls when a passage is read twice (induction)")
    lines.append(_text(curves))
    if any(is_other):
        lines.append("steps marked `other` were evaluated on other text than the last one")
    return "\n".join(lines)


def _sample(part: dict) -> dict[str, str]:
    """Return the columns for the range of a loss, and its numbers of documents and tokens. Earlier
    versions counted only tokens."""
    documents = part.get("num_documents")
    return {
        "positions": _name(part),
        "documents": "–" if documents is None else f"{documents:,}",
        "tokens": f"{part['num_tokens']:,}",
    }


def _samples(row: dict) -> list[tuple]:
    """Return ranges and counts of an evaluation, which identify its text: evaluations with equal
    ones can be compared."""
    names = ("from", "to", "num_tokens", "num_documents")
    parts = [*row["heldout"], *row.get("by_place", ())]
    return [tuple(part.get(name) for name in names) for part in parts]


def _text(table: pd.DataFrame) -> str:
    """Return a table as text."""
    return table.to_string(index=False, float_format="{:.4f}".format, na_rep="nan")


def draw_curves(folders: Sequence[str], out: Path, labels: list[str] | None = None) -> None:
    """Draw training losses, held-out losses by position, and the speed of runs. They may still be
    running."""
    import pandas as pd
    from matplotlib.figure import Figure

    from olmo_sparsity.base import drawing

    names = drawing.one_label_each(labels or drawing.labels_of_folders(folders), folders)
    drawing.check_labels_differ(names)
    tables = []
    for folder in folders:
        rows = list(read_metrics(Path(folder) / "metrics.jsonl"))
        if not any("loss" in row for row in rows):
            raise DataError(f"{folder}/metrics.jsonl holds no step yet; draw it later")
        tables.append((pd.DataFrame(rows), _curves([row for row in rows if "heldout" in row])))

    def draw() -> Figure:
        figure = Figure(figsize=(7.5, 2.8), layout="constrained")
        loss_axes, heldout_axes, speed_axes = figure.subplots(1, 3)
        for name, (steps, heldout), color in zip(names, tables, itertools.cycle(drawing.PALETTE)):
            for axes, column in ((loss_axes, "loss"), (speed_axes, "tokens_per_s")):
                rows = steps.reindex(columns=["step", column]).dropna()
                axes.plot(rows.step, rows[column], color=color, label=name)
            ranges = [column for column in heldout if " … " in column]
            for column, line in zip(ranges, itertools.cycle(("-", "--", "-.", ":"))):
                label = f"{name}, {column}"
                heldout_axes.plot(
                    heldout.step, heldout[column], color=color, linestyle=line, label=label
                )
        loss_axes.set_title("training loss")
        heldout_axes.set_title("held-out loss")
        speed_axes.set_title("tokens/s")
        for axes in (loss_axes, heldout_axes, speed_axes):
            axes.set_xlabel("step")
            if axes.lines:  # there may be no evaluation yet
                axes.legend(frameon=False)
        return figure

    drawing.save(draw, out)


def _curves(rows: list[dict]) -> pd.DataFrame:
    """Return a table with a row for each evaluation: losses by position, the loss at the farthest
    places of `evaluation.documents`, and the induction drop."""
    import pandas as pd

    curves = []
    for row in rows:
        numbers = {"step": row["step"]}
        numbers |= {_name(part): part["loss"] for part in row["heldout"]}
        if row.get("by_place"):
            farthest = row["by_place"][0]
            numbers[f"documents {_name(farthest)}"] = farthest["loss"]
        numbers["induction"] = row.get("induction_drop", math.nan)
        curves.append(numbers)
    return pd.DataFrame(curves)


def _name(part: dict) -> str:
    """Return the range of a row in words, with its last position, to which `to` is one more."""
    return f"{part['from']} … {part['to'] - 1}"


def _evaluations(run_folder: str | Path) -> list[dict]:
    """Return the rows of held-out losses, at least one."""
    path = Path(run_folder) / "metrics.jsonl"
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; pass a trained run, or --text to read a model's losses on it"
        )
    rows = [line.row for line in read_own_lines(path) if "heldout" in line.row]
    if not rows:
        raise DataError(f"{path} holds no held-out loss yet; let the run reach an evaluation")
    return rows
