"""Settle windows, targets and scorer of one explanation, and evaluate its targets.

    EncodedPrompt → Prepared.of → Prepared → .recover(targets) → tables

"Who opened it? Anna Weiss" with at="Anna Weiss", in tokens, and a local window of 2:

    document   Who opened it ? Anna Weiss        spans     [(4, 6)], the target that is named
    windows    long="all", short=2               distant   Who opened | local  it ? | target

A `Prepared` is everything that an explanation needs, read and checked, before anything is computed.
If no target is named, `.blocks_to_search()` returns where target_choice.py looks for large gaps.
The same object evaluates the targets again when the explanation is checked (checking.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.explain.prompt import EncodedPrompt
from olmo_sparsity.analysis.explain.unrelated import unrelated_documents
from olmo_sparsity.analysis.measurement.at import At, find_spans
from olmo_sparsity.analysis.measurement.recovery import recover
from olmo_sparsity.analysis.options import ExplainSettings
from olmo_sparsity.analysis.scoring.replaced import scorer_of
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.windows import LOCAL_OF_ONE_PREDICTION, default_local, long_window
from olmo_sparsity.models.identity.known_identities import check_unchanged, last_identity
from olmo_sparsity.models.identity.model_identity import ModelIdentity
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import Spans
from olmo_sparsity.text.windows import Block, Windows

MAX_WINDOWS = 1024
"""To select targets, at most this many local windows are computed."""

MAX_TOKENS = 2**16
"""To select targets, at most this many tokens are computed of long windows that begin later than
the text. All long windows that begin with the text take one pass over it, which is not limited."""

MAX_PROMPTS = 32
"""To select targets, at most this many local windows are computed where each is a whole prompt."""


@dataclass(frozen=True)
class Prepared:
    """Holds a document, its windows, its targets and a model, and evaluates targets."""

    model: LoadedModel
    scorer: Scorer
    document: Document
    windows: Windows
    settings: ExplainSettings
    spans: Spans | None
    """The targets that the user named, or the answer of a prompt. With None, the tokens with the
    largest gaps become targets."""

    model_identity: ModelIdentity | None = None
    """The identity of the model when this was made, by which a later change is noticed."""

    @property
    def chosen_by_gap(self) -> bool:
        """Return whether targets are chosen by their gaps, and not named."""
        return self.spans is None

    @staticmethod
    def of(
        model: LoadedModel,
        prompt: EncodedPrompt,
        at: At | None,
        settings: ExplainSettings,
        *,
        unrelated: Any,
        batch_tokens: int | None = None,
    ) -> Prepared:
        """Settle windows and targets of a text or prompt.

        Args:
            model: The model.
            prompt: The encoded text, or prompt and answer.
            at: Names of targets in a text; None if none is named.
            settings: The settings of the explanation.
            unrelated: The texts that replace distant tokens, where the interpretation replaces
                them.
            batch_tokens: Tokens of one forward. Default: that of `Scorer`.
        """
        document = Document(np.array(prompt.tokens, dtype=np.int64), tokenizer=model.tokenizer)
        spans: Spans | None = None
        if prompt.answer is not None:
            spans = [prompt.answer]
        elif at is not None:
            spans = find_spans(document, at)
        windows = _windows_of(model, prompt, spans, settings)
        scorer = scorer_of(model, settings, batch_tokens)
        if settings.interpretation.replaces:
            unrelated_text = unrelated_documents(model, unrelated, document)
            controls = Controls(unrelated_text, windows, num_draws=1, seed=settings.seed)
            scorer = scorer.of_document(document, controls)
        return Prepared(
            model=model,
            scorer=scorer,
            document=document,
            windows=windows,
            settings=settings,
            spans=spans,
            model_identity=last_identity(model.model),
        )

    def blocks_to_search(self) -> list[Block]:
        """Return the blocks in which targets are looked for if none is named.

        In a long text, neighbouring targets share windows. A long window that does not begin where
        the text begins takes a pass of its own. If all these windows have more than `MAX_TOKENS`
        tokens, only some of them are taken, evenly spaced.
        """
        tokens = self.document.tokens
        is_replaced = self.settings.interpretation.replaces
        max_blocks = MAX_PROMPTS if is_replaced else MAX_WINDOWS
        stride = math.ceil(len(tokens) / max_blocks)
        max_tokens = self.windows.max_tokens
        if max_tokens is not None:
            # The last target of a block sees stride − 1 tokens more than the first.
            max_tokens = max(self.windows.short + 1, max_tokens - stride + 1)
        blocks = list(replace(self.windows, stride=stride, max_tokens=max_tokens).blocks(tokens))

        blocks_at_start = [block for block in blocks if block.first_distant == 0]
        later_blocks = [block for block in blocks if block.first_distant > 0]
        num_later_tokens = sum(len(block.tokens) for block in later_blocks)
        step = math.ceil(num_later_tokens / MAX_TOKENS)
        if step > 1:
            later_blocks = later_blocks[::step]
            say(f"targets are selected from one in {step} of its later tokens; name others (--at)")
        return blocks_at_start + later_blocks

    def max_num_units(self, spans: Iterable[Sequence[int]]) -> int:
        """Return the number of distant units of the target that has most of them."""
        largest = 0
        for first, _ in spans:
            distant_begin = int(self.windows.first_distant(int(first)))
            distant_end = int(first) - self.windows.short
            units = self.document.units(self.settings.units, distant_begin, distant_end)
            largest = max(largest, len(units))
        return largest

    def recover(
        self, targets: Mapping[str, np.ndarray], controls: Controls | None = None
    ) -> dict[str, pd.DataFrame]:
        """Return the tables of `recover`: losses of targets with 0 to k units, or with 0 to all if
        there are fewer than k.

        Args:
            targets: Distant part → spans of targets, an array of two columns.
            controls: Where unrelated texts come from. Default: none are evaluated.
        """
        settings = self.settings
        # Placebo targets may lie elsewhere, and have fewer units: all get the same ks.
        spans = list(chain(*targets.values()))
        largest_k = min(settings.k, self.max_num_units(spans))
        return recover(
            self.scorer,
            self.document,
            self.windows,
            targets,
            units=settings.units,
            selectors=settings.selector,
            ks=range(largest_k + 1),
            controls=controls,
            seed=settings.seed,
        )

    def check_model_unchanged(self) -> None:
        """Raise DataError if the model is not what it was when the explanation was prepared."""
        check_unchanged(self.scorer.model, self.model_identity, "explain")

    def without_model(self) -> Prepared:
        """Return a copy without weights, which is stored with an explanation: it is enough to show
        the explanation, and not to compute it again."""
        model = self.model.without_weights()
        # Only a stored explanation lacks these two, so their types do not allow None.
        return replace(self, model=model, scorer=None, model_identity=None)  # type: ignore[arg-type] # see above


def _windows_of(
    model: LoadedModel, prompt: EncodedPrompt, spans: Spans | None, settings: ExplainSettings
) -> Windows:
    """Return windows for the targets, which fit the positions that the model takes. Raise
    ConfigError if none do.

    Args:
        model: The model.
        prompt: The text.
        spans: The targets. None if they are single tokens, anywhere in the text.
        settings: The options `long` and `short` are read.
    """
    last_end = len(prompt.tokens)
    longest_target = 1
    if spans:
        last_end = max(end for _, end in spans)
        longest_target = max(end - first for first, end in spans)

    windows = Windows(
        long="all",
        short=_local_window_of(prompt) if settings.short is None else settings.short,
        prefix=tuple(prompt.prefix_ids),
        max_tokens=long_window(settings.long).max_length,
    )
    if model.max_positions is not None:
        longest = _longest_window(model, model.max_positions, windows, longest_target)
        is_text_longer = last_end - longest_target > longest
        if is_text_longer and longest < (windows.max_tokens or math.inf):
            say(f"the text is longer than the model takes: long windows of {longest:,} tokens")
            windows = replace(windows, max_tokens=longest)
    windows.check()
    model.check_positions(replace(windows, stride=longest_target).num_positions(last_end))
    return windows


def _local_window_of(prompt: EncodedPrompt) -> int:
    """Return the default size of the local window, in tokens."""
    num_before_target = prompt.answer[0] if prompt.answer else len(prompt.tokens)
    local = default_local(LOCAL_OF_ONE_PREDICTION, num_before_target)
    # What a chat template puts after the prompt is never distant.
    return max(prompt.num_closing, local)


def _longest_window(
    model: LoadedModel, max_positions: int, windows: Windows, longest_target: int
) -> int:
    """Return the largest number of tokens of a long window for which the model has positions. Raise
    ConfigError if no distant token would be among them."""
    # Prefix, long window and target share the positions. The last token of a target is only
    # predicted, and needs none.
    longest = max_positions - len(windows.prefix) - longest_target + 1
    if longest <= windows.short:
        raise ConfigError(
            f"prefix ({len(windows.prefix):,} tokens), local window (short={windows.short}) and "
            f"target ({longest_target:,}) need more than the {max_positions:,} positions "
            f"of '{model.name}'; pass shorter ones, or lower short"
        )
    return longest
