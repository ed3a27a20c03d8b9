"""Read the weights of a GGUF file as a model of transformers, in fp32.

transformers can read GGUF files, and does three things that a conversion must not do. So format.py
calls **`read_model`**, which

    copies the file without the texts of its tokens   transformers would build its own tokenizer
    completes the config that transformers makes      it leaves entries out (config.py)
    counts weights and raises if some are missing     it leaves tensors out, and fills in others
"""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from olmo_sparsity.base.errors import DataError, UserError, is_out_of_memory, one_line
from olmo_sparsity.models.gguf.config import ROPE_FACTORS, complete_config
from olmo_sparsity.models.gguf.header import (
    ARRAY,
    DEFAULT_ALIGNMENT,
    REMEDY,
    UINT8,
    Header,
    round_up,
)
from olmo_sparsity.models.huggingface.folder import NO_CODE, count_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VERSION = 3
"""The version of GGUF in which copies are written."""

_COPY = "model.gguf"


def read_model(header: Header, folder: Path) -> PreTrainedModel:
    """Return the model of a file, with a complete config.

    Args:
        header: The header of the file, whose entries and tensors were checked.
        folder: An empty folder for a copy of the file.
    """
    _copy_without_tokenizer(header, folder / _COPY)
    try:
        model = _read_copy(folder)
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


# --- the copy -------------------------------------------------------------------------------------


def _copy_without_tokenizer(header: Header, to: Path) -> None:
    """Write the file again, with empty texts as its tokens. There are as many as before, as
    transformers takes the size of the vocabulary from their number.

        GGUF, version, number of tensors, number of entries      the parts of a GGUF file
        key, type, value                                         of each entry
        name, shape, type, offset in the data                    of each tensor
        the data of all tensors, each from a multiple of the alignment on
    """
    tokens_key = "tokenizer.ggml.tokens"
    num_tokens = len(header.metadata[tokens_key])
    # An array of `num_tokens` items, each the byte 0.
    empty_tokens = struct.pack("<IIQ", ARRAY, UINT8, num_tokens) + bytes(num_tokens)
    # `header.raw` has no arrays of the tokenizer, and so no tokens.
    entries = [*header.raw.values(), _packed_text(tokens_key) + empty_tokens]
    align = int(header.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    with to.open("wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", _VERSION, len(header.tensors), len(entries)))
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


# --- the model ------------------------------------------------------------------------------------


def _read_copy(folder: Path) -> PreTrainedModel:
    """Return the model of the copy in a folder, in fp32."""
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
        folder, gguf_file=_COPY, dtype=torch.float32, output_loading_info=True, **options
    )
    missing = info["missing_keys"]
    if missing:  # transformers has filled them with random numbers
        raise ValueError(f"it lacks {len(missing)} weights, such as {min(missing)}")
    # Otherwise save_pretrained takes the model for a quantized one, and rejects it.
    model.hf_quantizer = None  # type: ignore[assignment] # declared as never None
    for config in (model.config, model.config.get_text_config()):
        vars(config).pop("quantization_config", None)
    return model


def _check_number_of_weights(model: PreTrainedModel, header: Header) -> None:
    """Raise DataError if a file has more weights than the model that was read from it: transformers
    leaves out tensors that it does not know, without a word."""
    # These factors become a part of the config (`complete_config`).
    tensors = [tensor for tensor in header.tensors if tensor.name != ROPE_FACTORS]
    num_in_file = sum(tensor.num_weights for tensor in tensors)
    num_in_model = count_parameters(model)
    if num_in_file != num_in_model:
        raise DataError(
            f"'{header.path}' holds {num_in_file:,} weights, of which transformers reads "
            f"{num_in_model:,}; {REMEDY}"
        )
