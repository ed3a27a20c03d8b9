"""Open a trained model: `load_model` by its folder, hub name, URL or GGUF file, `wrap_model` in
memory. Nothing is unpickled: weights must be safetensors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from olmo_sparsity.base.errors import (
    ConfigError,
    DataError,
    UserError,
    naming_extras,
    naming_panics,
    one_line,
)
from olmo_sparsity.base.files import sha256_of
from olmo_sparsity.base.runtime import choose_device
from olmo_sparsity.models.compatibility import (
    SHORTER,
    PositionLimit,
    position_limit,
    reason_of,
)
from olmo_sparsity.models.gguf import (
    convert_gguf,
    find_gguf,
    find_origin,
    read_gguf_tokenizer,
)
from olmo_sparsity.models.huggingface import HuggingFaceLM
from olmo_sparsity.models.identity import fingerprint
from olmo_sparsity.models.pretrained_tokenizer import (
    as_tokenizer,
    find_tokenizer,
    has_tokenizer,
    read_transformers_tokenizer,
    special_tokens,
    spelled_in,
    tokens_before,
    without_control_tokens,
    without_space_before,
)
from olmo_sparsity.models.prompts import Engine
from olmo_sparsity.models.smollm2 import find_smollm2, find_smollm2_gguf
from olmo_sparsity.models.transformers_folder import (
    ADAPTER,
    NO_CODE,
    add_adapter,
    base_of_adapter,
    check_adapter_file,
    check_weight_files,
    count_parameters,
    is_hugging_face,
    read_hugging_face,
)
from olmo_sparsity.models.use import in_use, state_of
from olmo_sparsity.models.whole_prompts import WholePrompts
from olmo_sparsity.sources.llama import LlamaCpp
from olmo_sparsity.sources.server import Servers, parse_url
from olmo_sparsity.text.runs import TrainingText, run_loaders
from olmo_sparsity.text.vocabulary import tokenizer_fingerprint

DEMO = Path(__file__).parents[1] / "demo"
"""A small model that is installed with the package; its name is `demo`."""

FORMS = (
    "a run, a checkpoint of ours (manifest.json), a folder with config.json (Hugging Face), a "
    ".gguf file, a hub name (owner/name), smollm2 or demo"
)

LLAMA = "llama:"

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# --- a trained model ----------------------------------------------------------------------------


@dataclass(repr=False)
class LoadedModel:
    model: Any
    """On its device, in its dtype. `using` puts it in evaluation mode."""

    tokenizer: Tokenizer | None
    name: str
    num_parameters: int
    limit: PositionLimit | None
    """None if unknown."""

    weights_sha256: str | None
    """Fingerprint of the files, or the SHA-256 of a GGUF file; None for a model in memory."""

    batch_noise: float = 0.0
    """Nats by which a loss changes with the other rows of the batch, as measured."""

    trained: dict[str, Any] = field(default_factory=dict)
    """How a checkpoint of ours was trained: steps, position scheme, lengths, seed, init_from."""

    text: TrainingText | None = None
    """The text of the run that the model comes from."""

    find_transformers_tokenizer: Callable[[], Any | None] = field(default=type(None))

    def __post_init__(self) -> None:
        self._state = state_of(self.model)

    def __repr__(self) -> str:
        family = type(getattr(self.model, "model", self.model)).__name__
        return f"{self.name}: {family}, {self.num_parameters:,} parameters on {self.device}"

    @cached_property
    def transformers_tokenizer(self) -> Any:
        """The tokenizer as a transformers object, with its chat template; None if there is only
        `tokenizer`. Read from the folder on first use."""
        return self.find_transformers_tokenizer()

    def prefix_ids(self, prefix: str, text: str) -> list[int]:
        """Return the token IDs of the prefix of windows in this text: `auto` (what the tokenizer
        puts before it; usually no token or one), `bos`, `none`, or any text."""
        if prefix == "none" or (prefix == "auto" and self.tokenizer is None):
            return []
        if prefix == "auto":
            theirs, head = self.transformers_tokenizer, text[:1000]
            return tokens_before(self.tokenizer if theirs is None else theirs, head)
        if prefix == "bos":
            bos = getattr(self.transformers_tokenizer, "bos_token_id", None)
            if bos is None:
                raise ConfigError(f"prefix=bos: '{self.name}' has no beginning-of-text token")
            return [int(bos)]
        if self.tokenizer is None:
            raise ConfigError(f"prefix={prefix}: '{self.name}' has no tokenizer to read it with")
        return self.encode([prefix])[0]

    def encode(
        self, texts: list[str], control_tokens: bool = True, follow: bool = False
    ) -> list[list[int]]:
        """Return the token IDs of each text, with nothing put before or after it. Without
        `control_tokens`, text such as `<|im_end|>` is ordinary characters: what documents hold.
        Texts that `follow` others get no space before them from the tokenizer, either."""
        assert self.tokenizer is not None
        tokenizer = self._tokenizer_after_text if follow else self.tokenizer
        found = self._encode(tokenizer, texts)
        if control_tokens:
            return found
        special = special_tokens(self.tokenizer)
        held = [n for n, ids in enumerate(found) if spelled_in(texts[n], ids, special)]
        if held:
            tokenizer = without_control_tokens(tokenizer)
            as_text = self._encode(tokenizer, [texts[n] for n in held])
            for n, ids in zip(held, as_text, strict=True):
                if names := spelled_in(texts[n], ids, special):
                    remedy = "remove it, or pass control_tokens=True (--control-tokens)"
                    raise DataError(f"the tokenizer cannot encode {names[0]} as text; {remedy}")
                found[n] = ids
        return found

    @cached_property
    def _tokenizer_after_text(self) -> Tokenizer:
        assert self.tokenizer is not None
        return without_space_before(self.tokenizer)

    def _encode(self, tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
        with naming_panics(f"'{self.name}'"):
            encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        found = [one.ids for one in encoded]
        largest = max((max(ids, default=0) for ids in found), default=0)
        if largest >= self.model.vocab_size:
            token = f"token {largest} ('{tokenizer.decode([largest], False)}')"
            raise DataError(
                f"{self.name}: {token} is not in its {self.model.vocab_size} embeddings"
            )
        return found

    @property
    def fingerprint(self) -> str:
        """Identifies what the model is now: the files' SHA-256 (see `checkpoint_files`), unless it
        was changed since they were read."""
        if self._state is None:
            return self.weights_sha256 or ""
        with using(self):
            state = state_of(self.model)
            assert state is not None
            as_loaded = self.weights_sha256 is not None and state == self._state
            return str(self.weights_sha256) if as_loaded else state.sha256

    def without_weights(self) -> LoadedModel:
        """Return what a file or another process keeps: name, tokenizer and limits."""
        no: Any = {"model": None, "find_transformers_tokenizer": type(None)}
        return replace(self, **no)

    def notice_changes(self) -> None:
        """Called with the model in use."""
        if self._state is not None and state_of(self.model) is not self._state:
            vars(self).update(_measured(self.model))

    @property
    def max_positions(self) -> int | None:
        """One more than the largest supported position ID; None if unknown."""
        return self.limit.num_positions if self.limit else None

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return self.model.device

    @property
    def engine(self) -> Engine | None:
        """The model, if it scores whole prompts and has no states to read."""
        return self.model if isinstance(self.model, Engine) else None

    @property
    def dtype(self) -> str:
        if self.engine is not None:
            return self.engine.dtype_name
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    def check_positions(self, num_positions: int, remedy: str = SHORTER) -> None:
        """Reject more positions than the model supports, with the cause."""
        if self.limit is not None:
            self.limit.check(num_positions, self.name, remedy)


def identity_of(model: LoadedModel) -> dict[str, str | None]:
    """Return what determines a model's numbers and how text becomes its tokens: `model` (weights
    and config), `config` (of a checkpoint of ours), `dtype`, `tokenizer`, `chat_template` (with
    special tokens), each as a hash or name. Stored parts may be resumed only by a call of equal
    identity: `folder.identify(identity_of(model) | settings)`. It reads all weights."""
    config: Any = getattr(model.model, "config", None)
    theirs = model.transformers_tokenizer
    template, special = (
        getattr(theirs, name, None) for name in ("chat_template", "special_tokens_map")
    )
    return {
        "model": model.fingerprint,
        "config": _sha256(vars(config)) if is_dataclass(config) else None,
        "dtype": model.dtype,
        "tokenizer": None if model.tokenizer is None else tokenizer_fingerprint(model.tokenizer),
        "chat_template": None if theirs is None else _sha256([template, special]),
    }


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=repr, sort_keys=True).encode()).hexdigest()


@contextmanager
def using(*models: LoadedModel | None) -> Iterator[None]:
    """Inside, these models are used by this thread alone; see `in_use`."""
    given = [model for model in models if model is not None]
    with in_use(*(model.model for model in given)):
        for model in given:
            model.notice_changes()
        yield


@naming_extras()
def load_model(
    path_or_hub_name: str | Path,
    *,
    tokenizer: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    whole_prompts: bool = False,
    only_counts: bool = False,
) -> LoadedModel:
    """Load a run or checkpoint folder of ours, a Hugging Face folder (of a model or a PEFT
    adapter), a GGUF file or a folder that holds one, `smollm2`, or a hub name, with its branch,
    tag or commit after an @ (`EleutherAI/pythia-160m@step3000`). `dtype`: fp32, bf16, fp16 or auto,
    the checkpoint's, or fp32 on a CPU that cannot multiply in it; for one of ours bf16 on a
    GPU that has it, else fp32.

    For `attribute` and `far_states="replaced"`: `llama:FILE.gguf`, computed by llama.cpp, and the
    URLs of servers, with the `tokenizer` of their model: a folder, a hub name, or an object.
    `whole_prompts`: load also other decoder-only models, such as recurrent ones and hybrids.
    `only_counts`: send nothing to a server; the model counts what a call costs, no more."""
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype={dtype} is not known; pass auto, {', '.join(DTYPES)}")
    device = str(choose_device(device))
    if not isinstance(path_or_hub_name, str | Path):
        raise ConfigError(f"{path_or_hub_name!r} is neither a folder nor a name on the hub")
    path_or_hub_name = str(path_or_hub_name)
    if re.match(r"llama:|\w+://", path_or_hub_name):
        return _load_engine(path_or_hub_name, tokenizer, device, dtype, device_map, only_counts)
    if tokenizer is not None:
        raise ConfigError(f"tokenizer: '{path_or_hub_name}' has its own; omit the argument")
    folder = find_folder(path_or_hub_name)
    if is_hugging_face(folder):
        loaded = _load_hugging_face(
            folder, path_or_hub_name, DTYPES.get(dtype), device, device_map, whole_prompts
        )
    elif device_map is not None:
        raise ConfigError(f"device_map={device_map} is for Hugging Face models; remove it")
    else:
        loader = next(loader for loader in run_loaders() if loader.find(folder))
        trained = loader.load(folder, path_or_hub_name, dtype, device)
        loaded = describe_model(**vars(trained))
    return _with_room_for_tokens(loaded)


def _load_engine(
    name: str, tokenizer: Any, device: str, dtype: str, device_map: str | None, only_counts: bool
) -> LoadedModel:
    """Open the engine. `name`: `llama:FILE.gguf` or `llama:smollm2`, which bring a tokenizer; or a
    server's URL, or several with commas between them."""
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
        return _load_llama(name.removeprefix(LLAMA), name, device)
    theirs = _find_tokenizer(tokenizer)
    ours = as_tokenizer(theirs)
    model = Servers(urls, without_space_before(ours), meet=not only_counts)
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


def _load_llama(path: str, name: str, device: str) -> LoadedModel:
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


def _find_tokenizer(given: Any) -> Any:
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


def wrap_model(
    model: Any, tokenizer: Any = None, name: str | None = None, *, whole_prompts: bool = False
) -> LoadedModel:
    """Wrap a causal LM of transformers in memory, also if it is compiled, quantized, spread over
    devices by `accelerate`, or has PEFT adapters (applied, not merged), or a model of this project.
    It stays as it is, and may be trained on: each call measures what it is then. `tokenizer`: one
    of transformers or of tokenizers. `whole_prompts`: as in `load_model`."""
    if isinstance(model, LoadedModel):
        if tokenizer is not None or name is not None:
            raise ConfigError(f"tokenizer, name: '{model.name}' has its own; omit the arguments")
        return model
    model = _unwrapped(model)
    if not hasattr(type(model), "far_states"):  # one of this project has it
        model = _wrap_transformers(model, whole_prompts)
    theirs = None if isinstance(tokenizer, Tokenizer) else tokenizer
    is_wrapped = isinstance(model, HuggingFaceLM | Engine)
    inner = model.model if is_wrapped else model
    return _with_room_for_tokens(
        describe_model(
            model,
            tokenizer=None if tokenizer is None else as_tokenizer(tokenizer),
            name=name or getattr(inner.config, "_name_or_path", "") or type(inner).__name__,
            weights_sha256=None,
            find_transformers_tokenizer=lambda: theirs,
        )
    )


def _unwrapped(model: Any) -> Any:
    """Without what torch.compile (`_orig_mod`), DataParallel and DDP (`module`) put around it."""
    inner = getattr(model, "_modules", {})
    for name in ("_orig_mod", "module"):
        if name in inner:
            return _unwrapped(inner[name])
    return model


def _wrap_transformers(model: Any, whole_prompts: bool) -> Any:
    from transformers import PreTrainedModel

    if not isinstance(getattr(model, "get_base_model", lambda: model)(), PreTrainedModel):
        kind = type(model).__name__
        raise ConfigError(f"{kind} is not a transformers model in memory; load_model opens files")
    return _fitted(model, whole_prompts)


def _fitted(model: Any, whole_prompts: bool) -> Any:
    try:
        return HuggingFaceLM(model)
    except ConfigError:
        if not whole_prompts or model.config.is_encoder_decoder:
            raise
        return WholePrompts(model)


def _with_room_for_tokens(loaded: LoadedModel) -> LoadedModel:
    """Added tokens may lie beyond the embedding, as an image's of a model that reads text only."""
    tokenizer = loaded.tokenizer
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab(with_added_tokens=False)
    largest = max(vocabulary.values(), default=-1)  # some vocabularies have gaps
    if largest >= loaded.model.vocab_size:
        sizes = f"has IDs up to {largest}, the embedding {loaded.model.vocab_size} rows"
        raise ConfigError(f"tokenizer {sizes}; pass that of '{loaded.name}'")
    return loaded


def find_folder(path_or_hub_name: str) -> Path:
    """The folder of the files: the latest checkpoint of a run, or the download of a hub name."""
    path = Path(path_or_hub_name)
    if not path.exists():
        if path_or_hub_name == "demo":
            return DEMO / "model"
        if path_or_hub_name == "smollm2":
            return find_smollm2()
        if path_or_hub_name.startswith("runs/"):  # the folder of configs/, so no hub name
            raise DataError(f"{path_or_hub_name} does not exist; train it first, or check the path")
        named = re.fullmatch(r"(\w[\w.-]*(?:/[\w.-]+)?)(?:@(\w[\w./-]*))?", path_or_hub_name)
        if named and path.suffix != ".gguf":
            return _download(named[1], revision=named[2])
        raise DataError(f"model: '{path_or_hub_name}' does not exist; pass {FORMS}")
    if is_hugging_face(path):
        return path
    if file := find_gguf(path):
        return convert_gguf(file)
    for loader in run_loaders():
        if (folder := loader.find(path)) is not None:
            return folder
    raise DataError(f"'{path}' is not a model folder; pass {FORMS}")


def _load_hugging_face(
    folder: Path,
    name: str,
    dtype: torch.dtype | None,
    device: str,
    device_map: str | None,
    whole_prompts: bool,
) -> LoadedModel:
    is_adapter, base = (folder / ADAPTER).is_file(), folder
    if is_adapter:
        base = find_folder(base_of_adapter(folder))
        if (base / ADAPTER).is_file() or not is_hugging_face(base):
            raise DataError(f"'{folder / ADAPTER}': '{base}' is not a base model of transformers")
    weight_files = check_weight_files(base)
    try:
        model: Any = read_hugging_face(base, dtype, device, device_map)
        if is_adapter:
            weight_files.append(check_adapter_file(folder))
            model = add_adapter(model, folder, weight_files[-1], device)
        wrapped = _fitted(model, whole_prompts).eval()
    except UserError:
        raise
    except Exception as error:  # a damaged config.json raises almost any
        reason = f"{reason_of(error)}; correct config.json (code in the folder is never run)"
        raise DataError(f"transformers cannot load '{folder}': {reason}") from None
    with_tokenizer = folder if has_tokenizer(folder) else base
    settings = [base / "config.json", *([folder / ADAPTER] if is_adapter else [])]
    origin = None if is_adapter else find_origin(base)
    return describe_model(
        wrapped,
        tokenizer=find_tokenizer(with_tokenizer),
        name=f"{name} ({origin.quantization})" if origin else name,
        # How the weights are read changes the numbers as they do: angles, an adapter's scale.
        weights_sha256=origin.sha256 if origin else fingerprint(weight_files + settings),
        find_transformers_tokenizer=partial(read_transformers_tokenizer, with_tokenizer),
    )


def describe_model(model: Any, **others: Any) -> LoadedModel:
    return LoadedModel(model=model, **_measured(model), **others)


def _measured(model: Any) -> dict[str, Any]:
    limit: PositionLimit | None
    inner: Any = getattr(model, "model", None)
    if isinstance(model, HuggingFaceLM):  # transformers counts packed 4-bit weights correctly
        limit, num_parameters = model.limit, inner.num_parameters()
    elif isinstance(model, Engine):  # whole prompts of a model of transformers
        limit, num_parameters = position_limit(inner.config), inner.num_parameters()
    else:
        limit = PositionLimit(model.config.max_sequence_length, "max_sequence_length")
        num_parameters = count_parameters(model)
    noise = getattr(model, "batch_noise", 0.0)
    return {"num_parameters": num_parameters, "limit": limit, "batch_noise": noise}


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Not *.safetensors: some repositories have the weights in their own format as well.
        patterns = ["*.json", "*.txt", "*.model", "*.jinja"]
        patterns += ["model*.safetensors", "adapter_model*.safetensors"]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = f"revision {revision or 'main'}: {one_line(error) or repr(error)}"
        remedy = "check the spelling, the network and HF_HUB_OFFLINE"
        raise DataError(
            f"'{name}' is neither a folder nor on the hub ({reason}); {remedy}"
        ) from None
