"""Open a trained model: `load_model` by its folder, hub name, URL or GGUF file, `wrap_model` in
memory.

    load_model("smollm2")                     downloaded once, and converted
    load_model("runs/mine")                   the last checkpoint of a run
    load_model("http://host:8000", tokenizer="folder")
    wrap_model(model, tokenizer)              of transformers, in memory

    a name ─ find.py ─> a folder of transformers ─ huggingface/folder.py ─┐
                        a run ─ an entry point of olmo_sparsity.runs ──────┼─> LoadedModel
    a URL, llama:FILE ─ an entry point of olmo_sparsity.prompt_models ─────┘

Nothing is unpickled: weights must be safetensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from olmo_sparsity.base.devices import choose_device
from olmo_sparsity.base.errors import (
    ConfigError,
    DataError,
    UserError,
    check_unset,
    naming_extras,
    printable,
)
from olmo_sparsity.base.renamed import entry_points_of
from olmo_sparsity.models.find import DTYPES, find_folder
from olmo_sparsity.models.gguf.origin import find_origin
from olmo_sparsity.models.huggingface.compatibility import reason_of
from olmo_sparsity.models.huggingface.folder import (
    ADAPTER,
    add_adapter,
    base_of_adapter,
    is_hugging_face,
    read_hugging_face,
)
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.huggingface.weight_files import checked_adapter_file, checked_weight_files
from olmo_sparsity.models.huggingface.whole_prompts import WholePrompts
from olmo_sparsity.models.identity.file_fingerprint import fingerprint
from olmo_sparsity.models.loaded import LoadedModel, check_room_for_tokens, describe_model
from olmo_sparsity.models.pretrained_tokenizer import (
    as_tokenizer,
    find_tokenizer,
    has_tokenizer,
    read_transformers_tokenizer,
)
from olmo_sparsity.models.prompts import PromptModel
from olmo_sparsity.text.runs import run_loaders


@contextmanager
def _keeping_random_state() -> Iterator[None]:
    """Restore PyTorch's random generators at the end. A model draws weights before it gets those of
    its file, so that a training loop around the call would draw other numbers."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=gpus):
        yield


@naming_extras()
@_keeping_random_state()
def load_model(
    path_or_hub_name: str | Path,
    *,
    tokenizer: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    whole_prompts: bool = False,
    only_counts: bool = False,
    timeout: float | None = None,
    patience: float | None = None,
) -> LoadedModel:
    """Load a trained model.

    Args:
        path_or_hub_name: A run or checkpoint folder of ours, a Hugging Face folder (of a model or a
            PEFT adapter), a GGUF file or a folder that holds one, `smollm2`, or a hub name, with
            its branch, tag or commit after an @ (`EleutherAI/pythia-160m@step3000`). For
            `attribute` and `distant_states="replaced"` also `llama:FILE.gguf`, computed by
            llama.cpp, and the URL of a server.
        tokenizer: The tokenizer of a server's model: a folder, a hub name, or an object. Other
            models have their own.
        device: Such as cpu, cuda or cuda:1. auto: a GPU if there is one.
        dtype: fp32, bf16, fp16 or auto. auto is the checkpoint's dtype, or fp32 on a CPU that
            cannot multiply in it. For a checkpoint of ours it is bf16 on a GPU that has it, else
            fp32.
        device_map: As in transformers, in place of `device`, which must then be auto.
        whole_prompts: Whether to load decoder-only models that take no position IDs, too, such as
            recurrent ones and hybrids.
        only_counts: Whether to send nothing to a server. The model then only counts what a call
            costs.
        timeout: Seconds that a server may take for a request. None means 600.
        patience: Seconds for which a request that a server did not answer is repeated. None means
            300.
    """
    # What is wrong by itself is reported before a model is looked for.
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype={dtype} is not known; pass auto, {', '.join(DTYPES)}")
    _check_device_map(device_map)
    if device_map is not None:
        check_unset(f"device_map={device_map} says where the model is", device=device)
    chosen_device = str(choose_device(device))
    if not isinstance(path_or_hub_name, str | Path):
        raise ConfigError(
            f"{path_or_hub_name!r:.60} is neither a folder nor a name on the hub; a model in "
            "memory is passed to measure, explain or attribute as it is"
        )
    name = str(path_or_hub_name)

    # A model that computes elsewhere: behind a URL, or in llama.cpp.
    if re.match(r"llama:|\w+://", name):
        open_prompt_model = _find_opener(name)
        return open_prompt_model(
            name,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            device_map=device_map,
            only_counts=only_counts,
            timeout=timeout,
            patience=patience,
        )
    check_unset(f"'{name}' is not a server", timeout=timeout, patience=patience)
    if tokenizer is not None:
        raise ConfigError(f"tokenizer: '{name}' has its own; omit the argument")

    # A model in a folder, to which `find_folder` may have to download or convert it.
    folder = find_folder(name)
    if is_hugging_face(folder):
        placement = _Placement(DTYPES.get(dtype), chosen_device, device_map)
        loaded = _load_hugging_face(folder, name, placement, whole_prompts)
    else:
        check_unset(f"'{name}' is not a Hugging Face model", device_map=device_map)
        # `find_folder` returns a folder only if it is Hugging Face's or a loader finds a run in it.
        loader = next(loader for loader in run_loaders() if loader.find(folder))
        trained = loader.load(folder, name, dtype, chosen_device)
        loaded = describe_model(**vars(trained))
    check_room_for_tokens(loaded)
    return loaded


DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""The names that transformers has for ways to spread a model over devices."""


def _check_device_map(device_map: Any) -> None:
    """Raise ConfigError for a name that is neither a way to spread a model nor a device. A mapping
    of modules to devices is checked by transformers."""
    if device_map is None or device_map in DEVICE_MAPS or isinstance(device_map, Mapping):
        return
    try:
        torch.device(device_map)
    except (RuntimeError, TypeError):
        ways = ", ".join(DEVICE_MAPS)
        raise ConfigError(
            f"device_map={device_map!r:.40} must be {ways}, or a device such as cuda:0"
        ) from None


def _find_opener(name: str) -> Callable[..., LoadedModel]:
    """Return the function that opens a model by a name such as `llama:FILE.gguf` or a URL."""
    kind = "llama" if name.startswith("llama:") else "url"
    for entry_point in entry_points_of("olmo_sparsity.prompt_models"):
        if entry_point.name == kind:
            try:
                opener: Callable[..., LoadedModel] = entry_point.load()
            except ModuleNotFoundError:  # an installation without olmo_sparsity/sources
                break
            return opener
    raise ConfigError(
        f"'{name}' needs olmo_sparsity.sources, which this installation lacks; "
        "install olmo-sparsity again, whole"
    )


def wrap_model(
    model: Any, tokenizer: Any = None, name: str | None = None, *, whole_prompts: bool = False
) -> LoadedModel:
    """Wrap a model in memory, which may be trained on: each later call measures it as it is then.

    Args:
        model: A causal LM of transformers, or a model of this project. It may be compiled,
            quantized, spread over devices by `accelerate`, or have PEFT adapters (applied, not
            merged).
        tokenizer: A tokenizer of transformers or of tokenizers.
        name: The name in messages and results. None means the one in the model's config.
        whole_prompts: As in `load_model`.
    """
    if isinstance(model, LoadedModel):
        if tokenizer is not None or name is not None:
            raise ConfigError(f"tokenizer, name: '{model.name}' has its own; omit the arguments")
        return model
    model = _unwrap(model)
    is_of_this_project = hasattr(type(model), "distant_states")
    if not is_of_this_project:
        model = _wrap_transformers(model, whole_prompts)

    is_wrapped = isinstance(model, HuggingFaceLM | PromptModel)
    inner = model.model if is_wrapped else model
    transformers_tokenizer = None if isinstance(tokenizer, Tokenizer) else tokenizer
    loaded = describe_model(
        model,
        tokenizer=None if tokenizer is None else as_tokenizer(tokenizer),
        name=name or getattr(inner.config, "_name_or_path", "") or type(inner).__name__,
        weights_sha256=None,
        find_transformers_tokenizer=lambda: transformers_tokenizer,
    )
    check_room_for_tokens(loaded)
    return loaded


def _unwrap(model: Any) -> Any:
    """Return a model without the wrappers of torch.compile (`_orig_mod`), DataParallel and DDP
    (`module`)."""
    modules = getattr(model, "_modules", {})
    for name in ("_orig_mod", "module"):
        if name in modules:
            return _unwrap(modules[name])
    return model


def _wrap_transformers(model: Any, whole_prompts: bool) -> Any:
    """Wrap a model of transformers, or a PEFT model around one."""
    from transformers import PreTrainedModel

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise ConfigError(
            f"model={printable(repr(model))[:60]} is not a transformers model in memory "
            f"({type(model).__name__}); pass one, what load_model returned, or a name as a string"
        )
    return _wrap_fitting(model, whole_prompts)


def _wrap_fitting(model: Any, whole_prompts: bool) -> Any:
    """Return a model as a `HuggingFaceLM`, whose states can be read. If that rejects it and
    `whole_prompts` is set, return it as `WholePrompts`, which only scores whole prompts."""
    _check_outputs_have_names(model.config)
    try:
        return HuggingFaceLM(model)
    except ConfigError:
        if not whole_prompts or model.config.is_encoder_decoder:
            raise
        return WholePrompts(model)


def _check_outputs_have_names(config: Any) -> None:
    """Raise ConfigError if a config has models return tuples, from which transformers itself cannot
    compute logits."""
    for each_config in (config, config.get_text_config()):
        if not getattr(each_config, "return_dict", True):
            raise ConfigError(
                "return_dict=False in the config of a model: transformers cannot run it; set "
                "model.config.return_dict = True, or correct config.json"
            )


@dataclass(frozen=True)
class _Placement:
    """Where the weights of a model of transformers are put, and in which dtype."""

    dtype: torch.dtype | None
    """None means the dtype of the checkpoint."""

    device: str
    device_map: str | None
    """As in transformers, in place of `device`."""


def _load_hugging_face(
    folder: Path, name: str, placement: _Placement, whole_prompts: bool
) -> LoadedModel:
    """Load the model of a Hugging Face folder, or the adapter in it and its base model."""
    files = _find_files(folder)
    model = _read_model(files, placement, whole_prompts)

    # A converted GGUF file is identified by its own hash, which stays if it is converted in another
    # way.
    origin = None if files.adapter_weights is not None else find_origin(files.base_folder)
    if origin is None:
        sha256 = files.compute_hash()
    else:
        sha256 = origin.sha256
        name = f"{name} ({origin.quantization})"

    folder_of_tokenizer = folder if has_tokenizer(folder) else files.base_folder
    return describe_model(
        model,
        tokenizer=find_tokenizer(folder_of_tokenizer),
        name=name,
        weights_sha256=sha256,
        find_transformers_tokenizer=partial(read_transformers_tokenizer, folder_of_tokenizer),
    )


@dataclass(frozen=True)
class _ModelFiles:
    """The checked files of a Hugging Face folder. If it holds an adapter, they are in two
    folders."""

    folder: Path
    base_folder: Path
    """The folder of the model; that of the base model of an adapter."""

    base_weights: list[Path]
    adapter_weights: Path | None
    """The weights of the adapter; None without an adapter."""

    def compute_hash(self) -> str:
        """Return a hash of all that decides the numbers of the model. The configs are part of it:
        RoPE's angles or an adapter's scale change the numbers as weights do."""
        files = [*self.base_weights, self.base_folder / "config.json"]
        if self.adapter_weights is not None:
            files += [self.adapter_weights, self.folder / ADAPTER]
        return fingerprint(files)


def _find_files(folder: Path) -> _ModelFiles:
    """Return the files of a Hugging Face folder, after checking their names and headers. Raise
    DataError if an adapter names another adapter, or a run of ours, as its base model."""
    if not (folder / ADAPTER).is_file():
        return _ModelFiles(folder, folder, checked_weight_files(folder), adapter_weights=None)
    base = find_folder(base_of_adapter(folder))
    if (base / ADAPTER).is_file() or not is_hugging_face(base):
        raise DataError(
            f"'{folder / ADAPTER}': '{base}' is not a base model of transformers; correct "
            "base_model_name_or_path"
        )
    return _ModelFiles(folder, base, checked_weight_files(base), checked_adapter_file(folder))


def _read_model(files: _ModelFiles, placement: _Placement, whole_prompts: bool) -> Any:
    """Return the model of some files, wrapped for use."""
    try:
        model: Any = read_hugging_face(
            files.base_folder, placement.dtype, placement.device, placement.device_map
        )
        if files.adapter_weights is not None:
            model = add_adapter(model, files.folder, files.adapter_weights, placement.device)
        return _wrap_fitting(model, whole_prompts).eval()
    except UserError:
        raise
    except Exception as error:  # a damaged config.json raises almost any
        raise DataError(
            f"transformers cannot load '{files.folder}': {reason_of(error)}; correct config.json "
            "(code in the folder is never run)"
        ) from None
