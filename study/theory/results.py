"""Read, write and summarize the table of a theory experiment. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.student_t import quantile
from study.tables_of_rows import markdown, read_rows

TABLE = "table.parquet"
CASE = [
    *("model", "setting", "num_places", "attention_places", "train_length", "objective"),
    "marker_rate",
]
"""Columns that identify a case: a distribution and a hypothesis class."""


@dataclass
class Row:
    """One hypothesis measured at one length."""

    model: str
    """attention: the class of Definition 3.3; rope, pose: the transformer of the bridge."""

    setting: str
    num_places: int
    """k of the data."""

    attention_places: int
    """k of the attention class (0: a transformer)."""

    train_length: int
    """L."""

    objective: str
    marker_rate: float
    seed: int
    length: int
    risk: float
    low: float
    high: float
    """95% interval of the sampling."""

    delta_mean: float
    """δ of Eq. (3): this hypothesis' risk averaged over the training lengths."""

    delta_worst: float
    """The largest risk over the training lengths."""

    local_span: int = 0
    """L_local that data and class both satisfy, in tokens. 0: there is none."""

    eta_train: float = math.nan
    eta_test: float = math.nan
    bound_stated: float = math.nan
    """NaN if the bound does not apply, with the reason in `refusal`."""

    bound_improved: float = math.nan
    refusal: str = ""


def read_results(folder: str | Path) -> tuple[list[Row], dict[str, Any]]:
    return read_rows(Path(folder) / TABLE, Row, f"python -m study.theory CONFIG --output={folder}")


# --- over seeds -----------------------------------------------------------------------------------


def half_width(values_N: np.ndarray) -> float:
    """An end of the 95% interval of their mean, by Student's t."""
    num = len(values_N)
    return float(quantile(0.025, num - 1) * values_N.std(ddof=1) / math.sqrt(num))


def summarise(rows: Sequence[Row]) -> pd.DataFrame:
    """A row for each case and length: the mean over seeds with its 95% interval (Student's t)."""
    groups = pd.DataFrame(rows).groupby([*CASE, "length"], sort=False)
    return pd.DataFrame([_summarise(group) for _, group in groups])


def _summarise(group: pd.DataFrame) -> dict[str, Any]:
    first = group.iloc[0]
    risks = group.risk.to_numpy(dtype=float)
    low, high = first.low, first.high  # with one seed, only its measurement interval is known
    if len(group) > 1:
        low, high = risks.mean() - half_width(risks), risks.mean() + half_width(risks)
    means = ["risk", "delta_mean", "delta_worst", "bound_stated", "bound_improved"]
    about = first.drop(["seed", "low", "high"]).to_dict()
    about |= group[means].astype(float).mean(skipna=False).to_dict()
    return about | {"risk_low": max(0.0, low), "risk_high": min(1.0, high), "seeds": len(group)}


_NAMES = {"attention": "", "rope": "transformer, RoPE: ", "pose": "transformer, RoPE + PoSE: "}


def cases_table(summary: pd.DataFrame, models: Sequence[str]) -> str:
    """Return a line per case: risks at the tested multiples of L, growth to the longest, δ and both
    bounds."""
    chosen = summary[summary.model.isin(models) & (summary.length % summary.train_length == 0)]
    times = sorted(set(chosen.length // chosen.train_length))
    heads = ["setting", "k", "attention", "L", "objective"]
    heads += [f"risk at {'' if m == 1 else m}L" for m in times] + ["growth", "mean δ", "worst δ"]
    lines = [[*heads, f"stated at {times[-1]}L", f"improved at {times[-1]}L"]]
    for _, case in chosen.groupby(CASE, sort=False):
        last = case.iloc[-1]
        line = [_NAMES[last.model] + last.setting.replace("_", " "), str(last.num_places)]
        line += [f"over {last.attention_places}" if last.attention_places else "–"]
        line += [str(last.train_length), last.objective, *map(_short, case.risk)]
        line += [f"{last.risk / last.delta_worst:.2f}", _short(last.delta_mean)]
        bounds_of_it = (last.delta_worst, last.bound_stated, last.bound_improved)
        lines.append([*line, *map(_short, bounds_of_it)])
    return markdown(lines)


def _short(value: float) -> str:
    if math.isnan(value):
        return "refused"
    return f"{value:.4f}" if value < 1 else f"{value:.3g}"
