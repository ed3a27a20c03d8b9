"""Collect unrelated text for one explanation, without copies of the explained text.

    explained text of 1,000 tokens, documents to draw from
        → documents until they hold 20,000 tokens, without those that share 32 tokens in a row with
          the explained text
        → one long document, of which each draw takes another part

checking.py draws the unrelated texts of a check from it, and prepared.py those that replace distant
text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.inputs import open_documents

SAME_TEXT = 32
"""Two texts that share this many tokens in a row are taken for copies of one text."""


def unrelated_documents(model: LoadedModel, unrelated: Any, document: Document) -> Documents:
    """Return one long document, joined of several, from which unrelated texts are drawn. Documents
    that share a passage with the explained text are left out, as they may be the same text.
    Raise DataError if too little text is left.

    Args:
        model: The model, in whose tokens the text is read.
        unrelated: Text in any form that `open_documents` reads.
        document: The explained text.
    """
    length = len(document.tokens)
    # Enough that several draws do not overlap.
    num_needed = max(20 * length, 20_000)
    own_passages = set(passages(document.tokens))
    texts = []
    num_tokens = 0
    # Enough if documents have 50 tokens on average. A limit must be 2 or more.
    max_documents = max(2, num_needed // 50)
    for other in open_documents(unrelated, model, limit=max_documents):
        if not own_passages.isdisjoint(passages(other.tokens)):
            continue
        texts.append(other.tokens)
        num_tokens += len(other.tokens)
        if num_tokens >= num_needed:
            break
    if num_tokens < length:
        raise DataError(
            f"unrelated: {num_tokens:,} of its tokens share no passage with this text, of "
            f"{length:,} needed; pass more text"
        )
    joined = Document(np.concatenate(texts), number=1, tokenizer=model.tokenizer)
    return Documents("unrelated text", [joined])


def passages(tokens: np.ndarray, length: int = SAME_TEXT) -> Iterator[bytes]:
    """Yield all runs of `length` tokens as bytes, or the text itself if it is shorter."""
    tokens = tokens.astype("<i8")
    num_runs = max(1, len(tokens) - length + 1)
    for first in range(num_runs):
        yield tokens[first : first + length].tobytes()
