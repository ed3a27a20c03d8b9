"""Translate config keys of OLMo to those of this project.

Place in the flow: between a YAML file and config.py. OLMo's keys without a counterpart are kept,
and refused as unknown.
"""

from __future__ import annotations

import re
from typing import Any

from olmo_sparsity.errors import ConfigError

NAMES = {
    "save_folder": "run_folder",
    "load_path": "branch_from",
    "global_train_batch_size": "training.batch_size",
    "device_train_microbatch_size": "training.micro_batch_size",
    "max_grad_norm": "training.max_grad_norm",
    "precision": "training.precision",
    "eval_interval": "evaluation.interval_steps",
    "save_interval": "checkpoint.interval_steps",
    "save_num_checkpoints_to_keep": "checkpoint.keep",
    "console_log_interval": "logging.interval_steps",
    "optimizer.betas": "optimizer.beta1, optimizer.beta2",
    "scheduler.name": "optimizer.schedule",
    "scheduler.t_warmup": "optimizer.warmup_steps",
    "scheduler.alpha_f": "optimizer.final_lr_share",
    "tokenizer.identifier": "data.tokenizer.name",
    "data.paths": "data.train_files",
    "max_duration": "training.num_steps",
}

VALUES = {
    "scheduler.name": {"linear_with_warmup": "linear", "cosine_with_warmup": "cosine"},
    "precision": {"amp_bf16": "bf16"},
}


def translate(given: dict[str, Any], origin: str) -> dict[str, Any]:
    """Replace OLMo's names by ours. `max_duration` in tokens (`2e9T`) needs the batch size and
    length as well."""
    theirs = {name: _take(given, name.split(".")) for name in NAMES if _has(given, name.split("."))}
    for name, value in theirs.items():
        ours = NAMES[name].split(", ")
        value = VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value
        if name == "max_duration":
            value = _num_steps(value, given, origin)
        values = value if len(ours) > 1 else [value]
        if not isinstance(values, list) or len(values) != len(ours):
            raise ConfigError(f"{origin}: {name}={value} must be {len(ours)} numbers")
        for key, item in zip(ours, values, strict=True):
            if _has(given, key.split(".")):
                raise ConfigError(
                    f"{origin}: {name} and {key} are the same; leave one of them out, "
                    f"or write --{key}=… on the command line"
                )
            _put(given, key.split("."), item)
    return given


def _num_steps(duration: Any, given: dict[str, Any], origin: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)(T?)", str(duration).strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(
            f"{origin}: max_duration={duration} must be steps, or tokens with a T (2e9T)"
        )
    number = float(match[1])
    if match[2]:
        try:
            section = given["training"]
            length = section["length"]
            if isinstance(length, list):
                length = max(int(stage["tokens"]) for stage in length)
            number /= int(section["batch_size"]) * int(length)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"{origin}: max_duration={duration} needs training.batch_size and training.length "
                "beside it"
            ) from None
    return -int(-number // 1)


def _has(given: Any, path: list[str]) -> bool:
    for name in path:
        if not isinstance(given, dict) or name not in given:
            return False
        given = given[name]
    return True


def _take(given: dict[str, Any], path: list[str]) -> Any:
    """Remove and return the value, and remove a section that becomes empty."""
    name, *rest = path
    if not rest:
        return given.pop(name)
    value = _take(given[name], rest)
    if not given[name]:
        del given[name]
    return value


def _put(given: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, leaf = path
    for parent in parents:
        if given.get(parent) is None:
            given[parent] = {}
        given = given[parent]
        if not isinstance(given, dict):
            raise ConfigError(f"{parent}={given} must be a section with settings")
    given[leaf] = value
