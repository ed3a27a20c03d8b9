"""Load or build a model, of this project or of Hugging Face, with position IDs as an argument.

Place in the flow: a folder, hub name or object → **model** (+ tokenizer) → per-token losses.

`build_model` makes a new model from a config, `load_model` reads a trained one, `wrap_model` takes
one in memory. Nothing is unpickled: weights must be safetensors.

Dimension key: B batch, L length, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from olmo_sparsity.config import ModelConfig
from olmo_sparsity.config_file import load_config
from olmo_sparsity.errors import ConfigError, DataError, UserError, is_out_of_memory
from olmo_sparsity.launch import read_launch
from olmo_sparsity.manifest import MANIFEST, verify_manifest
from olmo_sparsity.model.checkpoint_files import (
    WEIGHTS,
    fingerprint,
    fingerprint_weights,
    load_weights,
    verified_checkpoints,
)
from olmo_sparsity.model.compatibility import PositionLimit
from olmo_sparsity.model.huggingface import HuggingFaceLM, gpt_neox_config
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.model.pretrained_tokenizer import (
    as_tokenizer,
    bos_prefix,
    find_tokenizer,
    has_tokenizer,
    read_tokenizer,
    read_transformers_tokenizer,
)
from olmo_sparsity.model.transformers_folder import (
    ADAPTER,
    add_adapter,
    base_of_adapter,
    check_weight_files,
    count_parameters,
    is_hugging_face,
    read_hugging_face,
)
from olmo_sparsity.progress import say

READ_BY_ANALYSIS = ("config.yaml", WEIGHTS, "tokenizer.json")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# --- a new model --------------------------------------------------------------------------------


def build_model(config: ModelConfig) -> PositionedOLMo | HuggingFaceLM:
    if config.vocab_size < 1:
        raise ConfigError(
            f"model.vocab_size={config.vocab_size} must be at least 1; set it to the size of the "
            "tokenizer's vocabulary"
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
    limit: PositionLimit | None
    """None if unknown."""

    weights_sha256: str | None
    """Fingerprint of the files; None for a model in memory."""

    trained: dict[str, Any] = field(default_factory=dict)
    """How a checkpoint of ours was trained: steps, position scheme, lengths, seed, init_from."""

    find_transformers_tokenizer: Callable[[], Any | None] = field(default=lambda: None, repr=False)

    @cached_property
    def transformers_tokenizer(self) -> Any:
        """The tokenizer as a transformers object, with its chat template; None if there is only
        `tokenizer`. Read from the folder on first use."""
        return self.find_transformers_tokenizer()

    @cached_property
    def bos_prefix(self) -> list[int]:
        """The tokens that the tokenizer puts before a text; usually none or one."""
        theirs = self.transformers_tokenizer
        tokenizer = self.tokenizer if theirs is None else theirs
        return [] if tokenizer is None else bos_prefix(tokenizer)

    def prefix_ids(self, prefix: str) -> list[int]:
        """Token IDs of the windows' prefix: `auto` (what the tokenizer puts before a text), `bos`,
        `none`, or any text."""
        if prefix == "none":
            return []
        if prefix == "auto":
            return self.bos_prefix
        if prefix == "bos":
            bos = getattr(self.transformers_tokenizer, "bos_token_id", None)
            if bos is None:
                raise ConfigError(f"prefix=bos: '{self.name}' names no beginning-of-text token")
            return [int(bos)]
        if self.tokenizer is None:
            raise ConfigError(f"prefix={prefix}: '{self.name}' has no tokenizer to read it with")
        return self.encode([prefix])[0]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token IDs of each text, with nothing put before or after it."""
        assert self.tokenizer is not None
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        for text in encoded:
            if (largest := max(text.ids, default=0)) >= self.model.vocab_size:
                raise DataError(
                    f"'{self.name}': the text holds '{self.tokenizer.decode([largest], False)}', "
                    f"token {largest}, and the embedding has {self.model.vocab_size} rows"
                )
        return [text.ids for text in encoded]

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the weights; see `checkpoint_files`."""
        return self.weights_sha256 or fingerprint_weights(self.model)

    @property
    def max_positions(self) -> int | None:
        """One more than the largest supported position ID; None if unknown."""
        return self.limit.num_positions if self.limit else None

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return self.model.device

    def check_positions(self, num_positions: int) -> None:
        """Refuse more positions than the model supports, with the cause."""
        if self.limit is not None:
            self.limit.check(num_positions, self.name)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def load_model(
    path_or_hub_name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
) -> LoadedModel:
    """Load a run or checkpoint folder of ours, a Hugging Face folder (of a model or a PEFT
    adapter), or a hub name. `dtype`: auto (that of the checkpoint; ours are fp32), fp32, bf16 or
    fp16."""
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype={dtype} is not known; choose auto, {', '.join(DTYPES)}")
    if device == "auto":
        # Launchers make all GPUs of the machine visible to a process, or only its own.
        local = read_launch().local_rank % max(torch.cuda.device_count(), 1)
        device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device}, but PyTorch sees no GPU here; use device=cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(f"device={device} cannot be used here; use device=cpu") from None
    folder = find_folder(path_or_hub_name)
    if is_hugging_face(folder):
        loaded = _load_hugging_face(folder, path_or_hub_name, DTYPES.get(dtype), device, device_map)
    elif device_map is not None:
        raise ConfigError(
            f"device_map={device_map} is for Hugging Face models; '{folder}' is a checkpoint of "
            "ours, which goes to one device: remove it"
        )
    else:
        loaded = _load_checkpoint(folder, DTYPES.get(dtype, torch.float32), device)
        step, num_steps = loaded.trained["step"], loaded.trained["num_steps"]
        if folder != Path(path_or_hub_name) and step is not None and step < num_steps:
            say(f"{path_or_hub_name} has not ended: reading step {step:,} of {num_steps:,}")
    return _with_room_for_tokens(loaded)


def wrap_model(model: Any, tokenizer: Any = None, name: str | None = None) -> LoadedModel:
    """Wrap a causal LM of transformers in memory, also if it is quantized, spread over devices by
    `accelerate`, or has PEFT adapters (applied, not merged), or a model of this project. It is put
    in evaluation mode. `tokenizer`: one of transformers or of tokenizers."""
    if isinstance(model, LoadedModel):
        if tokenizer is not None or name is not None:
            raise ConfigError(f"'{model.name}' is loaded already: leave tokenizer and name out")
        return model
    if not isinstance(model, PositionedOLMo | HuggingFaceLM):
        model = _wrap_transformers(model)
    theirs = None if isinstance(tokenizer, Tokenizer) else tokenizer
    inner = model.model if isinstance(model, HuggingFaceLM) else model
    return _with_room_for_tokens(
        _about(
            model.eval(),
            tokenizer=None if tokenizer is None else as_tokenizer(tokenizer),
            name=name or getattr(inner.config, "_name_or_path", "") or type(inner).__name__,
            weights_sha256=None,
            find_transformers_tokenizer=lambda: theirs,
        )
    )


def _wrap_transformers(model: Any) -> HuggingFaceLM:
    from transformers import PreTrainedModel

    if isinstance(model, str | Path):
        raise ConfigError(f"wrap_model takes a model in memory; load_model reads '{model}'")
    if not isinstance(getattr(model, "get_base_model", lambda: model)(), PreTrainedModel):
        raise ConfigError(
            f"{type(model).__name__} is no model of transformers; give one that "
            "AutoModelForCausalLM made, or a PeftModel of one"
        )
    try:
        return HuggingFaceLM(model)
    except UserError:
        raise
    except Exception as error:  # unknown families may raise almost any
        raise ConfigError(
            f"{type(model).__name__} is not supported: eight tokens with position IDs do not pass "
            f"through it ({_reason(error)})"
        ) from None


def _with_room_for_tokens(loaded: LoadedModel) -> LoadedModel:
    """Added tokens may lie beyond the embedding, as an image's of a model that reads text only."""
    tokenizer = loaded.tokenizer
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab(with_added_tokens=False)
    largest = max(vocabulary.values(), default=-1)  # some vocabularies have gaps
    if largest >= loaded.model.vocab_size:
        raise ConfigError(
            f"'{loaded.name}': its tokenizer has IDs up to {largest}, its embedding only "
            f"{loaded.model.vocab_size} rows; give the tokenizer it was trained with"
        )
    return loaded


def find_folder(path_or_hub_name: str) -> Path:
    """The folder of the files: the latest checkpoint of a run, or the download of a hub name."""
    path = Path(path_or_hub_name)
    if not path.exists():
        if path_or_hub_name.startswith("runs/"):  # the folder of configs/, so no hub name
            raise DataError(
                f"{path_or_hub_name} does not exist; train it first, or correct the path"
            )
        if re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path_or_hub_name):
            return _download(path_or_hub_name)
        raise DataError(f"'{path}' does not exist; give a run, a checkpoint or a model folder")
    if is_hugging_face(path):
        return path
    if (path / MANIFEST).is_file():
        if problem := verify_manifest(path, READ_BY_ANALYSIS):
            raise DataError(f"checkpoint '{path}': {problem}; use another one of its run")
        return path
    if (path / "checkpoints").is_dir():
        return _latest_or_fail(path)
    raise DataError(
        f"'{path}' is no model folder: it has neither config.json (Hugging Face), nor {MANIFEST} "
        "(a checkpoint of ours), nor checkpoints/ (a run of ours); official OLMo checkpoints can "
        "only start a run (init_from)"
    )


def _latest_or_fail(run_folder: Path) -> Path:
    newest = ""
    for folder, problem in verified_checkpoints(run_folder, READ_BY_ANALYSIS):
        if problem is None:
            if newest:
                say(f"{newest}; reading {folder.name} instead")
            return folder
        newest = newest or f"{folder}: {problem}"
    if newest:
        raise DataError(f"no checkpoint of '{run_folder}' is intact; the latest, {newest}")
    raise DataError(f"'{run_folder / 'checkpoints'}' holds no step* folder; train first")


def _load_checkpoint(folder: Path, dtype: torch.dtype, device: str) -> LoadedModel:
    config = load_config(folder / "config.yaml")
    number = re.fullmatch(r"step(\d+)", folder.name)
    model = build_model(config.model)
    load_weights(model, folder / WEIGHTS)
    return _about(
        model.to(device=device, dtype=dtype).eval(),
        tokenizer=read_tokenizer(folder / "tokenizer.json"),
        name=str(folder),
        weights_sha256=fingerprint([folder / WEIGHTS]),
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
    folder: Path, name: str, dtype: torch.dtype | None, device: str, device_map: str | None
) -> LoadedModel:
    is_adapter, base = (folder / ADAPTER).is_file(), folder
    if is_adapter:
        base = find_folder(base_of_adapter(folder))
        if (base / ADAPTER).is_file() or not is_hugging_face(base):
            raise DataError(f"'{folder / ADAPTER}': '{base}' is no base model of transformers")
    weight_files = check_weight_files(base)
    try:
        model: Any = read_hugging_face(base, weight_files, dtype, device, device_map)
        if is_adapter:
            weight_files += check_weight_files(folder)
            model = add_adapter(model, folder, device)
        wrapped = HuggingFaceLM(model).eval()
    except UserError:
        raise
    except Exception as error:  # a damaged config.json raises almost any
        raise DataError(
            f"transformers cannot load '{folder}' (config.json): {_reason(error)}; correct it, "
            "install the library it needs, or download the folder again (code in the folder is "
            "never run)"
        ) from None
    with_tokenizer = folder if has_tokenizer(folder) else base
    return _about(
        wrapped,
        tokenizer=find_tokenizer(with_tokenizer),
        name=name,
        weights_sha256=fingerprint(weight_files),
        find_transformers_tokenizer=partial(read_transformers_tokenizer, with_tokenizer),
    )


def _reason(error: Exception) -> str:
    if is_out_of_memory(error):
        raise error
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _about(model: PositionedOLMo | HuggingFaceLM, **others: Any) -> LoadedModel:
    limit: PositionLimit | None
    if isinstance(model, HuggingFaceLM):  # transformers counts packed 4-bit weights correctly
        limit, num_parameters = model.limit, model.model.num_parameters()
    else:
        limit = PositionLimit(model.config.max_sequence_length, "max_sequence_length")
        num_parameters = count_parameters(model)
    return LoadedModel(model=model, num_parameters=num_parameters, limit=limit, **others)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Not *.safetensors: some repositories have the weights in their own format as well.
        patterns = ["*.json", "*.txt", "*.model", "*.jinja"]
        patterns += ["model*.safetensors", "adapter_model*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
        raise DataError(
            f"'{name}' is no folder here, and the hub gave no model of that name ({reason}); "
            "check the spelling, the network and HF_HUB_OFFLINE"
        ) from None
