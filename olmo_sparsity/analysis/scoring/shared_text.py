"""Open the documents whose losses are compared by place, the same for all checkpoints.

    text = open_shared_text("heldout.jsonl", first_model, settings, field="text", prefix="auto")
    text.check_tokenizer(other_model)      # DataError if this model would read other tokens
    text.prompts()                         # a `Prompt` for each document

losses_by_place.py calls it. Each document has the same number of tokens, so that every place has a
loss in every document.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.analysis.options import LossSettings
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.models.prompts import Prompt
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.text.vocabulary import encode_alike, tokenizer_fingerprint

MIN_DOCUMENTS = 8
"""With fewer documents an error is raised, as intervals over fewer mean nothing."""


@dataclass(frozen=True)
class SharedText:
    """The documents that all checkpoints read, as tokens of the first model's tokenizer."""

    documents: Documents
    """Documents of one length. Their numbers are 0, 1, 2, …"""

    prefix: tuple[int, ...]
    """Token IDs before each document; empty without a prefix."""

    tokenizer: Tokenizer
    """The tokenizer of the first model. Models with another one would read other tokens."""

    model_name: str
    """The name of the first model, for messages."""

    def identity(self) -> dict[str, Any]:
        """Return what identifies the text, for the folder that stores losses on it."""
        return {
            "text": self.documents.fingerprint,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "prefix": list(self.prefix),
        }

    def check_tokenizer(self, model: LoadedModel) -> None:
        """Raise DataError if a model's tokenizer encodes these documents otherwise."""
        characters = "\n".join("".join(document.texts) for document in self.documents)
        if not encode_alike(self.tokenizer, _tokenizer_of(model), characters):
            raise DataError(
                f"{model.name} has another tokenizer than {self.model_name}, so its losses are of "
                "other tokens; pass models of one tokenizer"
            )

    def prompts(self) -> list[Prompt]:
        """Return each document as a prompt, whose continuation is scored: all tokens if a prefix
        precedes them, else all tokens except the first, which nothing predicts."""
        prompts = []
        for document in self.documents:
            tokens = np.asarray(document.tokens, np.int64)
            if self.prefix:
                prompts.append(Prompt(np.array(self.prefix, np.int64), tokens))
            else:
                # A prompt needs a token before its continuation.
                prompts.append(Prompt(tokens[:1], tokens[1:]))
        return prompts


def open_shared_text(
    text: Any, first_model: LoadedModel, settings: LossSettings, field: str, prefix: str
) -> SharedText:
    """Open and encode the documents that are long enough, each cut to `length` tokens. Raise
    DataError if they are too few.

    Args:
        text: Text in any form that `open_documents` reads.
        first_model: The model whose tokenizer encodes it.
        settings: The length of a document, and the largest number of them.
        field: The field of a record that holds the text.
        prefix: The option `prefix`.
    """
    length = settings.length
    if isinstance(text, Documents):
        documents = text
    else:
        documents = open_documents(
            text, first_model, settings.documents, field=field, min_tokens=length
        )
    # Documents that a user opened may be shorter, and more than `documents` says.
    long_enough = (document for document in documents if len(document.tokens) >= length)
    items = [
        replace(document, tokens=document.tokens[:length], number=number)
        for number, document in enumerate(islice(long_enough, settings.documents))
    ]
    if len(items) < MIN_DOCUMENTS:
        raise DataError(
            f"{documents.name}: {len(items)} documents have {length=} tokens, and "
            f"{MIN_DOCUMENTS} are needed; lower length, or pass more text"
        )
    return SharedText(
        documents=replace(documents, items=items),
        prefix=tuple(first_model.prefix_ids(prefix, items[0].texts[0])),
        tokenizer=_tokenizer_of(first_model),
        model_name=first_model.name,
    )


def _tokenizer_of(model: LoadedModel) -> Tokenizer:
    """Return a model's tokenizer. Raise DataError if it has none."""
    if model.tokenizer is None:
        raise DataError(f"'{model.name}' has no tokenizer")
    return model.tokenizer
