"""Convert a GGUF file, once, to a Hugging Face folder in the cache.

    SmolLM2-135M.Q4_1.gguf  →  CACHE/gguf/SHA256-OF-THE-FILE/model-1/
                                   config.json, model.safetensors, tokenizer.json, gguf.json, …

`load_model` reads that folder like any other of transformers. A conversion has these steps:

    header.py      entries and tensors of the file
    format.py      checks of the tensors' names
    config.py      checks of the entries
    tokenizer.py   the tokenizer
    weights.py     the weights, in fp32, with a complete config
    origin.py      gguf.json, which says what was converted

`find_gguf` finds a file, and `convert_gguf` returns its folder; `GGUFFormat` does both for
`load_model`. What transformers would read wrong is completed or rejected. GGUF has no checksum:
docs/extend.md lists which damage cannot be detected.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from olmo_sparsity.base.errors import DataError, UserError, naming_extras
from olmo_sparsity.base.files import follow_umask, remove_partial, sha256_of, writing
from olmo_sparsity.base.locks import locked
from olmo_sparsity.base.model_cache import cache_folder, make_cache_folder
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.gguf.config import (
    check_entries,
    entries_read,
    supported_architectures,
)
from olmo_sparsity.models.gguf.header import Header, damaged, read_header
from olmo_sparsity.models.gguf.origin import ORIGIN, Origin
from olmo_sparsity.models.gguf.tokenizer import tokenizer_of
from olmo_sparsity.models.gguf.weights import read_model
from olmo_sparsity.models.huggingface.folder import without_warnings

CONVERTER = 1
"""The version of the conversion, a part of the folder's name. It is raised when files are converted
in another way."""


class GGUFFormat:
    """A `ModelFormat`: a GGUF file, or a folder that holds one."""

    def find(self, path_or_name: str) -> Path | None:
        """Return the folder that the GGUF file at this path is converted to; None if there is no
        such file."""
        file = find_gguf(Path(path_or_name))
        return None if file is None else convert_gguf(file)


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that `path` names, or the only one in the folder that it names; None if
    there is none. Raise DataError if there are several, or if it is one of several shards."""
    file = path
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise DataError(f"'{path}' holds {len(files)} GGUF files ({names}); name one of them")
        if files:
            file = files[0]
    if not file.is_file() or file.suffix != ".gguf":
        return None
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", file.name):
        raise DataError(
            f"'{file}' is one of several shards; join them with llama.cpp's "
            "`llama-gguf-split --merge`"
        )
    return file


@naming_extras()
def convert_gguf(file: Path) -> Path:
    """Return the folder in the cache to which a GGUF file is converted, in fp32. The first call
    converts it."""
    header = read_header(file)
    if entries_read(header.architecture) is None:
        raise DataError(
            f"'{header.path}': architecture '{header.architecture}' is not supported, only "
            + ", ".join(supported_architectures())
        )
    quantization = _most_frequent_type(header)
    _check_tensor_names(header)
    check_entries(header)
    # After the checks, as it reads the whole file.
    origin = Origin(sha256_of(file), quantization)
    folder = cache_folder() / "gguf" / origin.sha256 / f"model-{CONVERTER}"
    if not folder.is_dir():
        _convert_once(header, origin, folder)
    return folder


# --- checks of the tensors ------------------------------------------------------------------------


def _most_frequent_type(header: Header) -> str:
    """Return the type that most weights have, such as Q4_1."""
    from gguf import GGMLQuantizationType

    num_weights_by_type: Counter[int] = Counter()
    for tensor in header.tensors:
        num_weights_by_type[tensor.type] += tensor.num_weights
    if not num_weights_by_type:
        raise DataError(f"'{header.path}' holds no weights; download it again")
    most_frequent = max(num_weights_by_type, key=num_weights_by_type.__getitem__)
    return GGMLQuantizationType(most_frequent).name


def _check_tensor_names(header: Header) -> None:
    """Raise DataError unless tensors are named as llama.cpp names those of the architecture, such
    as `blk.0.attn_q.weight`, and their blocks are as many as the entry `block_count` says."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    names = [tensor.name for tensor in header.tensors]
    matches = [re.match(r"blk\.(\d+)\.", name) for name in names]
    blocks = {int(match[1]) for match in matches if match}
    stated = header.get("block_count")
    if blocks != {*range(len(blocks))} or stated != len(blocks):
        raise damaged(header, f"block_count={stated}, and it has tensors of {len(blocks)} blocks")

    arch = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
    known_stems = {name for _, name in get_tensor_name_map(arch, len(blocks)).mapping.values()}
    for name, count in Counter(names).items():
        stem, _, kind = name.rpartition(".")
        if count > 1 or stem not in known_stems or kind not in ("weight", "bias"):
            raise damaged(header, f"'{name}' is not a tensor of {arch.name}, or is there twice")


# --- the conversion -------------------------------------------------------------------------------


def _convert_once(header: Header, origin: Origin, folder: Path) -> None:
    """Convert a file, unless another process has done so before this one gets the lock."""
    make_cache_folder(folder.parent)
    with locked(folder.parent, waits=True):
        remove_partial(folder.parent)
        if folder.is_dir():
            return
        try:
            _convert(header, origin, folder)
        except UserError:
            # If the cache was emptied meanwhile, lock and all, another process may have filled it:
            # its folder is of the same bytes.
            if not folder.is_dir():
                raise


def _convert(header: Header, origin: Origin, folder: Path) -> None:
    """Write the Hugging Face folder of a file whose header was checked."""
    num_weights = sum(tensor.num_weights for tensor in header.tensors)
    num_megabytes = 4 * num_weights / 1e6  # fp32 has 4 bytes
    say(
        f"{header.path.name}: {num_weights:,} weights, mostly {origin.quantization}; "
        f"converting once to {num_megabytes:,.0f} MB in {folder}"
    )
    with writing(folder) as partial:
        partial.mkdir()
        tokenizer_of(header).save_pretrained(partial)
        with TemporaryDirectory(dir=folder.parent) as temporary, without_warnings():
            model = read_model(header, Path(temporary))
            model.save_pretrained(partial, max_shard_size="4GB")  # still without a bar
        (partial / ORIGIN).write_text(json.dumps(asdict(origin)))
        for path in partial.iterdir():
            follow_umask(path)
