"""The command `experiment`: train models, measure them and draw one figure, as one file says.

Place in the flow: below cli.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.command import arguments
from olmo_sparsity.experiment import jobs as listed
from olmo_sparsity.experiment.file import Experiment, read_experiment, saved_experiment

Train = Callable[[argparse.Namespace], int]
Find = Callable[[argparse.Namespace], Any]


def experiment(options: argparse.Namespace, train: Train, hardware: Find) -> int:
    """`train`: the command; `hardware`: what --gpus, --gpu and --nodes describe."""
    if find_spec("olmo") is None:  # each training would fail
        raise ModuleNotFoundError(name="olmo")
    _refuse_unused(options)
    found = read_experiment(options.config, options.overrides)
    if options.dry_run:
        from olmo_sparsity.experiment.price import format_price

        on = hardware(options)
        gpu = None if on is None else options.gpu or "h100"
        print(format_price(found, on, gpu, options.gpu_hour))
        return 0
    if options.list:
        from olmo_sparsity.experiment.slurm import queued

        print(listed.format_states(listed.jobs_of(found), queued(found)))
        return 0
    if options.slurm is not None:
        from olmo_sparsity.experiment.slurm import Flags, submit

        measure = options.slurm if options.measure_slurm is None else options.measure_slurm
        return submit(found, Flags(options.slurm, measure, options.max_jobs, options.time or ()))
    if options.only is not None:
        return _run_one(found, options.only, train)
    from olmo_sparsity.experiment.here import run_here

    return run_here(found)


def _refuse_unused(options: argparse.Namespace) -> None:
    for name in ("measure_slurm", "max_jobs", "time"):
        if getattr(options, name) is not None and options.slurm is None:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} describes jobs of SLURM: add --slurm='FLAGS'")
    if options.gpu_hour is not None and not (options.dry_run and options.gpus):
        raise ConfigError(f"--gpu-hour={options.gpu_hour:g} is of --dry-run --gpus N: add them")


def _run_one(experiment: Experiment, name: str, train: Train) -> int:
    """Run one job in this process: the N-th model, or a job by its name in `--list`."""
    jobs = {job.name: job for job in listed.jobs_of(experiment)}
    if name.isdecimal():
        number = int(name)
        if number >= len(experiment.models):
            last = len(experiment.models) - 1
            raise ConfigError(f"--only={name}: {experiment.path} has models 0 to {last}")
        name = experiment.models[number].name
    if name not in jobs:
        raise ConfigError(f"--only={name} is none of {', '.join(jobs)}")
    job = jobs[name]
    if job.model is not None:
        model = job.model
        words = argparse.Namespace(config=model.config, overrides=model.overrides, dry_run=False)
        with job.recording():
            return train(words)
    if job.measurement is not None:
        return _measure(job, jobs)
    from olmo_sparsity.base.launch import read_launch
    from olmo_sparsity.experiment.figure import draw

    if read_launch().rank == 0:
        draw(experiment)
        print(experiment.figure)
    return 0


def _measure(job: listed.Job, jobs: dict[str, listed.Job]) -> int:
    from olmo_sparsity.analysis.measurement.measurement import measure
    from olmo_sparsity.analysis.measurement.plan import MeasureRequest
    from olmo_sparsity.analysis.results.summary import describe
    from olmo_sparsity.base.launch import read_launch
    from olmo_sparsity.base.provenance import typed_command

    one = job.measurement
    assert one is not None
    shard = arguments.parse_shard(None, False)
    with job.recording(f"{shard[0]}-{read_launch().rank}"):
        if reason := listed.reason_to_skip(job, jobs):
            raise DataError(reason)
        options: dict[str, Any] = dict(one.options)
        for key, name in (("targets", one.targets_of), ("choices", one.choices_of)):
            if name is not None:
                chosen = jobs[name].measurement
                assert chosen is not None
                options[key] = chosen.folder
        if one.choices_of is None:  # settings are those of the choices
            options |= {"long": one.long, "distant_states": one.distant_states}
        request = MeasureRequest.of(
            model=str(one.checkpoint),
            documents=one.text,
            out=str(one.folder),
            shard=shard,
            command=tuple(typed_command()),
            **options,
        )
        results = measure(request)
    if results is not None:
        print(describe(results))
    return 0


def measurements_in(folder: str) -> list[tuple[str, str]] | None:
    """The name of each measured model of an experiment's folder, and its main measurement; None
    for another folder."""
    found = saved_experiment(folder)
    if found is None:
        return None
    from olmo_sparsity.experiment.figure import main_measurements

    return [(one.model.name, str(one.folder)) for one in main_measurements(found)]


def draw_folder(folder: str, out: str) -> bool:
    """Draw the figure of an experiment's folder; False for another folder."""
    from dataclasses import replace

    found = saved_experiment(folder)
    if found is None:
        return False
    from olmo_sparsity.experiment.figure import draw

    file = replace(found.file, figure=replace(found.file.figure, out=str(Path(out))))
    draw(replace(found, file=file))
    return True
