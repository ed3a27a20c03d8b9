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
from olmo_sparsity.base.folders import cache_folder, locked, make_folder
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
    """The file; None if `path` neither is a GGUF file nor holds one."""
    if path.is_file() and path.suffix == ".gguf":
        if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name):
            remedy = "join them with llama.cpp's `llama-gguf-split --merge`"
            raise DataError(f"'{path}' is one of several shards; {remedy}")
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise DataError(f"'{path}' holds {len(files)} GGUF files ({names}); name one of them")
    return find_gguf(files[0]) if files else None


@naming_extras()
def convert_gguf(file: Path) -> Path:
    """The Hugging Face folder of a GGUF file, in fp32; converted on the first call."""
    header = _read_header(file)
    if _entries_read(header.architecture) is None:
        found = f"architecture '{header.architecture}' is not supported"
        raise DataError(f"'{header.path}': {found}, only {', '.join(supported_architectures())}")
    quantization = _quantization(header)
    _check_tensors(header)
    _check_entries(header)
    whole = sha256_of(file)
    place = cache_folder() / "gguf" / whole
    folder = place / f"model-{CONVERTER}"
    if not folder.is_dir():
        make_folder(place)
        with locked(place, waits=True):
            remove_partial(place)
            if not folder.is_dir():  # or another process has converted it
                _convert(header, Origin(whole, quantization), folder)
    return folder


def _convert(header: Header, origin: Origin, folder: Path) -> None:
    num = sum(tensor.num for tensor in header.tensors)
    size = f"{num:,} weights, mostly {origin.quantization}"
    say(f"{header.path.name}: {size}; converting once to {4 * num / 1e6:,.0f} MB in {folder}")
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
                problem = f"transformers cannot read its weights ({reason})"
                raise DataError(f"'{header.path}': {problem}; {_REMEDY}") from None
            model.save_pretrained(partial, max_shard_size="4GB")  # still without a bar
        (partial / ORIGIN).write_text(json.dumps(asdict(origin)))
        for path in partial.iterdir():
            follow_umask(path)


def _read_weights(folder: Path) -> PreTrainedModel:
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
    if missing := info["missing_keys"]:  # which are random now
        raise ValueError(f"it lacks {len(missing)} weights, such as {min(missing)}")
    model.hf_quantizer = None  # type: ignore[assignment] # or save_pretrained rejects
    for config in (model.config, model.config.get_text_config()):
        vars(config).pop("quantization_config", None)
    return model


# --- read the header ----------------------------------------------------------------------------


_FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""The letter of `struct` for each type of an entry."""

_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    """Fastest dimension first, as in the file."""

    type: int
    start: int
    """From the start of the file."""

    num_bytes: int

    @property
    def num(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    path: Path
    metadata: dict[str, Any]
    raw: dict[str, bytes]
    """Each entry as the file holds it, without the tokenizer's arrays."""

    tensors: list[Tensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """An entry of the architecture."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


class _Bytes:
    """A file that is read from its start. Raises struct.error at its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def numbers(self, letter: str, num: int) -> tuple:
        layout = struct.Struct(f"<{num}{letter}")
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def number(self, letter: str) -> Any:
        return self.numbers(letter, 1)[0]

    def string(self) -> str:
        size = self.number("Q")
        if size > len(self.data) - self.at:
            raise struct.error(f"a string of {size:,} bytes passes its end")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _BOOL and self.data[self.at] > 1:
            raise ValueError(f"{self.data[self.at]} is neither true nor false")
        if kind != _ARRAY:
            return self.number(_FORMATS[kind])
        kind, num = self.number("I"), self.number("Q")
        if kind == _STRING:
            return [self.string() for _ in range(num)]
        return list(self.numbers(_FORMATS[kind], num))


def _read_header(path: Path) -> Header:
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Bytes(data)
            magic, version, num_tensors, num_entries = (reader.number(x) for x in "IIQQ")
            if magic != 0x46554747 or version not in (2, 3):
                raise ValueError("it does not begin as GGUF version 2 or 3, little-endian, does")
            metadata, raw = {}, {}
            for _ in range(num_entries):
                start, key = reader.at, reader.string()
                metadata[key] = reader.value(reader.number("I"))
                if not (key.startswith("tokenizer.") and isinstance(metadata[key], list)):
                    raw[key] = data[start : reader.at]
            table = []
            for _ in range(num_tensors):
                name, shape = reader.string(), reader.numbers("Q", reader.number("I"))
                table.append((name, shape, reader.number("I"), reader.number("Q")))
            align = metadata.get("general.alignment", 32)
            first = -(-reader.at // align) * align
            tensors, end = [], 0
            for name, shape, kind, offset in table:
                if kind not in sizes:
                    raise ValueError(f"'{name}' has the unknown type {kind}")
                of_block, block_bytes = sizes[kind]
                num_bytes = math.prod(shape) // of_block * block_bytes
                if offset != end or (shape and shape[0] % of_block):
                    raise ValueError(f"'{name}' does not begin where the tensor before it ends")
                if first + offset + num_bytes > len(data):
                    raise struct.error(f"'{name}' ends at byte {first + offset + num_bytes:,}")
                tensors.append(Tensor(name, shape, kind, first + offset, num_bytes))
                end = -(-(end + num_bytes) // align) * align
            if first + end < len(data):
                raise ValueError(f"{len(data) - first - end:,} bytes follow its last tensor")
    except struct.error as error:
        raise DataError(f"'{path}' ends too early ({error}); download it again") from None
    except (ValueError, KeyError, OSError, OverflowError, ZeroDivisionError, TypeError) as error:
        raise DataError(f"'{path}' is not a GGUF file ({error}); download it again") from None
    return Header(path, metadata, raw, tensors)


def _quantization(header: Header) -> str:
    """The most frequent type, by weights."""
    from gguf import GGMLQuantizationType

    num_of = Counter[int]()
    for tensor in header.tensors:
        num_of[tensor.type] += tensor.num
    if not num_of:
        raise DataError(f"'{header.path}' holds no weights; download it again")
    return GGMLQuantizationType(num_of.most_common(1)[0][0]).name


def _damaged(header: Header, problem: str) -> DataError:
    return DataError(f"'{header.path}' is damaged: {problem}; download it again")


def _check_tensors(header: Header) -> None:
    """Compare names and sizes with those of the architecture, as llama.cpp does."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    names = [tensor.name for tensor in header.tensors]
    blocks = {int(found[1]) for name in names if (found := re.match(r"blk\.(\d+)\.", name))}
    if blocks != {*range(len(blocks))} or header.get("block_count") != len(blocks):
        stated = header.get("block_count")
        raise _damaged(header, f"block_count={stated}, and it has tensors of {len(blocks)} blocks")
    arch = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
    known = {name for _, name in get_tensor_name_map(arch, len(blocks)).mapping.values()}
    for name, num in Counter(names).items():
        stem, _, kind = name.rpartition(".")
        if num > 1 or stem not in known or kind not in ("weight", "bias"):
            raise _damaged(header, f"'{name}' is not a tensor of {arch.name}, or is there twice")


_LENGTHS = ("context_length", "sliding_window", "vocab_size")
_USUAL = re.compile("[15]e")
"""Mantissa of nearly all bases of RoPE and epsilons of norms."""


def _check_entries(header: Header) -> None:
    """Reject numbers out of range, and names of entries that only almost are the architecture's."""
    most = max(max(tensor.shape, default=1) for tensor in header.tensors)
    arch = header.architecture
    known = {*(_entries_read(arch) or ()), *_ALSO_IN_CONFIG, *_WITHOUT_EFFECT}
    for key, value in header.metadata.items():
        owner, _, name = key.partition(".")
        if owner != arch:
            if key.endswith(tuple(known)) or ("ggml." in key and owner != "tokenizer"):
                raise _damaged(header, f"its entry {key} is of no architecture")
            continue
        least, limit = (1, 2**31) if name.endswith(_LENGTHS) else (0, most)
        for number in value if isinstance(value, list) else [value]:
            counts = name.endswith(("_count", "_length", "_size", "_count_kv"))
            if counts and not (type(number) is int and least <= number <= limit):
                raise _damaged(header, f"{key}={number}")
        if name.endswith(("epsilon", "freq_base", "freq_base_swa")):
            low, high = (0, 0.01) if name.endswith("epsilon") else (100, 1e13)
            if type(value) is not float or not low <= value <= high:
                raise _damaged(header, f"{key}={value}")
            if not _USUAL.match(np.format_float_scientific(np.float32(value), trim="-")):
                say(f"{header.path.name}: {key}={value:g} is unusual; the file may be damaged")


# --- what transformers reads --------------------------------------------------------------------


_SPELLED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "minimax-m2": "minimax_m2"}
_REFUSED = {"general", "tokenizer", "bloom", "t5", "umt5", "mamba", "lfm2", "gpt_oss"}
"""Entries that are not architectures, architectures that load_model always rejects, and gpt-oss:
transformers does not read its scaled RoPE from GGUF."""


def _entries_read(architecture: str) -> dict[str, Any] | None:
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    name = _SPELLED.get(architecture, architecture)
    mapping: dict[str, Any] = GGUF_CONFIG_MAPPING
    return None if name in _REFUSED else mapping.get(name)


def supported_architectures() -> list[str]:
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    spelled = {theirs: name for name, theirs in _SPELLED.items()}
    return sorted(spelled.get(name, name) for name in set(GGUF_CONFIG_MAPPING) - _REFUSED)


def _copy_without_tokenizer(header: Header, to: Path) -> None:
    """With as many tokens, from which transformers takes the vocabulary's size."""
    key, num_tokens = b"tokenizer.ggml.tokens", len(header.metadata["tokenizer.ggml.tokens"])
    tokens = struct.pack("<IIQ", _ARRAY, 0, num_tokens) + bytes(num_tokens)
    entries = [*header.raw.values(), struct.pack("<Q", len(key)) + key + tokens]
    align = int(header.metadata.get("general.alignment", 32))
    with to.open("wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(header.tensors), len(entries)))
        file.write(b"".join(entries))
        offset = 0
        for tensor in header.tensors:
            name, dims = tensor.name.encode(), len(tensor.shape)
            file.write(struct.pack("<Q", len(name)) + name)
            file.write(struct.pack(f"<I{dims}QIQ", dims, *tensor.shape, tensor.type, offset))
            offset += -(-tensor.num_bytes // align) * align
        whole = np.memmap(header.path, mode="r")
        for tensor in header.tensors:
            file.write(bytes(-file.tell() % align))
            file.write(whole[tensor.start :][: tensor.num_bytes].data)


_WITHOUT_EFFECT = ("vocab_size", "attention.causal", "attention.value_length", "tensor_data_layout")
_ALSO_IN_CONFIG = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual",
    "rope.dimension_count": "head_dim",
}
"""Entries that transformers' conversion leaves out, and their names in a config."""

ROPE_FACTORS = "rope_freqs.weight"


def _complete_config(config: Any, header: Header) -> None:
    """Set what transformers leaves out of the config, and reject what would change the numbers."""
    theirs = _entries_read(header.architecture) or {}
    start = f"{header.architecture}."
    for key, value in header.metadata.items():
        name = key.removeprefix(start)
        if name == key or name.startswith("rope.scaling.") or name in {*theirs, *_WITHOUT_EFFECT}:
            continue  # RoPE is scaled below
        if name == "rope.freq_base_swa":
            config.rope_parameters["sliding_attention"]["rope_theta"] = value
        elif name == "attention.sliding_window" and hasattr(config, "sliding_window"):
            config.sliding_window = value
        elif name not in _ALSO_IN_CONFIG or getattr(config, _ALSO_IN_CONFIG[name], None) != value:
            found = f"transformers does not read {key}={value!r:.60}, which may change numbers"
            raise DataError(f"'{header.path}': {found}; {_REMEDY}")
    if header.architecture in ("gemma2", "gemma3") and header.get("block_count") in (46, 62):  # 27B
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    _complete_rope(config, header)


def _complete_rope(config: Any, header: Header) -> None:
    kind = header.get("rope.scaling.type", "none")
    factor = header.get("rope.scaling.factor", 0.0)
    rope = config.rope_parameters if hasattr(config, "rope_parameters") else {}
    rope = rope.get("full_attention", rope)  # Gemma 3 scales its wide layers only
    if kind == "linear" and factor:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise DataError(f"'{header.path}': RoPE scaled by {kind!r} is not read; {_REMEDY}")
    for found in (tensor for tensor in header.tensors if tensor.name == ROPE_FACTORS):
        factors = np.fromfile(header.path, np.float32, found.num, offset=found.start)
        rope |= _llama3_scaling(config, torch.from_numpy(factors), header)


def _llama3_scaling(config: Any, factors: torch.Tensor, header: Header) -> dict[str, Any]:
    """Return the RoPE settings that divide angles by these factors: Llama 3.1's or 3.2's."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    widths = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = 1.0 / config.rope_parameters["rope_theta"] ** widths
    settings = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = deepcopy(config)
    scaled.rope_parameters |= settings
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    if not torch.allclose(angles / factors, theirs, rtol=1e-4, atol=0):
        found = f"{ROPE_FACTORS} are not the factors of Llama 3.1 or 3.2"
        raise DataError(f"'{header.path}': {found}; {_REMEDY}")
    return settings


def _check_count(model: PreTrainedModel, header: Header) -> None:
    """transformers leaves out tensors that it does not know."""
    in_file = sum(tensor.num for tensor in header.tensors if tensor.name != ROPE_FACTORS)
    in_model = count_parameters(model)
    if in_file != in_model:
        both = f"{in_file:,} weights, of which transformers reads {in_model:,}"
        raise DataError(f"'{header.path}' holds {both}; {_REMEDY}")


# --- the tokenizer ------------------------------------------------------------------------------


_GPT2 = ("gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "trillion", "roberta-bpe")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "tekken"
)  # fmt: skip
"""How text is split before merges (`tokenizer.ggml.pre`), as in llama.cpp: by GPT-2's expression,
after splitting off each digit, or with words of the vocabulary taken whole."""

_NORMAL, _CONTROL, _ADDED = 1, 3, 4  # types of tokens


def read_gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a GGUF file, without its weights."""
    return _read_tokenizer(_read_header(path))


def _read_tokenizer(header: Header) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    about = {
        key.removeprefix("tokenizer.").removeprefix("ggml."): value
        for key, value in header.metadata.items()
        if key.startswith("tokenizer.")
    }
    try:
        tokens = about["tokens"]
        _check_vocabulary(header, about)
        backend, puts_bos = _backend(header, about), about["model"] == "llama"
        if about["model"] == "gpt2":
            puts_bos = about.get("pre") in _WHOLE_WORDS
        named = {
            f"{short}_token": tokens[about[f"{long}_token_id"]]
            for short, long in {
                "bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"
            }.items()
            if f"{long}_token_id" in about
        }  # fmt: skip
        added = {
            name: named[f"{name}_token"]
            for name, default in (("bos", puts_bos), ("eos", False))
            if about.get(f"add_{name}_token", default) and f"{name}_token" in named
        }
        special = [(token, about[f"{name}_token_id"]) for name, token in added.items()]
    except (KeyError, IndexError, TypeError) as error:
        found = f"its tokenizer is incomplete ({type(error).__name__}: {error})"
        raise DataError(f"'{header.path}': {found}; download it again") from None
    parts = (added.get("bos"), "$A", added.get("eos"))
    backend.post_processor = processors.TemplateProcessing(
        single=[part for part in parts if part is not None], special_tokens=special
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=about.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _check_vocabulary(header: Header, about: dict[str, Any]) -> None:
    from gguf import Keys

    tokens, kinds = about["tokens"], about.get("token_type") or [1] * len(about["tokens"])
    known, is_bpe = set(tokens), about["model"] == "gpt2"
    if len(known) != len(tokens):
        raise _damaged(header, f"its vocabulary holds {Counter(tokens).most_common(1)} twice")
    if len(kinds) != len(tokens) or not {*kinds} <= {*range(1, 7)}:
        raise _damaged(header, f"its tokens are of {len(kinds)} types, {sorted({*kinds})}")
    if scores := [score for score in about.get("scores", ()) if not math.isfinite(score)]:
        raise _damaged(header, f"a token has the score {scores[0]}")
    named = {key: number for key, number in about.items() if key.endswith("_token_id")}
    for key, number in named.items():
        if not 0 <= number < len(tokens):
            raise _damaged(header, f"tokenizer.ggml.{key}={number}, of {len(tokens)} tokens")
    odd = [tokens[number] for number in named.values() if kinds[number] == _NORMAL]
    keys = (key for key in header.metadata if re.match(r"tokenizer\.(?!chat_template\.)", key))
    odd += [key for key in keys if key not in vars(Keys.Tokenizer).values()]
    merges = [tuple(merge.split(" ")) for merge in about["merges"]] if is_bpe else []
    for merge, num in Counter(merges).items():
        if num > 1 or len(merge) != 2 or not known.issuperset({*merge, "".join(merge)}):
            raise _damaged(header, f"its merge {' '.join(merge)!r} is not of its vocabulary")
    letters = {*pre_tokenizers.ByteLevel.alphabet()}
    made = letters | {"".join(merge) for merge in merges}
    for token, kind in zip(tokens, kinds, strict=True) if is_bpe else ():
        if kind == _NORMAL and not letters.issuperset(token):
            raise _damaged(header, f"its token {token!r} is not of bytes")
        is_known = kind in (_NORMAL, _CONTROL, _ADDED) or token.startswith("[PAD")
        if not is_known or (token in made) != (kind == _NORMAL):
            odd.append(token)
    if odd:
        found = f"{len(odd)} entries or tokens ({odd[0]!r}) do not agree with the others"
        say(f"{header.path.name}: {found}; the file may be damaged")


def _backend(header: Header, about: dict[str, Any]) -> Tokenizer:
    """transformers' own, split into words as llama.cpp does."""
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    names, pre = GGUF_TOKENIZER_MAPPING["tokenizer"], about.get("pre", "default")
    theirs = {names[f"ggml.{key}"]: value for key, value in about.items() if f"ggml.{key}" in names}
    try:
        backend: Tokenizer = convert_gguf_tokenizer(header.architecture, theirs)[0]
    except ValueError as error:
        raise DataError(f"'{header.path}': {error}") from None
    if about["model"] != "gpt2":  # SentencePiece and other kinds
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
