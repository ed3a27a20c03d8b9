"""Estimate what an experiment costs before anything is trained: `experiment --dry-run`.

Place in the flow: file.py → jobs.py → **`format_price`**, which prices each job that is not done
and adds up the prices. It returns these lines; the module at the right makes a line:

    c4_1b_pose: 1,176,764,416 parameters, …; 7.9 hours, 63 GPU-hours; …       price_training.py
    c4_1b_pose-last-960: 177 documents, …; 0.076 GPU-hours                    price_measurement.py
    text: data/c4 is prepared, 20.9 GB                                        price_training.py
    disk: 218.6 GB, of which run folders 197.7 and texts 20.9                 price_training.py
    1 of 2 models to train, 1 of 2 to measure: 63.1 GPU-hours (predicted), …
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.experiment.file import Experiment
from olmo_sparsity.experiment.job import Job
from olmo_sparsity.experiment.jobs import check_no_other_work, jobs_of
from olmo_sparsity.experiment.measurement_job import MeasurementJob
from olmo_sparsity.experiment.measurements import Measurement
from olmo_sparsity.experiment.price_measurement import PriceCache, price_config
from olmo_sparsity.experiment.price_training import TrainingPrice, describe_texts, price_training
from olmo_sparsity.experiment.training_job import TrainingJob
from olmo_sparsity.training.estimate.hardware import Hardware


def format_price(
    experiment: Experiment, hardware: Hardware | None, gpu: str | None, gpu_hour: float | None
) -> str:
    """Return what each unfinished job costs, and their sum, as text. Raise ConfigError, with the
    model's name, for a training that would not start.

    Args:
        hardware: The GPUs of a training; None: no hours are predicted.
        gpu: The name of the GPU that measures; None: no hours are predicted.
        gpu_hour: Dollars a GPU-hour; None: no money is predicted.
    """
    if gpu_hour is not None and not gpu_hour > 0:
        raise ConfigError(f"--gpu-hour={gpu_hour:g} must be above 0: dollars a GPU-hour")
    jobs = jobs_of(experiment)
    check_no_other_work(jobs)
    prices = _price_jobs(experiment, jobs, hardware, gpu)

    # A line for each job, and for what several jobs have in common.
    lines = [f"{name}: {price}" for name, price in prices.in_order.items()]
    transfers = [
        measurement for measurement in experiment.measurements if measurement.choices_of is not None
    ]
    if transfers:
        measured_where = f"at the last step and long={transfers[0].long} alone"
        lines.append(f"transfer: {len(transfers)} measurements, {measured_where}")
    lines += describe_texts(prices.of_trainings)

    # The sum.
    num_trainings = sum(job.kind == "train" for job in jobs)
    num_measurements = sum(job.kind == "measure" for job in jobs)
    counts = [f"{len(prices.of_trainings)} of {num_trainings} models to train"]
    if experiment.measurements:
        counts.append(f"{len(prices.of_measurements)} of {num_measurements} to measure")
    if hardware is None:
        total = "pass --gpus N --gpu NAME for hours"
    else:
        total = _format_total(prices, measures=bool(experiment.measurements), gpu_hour=gpu_hour)
    return "\n".join([*lines, f"{', '.join(counts)}: {total}"])


class _MeasurementPrice(NamedTuple):
    """The price of a measurement, as a line of the list."""

    text: str
    gpu_hours: float | None
    """None if the measurement cannot be counted, or the GPU is not known."""

    def __str__(self) -> str:
        return self.text


class _Prices(NamedTuple):
    """The prices of the jobs that are not done."""

    in_order: Mapping[str, TrainingPrice | _MeasurementPrice]
    """The price of each job by its name, in the order in which the jobs run."""

    @property
    def of_trainings(self) -> list[TrainingPrice]:
        """Return the prices of the models that are not trained yet."""
        return [price for price in self.in_order.values() if isinstance(price, TrainingPrice)]

    @property
    def of_measurements(self) -> list[_MeasurementPrice]:
        """Return the prices of the measurements that are not done yet."""
        return [price for price in self.in_order.values() if isinstance(price, _MeasurementPrice)]


def _price_jobs(
    experiment: Experiment, jobs: Collection[Job], hardware: Hardware | None, gpu: str | None
) -> _Prices:
    """Return the prices of the jobs that are not done. A training that would not start is an error;
    a measurement that cannot be counted has a line that says why."""
    cache = PriceCache()
    # Only measurements that choose targets have options that say how many targets there are. The
    # first measurement of an experiment always chooses.
    choosing_options = experiment.measurements[0].options if experiment.measurements else {}
    prices: dict[str, TrainingPrice | _MeasurementPrice] = {}
    for job in jobs:
        # The figure, the third kind of job, takes no GPU.
        if job.state().name == "done":
            continue
        if isinstance(job, TrainingJob):
            prices[job.name] = price_training(job.model, hardware)
        elif isinstance(job, MeasurementJob):
            prices[job.name] = _price_measurement(job.measurement, choosing_options, gpu, cache)
    return _Prices(prices)


def _price_measurement(
    measurement: Measurement,
    choosing_options: Mapping[str, Any],
    gpu: str | None,
    cache: PriceCache,
) -> _MeasurementPrice:
    """Return the price of a measurement, or why it cannot be counted.

    Args:
        choosing_options: Options of the measurement that chooses the targets. Only it has the
            options that say how many targets there are.
        gpu: The name of the GPU; None: no hours are predicted.
        cache: What earlier calls have read and counted.
    """
    options = dict(choosing_options) | {
        "distant_states": measurement.distant_states,
        "long": measurement.long,
    }
    settings = measurement.model.settings
    try:
        price = price_config(settings, options, measurement.text, gpu, cache)
    except (ConfigError, DataError) as error:
        return _MeasurementPrice(f"cannot be counted: {error}", gpu_hours=None)
    return _MeasurementPrice(str(price), price.gpu_hours)


def _format_total(prices: _Prices, *, measures: bool, gpu_hour: float | None) -> str:
    """Return the GPU-hours of all jobs as text.

    Args:
        measures: Whether the experiment measures anything, done or not.
        gpu_hour: Dollars a GPU-hour; None: no money is predicted.
    """
    training_hours = sum(price.gpu_hours or 0.0 for price in prices.of_trainings)
    measuring_hours = sum(price.gpu_hours or 0.0 for price in prices.of_measurements)
    total_hours = training_hours + measuring_hours
    text = f"{total_hours:,.3g} GPU-hours (predicted)"
    if measures:
        text += f", {measuring_hours:.2g} of them measuring"
    if gpu_hour is not None:
        text += f": ${total_hours * gpu_hour:,.0f} at ${gpu_hour:g} a GPU-hour"
    num_uncounted = sum(price.gpu_hours is None for price in prices.of_measurements)
    if num_uncounted:
        text += f"; {num_uncounted} could not be counted"
    return text
