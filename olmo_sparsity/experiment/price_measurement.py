"""Estimate what measuring a model costs before the model is trained.

    price_config(config, {"long": 960, "short": 128, "stride": 64}, gpu="h100")
    # 177 documents (by C4's lengths), about 528 targets, 4.6e+07 token-forwards; 0.076 GPU-hours

Place in the flow: the config of a model → **`price_config`** → price.py, `measure --dry-run`.

There is no model yet, so the token-forwards are counted with a stand-in (`stand_in_for`), which has
the model's vocabulary and positions and is never run. Nor is there always a text: one of the hub
that is not prepared has unknown lengths, and made-up texts of C4's lengths replace it
(measured_text.py). Where a measurement plans, cuts and counts, this does, too, by the same
functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from olmo_sparsity.analysis.measurement.estimate import estimate_untrained
from olmo_sparsity.analysis.measurement.fitting import fit_to_limit
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.reading import within_limit
from olmo_sparsity.analysis.measurement.request import MeasureRequest
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.experiment.measured_text import MeasuredText, read_measured_text
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.models.load import LoadedModel, describe_model
from olmo_sparsity.text.split import split_long_documents
from olmo_sparsity.training.dry_run import describe_run
from olmo_sparsity.training.estimate.meta_model import without_memory
from olmo_sparsity.training.runs import training_text


@dataclass(frozen=True)
class MeasurementPrice:
    """What a measurement costs."""

    num_documents: int
    num_targets: float
    """About how many targets are evaluated, with placebo targets."""

    forwards: float
    """How many tokens go through the model (token-forwards)."""

    gpu_hours: float | None
    """None without a GPU's name."""

    has_real_lengths: bool
    """Whether the documents are those of the text, not made up with C4's lengths."""

    def __str__(self) -> str:
        lengths = "" if self.has_real_lengths else " (by C4's lengths)"
        line = (
            f"{self.num_documents:,} documents{lengths}, "
            f"about {self.num_targets:,.0f} targets, {self.forwards:.2g} token-forwards"
        )
        if self.gpu_hours is not None:
            line += f"; {self.gpu_hours:.2g} GPU-hours"
        return line


class TextKey(NamedTuple):
    """All that determines which documents are read."""

    text: str | None
    """The text that is measured; None: the held-out text of the config."""

    data: str
    """The section `data` of the config, as text."""

    reading: str
    """The options by which documents are read and chosen, as text."""


@dataclass
class PriceCache:
    """Documents and prices that several measurements of an experiment have in common."""

    texts: dict[TextKey, MeasuredText] = field(default_factory=dict)
    """Documents by the text and how it is read."""

    prices: dict[str, MeasurementPrice] = field(default_factory=dict)
    """Prices by all that they depend on: seeds of one model cost the same."""


def price_config(
    config: RunConfig,
    options: Mapping[str, Any],
    text: str | None = None,
    gpu: str | None = None,
    cache: PriceCache | None = None,
) -> MeasurementPrice:
    """Return the price of measuring a checkpoint of a config. The checkpoint need not exist.

    Args:
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

    model = stand_in_for(config)
    text_key = TextKey(text, repr(config.data), repr(request.reading))
    if text_key not in cache.texts:
        cache.texts[text_key] = read_measured_text(config, model, request, text)
    price = _price(config, model, request, cache.texts[text_key], gpu)
    cache.prices[price_key] = price
    return price


def _price(
    config: RunConfig,
    model: LoadedModel,
    request: MeasureRequest,
    text: MeasuredText,
    gpu: str | None,
) -> MeasurementPrice:
    """Return the price of a measurement whose documents are read. They are cut and counted in the
    steps of a measurement (analysis/measurement/planning.py).

    Args:
        model: The stand-in for the model of the config.
        gpu: The name of the GPU; None: no hours are predicted.
    """
    # Windows of `all` are cut to the model's limit, before documents are chosen by it.
    settings = fit_to_limit(request.settings, model.max_positions)
    documents = text.documents
    if request.reading.split_long and model.max_positions is not None:
        documents = split_long_documents(documents, model.max_positions, config.run_folder)
    if settings.windows.has_all:
        documents = within_limit(documents, model, num_prefix=0)
    plan = Plan.of(model, documents, settings)
    counted = estimate_untrained(plan, gpu)
    return MeasurementPrice(
        num_documents=len(plan.measured_numbers),
        num_targets=counted.num_targets,
        forwards=counted.forwards,
        gpu_hours=counted.gpu_hours,
        has_real_lengths=text.has_real_lengths,
    )


def stand_in_for(config: RunConfig) -> LoadedModel:
    """Return a stand-in for a model of this config. It has the vocabulary, the positions and the
    number of parameters, but one narrow layer: it is counted and never run."""
    # On one process, so that no engine for several is asked for, whatever the config names.
    on_one_process = replace(config, engine=replace(config.engine, name="single"))
    sizes = describe_run(on_one_process).config.model
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
