"""Estimate what an experiment costs before anything is trained.

Place in the flow: file → jobs → **price**. A measurement is counted with a model of the config's
shape that computes nothing, on the prepared text, or on texts of C4's lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from olmo_sparsity.analysis.measurement.estimate import Untrained, estimate_untrained
from olmo_sparsity.analysis.measurement.plan import (
    MeasureRequest,
    Plan,
    fit_to_limit,
    within_limit,
)
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.config.sections import ModelConfig, RunConfig
from olmo_sparsity.experiment.file import Experiment, Measurement
from olmo_sparsity.experiment.jobs import Job, jobs_of
from olmo_sparsity.experiment.price_training import (
    TrainingPrice,
    describe_texts,
    price_training,
)
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.load import LoadedModel, describe_model
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.training.estimate import Hardware, count_parameters
from olmo_sparsity.training.memory import without_memory
from olmo_sparsity.training.runs import training_text
from olmo_sparsity.training.start import cost_of

C4_LENGTH = NormalDist(math.log(280), 1.1)
"""Logarithm of a C4 document's tokens: so 119, 35 and 7 of 1,000 reach 1,024, 2,048 and 4,096
tokens; 119, 34 and 8 were counted, by 4.3 characters a token."""

FROM_HUB = ("c4", "c4_files")


def format_price(
    experiment: Experiment, hardware: Hardware | None, gpu: str | None, gpu_hour: float | None
) -> str:
    """Return what each unfinished job costs, and their sum. `gpu_hour`: dollars a GPU-hour. Raise
    ConfigError, with the model's name, for a training that would not start."""
    if gpu_hour is not None and not gpu_hour > 0:
        raise ConfigError(f"--gpu-hour={gpu_hour:g} must be above 0: dollars a GPU-hour")
    jobs = [job for job in jobs_of(experiment) if job.kind != "figure"]
    todo = [job for job in jobs if job.state().name != "done"]
    lines = []
    trainings: list[TrainingPrice] = []
    hours = {"train": 0.0, "measure": 0.0}
    num_unknown = 0
    known = Known()
    choosing_options = experiment.measurements[0].options if experiment.measurements else {}
    for job in todo:
        line: object
        hours_of_job: float | None
        if job.model is not None:
            line = training = price_training(job.model, hardware)
            trainings.append(training)
            hours_of_job = training.gpu_hours
        else:
            assert job.measurement is not None
            line, hours_of_job = _price_measurement(job.measurement, choosing_options, gpu, known)
            num_unknown += hours_of_job is None
        lines.append(f"{job.name}: {line}")
        hours[job.kind] += hours_of_job or 0.0
    lines += describe_texts(trainings)
    counts = [f"{_count(todo, 'train')} of {_count(jobs, 'train')} models to train"]
    if experiment.measurements:
        counts.append(f"{_count(todo, 'measure')} of {_count(jobs, 'measure')} to measure")
    price = "pass --gpus N --gpu NAME for hours"
    if hardware is not None:
        total = sum(hours.values())
        price = f"{total:,.3g} GPU-hours (predicted)"
        if experiment.measurements:
            price += f", {hours['measure']:.2g} of them measuring"
        if gpu_hour is not None:
            price += f": ${total * gpu_hour:,.0f} at ${gpu_hour:g} a GPU-hour"
        if num_unknown:
            price += f"; {num_unknown} could not be counted"
    return "\n".join([*lines, f"{', '.join(counts)}: {price}"])


def _count(jobs: list[Job], kind: str) -> int:
    return sum(job.kind == kind for job in jobs)


def _price_measurement(
    measurement: Measurement,
    choosing_options: Mapping[str, Any],
    gpu: str | None,
    known: Known,
) -> tuple[str, float | None]:
    """Return the price of a measurement as text, and its GPU-hours; None if they cannot be counted.
    `choosing_options`: of the measurement that chooses the targets, as only it has those that say
    how many there are."""
    options = dict(choosing_options) | {
        "distant_states": measurement.distant_states,
        "long": measurement.long,
    }
    settings = measurement.model.settings
    try:
        cost = price_config(settings, options, measurement.text, gpu, known)
    except (ConfigError, DataError) as error:
        return f"cannot be counted: {error}", None
    return str(cost), cost.gpu_hours


@dataclass
class Known:
    """What several measurements share."""

    texts: dict[tuple[Any, ...], Documents] = field(default_factory=dict)
    prices: dict[str, MeasurementPrice] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasurementPrice:
    num_documents: int
    num_targets: float
    forwards: float
    gpu_hours: float | None
    """None without a GPU's name."""

    source: str
    """Where the documents' lengths are from, if not from the text itself."""

    def __str__(self) -> str:
        line = (
            f"{self.num_documents:,} documents{self.source}, "
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
    known: Known | None = None,
) -> MeasurementPrice:
    """Return the price of measuring a checkpoint of this config, which need not exist. `options`:
    those of `measure`; `known` keeps documents and prices for the next call."""
    known = known or Known()
    request = MeasureRequest.of(model="untrained", documents=text, **options)
    shape = repr((config.model, config.data, text, gpu, sorted(options.items())))
    if shape in known.prices:
        return known.prices[shape]
    model = model_of(config)
    key = (text, repr(config.data), repr(request.reading))
    if key not in known.texts:
        known.texts[key] = _documents(config, model, request, text)
    documents = known.texts[key]
    settings = fit_to_limit(request.settings, model.max_positions)
    if settings.windows.has_all:
        documents = within_limit(documents, model, num_prefix=0)
    plan = Plan.of(model, documents, settings)
    cost: Untrained = estimate_untrained(plan, gpu)
    known.prices[shape] = MeasurementPrice(
        num_documents=len(plan.measured),
        num_targets=cost.num_targets,
        forwards=cost.forwards,
        gpu_hours=cost.gpu_hours,
        source=" (by C4's lengths)" if documents.name == OF_LENGTHS else "",
    )
    return known.prices[shape]


def model_of(config: RunConfig) -> LoadedModel:
    """Return a stand-in for a model of this config: its vocabulary, positions and number of
    parameters, in one narrow layer, as it is only counted and never run."""
    resolved, _, _ = cost_of(replace(config, engine=replace(config.engine, name="single")))
    sizes = resolved.model
    num_parameters = count_parameters(without_memory(sizes))
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
    """Return the documents that would be measured; of a text that is not prepared, others of its
    lengths."""
    given = dict(vars(request.reading))
    limit = given.pop("max_documents")
    try:
        if text is not None:
            from olmo_sparsity.data.tokenizer import load_tokenizer

            # A tokenizer that is trained on the text exists once the text is prepared.
            trained = Path(config.data.folder) / "tokenizer.json"
            if config.data.tokenizer.name is None and not trained.exists():
                raise DataError(
                    f"{config.data.folder} is not prepared; run `olmo-sparsity prepare` first"
                )
            name = config.data.tokenizer.name or str(trained)
            model = replace(model, tokenizer=load_tokenizer(name))
        else:
            from olmo_sparsity.data.shards import open_shards

            model = replace(model, tokenizer=open_shards(config.data, "heldout").tokenizer)
        return open_documents(text, model, limit, **given)
    except DataError:
        corpus = config.data.corpus
        if corpus.source not in FROM_HUB or (text is not None and "c4" not in text):
            raise
    # C4 has 365 million documents.
    number = int(config.data.heldout_share * (corpus.max_documents or 365_000_000))
    return documents_of_lengths(number, request.reading.min_tokens or 1, limit)


def documents_of_lengths(number: int, least: int, limit: int | None) -> Documents:
    """Return texts of at least so many tokens, of `number` with C4's lengths, `limit` at most."""
    share = 1 - C4_LENGTH.cdf(math.log(least))
    count = int(number * share)
    kept = min(count, limit or 2_000)
    if kept < 4:
        raise DataError(
            f"about {count} held-out documents have {least} tokens or more; hold more out"
        )
    # The middles of equal shares of the distribution above `least`.
    places = 1 - share * (np.arange(kept) + 0.5) / kept
    lengths = [int(math.exp(C4_LENGTH.inv_cdf(place))) for place in places]
    # In no order of length, as halves of the documents have different purposes.
    order = np.random.default_rng(0).permutation(kept)
    texts = [np.arange(lengths[place]) % 1_000 for place in order]
    return Documents.of(texts, OF_LENGTHS)
