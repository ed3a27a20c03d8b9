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

from olmo_sparsity.sources.trials import Trial, Trials
from olmo_sparsity.sources.verdicts import Verdict, judge
from study.tables_of_rows import markdown

SOURCES, DECOYS, SPREADS = (1, 2, 3, 4, 5, 10), (2, 4, 8), (0.3, 1.0, 3.0)
TAILS = ("normal", "t3")
RATE = 0.05


class DrawnTrials(Trials):
    """Trials of texts with known effects, evaluated as far as verdicts need them."""

    def __init__(self, effects_TSE: np.ndarray, combine: Any) -> None:
        """`effects_TSE`: of each source, then of its decoys. `combine`: those of texts in all
        places, TS, to nats by which they lower the losses of statements, T."""
        num_T, num_S, num_E = effects_TSE.shape
        layout: Any = SimpleNamespace(statements=range(num_T))
        logprobs: Any = None
        super().__init__(logprobs, layout, [np.zeros((num_E - 1, 1))] * num_S)
        self.effects_TSE, self.combine = effects_TSE, combine

    def evaluate(self, trials: Iterable[Trial]) -> None:
        for trial in trials:
            effects_TS = self.effects_TSE[:, :, 0].copy()
            for s in trial.replaced(len(self.decoys)):
                effects_TS[:, s] = self.effects_TSE[:, s, 1 + trial.draw]
            losses_T = -self.combine(effects_TS)
            self.statement_losses[trial.way][(slice(None), *trial.place)] = losses_T


def drawn(tails: str, shape: tuple[int, ...], seed: Any) -> np.ndarray:
    """Effects with standard deviation 1."""
    one = np.random.default_rng(seed)
    return one.normal(size=shape) if tails == "normal" else one.standard_t(3, shape) / 3**0.5


def judged(effects_TSE: np.ndarray, combine: Any = lambda of: of.sum(1)) -> list[Verdict]:
    losses = DrawnTrials(effects_TSE, combine).run(RATE, lambda done: None)
    return judge(losses, RATE)[1]


def false_names(num_T: int, num: int, seed: int) -> str:
    """The share of answers with any name, where no source matters."""

    def share(num_S: int, draws: int, spread: float, tails: str) -> str:
        shape = (num_T, num_S, 1 + draws)
        answers = (judged(drawn(tails, shape, (seed, i)) * spread) for i in range(num))
        return f"{np.mean([any(named for _, named in one) for one in answers]):.3f}"

    return table(share, product(SOURCES, DECOYS), product(SPREADS, TAILS))


def power(num: int, seed: int) -> str:
    """The share of answers whose only statement names the first source, by its nats."""

    def share(num_S: int, draws: int, spread: float, nats: float) -> str:
        found = 0
        for i in range(num):
            effects = drawn("normal", (1, num_S, 1 + draws), (seed, i)) * spread
            effects[0, 0, 0] += nats
            found += 0 in judged(effects)[0][1]
        return f"{found / num:.2f}"

    return table(share, product((2, 3, 5), DECOYS), product(SPREADS, (2.0, 4.0, 8.0)))


def grey_zone(num: int, seed: int) -> str:
    """Nats of a source with which this share of the seeds name it: of a prompt, mean over some."""

    def nats(num_S: int, draws: int, spread: float, least: float) -> str:
        firsts = list[float]()
        for prompt, nats in product(range(num), np.arange(0.0, 24.0) * spread):
            own = drawn("normal", (1, num_S, 1), (seed, prompt)) * spread
            own[0, 0, 0] = nats
            shape = (1, num_S, draws)
            decoys = (drawn("normal", shape, (seed, i, 1)) * spread for i in range(20))
            named = [0 in judged(np.concatenate([own, one], -1))[0][1] for one in decoys]
            if len(firsts) == prompt and np.mean(named) >= least:
                firsts.append(nats)
        return f"{np.mean(firsts):.1f}"

    return table(nats, product((2, 5), (8,), SPREADS), [(0.05,), (0.5,), (0.95,)])


def by_kind(num: int, seed: int) -> str:
    """Of the names in verdicts of each kind, the share of sources that do not matter. Of four
    statements, one relies on no source, one on one, one on two together, one on either of two."""
    needs = [(), (0,), (0, 1), (0, 1)]

    def combine(effects_TS: np.ndarray) -> np.ndarray:
        found, two = effects_TS.sum(1), effects_TS[3, :2]
        found[3] += two.max() - two.sum()
        return found

    def share(num_S: int, draws: int, spread: float, kind: str) -> str:
        names, wrong = Counter[str](), Counter[str]()
        for i in range(num):
            effects = drawn("t3", (len(needs), num_S, 1 + draws), (seed, i)) * spread
            for number, need in enumerate(needs):
                effects[number, [*need], 0] += 8.0
            for need, (found_kind, found) in zip(needs, judged(effects, combine), strict=True):
                for name in (found_kind, "all"):
                    names[name] += len(found)
                    wrong[name] += len({*found} - {*need})
        return f"{wrong[kind] / max(1, names[kind]):.3f} of {names[kind]}"

    kinds = [("one",), ("either",), ("both",), ("all",)]
    return table(share, product((2, 3, 5, 10), (4, 8), SPREADS), kinds)


def table(share: Callable[..., str], rows: Iterable[tuple], columns: Iterable[tuple]) -> str:
    """`rows`: numbers of sources and of decoys at most, and standard deviation."""
    columns, rows = [*columns], [*rows]
    keys = ("sources", "decoys", "SD")[: len(rows[0])]
    lines = [[*keys, *(", ".join(map(str, column)) for column in columns)]]
    lines += [[*map(str, row), *(share(*row, *column) for column in columns)] for row in rows]
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--only", default="", help="a part of the name of a table")
    given = parser.parse_args()
    num, seed = given.answers, given.seed
    parts = {
        "false names in answers of one statement": lambda: false_names(1, num, seed),
        "false names in answers of three statements": lambda: false_names(3, num, seed),
        "power": lambda: power(num, seed),
        "grey zone": lambda: grey_zone(num // 400, seed),
        "kinds of verdicts": lambda: by_kind(num // 20, seed),
    }
    for name, part in parts.items():
        if given.only in name:
            print(f"## {name}\n\n{part()}\n", flush=True)


if __name__ == "__main__":
    main()
