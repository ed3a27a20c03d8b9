"""Score prompts with llama.cpp in this process: a quantized GGUF file as it is. What a sorted
prompt shares with the one before it stays in the cache."""

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
"""Tokens of one call of `llama_decode`."""


class LlamaCpp(PromptModel):
    """Prompts on the low-level functions of llama-cpp-python."""

    device = torch.device("cpu")
    dtype_name = "of the GGUF file"
    vocab_size = 0

    def __init__(self, path: Path, device: str = "auto") -> None:
        import llama_cpp

        self.path = path
        self._on_gpu = device != "cpu"
        self._llama: Any = None
        self._num_places = 0
        self._cached: list[int] = []
        model = self._open(2 * BATCH).model
        if llama_cpp.llama_model_has_encoder(model):
            raise DataError(f"'{path}' holds an encoder; pass a decoder-only model")
        vocab = llama_cpp.llama_model_get_vocab(model)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocab))
        self.num_parameters = int(llama_cpp.llama_model_n_params(model))
        self.max_positions = int(llama_cpp.llama_model_n_ctx_train(model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def _open(self, num_places: int) -> Any:
        """Open a context with room for so many tokens."""
        import llama_cpp

        if num_places > self._num_places:
            self._num_places = 1 << (num_places - 1).bit_length()
            threads = torch.get_num_threads()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._llama = llama_cpp.Llama(
                        str(self.path),
                        n_ctx=self._num_places,
                        n_batch=BATCH,
                        n_ubatch=BATCH,
                        n_threads=threads,
                        n_threads_batch=threads,
                        n_gpu_layers=-1 if self._on_gpu else 0,
                        swa_full=True,  # else what a prompt shares may have left the cache
                        verbose=False,
                    )
            except ValueError as error:
                raise DataError(f"llama.cpp cannot load '{self.path}': {error}") from None
            weakref.finalize(self, self._llama.close)  # before Python unloads what it needs
            self._cached = []
        return self._llama

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        different = sorted({prompt.key for prompt in prompts})
        self._open(max((len(a) + len(b) for a, b in different), default=1))
        self._keep(0)  # so that equal calls compute equal numbers
        found = {key: self._log_p(list(key[0]), list(key[1])) for key in different}
        return [found[prompt.key] for prompt in prompts]

    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        import llama_cpp

        vocab = llama_cpp.llama_model_get_vocab(self._open(len(ids) + max_new_tokens).model)
        self._keep(0)
        logits_V, generated = self._logits(ids, len(ids) - 1)[-1], list[int]()
        while len(generated) < max_new_tokens:
            token = int(logits_V.argmax())
            if llama_cpp.llama_vocab_is_eog(vocab, token):
                break
            generated.append(token)
            logits_V = self._logits([*ids, *generated], len(ids) + len(generated) - 1)[-1]
        return generated

    def _log_p(self, prefix: list[int], continuation: list[int]) -> np.ndarray:
        logits_WV = self._logits([*prefix, *continuation[:-1]], len(prefix) - 1)
        highest_W = logits_WV.max(1)
        total_W = np.log(np.exp(logits_WV - highest_W[:, None], dtype=np.float64).sum(1))
        own_W = logits_WV[np.arange(len(continuation)), continuation]
        return np.minimum(own_W.astype(float) - highest_W - total_W, 0.0)

    def _logits(self, tokens: list[int], first: int) -> np.ndarray:
        """Return logits_WV after the tokens from number `first` on."""
        import llama_cpp

        pairs = zip(self._cached, tokens, strict=False)
        num_same = min(len(self._cached), len(tokens))
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), num_same)
        self._keep(min(shared, first))
        context, batch, rows = self._open(0).ctx, self._batch, list[np.ndarray]()
        while len(self._cached) < len(tokens):
            begin = len(self._cached)
            part = tokens[begin : begin + BATCH]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = token, begin + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = begin + i >= first
            if code := llama_cpp.llama_decode(context, batch):
                self._keep(0)
                raise DataError(f"llama.cpp failed on {len(tokens):,} tokens ({code})")
            self.token_forwards += len(part)
            self._cached += part
            for i in range(max(first - begin, 0), len(part)):
                pointer = llama_cpp.llama_get_logits_ith(context, i)
                rows.append(np.ctypeslib.as_array(pointer, (self.vocab_size,)).copy())
        return np.stack(rows)

    def _keep(self, num: int) -> None:
        """Forget all but the first tokens of the last prompt."""
        import llama_cpp

        memory = llama_cpp.llama_get_memory(self._open(0).ctx)
        if num == 0 or not llama_cpp.llama_memory_seq_rm(memory, 0, num, -1):
            llama_cpp.llama_memory_clear(memory, True)  # states of a recurrent model are one whole
            num = 0
        del self._cached[num:]
