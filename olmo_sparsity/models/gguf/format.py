"""Convert a GGUF file, once, to a Hugging Face folder in the cache.

    *.gguf → gguf/header.py: entries and tensors
           → gguf/config.py: checks of entries; a complete config    → a folder in the cache
           → gguf/tokenizer.py: the tokenizer                        → `load_model`
           → transformers: the weights, in fp32

`convert_gguf` is the entry. What transformers would read wrong is completed or rejected. GGUF has
no checksum: docs/extend.md lists which damage cannot be detected.
"""

from __future__ import annotations

import functools
import json
import re
import struct
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from olmo_sparsity.base.errors import (
    DataError,
    UserError,
    is_out_of_memory,
    naming_extras,
    one_line,
)
from olmo_sparsity.base.files import follow_umask, remove_partial, sha256_of, writing
from olmo_sparsity.base.locks import locked
from olmo_sparsity.base.model_cache import cache_folder, make_cache_folder
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.gguf.config import (
    ROPE_FACTORS,
    check_entries,
    complete_config,
    entries_read,
    supported_architectures,
)
from olmo_sparsity.models.gguf.header import (
    ARRAY,
    DEFAULT_ALIGNMENT,
    REMEDY,
    UINT8,
    Header,
    damaged,
    read_header,
    round_up,
)
from olmo_sparsity.models.gguf.origin import ORIGIN, Origin
from olmo_sparsity.models.gguf.tokenizer import tokenizer_of
from olmo_sparsity.models.huggingface.folder import NO_CODE, count_parameters, without_warnings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONVERTER = 1
"""The version of the conversion, a part of the folder's name. It is raised when files are converted
in another way."""


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
    _check_tensors(header)
    check_entries(header)
    # After the checks, as it reads the whole file.
    origin = Origin(sha256_of(file), quantization)
    folder = cache_folder() / "gguf" / origin.sha256 / f"model-{CONVERTER}"
    if not folder.is_dir():
        _convert_once(header, origin, folder)
    return folder


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
    say(
        f"{header.path.name}: {num_weights:,} weights, mostly {origin.quantization}; "
        f"converting once to {4 * num_weights / 1e6:,.0f} MB in {folder}"
    )
    with writing(folder) as partial:
        partial.mkdir()
        tokenizer_of(header).save_pretrained(partial)
        with TemporaryDirectory(dir=folder.parent) as temporary, without_warnings():
            model = _read_model(header, Path(temporary))
            model.save_pretrained(partial, max_shard_size="4GB")  # still without a bar
        (partial / ORIGIN).write_text(json.dumps(asdict(origin)))
        for path in partial.iterdir():
            follow_umask(path)


def _read_model(header: Header, folder: Path) -> PreTrainedModel:
    """Return the model of a file, with a complete config. `folder`: a folder for a copy of it."""
    _copy_without_tokenizer(header, folder / "model.gguf")
    try:
        model = _read_weights(folder)
        complete_config(model.config, header)
        _check_number_of_weights(model, header)
    except Exception as error:  # a damaged file may raise almost any
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        reason = one_line(f"{type(error).__name__}: {error}")
        raise DataError(
            f"'{header.path}': transformers cannot read its weights ({reason}); {REMEDY}"
        ) from None
    return model


def _read_weights(folder: Path) -> PreTrainedModel:
    """Return the model of the folder's `model.gguf`, in fp32."""
    import gguf
    import transformers
    from transformers import modeling_gguf_pytorch_utils as reader

    # Of the progress bars, this one has no switch.
    reader.tqdm = functools.partial(reader.tqdm, disable=True)
    # transformers builds this table again for each module of the model.
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    # Otherwise some weights may stay packed where the package `kernels` is installed.
    options = {**NO_CODE, "quantization_config": transformers.GgufConfig(dequantize=True)}
    model: PreTrainedModel
    info: dict[str, Any]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(  # type: ignore[misc] # a pair
        folder, gguf_file="model.gguf", dtype=torch.float32, output_loading_info=True, **options
    )
    missing = info["missing_keys"]
    if missing:  # transformers has filled them with random numbers
        raise ValueError(f"it lacks {len(missing)} weights, such as {min(missing)}")
    # Otherwise save_pretrained takes the model for a quantized one, and rejects it.
    model.hf_quantizer = None  # type: ignore[assignment] # declared as never None
    for config in (model.config, model.config.get_text_config()):
        vars(config).pop("quantization_config", None)
    return model


# --- checks and copies ----------------------------------------------------------------------------


def _most_frequent_type(header: Header) -> str:
    """Return the type that most weights have, such as Q4_1."""
    from gguf import GGMLQuantizationType

    weights_of_type: Counter[int] = Counter()
    for tensor in header.tensors:
        weights_of_type[tensor.type] += tensor.num_weights
    if not weights_of_type:
        raise DataError(f"'{header.path}' holds no weights; download it again")
    most_frequent = max(weights_of_type, key=weights_of_type.__getitem__)
    return GGMLQuantizationType(most_frequent).name


def _check_tensors(header: Header) -> None:
    """Raise DataError for tensors whose names are not those of the architecture, as llama.cpp
    does."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    names = [tensor.name for tensor in header.tensors]
    matches = [re.match(r"blk\.(\d+)\.", name) for name in names]
    blocks = {int(match[1]) for match in matches if match}
    stated = header.get("block_count")
    if blocks != {*range(len(blocks))} or stated != len(blocks):
        raise damaged(header, f"block_count={stated}, and it has tensors of {len(blocks)} blocks")
    arch = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
    known = {name for _, name in get_tensor_name_map(arch, len(blocks)).mapping.values()}
    for name, count in Counter(names).items():
        stem, _, kind = name.rpartition(".")
        if count > 1 or stem not in known or kind not in ("weight", "bias"):
            raise damaged(header, f"'{name}' is not a tensor of {arch.name}, or is there twice")


def _copy_without_tokenizer(header: Header, to: Path) -> None:
    """Write the file again, with as many empty tokens as it has tokens: transformers takes the
    vocabulary's size from their number, and would build its own tokenizer from their texts.

        GGUF, version, number of tensors, number of entries      the parts of a GGUF file
        key, type, value                                         of each entry
        name, shape, type, offset in the data                    of each tensor
        the data of all tensors, each from a multiple of the alignment on
    """
    num_tokens = len(header.metadata["tokenizer.ggml.tokens"])
    # An array of `num_tokens` items, each the byte 0.
    empty_tokens = struct.pack("<IIQ", ARRAY, UINT8, num_tokens) + bytes(num_tokens)
    entries = [*header.raw.values(), _packed_text("tokenizer.ggml.tokens") + empty_tokens]
    align = int(header.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    with to.open("wb") as file:
        version = 3
        file.write(struct.pack("<4sIQQ", b"GGUF", version, len(header.tensors), len(entries)))
        file.write(b"".join(entries))

        offset = 0
        for tensor in header.tensors:
            num_dims = len(tensor.shape)
            file.write(_packed_text(tensor.name))
            file.write(struct.pack(f"<I{num_dims}Q", num_dims, *tensor.shape))
            file.write(struct.pack("<IQ", tensor.type, offset))
            offset += round_up(tensor.num_bytes, align)

        # Mapped, as a file may be larger than the memory.
        data = np.memmap(header.path, mode="r")
        for tensor in header.tensors:
            padding = -file.tell() % align
            file.write(bytes(padding))
            file.write(data[tensor.start : tensor.start + tensor.num_bytes].data)


def _packed_text(text: str) -> bytes:
    """Return a text as GGUF stores it: its length in bytes, then the bytes."""
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _check_number_of_weights(model: PreTrainedModel, header: Header) -> None:
    """Raise DataError if a file has more weights than the model that was read from it: transformers
    leaves out tensors that it does not know, without a word."""
    tensors = [tensor for tensor in header.tensors if tensor.name != ROPE_FACTORS]
    num_in_file = sum(tensor.num_weights for tensor in tensors)
    num_in_model = count_parameters(model)
    if num_in_file != num_in_model:
        raise DataError(
            f"'{header.path}' holds {num_in_file:,} weights, of which transformers reads "
            f"{num_in_model:,}; {REMEDY}"
        )


class GGUFFormat:
    """A `ModelFormat`: a GGUF file, or a folder that holds one."""

    def find(self, path_or_name: str) -> Path | None:
        file = find_gguf(Path(path_or_name))
        return None if file is None else convert_gguf(file)
