"""Judge the paper's table of sparse parity: `python -m study.parity [FOLDER]`.

It prints the verdicts and the table, of the stored trials or of those in another FOLDER.

The claims U1 to U7 and their rules are registered in study/records/thresholds.md. This module
applies the rules to the trials that `make -f study/Makefile parity_table` has stored. While trials
are missing, a verdict that needs them is "unfinished".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from study.pages.stored import ROOT
from study.tables_of_rows import markdown
from study.tasks.experiment import Trained, list_trials, read_finished
from study.tasks.settings import ExperimentSettings, load_settings
from study.tasks.trial import Trial
from study.theory.results import half_width

PRESET = ROOT / "study/configs/tasks/sparse_parity_table.yaml"
NAMES = {"pose": "RoPE + PoSE", "rope": "RoPE alone"}
SHOWN_LENGTHS = (50, 200, 500)
LEAST_SEEDS = 3
"""With fewer models that have learnt their k, a K_train is void."""

MOST_K_TRAIN = 4
"""So many of the five K_train decide a verdict."""


# --- models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    trial: Trial
    mastered: bool
    """Whether each k up to K_train passed a check in training."""

    accuracy: pd.DataFrame
    """Index: k of the test; columns: lengths."""

    @property
    def k(self) -> int:
        assert self.trial.train_k is not None
        return self.trial.train_k


def model_of(trial: Trial, trained: Trained) -> Model:
    rows = pd.DataFrame([vars(row) for row in trained.rows])
    accuracy = rows.pivot(index="test_k", columns="length", values="exact_match")
    return Model(trial, trained.mastered is not None, accuracy)


def read_models(settings: ExperimentSettings) -> list[Model]:
    return [model_of(trial, trained) for trial, trained in read_finished(settings)]


# --- what is measured of one model; None: it does not count ---------------------------------------


def known_at(model: Model, length: int) -> float:
    """Return the mean accuracy over the tested k up to K_train."""
    return float(model.accuracy.loc[: model.k, length].mean())


def degrades(model: Model) -> float:
    """Return what is known at 500 tokens minus the mean accuracy over the tested k > K_train."""
    return known_at(model, 500) - float(model.accuracy.loc[model.k + 1 :, 500].mean())


def degrades_though_known(model: Model) -> float | None:
    """Return how much more k = K_train + 2 loses from 50 to 500 tokens than k = K_train."""
    if model.accuracy.loc[model.k + 2, 50] < 0.9:
        return None
    lost = model.accuracy[50] - model.accuracy[500]
    return float(lost[model.k + 2] - lost[model.k])


def slope_at_500(model: Model) -> float:
    """Return the change of accuracy at 500 tokens a doubling of k, over the tested k ≤ K_train."""
    right = model.accuracy.loc[: model.k, 500]
    return float(np.polyfit(np.log2(right.index.astype(float)), right, 1)[0])


# --- rules ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What is found for one K_train."""

    verdict: str
    """confirmed, refuted, undecided, void or unfinished."""

    values: tuple[float, ...] = ()
    """One for each model that counts."""

    @property
    def interval(self) -> tuple[float, float, float]:
        """Mean and ends of Student's 95% interval over models."""
        return interval_of(self.values)


@dataclass(frozen=True)
class Rule:
    scheme: str
    measure: Callable[[Model], float | None]
    confirmed: Callable[[float, float, float], bool]
    """Of the mean and both ends of its interval."""

    refuted: Callable[[float, float, float], bool]


RULES = {
    "U2": Rule(
        "pose",
        lambda model: known_at(model, 200),
        confirmed=lambda mean, low, high: mean >= 0.9 and low > 0.8,
        refuted=lambda mean, low, high: high < 0.9,
    ),
    "U3": Rule(
        "pose",
        lambda model: known_at(model, 500),
        confirmed=lambda mean, low, high: mean >= 0.9 and low > 0.8,
        refuted=lambda mean, low, high: high < 0.9,
    ),
    "U4": Rule(
        "pose",
        degrades,
        confirmed=lambda mean, low, high: mean >= 0.1 and low > 0,
        refuted=lambda mean, low, high: high < 0.1,
    ),
    "U5": Rule(
        "pose",
        degrades_though_known,
        confirmed=lambda mean, low, high: mean >= 0.05 and low > 0,
        refuted=lambda mean, low, high: high < 0.05,
    ),
    "U6": Rule(
        "rope",
        lambda model: known_at(model, 500),
        confirmed=lambda mean, low, high: high < 0.6,
        refuted=lambda mean, low, high: low > 0.6,
    ),
    "U7": Rule(
        "pose",
        slope_at_500,
        confirmed=lambda mean, low, high: mean <= -0.02 and high < 0,
        refuted=lambda mean, low, high: low >= -0.02 and high <= 0.02,
    ),
}


def interval_of(values: Sequence[float]) -> tuple[float, float, float]:
    array = np.array(values)
    half = half_width(array)
    return float(array.mean()), float(array.mean() - half), float(array.mean() + half)


def judge(rule: Rule, models: Sequence[Model], num_seeds: int) -> Outcome:
    """Apply a rule to the finished models of one K_train and scheme, of `num_seeds` in all."""
    measured = [rule.measure(model) for model in models if model.mastered]
    values = tuple(value for value in measured if value is not None)
    if len(models) < num_seeds:
        return Outcome("unfinished", values)
    if len(values) < LEAST_SEEDS:
        return Outcome("void", values)
    interval = interval_of(values)
    if rule.confirmed(*interval):
        return Outcome("confirmed", values)
    return Outcome("refuted" if rule.refuted(*interval) else "undecided", values)


def judge_learnt(models: Sequence[Model], num_seeds: int) -> Outcome:
    """U1: confirmed if at most one seed does not master its k, refuted if at most one does."""
    learnt = tuple(float(model.mastered) for model in models)
    if len(models) < num_seeds:
        return Outcome("unfinished", learnt)
    if sum(learnt) >= num_seeds - 1:
        return Outcome("confirmed", learnt)
    return Outcome("refuted" if sum(learnt) <= 1 else "undecided", learnt)


def verdict_of(outcomes: Iterable[Outcome]) -> str:
    """Return the verdict over all K_train."""
    verdicts = [outcome.verdict for outcome in outcomes]
    if "unfinished" in verdicts:
        return "unfinished"
    if verdicts.count("confirmed") >= MOST_K_TRAIN:
        return "yes"
    return "no" if verdicts.count("refuted") >= MOST_K_TRAIN else "open"


@dataclass(frozen=True)
class Finding:
    """A claim's verdict, and what it follows from."""

    verdict: str
    outcomes: dict[tuple[str, int], Outcome]
    """By scheme and K_train."""


def findings(models: Sequence[Model], ks: Sequence[int], num_seeds: int) -> dict[str, Finding]:
    """Judge every claim by all finished models."""

    def select(scheme: str, k: int) -> list[Model]:
        return [model for model in models if (model.trial.scheme, model.k) == (scheme, k)]

    learnt = {
        (scheme, k): judge_learnt(select(scheme, k), num_seeds) for scheme in NAMES for k in ks
    }
    by_scheme = {verdict_of(learnt[scheme, k] for k in ks) for scheme in NAMES}
    if len(by_scheme) == 1:
        (learnt_verdict,) = by_scheme
    else:
        learnt_verdict = "unfinished" if "unfinished" in by_scheme else "open"
    judged = {"U1": Finding(learnt_verdict, learnt)}
    for name, rule in RULES.items():
        outcomes = {(rule.scheme, k): judge(rule, select(rule.scheme, k), num_seeds) for k in ks}
        judged[name] = Finding(verdict_of(outcomes.values()), outcomes)
    return judged


# --- tables ---------------------------------------------------------------------------------------


def format_interval(values: Sequence[float], largest: float = np.inf) -> str:
    """Format a mean and its interval, cut at `largest`; with fewer than three values none."""
    if not values:
        return "–"
    if len(values) < LEAST_SEEDS:
        return f"{np.mean(values):.3f}".replace("-", "−")
    mean, low, high = interval_of(values)
    return f"{mean:.3f} [{low:.2f}, {min(high, largest):.2f}]".replace("-", "−")


def format_findings(judged: dict[str, Finding]) -> str:
    """Write a line for each claim and scheme, a column for each K_train."""
    ks = sorted({k for finding in judged.values() for _, k in finding.outcomes})
    lines = [["claim", "verdict", "scheme", *(f"K_train = {k}" for k in ks)]]
    for name, finding in judged.items():
        for scheme in dict.fromkeys(scheme for scheme, _ in finding.outcomes):
            cells = []
            for k in ks:
                outcome = finding.outcomes[scheme, k]
                learnt = f"{sum(outcome.values):.0f} of {len(outcome.values)}"
                shown = learnt if name == "U1" else format_interval(outcome.values)
                cells.append(f"{outcome.verdict}: {shown}")
            lines.append([name, finding.verdict, NAMES[scheme], *cells])
    return markdown(lines)


def format_table(models: Sequence[Model], scheme: str, length: int) -> str:
    """Write the paper's table at one length: a line for each K_train, a column for each k of the
    test; means and intervals over the models that have mastered their k."""
    chosen = [model for model in models if model.trial.scheme == scheme and model.mastered]
    tested = sorted({k for model in chosen for k in model.accuracy.index})
    lines = [["K_train", "models", *(f"k = {k}" for k in tested)]]
    for train_k in sorted({model.k for model in chosen}):
        frames = [model.accuracy for model in chosen if model.k == train_k]
        cells = [format_interval([frame.loc[k, length] for frame in frames], 1) for k in tested]
        lines.append([str(train_k), str(len(frames)), *cells])
    return markdown(lines)


def report(settings: ExperimentSettings) -> str:
    models = read_models(settings)
    ks = sorted(settings.train_ks)
    num_trials = len(list_trials(settings))
    parts = [
        f"{len(models)} of {num_trials} models are trained.",
        format_findings(findings(models, ks, len(settings.seeds))),
    ]
    for scheme in settings.schemes:
        for length in SHOWN_LENGTHS:
            parts += [
                f"{NAMES[scheme]}, {length} tokens:",
                format_table(models, scheme, length),
            ]
    return "\n\n".join(parts)


def table_settings(folder: str | Path = "") -> ExperimentSettings:
    """Return the settings of the paper's table. `folder`: where else its results are stored."""
    settings = load_settings(PRESET, [f"--output={folder}"] if folder else [])
    if not folder:
        settings.output = str(ROOT / settings.output)
    return settings


if __name__ == "__main__":
    print(report(table_settings(*sys.argv[1:])))
