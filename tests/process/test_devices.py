"""Memory that tensors on CPU leave behind."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

FREE_MANY = """
    import resource, sys, torch
    from olmo_sparsity.process.devices import give_back_large_tensors

    if sys.argv[1] == "yes":
        give_back_large_tensors()
    torch.ones(6 * 2**20)  # the first one that is freed moves the limit of glibc's heap
    pages = lambda: int(open("/proc/self/statm").read().split()[1])
    before, kept = pages(), []
    for _ in range(10):
        freed = torch.ones(6 * 2**20)
        kept.append(torch.ones(10_000))
        kept.append(freed)
    del kept[1::2], freed
    print((pages() - before) * resource.getpagesize() // 2**20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_large_tensors_leave_no_holes() -> None:
    def held(word: str) -> int:
        words = [sys.executable, "-c", textwrap.dedent(FREE_MANY), word]
        return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)

    assert held("yes") < 24 < 100 < held("no")
