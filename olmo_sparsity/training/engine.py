"""Run training steps on one process or several: device, precision, accumulation, clipping.

The loss of a step is the mean over the labels of all processes, which may have different numbers:
each contributes its sum divided by the total. Dimension key: B batch, L length."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from olmo_sparsity.base.devices import choose_device, multiplies
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.sections import OptimizerConfig, Precision, TrainingConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.models.attention import find_documents, keep_out_of_graphs
from olmo_sparsity.models.huggingface import HuggingFaceLM
from olmo_sparsity.models.losses import compile_losses, mean_loss, token_losses
from olmo_sparsity.text.vocabulary import IGNORED
from olmo_sparsity.training.distributed import Processes, start_alone
from olmo_sparsity.training.moments import (
    KEYS,
    MomentSlice,
    SavedMoments,
    copy_moments,
    share_out,
    to_main_memory,
)
from olmo_sparsity.training.optim import Jumps, build_optimizer

COMPILED_BY_BLOCK = 16
"""Layers from which each is compiled by itself. A graph of all of them takes a minute of a core, in
place of seconds; and DDP and ZeRO would send no gradients before the last are computed."""


class ForwardClock:
    """Adds up the time of a process's forward passes, in which it waits for no other one (with
    `zero3` and `fsdp` it waits for their weights). On a GPU, time of the GPU."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda":
            began = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - began
            return
        began_event = torch.cuda.Event(enable_timing=True)
        ended_event = torch.cuda.Event(enable_timing=True)
        began_event.record()
        yield
        ended_event.record()
        self.pending.append((began_event, ended_event))

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
    """The model as a module with a forward that returns losses, because DDP and DeepSpeed hook the
    forward pass, and our loss uses the unembedding outside of the model's own."""

    def __init__(self, model: Any, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self.compiled = compile_losses() if compiled else None
        self.clock = ForwardClock()

    def forward(self, batch: Batch, num_labels: int | None = None) -> Tensor:
        """nll_BL; or for training its sum divided by `num_labels` of the whole step."""
        inputs = (self.model, batch.tokens_BL, batch.positions_BL, batch.labels_BL)
        documents = None
        if batch.documents_BL is not None:
            documents = find_documents(batch.documents_BL, batch.tokens_BL.device)
        if num_labels is None:
            return token_losses(*inputs, documents)
        with self.clock.running(batch.tokens_BL.device):
            return mean_loss(*inputs, num_labels, documents, self.compiled)


class Engine:
    """One process, one device."""

    title = "one process"

    compiles_each_layer = False
    """Also where a model has few layers."""

    optimizer: Any

    def __init__(
        self,
        model: Any,
        training: TrainingConfig,
        optimizer: OptimizerConfig,
        processes: Processes | None = None,
    ) -> None:
        self.training = training
        self.processes = processes or Processes()
        self.device = own_device(training.device, self.processes)
        if training.deterministic:
            be_deterministic()
        self.model = self.place(model)
        self.losses = Losses(model, training.compile)
        if training.activation_checkpointing:
            model.checkpoint_activations(training.checkpoint_every)
        if training.compile:
            compile_model(model, self.compiles_each_layer)
        self.prepare(optimizer)

    def place(self, model: Any) -> Any:
        return model.to(self.device)

    def prepare(self, optimizer: OptimizerConfig) -> None:
        """Overridden by other engines."""
        self.optimizer = build_optimizer(self.model, optimizer)

    # --- a step ---------------------------------------------------------------------------------

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.training.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def step(
        self, batch: Batch, learning_rate: float, jumps: Jumps | None = None
    ) -> tuple[Tensor, Tensor]:
        """One optimizer step on this process's share of a batch. Returns (mean loss, gradient norm)
        of the whole batch, still on the device. `jumps` skips updates, for which the host waits."""
        num_labels = batch.num_labels
        if num_labels is None:  # the host waits for all processes
            num_labels = self.processes.sum(int((batch.labels_BL != IGNORED).sum()))
        if not self.model.training:
            self.model.train()  # visits all modules
        size = self.training.micro_batch_size or len(batch.tokens_BL)
        # It counts sequences of the longest length.
        size *= self.training.length // batch.tokens_BL.shape[1]
        parts = list(batch.split(size))
        total = torch.zeros((), device=self.device)
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            total += self.backward(part.to(self.device), num_labels, last).detach()
        if self.processes.world_size > 1:
            dist.all_reduce(total)
        return total, self.update(learning_rate, partial(self.is_skipped, jumps, total))

    def is_skipped(self, jumps: Jumps | None, loss: Tensor, norm: Tensor) -> bool:
        """All processes decide alike."""
        if jumps is None or not self.processes.sum(jumps.found(float(loss), float(norm))):
            return False
        jumps.num_skipped += 1
        return True

    def backward(self, part: Batch, num_labels: int, last: bool) -> Tensor:
        with self.autocast():
            loss = self.losses(part, num_labels)
        loss.backward()
        return loss

    def update(self, learning_rate: float, is_skipped: Callable[[Tensor], bool]) -> Tensor:
        """`is_skipped`: of a gradient norm."""
        limit = self.training.max_grad_norm
        norm = self.clip_gradients(float("inf") if limit is None else limit)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if not is_skipped(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def clip_gradients(self, limit: float) -> Tensor:
        """Scale all gradients such that their norm is at most `limit`; return the norm before."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def token_losses(self, batch: Batch) -> Tensor:
        """nll_BL of this process's rows. Every process must call it equally often."""
        self.model.eval()
        with self.autocast(), torch.no_grad():
            return self.losses(batch.to(self.device))

    # --- state for checkpoints ------------------------------------------------------------------

    @cached_property
    def part_of(self) -> dict[str, int]:
        """The process that saves each weight, which are about as many bytes for each."""
        # Of a sharded parameter: DeepSpeed's name for the number of its elements.
        sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in self.weights()}
        return share_out(sizes, self.processes.world_size)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Tied ones under their first name."""
        named: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            named.setdefault(id(tensor), (name, tensor))
        yield from named.values()

    def full(self, weight: Tensor) -> Tensor:
        """In fp32; every process must call it."""
        return weight.detach()

    def copy_weights(self, whole: bool = False) -> dict[str, Tensor]:
        """A copy in main memory, in fp32, of the weights that this process saves, or of all. Every
        process must call it."""
        own = self.processes.rank
        gathered = ((name, self.full(weight)) for name, weight in self.weights())
        return to_main_memory(
            (name, full) for name, full in gathered if whole or self.part_of[name] == own
        )

    def copy_moments(self) -> Callable[[Path], Path]:
        """Copy this process's part of the optimizer state; returns a function that writes it into a
        folder."""
        own = self.processes.rank
        parts = (part for part in self.moments() if self.part_of[part.parameter] == own)
        return copy_moments(parts, own, self.processes.world_size)

    def load_moments(self, folder: Path, step: int) -> None:
        """`step`: the number of updates so far, for Adam's bias correction."""
        saved = SavedMoments(folder, self.processes.rank)
        for part in self.moments():
            saved.fill(part)
        for state in self.optimizer.state.values():
            state["step"].fill_(step)

    def moments(self) -> Iterator[MomentSlice]:
        for name, parameter in self.model.named_parameters():
            state = adam_state(self.optimizer, parameter)
            yield MomentSlice(name, 0, {key: state[key].view(-1) for key in KEYS})

    def describe(self) -> dict[str, Any]:
        """The engine that actually runs, for environment.json."""
        return {
            "class": type(self).__name__,
            "world_size": self.processes.world_size,
            "backend": dist.get_backend() if dist.is_initialized() else None,
        }


class DDPEngine(Engine):
    """Several processes, each with the complete model; DDP averages gradients."""

    def prepare(self, optimizer: OptimizerConfig) -> None:
        super().prepare(optimizer)
        start_alone()  # if there is only one process
        num = self.processes.world_size
        self.title = f"DistributedDataParallel, {num} process{'es' * (num > 1)}"
        if self.training.compile:
            # Else the step is split where DDP's buckets end, to send them while the rest is
            # computed (3% of a step on one machine). Older versions of PyTorch reject our graphs.
            torch._dynamo.config.optimize_ddp = False
        on_gpu = self.device.type == "cuda"
        self.parallel = DistributedDataParallel(
            self.losses,
            device_ids=[self.device] if on_gpu else None,
            gradient_as_bucket_view=True,  # else gradients are stored twice
        )

    def backward(self, part: Batch, num_labels: int, last: bool) -> Tensor:
        with contextlib.nullcontext() if last else self.parallel.no_sync():
            with self.autocast():
                loss = self.parallel(part, num_labels)
            (loss * self.processes.world_size).backward()  # DDP takes the mean, we need the sum
        return loss

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"class": type(self.parallel).__name__}


def adam_state(optimizer: torch.optim.AdamW, parameter: Tensor) -> dict[str, Tensor]:
    """Adam creates its state at the first update; this does so if it has not happened yet."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), device=parameter.device)
        for key in KEYS:
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


# --- graphs and kernels ---------------------------------------------------------------------------


def layers_of(model: Any) -> list[nn.Module]:
    """The layers of the model, in order."""
    return model.layers if isinstance(model, HuggingFaceLM) else model.blocks


def compile_model(model: Any, each_layer: bool = False) -> None:
    """One graph for each shape (of training, its stages, evaluations), and always the same: one of
    any shape, which PyTorch otherwise makes when it sees a second, would depend on where a run
    begins."""
    torch._dynamo.config.recompile_limit = 64
    if isinstance(model, HuggingFaceLM):
        model.keep_own_attention()
    keep_out_of_graphs()
    layers = layers_of(model)
    is_long = len(layers) >= COMPILED_BY_BLOCK and not isinstance(model, HuggingFaceLM)
    if each_layer or is_long:
        for layer in layers:  # which share one graph
            layer.forward = torch.compile(layer.forward, dynamic=False)
    else:
        model.hidden = torch.compile(model.hidden, dynamic=False)


# --- devices ------------------------------------------------------------------------------------


def own_device(name: str, processes: Processes) -> torch.device:
    """The device of this process, which shares it with no other."""
    device = choose_device(name, lambda seen: own_gpu(seen, processes), "training.device")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def own_gpu(num_seen: int, processes: Processes) -> int:
    """Launchers make all GPUs of the machine visible to a process, or only its own."""
    if num_seen == 1:
        return 0
    if processes.local_rank >= num_seen:
        both = f"{processes.local_world_size} processes, but PyTorch sees {num_seen} GPUs"
        raise ConfigError(f"this machine runs {both}; launch as many processes as GPUs")
    return processes.local_rank


def be_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    # For debugging, and slow. PyTorch's types lack it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_precision(name: Precision, device: torch.device) -> Precision:
    if name != "auto":
        return name
    return "bf16" if multiplies(device, torch.bfloat16) else "fp32"
