"""Claim: keeping documents apart costs no more than a dense mask at 1,024 tokens, and a step on
32,768 tokens fits into 2 GiB of one core, where a dense mask alone takes 4.

    python -m study.benchmarks.documents [--rounds 5]

The model of configs/quick.yaml in fp32, one thread. Forward and backward pass of all layers with
documents apart, against the same with a dense mask given to the model; they take turns, and the
ratio is the median over the turns, by CPU time. The long step runs in a process of its own; its
peak memory is read.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from olmo_sparsity.analysis.kernels.attention import find_documents
from olmo_sparsity.config.run import load_config
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.model.build import build_model
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.training.engine import Engine

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def model_for(length: int) -> PositionedOLMo:
    config = load_config(ROOT / "configs/quick.yaml").model
    config.vocab_size, config.max_sequence_length = 4096, length
    model = build_model(config)
    assert isinstance(model, PositionedOLMo)
    return model


def numbers(num_rows: int, length: int, document: int) -> Tensor:
    return (torch.arange(length) // document).expand(num_rows, length)


def step(model: PositionedOLMo, documents_BL: Tensor, dense: bool) -> None:
    tokens_BL = torch.randint(0, 4096, documents_BL.shape)
    positions_BL = torch.arange(tokens_BL.shape[1]).expand_as(tokens_BL)
    if not dense:
        documents = find_documents(documents_BL, CPU)
        model.hidden(tokens_BL, positions_BL, documents=documents).square().mean().backward()
        return
    alike_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    bias = torch.zeros(alike_BLL.shape).masked_fill(~alike_BLL.tril(), -1e30)[:, None]
    model.hidden(tokens_BL, positions_BL, bias).square().mean().backward()


def seconds(run: Callable[[], None]) -> float:
    started = time.process_time()  # of this process alone
    run()
    return time.process_time() - started


def compare(length: int, document: int, num_rounds: int) -> None:
    model, documents_BL = model_for(length), numbers(4, length, document)
    ratios, of = [], {True: [0.0], False: [0.0]}
    for turn in range(num_rounds + 1):
        for dense in (True, False):
            of[dense].append(seconds(lambda dense=dense: step(model, documents_BL, dense)))
        if turn:  # the first warms up
            ratios.append(of[True][-1] / of[False][-1])
    print(
        f"4 × {length}, documents of {document}: dense mask {of[True][-1]:.2f} s, apart "
        f"{of[False][-1]:.2f} s, ratio {statistics.median(ratios):.2f} "
        f"(from {min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


def long_step(length: int, documents: list[int]) -> None:
    """One optimizer step on a sequence of documents of these lengths, repeated."""
    config = load_config(
        ROOT / "configs/quick.yaml",
        [
            f"--training.length={length}",
            f"--model.max_sequence_length={length}",
            "--training.batch_size=1",
            "--training.activation_checkpointing=true",
            "--training.precision=fp32",
            "--positions.scheme=contiguous",
            "--positions.target_length=null",
            "--data.mask_documents=true",
        ],
    )
    config.model.vocab_size = 4096
    engine = Engine(build_model(config.model), config.training, config.optimizer)
    sizes = torch.tensor(documents).repeat(length // sum(documents) + 1)
    documents_BL = torch.arange(len(sizes)).repeat_interleave(sizes)[None, :length]
    tokens_BL = torch.randint(0, 4096, (1, length))
    positions_BL = torch.arange(length)[None]
    batch = Batch(tokens_BL, positions_BL, tokens_BL.roll(-1, 1), documents_BL=documents_BL)
    took = seconds(lambda: engine.step(batch, 1e-3))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    verdict = "met   " if peak < 2 else "MISSED"
    print(
        f"{verdict} 1 × {length}, documents of {', '.join(map(str, documents))}: {took:.1f} s, "
        f"peak {peak:.2f} GiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", type=int, nargs="+", metavar="DOCUMENT")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.long:
        long_step(32768, options.long)
        return
    for length, document in ((128, 64), (1024, 1024), (1024, 300), (1024, 100)):
        compare(length, document, options.rounds)
    for documents in ([1024], [16384, *[1024] * 16], [32768]):
        again = [sys.executable, "-m", "study.benchmarks.documents", "--long", *map(str, documents)]
        subprocess.run(again, check=True)


if __name__ == "__main__":
    main()
