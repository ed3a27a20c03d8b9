"""Know which jobs of an experiment are in SLURM's queue.

    slurm.json    {"c4_pose": "17_0", "c4_pose-last-960": "18", "figure": "20"}
    squeue        17 0, 20                     18 has ended, well or not
    queued        {"c4_pose": "17_0", "figure": "20"}

Place in the flow: slurm.py writes the numbers by **`keep_numbers`** after each job that it submits,
and asks **`queued`** before it submits or lists, and **`own_queued`** before it cancels.
"""

from __future__ import annotations

import getpass
import shutil
import subprocess
from pathlib import Path

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.files import read_json, write_json
from olmo_sparsity.experiment.file import Experiment

FILE_OF_NUMBERS = "slurm.json"
"""A file in the folder of an experiment. It has the SLURM number of each job that the experiment
submitted, by the job's name."""


def keep_numbers(experiment: Experiment, numbers: dict[str, str]) -> None:
    """Write the SLURM numbers of an experiment."""
    write_json(_file_of_numbers(experiment), numbers)


def queued(experiment: Experiment) -> dict[str, str]:
    """Return the SLURM number of each job that was submitted and has not ended, by the job's name.
    Trainings that another experiment has submitted are among them, if this one measures its
    runs."""
    submitted = _trainings_of_first_experiment(experiment)
    submitted |= _read_numbers(_file_of_numbers(experiment))
    return _select_queued(submitted)


def own_queued(experiment: Experiment) -> dict[str, str]:
    """Return the SLURM number of each job that this experiment has submitted and that has not
    ended, by the job's name."""
    return _select_queued(_read_numbers(_file_of_numbers(experiment)))


def _trainings_of_first_experiment(experiment: Experiment) -> dict[str, str]:
    """Return the SLURM numbers of trainings that another experiment has submitted: the one in the
    folder `runs`, whose runs this one measures, too. This one waits for them. Measurements of the
    other one are left out: they may have the same names, but are not this one's."""
    if experiment.file.runs is None:
        return {}
    submitted = _read_numbers(Path(experiment.file.runs) / FILE_OF_NUMBERS)
    names = {model.name for model in experiment.models}
    return {name: number for name, number in submitted.items() if name in names}


def _read_numbers(path: Path) -> dict[str, str]:
    """Return the SLURM numbers in a file, by the job's name; empty if there is no file."""
    if not path.exists():
        return {}
    return read_json(path, dict[str, str], "delete it if none of its jobs is in the queue")


def _file_of_numbers(experiment: Experiment) -> Path:
    """Return the file with the SLURM numbers of an experiment."""
    return experiment.folder / FILE_OF_NUMBERS


def _select_queued(submitted: dict[str, str]) -> dict[str, str]:
    """Return the SLURM numbers of the jobs that have not ended, by the job's name.

    Args:
        submitted: The SLURM numbers of jobs, by the job's name.
    """
    # Where SLURM is not installed, as on a laptop with a copy of the results, nothing is queued.
    if not submitted or shutil.which("squeue") is None:
        return {}
    # Without a heading, with a line for each task of an array: its number, and the task's index.
    words = ["squeue", "-h", "-r", f"--user={getpass.getuser()}", "-o", "%F %K"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise UserError(f"squeue ended with {done.returncode}; try again")
    in_queue: set[str] = set()
    for line in done.stdout.splitlines():
        # A measurement is known by the number of its array, a training by its task in the array.
        number, _, task_index = line.strip().partition(" ")
        in_queue |= {number, f"{number}_{task_index}"}
    return {name: number for name, number in submitted.items() if number in in_queue}
