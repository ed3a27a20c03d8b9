"""Open a model that returns log-probabilities and nothing else: on a server, or in llama.cpp."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from olmo_sparsity.analysis.engines.llama import LlamaCpp
from olmo_sparsity.analysis.engines.server import Servers, parse_url
from olmo_sparsity.analysis.models.compatibility import PositionLimit
from olmo_sparsity.analysis.models.gguf import read_gguf_tokenizer
from olmo_sparsity.analysis.models.load import LoadedModel, find_folder
from olmo_sparsity.analysis.models.pretrained_tokenizer import (
    as_tokenizer,
    read_transformers_tokenizer,
)
from olmo_sparsity.analysis.models.smollm2 import find_smollm2_gguf
from olmo_sparsity.analysis.models.transformers_folder import NO_CODE
from olmo_sparsity.errors import ConfigError, DataError, naming_extras, one_line
from olmo_sparsity.io import sha256_of

LLAMA = "llama:"


@naming_extras()
def load_engine(
    name: str,
    tokenizer: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
) -> LoadedModel:
    """Open the engine. `name`: `llama:FILE.gguf` or `llama:smollm2`, which bring a tokenizer; or a
    server's URL, or several with commas between them."""
    urls = [] if name.startswith(LLAMA) else [url.strip() for url in name.split(",")]
    for url in urls:
        parse_url(url)  # from here on messages may repeat it: it has no password
    for option, value, default in (("dtype", dtype, "auto"), ("device_map", device_map, None)):
        if value != default:
            raise ConfigError(f"{option}={value}: '{name}' is loaded elsewhere; leave {option} out")
    if (tokenizer is None) == bool(urls):
        rule = "needs the tokenizer of its model" if urls else "has its own tokenizer"
        raise ConfigError(f"tokenizer={tokenizer}: '{name}' {rule}")
    if not urls:
        return _load_llama(name.removeprefix(LLAMA), name, device)
    theirs = _find_tokenizer(tokenizer)
    ours = as_tokenizer(theirs)
    model = Servers(urls, ours)
    first = model.servers[0]
    identity = {"model": first.model, "tokenizer": ours.to_str()} | first.card
    return LoadedModel(
        model=model,
        tokenizer=ours,
        name=f"{first.model} ({first.url})",
        num_parameters=0,
        limit=None,
        batch_noise=first.noise,
        # Of names only: numbers vary by rounding, so folders of results keep those of the probe.
        weights_sha256=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        find_transformers_tokenizer=lambda: theirs,
    )


def _load_llama(path: str, name: str, device: str) -> LoadedModel:
    file = find_smollm2_gguf() if path == "smollm2" else Path(path)
    if not file.is_file():
        raise DataError(f"'{file}' does not exist; give a GGUF file")
    tokenizer = read_gguf_tokenizer(file)
    model = LlamaCpp(file, device)
    return LoadedModel(
        model=model,
        tokenizer=as_tokenizer(tokenizer),
        name=name,
        num_parameters=model.num_parameters,
        limit=PositionLimit(model.max_positions, "context_length of the GGUF file"),
        weights_sha256=hashlib.sha256(f"llama.cpp {sha256_of(file)}".encode()).hexdigest(),
        find_transformers_tokenizer=lambda: tokenizer,
    )


def _find_tokenizer(given: Any) -> Any:
    if not isinstance(given, str | Path):
        return given
    if str(given).endswith(".gguf"):
        return read_gguf_tokenizer(Path(given))
    if given == "smollm2" or Path(given).is_dir():
        found = read_transformers_tokenizer(find_folder(str(given)))
        if found is not None:
            return found
        raise DataError(f"tokenizer: '{given}' holds no tokenizer")
    from transformers import AutoTokenizer

    try:  # of the hub, without the weights
        return AutoTokenizer.from_pretrained(str(given), **NO_CODE | {"local_files_only": False})
    except Exception as error:
        raise DataError(
            f"tokenizer: '{given}' is not a folder here, and not on the hub ({one_line(error)})"
        ) from None
