"""Declare the keys of an experiment's file, as dataclasses with defaults.

Place in the flow: read by file.py. The section `measure` may also have all options of the command
`measure`, which measure_section.py tells apart. A file, for example:

    folder: results/c4_1b
    models: [../c4_1b_pose.yaml, ../c4_1b_rope.yaml]
    grid: {seed: [0, 1]}
    measure: {steps: [5000, last], long: [960, 4032], short: 128, ks: [1, 2, 4]}
    figure: {labels: {c4_1b_pose: RoPE + PoSE}}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from olmo_sparsity.analysis.interpretation import InterpretationName
from olmo_sparsity.config.schema import option
from olmo_sparsity.config.windows import Long


@dataclass
class MeasureSection:
    """Keys of `measure` that are not options of the command `measure`."""

    steps: list[int | Literal["last"]] = option(["last"], nonempty=True, distinct=True, least=1)
    """Steps of the checkpoints that are measured: the last one with each window, earlier ones with
    the longest window only."""

    long: list[Long] = option(["all"], nonempty=True, distinct=True, least=1)
    distant_states: list[InterpretationName] = option(["contextual"], nonempty=True, distinct=True)
    targets: Literal["shared", "own"] = "shared"
    """shared: the first measured model chooses the targets of all models and steps. own: each
    measurement chooses its own."""

    transfer: bool = True
    """Whether to evaluate also the tokens that another seed of the same model has ranked, at the
    last step."""

    text: str | None = None
    """The text that is measured, as `--text` takes it. Default: the held-out text of each model."""

    models: list[str] = option([])
    """Names of the models that are measured, or beginnings of names; empty: all models."""

    shards: int = option(8, least=1)
    """Number of SLURM tasks that share a measurement."""

    @property
    def earlier_steps(self) -> list[int]:
        """Return the steps that are measured before the last one."""
        return [step for step in self.steps if step != "last"]


@dataclass
class FigureSection:
    """Keys of `figure`."""

    labels: dict[str, str] = field(default_factory=dict)
    """Labels by the name of a model, by the beginning of the names of several models, or by a value
    of `distant_states`."""

    out: str | None = None
    """The file of the figure. Default: figure2.png in the experiment's folder."""


@dataclass
class ExperimentFile:
    """All keys of a file."""

    folder: str = ""
    """The folder of the results."""

    models: list[str] = field(default_factory=list)
    """Configs, relative to the file."""

    grid: dict[str, Any] = field(default_factory=dict)
    """What the models vary in (grid.py)."""

    runs: str | None = None
    """The folder of the runs, of which each model's is RUNS/NAME. Default: with a grid `folder`,
    without one the config's `run_folder`. A second experiment that names the runs of the first
    trains nothing again."""

    processes: int | Literal["auto"] = option(1, least=1)
    """Number of processes of a training on this machine, and of measurements at once. auto: the
    number of GPUs, or up to two on a CPU."""

    measure: dict[str, Any] | None = None
    """What is measured (measure_section.py). None: models are trained and not measured."""

    figure: FigureSection = field(default_factory=FigureSection)
