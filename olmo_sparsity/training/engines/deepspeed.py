"""Train with DeepSpeed's ZeRO, which divides the state of a run among its processes.

How many numbers each of N processes holds of a model with P parameters:

    stage    weights of the step    gradients    fp32 copy of weights, and each moment
    1        P                      P            P / N
    2        P                      P / N        P / N
    3        P / N                  P / N        P / N

With stage 3, the weights of a layer are gathered when it computes.

    choose.py ─> ZeroEngine(model, …)
                   place      moves each weight to the device, one at a time
                   prepare    deepspeed.initialize(model, our AdamW, settings)
    steps.py  ─> engine.step(batch)     as in engine.py, with the `backward` and `update` of here
              ─> copy_weights, copy_moments, load_moments     for checkpoints, which hold fp32

DeepSpeed sums gradients over processes, clips them and calls the optimizer. Loss, AdamW, schedule
and batch are ours; a JSON file (deepspeed_settings.py) configures only the communication.

Three things here have similar names: `deepspeed` is the library, `deepspeed_engine` its wrapper of
our model, and `zero_optimizer` its wrapper of our optimizer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.config.sections import OptimizerConfig, TrainingConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.training.engines.deepspeed_import import import_deepspeed
from olmo_sparsity.training.engines.deepspeed_settings import with_live_weights
from olmo_sparsity.training.engines.deepspeed_shards import (
    ShardPart,
    part_of_stage_3,
    part_of_stages_1_and_2,
)
from olmo_sparsity.training.engines.engine import Engine, count_processes
from olmo_sparsity.training.engines.model_parts import replace_parameters
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
        """Fill DeepSpeed's fp32 copy of the weights from the source. DeepSpeed has made the copy
        from weights that were rounded to bf16."""
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
        adamw_step = type(self.optimizer).step  # of the class, as the object's is replaced here

        def step_unless_skipped() -> None:
            if not decide_once():
                adamw_step(self.optimizer)

        self.optimizer.step = step_unless_skipped
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
            part = self._find_part(parameter)
            if part is None:  # other processes hold it
                continue
            # To the optimizer the whole shard is one parameter, with moments of its length.
            moments_of_shard = moments_of(self.optimizer, part.shard)
            end = part.offset + part.length
            moments_of_part = {
                key: moment[part.offset : end] for key, moment in moments_of_shard.items()
            }
            yield MomentSlice(name, part.start, moments_of_part)

    def _find_part(self, parameter: nn.Parameter) -> ShardPart | None:
        """Return where this process holds a part of a parameter; None if it holds none."""
        if self.stage == 3:
            return part_of_stage_3(self.zero_optimizer, parameter, self.processes.rank)
        return part_of_stages_1_and_2(self.zero_optimizer, parameter)
