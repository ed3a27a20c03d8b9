"""Run a command as on a GPU, then say where it waited for the GPU:

python -m tests.gpu train configs/quick.yaml --training.num_steps=4
"""

from __future__ import annotations

# ruff: noqa: I001 — what PyTorch is to find must be loaded before it
import sys
from unittest import mock

from tests.gpu.pretend import pretend

from olmo_sparsity.command.cli import main as command


def main(words: list[str]) -> int | None:
    """The command's exit code."""
    peak = mock.patch("olmo_sparsity.training.start.measure_matmul_peak", return_value=1e12)
    with pretend() as gpus, peak:
        code = command(words)
    print(f"\nfused attention: {dict(gpus.kernels)}", file=sys.stderr)
    print(f"{gpus.waits.total()} waits of the host for the GPU", file=sys.stderr)
    for where, count in gpus.waits.most_common():
        print(f"{count:6} × {where}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
