"""Can the answer of an explanation be had by chance? Unrelated texts are asked the same.

Place in the flow: explanation → **check**.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from analysis.documents import Controls, Document, Documents
from analysis.recovery import DOCUMENT, PLACEBO, recover
from analysis.scoring import Reading, Scorer, context_losses, repetition_drop
from analysis.sources import open_documents
from analysis.statistics import interval, resample_weights
from analysis.targets import MIN_GAP, first_place, largest_gaps
from analysis.view import quoted
from analysis.windows import Spans, Windows
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.model.load import LoadedModel
from olmo_sparsity.progress import Progress

PASSAGE = 128
"""Tokens of the passages that the induction check repeats."""


@dataclass(frozen=True)
class Asked:
    units: str
    selector: str
    k: int
    far_states: Reading
    chosen_by_gap: bool
    """Targets were chosen by their outcome, and not named."""

    seed: int


@dataclass(frozen=True)
class Check:
    """Can the answer be had by chance? Unrelated texts stand in place of the far part, and the same
    selector chooses k units of theirs.

    Of a target: `own` and `foreign` nats that the k units take off its loss (foreign: the mean
    over draws, and the most), and `better`: how many of the draws do at least as well as the own.
    """

    table: pd.DataFrame
    draws: int
    k: int
    excess: tuple[float, float, float]
    """Own less foreign, in nats a target, with its 95% interval over draws: of these targets, which
    are no sample of others."""

    share: float
    """Excess as a share of the gap."""

    placebo: float | None
    """The same of targets that an unrelated text seems to help most. None: targets were named, not
    chosen by their gap."""

    induction: dict[str, Any]
    apart: int
    """How many stretches as long as the text the unrelated text has: fewer than `draws` overlap."""

    tables: dict[str, pd.DataFrame] = field(repr=False)
    """What `recover` found, of own far parts and of unrelated texts."""

    def to_dict(self) -> dict[str, Any]:
        given = asdict(replace(self, tables={})) | {"table": self.table.to_dict("records")}
        return {name: value for name, value in given.items() if name != "tables"}

    @property
    def num_beyond(self) -> int:
        """Targets whose own units lower the loss, and more than those of every unrelated text."""
        return int(((self.table.better == 0) & (self.table.own > 0)).sum())

    @property
    def verdict(self) -> str:
        return (
            f"{self.num_beyond} of {len(self.table)} targets depend on their far units more than "
            "on those of any unrelated text"
        )

    @property
    def summary(self) -> str:
        value, low, high = self.excess
        said = f"excess {value:+.2f} nats a target [{low:+.2f}, {high:+.2f}]"
        if np.isfinite(self.share):
            said += f", {self.share:.2f} of the gap"
        if self.placebo is not None:
            said += f"; of placebo targets {self.placebo:+.2f}: net {value - self.placebo:+.2f}"
        return said

    @property
    def warning(self) -> str:
        """What the model cannot do, or the unrelated texts; empty if there is nothing."""
        said = []
        if self.apart < self.draws:
            said.append(
                f"the {self.draws} unrelated texts overlap: there is text for {self.apart}; give "
                "more (--foreign), or fewer draws"
            )
        if not self.induction["has_induction"]:
            said.append(
                "this model does not copy from its context (a repeated passage costs it only "
                f"{self.induction['drop']:.2f} nats a token less), so it cannot use a far token "
                "that says the answer"
            )
        return "; ".join(said)

    def __str__(self) -> str:
        lines = [
            f"check: {self.k} units chosen alike in each of {self.draws} unrelated texts that take "
            "the place of the far part"
        ]
        for row in self.table.itertuples():
            lines.append(
                f"  {quoted(row.text)} (token {row.target:,}): own {row.own:+.2f} nats, unrelated "
                f"{row.foreign:+.2f} (at most {row.foreign_most:+.2f}); {row.better} of "
                f"{self.draws} do as well"
            )
        lines += [f"  {said}" for said in (self.summary, self.verdict, self.warning) if said]
        return "\n".join(lines)


def check(
    model: LoadedModel,
    scorer: Scorer,
    document: Document,
    windows: Windows,
    asked: Asked,
    targets: pd.DataFrame,
    foreign: Any,
    draws: int = 8,
) -> Check:
    """`targets`: those of an explanation. `foreign`: text in any form that open_documents reads."""
    if draws < 2:
        raise ConfigError(f"draws={draws} must be at least 2")
    spans: Spans = list(zip(targets.target.tolist(), targets.end.tolist(), strict=True))
    others = _unrelated(model, foreign, document)
    apart = len(others[0].tokens) // len(document.tokens)
    controls = Controls(others, windows, num_draws=draws, seed=asked.seed)
    parts = {DOCUMENT: np.array(spans)}
    if asked.chosen_by_gap:
        losses = context_losses(scorer, document, windows, controls)
        losses = losses[losses.target >= first_place(windows, asked.units)]
        parts[PLACEBO] = np.array(largest_gaps(losses, "placebo_loss_long"))
    k = asked.k
    with Progress("checking", sum(map(len, parts.values())), "targets") as progress:
        tables = recover(
            scorer, document, windows, parts, units=asked.units, selectors=asked.selector,
            ks=range(k + 1), controls=controls, seed=asked.seed, done=progress.update,
        )  # fmt: skip
    rows = tables["recovery"]
    falls = rows.pivot_table("loss_set", ["far_part", "target", "control", "draw"], "k")
    falls_N = falls[0] - falls[k]
    own, unrelated = (falls_N.xs(control, level="control") for control in ("own", "foreign"))
    own, unrelated = own.groupby(["far_part", "target"]).mean(), unrelated.unstack("draw")
    excess = own - unrelated.mean(axis=1)
    named = targets.set_index("target")
    draws_of = unrelated.loc[DOCUMENT]
    table = named[["end", "text", "gap"]].assign(
        own=own.loc[DOCUMENT], foreign=draws_of.mean(axis=1), foreign_most=draws_of.max(axis=1),
        better=(draws_of.ge(own.loc[DOCUMENT], axis=0)).sum(axis=1),
    ).reset_index()  # fmt: skip
    value = float(excess.loc[DOCUMENT].mean())
    return Check(
        table, draws, k,
        excess=_interval(own.loc[DOCUMENT], draws_of, asked.seed),
        share=value / table.gap.mean() if table.gap.mean() > MIN_GAP else float("nan"),
        placebo=float(excess.loc[PLACEBO].mean()) if asked.chosen_by_gap else None,
        induction=repetition_drop(scorer, _passages(others), PASSAGE),
        apart=apart,
        tables=tables,
    )  # fmt: skip


def _interval(own: pd.Series, foreign: pd.DataFrame, seed: int) -> tuple[float, float, float]:
    excess_D = (own.to_numpy()[:, None] - foreign.to_numpy()).mean(0)
    resampled_R = resample_weights(len(excess_D), seed) @ excess_D / len(excess_D)
    return interval(resampled_R, float(excess_D.mean()))


def _unrelated(model: LoadedModel, foreign: Any, document: Document) -> Documents:
    """Text that is long enough to stand in for the far part: documents, one after the other. One
    that shares a passage with the text is left out: it may be the text itself."""
    length = len(document.tokens)
    wanted, found, num_tokens = max(20 * length, 20_000), [], 0
    own = _runs(document.tokens)
    for other in open_documents(foreign, model, limit=max(2, wanted // 50)):
        if not own.isdisjoint(_runs(other.tokens)):
            continue
        found.append(other.tokens)
        num_tokens += len(other.tokens)
        if num_tokens >= wanted:
            break
    if num_tokens < length:
        raise DataError(
            f"the check needs {length:,} tokens of unrelated text, and the text for it has "
            f"{num_tokens:,} that share no passage with this one; give more (foreign=…)"
        )
    return Documents("unrelated text", [Document(np.concatenate(found), number=1,
                                                 tokenizer=model.tokenizer)])  # fmt: skip


def _runs(tokens: np.ndarray, length: int = 32) -> set[bytes]:
    """Every run of so many tokens, or the whole where it is shorter."""
    tokens = tokens.astype("<i8")
    last = max(1, len(tokens) - length + 1)
    return {tokens[first : first + length].tobytes() for first in range(last)}


def _passages(others: Documents) -> list[Document]:
    tokens = others[0].tokens
    starts = range(0, min(len(tokens) - PASSAGE, 16 * PASSAGE), PASSAGE)
    return [Document(tokens[start : start + PASSAGE]) for start in starts]
