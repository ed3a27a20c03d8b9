"""Score prompts with models of transformers that take no position IDs, such as recurrent ones. No
token can be left out of their prompts or moved; a common beginning may still be computed once.

    model = WholePrompts(AutoModelForCausalLM.from_pretrained(name))
    model.score([Prompt(ids_of_question, ids_of_answer)])     # [array([-7.2, -3.1])], in nats

    load_model(…, whole_prompts=True) → WholePrompts → `attribute`, and measurements with
                                                       distant_states="replaced"

Dimension key: B rows, L tokens of a row, W tokens of a continuation, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.huggingface.row_independence import check_rows_are_independent
from olmo_sparsity.models.identity.model_identity import check_weights_exist
from olmo_sparsity.models.prefix_tree import Node, PrefixTree
from olmo_sparsity.models.prompts import Prompt, PromptModel

BATCH_TOKENS = 4096
"""The largest number of tokens in a batch, unless a single row has more."""

_CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")
"""The names that families of transformers have for the argument that takes a cache."""


class WholePrompts(PromptModel, nn.Module):
    """A model of transformers as a `PromptModel`. Rows of one forward pass have the same length,
    because padding may change a state. Prompts share the states of their beginnings if a trial
    shows that the model continues from states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        check_weights_exist(model)
        self.model = model
        arguments = inspect.signature(model.forward).parameters
        self._keeps_last_logits = "logits_to_keep" in arguments
        self._cache_name = next((name for name in _CACHE_ARGUMENTS if name in arguments), None)
        # Nats by which two computations of one log-probability may differ: sums of about 1,000
        # rounded products. In bf16 that would be 8 nats, which would hide any real difference, so
        # it is limited to 0.1.
        self._rounding = min(0.1, 1024 * torch.finfo(model.dtype).eps)
        self._check_rows()
        self._check_causal()
        self.shares = self._continues_from_states()

    def _check_rows(self) -> None:
        """Raise ConfigError if the log-probabilities of a row depend on the texts in other rows of
        its batch."""

        def losses(tokens_BL: Tensor) -> Tensor:
            rows_BL = tokens_BL.cpu().numpy()
            # After the last token any will do.
            targets_BL = np.roll(rows_BL, -1, axis=1)
            return -torch.from_numpy(np.stack(self._log_p(rows_BL, targets_BL, cache=None)))

        check_rows_are_independent(self.model, losses, self.vocab_size, self.device)
        self.token_forwards = 0  # those of the trial do not count

    def _check_causal(self) -> None:
        """Raise ConfigError for a model, such as an encoder, in which a token's log-probability
        depends on tokens after it."""
        # Any five tokens, but the first of a vocabulary, which are often special.
        ids = np.arange(3, 8) % self.vocab_size
        # Two continuations that differ in their second token. In a causal model the first token has
        # the same log-probability in both.
        prompts = [Prompt(ids, np.array([ids[0], ids[second], ids[0]])) for second in (1, 2)]
        # Whether prompts can share beginnings is not known yet.
        first_W, second_W = self._score(prompts, shares=False)
        if abs(first_W[0] - second_W[0]) > self._rounding:
            raise ConfigError(
                f"{type(self.model).__name__} is not supported: it reads later tokens; pass a "
                "decoder-only model"
            )

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.get_input_embeddings().weight.device)

    @property
    def dtype_name(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().out_features)

    def _continues_from_states(self) -> bool:
        """Return whether prompts that share states of their beginning get the same scores as whole
        prompts. With dropout they do not."""
        # Prompts that share 20 tokens, which is more than `MIN_SHARED_TOKENS`. Multiples of 7, so
        # that tokens differ in a small vocabulary, too.
        ids = np.arange(40) * 7 % self.vocab_size
        beginning = ids[:20]
        continuation = ids[-3:]
        # Two of one length, which are one batch, and one of another.
        endings = (ids[20:26], ids[26:32], ids[22:26])
        prompts = [Prompt(np.append(beginning, ending), continuation) for ending in endings]
        try:
            whole = np.concatenate(self._score(prompts, shares=False))
            shared = np.concatenate(self._score(prompts, shares=True))
        except Exception:  # of the model's own code, which may take no cache
            return False
        finally:
            self.token_forwards = 0  # those of the trial do not count
        return bool(np.abs(whole - shared).max() <= self._rounding)

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return log-probabilities, as `LogprobModel.score` describes. Equal prompts are computed
        once."""
        return self._score(prompts, shares=self.shares)

    @torch.no_grad()
    def _score(self, prompts: Sequence[Prompt], *, shares: bool) -> list[np.ndarray]:
        """Return what `score` returns. `shares`: whether states of common beginnings are computed
        once."""
        from transformers import DynamicCache

        different = list({prompt.key: prompt for prompt in prompts}.values())
        if shares and different:
            tree = PrefixTree.of(different)
        else:
            tree = PrefixTree.without_sharing(different)

        def extend_states(states: Any, node: Node, num_computed: int) -> Any:
            # A copy, as a forward pass writes to its cache, and other nodes begin with these
            # states.
            cache = deepcopy(states)
            if cache is None:
                cache = DynamicCache(config=self.model.config)
            self._extend(cache, node.tokens[num_computed:])
            return cache

        def score_rows(states: Any, tokens_BL: np.ndarray, indices: list[int]) -> list[np.ndarray]:
            targets_BW = np.stack([different[index].continuation for index in indices])
            num_rows = max(1, BATCH_TOKENS // len(tree.inputs[indices[0]]))
            log_p: list[np.ndarray] = []
            for first in range(0, len(indices), num_rows):
                batch = slice(first, first + num_rows)
                log_p += self._log_p(tokens_BL[batch], targets_BW[batch], deepcopy(states))
            return log_p

        log_p_of_index = dict(tree.scores(extend_states, score_rows))
        log_p_of_key = {prompt.key: log_p_of_index[index] for index, prompt in enumerate(different)}
        return [log_p_of_key[prompt.key] for prompt in prompts]

    def _extend(self, cache: Any, tokens: np.ndarray) -> None:
        """Add the states of tokens to a cache of one row, which they follow."""
        # The model adds them to its cache; its logits are not needed, so only one is asked for.
        self._logits(tokens[None], 1, cache)

    def _log_p(self, tokens_BL: np.ndarray, targets_BW: np.ndarray, cache: Any) -> list[np.ndarray]:
        """Return the log-probabilities of the targets of each row, which its last tokens predict.
        Rows have the same length. `cache`: states that all rows follow; None for none."""
        if cache is not None:
            # The cache has one row, which is repeated for each row of tokens.
            cache.reorder_cache(torch.zeros(len(tokens_BL), dtype=torch.long))
        logits_BWV = self._logits(tokens_BL, targets_BW.shape[1], cache)
        log_p_BWV = logits_BWV.float().log_softmax(-1)
        targets_BW1 = torch.from_numpy(targets_BW)[..., None].to(log_p_BWV.device)
        log_p_BW = log_p_BWV.gather(-1, targets_BW1)[..., 0]
        return list(log_p_BW.double().cpu().numpy())

    def _logits(self, tokens_BL: np.ndarray, num_last: int, cache: Any) -> Tensor:
        """Return logits_BWV after the last `num_last` tokens. All tokens follow the states in
        `cache`, to which their own states are added."""
        arguments: dict[str, Any] = {"use_cache": cache is not None}
        if self._keeps_last_logits:
            arguments["logits_to_keep"] = num_last
        if cache is not None:
            arguments[str(self._cache_name)] = cache
        inputs_BL = torch.from_numpy(tokens_BL).to(self.device)
        logits = self.model(input_ids=inputs_BL, **arguments).logits
        self.token_forwards += inputs_BL.numel()
        return logits[:, -num_last:]

    @torch.no_grad()
    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        """Return the tokens that follow, chosen greedily, without those that end a text."""
        tokens_1L = torch.tensor([ids], device=self.device)
        generated_1L = self.model.generate(
            tokens_1L,
            attention_mask=torch.ones_like(tokens_1L),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        eos = self.model.generation_config.eos_token_id  # one, several, or None
        end_tokens = [] if eos is None else np.atleast_1d(eos).tolist()
        tokens = generated_1L[0, len(ids) :].tolist()
        return [token for token in tokens if token not in end_tokens]
