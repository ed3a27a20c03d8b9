"""Answer a call of `explain`: read model and text, choose targets, and evaluate them.

    ExplainRequest → `_prepared` → Prepared, and the targets → `_answer` → Explanation

`explain` and `count_cost` are the entry points. Both prepare the same; `count_cost` then evaluates
the targets with a scorer that counts token-forwards and computes nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from olmo_sparsity.analysis.explain.check import compare_with_unrelated
from olmo_sparsity.analysis.explain.evaluation import LOSSES, evaluate_targets
from olmo_sparsity.analysis.explain.explanation import Explanation
from olmo_sparsity.analysis.explain.prepared import Prepared
from olmo_sparsity.analysis.explain.prompt import Prompt
from olmo_sparsity.analysis.explain.text_file import read_text
from olmo_sparsity.analysis.measurement.at import At
from olmo_sparsity.analysis.measurement.enough_text import SMALLER_UNITS
from olmo_sparsity.analysis.measurement.reading import load
from olmo_sparsity.analysis.measurement.targets import first_target_place, largest_gaps
from olmo_sparsity.analysis.options import ExplainSettings, ModelOptions, Request
from olmo_sparsity.analysis.scoring.cost import Cost, counting
from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.scoring.induction import losses_of_repetition
from olmo_sparsity.analysis.scoring.sink import sink_check
from olmo_sparsity.analysis.scoring.tensors import check_finite
from olmo_sparsity.analysis.selectors.influence import find_selector
from olmo_sparsity.base.errors import ConfigError, DataError, check_encodable
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.models.identity.use import in_use
from olmo_sparsity.models.loaded import using
from olmo_sparsity.text.units import Spans

DECODE = "decode token IDs first, with tokenizer.decode(ids)"
"""The advice of an error to a user who passed token IDs in place of text."""


@dataclass(frozen=True, kw_only=True)
class ExplainRequest(Request):
    """A call of `explain`, or of its command."""

    model: Any
    tokenizer: Any = None
    text: str | Path | None = None
    at: At | None = None
    prompt: str | None = None
    target: str | None = None
    unrelated: Any = "builtin:embedded"
    settings: ExplainSettings = field(default_factory=ExplainSettings)
    loading: ModelOptions = field(default_factory=ModelOptions)

    def checked(self) -> Self:
        """Return the request if its options are right and go together."""
        settings = self.settings
        settings.check()
        find_selector(settings.selector, settings.interpretation)
        self._check_text_or_prompt()
        self._check_strings()
        if settings.chat and self.loading.prefix != "auto":
            raise ConfigError(f"prefix={self.loading.prefix} cannot be combined with chat=True")
        return self

    def _check_text_or_prompt(self) -> None:
        """Raise ConfigError unless there is either a text or a prompt, with no options of the
        other."""
        if (self.text is None) == (self.prompt is None):
            raise ConfigError("pass either text= or prompt=, not both and not neither")
        if self.text == "":
            raise ConfigError("text is empty; pass a text with distant tokens and a target")
        if self.prompt == "":
            raise ConfigError("prompt is empty; pass a prompt with distant tokens")
        has_options_of_text = self.at is not None
        has_options_of_prompt = self.target is not None or self.settings.chat
        if (self.text is None and has_options_of_text) or (
            self.prompt is None and has_options_of_prompt
        ):
            raise ConfigError("`at` names places of a text; `target` and `chat` belong to a prompt")
        generates = self.prompt is not None and self.target is None
        if self.settings.max_new_tokens is not None and not generates:
            raise ConfigError("max_new_tokens limits a generated answer, and none is generated")

    def _check_strings(self) -> None:
        """Raise ConfigError if a text is not a string, or is the name of a file."""
        for name, value in (("prompt", self.prompt), ("target", self.target)):
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name}={value!r:.80} must be a string; {DECODE}")
        text = self.text
        if text is not None and not isinstance(text, str | Path):
            raise ConfigError(f"text={text!r:.80} must be a string, or a Path to a file; {DECODE}")
        for name, words in (("text", text), ("prompt", self.prompt), ("target", self.target)):
            if isinstance(words, str):
                check_encodable(words, name)
        if isinstance(text, str) and os.path.isfile(text):
            raise ConfigError(f"text={text} is a file name; pass Path('{text}') or its text")


MANY_DISTANT = 4096
"""With more distant tokens, a cheaper selector is recommended."""


def explain(request: ExplainRequest) -> Explanation:
    """Answer a request: return the targets with their distant units."""
    with in_use(request.model), _prepared(request) as (prepared, spans):
        return _answer(prepared, spans, request.unrelated)


def count_cost(request: ExplainRequest, with_check: bool = False) -> Cost:
    """Return what answering a request costs. `with_check`: include the cost of checking the
    answer."""
    with _prepared(request) as (prepared, spans):
        cost = count(prepared, spans, request.unrelated if with_check else None)
        return replace(cost, seconds=_seconds(prepared, cost))


TRIED_TOKENS = 64
"""The number of tokens of the passage with which the speed of the model is tried."""


def _seconds(prepared: Prepared, cost: Cost) -> float | None:
    """Return about how many seconds the counted token-forwards take on this machine, by the time of
    a passage and its repetition. Return None for distant_states="replaced", where the model may
    compute elsewhere."""
    if prepared.settings.interpretation.replaces:
        return None
    passage = prepared.document.tokens[:TRIED_TOKENS]
    for _ in range(2):  # the first forward is slower
        forwards_before = prepared.scorer.token_forwards
        began = time.perf_counter()
        losses_of_repetition(prepared.scorer, [passage])
        seconds = time.perf_counter() - began
    num_forwards = prepared.scorer.token_forwards - forwards_before
    return cost.token_forwards * seconds / num_forwards


@contextmanager
def _prepared(request: ExplainRequest) -> Iterator[tuple[Prepared, Spans]]:
    """Read the model and the text, and yield what is prepared for an explanation, and its targets.
    The model stays in use until the caller is done."""
    settings = request.settings
    loading = request.loading
    text = request.text
    if isinstance(text, Path):
        text = read_text(str(text))
    replaces = settings.interpretation.replaces
    loaded = load(request.model, request.tokenizer, loading, is_read=True, whole_prompts=replaces)
    with using(loaded):
        if text is not None:
            prompt = Prompt.of_text(loaded, text, loading.prefix)
        else:
            prompt = Prompt.with_answer(
                loaded, str(request.prompt), request.target, loading.prefix, settings
            )
        prepared = Prepared.of(
            loaded,
            prompt,
            request.at,
            settings,
            unrelated=request.unrelated,
            batch_tokens=loading.batch_tokens,
        )
        yield prepared, _targets_with_distant_part(prepared)


def _targets_with_distant_part(prepared: Prepared) -> Spans:
    """Return the named targets, or else those with the largest gaps, without targets that have no
    distant units. Tell the user which are left out, and raise DataError if all are."""
    document = prepared.document
    windows = prepared.windows
    units = prepared.settings.units
    first_with_units = first_target_place(windows, units)
    spans = prepared.spans
    if spans is None:
        blocks = prepared.blocks_to_select()
        losses = context_losses(prepared.scorer, document, windows, blocks=blocks)
        check_finite(losses[LOSSES].to_numpy(), "targets")
        spans = largest_gaps(losses[losses.target >= first_with_units])

    # Tables tell targets apart by their first tokens, so of spans with one first token the longest
    # is kept: a dict of the sorted spans keeps the last end of each.
    longest_end = dict(sorted(spans))
    spans = list(longest_end.items())
    with_distant = [(first, end) for first, end in spans if first >= first_with_units]
    if not with_distant:
        raise DataError(
            f"no target has distant {units}, which begin at token {first_with_units:,} of "
            f"{len(document.tokens):,}; lower short={windows.short}"
        )
    num_units = prepared.max_num_units(with_distant)
    if num_units == 1:
        raise DataError(
            f"units={units}: the distant text is one of them, so there is nothing to rank; "
            f"{SMALLER_UNITS}"
        )
    if prepared.settings.k > num_units:
        say(
            f"k={prepared.settings.k:,} is more than the {num_units:,} distant {units}, "
            "which are all shown"
        )
    if len(with_distant) < len(spans):
        say(
            f"{len(spans) - len(with_distant)} of {len(spans)} targets precede token "
            f"{first_with_units:,} and "
            f"have no distant {units}: left out"
        )
    return with_distant


def count(prepared: Prepared, spans: Spans, unrelated: Any = None) -> Cost:
    """Count what evaluating the targets costs. `unrelated`: texts against which they are checked;
    the check is then counted, too."""
    scorer = counting(prepared.scorer)
    counted = replace(prepared, scorer=scorer)
    with in_use(scorer.model):
        evaluated = evaluate_targets(counted, spans)
        if unrelated is not None:
            compare_with_unrelated(counted, evaluated.targets, unrelated)
    return Cost(scorer.token_forwards, prepared.model.num_parameters)


def _answer(prepared: Prepared, spans: Spans, unrelated: Any) -> Explanation:
    """Evaluate the targets, show progress, and check whether the model needs a prefix. Return the
    explanation. `unrelated`: the texts that a later check draws from."""
    settings = prepared.settings
    windows = prepared.windows
    last_target = max(first for first, _ in spans)  # it has the longest distant context
    num_distant = windows.tokens_before(last_target) - windows.short
    evaluates_every = find_selector(settings.selector).evaluates_every_unit
    if evaluates_every and num_distant > MANY_DISTANT:
        say(
            f"selector={settings.selector} evaluates {num_distant:,} distant tokens; "
            "add_one_nested a few hundred"
        )

    scorer = prepared.scorer
    forwards_before = scorer.token_forwards
    # The total is unknown for rules that evaluate few units: which ones depends on losses, and the
    # count has none.
    total = count(prepared, spans).token_forwards if evaluates_every else None
    with Progress("explaining", total, "token-forwards") as progress:
        scorer.after_batch = lambda: progress.update(scorer.token_forwards - forwards_before)
        evaluated = evaluate_targets(prepared, spans)
    scorer.after_batch = lambda: None
    check_finite(evaluated.targets[LOSSES].to_numpy(), "targets")
    token_forwards = scorer.token_forwards  # without those of the sink check

    sink: dict[str, Any] = {}
    if not windows.prefix and settings.interpretation.keeps_states:
        line_break = prepared.model.encode(["\n"])[0]
        sink = sink_check(scorer, [prepared.document], prefix=(), tried_prefix=line_break)
    return Explanation(
        prepared=prepared,
        targets=evaluated.targets,
        distant=evaluated.distant,
        tables=evaluated.tables,
        unrelated=unrelated,
        sink=sink,
        token_forwards=token_forwards,
    )
