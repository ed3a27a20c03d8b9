"""Split what a model wrote before its answer into sentences.

Place in the flow: tokens of reasoning and answer → **spans of the reasoning's sentences**, each of
which is a source of the answer, and a statement over what precedes it (prompt.py, statements.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.windows import Spans

CLOSING = "</think>"

TAGGED = re.compile(r"(\s*<[\w-]+>)?(.*?)(</[\w-]+>\s*)?", re.DOTALL)
"""Opening tag, text, closing tag."""

LEAST_TOKENS = 5
"""Of a sentence. A shorter one is joined to the next, or the last one to that before."""


def num_reasoning(ids: Sequence[int], tokenizer: Tokenizer | None) -> int:
    """Return how many tokens precede the answer: those up to `</think>` and the white space after
    it, or 0."""
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
    match = TAGGED.fullmatch("".join(texts))
    assert match is not None
    ends = _ends(texts)
    first = int(np.searchsorted(ends, match.start(2), side="right"))
    last = int(np.searchsorted(ends, match.end(2), side="right"))
    if last <= first or not match[2].strip():
        return []
    # By themselves, as statements are: an open quotation before them does not reach into them.
    inner = Document(np.array(ids[first:last]), tokenizer=tokenizer)
    sentence_ends = first + inner.units("sentences", 0, last - first).end
    spans = list[tuple[int, int]]()
    begin = first
    for end in sentence_ends.tolist():
        if end - begin >= LEAST_TOKENS:
            spans.append((begin, end))
            begin = end
    if begin < last:  # what is left is too short
        if spans:
            begin = spans.pop()[0]
        spans.append((begin, last))
    return spans


def _ends(texts: Sequence[str]) -> np.ndarray:
    return np.cumsum([len(text) for text in texts], dtype=int)
