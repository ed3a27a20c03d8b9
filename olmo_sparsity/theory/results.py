"""The one table of the theory laboratory: columns, reading, writing, summary over seeds.

Place in the flow: experiment.py → table.parquet + meta.json → figure.py. Never imports torch.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from olmo_sparsity.errors import DataError
from olmo_sparsity.files import remove_partial, write_atomically, writing
from olmo_sparsity.json_files import read_json
from olmo_sparsity.manifest import read_vouched, write_manifest
from olmo_sparsity.theory import bounds


@dataclass
class Row:
    """One hypothesis measured at one length."""

    model: str
    """attention: the class of Definition 3.3; rope, pose: the transformer of the bridge."""

    setting: str
    num_places: int
    """k of the data,"""

    attention_places: int
    """and of the attention class (0: a transformer)."""

    train_length: int
    """L."""

    objective: str
    marker_rate: float
    seed: int
    length: int
    risk: float
    low: float
    high: float
    """95% interval of the measurement alone; equal to risk where the method is exact."""

    method: str
    delta_mean: float
    """δ of Eq. (3): this hypothesis' risk averaged over the training lengths,"""

    delta_worst: float
    """and the largest of them."""

    local_span: int
    """L_local of data and class together, in tokens."""

    eta_train: float
    eta_test: float
    bound_stated: float
    """NaN where the bound does not apply; why is in `refusal`."""

    bound_improved: float
    refusal: str


_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}
SCHEMA = pa.schema([(name, _TYPES[kind]) for name, kind in Row.__annotations__.items()])

CASE = (
    "model",
    "setting",
    "num_places",
    "attention_places",
    "train_length",
    "objective",
    "marker_rate",
)
"""The columns that name a line of the figure."""


def write_results(folder: str | Path, rows: list[Row], meta: dict[str, Any]) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    remove_partial(folder)
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA)
    with writing(folder / "table.parquet") as partial:
        pq.write_table(table, partial)
    write_atomically(folder / "meta.json", json.dumps(meta, indent=2, ensure_ascii=False) + "\n")
    write_manifest(folder, ("table.parquet", "meta.json"))


def read_results(folder: str | Path) -> tuple[list[Row], dict[str, Any]]:
    folder = Path(folder)
    for name in ("table.parquet", "meta.json"):
        if not (folder / name).is_file():
            raise DataError(
                f"'{folder}' has no {name}; make it with `olmo-sparsity theory CONFIG "
                f"--output={folder}`"
            )
    table = read_vouched(folder, "table.parquet", "make it again")
    if table.schema.names != SCHEMA.names:
        strange = sorted(set(table.schema.names) ^ set(SCHEMA.names))
        raise DataError(
            f"{folder / 'table.parquet'}: columns {strange} are missing or unknown; it was written "
            "by another version, make it again"
        )
    return [Row(**row) for row in table.to_pylist()], read_json(
        folder / "meta.json", dict, "make it again"
    )


# --- over seeds -----------------------------------------------------------------------------------

# Student's t, 97.5%, for 1, 2, … degrees of freedom; beyond the list the normal 1.96 is within 12%.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


@dataclass
class Summary:
    """A case at one length: mean over seeds with its 95% interval (Student's t over seeds)."""

    model: str
    setting: str
    num_places: int
    attention_places: int
    train_length: int
    objective: str
    marker_rate: float
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


def summarise(rows: list[Row]) -> list[Summary]:
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((*(getattr(row, name) for name in CASE), row.length), []).append(row)
    return [_summarise(group) for group in groups.values()]


def _summarise(group: list[Row]) -> Summary:
    first = group[0]
    risks = np.array([row.risk for row in group])
    if len(group) > 1:
        factor = _T[len(group) - 2] if len(group) - 2 < len(_T) else 1.96
        half = factor * risks.std(ddof=1) / math.sqrt(len(group))
        low, high = risks.mean() - half, risks.mean() + half
    else:  # One seed: only the interval of its own measurement is known.
        low, high = first.low, first.high

    def mean(name: str) -> float:
        return float(np.mean([getattr(row, name) for row in group]))

    return Summary(
        **{name: getattr(first, name) for name in CASE},
        length=first.length,
        num_seeds=len(group),
        risk=float(risks.mean()),
        risk_low=max(0.0, float(low)),
        risk_high=min(1.0, float(high)),
        method=first.method,
        delta_mean=mean("delta_mean"),
        delta_worst=mean("delta_worst"),
        local_span=first.local_span,
        eta_train=first.eta_train,
        eta_test=first.eta_test,
        bound_stated=mean("bound_stated"),
        bound_improved=mean("bound_improved"),
        refusal=first.refusal,
    )


def write_summary(path: str | Path, rows: list[Row]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(Summary.__annotations__), lineterminator="\n")
        writer.writeheader()
        for summary in summarise(rows):
            values = asdict(summary)
            writer.writerow(
                {name: f"{v:.9g}" if isinstance(v, float) else v for name, v in values.items()}
            )


def read_summary(path: str | Path) -> list[Summary]:
    kinds = {"str": str, "int": int, "float": float}
    with open(path, newline="", encoding="utf-8") as file:
        return [
            Summary(
                **{name: kinds[Summary.__annotations__[name]](text) for name, text in line.items()}
            )
            for line in csv.DictReader(file)
        ]


# --- for people -----------------------------------------------------------------------------------

_NAMES = {"attention": "", "rope": "transformer, RoPE: ", "pose": "transformer, RoPE + PoSE: "}


def markdown_tables(summaries: list[Summary], meta: dict[str, Any]) -> str:
    """One row per case: risks at the tested lengths, growth to the longest, δ and both bounds;
    then the fastest growth found, and the way from one bound to the other. For docs/theory.md."""
    L = meta["train_length"]
    multiples = meta["test_multiples"]
    heads = ["setting", "k", "attention", "L", "objective"]
    heads += [f"risk at {'' if m == 1 else m}L" for m in multiples]
    heads += ["growth", "mean δ", "worst δ"]
    heads += [f"stated at {multiples[-1]}L", f"improved at {multiples[-1]}L"]
    lines = [heads, ["---"] * len(heads)]
    cases: dict[tuple, dict[int, Summary]] = {}
    for summary in summaries:
        case = tuple(getattr(summary, name) for name in CASE)
        cases.setdefault(case, {})[summary.length] = summary
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
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    worst = [s for s in summaries if s.model == "worst_case"]
    if worst:
        text += "\n| L̄/L | fastest growth found | (L̄/L)² |\n| --- | --- | --- |\n"
        for s in worst:
            ratio = s.length / s.train_length
            text += f"| {ratio:g} | {s.risk / s.delta_worst:.1f} | {ratio**2:g} |\n"
    explained = [
        s
        for at in cases.values()
        for length, s in at.items()
        if length == L * multiples[-1] and s.setting == "local" and s.objective == "mixture"
        if s.model == "attention" and s.num_places == 2 and s.train_length == L
    ]
    for s in explained:
        at_lengths = bounds.Lengths(L, s.length, s.local_span)
        steps = bounds.steps_between(
            at_lengths, s.delta_mean, s.delta_worst, s.eta_train, s.eta_test
        )
        text += f"\n| the bound at {s.length}, local, k = 2 | value |\n| --- | --- |\n"
        text += "".join(f"| {name} | {_short(value)} |\n" for name, value in steps.items())
    return text


def _short(value: float) -> str:
    if math.isnan(value):
        return "refused"
    return f"{value:.4f}" if value < 1 else f"{value:.3g}"
