"""Hold the flags of a user for sbatch, and find the time limit of each training.

    --slurm="--nodes=1" --time=c4_1b=12:00:00 --time=c4_1b_rope=8:00:00

    SlurmFlags(train="--nodes=1", …).time_of("c4_1b_pose")     "12:00:00"
                                    .time_of("c4_1b_rope")     "8:00:00": the longer name decides
                                    .time_of("other")          None: the limit of the script

command/experiment.py makes them, and slurm.py submits with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.experiment.models import is_named_by


@dataclass(frozen=True)
class SlurmFlags:
    """Flags of the user for sbatch."""

    train: str
    """Flags of sbatch for trainings, as one text."""

    measure: str
    """Flags of sbatch for measurements and the figure."""

    max_jobs: int | None = None
    """The largest number of tasks of an array that run at once. None: the cluster's limit."""

    times: Sequence[str] = ()
    """MODEL=TIME: the time limit of the training of a model, or of all models whose name begins
    so."""

    def time_of(self, name: str) -> str | None:
        """Return the time limit of the training of a model; None if none is given. If several names
        fit, the longest decides, as it says most of this model."""
        limits = map(_TimeLimit.of, self.times)
        fitting = [limit for limit in limits if is_named_by(limit.beginning, name)]
        # Of two limits under one name the last counts, as of any option that is given twice.
        fitting.reverse()
        return max(fitting, key=lambda limit: len(limit.beginning)).time if fitting else None

    def check(self, names: Iterable[str]) -> None:
        """Raise ConfigError for a flag that has no effect or no meaning.

        Args:
            names: The names of all models.
        """
        names = list(names)
        for word in self.times:
            limit = _TimeLimit.of(word)
            fits = any(is_named_by(limit.beginning, name) for name in names)
            if not (limit.time and fits):
                raise ConfigError(f"--time={word} must be MODEL=TIME, of {', '.join(names)}")
        if self.max_jobs is not None and self.max_jobs < 1:
            raise ConfigError(f"--max-jobs={self.max_jobs} must be at least 1")


class _TimeLimit(NamedTuple):
    """The time limit of a training, or of several."""

    beginning: str
    """The name of a model, or the beginning of the names of several (`is_named_by`)."""

    time: str
    """A time as sbatch reads it, such as 12:00:00; empty if none is given."""

    @staticmethod
    def of(word: str) -> _TimeLimit:
        """Return the time limit that a word MODEL=TIME means."""
        beginning, _, time = word.partition("=")
        return _TimeLimit(beginning, time)
