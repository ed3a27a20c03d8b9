"""Sources, a question and an answer for tiny models, and their losses by plain transformers."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from olmo_sparsity import attribute
from olmo_sparsity.sources.evidence import Losses
from olmo_sparsity.sources.statements import Attribution
from tests.support.explanations import WORDS, make_tokenizer
from tests.support.families import SUPPORTED, build, find

SOURCES = {"a": "w1 w2 w3 w4", "b": "w5 w6 w7", "c": "w8 w9 w10 w11 w12"}
GIVEN: dict[str, Any] = {
    "sources": SOURCES,
    "question": "w20 w21",
    "answer": ["w1 w2 w3", "w8 w9", "w30"],
    "decoys": [" ".join(np.random.default_rng(i).choice(WORDS, 9)) for i in range(12)],
}
FAMILIES = ["Llama 1, 2, 3", "Qwen 3", "Gemma 3 (text)", "GPT-NeoX, Pythia"]


@cache
def model_of(family: str = FAMILIES[0]) -> Any:
    return build(
        SUPPORTED[find(family)],
        vocab_size=45,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )


def asked(family: str = FAMILIES[0], **changed: Any) -> Any:
    return attribute(model_of(family), make_tokenizer(), **GIVEN | changed)


class Plain:
    """transformers alone: the losses of each statement with some sources."""

    def __init__(self, family: str) -> None:
        self.model, read = model_of(family), make_tokenizer(bos=False)
        self.parts = [read(text).input_ids for text in SOURCES.values()]
        self.answer = [read(text).input_ids for text in GIVEN["answer"]]
        self.local = [*read(GIVEN["question"]).input_ids, *[*chain(*self.answer)]]

    def with_decoys(self, decoys: dict[int, list[int]]) -> Plain:
        """… in place of some sources, by number."""
        found = copy(self)
        found.parts = [decoys.get(number, part) for number, part in enumerate(self.parts)]
        return found

    @torch.no_grad()
    def losses(self) -> np.ndarray:
        logits = self.model(torch.tensor([[1, *chain(*self.parts), *self.local]])).logits[0]
        num_answer = sum(map(len, self.answer))
        log_p = logits[-num_answer - 1 : -1].log_softmax(-1)
        nll = -log_p[range(num_answer), [*chain(*self.answer)]].numpy()
        ends = np.cumsum([len(part) for part in self.answer])
        return np.array([part.sum() for part in np.split(nll, ends[:-1])])


GIVES_AND_LOST = (
    [[8.0, 0.0, 0.1], [7.0, 0.0, 7.5], [4.0, 4.0, 0.0]],
    [[8.0, 0.0, 0.1], [0.1, 0.0, 0.0], [4.0, 4.5, 0.0]],
)


def with_verdicts(found: Attribution) -> Attribution:
    """Its losses replaced: the statements rest on a, on either of a and c, on a and b together."""
    return replace(found, losses=made_up(*GIVES_AND_LOST), token_losses=None)


def made_up(gives: Any, lost: Any, gap: float = 8.0, noise: float = 0.05) -> Losses:
    """Losses with sources that give so many nats of `gap`, and of which so many are lost."""
    gives_TS1, lost_TS1 = np.array(gives)[..., None], np.array(lost)[..., None]
    noise_TSD = np.random.default_rng(0).normal(scale=noise, size=(*gives_TS1.shape[:2], 8))
    with_decoys = np.full((len(noise_TSD), 8), gap), gap - gives_TS1 + noise_TSD
    return Losses(np.zeros(len(noise_TSD)), *with_decoys, lost_TS1 + noise_TSD)


def saved(folder: Path, tokenizer: Any = None) -> tuple[str, str]:
    """Write the model and decoys, for the command."""
    model_of().save_pretrained(folder / "model")
    (tokenizer or make_tokenizer()).save_pretrained(folder / "model")
    (folder / "decoys.txt").write_text("\n".join(GIVEN["decoys"]))
    return str(folder / "model"), str(folder / "decoys.txt")


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container within nested JSON, with each of its keys."""
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    return [place for key in keys for place in [(value, key), *places(value[key])]]
