"""A thread that draws ahead: it hands on errors, ends, and leaves no lock behind."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Generator

import pytest

from olmo_sparsity.data import background
from olmo_sparsity.data.background import in_background
from olmo_sparsity.errors import DataError


def test_a_thread_that_draws_ahead_hands_on_errors_and_ends() -> None:
    def some(error: bool) -> Generator[int, None, None]:
        threads.append(threading.current_thread())
        for number in range(100):
            made.append(number)
            yield number
            if error:
                raise DataError("of the text")

    threads, made = [], []
    with contextlib.closing(in_background(some(error=False), depth=1)) as numbers:
        assert next(numbers) == 0
    assert not threads[0].is_alive(), "also where not all was wanted"
    assert len(made) <= 4, "and no more was made than waits"
    numbers = in_background(some(error=True), depth=1)
    assert next(numbers) == 0
    with pytest.raises(DataError, match="of the text"):
        next(numbers)


def test_ctrl_c_cannot_leave_the_queue_locked() -> None:
    """In Python code it would come between taking a lock and noting that it is held."""
    ran = set()
    with contextlib.closing(in_background((i for i in range(3)), depth=1)) as numbers:
        assert next(numbers) == 0
        sys.setprofile(lambda frame, *_: ran.add(frame.f_code.co_filename))
        try:
            assert next(numbers) == 1
        finally:
            sys.setprofile(None)
    assert ran & {queue.__file__, threading.__file__, background.__file__} == {background.__file__}
