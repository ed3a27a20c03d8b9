"""Make DeepSpeed's settings: a JSON file of the user, with what our config determines.

    deepspeed_settings(config.engine, config.training, world_size=8)
    # {"zero_optimization": {"stage": 2, …}, "train_batch_size": 512, …}

The file may set how processes communicate, and nothing that changes what is computed, or where.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from olmo_sparsity.base.differences import leaves
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.files import read_json
from olmo_sparsity.config.installed import CONFIGS
from olmo_sparsity.config.sections import EngineConfig, TrainingConfig

_PASSED_SETTINGS = {
    "zero_optimization",
    "communication_data_type",
    "prescale_gradients",
    "data_types",
    "gradient_predivide_factor",
    "comms_logger",
    "flops_profiler",
    "wall_clock_breakdown",
    "memory_breakdown",
    "steps_per_print",
}
"""DeepSpeed's settings of communication and of logs. All others (optimizer, schedule, precision,
offloading) would change what is computed, or where."""

_PASSED_ZERO_SETTINGS = {
    "stage",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "allgather_partitions",
    "allgather_bucket_size",
    "round_robin_gradients",
    "use_multi_rank_bucket_allreduce",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
}
"""DeepSpeed's settings of communication in the section zero_optimization."""


def deepspeed_settings(
    engine: EngineConfig, training: TrainingConfig, world_size: int
) -> dict[str, Any]:
    """Return DeepSpeed's settings: those of the JSON file, which may only concern communication,
    and the values of our config."""
    path = Path(engine.deepspeed_config or CONFIGS / f"deepspeed/{engine.name}.json")
    settings = read_json(path, dict, "engine.deepspeed_config names DeepSpeed's JSON settings")
    for key, _ in leaves(settings):
        if not _is_passed_on(key):
            raise ConfigError(
                f"{path}: {key} is not passed to DeepSpeed, as it is no setting of communication, "
                "or the run's config sets it; remove it"
            )
    stage = int(engine.name.removeprefix("zero"))
    zero_settings = settings.get("zero_optimization", {})
    if zero_settings.get("stage", stage) != stage:
        raise ConfigError(
            f"{path}: zero_optimization.stage={zero_settings['stage']} is not that of "
            f"{engine.name=!s}; remove it"
        )
    sequences_of_process = training.batch_size // world_size
    micro_batch_size = training.micro_batch_size or sequences_of_process
    return settings | {
        "zero_optimization": zero_settings | {"stage": stage},
        "train_batch_size": training.batch_size,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": sequences_of_process // micro_batch_size,
        "gradient_clipping": training.max_grad_norm or 0.0,
        # Otherwise ZeRO-1 holds bf16 gradients of all weights until the next step.
        "bf16": {"enabled": training.precision == "bf16", "immediate_grad_update": True},
    }


def with_live_weights(settings: dict[str, Any], largest_weight: int) -> dict[str, Any]:
    """Return settings of ZeRO-3 with `stage3_max_live_parameters`: how many numbers of weights are
    whole at a time, those in use and those fetched ahead. A JSON file that has it, or no bucket for
    what is fetched ahead, is left as it is."""
    zero_settings = settings["zero_optimization"]
    bucket_size = zero_settings.get("stage3_prefetch_bucket_size")
    if "stage3_max_live_parameters" in zero_settings or bucket_size is None:
        return settings
    # With less than the largest weight, nothing is fetched ahead while it is in use. DeepSpeed's
    # default, 1e9, fetches far more than the next layers need: of four processes with 24 layers
    # each took 1,163 MiB instead of 914 (benchmarks/memory.py). The estimate counts as much as is
    # set here (`state_bytes` in estimate/state_memory.py).
    num_live = 2 * max(bucket_size, largest_weight)
    return settings | {
        "zero_optimization": zero_settings | {"stage3_max_live_parameters": num_live}
    }


def _is_passed_on(key: str) -> bool:
    """Return whether a key of the JSON file, such as `zero_optimization.stage`, is passed on."""
    section, _, leaf = key.partition(".")
    if section == "zero_optimization":
        return leaf in _PASSED_ZERO_SETTINGS
    return section in _PASSED_SETTINGS
