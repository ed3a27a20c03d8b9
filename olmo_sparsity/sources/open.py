"""Open a model that computes elsewhere: llama.cpp in this process, or servers behind URLs.

Place in the flow: `load_model` finds `open_prompt_model` by the entry points of the group
`olmo_sparsity.prompt_models` when it is given `llama:FILE.gguf` or a URL.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from olmo_sparsity.base.errors import ConfigError, DataError, one_line
from olmo_sparsity.base.files import sha256_of
from olmo_sparsity.models.compatibility import PositionLimit
from olmo_sparsity.models.find import find_folder
from olmo_sparsity.models.gguf import read_gguf_tokenizer
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.models.pretrained_tokenizer import (
    as_tokenizer,
    has_tokenizer,
    read_transformers_tokenizer,
    without_space_before,
)
from olmo_sparsity.models.smollm2 import find_smollm2_gguf
from olmo_sparsity.models.transformers_folder import NO_CODE
from olmo_sparsity.sources.connection import PATIENCE_S, TIMEOUT_S, parse_url
from olmo_sparsity.sources.llama import LlamaCpp
from olmo_sparsity.sources.server import Servers

LLAMA = "llama:"


def open_prompt_model(
    name: str,
    *,
    tokenizer: Any = None,
    device: str = "cpu",
    dtype: str = "auto",
    device_map: str | None = None,
    only_counts: bool = False,
    timeout: float | None = None,
    patience: float | None = None,
) -> LoadedModel:
    """Open a prompt model. `name`: `llama:FILE.gguf` or `llama:smollm2`, which bring a tokenizer;
    or a server's URL, or several with commas between them."""
    if name.startswith(LLAMA) and "://" in name:  # it may hold a password
        raise ConfigError(f"{LLAMA} must be followed by a GGUF file, not by a URL")
    urls = [] if name.startswith(LLAMA) else [url.strip() for url in name.split(",")]
    for url in urls:
        parse_url(url)  # from here on messages may repeat it: it has no password
    if dtype != "auto" or device_map is not None:
        raise ConfigError(f"dtype={dtype}, device_map={device_map}: '{name}' is loaded elsewhere")
    if (tokenizer is None) == bool(urls):
        rule = "needs the tokenizer of its model" if urls else "has its own tokenizer"
        raise ConfigError(f"tokenizer={tokenizer}: '{name}' {rule}")
    if not urls:
        return _open_llama(name.removeprefix(LLAMA), name, device)
    theirs = _read_tokenizer(tokenizer)
    ours = as_tokenizer(theirs)
    model = Servers(
        urls,
        without_space_before(ours),
        timeout_s=TIMEOUT_S if timeout is None else timeout,
        patience_s=PATIENCE_S if patience is None else patience,
        first_patience_s=patience,
        meet=not only_counts,
    )
    first = model.servers[0]
    identity = {"model": first.model, "tokenizer": ours.to_str()} | first.card
    lengths = [n for one in model.servers if isinstance(n := one.card.get("max_model_len"), int)]
    return LoadedModel(
        model=model,
        tokenizer=ours,
        name=f"{first.model} ({first.url})",
        num_parameters=0,
        # The length counts the last token of a prompt, and one that is generated behind it.
        limit=PositionLimit(min(lengths) - 2, "max_model_len, less two") if lengths else None,
        batch_noise=first.noise,
        # Of names only: numbers vary by rounding, so folders of results keep those of the probe.
        weights_sha256=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        find_transformers_tokenizer=lambda: theirs,
    )


open_engine = open_prompt_model
"""The name in the entry points of an installation of the last release. Delete it after this one."""


def _open_llama(path: str, name: str, device: str) -> LoadedModel:
    file = find_smollm2_gguf() if path == "smollm2" else Path(path)
    if not file.is_file():
        raise DataError(f"'{file}' is not a file; give a GGUF file")
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


def _read_tokenizer(given: Any) -> Any:
    if not isinstance(given, str | Path):
        return given
    if str(given).endswith(".gguf"):
        return read_gguf_tokenizer(Path(given))
    if given in ("smollm2", "demo") or Path(given).is_dir():
        alone = Path(given) if has_tokenizer(Path(given)) else find_folder(str(given))
        found = read_transformers_tokenizer(alone)
        if found is not None:
            return found
        raise DataError(f"tokenizer: '{given}' holds no tokenizer")
    from transformers import AutoTokenizer

    try:  # of the hub, without the weights
        return AutoTokenizer.from_pretrained(str(given), **NO_CODE | {"local_files_only": False})
    except Exception as error:
        where = "neither a folder nor on the hub"
        raise DataError(f"tokenizer: '{given}' is {where} ({one_line(error)})") from None
