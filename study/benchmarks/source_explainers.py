"""The contestants of sources.py. Each is made ready with a model, its tokenizer and questions to
fit on, and then gives a score to every source for every statement of an answer.

As in explainers.py, a package can run in an environment of its own:

    python -m study.benchmarks.source_explainers NAME FOLDER QUESTIONS ANSWERS CPU_SECONDS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from study.benchmarks.explainers import (
    OURS,
    TokenForwards,
    answer,
    be_quiet_and_repeatable,
    limit,
    version_of,
)

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class SourceQuestion:
    """Which of the sources does each statement rely on?"""

    sources: list[str]
    question: str
    statements: list[str]
    decoys: list[str]
    tokenizer: Any
    prefix: str = ""
    """Before the prompt, whatever sources it has."""

    def told(self, found: Any) -> dict[str, Any]:
        """What is kept: score_TS, and what a contestant says next to it."""
        told = found if isinstance(found, dict) else {"scores": found}
        scores_TS = np.array(told["scores"], dtype=float)
        assert scores_TS.shape == (len(self.statements), len(self.sources)), scores_TS.shape
        return told | {"scores": scores_TS.tolist()}

    def prompt_with(self, sources: list[str]) -> str:
        return self.prefix + "\n\n".join([*sources, self.question + "\n"])

    @property
    def prompt(self) -> str:
        return self.prompt_with(self.sources)

    @property
    def answer(self) -> str:
        return " ".join(self.statements)

    def encoded(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @cached_property
    def answer_ids(self) -> list[int]:
        return self.encoded(self.answer)

    @cached_property
    def source_spans(self) -> Spans:
        """In the tokens of the whole text."""
        return self._spans(self.prompt, self.sources, len(self.prefix), len("\n\n"))

    @cached_property
    def statement_spans(self) -> Spans:
        """In the tokens of the answer."""
        return self._spans(self.answer, self.statements, 0, len(" "))

    def _spans(self, text: str, parts: list[str], place: int, apart: int) -> Spans:
        """Tokens that end in each part; the first begins at `place`."""
        read = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in read["offset_mapping"]]
        spans = []
        for part in parts:
            inside = [i for i, end in enumerate(ends) if place < end <= place + len(part)]
            spans.append((inside[0], inside[-1] + 1))
            place += len(part) + apart
        return spans

    def is_read_back(self) -> bool:
        """Whether parts have the tokens that they have in the whole text."""
        ids = [*self.encoded(self.prompt), *self.answer_ids]
        places = [
            *self.source_spans,
            *(
                (a + self.num_prompt_tokens, b + self.num_prompt_tokens)
                for a, b in self.statement_spans
            ),
        ]
        parts = [ids[first:end] for first, end in places]
        return (
            parts == [self.encoded(text) for text in (*self.sources, *self.statements)]
            and self.encoded(self.prompt + self.answer) == ids
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens before the answer."""
        return len(self.encoded(self.prompt))

    def of_statements(self, scores_WS: Any) -> np.ndarray:
        """Sums over the tokens of each statement."""
        scores_WS = np.asarray(scores_WS, dtype=float)
        return np.stack([scores_WS[first:end].sum(0) for first, end in self.statement_spans])

    def of_sources(self, scores_WL: Any) -> np.ndarray:
        """… and over the tokens of each source."""
        scores_WL = np.asarray(scores_WL, dtype=float)
        columns = [scores_WL[:, first:end].sum(1) for first, end in self.source_spans]
        return self.of_statements(np.stack(columns, axis=1))


Scores = Callable[[SourceQuestion], Any]


# --- ours -----------------------------------------------------------------------------------------


def ours(draws: int, model: Any, tokenizer: Any, fit_on: list[SourceQuestion]) -> Scores:
    """Nats, the mean of what a source gives and of what is lost without it; and the verdicts."""
    from olmo_sparsity import attribute
    from olmo_sparsity.models.load import wrap_model

    loaded = wrap_model(model, tokenizer)

    def scores(asked: SourceQuestion) -> dict[str, Any]:
        found = attribute(
            loaded,
            sources={str(i): text for i, text in enumerate(asked.sources)},
            question=asked.question,
            answer=asked.statements,
            decoys=asked.decoys,
            draws=draws,
        )
        shape = len(asked.statements), len(asked.sources)
        p_TS = found.matrix[["p_gives", "p_lost"]].min(axis=1).to_numpy().reshape(shape)
        return {
            "scores": found.matrix[["gives", "lost"]].mean(axis=1).to_numpy().reshape(shape),
            "some": (-p_TS.min(1)).tolist(),
            "kinds": found.statements.kind.tolist(),
        }

    return scores


# --- others ---------------------------------------------------------------------------------------


def context_cite(
    num_ablations: int, model: Any, tokenizer: Any, fit_on: list[SourceQuestion]
) -> Scores:
    from context_cite import ContextCiter
    from context_cite.context_partitioner import BaseContextPartitioner

    class Given(BaseContextPartitioner):
        def __init__(self, sources: list[str]) -> None:
            super().__init__("\n\n".join(sources))
            self.given = sources

        @property
        def num_sources(self) -> int:
            return len(self.given)

        def split_context(self) -> None:
            pass  # it is split

        def get_source(self, index: int) -> str:
            return self.given[index]

        def get_context(self, mask: Any = None) -> str:
            kept = self.given if mask is None else np.array(self.given)[mask]
            return "\n\n".join(kept)

    def scores(asked: SourceQuestion) -> np.ndarray:
        given = Given(asked.sources)
        citer = ContextCiter(
            model,
            tokenizer,
            given.context,
            asked.question,
            num_ablations=num_ablations,
            prompt_template=asked.prefix + "{context}\n\n{query}\n",
            partitioner=given,
        )
        # It explains what the model writes; an answer that is given goes where that is kept.
        citer._cache["output"] = asked.prompt + asked.answer
        assert citer._response_ids == asked.answer_ids
        ends = np.cumsum([len(text) + 1 for text in asked.statements]).tolist()
        places = zip([0, *ends], asked.statements, strict=False)
        return np.stack(
            [
                citer.get_attributions(first, first + len(text), verbose=False)
                for first, text in places
            ]
        )

    return scores


def captum_perturbed(
    method: str, model: Any, tokenizer: Any, fit_on: list[SourceQuestion]
) -> Scores:
    """A source that is absent is cut from the text."""
    import captum.attr

    attribution = captum.attr.LLMAttribution(getattr(captum.attr, method)(model), tokenizer)

    def scores(asked: SourceQuestion) -> np.ndarray:
        text = captum.attr.TextTemplateInput(
            lambda *sources: asked.prompt_with([text for text in sources if text]), asked.sources
        )
        # One forward for the whole answer, not one for each token of it.
        found = attribution.attribute(
            text, target=torch.tensor(asked.answer_ids), forward_in_tokens=False
        )
        return asked.of_statements(found.token_attr)

    return scores


def inseq(method: str, model: Any, tokenizer: Any, fit_on: list[SourceQuestion]) -> Scores:
    import inseq

    model.set_attn_implementation("eager")  # as above
    model.config.bos_token_id = model.config.eos_token_id  # it requires one, and does not use it
    attribution = inseq.load_model(model, method, tokenizer=tokenizer)

    def scores(asked: SourceQuestion) -> np.ndarray:
        found = attribution.attribute(
            asked.prompt, asked.prompt + asked.answer, show_progress=False
        )
        # Rows: tokens of the text; columns: tokens of the answer.
        return asked.of_sources(found[0].aggregate().target_attributions.nan_to_num().T)

    return scores


def flashtrace(model: Any, tokenizer: Any, fit_on: list[SourceQuestion]) -> Scores:
    from flashtrace import FlashTrace

    model.set_attn_implementation("eager")  # as above
    tracer = FlashTrace(model, tokenizer)

    def scores(asked: SourceQuestion) -> np.ndarray:
        rows = []
        for first, end in asked.statement_spans:
            found = tracer.trace(
                prompt=asked.prompt, target=asked.answer, output_span=(first, end - 1)
            )
            rows.append([sum(found.scores[a:b]) for a, b in asked.source_spans])
        return np.array(rows)

    return scores


CONTESTANTS: dict[str, tuple[str, Callable[..., Scores]]] = {
    "ours, 4 decoys": (OURS, partial(ours, 4)),
    "ours, 8 decoys": (OURS, partial(ours, 8)),
    "context-cite, 32 ablations": ("context-cite", partial(context_cite, 32)),
    "context-cite, 64 ablations": ("context-cite", partial(context_cite, 64)),
    "captum FeatureAblation": ("captum", partial(captum_perturbed, "FeatureAblation")),
    "inseq attention": ("inseq", partial(inseq, "attention")),
    "flashtrace": ("flashtrace", flashtrace),
}
"""Name → package (as on PyPI), and what makes it ready."""


# --- the model ------------------------------------------------------------------------------------


def read_model(folder: str | Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.padding_side = "left"
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return model, tokenizer


def main(name: str, folder: str, questions: str, answers: str, cpu_seconds: str) -> None:
    be_quiet_and_repeatable()
    package, make_ready = CONTESTANTS[name]
    about: dict[str, Any] = {"version": version_of(package)}
    model, tokenizer = read_model(folder)
    with open(questions) as file:
        read = json.load(file)
    asked, fit_on = (
        [SourceQuestion(**row, tokenizer=tokenizer) for row in read[part]]
        for part in ("asked", "fit_on")
    )
    counter = TokenForwards(model)
    limit(int(cpu_seconds), counter)
    scores = make_ready(model=model, tokenizer=tokenizer, fit_on=fit_on)
    about["fitting"] = counter.count
    scores(asked[0])  # to warm up
    answer(scores, asked, answers, counter, about)


if __name__ == "__main__":
    main(*sys.argv[1:])
