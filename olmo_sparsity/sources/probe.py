"""A text that every server scores before anything else, to recognize its model by.

Place in the flow: server_checks.py and server.py score the probe; a folder of results keeps its
numbers, so that later runs (servers.py) and comparisons with a baseline (same_model.py) notice
another model.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from olmo_sparsity.base.files import read_json

PROBE = (
    "The capital of France is Paris, and the capital of Italy is Rome. One, two, three, four, "
    "five, six, seven. To be, or not to be, that is the question."
)

PROBE_FILE = "server.json"
"""In a folder of results: the log-probabilities of the probe."""

OTHER_NATS = 0.05
"""Means over the probe of one model differ by less, or by less than three times the noise that the
server showed."""


def distance(log_p: np.ndarray, earlier_log_p: np.ndarray) -> float:
    """Return the mean difference of log-probabilities of the same tokens, in nats a token. Infinity
    if they are of different tokens."""
    if log_p.shape != earlier_log_p.shape:
        return math.inf
    return float(np.abs(log_p - earlier_log_p).mean())


def read_probe(folder: Path) -> np.ndarray | None:
    """Return what a server returned for the probe when the results in this folder were begun."""
    file = folder / PROBE_FILE
    if not file.exists():
        return None
    return np.array(read_json(file, list, "restore it, or name a new folder"), dtype=float)
