"""Compare checkpoints by their mean loss at each range of places, on the same documents.

`scoring/losses_by_place.py` sums the losses of each document; `LossesByPlace` holds these sums, and
computes means, intervals and paired differences; `report/losses_page.py` draws them. Two documents
of which 1,024 tokens were read have these rows in one range of places:

    model      step  document  first   end  total  count
    runs/pose  2000         0    512  1024   1536    512      a mean of 3.0 nats
    runs/pose  2000         1    512  1024   1792    512      a mean of 3.5 nats

Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import pandas as pd

from olmo_sparsity.analysis.results.student_t import t_interval
from olmo_sparsity.analysis.results.view import format_interval
from olmo_sparsity.base.errors import DataError

NO_STEP = 0
"""The step of a model that is not of a run, as the column `step` stores it."""


class Checkpoint(NamedTuple):
    """A model whose losses were read. It equals the plain tuple of its name and step."""

    model: str
    """The name of the model or run."""

    step: int = NO_STEP


class PlaceRange(NamedTuple):
    """Places of tokens in a document, by which losses are averaged."""

    first: int
    end: int
    """One past the last place."""


COLUMNS = ["model", "step", "document", "first", "end", "total", "count"]
"""The columns of `LossesByPlace.rows`."""

PLACES = ["first", "end"]
"""The columns of a range of places: the first, and one past the last."""


@dataclass(frozen=True)
class LossesByPlace:
    """The losses of one or several checkpoints on the same documents, by place.

    losses = losses_by_place(["runs/pose", "runs/rope"])
    losses.table                              # mean losses of all checkpoints
    losses.compare(*losses.pairs()[0])        # the second model less the first
    print(losses.describe())
    """

    rows: pd.DataFrame
    """A row for each `model`, `step`, `document` and range of places (`first` to `end` − 1), with
    the `total` loss of its `count` tokens, in nats."""

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
        # `drop_duplicates` keeps the order of the rows.
        pairs = self.rows[["model", "step"]].drop_duplicates()
        return [Checkpoint(*pair) for pair in pairs.itertuples(index=False, name=None)]

    @property
    def models(self) -> list[str]:
        """Return the names of the models, in the order in which they were measured."""
        return list(dict.fromkeys(model for model, _ in self.checkpoints))

    @property
    def num_documents(self) -> int:
        """Return how many documents all checkpoints have read."""
        return int(self.rows.document.nunique())

    @property
    def length(self) -> int:
        """Return how many tokens are read of each document."""
        return int(self.rows.end.max())

    @cached_property
    def table(self) -> pd.DataFrame:
        """Return a row for each checkpoint and range of places, the farthest first. It has the mean
        loss, the ends of its 95% interval over documents (Student's t), and the numbers of
        documents and tokens."""
        rows = []
        for checkpoint in self.checkpoints:
            means = self._means(checkpoint)
            num_tokens = self._rows_of(checkpoint).groupby(PLACES)["count"].sum()
            for places in self.places:
                loss, low, high = t_interval(means[places].to_numpy())
                rows.append(
                    {
                        **checkpoint._asdict(),
                        **places._asdict(),
                        "documents": len(means),
                        "tokens": int(num_tokens[places]),
                        "loss": loss,
                        "low": low,
                        "high": high,
                    }
                )
        names = ["model", "step", *PLACES, "documents", "tokens", "loss", "low", "high"]
        return pd.DataFrame(rows, columns=names)

    @property
    def places(self) -> list[PlaceRange]:
        """Return the ranges of places, the farthest first."""
        pairs = self.rows[PLACES].drop_duplicates().sort_values("first", ascending=False)
        return [PlaceRange(*pair) for pair in pairs.itertuples(index=False, name=None)]

    def compare(self, first: Checkpoint, second: Checkpoint) -> pd.DataFrame:
        """Return the first checkpoint's mean losses minus the second's, the farthest places first.
        Intervals are 95% of Student's t over the differences of documents. Below 0 the first
        checkpoint is better."""
        # Document by document, as both have read the same tokens.
        differences = self._means(Checkpoint(*first)) - self._means(Checkpoint(*second))
        rows = []
        for places in self.places:
            difference, low, high = t_interval(differences[places].to_numpy())
            rows.append(
                {
                    **places._asdict(),
                    "documents": len(differences),
                    "difference": difference,
                    "low": low,
                    "high": high,
                }
            )
        return pd.DataFrame(rows, columns=[*PLACES, "documents", "difference", "low", "high"])

    def pairs(self) -> list[tuple[Checkpoint, Checkpoint]]:
        """Return the checkpoints to compare: for each model but the first, its checkpoint and that
        of the first model. Both are of the last step that both models have, or, if they share no
        step, the last one of each."""
        if not self.models:
            return []
        base_model, *other_models = self.models
        steps_of_model: dict[str, set[int]] = {model: set() for model in self.models}
        for model, step in self.checkpoints:
            steps_of_model[model].add(step)
        pairs = []
        for other_model in other_models:
            base_steps = steps_of_model[base_model]
            other_steps = steps_of_model[other_model]
            # At one step, a difference is not one of how long the models were trained.
            shared_steps = base_steps & other_steps
            other_step = max(shared_steps or other_steps)
            base_step = max(shared_steps or base_steps)
            pairs.append((Checkpoint(other_model, other_step), Checkpoint(base_model, base_step)))
        return pairs

    def describe(self) -> str:
        """Return the tables as text for a terminal."""
        title = (
            f"mean loss by place, in nats a token, on the first {self.length:,} tokens of "
            f"{self.num_documents} documents of {self.name}; [95% interval over documents]"
        )
        all_losses = {
            "model": self.table.model,
            "step": [f"{step:,}" for step in self.table.step],
            **_places_and_documents(self.table),
            "tokens": [f"{count:,}" for count in self.table.tokens],
            "loss [95%]": _values_with_intervals(self.table, "loss"),
        }
        lines = [title, _text_table(all_losses)]
        for first, second in self.pairs():
            compared = self.compare(first, second)
            lines.append(f"{spell(first)} less {spell(second)}, in pairs: the same tokens of both")
            columns = _places_and_documents(compared)
            columns["difference [95%]"] = _values_with_intervals(compared, "difference")
            lines.append(_text_table(columns))
        return "\n".join(lines)

    def _rows_of(self, checkpoint: Checkpoint) -> pd.DataFrame:
        """Return the rows of a checkpoint. Raise DataError if there are none."""
        model, step = checkpoint
        rows = self.rows[(self.rows.model == model) & (self.rows.step == step)]
        if rows.empty:
            raise DataError(f"{model} has no checkpoint of step {step}")
        return rows

    def _means(self, checkpoint: Checkpoint) -> pd.DataFrame:
        """Return the mean loss of each document (rows) in each range of places (columns)."""
        # Every document has as many tokens in a range, so that the mean of these means over
        # documents is the mean over tokens.
        rows = self._rows_of(checkpoint)
        means = rows.assign(mean=rows.total / rows["count"])
        return means.pivot(index="document", columns=PLACES, values="mean")


def spell(checkpoint: Checkpoint) -> str:
    """Return a readable name of a checkpoint."""
    model, step = checkpoint
    return model if step == NO_STEP else f"{model}, step {step:,}"


def spell_places(first: int, end: int) -> str:
    """Return a range of places as text: the first and the last one."""
    return f"{first:,} … {end - 1:,}"


def _places_and_documents(table: pd.DataFrame) -> dict[str, list]:
    """Return two columns of text: the places of each row, and the number of its documents."""
    places = [spell_places(row.first, row.end) for row in table[PLACES].itertuples()]
    return {"places": places, "documents": [f"{number:,}" for number in table.documents]}


def _values_with_intervals(table: pd.DataFrame, name: str) -> list[str]:
    """Return the values of a column with their intervals, as text."""
    sign = "+" if name == "difference" else ""
    values = table[[name, "low", "high"]].to_numpy(float).tolist()
    return [format_interval(value, low, high, digits=4, sign=sign) for value, low, high in values]


def _text_table(columns: Mapping[str, Iterable]) -> str:
    """Return a table as text, from the cells of each column by its heading."""
    frame = pd.DataFrame({heading: list(cells) for heading, cells in columns.items()})
    return frame.to_string(index=False)
