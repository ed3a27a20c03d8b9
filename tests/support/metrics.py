"""Rows of a run's metrics without what differs whenever a run is repeated."""

from __future__ import annotations

from pathlib import Path

from olmo_sparsity.training.metrics.read import read_metrics

WAITS = ("data_wait_s", "save_s", "evaluation_s")
"""Seconds that training waits, every `logging.interval_steps` steps."""

MEASURED = {"timestamp", "tokens_per_s", "peak_memory_gib", *WAITS}
"""Keys whose values depend on the machine and the time."""


def repeatable_rows(run_folder: str | Path) -> list[dict]:
    """Return the rows of a run without measured values. A run that is repeated or resumed has the
    same ones."""
    return [
        {name: value for name, value in row.items() if name not in MEASURED}
        for row in read_metrics(Path(run_folder) / "metrics.jsonl")
    ]
