"""How often does a verdict name a source by chance, and how much must a source do to be named?

    python -m study.false_names [--answers 2000] [--seed 2] [--only power]

Texts have effects on the loss of a statement that are drawn, sources as their decoys; losses go
through the trials and the verdicts of the product, with no model.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np

from olmo_sparsity.sources.verdicts.trials import Trial, Trials
from olmo_sparsity.sources.verdicts.verdict import Verdict, judge
from study.tables_of_rows import markdown

SOURCES = (1, 2, 3, 4, 5, 10)
DECOYS = (2, 4, 8)
SPREADS = (0.3, 1.0, 3.0)
"""Standard deviations of the effects of texts, in nats."""

TAILS = ("normal", "t3")
RATE = 0.05


class DrawnTrials(Trials):
    """Trials of texts with known effects, evaluated as far as verdicts need them."""

    def __init__(self, effects_TSE: np.ndarray, combine: Any) -> None:
        """Draw no decoys: their effects are known.

        effects_TSE: Effects of each source, then of its decoys.
        combine: Turns effects of texts in all places, TS, into nats by which they lower the losses
            of statements, T.
        """
        num_statements, num_sources, num_texts = effects_TSE.shape
        no_tokens = np.zeros((num_texts - 1, 1))
        no_answer = SimpleNamespace(targets_W=no_tokens)
        layout: Any = SimpleNamespace(statements=range(num_statements), block=no_answer)
        logprobs: Any = None
        super().__init__(logprobs, layout, [no_tokens] * num_sources)
        self.effects_TSE = effects_TSE
        self.combine = combine

    def evaluate(self, trials: Iterable[Trial]) -> None:
        """Compute losses from effects, in place of a model."""
        for trial in trials:
            effects_TS = self.effects_TSE[:, :, 0].copy()
            for source in trial.replaced_sources(len(self.decoys)):
                effects_TS[:, source] = self.effects_TSE[:, source, 1 + trial.draw]
            losses_T = -self.combine(effects_TS)
            self.statement_losses[trial.kind][(slice(None), *trial.loss_index)] = losses_T


def drawn(tails: str, shape: tuple[int, ...], seed: Any) -> np.ndarray:
    """Return random effects with standard deviation 1."""
    generator = np.random.default_rng(seed)
    if tails == "normal":
        return generator.normal(size=shape)
    return generator.standard_t(3, shape) / 3**0.5  # the variance of t with 3 degrees is 3


def add_up(effects_TS: np.ndarray) -> np.ndarray:
    return effects_TS.sum(1)


def judged(effects_TSE: np.ndarray, combine: Any = add_up) -> list[Verdict]:
    """Return the verdicts on statements of an answer, whose texts have these effects."""
    losses = DrawnTrials(effects_TSE, combine).run(RATE, lambda done: None)
    return judge(losses, RATE).verdicts


def false_names(num_statements: int, num_answers: int, seed: int) -> str:
    """Return the share of answers with any name, where no source matters."""

    def share(num_sources: int, draws: int, spread: float, tails: str) -> str:
        shape = (num_statements, num_sources, 1 + draws)
        has_name: list[bool] = []
        for i in range(num_answers):
            verdicts = judged(drawn(tails, shape, (seed, i)) * spread)
            has_name.append(any(verdict.sources for verdict in verdicts))
        return f"{np.mean(has_name):.3f}"

    return table(share, product(SOURCES, DECOYS), product(SPREADS, TAILS))


def power(num_answers: int, seed: int) -> str:
    """Return the share of answers whose only statement names the first source, by its nats."""

    def share(num_sources: int, draws: int, spread: float, nats: float) -> str:
        num_named = 0
        for i in range(num_answers):
            effects = drawn("normal", (1, num_sources, 1 + draws), (seed, i)) * spread
            effects[0, 0, 0] += nats
            num_named += names_first_source(effects)
        return f"{num_named / num_answers:.2f}"

    return table(share, product((2, 3, 5), DECOYS), product(SPREADS, (2.0, 4.0, 8.0)))


def names_first_source(effects_1SE: np.ndarray) -> bool:
    """Return whether the verdict on the only statement names the first source."""
    (verdict,) = judged(effects_1SE)
    return 0 in verdict.sources


def grey_zone(num_prompts: int, seed: int) -> str:
    """Return the nats of a source from which a share of the seeds of decoys name it, as a mean over
    prompts."""

    def threshold(num_sources: int, draws: int, spread: float, least_share: float) -> str:
        thresholds: list[float] = []
        for prompt, nats in product(range(num_prompts), np.arange(0.0, 24.0) * spread):
            sources = drawn("normal", (1, num_sources, 1), (seed, prompt)) * spread
            sources[0, 0, 0] = nats
            are_named: list[bool] = []
            for i in range(20):
                decoys = drawn("normal", (1, num_sources, draws), (seed, i, 1)) * spread
                are_named.append(names_first_source(np.concatenate([sources, decoys], -1)))
            # Only the smallest nats of each prompt.
            if len(thresholds) == prompt and np.mean(are_named) >= least_share:
                thresholds.append(nats)
        return f"{np.mean(thresholds):.1f}"

    return table(threshold, product((2, 5), (8,), SPREADS), [(0.05,), (0.5,), (0.95,)])


def by_kind(num_answers: int, seed: int) -> str:
    """Return the share of sources that do not matter among the names in verdicts of each kind. Of
    four statements, one relies on no source, one on one, one on two together, one on either of
    two."""
    true_sources = [(), (0,), (0, 1), (0, 1)]

    def combine(effects_TS: np.ndarray) -> np.ndarray:
        nats_T = effects_TS.sum(1)
        alternatives = effects_TS[3, :2]
        nats_T[3] += alternatives.max() - alternatives.sum()  # one is enough
        return nats_T

    def share(num_sources: int, draws: int, spread: float, kind: str) -> str:
        num_names: Counter[str] = Counter()
        num_wrong: Counter[str] = Counter()
        for i in range(num_answers):
            shape = (len(true_sources), num_sources, 1 + draws)
            effects = drawn("t3", shape, (seed, i)) * spread
            for number, sources in enumerate(true_sources):
                effects[number, [*sources], 0] += 8.0
            for sources, verdict in zip(true_sources, judged(effects, combine), strict=True):
                for counted_kind in (verdict.kind, "all"):
                    num_names[counted_kind] += len(verdict.sources)
                    num_wrong[counted_kind] += len({*verdict.sources} - {*sources})
        return f"{num_wrong[kind] / max(1, num_names[kind]):.3f} of {num_names[kind]}"

    kinds = [("one",), ("either",), ("both",), ("all",)]
    return table(share, product((2, 3, 5, 10), (4, 8), SPREADS), kinds)


def table(cell: Callable[..., str], rows: Iterable[tuple], columns: Iterable[tuple]) -> str:
    """Return a Markdown table.

    cell: Returns a cell, given the values of its row and of its column.
    rows: Numbers of sources and of decoys at most, and perhaps the standard deviation.
    columns: The other values.
    """
    columns = [*columns]
    rows = [*rows]
    keys = ("sources", "decoys", "SD")[: len(rows[0])]
    lines = [[*keys, *(", ".join(map(str, column)) for column in columns)]]
    for row in rows:
        lines.append([*map(str, row), *(cell(*row, *column) for column in columns)])
    return markdown(lines)


def one_sided(num_answers: int, seed: int) -> str:
    """Return a table of answers that get a source although none matters, where the effects of texts
    have a long tail on one side: their logarithms are normal, with a standard deviation of 1."""
    lines = [["long tail", "false names: 3 sources, 8 decoys"]]
    for side, sign in (("lowers the loss", 1), ("raises the loss", -1)):
        num_named = 0
        for index in range(num_answers):
            effects_TSE = sign * np.random.default_rng((seed, index)).lognormal(size=(1, 3, 9))
            num_named += any(verdict.sources for verdict in judged(effects_TSE))
        lines.append([side, f"{num_named / num_answers:.3f}"])
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--only", default="", help="a part of the name of a table")
    options = parser.parse_args()
    num_answers = options.answers
    seed = options.seed
    parts = {
        "false names in answers of one statement": lambda: false_names(1, num_answers, seed),
        "false names in answers of three statements": lambda: false_names(3, num_answers, seed),
        "power": lambda: power(num_answers, seed),
        "grey zone": lambda: grey_zone(num_answers // 400, seed),
        "tails on one side": lambda: one_sided(num_answers, seed),
        "kinds of verdicts": lambda: by_kind(num_answers // 20, seed),
    }
    for name, part in parts.items():
        if options.only in name:
            print(f"## {name}\n\n{part()}\n", flush=True)


if __name__ == "__main__":
    main()
