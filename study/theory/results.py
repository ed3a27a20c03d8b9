"""Read, write and summarize the table of a theory experiment.

Place in the flow: experiment.py → table.parquet + meta.json → figure.py. Never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.io import write_atomically
from study.tables_of_rows import markdown, read_rows, write_rows
from study.theory import bounds

TABLE = "table.parquet"


@dataclass
class Case:
    """Identifies a line of the figure."""

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


CASE = tuple(item.name for item in fields(Case))


@dataclass
class Row(Case):
    """One hypothesis measured at one length."""

    seed: int
    length: int
    risk: float
    low: float
    high: float
    """95% interval of the measurement; equal to risk for an exact method."""

    method: str
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


def write_results(folder: str | Path, rows: list[Row], meta: dict[str, Any]) -> None:
    write_rows(Path(folder) / TABLE, rows, meta)


def read_results(folder: str | Path) -> tuple[list[Row], dict[str, Any]]:
    return read_rows(Path(folder) / TABLE, Row, f"olmo-sparsity theory CONFIG --output={folder}")


# --- over seeds -----------------------------------------------------------------------------------

# Student's t, 97.5%, for 1, 2, … degrees of freedom; beyond the list the normal 1.96 is within 12%.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


@dataclass
class Summary(Case):
    """A case at one length: mean over seeds with its 95% interval (Student's t over seeds). Of a
    worst_case: the starting point with the fastest growing risk."""

    length: int
    num_seeds: int
    risk: float
    risk_low: float
    risk_high: float
    method: str
    delta_mean: float
    delta_worst: float
    local_span: int
    eta_train: float
    eta_test: float
    bound_stated: float
    bound_improved: float
    refusal: str


def half_width(values_N: np.ndarray) -> float:
    """An end of the 95% interval of their mean."""
    freedom = len(values_N) - 1
    factor = _T[freedom - 1] if freedom <= len(_T) else 1.96
    return float(factor * values_N.std(ddof=1) / math.sqrt(len(values_N)))


def summarise(rows: list[Row]) -> list[Summary]:
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((*_case_of(row), row.length), []).append(row)
    return [_summarise(group) for group in groups.values()]


def _case_of(item: Case) -> tuple:
    return tuple(getattr(item, name) for name in CASE)


def _summarise(group: list[Row]) -> Summary:
    if group[0].model == "worst_case":
        group = [max(group, key=lambda row: row.risk / row.delta_worst)]
    first = group[0]
    risks = np.array([row.risk for row in group])
    if len(group) > 1:
        half = half_width(risks)
        low, high = risks.mean() - half, risks.mean() + half
    else:  # With one seed, only its measurement interval is known.
        low, high = first.low, first.high
    values: dict[str, Any] = {
        item.name: getattr(first, item.name, None) for item in fields(Summary)
    }
    for name in ("risk", "delta_mean", "delta_worst", "bound_stated", "bound_improved"):
        values[name] = float(np.mean([getattr(row, name) for row in group]))
    values |= {"risk_low": max(0.0, float(low)), "risk_high": min(1.0, float(high))}
    return Summary(**values | {"num_seeds": len(group)})


def write_summary(path: str | Path, rows: list[Row]) -> None:
    table = pd.DataFrame(summarise(rows))
    text = table.to_csv(index=False, na_rep="nan", float_format="%.9g", lineterminator="\n")
    write_atomically(Path(path), text)


# --- the table as text ----------------------------------------------------------------------------

_NAMES = {"attention": "", "rope": "transformer, RoPE: ", "pose": "transformer, RoPE + PoSE: "}


def markdown_tables(summaries: list[Summary], meta: dict[str, Any]) -> str:
    """One row per case: risks at the tested lengths, growth to the longest, δ and both bounds;
    then the fastest growth found, and the steps from one bound to the other. For docs/tasks.md."""
    L = meta["train_length"]
    multiples = meta["test_multiples"]
    heads = ["setting", "k", "attention", "L", "objective"]
    heads += [f"risk at {'' if m == 1 else m}L" for m in multiples]
    heads += ["growth", "mean δ", "worst δ"]
    heads += [f"stated at {multiples[-1]}L", f"improved at {multiples[-1]}L"]
    lines = [heads]
    cases: dict[tuple, dict[int, Summary]] = {}
    for summary in summaries:
        cases.setdefault(_case_of(summary), {})[summary.length] = summary
    for at in cases.values():
        first = next(iter(at.values()))
        if first.model not in _NAMES:
            continue
        lengths = [first.train_length * multiple for multiple in multiples]
        last = at[lengths[-1]]
        lines.append(
            [
                _NAMES[last.model] + last.setting.replace("_", " "),
                str(last.num_places),
                f"over {last.attention_places}" if last.attention_places else "–",
                str(last.train_length),
                last.objective,
                *(_short(at[n].risk) for n in lengths),
                f"{last.risk / last.delta_worst:.2f}",
                _short(last.delta_mean),
                _short(last.delta_worst),
                _short(last.bound_stated),
                _short(last.bound_improved),
            ]
        )
    text = markdown(lines) + "\n"
    worst = [s for s in summaries if s.model == "worst_case"]
    if worst:
        lines = [["L̄/L", "fastest growth found", "(L̄/L)²"]]
        for s in worst:
            ratio = s.length / s.train_length
            lines.append([f"{ratio:g}", f"{s.risk / s.delta_worst:.1f}", f"{ratio**2:g}"])
        text += f"\n{markdown(lines)}\n"
    # The case of the first figure that takes its bound apart.
    explained = ("attention", "local", 2, "mixture", L, L * multiples[-1])
    for s in summaries:
        case = (s.model, s.setting, s.num_places, s.objective, s.train_length, s.length)
        if case != explained or s.refusal:
            continue
        at_lengths = bounds.Lengths(L, s.length, s.local_span)
        risks = s.delta_mean, s.delta_worst
        steps = bounds.steps_between(at_lengths, *risks, s.eta_train, s.eta_test)
        lines = [[f"the bound at {s.length}, local, k = 2", "value"]]
        lines += [[name, _short(value)] for name, value in steps.items()]
        text += f"\n{markdown(lines)}\n"
    return text


def _short(value: float) -> str:
    if math.isnan(value):
        return "refused"
    return f"{value:.4f}" if value < 1 else f"{value:.3g}"
