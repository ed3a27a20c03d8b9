"""Score prompts with models of transformers that read whole prompts only: recurrent ones, and those
without position IDs."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from olmo_sparsity.analysis.kernels.engine import Engine, Prompt

BATCH_TOKENS = 4096


class WholePrompts(Engine, nn.Module):
    """Rows of one forward pass have one length, as padding may change a state."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.get_input_embeddings().weight.device)

    @property
    def dtype_name(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().out_features)

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        shapes = defaultdict[tuple[int, int], set](set)
        for before, after in (prompt.key for prompt in prompts):
            shapes[len(before), len(after)].add((*before, *after))
        found: dict[tuple, np.ndarray] = {}
        for (num_before, num_after), different in shapes.items():
            num = max(1, BATCH_TOKENS // (num_before + num_after))
            ordered = sorted(different)
            for batch in (ordered[i : i + num] for i in range(0, len(ordered), num)):
                tokens_BL = torch.tensor(batch, device=self.device)
                keep = {"logits_to_keep": num_after} if self._keeps else {}
                inputs_BL = tokens_BL[:, :-1]
                logits_BLV = self.model(input_ids=inputs_BL, use_cache=False, **keep).logits
                self.token_forwards += inputs_BL.numel()
                log_p_BWV = logits_BLV[:, -num_after:].float().log_softmax(-1)
                own_BW = log_p_BWV.gather(-1, tokens_BL[:, -num_after:, None])[..., 0]
                found |= zip(batch, own_BW.double().cpu().numpy(), strict=True)
        return [found[sum(prompt.key, ())] for prompt in prompts]

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
