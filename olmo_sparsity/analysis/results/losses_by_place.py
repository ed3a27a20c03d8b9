"""The mean loss by place of checkpoints on the same documents, with paired intervals.

Place in the flow: sums of each document → **losses by place** → page. Never imports torch."""

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
    """Of the text."""

    def __post_init__(self) -> None:
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
        """Tokens that are read of each document."""
        return int(self.rows.end.max())

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each checkpoint and range of places, the farthest first: the mean loss, its 95%
        interval over documents (Student's t), and how many documents and tokens it is over."""
        found = []
        for model, step in self.checkpoints:
            means, counts = self._means(model, step), self._of(model, step).groupby(PLACES)["count"]
            for places in self.places:
                size = {"documents": len(means), "tokens": int(counts.sum()[places])}
                loss, low, high = t_interval(means[places].to_numpy())
                found.append((model, step, *places, *size.values(), loss, low, high))
        names = ["model", "step", *PLACES, "documents", "tokens", "loss", "low", "high"]
        return pd.DataFrame(found, columns=names)

    @property
    def places(self) -> list[tuple[int, int]]:
        """The ranges, the farthest first."""
        pairs = self.rows[PLACES].drop_duplicates().sort_values("first", ascending=False)
        return list(pairs.itertuples(index=False, name=None))

    def compare(self, first: Checkpoint, second: Checkpoint) -> pd.DataFrame:
        """Return the first checkpoint's mean losses less the second's, the farthest places first,
        with 95% intervals of Student's t over the differences of documents. Below 0 the first
        checkpoint is better."""
        apart = self._means(*first) - self._means(*second)
        found = [
            (*places, len(apart), *t_interval(apart[places].to_numpy())) for places in self.places
        ]
        names = [*PLACES, "documents", "difference", "low", "high"]
        return pd.DataFrame(found, columns=names)

    def pairs(self) -> list[tuple[Checkpoint, Checkpoint]]:
        """Each other model and the first one, both at the last step that both have; without one,
        the last checkpoint of each."""
        if not self.models:
            return []
        base, *others = self.models
        steps = {m: {step for name, step in self.checkpoints if name == m} for m in self.models}
        found = []
        for other in others:
            common = steps[base] & steps[other]
            of_other = max(common or steps[other])
            of_base = max(common or steps[base])
            found.append(((other, of_other), (base, of_base)))
        return found

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

    def _of(self, model: str, step: int) -> pd.DataFrame:
        rows = self.rows[(self.rows.model == model) & (self.rows.step == step)]
        if rows.empty:
            raise DataError(f"{model} has no checkpoint of step {step}")
        return rows

    def _means(self, model: str, step: int) -> pd.DataFrame:
        """A row for each document, a column for each range. Every document has as many tokens in a
        range, so that the mean of means is the mean of tokens."""
        rows = self._of(model, step)
        means = rows.assign(mean=rows.total / rows["count"])
        return means.pivot(index="document", columns=PLACES, values="mean")


def spell(checkpoint: Checkpoint) -> str:
    model, step = checkpoint
    return f"{model}, step {step:,}" if step else model


def spell_places(first: int, end: int) -> str:
    return f"{first:,} … {end - 1:,}"


def _sizes(table: pd.DataFrame) -> dict[str, list]:
    places = [spell_places(row.first, row.end) for row in table[PLACES].itertuples()]
    return {"places": places, "documents": [f"{number:,}" for number in table.documents]}


def _intervals(table: pd.DataFrame, name: str) -> list[str]:
    values = table[[name, "low", "high"]].to_numpy().tolist()
    sign = "+" if name == "difference" else ""
    return [interval(*map(float, row), digits=4, sign=sign) for row in values]


def _text_table(columns: dict) -> str:
    return pd.DataFrame({name: list(values) for name, values in columns.items()}).to_string(
        index=False
    )
