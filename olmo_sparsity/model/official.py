"""Read checkpoint folders of OLMo's own trainer: `config.yaml` and model.safetensors or model.pt.

Place in the flow: beneath `import_weights`. Parameter names are the same as ours.
"""

from __future__ import annotations

import base64
import pickle
import pickletools
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from olmo.config import ModelConfig
from olmo.model import OLMo
from torch import Tensor

from olmo_sparsity.analysis.models.fingerprint import unreadable
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.io import MANIFEST
from olmo_sparsity.model.checkpoint_files import WEIGHTS, read_weights
from olmo_sparsity.settings import build, read_yaml


def is_official(source: str) -> bool:
    """Whether it has a `config.yaml`, but neither a manifest nor checkpoints/ as ours do."""
    folder = Path(source)
    ours = (folder / MANIFEST).exists() or (folder / "checkpoints").is_dir()
    return (folder / "config.yaml").is_file() and not ours


def read_official_config(folder: Path) -> ModelConfig:
    path = folder / "config.yaml"
    config = build(ModelConfig, read_yaml(path).get("model"), f"{path}: model")
    if not (config.rope or config.alibi):
        raise ConfigError(
            f"'{path}': model.rope=False and model.alibi=False mean learned position embeddings, "
            "which are not supported; choose a checkpoint with either"
        )
    return config


def read_official_weights(folder: Path) -> dict[str, Tensor]:
    if (folder / WEIGHTS).is_file():
        weights = {_plain_name(key): t for key, t in read_weights(folder / WEIGHTS).items()}
    elif (folder / "model.pt").is_file():
        try:
            weights = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
            raise unreadable(folder / "model.pt", error) from None
    else:
        raise DataError(
            f"'{folder}' has neither {WEIGHTS} nor model.pt; download one of them, or unshard the "
            "checkpoint with OLMo's scripts/unshard.py"
        )
    # Upstream's conversion of older names and grouped blocks, which reads only the config.
    config = read_official_config(folder).update_with(block_group_size=1)
    return OLMo._make_state_dict_compatible(cast(OLMo, SimpleNamespace(config=config)), weights)[0]


def _plain_name(key: str) -> str:
    """OLMo's safetensors files name a tensor by a base64 pickle of ((name,), flag). The name is
    read from its opcodes, without unpickling."""
    if "." in key:
        return key
    try:
        opcodes = list(pickletools.genops(base64.urlsafe_b64decode(key)))
    except ValueError:
        return key
    return ".".join(str(arg) for opcode, arg, _ in opcodes if "UNICODE" in opcode.name)
