"""Train with DeepSpeed's ZeRO, which shards the state of the optimizer (stage 1), also gradients
(2), and also weights (3).

    choose.py ─> ZeroEngine(model, …)
                          place      each weight to the device, one at a time; stage 3 keeps a shard
                          prepare    deepspeed.initialize(model, our AdamW, settings)
    steps.py         ─> engine.step(batch)    engine.py; `backward` and `update` are DeepSpeed's
                     ─> copy_weights, copy_moments, load_moments    for checkpoints

Loss, optimizer, schedule, clipping and batch are ours; a JSON file (deepspeed_settings.py)
configures only the communication. In bf16 an fp32 copy of the weights is sharded with the moments.
Checkpoints hold that copy.

Three things here have similar names: `deepspeed` is the library, `deepspeed_engine` its wrapper of
our model, and `zero_optimizer` its wrapper of our optimizer.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor, nn

from olmo_sparsity.base.errors import ConfigError, UserError
from olmo_sparsity.config.sections import OptimizerConfig, TrainingConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.training.engines.deepspeed_settings import with_live_weights
from olmo_sparsity.training.engines.engine import Engine, count_processes
from olmo_sparsity.training.optimizer.moments import MomentSlice, copy_moments
from olmo_sparsity.training.optimizer.optim import build_adamw, moments_of
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.processes.process_group import start_alone


class ZeroEngine(Engine):
    """Runs steps with DeepSpeed's ZeRO."""

    def __init__(
        self,
        model: Any,
        training: TrainingConfig,
        optimizer: OptimizerConfig,
        processes: Processes,
        settings: dict[str, Any],
        source: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Build the engine.

        Args:
            settings: What `deepspeed_settings` returns.
            source: The weights of a model without memory (deferred.py). Each process makes one
                weight at a time, and keeps it in the engine's precision, or with ZeRO-3 only its
                shard.
        """
        self.stage = settings["zero_optimization"]["stage"]
        if self.stage == 3:
            largest_weight = max(weight.numel() for weight in model.parameters())
            settings = with_live_weights(settings, largest_weight)
        self.settings = settings
        self.source = source
        """The fp32 weights; None after they were copied to the device."""

        super().__init__(model, training, optimizer, processes)  # calls `place`, then `prepare`

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights on the device."""
        return torch.bfloat16 if self.training.precision == "bf16" else torch.float32

    # --- building -------------------------------------------------------------------------------

    def place(self, model: Any) -> Any:
        """Move the weights to the device in the engine's precision, one at a time; with stage 3
        only this process's shard of each."""
        # DeepSpeed reads this process's device from the variable, not from our model.
        device_index = (
            self.device.index if self.device.type == "cuda" else self.processes.local_rank
        )
        os.environ["LOCAL_RANK"] = str(device_index or 0)
        start_alone()
        self.deepspeed = import_deepspeed(self.device)
        if self.source is None:
            # A model of main memory stays there as the source: on the device, its weights are
            # never in fp32 as a whole.
            self.source = {name: weight.detach() for name, weight in model.named_parameters()}

        # One weight at a time, so that no process ever holds the whole model in fp32.
        placed_weights: dict[int, nn.Parameter] = {}
        for name, weight in model.named_parameters():
            placed_weights[id(weight)] = self._place_weight(self.source[name])
        replace_parameters(model, placed_weights)
        if self.stage == 3:
            return model  # `Init` has moved its weights
        return model.to(self.device)  # moves its buffers, too

    def _place_weight(self, weight: Tensor) -> nn.Parameter:
        """Return a weight on the device, in the engine's precision; with stage 3 only this
        process's shard of it."""
        parameter = nn.Parameter(weight.to(self.device, self.dtype))
        if self.stage == 3:
            # `Init` shards the parameters of modules alone, so the weight gets one for a moment.
            module = nn.ParameterList([parameter])
            self.deepspeed.zero.Init(module, config_dict_or_path=self.settings, dtype=self.dtype)
        return parameter

    def prepare(self, optimizer: OptimizerConfig) -> None:
        """Have DeepSpeed wrap the model and our AdamW."""
        # DeepSpeed accepts PyTorch's AdamW itself, and no subclass such as ours.
        adamw = build_adamw(self.model.parameters(), self.model, optimizer, torch.optim.AdamW)
        self.deepspeed_engine, self.zero_optimizer, *_ = self.deepspeed.initialize(
            model=self.losses,
            optimizer=adamw,
            config=self.settings,
            dist_init_required=False,
        )
        with self.processes.raising_together():
            self._check_engine()
        self.optimizer = self.zero_optimizer.optimizer  # ours, with flat shards as parameters
        self._restore_fp32_weights()
        self.source = None
        noun = count_processes(self.processes.world_size)
        self.title = f"DeepSpeedEngine, ZeRO-{self.stage}, {noun}"

    def _check_engine(self) -> None:
        """Raise UserError if DeepSpeed has silently fallen back on another engine or optimizer."""
        expected = "DeepSpeedZeroOptimizer_Stage3" if self.stage == 3 else "DeepSpeedZeroOptimizer"
        dtype_of_model, dtype_of_gradients = self.deepspeed_engine.get_data_types()
        if self.stage == 1 and dtype_of_model != dtype_of_gradients:
            expected = "BF16_Optimizer"
        engine_class = type(self.deepspeed_engine)
        optimizer_name = type(self.zero_optimizer).__name__
        stage = self.deepspeed_engine.zero_optimization_stage()
        is_engine = engine_class is self.deepspeed.DeepSpeedEngine
        if not is_engine or optimizer_name != expected or stage != self.stage:
            raise UserError(
                f"engine.name: DeepSpeed built {engine_class.__name__} with {optimizer_name}, "
                f"stage {stage}, not {expected}, stage {self.stage}; change engine.deepspeed_config"
            )

    def _restore_fp32_weights(self) -> None:
        """Fill DeepSpeed's fp32 copy from the source: it has made the copy from weights that were
        rounded to bf16."""
        if self.dtype == torch.float32:
            return
        from deepspeed.utils import safe_set_full_fp32_param

        assert self.source is not None
        for name, parameter in self.model.named_parameters():
            safe_set_full_fp32_param(parameter, self.source[name].to(self.device))

    def describe(self) -> dict[str, Any]:
        """Describe DeepSpeed's own engine, optimizer and settings."""
        engine_class = type(self.deepspeed_engine)
        return super().describe() | {
            "class": f"{engine_class.__module__}.{engine_class.__name__}",
            "optimizer": type(self.zero_optimizer).__name__,
            "zero_stage": self.stage,
            "settings": self.settings,
        }

    # --- a step ---------------------------------------------------------------------------------

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return no context: the weights themselves are in the run's precision."""
        return contextlib.nullcontext()

    def backward(self, micro_batch: Batch, num_labels: int, is_last: bool) -> Tensor:
        """Do as `Engine.backward`, by DeepSpeed, which also sums gradients over processes."""
        loss = self.deepspeed_engine(micro_batch, num_labels)
        # DeepSpeed takes the mean over processes, where we need the sum; it sums micro-batches.
        scaled_loss = loss * self.processes.world_size
        self.deepspeed_engine.backward(scaled_loss, scale_wrt_gas=False)
        if not is_last:
            self.deepspeed_engine.step()  # counts the micro-batch; only the last one updates
        return loss

    def update(self, learning_rate: float, is_skipped: Callable[[Tensor], bool]) -> Tensor:
        """Do as `Engine.update`, by DeepSpeed, which also clips gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        # DeepSpeed clips gradients and then calls the optimizer, once or for each of its shards.
        # Only in between is the norm known, so the decision to skip is made inside of that call.
        # `is_skipped` counts and communicates, so it must be called once a step.
        decide_once = cache(lambda: is_skipped(self.norm))
        optimizer_step = type(self.optimizer).step
        self.optimizer.step = lambda: None if decide_once() else optimizer_step(self.optimizer)
        self.deepspeed_engine.step()
        return self.norm

    @property
    def norm(self) -> Tensor:
        """Return the norm of the gradients before clipping."""
        norm = self.zero_optimizer._global_grad_norm
        return torch.as_tensor(norm, dtype=torch.float32, device=self.device)

    # --- state for checkpoints ------------------------------------------------------------------

    def full(self, weight: Tensor) -> Tensor:
        """Gather DeepSpeed's fp32 copy of a weight from all processes."""
        from deepspeed.utils import safe_get_full_fp32_param

        # DeepSpeed knows only parameters. Buffers are whole on each process.
        if not weight.requires_grad:
            return weight.detach()
        full: Tensor = safe_get_full_fp32_param(weight)
        return full.detach()

    def replicated_weights(self) -> dict[str, Tensor]:
        """Return all weights in the precision of a step; with stage 3 none."""
        # With stage 3 each process holds a part of its own, of which there is no copy.
        return {} if self.stage == 3 else super().replicated_weights()

    def copy_moments(self) -> Callable[[Path], Path]:
        """Copy all moments that this process has: no other one has them."""
        return copy_moments(self.moments(), self.processes.rank, self.processes.world_size)

    def moments(self) -> Iterator[MomentSlice]:
        """Yield the moments in this process's flat shard, parameter by parameter."""
        for name, parameter in self.model.named_parameters():
            if self.stage == 3:
                part = self._part_of_stage_3(parameter)
            else:
                part = self._part_of_stages_1_and_2(parameter)
            if part is None:  # other processes hold it
                continue
            moments_of_shard = moments_of(self.optimizer, part.shard)
            end = part.offset + part.length
            moments_of_part = {
                key: moment[part.offset : end] for key, moment in moments_of_shard.items()
            }
            yield MomentSlice(name, part.start, moments_of_part)

    def _part_of_stages_1_and_2(self, parameter: Any) -> ShardPart | None:
        """Return where this process holds a parameter; None if it does not. These stages
        concatenate all parameters and cut the result into equal shards, so that a parameter may be
        in one shard or in several."""
        # DeepSpeed's words: lp is the parameter in low precision, hp its fp32 copy in the shard.
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        name = "single_partition_of_fp32_groups"
        if not hasattr(self.zero_optimizer, name):  # BF16_Optimizer
            name = "fp32_groups_flat_partition"
        shards_of_groups = getattr(self.zero_optimizer, name)
        in_parameter = mapping.lp_fragment_address
        return ShardPart(
            shard=shards_of_groups[mapping.param_group_index],
            offset=mapping.hp_fragment_address.start,
            start=in_parameter.start,
            length=in_parameter.numel,
        )

    def _part_of_stage_3(self, parameter: Any) -> ShardPart | None:
        """Return where this process holds a parameter; None if it holds padding only. ZeRO-3 cuts
        each parameter into equal parts, of which the last is padded, and concatenates the parts of
        a process."""
        # For 10 numbers on 4 processes padded_length is 3, and rank 3 holds the last number alone.
        parameter_id = self.zero_optimizer.get_param_id(parameter)
        group, offset, padded_length = self.zero_optimizer.grad_position[parameter_id]
        start = self.processes.rank * padded_length
        length = min(padded_length, parameter.ds_numel - start)
        if length <= 0:  # only padding
            return None
        shard = self.zero_optimizer.fp32_partitioned_groups_flat[group]
        return ShardPart(shard, offset, start, length)


class ShardPart(NamedTuple):
    """The place of a part of a parameter in the flat shard of this process:

    parameter    0 … start … start + length … end
    shard             offset … offset + length
    """

    shard: Tensor
    offset: int
    """The first element of the part in the shard."""

    start: int
    """The first element of the part in the flat parameter."""

    length: int


def replace_parameters(model: nn.Module, replacements: Mapping[int, nn.Parameter]) -> None:
    """Replace each parameter of a model. Tied weights are one parameter of several modules, and
    stay one.

    Args:
        replacements: The new parameters, by the `id` of the old ones.
    """
    for module in model.modules():
        # Not `named_parameters`, which names a tied weight once.
        for name, weight in module._parameters.items():
            module._parameters[name] = None if weight is None else replacements[id(weight)]


MIN_VERSION = "0.19.7"
"""The oldest version of DeepSpeed. Older ones divide gradients by the number of micro-batches."""


def import_deepspeed(device: torch.device) -> Any:
    """Return the module `deepspeed`, ready to be used. Raise ConfigError if it is missing or
    old."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    # torch renamed collectives that DeepSpeed calls each step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.", FutureWarning)
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"engine.name requires DeepSpeed, which cannot be imported ({error}): "
            f"pip install 'deepspeed>={MIN_VERSION}'"
        ) from None
    if Version(deepspeed.__version__) < Version(MIN_VERSION):
        raise ConfigError(
            f"engine.name requires a newer DeepSpeed than the installed {deepspeed.__version__}: "
            f"pip install 'deepspeed>={MIN_VERSION}'"
        )
    # Disables shared-memory collectives, which are for inference, and the search for extensions,
    # which starts compilers. They would be compiled on first use, under a lock that a killed
    # process never releases.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(auto_mpi_discovery=False, dist_init_required=False)
    return deepspeed
