"""Numbers of checkpoints on one fixed text: intervals, paired differences, a verdict.

Place in the flow: sums of each document → **numbers** → page. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.statistics import interval, resample
from olmo_sparsity.base.errors import ConfigError, DataError

COLUMNS = ["document", "number", "total", "count"]
CHECKPOINT = ["run", "step"]

SHARE_OF_EFFECT = 0.1  # the standard error that is wanted, as a share of the number


@dataclass(frozen=True)
class Tracked:
    rows: pd.DataFrame
    """`run`, `step`, `document`, `number`, `total`, `count`: a number is Σ total / Σ count."""

    @cached_property
    def checkpoints(self) -> list[tuple[str, int]]:
        return list(self.rows[CHECKPOINT].drop_duplicates().itertuples(index=False, name=None))

    @property
    def runs(self) -> list[str]:
        return list(dict.fromkeys(run for run, _ in self.checkpoints))

    @property
    def headline(self) -> str:
        """The loss of the farthest places, which tells runs apart best (docs/track.md)."""
        losses = [name for name in self.rows.number.unique() if name.startswith("loss_")]
        return max(losses, key=lambda name: int(name.rpartition("_")[2]))

    @cached_property
    def numbers(self) -> pd.DataFrame:
        """A row for each checkpoint and number: `value`, `low`, `high` (95%), and `documents`: how
        many suffice for a standard error of a tenth of the value."""
        found, num_documents = [], self.rows.groupby("number").document.nunique()
        for checkpoint in self.checkpoints:
            for name, value_R in self._resampled(checkpoint).items():
                value, low, high = interval(value_R[1:], value_R[0])
                error = np.nanstd(value_R[1:]) / SHARE_OF_EFFECT if np.isfinite(value) else np.nan
                needed = (error / (value or np.nan)) ** 2 * num_documents[name]
                found.append((*checkpoint, name, value, low, high, np.ceil(needed)))
        names = [*CHECKPOINT, "number", "value", "low", "high", "documents"]
        return pd.DataFrame(found, columns=names)

    def compare(self, first: tuple[str, int], second: tuple[str, int]) -> pd.DataFrame:
        """Return the first checkpoint's numbers less the second's, with paired intervals: each
        document is resampled for both at once."""
        both = self._resampled(first), self._resampled(second)
        found = []
        for name in both[0]:
            low_is_good = name.startswith("loss")
            apart_R = both[0][name] - both[1][name]
            value, low, high = interval(apart_R[1:], apart_R[0])
            sign = 0 if not (low > 0 or high < 0) else 1 if (low > 0) != low_is_good else -1
            ahead = {1: first[0], -1: second[0], 0: None}[sign]
            found.append((name, value, low, high, ahead))
        return pd.DataFrame(found, columns=["number", "difference", "low", "high", "ahead"])

    def last_common(self, first: str, second: str) -> int:
        """The last step at which both runs have a checkpoint."""
        steps = [{s for run, s in self.checkpoints if run == name} for name in (first, second)]
        if not (common := steps[0] & steps[1]):
            raise ConfigError(f"{first} and {second} have no checkpoint of the same step")
        return max(common)

    def verdict(self, first: str, second: str) -> dict[str, Any]:
        """Say which of two runs is ahead at their last common step, for scripts."""
        step = self.last_common(first, second)
        table = self.compare((first, step), (second, step))
        rows = table.astype(object).where(table.notna(), None).set_index("number")
        head = rows.loc[self.headline].to_dict()
        runs = {"first": first, "second": second, "step": step, "number": self.headline}
        return runs | head | {"numbers": rows.to_dict("index")}

    def _resampled(self, checkpoint: tuple[str, int]) -> dict[str, np.ndarray]:
        """Number → its value, then those of the resamples."""
        run, step = checkpoint
        rows = self.rows[(self.rows.run == run) & (self.rows.step == step)]
        if rows.empty:
            raise DataError(f"{run}: no checkpoint of step {step}")
        documents, found = np.unique(self.rows.document), {}
        for name, group in rows.groupby("number", sort=False):
            sums_D2 = group.set_index("document")[["total", "count"]].reindex(documents)
            total_R, count_R = resample(sums_D2.fillna(0.0).to_numpy()).T
            with np.errstate(divide="ignore", invalid="ignore"):
                found[str(name)] = np.where(count_R > 0, total_R / count_R, np.nan)
        return found
