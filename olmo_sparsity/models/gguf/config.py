"""Check the entries of a GGUF file, and complete the config that transformers makes of them.

transformers reads only some entries, and an entry that nobody reads would change the numbers in
silence. So each of the others is one of these:

    gemma3.attention.sliding_window = 512     set in the config (`complete_config`)
    llama.attention.causal = true             known to change no number (`_WITHOUT_EFFECT`)
    llama.attn_logit_softcapping = 50         rejected, unless it is the config's default, too

A file has no checksum, so `check_entries` also rejects numbers out of range: with one bit flipped,
`llama.block_count` may be 16,390 in place of 6. format.py calls both functions.
"""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.gguf.header import REMEDY, Header, damaged

# --- what transformers reads ----------------------------------------------------------------------

_SPELLED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "minimax-m2": "minimax_m2"}
"""Architectures whose names transformers spells in another way than llama.cpp."""

_NOT_CONVERTED = {"general", "tokenizer", "bloom", "t5", "umt5", "mamba", "lfm2", "gpt_oss"}
"""Entries that are not architectures, architectures that load_model always rejects, and gpt-oss:
transformers does not read its scaled RoPE from GGUF."""


def entries_read(architecture: str) -> dict[str, Any] | None:
    """Return the entries of an architecture that transformers reads, with their names in a config;
    None if the architecture is not supported."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    name = _SPELLED.get(architecture, architecture)
    if name in _NOT_CONVERTED:
        return None
    mapping: dict[str, Any] = GGUF_CONFIG_MAPPING
    entries: dict[str, Any] | None = mapping.get(name)
    return entries


def supported_architectures() -> list[str]:
    """Return the architectures whose GGUF files are converted, as llama.cpp spells them."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    spelled_in_file = {theirs: ours for ours, theirs in _SPELLED.items()}
    names = set(GGUF_CONFIG_MAPPING) - _NOT_CONVERTED
    return sorted(spelled_in_file.get(name, name) for name in names)


_WITHOUT_EFFECT = ("vocab_size", "attention.causal", "attention.value_length", "tensor_data_layout")
"""Entries that transformers' conversion leaves out, and that change no number."""

_NAMES_IN_CONFIG = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual",
    "rope.dimension_count": "head_dim",
}
"""Entries that transformers' conversion leaves out, and their names in a config, whose default must
have the same value."""


# --- numbers in range -----------------------------------------------------------------------------

_COUNTS = ("_count", "_length", "_size", "_count_kv")
"""The ends of the names of entries that are whole numbers, such as `llama.block_count`."""

_LENGTHS = ("context_length", "vocab_size")
"""The ends of the names of whole numbers that may be larger than any dimension of a tensor, such as
`llama.context_length`."""

_RANGES = {"epsilon": (0, 0.01), "freq_base": (100, 1e13), "freq_base_swa": (100, 1e13)}
"""The ends of the names of entries that are floating-point numbers, and their ranges: epsilons of
norms, and bases of RoPE, such as `llama.rope.freq_base`."""

_USUAL_MANTISSA = re.compile("[15]e")
"""Mantissa of nearly all bases of RoPE and epsilons of norms."""


def check_entries(header: Header) -> None:
    """Raise DataError for numbers out of range, and for names of entries that are almost those of
    the architecture: with a flipped bit in its name, an entry would keep its default value."""
    largest_dimension = max(max(tensor.shape, default=1) for tensor in header.tensors)
    # Names of entries without their owner, such as `block_count` of `llama.block_count`.
    known = {
        *(entries_read(header.architecture) or ()),
        *_NAMES_IN_CONFIG,
        *_WITHOUT_EFFECT,
    }
    for key, value in header.metadata.items():
        owner, _, _ = key.partition(".")
        if owner == header.architecture:
            _check_count_entry(header, key, value, largest_dimension)
            _check_fraction_entry(header, key, value)
        elif key.endswith(tuple(known)) or ("ggml." in key and owner != "tokenizer"):
            raise damaged(header, f"its entry {key} is of no architecture")


def _check_count_entry(header: Header, key: str, value: Any, largest_dimension: int) -> None:
    """Raise DataError for a count, or one in a list of counts, that is not a whole number within
    its range. `largest_dimension`: that of all tensors, which bounds most counts."""
    if not key.endswith(_COUNTS):
        return
    smallest = 0
    largest = largest_dimension
    if key.endswith(_LENGTHS):
        smallest = 1
        largest = 2**31
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        # By its type, as true and false are instances of int, too.
        if type(number) is not int or not smallest <= number <= largest:
            raise damaged(header, f"{key}={number}")


def _check_fraction_entry(header: Header, key: str, value: Any) -> None:
    """Raise DataError for an epsilon or a base of RoPE that is out of range, and print a warning
    for an unusual one."""
    for ending, (smallest, largest) in _RANGES.items():
        if not key.endswith(ending):
            continue
        if type(value) is not float or not smallest <= value <= largest:
            raise damaged(header, f"{key}={value}")
        # A flipped bit in range is not an error, as any base may be meant; a line says so.
        if not _USUAL_MANTISSA.match(np.format_float_scientific(np.float32(value), trim="-")):
            say(f"{header.path.name}: {key}={value:g} is unusual; the file may be damaged")


# --- the config -----------------------------------------------------------------------------------

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by which llama.cpp divides the angles of Llama 3."""

_GEMMA_27B_BLOCKS = (46, 62)
"""Numbers of blocks of Gemma 2 and 3 at 27B. GGUF has no entry for the scale of their queries,
which differs at this size."""


def complete_config(config: Any, header: Header) -> None:
    """Set what transformers leaves out of the config, and reject what would change the numbers."""
    known = {*(entries_read(header.architecture) or {}), *_WITHOUT_EFFECT}
    start = f"{header.architecture}."
    for key, value in header.metadata.items():
        if not key.startswith(start):  # general, or of the tokenizer
            continue
        name = key.removeprefix(start)
        # `_complete_rope` reads how RoPE is scaled.
        if name in known or name.startswith("rope.scaling."):
            continue
        if name == "rope.freq_base_swa":
            config.rope_parameters["sliding_attention"]["rope_theta"] = value
        elif name == "attention.sliding_window" and hasattr(config, "sliding_window"):
            config.sliding_window = value
        elif not _is_in_config(config, name, value):
            raise DataError(
                f"'{header.path}': transformers does not read {key}={value!r:.60}, which may "
                f"change numbers; {REMEDY}"
            )

    is_gemma = header.architecture in ("gemma2", "gemma3")
    if is_gemma and header.get("block_count") in _GEMMA_27B_BLOCKS:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    _complete_rope(config, header)


def _is_in_config(config: Any, name: str, value: Any) -> bool:
    """Return whether the config has the value of an entry already, as its default."""
    name_in_config = _NAMES_IN_CONFIG.get(name)
    return name_in_config is not None and getattr(config, name_in_config, None) == value


def _complete_rope(config: Any, header: Header) -> None:
    """Set how RoPE is scaled: linearly, or by the factors of Llama 3."""
    kind = header.get("rope.scaling.type", "none")
    factor = header.get("rope.scaling.factor", 0.0)
    rope = config.rope_parameters if hasattr(config, "rope_parameters") else {}
    rope = rope.get("full_attention", rope)  # Gemma 3 scales its wide layers only
    if kind == "linear" and factor:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise DataError(f"'{header.path}': RoPE scaled by {kind!r} is not read; {REMEDY}")
    for tensor in header.tensors:
        if tensor.name == ROPE_FACTORS:
            count = tensor.num_weights
            factors = np.fromfile(header.path, np.float32, count, offset=tensor.start)
            rope |= _llama3_scaling(config, torch.from_numpy(factors), header)


def _llama3_scaling(config: Any, factors: torch.Tensor, header: Header) -> dict[str, Any]:
    """Return the RoPE settings that divide angles by these factors: Llama 3.1's or 3.2's, which
    differ in `factor`, the largest of them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    dimensions = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = 1.0 / config.rope_parameters["rope_theta"] ** dimensions
    settings = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = deepcopy(config)
    scaled.rope_parameters |= settings
    scaled_angles, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    if not torch.allclose(angles / factors, scaled_angles, rtol=1e-4, atol=0):
        raise DataError(
            f"'{header.path}': {ROPE_FACTORS} are not the factors of Llama 3.1 or 3.2; {REMEDY}"
        )
    return settings
