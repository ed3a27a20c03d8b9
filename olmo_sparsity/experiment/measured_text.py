"""Read the text that a measurement would read, before its model is trained, to count its documents.

    prepared, or a file    its documents; nothing of a model is needed but the tokenizer
    C4, not prepared       made-up texts of C4's lengths: of 25,000 held-out documents 177 have
                           4,160 tokens or more (`documents_of_lengths`)
    another text           DataError: prepare it first

Place in the flow: a config and a `MeasureRequest` → **`read_measured_text`** →
price_measurement.py, which counts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.analysis.measurement.request import MeasureRequest
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.load import LoadedModel
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.inputs import open_documents

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


class MeasuredText(NamedTuple):
    """The documents that a measurement would read, or made-up ones."""

    documents: Documents
    has_real_lengths: bool


def read_measured_text(
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
