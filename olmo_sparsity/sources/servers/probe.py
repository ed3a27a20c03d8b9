"""Recognize a server's model by its numbers for one fixed text, the probe.

A server tells the name of its model, but the name stays when other weights are loaded. So the
log-probabilities of the probe are compared:

    servers/checks.py    with those of the first server, when a server is met
    servers/server.py    with those when it was met, after the connection was lost
    servers/pool.py      with those that a folder of results keeps, when a run goes on in it
    gate/same_model.py   with those of the baseline
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
    """Return the mean absolute difference of two lists of log-probabilities, in nats a token;
    infinity if they are of different length, and so not of the same tokens."""
    if log_p.shape != earlier_log_p.shape:
        return math.inf
    return float(np.abs(log_p - earlier_log_p).mean())


def read_probe(folder: Path) -> np.ndarray | None:
    """Return the numbers that a folder of results keeps; None if its model is not on a server, or
    nothing was begun."""
    file = folder / PROBE_FILE
    if not file.exists():
        return None
    return np.array(read_json(file, list, "restore it, or name a new folder"), dtype=float)
