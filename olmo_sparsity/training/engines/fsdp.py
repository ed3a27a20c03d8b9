"""Train with PyTorch's `fully_shard`: each process holds a part of each weight, gradient and
moment.

    4 processes, a weight of 10 rows    process 0    rows 0 1 2
                                        process 1    rows 3 4 5
                                        process 2    rows 6 7 8
                                        process 3    row 9

The weights of a layer are gathered when it computes, forward and backward, and dropped afterwards.
So no process ever holds the whole model. The parts are fp32. With training.precision=bf16, weights
are gathered in bf16, layers compute in bf16, and gradients are summed in fp32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.sections import EngineConfig, OptimizerConfig, TrainingConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.engines.model_parts import layers_of
from olmo_sparsity.training.optimizer.moments import MomentSlice, copy_moments
from olmo_sparsity.training.optimizer.muon import ShardedMuon
from olmo_sparsity.training.optimizer.optim import build_optimizer, moments_of
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.processes.process_group import start_alone


class HeldRows(NamedTuple):
    """The rows of a weight that a process holds."""

    first: int
    """The index of the first one in the whole weight."""

    rows: Tensor


class FSDPEngine(Engine):
    """Runs steps with `fully_shard`."""

    # A graph of several layers would need the weights of all of them at once.
    compiles_each_layer = True

    def __init__(
        self,
        model: Any,
        training: TrainingConfig,
        optimizer: OptimizerConfig,
        processes: Processes,
        settings: EngineConfig,
        source: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Build the engine.

        Args:
            settings: The section `engine`.
            source: The weights of a model without memory (deferred.py), of which each process makes
                one at a time and keeps its part. None: the model has memory.
        """
        self.settings = settings
        self.source = source
        super().__init__(model, training, optimizer, processes)

    def place(self, model: Any) -> Any:
        """Leave the model where it is."""
        # `fully_shard` moves one layer at a time to the device, and keeps a part of it.
        return model

    def prepare(self, optimizer: OptimizerConfig) -> None:
        """Divide the weights among processes, fill them, and build the optimizer of the parts."""
        start_alone()  # if there is only one process
        with self.processes.raising_together():
            check_ranks(self.settings, self.processes)
        self.mesh = build_mesh(self.device, self.settings, self.processes)
        self.shard()
        if self.source is not None:
            self.fill(self.source)
            self.source = None
        self.optimizer = build_optimizer(
            self.model, optimizer, self.training.precision, ShardedMuon
        )
        sizes = " × ".join(map(str, self.mesh.shape))
        noun = "process" if self.mesh.size() == 1 else "processes"
        self.title = f"fully_shard, {sizes} {noun}"

    def shard(self) -> None:
        """Let `fully_shard` divide the weights of each layer, and those outside of layers."""
        in_bf16 = self.training.precision == "bf16"
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if in_bf16 else None,
            reduce_dtype=torch.float32,
            # Angles and biases stay in fp32, as on the other engines.
            cast_forward_inputs=False,
        )
        # The time of the whole forward pass would include waits for weights of other processes.
        self.losses.times_layers = True
        for layer in layers_of(self.model):
            fully_shard(layer, mesh=self.mesh, mp_policy=policy)
            # The hooks of `fully_shard` wait for weights before they call `forward`. It is replaced
            # afterwards only, because `fully_shard` gives the layer a class of its own, and layers
            # of transformers keep all activations if their `forward` is not that of their class.
            layer.forward = self.losses.clock.timing(layer.forward, self.device)
        # The rest is used before the first layer and after the last one: embeddings, last norm.
        fully_shard(self.losses, mesh=self.mesh, mp_policy=policy)
        for module in self.losses.modules():
            if isinstance(module, FSDPModule):
                # The loss of each process is divided by the labels of all, so gradients are added.
                # By default `fully_shard` takes their mean.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    @torch.no_grad()
    def fill(self, source: Mapping[str, Tensor]) -> None:
        """Fill the rows that this process holds. Each weight is made whole, one at a time, because
        the random numbers of a row depend on those that were drawn before it."""
        self.losses.to_empty(device=self.device)
        for name, parameter in self.model.named_parameters():
            held = self.held_rows(parameter)
            held.rows.copy_(source[name][held.first : held.first + len(held.rows)])

    def held_rows(self, sharded: Tensor) -> HeldRows:
        """Return the rows that this process holds of a weight."""
        # Weights are divided over the last dimension of the mesh: all processes, or those of a
        # node. `fully_shard` cuts as `torch.chunk` does: equal numbers of rows, rounded up.
        shard_dimension = self.mesh.ndim - 1
        num_shards = self.mesh.size(shard_dimension)
        # The last processes may hold fewer rows, or none.
        rows_per_process = math.ceil(len(sharded) / num_shards)
        first = min(len(sharded), rows_per_process * self.mesh.get_local_rank(shard_dimension))
        return HeldRows(first, cast(DTensor, sharded).to_local())

    # --- a step ---------------------------------------------------------------------------------

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return no context: the gathered weights themselves are in the run's precision."""
        return contextlib.nullcontext()

    def backward(self, micro_batch: Batch, num_labels: int, is_last: bool) -> Tensor:
        """Do as `Engine.backward`, and sum gradients over processes: in the last micro-batch of a
        step, or with `engine.reduce_every_micro_batch` in each, so that none is ever whole."""
        root = cast(FSDPModule, self.losses)
        if self.settings.reduce_every_micro_batch:
            root.set_requires_all_reduce(is_last)  # between nodes only once a step
        else:
            root.set_requires_gradient_sync(is_last)
        return super().backward(micro_batch, num_labels, is_last)

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the parts of all processes together."""
        return cast(DTensor, super().gradient_norm(gradients)).full_tensor()

    def clip_gradients(self, limit: float) -> Tensor:
        """Do as PyTorch's `clip_grad_norm_`, whose norm would stay a DTensor."""
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = self.gradient_norm(gradients)
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def token_losses(self, batch: Batch) -> Tensor:
        """Do as `Engine.token_losses`, and drop the weights that stay gathered."""
        nll_BL = super().token_losses(batch)
        # Embeddings stay gathered after a forward pass, for the backward pass that usually follows.
        cast(FSDPModule, self.losses).reshard()
        return nll_BL

    # --- state for checkpoints ------------------------------------------------------------------

    def full(self, weight: Tensor) -> Tensor:
        """Gather a weight from all processes. Buffers are whole on each."""
        return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()

    @property
    def part_number(self) -> int:
        """Return the number of this process among those that share one copy of the model."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    def replicated_weights(self) -> dict[str, Tensor]:
        """Return the rows that this process holds: with `engine.shard_over=node` other nodes hold
        the same."""
        return {
            name: cast(DTensor, weight.detach()).to_local()
            for name, weight in self.model.named_parameters()
        }

    def copy_moments(self) -> Callable[[Path], Path]:
        """Copy the moments of the rows that this process holds. With `engine.shard_over=node` each
        node holds a whole copy, and nodes take turns in saving."""
        num_copies = self.mesh.size(0) if self.mesh.ndim == 2 else 1
        copy_index = self.mesh.get_local_rank(0) if self.mesh.ndim == 2 else 0
        saved_here = (
            held for index, held in enumerate(self.moments()) if index % num_copies == copy_index
        )
        return copy_moments(saved_here, self.processes.rank, self.processes.world_size)

    def moments(self) -> Iterator[MomentSlice]:
        """Yield the moments of the rows that this process holds, as elements of the flat weight."""
        for name, parameter in self.model.named_parameters():
            held_moments = {
                key: cast(DTensor, moment).to_local().view(-1)
                for key, moment in moments_of(self.optimizer, parameter).items()
            }
            first_row = self.held_rows(parameter).first
            num_elements_of_row = parameter[0].numel()
            yield MomentSlice(name, first_row * num_elements_of_row, held_moments)

    def describe(self) -> dict[str, Any]:
        """Describe the mesh, and the precision in which weights are gathered."""
        policy = "bf16" if self.training.precision == "bf16" else "fp32"
        return super().describe() | {
            "class": "torch.distributed.fsdp.fully_shard",
            "mesh": list(self.mesh.shape),
            "gathered_in": policy,
        }


def check_ranks(settings: EngineConfig, processes: Processes) -> None:
    """Reject `engine.shard_over=node` unless the processes of each node have ranks in a row, as
    torchrun gives them."""
    if settings.shard_over == "all":
        return
    local_size = processes.local_world_size
    is_equal = processes.world_size % local_size == 0
    if not is_equal or processes.rank % local_size != processes.local_rank:
        raise ConfigError(
            "engine.shard_over=node needs nodes of equal size whose processes are numbered in a "
            f"row, but process {processes.rank} of {processes.world_size} is "
            f"{processes.local_rank} of {local_size} here; launch with srun --distribution=block, "
            "or set it to all"
        )


def build_mesh(device: torch.device, settings: EngineConfig, processes: Processes) -> DeviceMesh:
    """Return the processes as a row, which shares one copy of the model, or as a table with a row
    for each node, each of which shares one copy. For two nodes of three processes:

        engine.shard_over=all     [0, 1, 2, 3, 4, 5]
        engine.shard_over=node    [[0, 1, 2],
                                   [3, 4, 5]]
    """
    ranks = torch.arange(processes.world_size)
    if settings.shard_over == "all":
        return DeviceMesh(device.type, ranks)
    ranks = ranks.view(-1, processes.local_world_size)
    # The limit of the group of all processes, so that the watchdog reports first.
    collective_limit = timedelta(seconds=settings.work_timeout_s + 60)
    within_node, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=collective_limit)
    between_nodes, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=collective_limit)
    groups = [between_nodes, within_node]
    names = ("nodes", "processes_of_a_node")
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names)
