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
from olmo_sparsity.sources.attribution import Attribution
from olmo_sparsity.sources.verdicts.losses import StatementLosses
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
    """Return the attribution of `GIVEN` by a tiny model, with some arguments changed."""
    return attribute(model_of(family), make_tokenizer(), **GIVEN | changed)


class Plain:
    """Computes the losses of each statement with transformers alone: all texts joined, no cache."""

    def __init__(self, family: str) -> None:
        self.model, read = model_of(family), make_tokenizer(bos=False)
        self.parts = [read(text).input_ids for text in SOURCES.values()]
        self.answer = [read(text).input_ids for text in GIVEN["answer"]]
        self.local = [*read(GIVEN["question"]).input_ids, *[*chain(*self.answer)]]

    def with_decoys(self, decoys: dict[int, list[int]]) -> Plain:
        """Return the same with decoys in place of some sources, by their numbers."""
        replaced = copy(self)
        replaced.parts = [decoys.get(number, part) for number, part in enumerate(self.parts)]
        return replaced

    @torch.no_grad()
    def losses(self) -> np.ndarray:
        """Return losses_T: the sum over the tokens of each statement."""
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
"""Nats that each source gives to each of three statements, and that are lost without it."""


def with_verdicts(attribution: Attribution) -> Attribution:
    """Return an attribution with its losses replaced by made-up ones: its statements rest on a, on
    either of a and c, on a and b together."""
    return replace(attribution, losses=made_up(*GIVES_AND_LOST), token_losses=None)


def made_up(gives: Any, lost: Any, gap: float = 8.0, noise: float = 0.05) -> StatementLosses:
    """Return losses with eight decoys of each source.

    gives: Nats that each source gives to each statement, of `gap` that all give together.
    lost: Nats that are lost without each source.
    noise: Standard deviation over decoys.
    """
    gives_TS1 = np.array(gives)[..., None]
    lost_TS1 = np.array(lost)[..., None]
    num_statements, num_sources = gives_TS1.shape[:2]
    noise_TSD = np.random.default_rng(0).normal(scale=noise, size=(num_statements, num_sources, 8))
    return StatementLosses(
        all_T=np.zeros(num_statements),
        decoys_TD=np.full((num_statements, 8), gap),
        among_TSD=gap - gives_TS1 + noise_TSD,
        without_TSD=lost_TS1 + noise_TSD,
    )


def saved(folder: Path, tokenizer: Any = None) -> tuple[str, str]:
    """Write the model and decoys for the command, and return their paths."""
    model_of().save_pretrained(folder / "model")
    (tokenizer or make_tokenizer()).save_pretrained(folder / "model")
    (folder / "decoys.txt").write_text("\n".join(GIVEN["decoys"]))
    return str(folder / "model"), str(folder / "decoys.txt")


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container within nested JSON, with each of its keys."""
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    return [place for key in keys for place in [(value, key), *places(value[key])]]
