"""Hold a trained model that is ready to be used: with its tokenizer, its limits and its identity.

`load_model` and `wrap_model` (load.py) return a `LoadedModel`, which `measure`, `explain` and
`attribute` take. Inside `using(model)` one thread uses it:

    model = load_model("smollm2")
    (ids,) = model.encode(["The train leaves at nine."])
    with using(model):                      # reads what has changed since the last use
        model.check_positions(len(ids))     # raises ConfigError if the text is too long
        folder.identify(identity_of(model) | settings)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from tokenizers import Tokenizer

from olmo_sparsity.base.errors import ConfigError, DataError, check_encodable, naming_panics
from olmo_sparsity.base.renamed import OldAttribute
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.huggingface.position_limits import SHORTER, PositionLimit, position_limit
from olmo_sparsity.models.identity.known_identities import last_identity
from olmo_sparsity.models.identity.use import in_use
from olmo_sparsity.models.pretrained_tokenizer import (
    special_tokens,
    spelled_in,
    tokens_before,
    without_control_tokens,
    without_space_before,
)
from olmo_sparsity.models.prompts import PromptModel
from olmo_sparsity.text.runs import TrainingText
from olmo_sparsity.text.vocabulary import tokenizer_fingerprint


def _find_no_tokenizer() -> None:
    """Return None: a model without a tokenizer of transformers."""


@dataclass(repr=False)
class LoadedModel:
    """A model with its tokenizer, its limits and its identity."""

    model: Any
    """The model on its device, in its dtype. `using` puts it in evaluation mode."""

    tokenizer: Tokenizer | None
    name: str
    """The name that the user typed, for messages."""

    num_parameters: int
    limit: PositionLimit | None
    """How many positions it supports; None if unknown."""

    weights_sha256: str | None
    """The fingerprint of its files (file_fingerprint.py), or the SHA-256 of its GGUF file. None for
    a model in memory."""

    batch_noise: float = 0.0
    """By how much a loss changes with the other rows of its batch, in nats, as measured."""

    trained: dict[str, Any] = field(default_factory=dict)
    """How a checkpoint of ours was trained: steps, position scheme, lengths, seed, init_from. Empty
    for other models."""

    text: TrainingText | None = None
    """The text of the run that the model comes from; None for a model of others."""

    find_transformers_tokenizer: Callable[[], Any | None] = _find_no_tokenizer
    """Returns the tokenizer as an object of transformers, or None. It is called once, when it is
    needed, as reading it imports transformers."""

    def __post_init__(self) -> None:
        # A later identity that differs says that the user has changed the model in memory.
        self._first_identity = last_identity(self.model)

    def __repr__(self) -> str:
        family = type(getattr(self.model, "model", self.model)).__name__
        return f"{self.name}: {family}, {self.num_parameters:,} parameters on {self.device}"

    @cached_property
    def transformers_tokenizer(self) -> Any:
        """Return the tokenizer as an object of transformers, which has the chat template. None if
        there is only `tokenizer`. It is read from the folder on first use."""
        return self.find_transformers_tokenizer()

    def prefix_ids(self, prefix: str, text: str) -> list[int]:
        """Return the token IDs that precede each window in this text. `prefix`: auto (the tokens
        that the tokenizer puts before the text, usually none or one), bos, none, or any text."""
        if prefix == "none":
            return []
        if prefix == "auto":
            return self._automatic_prefix(text)
        if prefix == "bos":
            bos = getattr(self.transformers_tokenizer, "bos_token_id", None)
            if bos is None:
                raise ConfigError(
                    f"prefix=bos: '{self.name}' has no beginning-of-text token; pass auto or none"
                )
            return [int(bos)]
        if self.tokenizer is None:
            raise ConfigError(
                f"prefix={prefix}: '{self.name}' has no tokenizer to read it with; pass auto or "
                "none"
            )
        return self.encode([prefix])[0]

    def _automatic_prefix(self, text: str) -> list[int]:
        """Return the tokens that the tokenizer puts before a text; none without a tokenizer."""
        tokenizer = self.transformers_tokenizer
        if tokenizer is None:
            tokenizer = self.tokenizer
        if tokenizer is None:
            return []
        # What comes before a text does not depend on its end, and encoding all of it would take
        # long.
        return tokens_before(tokenizer, text[:1000])

    def encode(
        self, texts: list[str], control_tokens: bool = True, follow: bool = False
    ) -> list[list[int]]:
        """Return the token IDs of each text, with nothing put before or after it.

        Args:
            control_tokens: Whether text such as `<|im_end|>` becomes a control token. If not, it is
                encoded as ordinary characters, as it should be in documents.
            follow: Whether the texts follow others, so that the tokenizer puts no space before
                them.
        """
        assert self.tokenizer is not None
        tokenizer = self._tokenizer_after_text if follow else self.tokenizer
        ids_of_texts = self._encode_batch(tokenizer, texts)
        if control_tokens:
            return ids_of_texts

        # Few texts spell a control token. Only these are encoded again, by a copy of the tokenizer,
        # which takes long to make.
        special = special_tokens(self.tokenizer)
        indices_with_special = [
            index
            for index, ids in enumerate(ids_of_texts)
            if spelled_in(texts[index], ids, special)
        ]
        if indices_with_special:
            texts_with_special = [texts[index] for index in indices_with_special]
            encoded_again = self._encode_as_characters(tokenizer, texts_with_special)
            for index, ids in zip(indices_with_special, encoded_again, strict=True):
                ids_of_texts[index] = ids
        return ids_of_texts

    def _encode_as_characters(self, tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
        """Return the token IDs of texts, with names of control tokens as ordinary characters. Raise
        DataError if the tokenizer makes control tokens of them anyway."""
        special = special_tokens(tokenizer)
        ids_of_texts = self._encode_batch(without_control_tokens(tokenizer), texts)
        for text, ids in zip(texts, ids_of_texts, strict=True):
            names = spelled_in(text, ids, special)
            if names:
                raise DataError(
                    f"the tokenizer cannot encode {names[0]} as text; remove it, or pass "
                    "control_tokens=True (--control-tokens)"
                )
        return ids_of_texts

    @cached_property
    def _tokenizer_after_text(self) -> Tokenizer:
        assert self.tokenizer is not None
        return without_space_before(self.tokenizer)

    def _encode_batch(self, tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
        """Return the token IDs of each text. Raise DataError if the model cannot read one of them,
        as its embedding has no row for a token."""
        for text in texts:
            check_encodable(text, f"a text for '{self.name}'")
        with naming_panics(f"'{self.name}'"):
            encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        ids_of_texts = [encoding.ids for encoding in encoded]
        largest = max((max(ids, default=0) for ids in ids_of_texts), default=0)
        # Checked here, as an index beyond the embedding ends a process on a GPU without its name.
        if largest >= self.model.vocab_size:
            text = tokenizer.decode([largest], False)
            raise DataError(
                f"{self.name}: token {largest} ('{text}') is not in its {self.model.vocab_size} "
                "embeddings; remove it from the text"
            )
        return ids_of_texts

    @property
    def fingerprint(self) -> str:
        """Return a hash that identifies the model as it is now: that of its files, or, if it was
        changed since they were read, that of its identity in memory (identity/)."""
        if self._first_identity is None:  # not a model of PyTorch, but such as a server
            return self.weights_sha256 or ""
        with using(self):
            identity = last_identity(self.model)
            assert identity is not None
            # A method that was replaced before the files were read is not a change since then. But
            # the model computes other numbers than its files say.
            is_of_files = identity == self._first_identity and not identity.replaced
            if self.weights_sha256 is not None and is_of_files:
                return self.weights_sha256
            return identity.sha256

    def without_weights(self) -> LoadedModel:
        """Return a copy that has a name, a tokenizer and limits, but no weights. It can be stored
        or sent to another process."""
        return replace(self, model=None, find_transformers_tokenizer=_find_no_tokenizer)

    def update_if_changed(self) -> None:
        """If the user has changed the model, such as by merging an adapter, read the fields that
        depend on it again. Called with the model in use."""
        if self._first_identity is None or last_identity(self.model) is self._first_identity:
            return
        facts = _read_facts(self.model)
        self.num_parameters = facts.num_parameters
        self.limit = facts.limit
        self.batch_noise = facts.batch_noise

    @property
    def max_positions(self) -> int | None:
        """Return one more than the largest supported position ID; None if unknown."""
        return self.limit.num_positions if self.limit else None

    @property
    def device(self) -> torch.device:
        """Return the device of the inputs."""
        return self.model.device

    @property
    def prompt_model(self) -> PromptModel | None:
        """Return the model if it only scores whole prompts, or None if its states can be read."""
        return self.model if isinstance(self.model, PromptModel) else None

    engine = OldAttribute("prompt_model")

    @property
    def dtype(self) -> str:
        if self.prompt_model is not None:
            return self.prompt_model.dtype_name
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    def check_positions(self, num_positions: int, remedy: str = SHORTER) -> None:
        """Raise ConfigError if a text needs more positions than the model supports. `remedy`: what
        to do then, for the message."""
        if self.limit is not None:
            self.limit.check(num_positions, self.name, remedy)


def identity_of(model: LoadedModel) -> dict[str, str | None]:
    """Return everything that determines a model's numbers and how text becomes its tokens, each as
    a hash or a name: `model` (weights and config), `config` (of a checkpoint of ours), `dtype`,
    `tokenizer`, `chat_template` (with special tokens). It reads all weights.

    Results are stored with it, `folder.identify(identity_of(model) | settings)`, and continued only
    by a model with the same identity."""
    config: Any = getattr(model.model, "config", None)
    # The tokenizer of `tokenizers` has neither a chat template nor the roles of special tokens.
    tokenizer = model.transformers_tokenizer
    template = getattr(tokenizer, "chat_template", None)
    special = getattr(tokenizer, "special_tokens_map", None)
    return {
        "model": model.fingerprint,
        "config": _sha256(vars(config)) if is_dataclass(config) else None,
        "dtype": model.dtype,
        "tokenizer": None if model.tokenizer is None else tokenizer_fingerprint(model.tokenizer),
        "chat_template": None if tokenizer is None else _sha256([template, special]),
    }


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=repr, sort_keys=True).encode()).hexdigest()


@contextmanager
def using(*models: LoadedModel | None) -> Iterator[None]:
    """Let this thread alone use these models inside the block (see `in_use`). Each may be None, for
    a model that is not there."""
    used = [model for model in models if model is not None]
    with in_use(*(model.model for model in used)):
        for model in used:
            model.update_if_changed()
        yield


def describe_model(model: Any, **fields: Any) -> LoadedModel:
    """Return a `LoadedModel`. Its limit and its sizes are read from the model itself, and `fields`
    are the others."""
    return LoadedModel(model=model, **vars(_read_facts(model)), **fields)


@dataclass(frozen=True)
class _Facts:
    """The fields of a `LoadedModel` that depend on its model in memory."""

    num_parameters: int
    limit: PositionLimit | None
    batch_noise: float


def _read_facts(model: Any) -> _Facts:
    """Return the facts of a model in memory, of this project or of transformers."""
    batch_noise: float = getattr(model, "batch_noise", 0.0)
    if isinstance(model, HuggingFaceLM):
        # Not `count_parameters`, as transformers counts packed 4-bit weights correctly.
        return _Facts(model.model.num_parameters(), model.limit, batch_noise)
    if isinstance(model, PromptModel):  # `WholePrompts`, a model of transformers without states
        inner: Any = getattr(model, "model", None)
        return _Facts(inner.num_parameters(), position_limit(inner.config), batch_noise)
    limit = PositionLimit(model.config.max_sequence_length, "max_sequence_length")
    return _Facts(count_parameters(model), limit, batch_noise)


def check_room_for_tokens(loaded: LoadedModel) -> None:
    """Raise ConfigError if a model's tokenizer has IDs beyond the embedding. Only added tokens may
    have them, such as that of an image in a model that reads only text; `encode` rejects these."""
    if loaded.tokenizer is None:
        return
    ids = loaded.tokenizer.get_vocab(with_added_tokens=False).values()
    # Not by their number, as some vocabularies have gaps.
    largest = max(ids, default=None)
    if largest is not None and largest >= loaded.model.vocab_size:
        raise ConfigError(
            f"tokenizer has IDs up to {largest}, the embedding {loaded.model.vocab_size} rows; "
            f"pass that of '{loaded.name}'"
        )
