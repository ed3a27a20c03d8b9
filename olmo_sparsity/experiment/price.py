"""Estimate what an experiment costs before anything is trained.

Place in the flow: file.py → jobs.py → **`format_price`**, which prices each job that is not done
and adds up the prices:

    a training      FLOPs, memory and disk, as `train --dry-run` counts them (price_training.py)
    a measurement   its token-forwards (`price_config`), counted by a dry run on the prepared text

There is no model yet, so measurements are counted with a stand-in that has its vocabulary and
positions, and is never run. Nor is there always a text: one of the hub that is not prepared has
unknown lengths, and texts of C4's lengths replace it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.analysis.measurement.estimate import Untrained, estimate_untrained
from olmo_sparsity.analysis.measurement.fitting import fit_to_limit
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.reading import within_limit
from olmo_sparsity.analysis.measurement.request import MeasureRequest
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.experiment.file import Experiment
from olmo_sparsity.experiment.jobs import Job, MeasurementJob, TrainingJob, jobs_of
from olmo_sparsity.experiment.measurements import Measurement
from olmo_sparsity.experiment.price_training import TrainingPrice, describe_texts, price_training
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.load import LoadedModel, describe_model
from olmo_sparsity.models.transformers_folder import count_parameters
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.text.split import split_long_documents
from olmo_sparsity.training.dry_run import cost_of
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.memory_formulas import without_memory
from olmo_sparsity.training.runs import training_text

C4_LENGTH = NormalDist(math.log(280), 1.1)
"""Distribution of the logarithm of a C4 document's tokens: so 119, 35 and 7 of 1,000 reach 1,024,
2,048 and 4,096 tokens; 119, 34 and 8 were counted, by 4.3 characters a token."""

C4_DOCUMENTS = 365_000_000
"""Documents of the English C4."""

DEFAULT_LIMIT = 2_000
"""Most documents of C4's lengths that are counted, without --max-documents."""

SOURCES_OF_C4 = ("c4", "c4_files")
"""Values of data.corpus.source whose documents are taken to have C4's lengths."""


def format_price(
    experiment: Experiment, hardware: Hardware | None, gpu: str | None, gpu_hour: float | None
) -> str:
    """Return what each unfinished job costs, and their sum, as text. Raise ConfigError, with the
    model's name, for a training that would not start.

    experiment: The experiment.
    hardware: The GPUs of a training; None: no hours are predicted.
    gpu: The name of the GPU that measures; None: no hours are predicted.
    gpu_hour: Dollars a GPU-hour; None: no money is predicted.
    """
    if gpu_hour is not None and not gpu_hour > 0:
        raise ConfigError(f"--gpu-hour={gpu_hour:g} must be above 0: dollars a GPU-hour")
    jobs = [job for job in jobs_of(experiment) if job.kind != "figure"]
    todo = [job for job in jobs if job.state().name != "done"]
    cache = PriceCache()
    # Only measurements that choose targets have options that say how many; the first always does.
    choosing_options = experiment.measurements[0].options if experiment.measurements else {}
    training_prices: dict[str, TrainingPrice] = {}
    measurement_prices: dict[str, _CountedPrice] = {}
    # In the order of the jobs. A training that would not start is an error; a
    # measurement that cannot be counted is a line of its own.
    for job in todo:
        if isinstance(job, TrainingJob):
            training_prices[job.name] = price_training(job.model, hardware)
        elif isinstance(job, MeasurementJob):
            measurement_prices[job.name] = _price_measurement(
                job.measurement, choosing_options, gpu, cache
            )

    # A line for each job, and for what several jobs have in common.
    prices: dict[str, object] = {**training_prices, **measurement_prices}
    lines = [f"{job.name}: {prices[job.name]}" for job in todo]
    transfers = [
        measurement for measurement in experiment.measurements if measurement.choices_of is not None
    ]
    if transfers:
        points = f"at the last step and long={transfers[0].long} alone"
        lines.append(f"transfer: {len(transfers)} measurements, {points}")
    lines += describe_texts(training_prices.values())

    # The sum.
    counts = [f"{len(training_prices)} of {_count(jobs, 'train')} models to train"]
    if experiment.measurements:
        counts.append(f"{len(measurement_prices)} of {_count(jobs, 'measure')} to measure")
    total = "pass --gpus N --gpu NAME for hours"
    if hardware is not None:
        training_hours = [price.gpu_hours for price in training_prices.values()]
        measurement_hours = [price.gpu_hours for price in measurement_prices.values()]
        total = _format_total(
            training_hours, measurement_hours if experiment.measurements else None, gpu_hour
        )
    return "\n".join([*lines, f"{', '.join(counts)}: {total}"])


def _format_total(
    training_hours: Sequence[float | None],
    measurement_hours: Sequence[float | None] | None,
    gpu_hour: float | None,
) -> str:
    """Return the GPU-hours of all jobs as text.

    training_hours: GPU-hours of each training.
    measurement_hours: The same of each measurement, None for one that could not be counted. None in
        place of a list: the experiment measures nothing.
    gpu_hour: Dollars a GPU-hour; None: no money is predicted.
    """
    measuring = sum(hours or 0.0 for hours in measurement_hours or ())
    total = sum(hours or 0.0 for hours in training_hours) + measuring
    text = f"{total:,.3g} GPU-hours (predicted)"
    if measurement_hours is not None:
        text += f", {measuring:.2g} of them measuring"
    if gpu_hour is not None:
        text += f": ${total * gpu_hour:,.0f} at ${gpu_hour:g} a GPU-hour"
    num_unknown = sum(hours is None for hours in measurement_hours or ())
    if num_unknown:
        text += f"; {num_unknown} could not be counted"
    return text


def _count(jobs: list[Job], kind: str) -> int:
    """Return the number of jobs of a kind."""
    return sum(job.kind == kind for job in jobs)


class _CountedPrice(NamedTuple):
    """What a measurement costs, as a line of the list."""

    text: str
    gpu_hours: float | None
    """None if the measurement cannot be counted."""

    def __str__(self) -> str:
        return self.text


def _price_measurement(
    measurement: Measurement,
    choosing_options: Mapping[str, Any],
    gpu: str | None,
    cache: PriceCache,
) -> _CountedPrice:
    """Return the price of a measurement, or why it cannot be counted.

    measurement: The measurement.
    choosing_options: Options of the measurement that chooses the targets. Only it has the options
        that say how many targets there are.
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
        return _CountedPrice(f"cannot be counted: {error}", None)
    return _CountedPrice(str(price), price.gpu_hours)


@dataclass
class PriceCache:
    """Documents and prices that several measurements of an experiment have in common."""

    documents: dict[tuple[Any, ...], Documents] = field(default_factory=dict)
    """Documents by the text and how it is read."""

    prices: dict[str, MeasurementPrice] = field(default_factory=dict)
    """Prices by all that they depend on: seeds of one model cost the same."""


@dataclass(frozen=True)
class MeasurementPrice:
    """What a measurement costs."""

    num_documents: int
    num_targets: float
    forwards: float
    """Token-forwards."""

    gpu_hours: float | None
    """None without a GPU's name."""

    lengths_from: str
    """Where the documents' lengths are from, in words; empty if they are those of the text."""

    def __str__(self) -> str:
        line = (
            f"{self.num_documents:,} documents{self.lengths_from}, "
            f"about {self.num_targets:,.0f} targets, {self.forwards:.2g} token-forwards"
        )
        if self.gpu_hours is not None:
            line += f"; {self.gpu_hours:.2g} GPU-hours"
        return line


def price_config(
    config: RunConfig,
    options: Mapping[str, Any],
    text: str | None = None,
    gpu: str | None = None,
    cache: PriceCache | None = None,
) -> MeasurementPrice:
    """Return the price of measuring a checkpoint of a config. The checkpoint need not exist.

    config: The config of the model.
    options: Options of `measure`.
    text: The text that is measured; None: the held-out text of the config.
    gpu: The name of the GPU; None: no hours are predicted.
    cache: Keeps documents and prices for the next call.
    """
    cache = cache or PriceCache()
    request = MeasureRequest.of(model="untrained", documents=text, **options)
    price_key = repr((config.model, config.data, text, gpu, sorted(options.items())))
    if price_key in cache.prices:
        return cache.prices[price_key]

    # Read the documents.
    model = stand_in_for(config)
    documents_key = (text, repr(config.data), repr(request.reading))
    if documents_key not in cache.documents:
        cache.documents[documents_key] = _documents(config, model, request, text)
    documents = cache.documents[documents_key]

    # Count, in the steps of a measurement (analysis/measurement/planning.py).
    settings = fit_to_limit(request.settings, model.max_positions)
    if request.reading.split_long and model.max_positions is not None:
        documents = split_long_documents(documents, model.max_positions, config.run_folder)
    if settings.windows.has_all:
        documents = within_limit(documents, model, num_prefix=0)
    plan = Plan.of(model, documents, settings)
    cost: Untrained = estimate_untrained(plan, gpu)
    cache.prices[price_key] = MeasurementPrice(
        num_documents=len(plan.measured),
        num_targets=cost.num_targets,
        forwards=cost.forwards,
        gpu_hours=cost.gpu_hours,
        lengths_from=" (by C4's lengths)" if documents.name == OF_LENGTHS else "",
    )
    return cache.prices[price_key]


def stand_in_for(config: RunConfig) -> LoadedModel:
    """Return a stand-in for a model of this config. It has the vocabulary, the positions and the
    number of parameters, but one narrow layer: it is counted and never run."""
    resolved, _, _ = cost_of(replace(config, engine=replace(config.engine, name="single")))
    sizes = resolved.model
    num_parameters = count_parameters(without_memory(sizes))
    # As narrow as a model can be, so that it takes no memory, whatever the size of the real one.
    narrow = ModelConfig(
        d_model=8,
        n_heads=1,
        n_layers=1,
        vocab_size=sizes.vocab_size,
        embedding_size=sizes.embedding_size,
        eos_token_id=sizes.eos_token_id,
        pad_token_id=sizes.pad_token_id,
        max_sequence_length=sizes.max_sequence_length,
        weight_tying=True,
    )
    name = config.run_folder
    loaded = describe_model(build_model(narrow), tokenizer=None, name=name, weights_sha256=None)
    return replace(loaded, num_parameters=num_parameters, text=training_text(config.data))


OF_LENGTHS = "texts of C4's lengths"
"""Name of documents that `documents_of_lengths` has returned."""


def _documents(
    config: RunConfig, model: LoadedModel, request: MeasureRequest, text: str | None
) -> Documents:
    """Return the documents that would be measured. If C4 is not prepared, return others that have
    its lengths; raise DataError for another text that is not prepared.

    config: The config of the model.
    model: Its stand-in.
    request: The measurement.
    text: The text that is measured; None: the held-out text of the config.
    """
    reading = dict(vars(request.reading))
    limit = reading.pop("max_documents")
    del reading["split_long"]  # `price_config` splits
    try:
        if text is not None:
            model = replace(model, tokenizer=_tokenizer_of(config))
        else:
            from olmo_sparsity.data.shards import open_shards

            model = replace(model, tokenizer=open_shards(config.data, "heldout").tokenizer)
        return open_documents(text, model, limit, **reading)
    except DataError:
        corpus = config.data.corpus
        if corpus.source not in SOURCES_OF_C4 or (text is not None and "c4" not in text):
            raise
    num_heldout = int(config.data.heldout_share * (corpus.max_documents or C4_DOCUMENTS))
    return documents_of_lengths(num_heldout, request.reading.min_tokens or 1, limit)


def _tokenizer_of(config: RunConfig) -> Tokenizer:
    """Return the tokenizer of a config. Raise DataError if it is to be trained on the text and was
    not yet."""
    from olmo_sparsity.data.tokenizer import load_tokenizer

    trained = Path(config.data.folder) / "tokenizer.json"
    if config.data.tokenizer.name is None and not trained.exists():
        raise DataError(f"{config.data.folder} is not prepared; run `olmo-sparsity prepare` first")
    return load_tokenizer(config.data.tokenizer.name or str(trained))


def documents_of_lengths(num_documents: int, min_tokens: int, limit: int | None) -> Documents:
    """Return made-up texts of C4's lengths.

    num_documents: Number of documents of all lengths. Only the long ones of them are returned.
    min_tokens: Smallest number of tokens of a text.
    limit: Largest number of texts; None: `DEFAULT_LIMIT`.
    """
    fraction_long = 1 - C4_LENGTH.cdf(math.log(min_tokens))
    num_long = int(num_documents * fraction_long)
    num_texts = min(num_long, limit or DEFAULT_LIMIT)
    # One half sets the threshold of targets, the other is measured; each needs two.
    if num_texts < 4:
        raise DataError(
            f"about {num_long} held-out documents have {min_tokens} tokens or more; hold more out"
        )
    # The middles of equally probable intervals of the distribution above `min_tokens`.
    quantiles = 1 - fraction_long * (np.arange(num_texts) + 0.5) / num_texts
    lengths = [int(math.exp(C4_LENGTH.inv_cdf(quantile))) for quantile in quantiles]
    # In random order, not by length, as halves of the documents have different purposes.
    order = np.random.default_rng(0).permutation(num_texts)
    texts = [np.arange(lengths[number]) % 1_000 for number in order]
    return Documents.of(texts, OF_LENGTHS)
