"""Estimate what measuring a model costs before the model is trained.

    price_config(config, {"long": 960, "short": 128, "stride": 64}, gpu="h100")
    # 177 documents (by C4's lengths), about 528 targets, 4.6e+07 token-forwards; 0.076 GPU-hours

Place in the flow: the config of a model → **`price_config`** → price.py, `measure --dry-run`.

There is no model yet, so the token-forwards are counted with a stand-in (`stand_in_for`), which has
the model's vocabulary and positions and is never run. Nor is there always a text: one of the hub
that is not prepared has unknown lengths, and made-up texts of C4's lengths replace it
(`documents_of_lengths`). Where a measurement plans, cuts and counts, this does, too, by the same
functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.analysis.measurement.estimate import estimate_untrained
from olmo_sparsity.analysis.measurement.fitting import fit_to_limit
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.reading import within_limit
from olmo_sparsity.analysis.measurement.request import MeasureRequest
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.models.load import LoadedModel, describe_model
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.text.split import split_long_documents
from olmo_sparsity.training.dry_run import describe_run
from olmo_sparsity.training.estimate.meta_model import without_memory
from olmo_sparsity.training.runs import training_text

C4_LENGTH = NormalDist(math.log(280), 1.1)
"""Distribution of the logarithm of a C4 document's number of tokens. Of 1,000 documents 119, 35 and
7 then have 1,024, 2,048 and 4,096 tokens or more. In C4 itself 119, 34 and 8 were counted, with 4.3
characters a token."""

C4_DOCUMENTS = 365_000_000
"""The number of documents of the English C4."""

MAX_MADE_UP = 2_000
"""The largest number of documents of C4's lengths that are counted, without --max-documents."""

SOURCES_OF_C4 = ("c4", "c4_files")
"""Values of data.corpus.source whose documents are taken to have C4's lengths."""


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


class MeasuredText(NamedTuple):
    """The documents that a measurement would read, or made-up ones."""

    documents: Documents
    has_real_lengths: bool


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
        cache.texts[text_key] = _read_text(config, model, request, text)
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


# --- the text -------------------------------------------------------------------------------------


def _read_text(
    config: RunConfig, model: LoadedModel, request: MeasureRequest, text: str | None
) -> MeasuredText:
    """Return the documents that would be measured. If C4 is not prepared, return others that have
    its lengths; raise DataError for another text that is not prepared.

    Args:
        config: The config of the model.
        model: Its stand-in.
        request: The measurement.
        text: The text that is measured; None: the held-out text of the config.
    """
    reading = dict(vars(request.reading))
    max_documents = reading.pop("max_documents")
    del reading["split_long"]  # `_price` splits
    corpus = config.data.corpus
    try:
        model = replace(model, tokenizer=_tokenizer_of(config, text))
        documents = open_documents(text, model, max_documents, **reading)
        return MeasuredText(documents, has_real_lengths=True)
    except DataError:
        is_text_of_config = text is None or "c4" in text
        if corpus.source not in SOURCES_OF_C4 or not is_text_of_config:
            raise
    num_heldout = int(config.data.heldout_share * (corpus.max_documents or C4_DOCUMENTS))
    min_tokens = request.reading.min_tokens or 1
    documents = documents_of_lengths(num_heldout, min_tokens, max_documents)
    return MeasuredText(documents, has_real_lengths=False)


def _tokenizer_of(config: RunConfig, text: str | None) -> Tokenizer:
    """Return the tokenizer with which a text is read. Raise DataError if it is not known yet.

    Args:
        text: The text that is measured; None: the held-out text of the config, which must be
            prepared.
    """
    if text is None:
        from olmo_sparsity.data.shards import open_shards

        return open_shards(config.data, "heldout").tokenizer

    from olmo_sparsity.data.tokenizer import load_tokenizer

    trained = Path(config.data.folder) / "tokenizer.json"
    if config.data.tokenizer.name is None and not trained.exists():
        raise DataError(f"{config.data.folder} is not prepared; run `olmo-sparsity prepare` first")
    return load_tokenizer(config.data.tokenizer.name or str(trained))


def documents_of_lengths(num_documents: int, min_tokens: int, limit: int | None) -> Documents:
    """Return made-up texts of C4's lengths.

    Args:
        num_documents: The number of documents of all lengths. Only the long ones of them are
            returned.
        min_tokens: The smallest number of tokens of a text.
        limit: The largest number of texts; None: `MAX_MADE_UP`.
    """
    fraction_long = 1 - C4_LENGTH.cdf(math.log(min_tokens))
    num_long = int(num_documents * fraction_long)
    num_texts = min(num_long, limit or MAX_MADE_UP)
    # One half sets the threshold of targets, the other is measured; each needs two.
    if num_texts < 4:
        raise DataError(
            f"about {num_long} held-out documents have {min_tokens} tokens or more; hold more out"
        )
    # The middles of equally probable intervals of the distribution above `min_tokens`, and not
    # random draws: few texts then have the lengths of many, and the price is the same each time.
    quantiles = 1 - fraction_long * (np.arange(num_texts) + 0.5) / num_texts
    lengths = [int(math.exp(C4_LENGTH.inv_cdf(quantile))) for quantile in quantiles]
    # In random order, not by length, as halves of the documents have different purposes.
    order = np.random.default_rng(0).permutation(num_texts)
    # Only lengths are counted, so the tokens are any, below the size of every vocabulary.
    texts = [np.arange(lengths[number]) % 1_000 for number in order]
    return Documents.of(texts, "texts of C4's lengths")
