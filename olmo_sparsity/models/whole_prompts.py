"""Score prompts with models of transformers that read whole prompts only: recurrent ones, and those
without position IDs.

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
from olmo_sparsity.models.identity import refuse_lost_weights
from olmo_sparsity.models.prompts import Node, Prompt, PromptModel, plan, scores_along

BATCH_TOKENS = 4096
_CACHES = ("cache", "cache_params", "past_key_values")  # the argument, by family


class WholePrompts(PromptModel, nn.Module):
    """Rows of one forward pass have one length, as padding may change a state. Prompts share the
    states of their beginnings where a trial shows that the model takes these up again."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        refuse_lost_weights(model)
        self.model = model
        names = inspect.signature(model.forward).parameters
        self._keeps = "logits_to_keep" in names
        self._cache_name = next((name for name in _CACHES if name in names), None)
        self._rounding = min(0.1, 1024 * torch.finfo(model.dtype).eps)
        ids = np.arange(3, 8) % self.vocab_size
        one, other = self.score([Prompt(ids, ids[[0, n, 0]]) for n in (1, 2)])
        if abs(one[0] - other[0]) > self._rounding:
            raise ConfigError(f"{type(model).__name__} is not supported: it reads later tokens")
        self.shares = self._takes_states_up()

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.get_input_embeddings().weight.device)

    @property
    def dtype_name(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().out_features)

    def _takes_states_up(self) -> bool:
        """Compare prompts that share a beginning with whole ones (not so under dropout)."""
        ids = np.arange(40) * 7 % self.vocab_size
        ends = ids[20:26], ids[26:32], ids[22:26]  # two of one length, which are one batch
        prompts = [Prompt(np.append(ids[:20], end), ids[-3:]) for end in ends]
        found = []
        try:
            for self.shares in (False, True):
                found.append(np.concatenate(self.score(prompts)))
        except Exception:  # of the model's own code, which may take no cache
            return False
        finally:
            self.token_forwards = 0
        return bool(np.abs(found[0] - found[1]).max() <= self._rounding)

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        from transformers import DynamicCache

        different = list({prompt.key: prompt for prompt in prompts}.values())
        rows = [prompt.inputs for prompt in different]
        root = Node([], 0, False, list(range(len(rows))), [])
        if self.shares and rows:
            root, rows = plan(different)

        def extended(states: Any, node: Node, before: int) -> Any:
            cache = DynamicCache(config=self.model.config) if states is None else deepcopy(states)
            tokens = rows[node.indices[0]][before : node.depth]
            self._logits(tokens[None], 1, cache)
            return cache

        def scored(states: Any, tokens_BL: np.ndarray, indices: list[int]) -> list[np.ndarray]:
            targets_BW = np.stack([different[index].continuation for index in indices])
            num, found = max(1, BATCH_TOKENS // len(rows[indices[0]])), list[np.ndarray]()
            for first in range(0, len(indices), num):
                part_BL, ids_BW = tokens_BL[first : first + num], targets_BW[first : first + num]
                cache = deepcopy(states)
                if cache is not None:
                    cache.reorder_cache(torch.zeros(len(part_BL), dtype=torch.long))
                log_p_BWV = self._logits(part_BL, ids_BW.shape[1], cache).float().log_softmax(-1)
                ids_BW1 = torch.from_numpy(ids_BW)[..., None].to(log_p_BWV.device)
                found += list(log_p_BWV.gather(-1, ids_BW1)[..., 0].double().cpu().numpy())
            return found

        found = dict(scores_along(root, rows, different, extended, scored))
        of_key = {prompt.key: found[index] for index, prompt in enumerate(different)}
        return [of_key[prompt.key] for prompt in prompts]

    def _logits(self, tokens_BL: np.ndarray, num_last: int, cache: Any) -> Tensor:
        """logits_BWV behind the last tokens; `cache` takes up what it holds, and is extended."""
        given: dict[str, Any] = {"logits_to_keep": num_last} if self._keeps else {}
        if cache is not None:
            given[str(self._cache_name)] = cache
        inputs_BL = torch.from_numpy(tokens_BL).to(self.device)
        logits = self.model(input_ids=inputs_BL, use_cache=cache is not None, **given).logits
        self.token_forwards += inputs_BL.numel()
        return logits[:, -num_last:]

    @torch.no_grad()
    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        tokens_1L = torch.tensor([ids], device=self.device)
        made_1L = self.model.generate(
            tokens_1L,
            attention_mask=torch.ones_like(tokens_1L),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        ends = set(np.atleast_1d(self.model.generation_config.eos_token_id or -1).tolist())
        return [token for token in made_1L[0, len(ids) :].tolist() if token not in ends]
