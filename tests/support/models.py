"""Tiny random models of transformers and of ours, and checkpoints of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from torch import Tensor

from olmo_sparsity.base.manifest import write_manifest
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.run import save_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.text import PositionsConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.checkpoint_files import fill, save_weights

COUNTED = torch.arange(12)[None]
GAPPED = torch.tensor([[0, 1, 2, 3, 9, 10, 11, 12, 30, 31, 32, 33]])

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # attention must matter enough to show what it attends to
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
OLDER_SIZES = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
TOKEN_IDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}


def draw_tokens(length: int = 12) -> Tensor:
    return torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(1))


def tiny(class_name: str, **settings: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**settings)).eval()


def llama(**settings: Any) -> transformers.PreTrainedModel:
    return tiny("LlamaForCausalLM", **(SIZES | settings))


FIELDS: dict[str, Any] = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 61,
    "max_sequence_length": 64,
    "init_std": 0.2,
}


def word_tokenizer(num_words: int) -> Tokenizer:
    return Tokenizer(models.WordLevel({f"t{i}": i for i in range(num_words)}, unk_token="t0"))


def write_checkpoint(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    positions: dict[str, Any] | None = None,
    weights: dict[str, Tensor] | None = None,
    **changes: Any,
) -> torch.nn.Module:
    """Random in every weight, if none are given: norms' too, which would begin as ones and biases
    as zeros."""
    folder.mkdir(parents=True)
    model_config = ModelConfig(**(FIELDS | {"max_sequence_length": 256} | changes))
    run = RunConfig(model=model_config, positions=PositionsConfig(**(positions or {})))
    run.data.tokenizer.name = "tokenizer.json"
    torch.manual_seed(len(folder.name))
    model = build_model(run.model)
    if weights is None:
        randomize_vectors(model)
    else:
        fill(model, weights, "the test")
    save_config(run, folder / "config.yaml")
    save_weights(model, folder / "model.safetensors")
    (tokenizer or word_tokenizer(60)).save(str(folder / "tokenizer.json"))
    (folder / "engine").mkdir()
    (folder / "engine" / "optimizer.bin").write_bytes(b"moments")
    write_manifest(folder)
    return model.eval()


@torch.no_grad()
def randomize_vectors(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))


def steps(run: Path, *numbers: int) -> list[Path]:
    folders = [run / "checkpoints" / f"step{number:06}" for number in numbers]
    for folder in folders:
        write_checkpoint(folder)
    return folders


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


_PLAIN = {name: value for name, value in FIELDS.items() if name != "init_std"}


def tiny_olmo(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = build_model(ModelConfig(**(_PLAIN | changes)))
    with torch.no_grad():  # biases begin at zero, which would hide their loss
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model
