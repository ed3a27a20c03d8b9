"""Generate an answer greedily: at each step the token with the largest probability.

    generate(model, [464, 7696], max_new_tokens=3)    # [287, 1921, 13]

Dimension key: B rows of a batch, F distant tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.loaded import LoadedModel


@torch.no_grad()
def generate(
    model: LoadedModel,
    tokens: list[int],
    max_new_tokens: int,
    after_token: Callable[[list[int]], None] = lambda generated: None,
) -> list[int]:
    """Return the tokens that the model generates greedily after a text, up to its end-of-text
    token.

    Args:
        model: The model.
        tokens: Token IDs of the text.
        max_new_tokens: The largest number of tokens to generate. The user is told if it cuts the
            answer.
        after_token: Called after each token, with all generated tokens. Default: nothing.
    """
    # A model that computes elsewhere, such as a server, generates by itself.
    if model.prompt_model is not None:
        answer: list[int] = model.prompt_model.generate(tokens, max_new_tokens)
        return answer
    language_model = model.model
    end_ids = _end_ids(model)
    device = model.device
    generated: list[int] = []
    # States of all tokens so far, so that each step computes one token. The first step computes the
    # whole text.
    states = None
    inputs = torch.tensor([tokens], device=device)
    for num_before in range(len(tokens), len(tokens) + max_new_tokens):
        positions = torch.arange(num_before - inputs.shape[1], num_before, device=device)[None]
        states = language_model.distant_states(inputs, positions, earlier=states)
        # The hidden state of the last token predicts the next one.
        next_token = int(language_model.unembed(states.hidden_BFD[:, -1]).argmax())
        if next_token in end_ids:
            break
        generated.append(next_token)
        after_token(generated)
        inputs = torch.tensor([[next_token]], device=device)
    else:
        say(f"the answer ends at {max_new_tokens} tokens (max_new_tokens), unfinished")
    return generated


def _end_ids(model: LoadedModel) -> set[int]:
    """Return the tokens at which a generated answer ends."""
    inner = getattr(model.model, "model", None)
    configs = [getattr(owner, "config", None) for owner in (model.model, inner)]
    # Some chat models name the end of a turn in their generation_config only.
    owners = (model.transformers_tokenizer, *configs, getattr(inner, "generation_config", None))
    end_ids = set()
    for owner in owners:
        # One token ID, a list of them, or None.
        tokens: Any = getattr(owner, "eos_token_id", None)
        for token in np.atleast_1d(tokens):
            if token is None:
                continue
            if not isinstance(token, int | np.integer):
                raise ConfigError(
                    f"eos_token_id of '{model.name}' is {token!r:.60}, not a token ID; correct its "
                    "config.json"
                )
            end_ids.add(int(token))
    return end_ids
