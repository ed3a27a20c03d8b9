"""Open a model that computes elsewhere: llama.cpp in this process, or servers behind URLs.

Place in the flow: `load_model` finds **`open_prompt_model`** by the entry points of the group
`olmo_sparsity.prompt_models` when it is given a name of one of these forms:

    llama:FILE.gguf, llama:smollm2        llama.py, with the tokenizer of the file
    http://127.0.0.1:8000                 servers/pool.py, with the tokenizer that the user passes
    http://a:8000,http://b:8000#NAME      the same, two servers of one model
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from olmo_sparsity.base.devices import choose_device
from olmo_sparsity.base.errors import ConfigError, DataError, check_unset, one_line
from olmo_sparsity.base.files import sha256_of
from olmo_sparsity.models.find import find_folder
from olmo_sparsity.models.gguf.smollm2 import find_smollm2_gguf
from olmo_sparsity.models.gguf.tokenizer import read_gguf_tokenizer
from olmo_sparsity.models.huggingface.folder import NO_CODE
from olmo_sparsity.models.huggingface.position_limits import PositionLimit
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.models.pretrained_tokenizer import (
    as_tokenizer,
    has_tokenizer,
    read_transformers_tokenizer,
    without_space_before,
)
from olmo_sparsity.sources.servers.connection import PATIENCE_S, TIMEOUT_S, parse_url
from olmo_sparsity.sources.servers.llama import LlamaCpp
from olmo_sparsity.sources.servers.pool import Servers

LLAMA = "llama:"
"""The beginning of the names of models that llama.cpp computes."""


def open_prompt_model(
    name: str,
    *,
    tokenizer: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    only_counts: bool = False,
    timeout: float | None = None,
    patience: float | None = None,
) -> LoadedModel:
    """Open a prompt model.

    Args:
        name: `llama:FILE.gguf` or `llama:smollm2`, which bring a tokenizer; or a server's URL, or
            several with commas between them.
        tokenizer: The tokenizer of a model on a server: a folder, GGUF file, hub name or object.
        device: Where llama.cpp computes. Must be auto for a server, which decides itself.
        dtype, device_map: Must be the defaults, as weights are loaded elsewhere.
        only_counts: Send no request to a server.
        timeout, patience: See `ServerOptions`. Must be None for llama.cpp.
    """
    is_llama = name.startswith(LLAMA)
    if is_llama and "://" in name:  # it may hold a password
        raise ConfigError(f"{LLAMA} must be followed by a GGUF file, not by a URL")
    urls = [] if is_llama else [url.strip() for url in name.split(",")]
    for url in urls:
        parse_url(url)  # from here on messages may repeat it: it has no password

    check_unset(f"'{name}' is loaded elsewhere", dtype=dtype, device_map=device_map)
    if is_llama:
        check_unset(f"'{name}' is not a server", timeout=timeout, patience=patience)
        if tokenizer is not None:
            raise ConfigError(f"tokenizer={tokenizer}: '{name}' has its own tokenizer; omit it")
        return _open_llama(name.removeprefix(LLAMA), name, device)

    check_unset(f"'{name}' computes where its server runs", device=device)
    if tokenizer is None:
        raise ConfigError(
            f"tokenizer=None: '{name}' needs the tokenizer of its model; pass its folder, GGUF "
            "file or hub name"
        )
    return _open_servers(
        urls, tokenizer, timeout=timeout, patience=patience, only_counts=only_counts
    )


open_engine = open_prompt_model
"""The name in the entry points of an installation of the last release. Delete it after this one."""


def _open_servers(
    urls: list[str],
    tokenizer: Any,
    *,
    timeout: float | None,
    patience: float | None,
    only_counts: bool,
) -> LoadedModel:
    """Meet the servers behind these URLs, and return the model that they serve."""
    transformers_tokenizer = _read_tokenizer(tokenizer)
    fast_tokenizer = as_tokenizer(transformers_tokenizer)
    model = Servers(
        urls,
        # What a server returns continues a text, so no space must be put before it.
        without_space_before(fast_tokenizer),
        timeout_s=TIMEOUT_S if timeout is None else timeout,
        patience_s=PATIENCE_S if patience is None else patience,
        # A user who passes a patience may have started the server just now.
        first_patience_s=patience,
        are_checked=not only_counts,
    )

    # All servers were checked to serve one model, so the first one stands for all.
    first = model.servers[0]
    identity = {"model": first.model, "tokenizer": fast_tokenizer.to_str()} | first.card
    return LoadedModel(
        model=model,
        tokenizer=fast_tokenizer,
        name=f"{first.model} ({first.url})",
        num_parameters=0,
        limit=_limit(model),
        batch_noise=first.noise,
        # A hash of names only, as a server's numbers vary by rounding. Folders of results keep the
        # numbers of the probe besides.
        weights_sha256=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        find_transformers_tokenizer=lambda: transformers_tokenizer,
    )


def _limit(model: Servers) -> PositionLimit | None:
    """Return how many positions a prompt may fill on all servers; None if none lists a limit."""
    listed = [server.card.get("max_model_len") for server in model.servers]
    lengths = [length for length in listed if isinstance(length, int)]
    if not lengths:
        return None
    # `max_model_len` counts two tokens more than these: the last one of a prompt, which is scored
    # and fills no position, and the one that the server generates after it.
    return PositionLimit(min(lengths) - 2, "max_model_len, less two")


def _open_llama(path: str, name: str, device: str) -> LoadedModel:
    """Load a GGUF file with llama.cpp. `name`: what the user typed."""
    file = find_smollm2_gguf() if path == "smollm2" else Path(path)
    if not file.is_file():
        raise DataError(f"'{file}' is not a file; pass llama:FILE.gguf with a GGUF file")

    tokenizer = read_gguf_tokenizer(file)
    model = LlamaCpp(file, str(choose_device(device)))
    return LoadedModel(
        model=model,
        tokenizer=as_tokenizer(tokenizer),
        name=name,
        num_parameters=model.num_parameters,
        limit=PositionLimit(model.max_positions, "context_length of the GGUF file"),
        # Another hash than that of the file: loaded by models/gguf, it computes other numbers.
        weights_sha256=hashlib.sha256(f"llama.cpp {sha256_of(file)}".encode()).hexdigest(),
        find_transformers_tokenizer=lambda: tokenizer,
    )


def _read_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer of transformers: `tokenizer` itself if it is an object, else what a GGUF
    file, a folder or the hub has under this name."""
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    if str(tokenizer).endswith(".gguf"):
        return read_gguf_tokenizer(Path(tokenizer))

    path = Path(tokenizer)
    if tokenizer in ("smollm2", "demo") or path.is_dir():
        # `find_folder` takes models only, and a folder may hold a tokenizer alone.
        folder = path if has_tokenizer(path) else find_folder(str(tokenizer))
        in_folder = read_transformers_tokenizer(folder)
        if in_folder is None:
            raise DataError(f"tokenizer: '{tokenizer}' holds no tokenizer; pass another folder")
        return in_folder

    from transformers import AutoTokenizer

    try:  # of the hub, without the weights
        options = NO_CODE | {"local_files_only": False}
        return AutoTokenizer.from_pretrained(str(tokenizer), **options)
    except Exception as error:
        raise DataError(
            f"tokenizer: '{tokenizer}' is neither a folder nor on the hub ({one_line(error)})"
        ) from None
