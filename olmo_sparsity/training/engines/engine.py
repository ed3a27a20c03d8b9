"""Run training steps on one process or several: device, precision, accumulation, clipping.

    engine = build_engine(model, …)                 # choose.py, from restore.py
    loss, gradient_norm = engine.step(batch, 3e-4)  # steps.py, for each step
    engine.copy_weights(), engine.copy_moments()    # after_step/save.py, for each checkpoint

    step(batch) ─> backward(micro-batch), for each ─> update: clip, optimizer, zero gradients

Engines differ in what each process holds, and in who sums gradients over processes. They override
`place`, `prepare`, `backward` and `moments` accordingly:

    engine        file            weights              gradients summed by    optimizer state
    Engine        here            all                  (one process)          all
    DDPEngine     ddp.py          all                  DDP                    all
    FSDPEngine    fsdp.py         rows of each         `fully_shard`          of these rows
    ZeroEngine    deepspeed.py    all; ZeRO-3: part    DeepSpeed              a flat shard

The loss of a step is the mean over the labels of all processes, which may have different numbers of
labels: each process contributes the sum of its losses divided by the number of all labels. With 6
labels on one process and 2 on the other, that is (l₁ + … + l₆) / 8 and (l₇ + l₈) / 8, which add up
to the mean.

Dimension key: B batch, L length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from olmo_sparsity.config.sections import OptimizerConfig, TrainingConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.text.vocabulary import IGNORED
from olmo_sparsity.training.engines.compilation import compile_model
from olmo_sparsity.training.engines.losses import Losses
from olmo_sparsity.training.engines.model_parts import parts_of
from olmo_sparsity.training.optimizer.jump_detector import JumpDetector
from olmo_sparsity.training.optimizer.moments import (
    MomentSlice,
    SavedMoments,
    copy_moments,
    share_out,
    to_main_memory,
)
from olmo_sparsity.training.optimizer.optim import build_optimizer, moments_of
from olmo_sparsity.training.processes.device import be_deterministic, own_device
from olmo_sparsity.training.processes.distributed import Processes


class StepNumbers(NamedTuple):
    """The numbers of one step, of the whole batch. They are still on the device."""

    loss: Tensor
    """The mean over the labels of all processes."""

    gradient_norm: Tensor
    """Before clipping."""


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
        """Build the engine: place the model, wrap its loss, compile it, and build the optimizer.

        Args:
            training: The section `training`.
            optimizer: The section `optimizer`.
            processes: The processes that train together; None: this one alone.
        """
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
        self.optimizer = build_optimizer(self.model, optimizer, self.training.precision)

    # --- a step ---------------------------------------------------------------------------------

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context of a forward pass, in which products are in the run's precision."""
        if self.training.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def step(
        self, batch: Batch, learning_rate: float, jump_detector: JumpDetector | None = None
    ) -> StepNumbers:
        """Make one optimizer step on this process's share of a batch. The host does not wait for
        it, so that it can launch the next step.

        Args:
            jump_detector: Skips the update of a step that jumps, for which the host waits for the
                norm. None: no update is skipped.
        """
        if not self.model.training:
            self.model.train()  # only if needed, as it visits all modules
        num_labels = self._count_labels(batch)
        micro_batches = list(batch.split(self._sequences_at_once(batch)))

        # Each loss is divided by the labels of all processes, so that their sum is the mean.
        loss = torch.zeros((), device=self.device)
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            loss += self.backward(micro_batch.to(self.device), num_labels, is_last).detach()
        if self.processes.world_size > 1:
            dist.all_reduce(loss)
        gradient_norm = self.update(learning_rate, partial(self.is_skipped, jump_detector, loss))
        return StepNumbers(loss, gradient_norm)

    def _count_labels(self, batch: Batch) -> int:
        """Return the number of labels of a step, on all processes."""
        if batch.num_labels is not None:
            return batch.num_labels
        # It depends on the text, so the host waits for all processes.
        return self.processes.sum_integers(int((batch.labels_BL != IGNORED).sum()))

    def _sequences_at_once(self, batch: Batch) -> int:
        """Return the number of sequences of a micro-batch."""
        at_full_length = self.training.micro_batch_size or len(batch.tokens_BL)
        # Of shorter sequences more fit: as many as have the tokens of a full micro-batch.
        return at_full_length * (self.training.length // batch.tokens_BL.shape[1])

    def is_skipped(self, jump_detector: JumpDetector | None, loss: Tensor, norm: Tensor) -> bool:
        """Return whether the update of a step is skipped, with the same answer on all processes."""
        if jump_detector is None:
            return False
        is_jump = jump_detector.is_jump(float(loss), float(norm))
        # If their rounding makes decisions differ, one process that skips is enough.
        if not self.processes.sum_integers(is_jump):
            return False
        jump_detector.num_skipped += 1
        return True

    def backward(self, micro_batch: Batch, num_labels: int, is_last: bool) -> Tensor:
        """Add the gradients of a micro-batch, and return the sum of its losses divided by
        `num_labels`.

        Args:
            num_labels: The number of labels of the whole step, on all processes.
            is_last: Whether it is the last one of the step, after which gradients are summed over
                processes.
        """
        with self.autocast():
            loss = self.losses(micro_batch, num_labels)
        loss.backward()
        return loss

    def update(self, learning_rate: float, is_skipped: Callable[[Tensor], bool]) -> Tensor:
        """Clip gradients and update the weights, unless `is_skipped(gradient norm)`. Return the
        norm before clipping."""
        if self.logs_layer_norms:
            self.layer_norms = self._compute_layer_norms()
        limit = self.training.max_grad_norm
        norm = self.clip_gradients(float("inf") if limit is None else limit)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if not is_skipped(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _compute_layer_norms(self) -> dict[str, Tensor]:
        """Return the gradient norm of each part of the model, such as `block_0`."""
        norms = {}
        for part_name, weights in parts_of(self.model).items():
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            if gradients:
                norms[part_name] = self.gradient_norm(gradients)
        return norms

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
    def saver_of(self) -> dict[str, int]:
        """Return the rank of the process that saves each weight, by the weight's name. All
        processes save about as many bytes."""
        # DeepSpeed empties a parameter that it shards, and keeps its size as `ds_numel`.
        sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in self.weights()}
        return share_out(sizes, self.processes.world_size)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and weights. Tied weights are yielded once, under their first name."""
        yielded: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in yielded:
                yielded.add(id(tensor))
                yield name, tensor

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
        """Copy weights into main memory, in fp32. Every process must call it.

        Args:
            whole: Copy all weights, and not only those that this process saves.
        """

        def gather_one_by_one() -> Iterator[tuple[str, Tensor]]:
            for name, weight in self.weights():
                full = self.full(weight)  # called by all processes, also those that do not keep it
                if whole or self.saver_of[name] == self.processes.rank:
                    yield name, full

        return to_main_memory(gather_one_by_one())

    def copy_moments(self) -> Callable[[Path], Path]:
        """Copy this process's part of the optimizer state. Return a function that writes it into a
        folder, and returns its file."""
        rank = self.processes.rank
        # Every process has all moments, so each saves those of the weights that it saves.
        saved_here = (held for held in self.moments() if self.saver_of[held.parameter] == rank)
        return copy_moments(saved_here, rank, self.processes.world_size)

    def load_moments(self, folder: Path, step: int) -> None:
        """Fill the optimizer state from a checkpoint.

        Args:
            folder: The folder `engine` of the checkpoint.
            step: The number of updates so far, which Adam's bias correction needs.
        """
        saved = SavedMoments(folder, self.processes.rank)
        for held in self.moments():
            saved.fill(held)
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


def count_processes(number: int) -> str:
    """Return the number of processes in words."""
    return "1 process" if number == 1 else f"{number} processes"
