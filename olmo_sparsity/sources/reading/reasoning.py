"""Find what a model wrote before its answer, and split it into sentences.

Place in the flow: tokens of a text → **`num_reasoning_tokens`**, which answer_tokens.py cuts off →
**`sentence_spans`** → run_request.py. Each sentence is a source of the answer, and is attributed
itself to what precedes it. For example, with one token a word:

    <think> One note says that Weiss opened it. </think>  Katharina Weiss opened it.
    └───────────── 9 tokens of reasoning ─────────────┘   └──────── answer ────────┘
            └────── one sentence ─────────────┘
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import Spans

OPENING = "<think>"
CLOSING = "</think>"

TAGGED = re.compile(r"(\s*<[\w-]+>)?(?P<text>.*?)(</[\w-]+>\s*)?", re.DOTALL)
"""A text with or without an opening and a closing tag around it."""

MIN_TOKENS = 5
"""Smallest number of tokens of a sentence. A shorter one is joined to the next, or the last one to
that before."""


def num_reasoning_tokens(ids: Sequence[int], tokenizer: Tokenizer | None) -> int:
    """Return how many tokens of a text precede the answer: those up to `</think>` and the white
    space after it; 0 if the text has no `</think>`."""
    texts = Document(np.array(ids), tokenizer=tokenizer).texts
    reasoning, closing, _ = "".join(texts).partition(CLOSING)
    if not closing:
        return 0
    num_tokens = 1 + int(np.searchsorted(_character_ends(texts), len(reasoning + closing)))
    while num_tokens < len(texts) and not texts[num_tokens].strip():
        num_tokens += 1
    return num_tokens


def sentence_spans(ids: Sequence[int], tokenizer: Tokenizer | None) -> Spans:
    """Return first and end token of each sentence of the reasoning, without the tags around it.

    Args:
        ids: Tokens of the reasoning, with its tags.
        tokenizer: Turns them into text.
    """
    texts = Document(np.array(ids), tokenizer=tokenizer).texts

    # Leave out the tags.
    match = TAGGED.fullmatch("".join(texts))
    assert match is not None  # both tags are optional, and anything may be between them
    ends = _character_ends(texts)
    text_first = int(np.searchsorted(ends, match.start("text"), side="right"))
    text_end = int(np.searchsorted(ends, match.end("text"), side="right"))
    if text_end <= text_first or not match["text"].strip():
        return []

    # Split by itself, as statements are: an open quotation before it does not reach into it.
    inner = Document(np.array(ids[text_first:text_end]), tokenizer=tokenizer)
    sentence_ends = text_first + inner.units("sentences", 0, text_end - text_first).end

    # Join what is too short to be a source, such as "Hm." or "1.".
    spans: list[tuple[int, int]] = []
    first = text_first
    for end in sentence_ends.tolist():
        if end - first >= MIN_TOKENS:
            spans.append((first, end))
            first = end
    if first < text_end:  # what is left is too short
        if spans:
            first = spans.pop()[0]
        spans.append((first, text_end))
    return spans


def _character_ends(texts: Sequence[str]) -> np.ndarray:
    """Return where the text of each token ends in the whole text: one past its last character."""
    return np.cumsum([len(text) for text in texts], dtype=int)
