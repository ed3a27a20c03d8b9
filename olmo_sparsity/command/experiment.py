"""Run the command `experiment`: train models, measure them and draw one figure, as one file says.

    experiment FILE               all jobs here, each a process of the same command with --only
    experiment FILE --only=JOB    one job, in this process
    experiment FILE --slurm=…     submit all jobs, and return
    experiment FILE --list        how each job stands
    experiment FILE --cancel      cancel what was submitted
    experiment FILE --dry-run     what each job costs

cli.py calls `run_experiment`, and the package `experiment` does the work. Imports within functions
are late, so that each use of the command loads only what it needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.command.gpus import check_gpus_are_of_a_dry_run, hardware_of
from olmo_sparsity.command.share import shard_of_array_task
from olmo_sparsity.command.training import run_train
from olmo_sparsity.experiment.file import Experiment, read_experiment, saved_experiment
from olmo_sparsity.experiment.job import Job
from olmo_sparsity.experiment.jobs import format_states, jobs_of
from olmo_sparsity.experiment.measurement_job import MeasurementJob
from olmo_sparsity.experiment.measurements import Measurement
from olmo_sparsity.experiment.training_job import TrainingJob


def run_experiment(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    check_gpus_are_of_a_dry_run(options)
    # Without OLMo each training would fail, minutes or hours later.
    if find_spec("olmo") is None:
        raise ModuleNotFoundError(name="olmo")
    _check_options_are_used(options)
    experiment = read_experiment(options.config, options.overrides)

    # The parser accepts one of these options at most.
    if options.dry_run:
        return _print_price(experiment, options)
    if options.list:
        return _print_states(experiment)
    if options.cancel:
        from olmo_sparsity.experiment.slurm import cancel

        return cancel(experiment)
    if options.only is not None:
        return _run_one(experiment, options.only)

    _check_measurements(experiment)
    if options.slurm is not None:
        return _submit(experiment, options)
    from olmo_sparsity.experiment.here import run_here

    return run_here(experiment)


def _check_options_are_used(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option that has no effect because another one is missing."""
    for name in ("measure_slurm", "max_jobs", "time"):
        if getattr(options, name) is not None and options.slurm is None:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} describes jobs of SLURM: add --slurm='FLAGS'")
    if options.gpu_hour is not None and not (options.dry_run and options.gpus):
        raise ConfigError(f"--gpu-hour={options.gpu_hour:g} needs --dry-run and --gpus N: add them")


def _print_price(experiment: Experiment, options: argparse.Namespace) -> int:
    """Print what each job costs."""
    from olmo_sparsity.experiment.price import format_price

    hardware = hardware_of(options)
    # Measurements take one GPU of the same kind.
    gpu = None if hardware is None else options.gpu or "h100"
    print(format_price(experiment, hardware, gpu, options.gpu_hour))
    return 0


def _print_states(experiment: Experiment) -> int:
    """Print how each job stands, such as done or in the queue."""
    from olmo_sparsity.experiment.slurm_queue import queued

    print(format_states(jobs_of(experiment), queued(experiment)))
    return 0


def _check_measurements(experiment: Experiment) -> None:
    """Raise ConfigError if options of a measurement exclude each other. Otherwise the measurement
    would say so days later, when its model is trained."""
    from olmo_sparsity.analysis.measurement.request import MeasureRequest

    jobs = _jobs_by_name(experiment)
    for measurement in experiment.measurements:
        options = _measure_options(measurement, jobs)
        try:
            MeasureRequest.of(
                model=str(measurement.checkpoint), documents=measurement.text, **options
            )
        except ConfigError as error:
            raise ConfigError(f"{experiment.path}: measure, {measurement.name}: {error}") from None


def _submit(experiment: Experiment, options: argparse.Namespace) -> int:
    """Submit the jobs that are neither done nor in the queue to SLURM, and return the exit code."""
    from olmo_sparsity.experiment.slurm import submit
    from olmo_sparsity.experiment.slurm_flags import SlurmFlags

    measure_flags = options.measure_slurm
    if measure_flags is None:
        measure_flags = options.slurm
    flags = SlurmFlags(
        train=options.slurm,
        measure=measure_flags,
        max_jobs=options.max_jobs,
        times=options.time or (),
    )
    return submit(experiment, flags)


# --- one job, in this process ---------------------------------------------------------------------


def _jobs_by_name(experiment: Experiment) -> dict[str, Job]:
    """Return all jobs of an experiment, by name."""
    return {job.name: job for job in jobs_of(experiment)}


def _run_one(experiment: Experiment, name: str) -> int:
    """Run one job in this process, and return the exit code.

    Args:
        name: What --only names: a job, or the number of a model.
    """
    jobs = _jobs_by_name(experiment)
    job = _find_job(experiment, jobs, name)
    if isinstance(job, TrainingJob):
        training_options = argparse.Namespace(
            config=job.model.config, overrides=job.model.overrides, dry_run=False
        )
        with job.recording():
            return run_train(training_options)
    if isinstance(job, MeasurementJob):
        return _measure(job, jobs)
    return _draw(experiment)


def _find_job(experiment: Experiment, jobs: Mapping[str, Job], name: str) -> Job:
    """Return the job that --only names; raise ConfigError if there is none.

    Args:
        jobs: All jobs, by name.
        name: The job's name, as `--list` prints it; or N for the N-th model, from 0, as the tasks
            of a SLURM array are numbered.
    """
    if name.isdecimal():
        model_index = int(name)
        last_index = len(experiment.models) - 1
        if model_index > last_index:
            raise ConfigError(f"--only={name}: {experiment.path} has models 0 to {last_index}")
        name = experiment.models[model_index].name
    if name not in jobs:
        raise ConfigError(f"--only={name} is not a job; the jobs are {', '.join(jobs)}")
    return jobs[name]


def _measure(job: MeasurementJob, jobs: Mapping[str, Job]) -> int:
    """Run this process's part of a measurement, and return the exit code.

    Args:
        job: The measurement.
        jobs: All jobs, by name.
    """
    from olmo_sparsity.analysis.measurement.measurement import measure
    from olmo_sparsity.analysis.measurement.request import MeasureRequest
    from olmo_sparsity.analysis.results.summary import describe
    from olmo_sparsity.base.launch import read_launch
    from olmo_sparsity.base.provenance import typed_command

    measurement = job.measurement
    # The tasks of an array are shards. The processes of one task share its shard by themselves, and
    # each records that it runs, so that `--list` sees it.
    shard = shard_of_array_task()
    with job.recording_process(f"{shard.shard_index}-{read_launch().rank}"):
        reason = job.reason_to_skip(jobs)
        if reason:
            raise DataError(reason)
        request = MeasureRequest.of(
            model=str(measurement.checkpoint),
            documents=measurement.text,
            out=str(measurement.folder),
            shard=shard,
            command=tuple(typed_command()),
            **_measure_options(measurement, jobs),
        )
        results = measure(request)
    if results is not None:  # None: other processes have documents left
        print(describe(results))
    return 0


def _measure_options(measurement: Measurement, jobs: Mapping[str, Job]) -> dict[str, Any]:
    """Return the options of `measure` for a measurement: those of the file, and what other
    measurements have chosen for it."""
    options: dict[str, Any] = dict(measurement.options)
    if measurement.targets_of is not None:
        options["targets"] = jobs[measurement.targets_of].results
    if measurement.choices_of is not None:
        # Windows and distant states are those of the measurement that chose.
        options["choices"] = jobs[measurement.choices_of].results
    else:
        options["long"] = measurement.long
        options["distant_states"] = measurement.distant_states
    return options


def _draw(experiment: Experiment) -> int:
    """Draw the figure, in the first process of a launch."""
    from olmo_sparsity.base.launch import read_launch
    from olmo_sparsity.experiment.figure import draw

    if read_launch().rank == 0:  # SLURM may start several processes for the job
        draw(experiment)
        print(experiment.figure)
    return 0


# --- the folder of an experiment, for `figure` and `report` ---------------------------------------


def main_measurement_folders(folder: str) -> dict[str, str] | None:
    """Return the folder of the main measurement of each model of an experiment, by the model's
    name. Return None if this is not the folder of an experiment."""
    experiment = saved_experiment(folder)
    if experiment is None:
        return None
    from olmo_sparsity.experiment.figure import main_measurements

    measurements = main_measurements(experiment)
    return {measurement.model.name: str(measurement.folder) for measurement in measurements}


def draw_if_experiment(folder: str, out: str) -> bool:
    """Draw the figure of an experiment's folder into the file `out`. Return whether this is the
    folder of an experiment."""
    experiment = saved_experiment(folder)
    if experiment is None:
        return False
    from olmo_sparsity.experiment.figure import draw

    figure = replace(experiment.file.figure, out=str(Path(out)))
    file = replace(experiment.file, figure=figure)
    draw(replace(experiment, file=file))
    return True
