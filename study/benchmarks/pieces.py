"""Units: runs as long as sentences that do not begin where they do, a control, or of 64 characters.

olmo-sparsity measure MODEL --text TEXT --units study/benchmarks/pieces.py:pieces
"""

from __future__ import annotations

import re
from bisect import bisect_left
from itertools import accumulate, pairwise

from olmo_sparsity.base.streams import stream
from olmo_sparsity.text.sentences import sentence_starts


def pieces(text: str) -> list[int]:
    """Return where pieces begin: as many as the text has sentences, and as long, in another order.

    Each begins with the first word that begins after the last piece's length is reached.
    """
    starts = [*sentence_starts(text), len(text)]
    lengths = stream(0, "pieces", text).permutation([b - a for a, b in pairwise(starts)])
    words = re.finditer(r"(?<!\S)\S", text)
    begins = [0]
    for place in list(accumulate(int(length) for length in lengths))[:-1]:
        begins.append(next((word.start() for word in words if word.start() >= place), begins[-1]))
    return sorted({*begins})


def runs(text: str) -> list[int]:
    """Return where runs of at least 64 characters (about 16 tokens) begin, each with a word."""
    words = [word.start() for word in re.finditer(r"(?<!\S)\S", text)]
    at = (bisect_left(words, end) for end in range(64, len(text), 64))
    return sorted({0, *(words[i] for i in at if i < len(words))})
