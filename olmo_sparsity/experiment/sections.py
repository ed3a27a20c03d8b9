"""Declare the sections of an experiment's file, as dataclasses with defaults.

The section `measure` may also have all options of the command `measure`; `measurements.py` sorts
them out.
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

    steps: list[int | Literal["last"]] = option(["last"], some=True, distinct=True, least=1)
    """Checkpoints that are measured with the longest window; the last one with each window."""

    long: list[Long] = option(["all"], some=True, distinct=True, least=1)
    distant_states: list[InterpretationName] = option(["contextual"], some=True, distinct=True)
    targets: Literal["shared", "own"] = "shared"
    """shared: the first model that is measured chooses the targets of all models and steps."""

    transfer: bool = True
    """Also evaluate the tokens that another seed of the same model chose, at the last step."""

    text: str | None = None
    models: list[str] = option([])
    """Names of the models that are measured; empty: all."""

    shards: int = option(8, least=1)
    """SLURM tasks that share a measurement."""

    @property
    def earlier_steps(self) -> list[int]:
        """Return the steps that are measured before the last one."""
        return [step for step in self.steps if step != "last"]


@dataclass
class FigureSection:
    labels: dict[str, str] = field(default_factory=dict)
    """Label of a model, of all models whose name begins so, or of a value of distant_states."""

    out: str | None = None
    """Default: figure2.png in the experiment's folder."""


@dataclass
class ExperimentFile:
    folder: str = ""
    models: list[str] = field(default_factory=list)
    grid: dict[str, Any] = field(default_factory=dict)
    runs: str | None = None
    """Each model's run lies in RUNS/NAME. Default: with a grid `folder`, without one the config's
    `run_folder`. A second experiment that names the runs of the first trains nothing again."""

    processes: int | Literal["auto"] = option(1, least=1)
    """Processes of a training on this machine, and measurements at once; auto: the GPUs, or up to
    two on a CPU."""

    measure: dict[str, Any] | None = None
    figure: FigureSection = field(default_factory=FigureSection)
