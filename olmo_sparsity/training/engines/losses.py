"""Wrap a model as a module whose forward returns losses, and time these forward passes.

    losses = Losses(model, compiled=False, z_loss=0.0)
    losses(batch, num_labels=4096).backward()    # training: the sum of the losses / 4096
    losses(batch)                                # evaluation: nll_BL, no gradients
    losses.clock.take()                          # seconds of the forward passes since the last call

Place in the flow: a model → **`Losses`** → the engines, which call it in each step (engine.py).

Dimension key: B batch, L length.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from olmo_sparsity.data.batches import Batch
from olmo_sparsity.models.document_attention import find_documents
from olmo_sparsity.models.losses import token_losses
from olmo_sparsity.models.training_loss import compile_losses, mean_loss


class ForwardClock:
    """Adds up the time of a process's forward passes, on a GPU the time of the GPU.

    In a forward pass a process waits for no other one, so a slow process shows. There are two
    exceptions: with `zero3` it waits for weights, and with `fsdp` the layers alone are timed,
    without the waits for their weights."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Events at the beginning and the end of passes that are not added yet."""

    @contextlib.contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Add the time inside this block."""
        if device.type != "cuda":
            began = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - began
            return
        # Kernels run later than the host launches them, so the GPU itself notes the times.
        began_event = torch.cuda.Event(enable_timing=True)
        ended_event = torch.cuda.Event(enable_timing=True)
        began_event.record()
        yield
        ended_event.record()
        self.pending.append((began_event, ended_event))

    def timing(self, forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Return a forward function that adds the time of its calls in training."""

        def timed(*inputs: Any, **named_inputs: Any) -> Any:
            if not torch.is_grad_enabled():  # an evaluation
                return forward(*inputs, **named_inputs)
            with self.running(device):
                return forward(*inputs, **named_inputs)

        return timed

    def take(self) -> float:
        """Return the seconds since the last call. The host waits for the GPU."""
        for began, ended in self.pending:
            ended.synchronize()
            self.seconds += began.elapsed_time(ended) / 1000
        seconds = self.seconds
        self.pending = []
        self.seconds = 0.0
        return seconds


class Losses(nn.Module):
    """The model as a module with a forward that returns losses. DDP and DeepSpeed hook the forward
    pass of the module that they are given, and our loss uses the unembedding outside of the model's
    own forward."""

    def __init__(self, model: Any, compiled: bool = False, z_loss: float = 0.0) -> None:
        super().__init__()
        self.z_loss = z_loss
        self.model = model
        self.compiled = compile_losses() if compiled else None
        self.clock = ForwardClock()
        self.times_layers = False
        """Whether the engine has the clock time the layers. Otherwise the whole forward pass is
        timed."""

    def forward(self, batch: Batch, num_labels: int | None = None) -> Tensor:
        """Return nll_BL without gradients. For training, with `num_labels`, the number of labels of
        the whole step, return the sum of nll_BL divided by it."""
        inputs = (self.model, batch.tokens_BL, batch.positions_BL, batch.labels_BL)
        # Computed outside of compiled graphs, as the host needs the lengths of documents.
        documents = None
        if batch.documents_BL is not None:
            documents = find_documents(batch.documents_BL, batch.tokens_BL.device)
        if num_labels is None:
            return token_losses(*inputs, documents)
        device = batch.tokens_BL.device
        timing = contextlib.nullcontext() if self.times_layers else self.clock.running(device)
        with timing:
            return mean_loss(*inputs, num_labels, documents, self.compiled, self.z_loss)
