"""Answer a request of `attribute`: load its model, evaluate losses, and return the attribution.

Place in the flow: request (request.py) → **`run_request`** → an `Attribution` (attribution.py):

    request ─ prompt/encode.py ─ answer_tokens.py ─ layout.py ─┐
              decoys.py ───────────────────────────────────────┴─ trials.py ─ attribution.py

A `LoadedRequest` lays out the prompt, draws decoys, and has losses evaluated. The `Attribution`
that it returns turns them into verdicts. questions.py and cost.py make a `LoadedRequest` of each
question, since all questions share one model.

If the model reasons before it answers, the answer may rest on sentences of the reasoning. Each
sentence that a verdict names is then attributed in turn, as an answer of its own, and so on:

    link         prompt                                     answer
    answer       sources, question, reasoning 1 to n        the answer
    reasoning 2  sources, question, reasoning 1             sentence 2 of the reasoning
    reasoning 1  sources, question                          sentence 1 of the reasoning

A *link* is one row of this table: an answer, or a sentence, with the prompt that precedes it. A
*step* is the attribution of a sentence; the answer's attribution has all of them in `steps`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from olmo_sparsity.analysis.measurement.reading import load
from olmo_sparsity.analysis.scoring.logprobs import ModelLogprobs, logprobs_of
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.models.identity.use import in_use
from olmo_sparsity.models.loaded import LoadedModel, using
from olmo_sparsity.sources.attribution import Attribution
from olmo_sparsity.sources.prompt.answer_tokens import AnswerIds, encode_answer, longest_answer
from olmo_sparsity.sources.prompt.encode import encode_prompt
from olmo_sparsity.sources.prompt.layout import FEWER_SOURCES, Layout, lay_out
from olmo_sparsity.sources.prompt.pieces import SourcePrompt
from olmo_sparsity.sources.reading.reasoning import sentence_spans
from olmo_sparsity.sources.request import AttributeRequest
from olmo_sparsity.sources.verdicts.decoys import draw_decoys, read_decoys
from olmo_sparsity.sources.verdicts.evidence import decoy_rounds
from olmo_sparsity.sources.verdicts.trials import Trials

DEFAULT_MAX_NEW_TOKENS = 256
"""The length limit of a generated answer, unless the user sets one."""

DEFAULT_DECOYS = "builtin:embedded"
"""Prose that this package brings, from which decoys are cut unless the user passes texts."""


def run_request(request: AttributeRequest) -> Attribution:
    """Answer a request: load its model, and return the attribution of its answer."""
    with in_use(request.model):
        return LoadedRequest(load_model_of(request), request).run()


def load_model_of(request: AttributeRequest, *, only_counts: bool = False) -> LoadedModel:
    """Load the model of a request. `only_counts`: nothing will be computed, so a server gets no
    request."""
    return load(
        request.model,
        request.tokenizer,
        request.loading,
        encodes_text=True,
        only_counts=only_counts,
        whole_prompts=True,
        **request.serving.loading,
    )


@dataclass(frozen=True)
class Link:
    """The answer, or a sentence of the reasoning as an answer, with the prompt that precedes it."""

    prompt: SourcePrompt
    answer: AnswerIds


class LaidOutLink(NamedTuple):
    """A link, with the places of its sources and statements."""

    prompt: SourcePrompt
    layout: Layout


@dataclass(frozen=True)
class LoadedRequest:
    """A request whose model is loaded. `run` answers it; `layouts` is what a dry run counts."""

    model: LoadedModel
    request: AttributeRequest
    quiet: bool = False
    """Show no progress."""

    @cached_property
    def _prompt(self) -> SourcePrompt:
        """The sources and the question, without reasoning."""
        return encode_prompt(self.model, self.request)

    @cached_property
    def _max_new_tokens(self) -> int:
        """The length limit of a generated answer. Unless the user has set one, it fits the model's
        positions."""
        limit = self.request.settings.max_new_tokens
        if limit is not None:
            return limit
        if self.model.max_positions is None:
            return DEFAULT_MAX_NEW_TOKENS
        num_free = self.model.max_positions - self._num_positions_of_prompt
        return min(DEFAULT_MAX_NEW_TOKENS, max(num_free, 0) + 1)

    @cached_property
    def _num_positions_of_prompt(self) -> int:
        """The number of positions of the prompt with its reasoning, and of an answer of one token,
        which is no input."""
        (reasoning,) = self.model.encode([self.request.reasoning or ""], follow=True)
        prompt = self._prompt
        return len(prompt.prefix_ids) + len(prompt.ids_before_answer) + len(reasoning)

    def run(self) -> Attribution:
        """Generate the answer unless the request has one, and judge its statements."""
        with using(self.model):
            # A prompt that is too long needs no decoys, so its length comes first.
            self._check_length()
            self._check_decoys()
            answer_link, *sentence_links = self._links(self._encode_answer())
            answer = self._attribute_link("explaining", answer_link)
            steps = self._attribute_reasoning(answer, sentence_links)

        # What the user pays is the answer and all its steps.
        forwards_of_steps = sum(step.token_forwards for step in steps.values())
        token_forwards = answer.token_forwards + forwards_of_steps
        return replace(answer, steps=steps, token_forwards=token_forwards)

    @cached_property
    def layouts(self) -> list[LaidOutLink]:
        """Prompt and layout of the answer, and of each sentence of the reasoning, for counting.
        Nothing is generated: an answer that the model would write is as long as it may become."""
        if self.request.answer is None:
            answer = longest_answer(self._prompt, self._max_new_tokens, self.request.reasoning)
        else:
            answer = self._encode_answer()
        return [
            LaidOutLink(link.prompt, lay_out(link.prompt, link.answer))
            for link in self._links(answer)
        ]

    def _check_length(self) -> None:
        """Raise ConfigError if the model does not support a prompt of this length with its answer,
        which may become as long as the limit that the user has set."""
        num_positions = self._num_positions_of_prompt
        num_generated = self.request.settings.max_new_tokens
        if self.request.answer is not None:
            _ = self.layouts
        elif num_generated is None:
            self.model.check_positions(num_positions, FEWER_SOURCES)
        else:
            remedy = f"lower max_new_tokens={num_generated}, or {FEWER_SOURCES}"
            self.model.check_positions(num_positions + num_generated - 1, remedy)

    def _encode_answer(self) -> AnswerIds:
        """Return the tokens of the answer, which the model generates if the request has none."""
        return encode_answer(
            self._prompt,
            self.request.answer,
            self._max_new_tokens,
            quiet=self.quiet,
            reasoning=self.request.reasoning,
        )

    def _links(self, answer: AnswerIds) -> list[Link]:
        """Return the link of the answer, and then that of each sentence of the reasoning."""
        tokens = answer.reasoning
        spans = sentence_spans(tokens, self.model.tokenizer)
        links = [Link(self._prompt.with_reasoning(tokens, spans), answer)]
        for index, (first, end) in enumerate(spans):
            # Earlier sentences are sources of a sentence, too.
            prompt = self._prompt.with_reasoning(tokens[:first], spans[:index])
            sentence = AnswerIds(pieces=[tokens[first:end]], are_statements=[True])
            links.append(Link(prompt, sentence))
        return links

    # --- decoys, losses and verdicts ------------------------------------------------------------

    def _check_decoys(self) -> None:
        """Raise DataError if there are too few unrelated texts. It is called first, before minutes
        are spent on generating an answer."""
        self._decoy_texts(self._prompt)

    def _decoy_texts(self, prompt: SourcePrompt) -> list[np.ndarray]:
        """Return the unrelated texts of which decoys are cut. Raise DataError if they do not
        suffice for the longest source of the prompt."""
        decoys = self.request.decoys
        return read_decoys(self.model, prompt, DEFAULT_DECOYS if decoys is None else decoys)

    def _attribute_reasoning(
        self, answer: Attribution, sentence_links: Sequence[Link]
    ) -> dict[str, Attribution]:
        """Attribute each sentence of the reasoning on which the answer relies, also through other
        sentences. Return the attributions by the names of the sentences.

        Args:
            answer: The attribution of the answer.
            sentence_links: All sentences of the reasoning, in order.
        """
        steps: dict[str, Attribution] = {}
        waiting = deque(answer.named_sentences)
        while waiting:
            index = waiting.popleft()
            name = f"reasoning {index + 1}"
            if name in steps:
                continue
            step = self._attribute_link(f"explaining {name}", sentence_links[index])
            # All steps share one dictionary, in which a sentence finds the sentences that it relies
            # on.
            steps[name] = replace(step, steps=steps)
            waiting += step.named_sentences
        return steps

    def _attribute_link(self, progress_name: str, link: Link) -> Attribution:
        """Evaluate as many decoys as the verdicts on this answer need, and return its attribution.

        Args:
            progress_name: What the line of progress says.
            link: The answer, or a sentence of the reasoning.
        """
        settings = self.request.settings
        prompt = link.prompt
        decoys = draw_decoys(prompt, self._decoy_texts(prompt), settings.draws, settings.seed)
        layout = lay_out(prompt, link.answer)

        logprobs = logprobs_of(self.model, self.request.loading.batch_tokens)
        forwards_before = logprobs.token_forwards
        if isinstance(logprobs, ModelLogprobs):
            # Computed once here, because most prompts begin with them.
            logprobs.scorer.states(layout.before_question)

        # Most verdicts need fewer rounds; the line of progress then jumps to its end.
        num_rounds = 1 + len(decoy_rounds(settings.draws))
        with Progress(progress_name, num_rounds, "rounds", enabled=not self.quiet) as progress:
            trials = Trials(logprobs, layout, decoys)
            losses = trials.run(settings.rate, progress.update)
            progress.update(num_rounds)

        self._check_sources_are_read(trials, prompt, layout)
        return Attribution(
            prompt=prompt,
            layout=layout,
            settings=settings,
            losses=losses,
            token_forwards=logprobs.token_forwards - forwards_before,
            token_losses=trials.token_losses,
        )

    def _check_sources_are_read(self, trials: Trials, prompt: SourcePrompt, layout: Layout) -> None:
        """Raise DataError if a server has cut sources off the prompt: no statement would rely on
        them, and the verdicts would look sound."""
        if self.model.prompt_model is None:
            return  # A model in this process reads whole prompts, whatever it makes of them.
        unread = trials.unread_sources()
        if unread:
            names = ", ".join(prompt.names[source] for source in unread)
            raise DataError(
                f"{self.model.name} did not read {names}: decoys there change no digit of the "
                f"answer's loss; raise its limit for prompts, here of {len(layout.block.tokens):,} "
                "tokens"
            )
