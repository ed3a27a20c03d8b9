"""Read the numbers that a server writes as log-probabilities, and notice what is none.

    as_log_p(-7.2)     -7.2
    as_log_p(0.0004)    0.0     rounded up by the server
    as_log_p(-9999)     None    a server's minus infinity, which JSON lacks
    as_log_p("-7.2")    None

server.py reads the numbers of a reply with it, pool.py checks those of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from olmo_sparsity.base.errors import DataError

MIN_LOG_P = -1e3
"""A smaller number is no log-probability: servers write −9,999 for minus infinity, which JSON
lacks."""

MAX_LOG_P = 1e-3
"""A larger number is no log-probability. Rounding may make one a little more than 0."""

MANY_TOKENS = 8
"""This many different tokens never have the same number. Two may, by rounding."""


def as_log_p(written: Any) -> float | None:
    """Return the log-probability that a server wrote; None if it is not a usable number."""
    if not isinstance(written, int | float) or isinstance(written, bool):
        return None
    # NaN is not in this range, either.
    return min(float(written), 0.0) if MIN_LOG_P < written < MAX_LOG_P else None


def check_not_constant(ids: Sequence[int], log_p: Sequence[float | None], url: str) -> None:
    """Raise DataError if many different tokens have one and the same log-probability, as a server
    returns that computes nothing.

    Args:
        ids: Tokens.
        log_p: Their log-probabilities; None where there is no usable number.
        url: The server, for the message.
    """
    # By token, as a text may repeat one token with one number.
    known = {token: number for token, number in zip(ids, log_p, strict=True) if number is not None}
    if len(known) >= MANY_TOKENS and len(set(known.values())) == 1:
        problem = f"{url} gives {len(known)} different tokens the same log-probability"
        raise DataError(f"{problem}; check that it returns those of the prompt")
