"""Convert a GGUF file, once, to a Hugging Face folder in the cache.

Place in the flow: *.gguf → **folder in the cache** → `load_model`. transformers converts the
weights; what it would read wrong is completed here (RoPE of Llama 3) or rejected. GGUF has no
checksum: docs/extend.md lists which damage cannot be detected.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers, processors

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
from olmo_sparsity.models.transformers_folder import (
    NO_CODE,
    ORIGIN,
    Origin,
    count_parameters,
    without_warnings,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_REMEDY = "load the model's safetensors instead"

CONVERTER = 1
"""Part of the folder's name; another number converts known files again."""


# --- find and convert ---------------------------------------------------------------------------


def find_gguf(path: Path) -> Path | None:
    """Return the file; None if `path` neither is a GGUF file nor holds one."""
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
    """Return the Hugging Face folder of a GGUF file, in fp32; convert it on the first call."""
    header = _read_header(file)
    if _entries_read(header.architecture) is None:
        raise DataError(
            f"'{header.path}': architecture '{header.architecture}' is not supported, only "
            + ", ".join(supported_architectures())
        )
    quantization = _quantization(header)
    _check_tensors(header)
    _check_entries(header)
    file_sha256 = sha256_of(file)
    place = cache_folder() / "gguf" / file_sha256
    folder = place / f"model-{CONVERTER}"
    if not folder.is_dir():
        make_cache_folder(place)
        with locked(place, waits=True):
            remove_partial(place)
            if not folder.is_dir():  # or another process has converted it
                try:
                    _convert(header, Origin(file_sha256, quantization), folder)
                except UserError:
                    # The cache was emptied meanwhile, lock and all, and another process has filled
                    # it: its folder is of the same bytes.
                    if not folder.is_dir():
                        raise
    return folder


def _convert(header: Header, origin: Origin, folder: Path) -> None:
    num_weights = sum(tensor.num_weights for tensor in header.tensors)
    say(
        f"{header.path.name}: {num_weights:,} weights, mostly {origin.quantization}; "
        f"converting once to {4 * num_weights / 1e6:,.0f} MB in {folder}"
    )
    with writing(folder) as partial:
        partial.mkdir()
        _read_tokenizer(header).save_pretrained(partial)
        with TemporaryDirectory(dir=folder.parent) as temporary, without_warnings():
            _copy_without_tokenizer(header, Path(temporary) / "model.gguf")
            try:
                model = _read_weights(Path(temporary))
                _complete_config(model.config, header)
                _check_count(model, header)
            except Exception as error:  # a damaged file may raise almost any
                if isinstance(error, UserError) or is_out_of_memory(error):
                    raise
                reason = one_line(f"{type(error).__name__}: {error}")
                raise DataError(
                    f"'{header.path}': transformers cannot read its weights ({reason}); {_REMEDY}"
                ) from None
            model.save_pretrained(partial, max_shard_size="4GB")  # still without a bar
        (partial / ORIGIN).write_text(json.dumps(asdict(origin)))
        for path in partial.iterdir():
            follow_umask(path)


def _read_weights(folder: Path) -> PreTrainedModel:
    """Return the model of the folder's `model.gguf`, in fp32."""
    import gguf
    import transformers
    from transformers import modeling_gguf_pytorch_utils as reader

    reader.tqdm = functools.partial(reader.tqdm, disable=True)  # the bar that has no switch
    # transformers builds this table again for each module of the model.
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    # Else with `kernels` some weights may stay packed.
    options = {**NO_CODE, "quantization_config": transformers.GgufConfig(dequantize=True)}
    model: PreTrainedModel
    info: dict[str, Any]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(  # type: ignore[misc] # a pair
        folder, gguf_file="model.gguf", dtype=torch.float32, output_loading_info=True, **options
    )
    missing = info["missing_keys"]
    if missing:  # transformers has filled them with random numbers
        raise ValueError(f"it lacks {len(missing)} weights, such as {min(missing)}")
    # Else save_pretrained takes the model for a quantized one, and rejects it.
    model.hf_quantizer = None  # type: ignore[assignment]
    for config in (model.config, model.config.get_text_config()):
        vars(config).pop("quantization_config", None)
    return model


# --- read the header ----------------------------------------------------------------------------


_FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""The letter of `struct` for each type of an entry."""

_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file, without its numbers."""

    name: str
    shape: tuple[int, ...]
    """Fastest dimension first, as in the file."""

    type: int
    """How the weights are quantized: a number of `gguf.GGMLQuantizationType`."""

    start: int
    """First byte of the tensor, counted from the start of the file."""

    num_bytes: int

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What a GGUF file says before its weights."""

    path: Path
    metadata: dict[str, Any]
    """Entries of the header by their keys, such as `llama.block_count`."""

    raw: dict[str, bytes]
    """Each entry as the file holds it, without the tokenizer's arrays."""

    tensors: list[Tensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry of the architecture, such as `block_count` of `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


class _Bytes:
    """A file that is read from its start. Raises struct.error at its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def numbers(self, letter: str, num: int) -> tuple:
        layout = struct.Struct(f"<{num}{letter}")
        values = layout.unpack_from(self.data, self.offset)
        self.offset += layout.size
        return values

    def number(self, letter: str) -> Any:
        return self.numbers(letter, 1)[0]

    def string(self) -> str:
        size = self.number("Q")
        # A slice would be cut at the end of the file without an error.
        if size > len(self.data) - self.offset:
            raise struct.error(f"a string of {size:,} bytes passes its end")
        start = self.offset
        self.offset += size
        return self.data[start : self.offset].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """Return the value of an entry, of one of the types in `_FORMATS`, a text or a list."""
        if kind == _STRING:
            return self.string()
        if kind == _BOOL and self.data[self.offset] > 1:  # struct takes any byte for true
            raise ValueError(f"{self.data[self.offset]} is neither true nor false")
        if kind != _ARRAY:
            return self.number(_FORMATS[kind])
        kind_of_items = self.number("I")
        num = self.number("Q")
        if kind_of_items == _STRING:
            return [self.string() for _ in range(num)]
        return list(self.numbers(_FORMATS[kind_of_items], num))


def _read_header(path: Path) -> Header:
    """Return the header of a file, after checking that its tensors fill the file without a gap."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse_header(path, data)
    except struct.error as error:
        raise DataError(f"'{path}' ends too early ({error}); download it again") from None
    except (ValueError, KeyError, OSError, OverflowError, ZeroDivisionError, TypeError) as error:
        raise DataError(f"'{path}' is not a GGUF file ({error}); download it again") from None


_MAGIC = 0x46554747  # "GGUF"

_ListedTensor = tuple[str, tuple[int, ...], int, int]
"""Name, shape, type, and first byte, counted from the first byte of all tensors."""


def _parse_header(path: Path, data: mmap.mmap) -> Header:
    reader = _Bytes(data)
    magic, version = reader.numbers("I", 2)
    num_tensors, num_entries = reader.numbers("Q", 2)
    if magic != _MAGIC or version not in (2, 3):
        raise ValueError("it does not begin as GGUF version 2 or 3, little-endian, does")
    metadata = dict[str, Any]()
    raw = dict[str, bytes]()
    for _ in range(num_entries):
        start = reader.offset
        key = reader.string()
        value = reader.value(reader.number("I"))
        metadata[key] = value
        if not (key.startswith("tokenizer.") and isinstance(value, list)):
            raw[key] = data[start : reader.offset]
    listed = list[_ListedTensor]()
    for _ in range(num_tensors):
        name = reader.string()
        shape = reader.numbers("Q", reader.number("I"))
        kind = reader.number("I")
        offset = reader.number("Q")
        listed.append((name, shape, kind, offset))
    align = metadata.get("general.alignment", 32)
    first_byte = _rounded_up(reader.offset, align)
    return Header(path, metadata, raw, _place_tensors(listed, first_byte, align, len(data)))


def _place_tensors(
    listed: Sequence[_ListedTensor], first_byte: int, align: int, file_size: int
) -> list[Tensor]:
    """Return the tensors, if each begins where the one before it ends, and the last one ends with
    the file: a shift by a damaged byte would otherwise give other weights without an error."""
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    tensors = list[Tensor]()
    end = 0
    for name, shape, kind, offset in listed:
        if kind not in sizes:
            raise ValueError(f"'{name}' has the unknown type {kind}")
        block_weights, block_bytes = sizes[kind]
        num_bytes = math.prod(shape) // block_weights * block_bytes
        if offset != end or (shape and shape[0] % block_weights):
            raise ValueError(f"'{name}' does not begin where the tensor before it ends")
        start = first_byte + offset
        if start + num_bytes > file_size:
            raise struct.error(f"'{name}' ends at byte {start + num_bytes:,}")
        tensors.append(Tensor(name, shape, kind, start, num_bytes))
        end = _rounded_up(end + num_bytes, align)
    if first_byte + end < file_size:
        raise ValueError(f"{file_size - first_byte - end:,} bytes follow its last tensor")
    return tensors


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _quantization(header: Header) -> str:
    """Return the type that most weights have, such as Q4_1."""
    from gguf import GGMLQuantizationType

    weights_of_type = Counter[int]()
    for tensor in header.tensors:
        weights_of_type[tensor.type] += tensor.num_weights
    if not weights_of_type:
        raise DataError(f"'{header.path}' holds no weights; download it again")
    most_frequent = max(weights_of_type, key=weights_of_type.__getitem__)
    return GGMLQuantizationType(most_frequent).name


def _damaged(header: Header, problem: str) -> DataError:
    return DataError(f"'{header.path}' is damaged: {problem}; download it again")


def _check_tensors(header: Header) -> None:
    """Reject tensors whose names are not the architecture's, as llama.cpp does."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    names = [tensor.name for tensor in header.tensors]
    matches = [re.match(r"blk\.(\d+)\.", name) for name in names]
    blocks = {int(match[1]) for match in matches if match}
    stated = header.get("block_count")
    if blocks != {*range(len(blocks))} or stated != len(blocks):
        raise _damaged(header, f"block_count={stated}, and it has tensors of {len(blocks)} blocks")
    arch = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
    known = {name for _, name in get_tensor_name_map(arch, len(blocks)).mapping.values()}
    for name, num in Counter(names).items():
        stem, _, kind = name.rpartition(".")
        if num > 1 or stem not in known or kind not in ("weight", "bias"):
            raise _damaged(header, f"'{name}' is not a tensor of {arch.name}, or is there twice")


_COUNTS = ("_count", "_length", "_size", "_count_kv")
"""Ends of names of entries that are whole numbers."""

_LENGTHS = ("context_length", "vocab_size")
"""Ends of names of those that may be larger than any dimension of a tensor."""

_LIMITS = {"epsilon": (0, 0.01), "freq_base": (100, 1e13), "freq_base_swa": (100, 1e13)}
"""Ends of names of entries that are fractions, and their ranges."""

_USUAL = re.compile("[15]e")
"""Mantissa of nearly all bases of RoPE and epsilons of norms."""


def _check_entries(header: Header) -> None:
    """Reject numbers out of range, and names of entries that only almost are the architecture's: a
    flipped bit in a name would leave its default in the config."""
    largest_dimension = max(max(tensor.shape, default=1) for tensor in header.tensors)
    known = {
        *(_entries_read(header.architecture) or ()),
        *_ALSO_IN_CONFIG,
        *_WITHOUT_EFFECT,
    }
    for key, value in header.metadata.items():
        owner = key.partition(".")[0]
        if owner == header.architecture:
            _check_count_entry(header, key, value, largest_dimension)
            _check_fraction_entry(header, key, value)
        elif key.endswith(tuple(known)) or ("ggml." in key and owner != "tokenizer"):
            raise _damaged(header, f"its entry {key} is of no architecture")


def _check_count_entry(header: Header, key: str, value: Any, largest_dimension: int) -> None:
    if not key.endswith(_COUNTS):
        return
    least, most = (1, 2**31) if key.endswith(_LENGTHS) else (0, largest_dimension)
    for number in value if isinstance(value, list) else [value]:
        if type(number) is not int or not least <= number <= most:  # true is an int, too
            raise _damaged(header, f"{key}={number}")


def _check_fraction_entry(header: Header, key: str, value: Any) -> None:
    for ending, (least, most) in _LIMITS.items():
        if not key.endswith(ending):
            continue
        if type(value) is not float or not least <= value <= most:
            raise _damaged(header, f"{key}={value}")
        # A flipped bit in range is not an error, as any base may be meant; a line says so.
        if not _USUAL.match(np.format_float_scientific(np.float32(value), trim="-")):
            say(f"{header.path.name}: {key}={value:g} is unusual; the file may be damaged")


# --- what transformers reads --------------------------------------------------------------------


_SPELLED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "minimax-m2": "minimax_m2"}
"""Architectures whose names transformers spells in another way than llama.cpp."""

_REFUSED = {"general", "tokenizer", "bloom", "t5", "umt5", "mamba", "lfm2", "gpt_oss"}
"""Entries that are not architectures, architectures that load_model always rejects, and gpt-oss:
transformers does not read its scaled RoPE from GGUF."""


def _entries_read(architecture: str) -> dict[str, Any] | None:
    """Return the entries of an architecture that transformers reads, with their names in a config;
    None if the architecture is not supported."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    name = _SPELLED.get(architecture, architecture)
    if name in _REFUSED:
        return None
    mapping: dict[str, Any] = GGUF_CONFIG_MAPPING
    entries: dict[str, Any] | None = mapping.get(name)
    return entries


def supported_architectures() -> list[str]:
    """Return the architectures whose GGUF files are converted, as llama.cpp spells them."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    spelled_in_file = {theirs: ours for ours, theirs in _SPELLED.items()}
    names = set(GGUF_CONFIG_MAPPING) - _REFUSED
    return sorted(spelled_in_file.get(name, name) for name in names)


def _copy_without_tokenizer(header: Header, to: Path) -> None:
    """Write the file again, with as many empty tokens as it has tokens: transformers takes the
    vocabulary's size from their number, and would build its own tokenizer from their texts."""
    key = b"tokenizer.ggml.tokens"
    num_tokens = len(header.metadata["tokenizer.ggml.tokens"])
    # Each item is one byte, a false of type 0 (uint8).
    tokens = struct.pack("<IIQ", _ARRAY, 0, num_tokens) + bytes(num_tokens)
    entries = [*header.raw.values(), struct.pack("<Q", len(key)) + key + tokens]
    align = int(header.metadata.get("general.alignment", 32))
    with to.open("wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(header.tensors), len(entries)))
        file.write(b"".join(entries))
        offset = 0
        for tensor in header.tensors:
            name = tensor.name.encode()
            num_dims = len(tensor.shape)
            file.write(struct.pack("<Q", len(name)) + name)
            file.write(struct.pack(f"<I{num_dims}Q", num_dims, *tensor.shape))
            file.write(struct.pack("<IQ", tensor.type, offset))
            offset += _rounded_up(tensor.num_bytes, align)
        # Mapped, as a file may be larger than the memory.
        data = np.memmap(header.path, mode="r")
        for tensor in header.tensors:
            file.write(bytes(-file.tell() % align))
            file.write(data[tensor.start : tensor.start + tensor.num_bytes].data)


_WITHOUT_EFFECT = ("vocab_size", "attention.causal", "attention.value_length", "tensor_data_layout")
"""Entries that transformers' conversion leaves out, and that change no number."""

_ALSO_IN_CONFIG = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual",
    "rope.dimension_count": "head_dim",
}
"""Entries that transformers' conversion leaves out, and their names in a config, whose default must
have the same value."""

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by which llama.cpp divides the angles of Llama 3."""

_GEMMA_27B_BLOCKS = (46, 62)
"""Of Gemma 2 and 3. GGUF has no entry for the scale of their queries, which differs at 27B."""


def _complete_config(config: Any, header: Header) -> None:
    """Set what transformers leaves out of the config, and reject what would change the numbers."""
    known = {*(_entries_read(header.architecture) or {}), *_WITHOUT_EFFECT}
    start = f"{header.architecture}."
    for key, value in header.metadata.items():
        name = key.removeprefix(start)
        is_of_another_part = not key.startswith(start)  # general, or of the tokenizer
        if is_of_another_part or name in known or name.startswith("rope.scaling."):
            continue  # `_complete_rope` reads how RoPE is scaled
        if name == "rope.freq_base_swa":
            config.rope_parameters["sliding_attention"]["rope_theta"] = value
        elif name == "attention.sliding_window" and hasattr(config, "sliding_window"):
            config.sliding_window = value
        elif name not in _ALSO_IN_CONFIG or getattr(config, _ALSO_IN_CONFIG[name], None) != value:
            raise DataError(
                f"'{header.path}': transformers does not read {key}={value!r:.60}, which may "
                f"change numbers; {_REMEDY}"
            )
    is_gemma = header.architecture in ("gemma2", "gemma3")
    if is_gemma and header.get("block_count") in _GEMMA_27B_BLOCKS:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    _complete_rope(config, header)


def _complete_rope(config: Any, header: Header) -> None:
    """Set how RoPE is scaled: linearly, or by the factors of Llama 3."""
    kind = header.get("rope.scaling.type", "none")
    factor = header.get("rope.scaling.factor", 0.0)
    rope = config.rope_parameters if hasattr(config, "rope_parameters") else {}
    rope = rope.get("full_attention", rope)  # Gemma 3 scales its wide layers only
    if kind == "linear" and factor:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise DataError(f"'{header.path}': RoPE scaled by {kind!r} is not read; {_REMEDY}")
    for tensor in header.tensors:
        if tensor.name == ROPE_FACTORS:
            num = tensor.num_weights
            factors = np.fromfile(header.path, np.float32, num, offset=tensor.start)
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
            f"'{header.path}': {ROPE_FACTORS} are not the factors of Llama 3.1 or 3.2; {_REMEDY}"
        )
    return settings


def _check_count(model: PreTrainedModel, header: Header) -> None:
    """Reject a file with more weights than the model: transformers leaves out tensors that it does
    not know, without a word."""
    tensors = [tensor for tensor in header.tensors if tensor.name != ROPE_FACTORS]
    num_in_file = sum(tensor.num_weights for tensor in tensors)
    num_in_model = count_parameters(model)
    if num_in_file != num_in_model:
        raise DataError(
            f"'{header.path}' holds {num_in_file:,} weights, of which transformers reads "
            f"{num_in_model:,}; {_REMEDY}"
        )


# --- the tokenizer ------------------------------------------------------------------------------


_GPT2 = ("gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "trillion", "roberta-bpe")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "tekken"
)  # fmt: skip
"""How text is split before merges (`tokenizer.ggml.pre`), as in llama.cpp: by GPT-2's expression,
after splitting off each digit, or with words of the vocabulary taken whole."""

_NORMAL, _CONTROL, _ADDED = 1, 3, 4
"""Types of tokens."""

_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens of transformers, and their names in entries of the file."""


def read_gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a GGUF file, without its weights."""
    return _read_tokenizer(_read_header(path))


def _read_tokenizer(header: Header) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    entries = _tokenizer_entries(header)
    try:
        _check_vocabulary(header, entries)
        backend = _backend(header, entries)
        special = _special_tokens(entries)
        backend.post_processor = _post_processor(entries, special)
    except (KeyError, IndexError, TypeError) as error:
        raise DataError(
            f"'{header.path}': its tokenizer is incomplete ({type(error).__name__}: {error}); "
            "download it again"
        ) from None
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=entries.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _tokenizer_entries(header: Header) -> dict[str, Any]:
    """Return the tokenizer's entries by the last part of their keys: `tokens` for
    `tokenizer.ggml.tokens`."""
    return {
        key.removeprefix("tokenizer.").removeprefix("ggml."): value
        for key, value in header.metadata.items()
        if key.startswith("tokenizer.")
    }


def _special_tokens(entries: dict[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens, such as `bos_token`."""
    special = {}
    for name, name_in_file in _SPECIAL.items():
        number = entries.get(f"{name_in_file}_token_id")
        if number is not None:
            special[f"{name}_token"] = entries["tokens"][number]
    return special


def _post_processor(entries: dict[str, Any], special: dict[str, str]) -> Any:
    """Return what puts special tokens before and after a text. Where the file does not say so, the
    tokenizers that put a beginning-of-text token are those of llama.cpp."""
    puts_bos = entries["model"] == "llama"
    if entries["model"] == "gpt2":
        puts_bos = entries.get("pre") in _WHOLE_WORDS
    parts = ["$A"]
    numbers = []
    if entries.get("add_bos_token", puts_bos) and "bos_token" in special:
        parts.insert(0, special["bos_token"])
        numbers.append((special["bos_token"], entries["bos_token_id"]))
    if entries.get("add_eos_token", False) and "eos_token" in special:
        parts.append(special["eos_token"])
        numbers.append((special["eos_token"], entries["eos_token_id"]))
    return processors.TemplateProcessing(single=parts, special_tokens=numbers)


def _check_vocabulary(header: Header, entries: dict[str, Any]) -> None:
    """Reject a vocabulary that contradicts itself, and say what looks odd in it. The file has no
    checksum, so this is all that notices a flipped bit in a token."""
    tokens = entries["tokens"]
    kinds = entries.get("token_type") or [_NORMAL] * len(tokens)
    if len(set(tokens)) != len(tokens):
        raise _damaged(header, f"its vocabulary holds {Counter(tokens).most_common(1)} twice")
    if len(kinds) != len(tokens) or not {*kinds} <= {*range(1, 7)}:
        raise _damaged(header, f"its tokens are of {len(kinds)} types, {sorted({*kinds})}")
    for score in entries.get("scores", ()):
        if not math.isfinite(score):
            raise _damaged(header, f"a token has the score {score}")
    odd = _odd_special_tokens(header, entries, kinds)
    odd += _unknown_keys(header)
    if entries["model"] == "gpt2":
        odd += _odd_tokens_of_bpe(header, entries, kinds)
    if odd:
        say(
            f"{header.path.name}: {len(odd)} entries or tokens ({odd[0]!r}) do not agree with the "
            "others; the file may be damaged"
        )


def _odd_special_tokens(header: Header, entries: dict[str, Any], kinds: list[int]) -> list[str]:
    """Return special tokens that are not of a special type; reject numbers of no token."""
    tokens = entries["tokens"]
    odd = list[str]()
    for key, number in entries.items():
        if not key.endswith("_token_id"):
            continue
        if not 0 <= number < len(tokens):
            raise _damaged(header, f"tokenizer.ggml.{key}={number}, of {len(tokens)} tokens")
        if kinds[number] == _NORMAL:
            odd.append(tokens[number])
    return odd


def _unknown_keys(header: Header) -> list[str]:
    """Return keys of the tokenizer that GGUF does not define; chat templates have any name."""
    from gguf import Keys

    defined = vars(Keys.Tokenizer).values()
    keys = [key for key in header.metadata if key.startswith("tokenizer.")]
    keys = [key for key in keys if not key.startswith("tokenizer.chat_template.")]
    return [key for key in keys if key not in defined]


def _odd_tokens_of_bpe(header: Header, entries: dict[str, Any], kinds: list[int]) -> list[str]:
    """Return tokens that no merge makes, or that a merge makes and that are not ordinary; reject
    merges whose parts or result are not in the vocabulary, and tokens that are not of bytes."""
    known = set(entries["tokens"])
    merges = [tuple(merge.split(" ")) for merge in entries["merges"]]
    for merge, num in Counter(merges).items():
        if num > 1 or len(merge) != 2 or not known.issuperset({*merge, "".join(merge)}):
            raise _damaged(header, f"its merge {' '.join(merge)!r} is not of its vocabulary")
    letters = {*pre_tokenizers.ByteLevel.alphabet()}
    merged = letters | {"".join(merge) for merge in merges}
    odd = list[str]()
    for token, kind in zip(entries["tokens"], kinds, strict=True):
        if kind == _NORMAL and not letters.issuperset(token):
            raise _damaged(header, f"its token {token!r} is not of bytes")
        has_usual_kind = kind in (_NORMAL, _CONTROL, _ADDED) or token.startswith("[PAD")
        if not has_usual_kind or (token in merged) != (kind == _NORMAL):
            odd.append(token)
    return odd


def _backend(header: Header, entries: dict[str, Any]) -> Tokenizer:
    """Return transformers' own tokenizer, changed to split text into words as llama.cpp does."""
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    pre = entries.get("pre", "default")
    renamed = {
        names[f"ggml.{key}"]: value for key, value in entries.items() if f"ggml.{key}" in names
    }
    try:
        backend: Tokenizer = convert_gguf_tokenizer(header.architecture, renamed)[0]
    except ValueError as error:
        raise DataError(f"'{header.path}': {error}; {_REMEDY}") from None
    if entries["model"] != "gpt2":  # SentencePiece and other kinds
        return backend
    if pre in _DIGITS:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif pre not in {*_GPT2, *GGUF_PRE_TOKENIZER_SPLITS}:
        known = ", ".join(sorted({*_GPT2, *_DIGITS, *GGUF_PRE_TOKENIZER_SPLITS}))
        raise DataError(f"'{header.path}': tokenizer.ggml.pre={pre} is not supported, only {known}")
    backend.model.ignore_merges = pre in _WHOLE_WORDS
    return backend


class GGUFFormat:
    """A `ModelFormat`: a GGUF file, or a folder that holds one."""

    def find(self, path_or_name: str) -> Path | None:
        file = find_gguf(Path(path_or_name))
        return None if file is None else convert_gguf(file)
