"""Try again what a disk of the network has refused: it may be away for some seconds.

    content = retry(read, may_pass, say)    # after 2, 10 and 30 s

Imports nothing of ours but errors.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from olmo_sparsity.base.errors import UserError

T = TypeVar("T")

RETRY_AFTER_S = (2.0, 10.0, 30.0)
"""Seconds after which a process tries again, after each error of the disk. A network disk may be
away for so long."""

MAY_PASS = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EIO,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOLCK,
    errno.ENOTCONN,
    errno.EREMOTEIO,
    errno.ESHUTDOWN,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
"""Numbers of errors of a network disk that pass by themselves; a full disk is none of them."""

FULL = {errno.ENOSPC, errno.EDQUOT}
"""Numbers of the errors of a full disk and a full quota, which pass once somebody frees space."""


def may_pass(error: Exception) -> bool:
    """Return whether an error of the disk passes by itself, so that it is worth while to wait."""
    return getattr(error, "errno", None) in MAY_PASS


def is_full(error: Exception) -> bool:
    """Return whether an error says that the disk or the quota is full."""
    return getattr(error, "errno", None) in FULL


def retry(
    action: Callable[[], T],
    is_worth_while: Callable[[Exception], bool],
    report: Callable[[str], None],
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Return the result of an action on the disk, which is tried again after an error. The error of
    the last try is raised, and one for which `is_worth_while` returns False.

    Args:
        report: Gets a line for each error after which the action is tried again.
        wait: Waits for some seconds.
    """
    for pause_s in RETRY_AFTER_S:
        try:
            return action()
        except (OSError, UserError) as error:
            if not is_worth_while(error):
                raise
            report(f"{error}; trying again in {pause_s:.0f} s")
        wait(pause_s)
    return action()
