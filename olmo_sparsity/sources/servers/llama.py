"""Score prompts with llama.cpp in this process, from a quantized GGUF file as it is.

Place in the flow: prompts of trials.py → **`LlamaCpp.score`** → log p, as from a server.

Prompts are scored in sorted order, so that neighbours begin alike. What a prompt shares with the
one before it stays in llama.cpp's cache and is not computed again:

    prompt 1   a b c d | e f     all six tokens are computed
    prompt 2   a b c x | e f     a b c are in the cache: three tokens are computed

Dimension key: W tokens of a continuation, V tokens of the vocabulary.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.models.prompts import Prompt, PromptModel

BATCH = 512
"""Tokens of one call of `llama_decode`, as llama-cpp-python has by default. Longer prompts take
several calls."""


class LlamaCpp(PromptModel):
    """Prompts on the low-level functions of llama-cpp-python."""

    device = torch.device("cpu")
    dtype_name = "of the GGUF file"
    vocab_size = 0

    def __init__(self, path: Path, device: str = "auto") -> None:
        import llama_cpp

        self.path = path
        # "auto" lets llama.cpp use a GPU if it was built for one.
        self._on_gpu = device != "cpu"
        self._llama: Any = None
        self._num_positions = 0
        # The tokens whose states llama.cpp's cache holds, in order.
        self._cached: list[int] = []

        # Opened to read what follows. `score` opens it again if its prompts need more room.
        model = self._open(2 * BATCH).model
        if llama_cpp.llama_model_has_encoder(model):
            raise DataError(f"'{path}' holds an encoder; pass a decoder-only model")
        vocab = llama_cpp.llama_model_get_vocab(model)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocab))
        self.num_parameters = int(llama_cpp.llama_model_n_params(model))
        self.max_positions = int(llama_cpp.llama_model_n_ctx_train(model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def _open(self, num_positions: int) -> Any:
        """Return llama.cpp's model with room for `num_positions` tokens in its cache. It is loaded
        again only if it has less."""
        if num_positions > self._num_positions:
            # The next power of two, so that slightly longer prompts do not load the model again.
            self._num_positions = 1 << (num_positions - 1).bit_length()
            self._llama = self._load()
            weakref.finalize(self, self._llama.close)  # before Python unloads what it needs
            self._cached = []
        return self._llama

    @property
    def _open_context(self) -> Any:
        """llama.cpp's context, as the model is open: with the cache that it has."""
        return self._llama.ctx

    def _load(self) -> Any:
        """Load the model, with room for `_num_positions` tokens."""
        import llama_cpp

        num_threads = torch.get_num_threads()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return llama_cpp.Llama(
                    str(self.path),
                    n_ctx=self._num_positions,
                    n_batch=BATCH,
                    n_ubatch=BATCH,
                    n_threads=num_threads,
                    n_threads_batch=num_threads,
                    n_gpu_layers=-1 if self._on_gpu else 0,
                    swa_full=True,  # else what a prompt shares may have left the cache
                    verbose=False,
                )
        except ValueError as error:
            raise DataError(f"llama.cpp cannot load '{self.path}': {error}") from None

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        different = sorted({prompt.key for prompt in prompts})
        lengths = [len(prefix) + len(continuation) for prefix, continuation in different]
        self._open(max(lengths, default=1))
        self._keep_in_cache(0)  # so that equal calls compute equal numbers
        log_p_by_key = {
            (prefix, continuation): self._log_p(list(prefix), list(continuation))
            for prefix, continuation in different
        }
        return [log_p_by_key[prompt.key] for prompt in prompts]

    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        import llama_cpp

        vocab = llama_cpp.llama_model_get_vocab(self._open(len(ids) + max_new_tokens).model)
        self._keep_in_cache(0)
        logits_V = self._logits(ids, len(ids) - 1)[-1]
        generated: list[int] = []
        while len(generated) < max_new_tokens:
            token = int(logits_V.argmax())
            if llama_cpp.llama_vocab_is_eog(vocab, token):
                break
            generated.append(token)
            logits_V = self._logits([*ids, *generated], len(ids) + len(generated) - 1)[-1]
        return generated

    def _log_p(self, prefix: list[int], continuation: list[int]) -> np.ndarray:
        """Return log p of the tokens of a continuation: [W], in nats.

        log p = logit − max − log Σ exp(logit − max)      the sum over the vocabulary, in fp64
        """
        # The logits of a token are those after the token before it.
        logits_WV = self._logits([*prefix, *continuation[:-1]], len(prefix) - 1)
        highest_W = logits_WV.max(1)
        total_W = np.log(np.exp(logits_WV - highest_W[:, None], dtype=np.float64).sum(1))
        logits_W = logits_WV[np.arange(len(continuation)), continuation]
        return np.minimum(logits_W.astype(float) - highest_W - total_W, 0.0)

    def _logits(self, tokens: list[int], first: int) -> np.ndarray:
        """Return logits_WV after the tokens from the index `first` on."""
        import llama_cpp

        # Tokens from `first` on are computed again if they are in the cache, as it has no logits.
        self._keep_in_cache(min(_num_shared(self._cached, tokens), first))
        context = self._open_context
        rows: list[np.ndarray] = []
        while len(self._cached) < len(tokens):
            begin = len(self._cached)
            part = tokens[begin : begin + BATCH]
            self._fill_batch(part, begin, first)
            code = llama_cpp.llama_decode(context, self._batch)
            if code != 0:
                self._keep_in_cache(0)  # what the cache holds now is unknown
                raise DataError(f"llama.cpp failed on {len(tokens):,} tokens ({code})")
            self.token_forwards += len(part)
            self._cached += part

            for i in range(max(first - begin, 0), len(part)):
                pointer = llama_cpp.llama_get_logits_ith(context, i)
                # Copied, as the next call of llama_decode overwrites it.
                rows.append(np.ctypeslib.as_array(pointer, (self.vocab_size,)).copy())
        return np.stack(rows)

    def _fill_batch(self, tokens: Sequence[int], begin: int, first: int) -> None:
        """Write tokens into the batch of llama.cpp, which is allocated once.

        Args:
            begin: The position of the first of these tokens.
            first: The position from which on logits are wanted.
        """
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = begin + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = begin + i >= first

    def _keep_in_cache(self, num_tokens: int) -> None:
        """Forget all but the first tokens of the last prompt."""
        import llama_cpp

        memory = llama_cpp.llama_get_memory(self._open_context)
        if num_tokens == 0 or not llama_cpp.llama_memory_seq_rm(memory, 0, num_tokens, -1):
            # The state of a recurrent model holds all tokens, and cannot lose the last ones.
            llama_cpp.llama_memory_clear(memory, True)
            num_tokens = 0
        del self._cached[num_tokens:]


def _num_shared(cached: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the number of tokens with which both lists begin alike."""
    num_shared = 0
    for cached_token, token in zip(cached, tokens, strict=False):
        if cached_token != token:
            break
        num_shared += 1
    return num_shared
