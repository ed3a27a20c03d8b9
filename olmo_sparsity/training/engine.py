"""Run training steps on one process or several: device, precision, accumulation, clipping.

    step(batch) ─> backward(micro-batch), for each ─> update: clip, optimizer, zero gradients

`Engine` is one process. `DDPEngine` here, `ZeroEngine` (deepspeed_engine.py) and `FSDPEngine`
(fsdp_engine.py) override how weights are placed, how gradients are summed, and where the state of a
checkpoint is found.

The loss of a step is the mean over the labels of all processes, which may have different numbers of
labels: each process contributes the sum of its losses divided by the number of all labels.

Dimension key: B batch, L length.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from olmo_sparsity.base.devices import choose_device, multiplies
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.sections import OptimizerConfig, Precision, TrainingConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.models.document_attention import find_documents, keep_out_of_graphs
from olmo_sparsity.models.huggingface import HuggingFaceLM
from olmo_sparsity.models.losses import token_losses
from olmo_sparsity.models.training_loss import compile_losses, mean_loss
from olmo_sparsity.text.vocabulary import IGNORED
from olmo_sparsity.training.distributed import Processes, start_alone
from olmo_sparsity.training.moments import (
    MomentSlice,
    SavedMoments,
    copy_moments,
    share_out,
    to_main_memory,
)
from olmo_sparsity.training.optim import JumpDetector, build_optimizer, moments_of

COMPILED_BY_BLOCK = 16
"""Number of layers from which each layer is compiled by itself. One graph of all of them takes a
minute of a core, in place of seconds; and DDP and ZeRO would send no gradients before the last ones
are computed."""


class ForwardClock:
    """Adds up the time of a process's forward passes. In these a process waits for no other one, so
    a slow process shows; except with `zero3`, where it waits for weights. With `fsdp` it is the
    time of the layers, without the waits for their weights before. On a GPU it is the time of the
    GPU."""

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
    """The model as a module with a forward that returns losses, because DDP and DeepSpeed hook the
    forward pass, and our loss uses the unembedding outside of the model's own."""

    def __init__(self, model: Any, compiled: bool = False, z_loss: float = 0.0) -> None:
        super().__init__()
        self.z_loss = z_loss
        self.model = model
        self.compiled = compile_losses() if compiled else None
        self.clock = ForwardClock()
        self.times_layers = False
        """Whether the engine lets the clock time layers, not the whole forward pass."""

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
        with contextlib.nullcontext() if self.times_layers else self.clock.running(device):
            return mean_loss(*inputs, num_labels, documents, self.compiled, self.z_loss)


class Engine:
    """Runs steps on one process and one device."""

    title = "one process"
    """The name of the engine in the log."""

    compiles_each_layer = False
    """Whether each layer is compiled to a graph of its own, also if there are few of them."""

    optimizer: Any

    logs_layer_norms = False
    """Whether the next steps compute `layer_norms`, as `logging.layer_gradient_norms` asks for."""

    layer_norms: dict[str, Tensor]
    """Gradient norms of the parts of the model before clipping, of the last step with
    `logs_layer_norms`, on the device."""

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
        self.losses = Losses(model, training.compile, training.z_loss)
        if training.activation_checkpointing:
            model.checkpoint_activations(training.checkpoint_every)
        if training.compile:
            compile_model(model, training.activation_memory_budget, self.compiles_each_layer)
        self.prepare(optimizer)

    def place(self, model: Any) -> Any:
        """Move the model to this process's device, or the part of it that this process holds."""
        return model.to(self.device)

    def prepare(self, optimizer: OptimizerConfig) -> None:
        """Build the optimizer, and wrap the model for communication."""
        self.optimizer = build_optimizer(self.model, optimizer)

    # --- a step ---------------------------------------------------------------------------------

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context of a forward pass, in which products are in the run's precision."""
        if self.training.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def step(
        self, batch: Batch, learning_rate: float, jump_detector: JumpDetector | None = None
    ) -> tuple[Tensor, Tensor]:
        """Make one optimizer step on this process's share of a batch. Return (mean loss, gradient
        norm) of the whole batch. They are still on the device, so that the host can launch the next
        step. `jump_detector`: skip the update of a step that jumps, for which the host waits for
        the norm."""
        num_labels = batch.num_labels
        if num_labels is None:  # the host waits for all processes
            num_labels = self.processes.sum(int((batch.labels_BL != IGNORED).sum()))
        if not self.model.training:
            self.model.train()  # visits all modules
        size = self.training.micro_batch_size or len(batch.tokens_BL)
        # micro_batch_size counts sequences of the longest length; more of shorter ones fit.
        size *= self.training.length // batch.tokens_BL.shape[1]
        parts = list(batch.split(size))
        # The labels are those of all processes, so the parts of the loss add up to its mean.
        loss = torch.zeros((), device=self.device)
        for index, part in enumerate(parts):
            is_last = index == len(parts) - 1
            loss += self.backward(part.to(self.device), num_labels, is_last).detach()
        if self.processes.world_size > 1:
            dist.all_reduce(loss)
        return loss, self.update(learning_rate, partial(self.is_skipped, jump_detector, loss))

    def is_skipped(self, jump_detector: JumpDetector | None, loss: Tensor, norm: Tensor) -> bool:
        """Return whether the update of a step is skipped, with the same answer on all processes."""
        if jump_detector is None:
            return False
        is_jump = jump_detector.is_jump(float(loss), float(norm))
        # If their rounding makes decisions differ, one process that skips is enough.
        if not self.processes.sum(is_jump):
            return False
        jump_detector.num_skipped += 1
        return True

    def backward(self, part: Batch, num_labels: int, is_last: bool) -> Tensor:
        """Add the gradients of a micro-batch, and return its part of the loss. `is_last`: whether
        it is the last one of the step, after which gradients are summed over processes."""
        with self.autocast():
            loss = self.losses(part, num_labels)
        loss.backward()
        return loss

    def update(self, learning_rate: float, is_skipped: Callable[[Tensor], bool]) -> Tensor:
        """Clip gradients and update the weights, unless `is_skipped(gradient norm)`. Return the
        norm before clipping."""
        if self.logs_layer_norms:
            gradients_of_part = {
                part: [weight.grad for weight in weights if weight.grad is not None]
                for part, weights in parts_of(self.model).items()
            }
            self.layer_norms = {
                part: self.gradient_norm(gradients)
                for part, gradients in gradients_of_part.items()
                if gradients
            }
        limit = self.training.max_grad_norm
        norm = self.clip_gradients(float("inf") if limit is None else limit)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if not is_skipped(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the common norm of gradients. Every process must call it."""
        return nn.utils.get_total_norm(gradients)

    def clip_gradients(self, limit: float) -> Tensor:
        """Scale all gradients such that their common norm is at most `limit`. Return the norm that
        they had before."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def token_losses(self, batch: Batch) -> Tensor:
        """Return nll_BL of this process's rows, without gradients. Every process must call it
        equally often, as some engines gather weights from all."""
        self.model.eval()
        with self.autocast(), torch.no_grad():
            return self.losses(batch.to(self.device))

    # --- state for checkpoints ------------------------------------------------------------------

    @cached_property
    def part_of(self) -> dict[str, int]:
        """Return, for each weight, the rank of the process that saves it. All processes save about
        as many bytes."""
        # DeepSpeed empties a parameter that it shards, and keeps its size as `ds_numel`.
        sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in self.weights()}
        return share_out(sizes, self.processes.world_size)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and weights. Tied weights are yielded once, under their first name."""
        named: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            named.setdefault(id(tensor), (name, tensor))
        yield from named.values()

    def full(self, weight: Tensor) -> Tensor:
        """Return a whole weight in fp32. Every process must call it."""
        return weight.detach()

    @property
    def part_number(self) -> int:
        """Return the number of the part of the model that this process holds. Processes with equal
        numbers hold copies of one part."""
        return 0

    def replicated_weights(self) -> dict[str, Tensor]:
        """Return the weights, or the parts of them, of which other processes may hold copies."""
        return {name: weight.detach() for name, weight in self.weights()}

    def copy_weights(self, whole: bool = False) -> dict[str, Tensor]:
        """Copy weights into main memory, in fp32: those that this process saves, or, with `whole`,
        all. Every process must call it."""

        def gather_one_by_one() -> Iterator[tuple[str, Tensor]]:
            for name, weight in self.weights():
                full = self.full(weight)  # called by all processes, also those that do not keep it
                if whole or self.part_of[name] == self.processes.rank:
                    yield name, full

        return to_main_memory(gather_one_by_one())

    def copy_moments(self) -> Callable[[Path], Path]:
        """Copy this process's part of the optimizer state. Return a function that writes it into a
        folder, and returns its file."""
        rank = self.processes.rank
        # Every process has all moments, so each saves those of the weights that it saves.
        parts = (part for part in self.moments() if self.part_of[part.parameter] == rank)
        return copy_moments(parts, rank, self.processes.world_size)

    def load_moments(self, folder: Path, step: int) -> None:
        """Fill the optimizer state from a checkpoint. `step`: the number of updates so far, which
        Adam's bias correction needs."""
        saved = SavedMoments(folder, self.processes.rank)
        for part in self.moments():
            saved.fill(part)
        for state in self.optimizer.state.values():
            if "step" in state:  # Muon corrects no bias
                state["step"].fill_(step)

    def moments(self) -> Iterator[MomentSlice]:
        """Yield the moments that this process holds, to be read or filled."""
        for name, parameter in self.model.named_parameters():
            moments = moments_of(self.optimizer, parameter)
            yield MomentSlice(name, 0, {key: moment.view(-1) for key, moment in moments.items()})

    def describe(self) -> dict[str, Any]:
        """Describe the engine that actually runs, for environment.json."""
        return {
            "class": type(self).__name__,
            "world_size": self.processes.world_size,
            "backend": dist.get_backend() if dist.is_initialized() else None,
        }


class DDPEngine(Engine):
    """Runs steps on several processes, each with the complete model. DDP sums gradients."""

    def prepare(self, optimizer: OptimizerConfig) -> None:
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

    def backward(self, part: Batch, num_labels: int, is_last: bool) -> Tensor:
        with contextlib.nullcontext() if is_last else self.parallel.no_sync():
            with self.autocast():
                loss = self.parallel(part, num_labels)
            (loss * self.processes.world_size).backward()  # DDP takes the mean, we need the sum
        return loss

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"class": type(self.parallel).__name__}


def count_processes(number: int) -> str:
    """Return the number of processes in words."""
    return "1 process" if number == 1 else f"{number} processes"


# --- graphs and kernels ---------------------------------------------------------------------------


def layers_of(model: Any) -> list[nn.Module]:
    """Return the layers of the model, in order."""
    return model.layers if isinstance(model, HuggingFaceLM) else model.blocks


def parts_of(model: Any) -> dict[str, list[nn.Parameter]]:
    """Return the weights of each block, of the embeddings and of the unembedding, by name of the
    part. Tied weights are those of the embeddings. All others, such as the last norm, are
    `other`."""
    part_of_weight = {}
    for number, layer in enumerate(layers_of(model)):
        for weight in layer.parameters():
            part_of_weight[id(weight)] = f"block_{number}"
    for weight in model.unembedding:
        part_of_weight[id(weight)] = "unembedding"
    is_ours = not isinstance(model, HuggingFaceLM)
    embedding = model.transformer.wte if is_ours else model.embedding
    part_of_weight[id(embedding.weight)] = "embedding"
    parts: dict[str, list[nn.Parameter]] = {}
    for weight in model.parameters():
        parts.setdefault(part_of_weight.get(id(weight), "other"), []).append(weight)
    return parts


def compile_model(
    model: Any, activation_memory_budget: float | None = None, each_layer: bool = False
) -> None:
    """Compile the model, with one graph for each shape: of training, its stages, evaluations.

    `dynamic=False` keeps PyTorch from making a graph for any shape when it sees a second one. That
    graph rounds differently, and whether it is used would depend on where a run begins."""
    torch._dynamo.config.recompile_limit = 64  # by default 8 shapes; later ones run uncompiled
    # For the whole process, as the compiler reads it at each new shape: 1 is PyTorch's default.
    budget = 1.0 if activation_memory_budget is None else activation_memory_budget
    functorch_config.activation_memory_budget = budget
    if budget < 1.0:
        # In a graph of all layers, what is computed again would be there for all of them at once.
        each_layer = True
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
    """Return the device of this process, which it shares with no other process."""
    device = choose_device(name, lambda seen: own_gpu(seen, processes), "training.device")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def own_gpu(num_seen: int, processes: Processes) -> int:
    """Return the number of this process's GPU. Launchers make all GPUs of the machine visible to a
    process, or only its own."""
    if num_seen == 1:
        return 0
    if processes.local_rank >= num_seen:
        raise ConfigError(
            f"this machine runs {processes.local_world_size} processes, but PyTorch sees "
            f"{num_seen} GPUs; launch as many processes as GPUs, or request more GPUs"
        )
    return processes.local_rank


def be_deterministic() -> None:
    """Let PyTorch take deterministic kernels, or raise where it has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    # This fills new tensors, to find reads of unset memory: slow, and needed only for debugging.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_precision(name: Precision, device: torch.device) -> Precision:
    """Return bf16 or fp32. `auto` becomes bf16 if the device multiplies it in hardware."""
    if name != "auto":
        return name
    return "bf16" if multiplies(device, torch.bfloat16) else "fp32"
