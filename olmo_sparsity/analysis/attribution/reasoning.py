"""Split what a model wrote before its answer into sentences, each a source of the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.analysis.inputs.documents import Document
from olmo_sparsity.analysis.inputs.windows import Spans

CLOSING = "</think>"
TAGGED = re.compile(r"(\s*<[\w-]+>)?(.*?)(</[\w-]+>\s*)?", re.DOTALL)
LEAST = 5  # tokens of a sentence; a shorter one is joined to the next, or to that before


def num_reasoning(ids: Sequence[int], tokenizer: Tokenizer | None) -> int:
    """Return how many tokens precede the answer, up to `</think>` and white space, or 0."""
    texts = Document(np.array(ids), tokenizer=tokenizer).texts
    before, closing, _ = "".join(texts).partition(CLOSING)
    if not closing:
        return 0
    num = 1 + int(np.searchsorted(_ends(texts), len(before + closing)))
    while num < len(texts) and not texts[num].strip():
        num += 1
    return num


def sentences(ids: Sequence[int], tokenizer: Tokenizer | None) -> Spans:
    """Return first and end token of each sentence, without tags around all of them."""
    texts = Document(np.array(ids), tokenizer=tokenizer).texts
    found, ends = TAGGED.fullmatch("".join(texts)), _ends(texts)
    assert found is not None
    first = int(np.searchsorted(ends, found.start(2), side="right"))
    last = int(np.searchsorted(ends, found.end(2), side="right"))
    if last <= first or not found[2].strip():
        return []
    # By themselves, as statements are.
    inner = Document(np.array(ids[first:last]), tokenizer=tokenizer)
    spans, begin = list[tuple[int, int]](), first
    for end in (first + inner.units("sentences", 0, last - first).end).tolist():
        if end - begin >= LEAST:
            spans.append((begin, end))
            begin = end
    if begin < last:
        spans[-1:] = [(spans[-1][0] if spans else begin, last)]
    return spans


def _ends(texts: Sequence[str]) -> np.ndarray:
    return np.cumsum([len(text) for text in texts], dtype=int)
