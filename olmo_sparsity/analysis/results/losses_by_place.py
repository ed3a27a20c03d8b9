"""The mean loss by place of checkpoints on the same documents, with paired intervals.

Place in the flow: sums of each document → **losses by place** → page. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from olmo_sparsity.analysis.results.statistics import t_interval
from olmo_sparsity.analysis.results.view import interval
from olmo_sparsity.base.errors import DataError

Checkpoint = tuple[str, int]
"""The name of a model or run, and the step; 0 of a model that is not of a run."""

COLUMNS = ["model", "step", "document", "first", "end", "total", "count"]
PLACES = ["first", "end"]


@dataclass(frozen=True)
class LossesByPlace:
    rows: pd.DataFrame
    """A row for each `model`, `step`, `document` and range of places (`first` to `end` − 1): the
    `total` loss in nats of `count` tokens."""

    name: str = ""
    """Name of the text that was read."""

    def __post_init__(self) -> None:
        # Differences are over pairs of documents: all checkpoints must have read the same tokens.
        samples = self.rows.groupby(["model", "step"]).apply(
            lambda rows: tuple(rows[["document", *PLACES, "count"]].itertuples(index=False)),
            include_groups=False,
        )
        if samples.nunique() > 1:
            raise DataError(
                "the checkpoints were read on different documents; measure all of them on one text"
            )

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """Return all checkpoints, in the order in which they were measured."""
        pairs = self.rows[["model", "step"]].drop_duplicates()
        return list(pairs.itertuples(index=False, name=None))

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(model for model, _ in self.checkpoints))

    @property
    def num_documents(self) -> int:
        return int(self.rows.document.nunique())

    @property
    def length(self) -> int:
        """Return how many tokens are read of each document."""
        return int(self.rows.end.max())

    @cached_property
    def table(self) -> pd.DataFrame:
        """Return a row for each checkpoint and range of places, the farthest first: the mean loss,
        its 95% interval over documents (Student's t), and how many documents and tokens it is
        over."""
        rows = []
        for model, step in self.checkpoints:
            means = self._means(model, step)
            num_tokens = self._rows_of(model, step).groupby(PLACES)["count"].sum()
            for first, end in self.places:
                loss, low, high = t_interval(means[(first, end)].to_numpy())
                rows.append(
                    {
                        "model": model,
                        "step": step,
                        "first": first,
                        "end": end,
                        "documents": len(means),
                        "tokens": int(num_tokens[(first, end)]),
                        "loss": loss,
                        "low": low,
                        "high": high,
                    }
                )
        names = ["model", "step", *PLACES, "documents", "tokens", "loss", "low", "high"]
        return pd.DataFrame(rows, columns=names)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Return the ranges of places, the farthest first."""
        pairs = self.rows[PLACES].drop_duplicates().sort_values("first", ascending=False)
        return list(pairs.itertuples(index=False, name=None))

    def compare(self, first: Checkpoint, second: Checkpoint) -> pd.DataFrame:
        """Return the first checkpoint's mean losses less the second's, the farthest places first,
        with 95% intervals of Student's t over the differences of documents. Below 0 the first
        checkpoint is better."""
        differences = self._means(*first) - self._means(*second)
        rows = []
        for places in self.places:
            difference, low, high = t_interval(differences[places].to_numpy())
            rows.append((*places, len(differences), difference, low, high))
        return pd.DataFrame(rows, columns=[*PLACES, "documents", "difference", "low", "high"])

    def pairs(self) -> list[tuple[Checkpoint, Checkpoint]]:
        """Return each other model and the first one, both at the last step that both have; without
        one, the last checkpoint of each."""
        if not self.models:
            return []
        base, *others = self.models
        steps: dict[str, set[int]] = {model: set() for model in self.models}
        for model, step in self.checkpoints:
            steps[model].add(step)
        pairs = []
        for other in others:
            common = steps[base] & steps[other]
            other_step = max(common or steps[other])
            base_step = max(common or steps[base])
            pairs.append(((other, other_step), (base, base_step)))
        return pairs

    def describe(self) -> str:
        """Return the tables as text."""
        lines = [
            f"mean loss by place, in nats a token, on the first {self.length:,} tokens of "
            f"{self.num_documents} documents of {self.name}; [95% interval over documents]",
            _text_table(
                {
                    "model": self.table.model,
                    "step": [f"{step:,}" for step in self.table.step],
                    **_sizes(self.table),
                    "tokens": [f"{count:,}" for count in self.table.tokens],
                    "loss [95%]": _intervals(self.table, "loss"),
                }
            ),
        ]
        for first, second in self.pairs():
            compared = self.compare(first, second)
            lines.append(f"{spell(first)} less {spell(second)}, in pairs: the same tokens of both")
            columns = {**_sizes(compared), "difference [95%]": _intervals(compared, "difference")}
            lines.append(_text_table(columns))
        return "\n".join(lines)

    def _rows_of(self, model: str, step: int) -> pd.DataFrame:
        rows = self.rows[(self.rows.model == model) & (self.rows.step == step)]
        if rows.empty:
            raise DataError(f"{model} has no checkpoint of step {step}")
        return rows

    def _means(self, model: str, step: int) -> pd.DataFrame:
        """Return a row for each document, a column for each range. Every document has as many
        tokens in a range, so that the mean of means is the mean of tokens."""
        rows = self._rows_of(model, step)
        means = rows.assign(mean=rows.total / rows["count"])
        return means.pivot(index="document", columns=PLACES, values="mean")


def spell(checkpoint: Checkpoint) -> str:
    """Return a readable name of a checkpoint."""
    model, step = checkpoint
    return f"{model}, step {step:,}" if step else model


def spell_places(first: int, end: int) -> str:
    """Return a range of places with its last one."""
    return f"{first:,} … {end - 1:,}"


def _sizes(table: pd.DataFrame) -> dict[str, list]:
    """Return the columns that say which places a row is of, and over how many documents."""
    places = [spell_places(row.first, row.end) for row in table[PLACES].itertuples()]
    return {"places": places, "documents": [f"{number:,}" for number in table.documents]}


def _intervals(table: pd.DataFrame, name: str) -> list[str]:
    """Return a column with the ends of its interval."""
    sign = "+" if name == "difference" else ""
    values = table[[name, "low", "high"]].to_numpy(float).tolist()
    return [interval(*ends, digits=4, sign=sign) for ends in values]


def _text_table(columns: dict) -> str:
    frame = pd.DataFrame({name: list(values) for name, values in columns.items()})
    return frame.to_string(index=False)
