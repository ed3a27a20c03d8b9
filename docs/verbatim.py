"""The share of held-out spans that stand verbatim in the training text, as CSV:
python docs/verbatim.py PREPARED_FOLDER OUT

Every span of 16 and of 32 tokens inside a held-out document, by its hash; the interval is a
bootstrap over documents.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.statistics import interval, resample
from olmo_sparsity.config.text import DataConfig
from olmo_sparsity.data.shards import TokenShards, open_shards

LENGTHS = (16, 32)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def hash_spans(tokens: np.ndarray, length: int) -> np.ndarray:
    """A 64-bit hash of every `length` consecutive tokens."""
    hashes = np.zeros(max(len(tokens) - length + 1, 0), np.uint64)
    for offset in range(length):
        hashes = hashes * _FACTOR + tokens[offset : offset + len(hashes)].astype(np.uint64) + 1
    return hashes


def share_verbatim(training: TokenShards, heldout: TokenShards, length: int) -> dict[str, float]:
    spans = [hash_spans(heldout.document(n), length) for n in range(len(heldout))]
    wanted = np.unique(np.concatenate(spans))
    found = np.zeros(len(wanted), bool)
    for array in training.arrays:
        hashes = np.unique(hash_spans(array, length))
        found |= np.isin(wanted, hashes, assume_unique=True)
    counts = pd.DataFrame(
        {"found": found[np.searchsorted(wanted, of)].sum(), "spans": len(of)}
        for of in spans
        if len(of)
    )
    found_R, spans_R = resample(counts).T
    share, low, high = interval(found_R[1:] / spans_R[1:], found_R[0] / spans_R[0])
    shares = counts.found / counts.spans
    return {
        "tokens": length,
        "share": share,
        "low": low,
        "high": high,
        "median": shares.median(),
        "worst": shares.max(),
        "documents": len(counts),
        "training_tokens": training.num_tokens,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    splits = [open_shards(DataConfig(folder=str(options.folder)), s) for s in ("train", "heldout")]
    rows = [share_verbatim(*splits, length) for length in LENGTHS]
    pd.DataFrame(rows).round(4).to_csv(options.out, index=False)
