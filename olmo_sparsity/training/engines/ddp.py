"""Train with PyTorch's DistributedDataParallel: each process holds the complete model, and computes
its share of each batch.

    process 0    forward, backward of its micro-batches ─┐
    process 1    forward, backward of its micro-batches ─┴─> sum of gradients ─> the same update

DDP sums gradients during the backward pass of the last micro-batch, bucket by bucket.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from olmo_sparsity.config.sections import OptimizerConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.training.engines.engine import Engine, count_processes
from olmo_sparsity.training.processes.process_group import start_alone


class DDPEngine(Engine):
    """Runs steps on several processes, each with the complete model. DDP sums gradients."""

    def prepare(self, optimizer: OptimizerConfig) -> None:
        """Build the optimizer, and wrap the model with DDP."""
        super().prepare(optimizer)
        start_alone()  # if there is only one process
        self.title = f"DistributedDataParallel, {count_processes(self.processes.world_size)}"
        if self.training.compile:
            # Otherwise the step is split where DDP's buckets end, to send them while the rest is
            # computed (3% of a step on one machine). Older versions of PyTorch reject our graphs.
            torch._dynamo.config.optimize_ddp = False
        on_gpu = self.device.type == "cuda"
        self.parallel = DistributedDataParallel(
            self.losses,
            device_ids=[self.device] if on_gpu else None,
            gradient_as_bucket_view=True,  # otherwise gradients are stored twice
        )

    def backward(self, micro_batch: Batch, num_labels: int, is_last: bool) -> Tensor:
        """Do as `Engine.backward`, and sum gradients over processes in the last micro-batch."""
        with contextlib.nullcontext() if is_last else self.parallel.no_sync():
            with self.autocast():
                loss = self.parallel(micro_batch, num_labels)
            (loss * self.processes.world_size).backward()  # DDP takes the mean, we need the sum
        return loss

    def describe(self) -> dict[str, Any]:
        """Describe the engine, by PyTorch's name of it."""
        return super().describe() | {"class": type(self.parallel).__name__}
