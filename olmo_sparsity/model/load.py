"""Any model of ours or of Hugging Face's behind one call, with position IDs as an argument.

Place in the flow: a folder or hub name → **model** (+ tokenizer) → per-token losses.

`build_model` makes a fresh model from a config; `load_model` reads a trained one. Nothing here
unpickles: weights are safetensors or they are refused.

Dimension key: B batch, L length, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import nn

from olmo_sparsity.config import ModelConfig
from olmo_sparsity.config_file import load_config
from olmo_sparsity.errors import ConfigError, DataError, UserError, is_out_of_memory
from olmo_sparsity.files import stays_inside
from olmo_sparsity.launch import read_launch
from olmo_sparsity.model.checkpoint_files import (
    MANIFEST,
    WEIGHTS,
    fingerprint,
    latest_checkpoint,
    list_checkpoints,
    load_weights,
    unreadable,
    verify_manifest,
)
from olmo_sparsity.model.huggingface import HuggingFaceLM, gpt_neox_config
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.progress import say

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READ_BY_ANALYSIS = ("config.yaml", WEIGHTS, "tokenizer.json")

NO_CODE: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
"""To everything of transformers that opens a folder: unsaid, `auto_map` in a config.json makes it
ask on the terminal whether to run the folder's code."""

_MOST_PACKED = 32
"""Quantized weights have up to so many to a stored number; tied ones are stored once."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# --- a fresh model ------------------------------------------------------------------------------


def build_model(config: ModelConfig) -> PositionedOLMo | HuggingFaceLM:
    if config.vocab_size < 1:
        raise ConfigError(
            f"model.vocab_size={config.vocab_size} leaves nothing to predict; set it to the size "
            "of the tokenizer's vocabulary"
        )
    if config.architecture == "olmo":
        return PositionedOLMo(config)
    from transformers import GPTNeoXForCausalLM

    return HuggingFaceLM(GPTNeoXForCausalLM(gpt_neox_config(config)))


# --- a trained model ----------------------------------------------------------------------------


@dataclass
class LoadedModel:
    model: PositionedOLMo | HuggingFaceLM
    """In evaluation mode, on its device, in its dtype."""

    tokenizer: Tokenizer | None
    name: str
    num_parameters: int
    max_positions: int | None
    """One more than the largest position ID it is prepared for; None if it does not say."""

    fingerprint: str
    """SHA-256 of the weights; see `checkpoint_files.fingerprint`."""

    trained: dict[str, Any] = field(default_factory=dict)
    """How, where the checkpoint says: steps, position scheme, lengths, seed, init_from."""


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def load_model(
    path_or_hub_name: str,
    *,
    device: str = "auto",
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    device_map: str | None = None,
) -> LoadedModel:
    """A run or checkpoint folder of ours, a Hugging Face folder, or a name on the hub."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype} is not known; choose one of {', '.join(DTYPES)}")
    if device == "auto":
        # Launchers show a process all GPUs of its machine, or its own one only.
        local = read_launch().local_rank % max(torch.cuda.device_count(), 1)
        device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device}, but PyTorch sees no GPU here; use device=cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(f"device={device} cannot be used here; use device=cpu") from None
    folder = find_folder(path_or_hub_name)
    if (folder / "config.json").is_file():
        loaded = _load_hugging_face(folder, path_or_hub_name, DTYPES[dtype], device, device_map)
    elif device_map is not None:
        raise ConfigError(
            f"device_map={device_map} is for Hugging Face models; '{folder}' is a checkpoint of "
            "ours, which goes to one device: remove it"
        )
    else:
        loaded = _load_checkpoint(folder, DTYPES[dtype], device)
        step, num_steps = loaded.trained["step"], loaded.trained["num_steps"]
        if folder != Path(path_or_hub_name) and step is not None and step < num_steps:
            say(f"{path_or_hub_name} has not ended: reading step {step:,} of {num_steps:,}")
    size = loaded.tokenizer.get_vocab_size() if loaded.tokenizer is not None else 0
    if size > loaded.model.vocab_size:
        raise ConfigError(
            f"'{path_or_hub_name}': its tokenizer has {size} tokens, its embedding only "
            f"{loaded.model.vocab_size} rows; put the tokenizer it was trained with beside it"
        )
    return loaded


def find_folder(path_or_hub_name: str) -> Path:
    """Where the files are: a run folder becomes its latest checkpoint, a hub name is downloaded."""
    path = Path(path_or_hub_name)
    if not path.exists():
        if path_or_hub_name.startswith("runs/"):  # where configs/ put their runs: no hub has them
            raise DataError(f"{path_or_hub_name} does not exist; train it first, or mend the path")
        if re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path_or_hub_name):
            return _download(path_or_hub_name)
        raise DataError(f"'{path}' does not exist; give a run, a checkpoint or a model folder")
    if (path / "config.json").is_file() or (path / MANIFEST).is_file():
        return path
    if (path / "checkpoints").is_dir():
        return _latest_or_fail(path)
    raise DataError(
        f"'{path}' is no model folder: it has neither config.json (Hugging Face), nor {MANIFEST} "
        "(a checkpoint of ours), nor checkpoints/ (a run of ours); to start a run from an official "
        "OLMo checkpoint set init_from"
    )


def _latest_or_fail(run_folder: Path) -> Path:
    found = list_checkpoints(run_folder)
    if not found:
        raise DataError(f"'{run_folder / 'checkpoints'}' holds no step* folder; train first")
    latest = latest_checkpoint(run_folder, READ_BY_ANALYSIS)
    if latest == found[0]:
        return latest
    problem = f"{found[0]}: {verify_manifest(found[0], READ_BY_ANALYSIS)}"
    if latest is None:
        raise DataError(f"no checkpoint of '{run_folder}' is whole; the latest, {problem}")
    say(f"{problem}; reading {latest.name} instead")
    return latest


def _load_checkpoint(folder: Path, dtype: torch.dtype, device: str) -> LoadedModel:
    problem = verify_manifest(folder, READ_BY_ANALYSIS)
    if problem is not None:
        raise DataError(f"checkpoint '{folder}': {problem}; use another one of its run")
    config = load_config(folder / "config.yaml")
    number = re.fullmatch(r"step(\d+)", folder.name)
    model = build_model(config.model)
    load_weights(model, folder / WEIGHTS)
    return LoadedModel(
        model=model.to(device=device, dtype=dtype).eval(),
        tokenizer=_read_tokenizer(folder / "tokenizer.json"),
        name=str(folder),
        num_parameters=_num_parameters(model),
        max_positions=config.model.max_sequence_length,
        fingerprint=fingerprint([folder / WEIGHTS]),
        trained={
            "step": int(number[1]) if number else None,
            "num_steps": config.training.num_steps,
            "positions": config.positions.scheme,
            "length": config.training.length,
            "target_length": config.positions.target_length,
            "seed": config.seed,
            "init_from": config.init_from,
        },
    )


def _load_hugging_face(
    folder: Path, name: str, dtype: torch.dtype, device: str, device_map: str | None
) -> LoadedModel:
    weight_files = check_weight_files(folder)
    try:
        model = _read_hugging_face(folder, weight_files, dtype, device, device_map)
        wrapped = HuggingFaceLM(model).eval()
        max_positions = _max_positions(model.config)
    except UserError:
        raise
    except Exception as error:  # a config.json can make transformers fail anywhere, in any way
        if is_out_of_memory(error):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"transformers cannot load '{folder}' (config.json): {reason}; mend it, install the "
            "library it asks for, or download the folder again (code of its own is never run here)"
        ) from None
    return LoadedModel(
        model=wrapped,
        tokenizer=_find_tokenizer(folder),
        name=name,
        num_parameters=_num_parameters(model),
        max_positions=max_positions,
        fingerprint=fingerprint(weight_files),
    )


def _read_hugging_face(
    folder: Path,
    weight_files: list[Path],
    dtype: torch.dtype,
    device: str,
    device_map: str | None,
) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, **NO_CODE)
    # The kernel is not for the folder to choose: it may name one that is not installed, or one on
    # the hub.
    config._attn_implementation = "eager"
    frame = _build_frame(config, folder, weight_files, dtype)
    config._attn_implementation = "sdpa" if frame._supports_sdpa else "eager"
    model: PreTrainedModel
    info: dict[str, Any]
    # Typed as one model; with output_loading_info it returns two things.
    model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
        folder,
        config=config,
        dtype=dtype,
        device_map=device_map,
        use_safetensors=True,
        output_loading_info=True,
        **NO_CODE,
    )
    if info["missing_keys"]:
        # transformers would go on with random numbers in their place.
        missing = sorted(info["missing_keys"])
        raise DataError(
            f"'{folder}': its files lack {len(missing)} weights of {type(model).__name__}, such as "
            f"{missing[0]}; download it again"
        )
    if device_map is None:
        nn.Module.to(model, device)
    return model


def _build_frame(
    config: Any, folder: Path, weight_files: list[Path], dtype: torch.dtype
) -> PreTrainedModel:
    """What config.json describes, without memory. It must be about as large as the weights: a
    damaged one may ask for more than any machine has."""
    from transformers import AutoModelForCausalLM

    num_tensors = num_stored = 0
    for path in weight_files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no dict)
                num_tensors += 1
                num_stored += math.prod(file.get_slice(key).get_shape())
    remedy = "config.json is not of these weights; download it again"
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if not 1 <= num_layers <= num_tensors:  # each layer is built, also without memory
        raise DataError(
            f"'{folder}': {num_layers:,} layers (num_hidden_layers), but its files hold "
            f"{num_tensors:,} tensors; {remedy}"
        )
    with torch.device("meta"):
        frame = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    num_wanted = _num_parameters(frame)
    if num_wanted > _MOST_PACKED * num_stored:
        raise DataError(
            f"'{folder}': a model of {num_wanted:,} parameters, but its files hold "
            f"{num_stored:,} numbers; {remedy}"
        )
    return frame


def check_weight_files(folder: Path) -> list[Path]:
    """The safetensors files, each with a whole header: a damaged one is named."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        if pickled:
            raise DataError(
                f"'{folder / pickled[0]}' is a pickle, which is never read here; convert it with "
                "transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new)"
            )
        raise DataError(f"'{folder}' has a config.json but no *.safetensors; download it again")
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise unreadable(index, error) from None
        outside = [name for name in named if not stays_inside(name)]
        if outside:
            raise DataError(
                f"'{index}' names '{outside[0]}', which is outside of its folder; do not use it, "
                "or download it again from a source you trust"
            )
    for path in files:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError, ValueError) as error:
            raise unreadable(path, error) from None
    return files


def _max_positions(config: Any) -> int | None:
    """A sliding window counts places; only within the window do places and position IDs agree about
    who may attend to whom."""
    limits = [getattr(config, "max_position_embeddings", None)]
    types = getattr(config, "layer_types", None)
    if types is None or "sliding_attention" in types:
        limits.append(getattr(config, "sliding_window", None))
    return min((limit for limit in limits if limit), default=None)


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise DataError(f"'{path}' does not exist; copy the tokenizer it was trained with there")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise unreadable(path, error) from None


_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def _find_tokenizer(folder: Path) -> Tokenizer | None:
    if (folder / "tokenizer.json").is_file():
        return _read_tokenizer(folder / "tokenizer.json")
    if not any((folder / name).is_file() for name in _OTHER_TOKENIZERS):
        return None  # transformers would invent one whose only tokens are the special ones
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(folder, **NO_CODE)
    except Exception as error:  # of many kinds: a missing library, a damaged file
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"'{folder}': transformers cannot read its tokenizer ({reason}); save it once with "
            "AutoTokenizer, which writes a tokenizer.json"
        ) from None
    return getattr(slow, "backend_tokenizer", None)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Not *.safetensors: some repositories hold the weights twice, in their own format as well.
        patterns = ["*.json", "*.txt", "*.model", "model*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
        raise DataError(
            f"'{name}' is no folder here, and the hub gave no model of that name ({reason}); "
            "check the spelling, the network and HF_HUB_OFFLINE"
        ) from None
