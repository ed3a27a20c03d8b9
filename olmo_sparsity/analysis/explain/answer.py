"""Answer a request of `explain`: read model and text, choose targets, and evaluate them.

    ExplainRequest
      ↓ `_prepare`: load the model, encode the text        (reading.py, prompt.py, prepared.py)
                    choose targets                         (target_choice.py)
    Prepared, targets
      ↓ `_answer`: rank units, compute losses              (evaluation.py)
                   check whether the model needs a prefix  (scoring/sink.py)
    Explanation

`explain` and `count_cost` are the entry points; api.py and the command call them. Both prepare the
same. `count_cost` then evaluates the targets with a scorer that counts token-forwards and computes
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from olmo_sparsity.analysis.explain.checking import compare_with_unrelated
from olmo_sparsity.analysis.explain.evaluation import LOSSES, EvaluatedTargets, evaluate_targets
from olmo_sparsity.analysis.explain.explanation import Explanation
from olmo_sparsity.analysis.explain.prepared import Prepared
from olmo_sparsity.analysis.explain.prompt import EncodedPrompt
from olmo_sparsity.analysis.explain.request import ExplainRequest
from olmo_sparsity.analysis.explain.target_choice import choose_targets
from olmo_sparsity.analysis.explain.text_file import read_text
from olmo_sparsity.analysis.measurement.reading import load
from olmo_sparsity.analysis.scoring.cost import Cost, counting_scorer
from olmo_sparsity.analysis.scoring.induction import losses_of_repetition
from olmo_sparsity.analysis.scoring.sink import sink_check
from olmo_sparsity.analysis.scoring.tensors import check_finite
from olmo_sparsity.analysis.selectors.influence import find_selector
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.identity.use import in_use
from olmo_sparsity.models.loaded import LoadedModel, using
from olmo_sparsity.text.units import Spans

MANY_DISTANT = 4096
"""With more distant tokens, a cheaper selector is recommended."""

TRIED_TOKENS = 64
"""The number of tokens of the passage with which the speed of the model is tried."""


def explain(request: ExplainRequest) -> Explanation:
    """Answer a request: return the targets with their distant units."""
    with in_use(request.model), _prepare(request) as (prepared, targets):
        return _answer(prepared, targets, request.unrelated)


def count_cost(request: ExplainRequest, with_check: bool = False) -> Cost:
    """Return the cost of answering a request, and of checking the answer if `with_check`."""
    with _prepare(request) as (prepared, targets):
        checked_against = request.unrelated if with_check else None
        cost = count_evaluation(prepared, targets, checked_against)
        return replace(cost, seconds=_estimate_seconds(prepared, cost))


# --- prepare --------------------------------------------------------------------------------------


class _PreparedTargets(NamedTuple):
    """A text that is ready to be evaluated, and its targets."""

    prepared: Prepared
    targets: Spans


@contextmanager
def _prepare(request: ExplainRequest) -> Iterator[_PreparedTargets]:
    """Read the model and the text, and choose the targets. The model stays in use until the caller
    is done."""
    # The file first: an error in its name should not wait for the model.
    text = read_text(str(request.text)) if isinstance(request.text, Path) else request.text
    # Where unrelated text replaces distant text, losses are those of whole prompts.
    is_replaced = request.settings.interpretation.replaces
    model = load(
        request.model,
        request.tokenizer,
        request.loading,
        encodes_text=True,
        whole_prompts=is_replaced,
    )
    with using(model):
        prepared = Prepared.of(
            model,
            _encode(request, text, model),
            request.at,
            request.settings,
            unrelated=request.unrelated,
            batch_tokens=request.loading.batch_tokens,
        )
        yield _PreparedTargets(prepared, choose_targets(prepared))


def _encode(request: ExplainRequest, text: str | None, model: LoadedModel) -> EncodedPrompt:
    """Encode the text of a request; without a text, its prompt with the answer."""
    prefix = request.loading.prefix
    if text is not None:
        return EncodedPrompt.of_text(model, text, prefix)
    return EncodedPrompt.with_answer(
        model, str(request.prompt), request.target, prefix, request.settings
    )


# --- evaluate -------------------------------------------------------------------------------------


def _answer(prepared: Prepared, targets: Spans, unrelated: Any) -> Explanation:
    """Evaluate the targets, and check whether the model needs a prefix.

    Args:
        prepared: The text.
        targets: Its targets.
        unrelated: The texts that a later check draws from.
    """
    scorer = prepared.scorer
    evaluated = _rank_and_evaluate(prepared, targets)
    check_finite(evaluated.targets[LOSSES].to_numpy(), "targets")
    token_forwards = scorer.token_forwards  # without those of the sink check

    sink: dict[str, Any] = {}
    if not prepared.windows.prefix and prepared.settings.interpretation.keeps_states:
        line_break = prepared.model.encode(["\n"])[0]
        sink = dict(sink_check(scorer, [prepared.document], prefix=(), tried_prefix=line_break))
    return Explanation(
        prepared=prepared,
        targets=evaluated.targets,
        distant=evaluated.distant,
        tables=evaluated.tables,
        unrelated=unrelated,
        sink=sink,
        token_forwards=token_forwards,
    )


def _rank_and_evaluate(prepared: Prepared, targets: Spans) -> EvaluatedTargets:
    """Rank the units of the targets, compute their losses, and show progress meanwhile. Recommend a
    cheaper selector if this one takes long."""
    selector = prepared.settings.selector
    evaluates_every_unit = find_selector(selector).evaluates_every_unit
    last_target = max(first for first, _ in targets)  # it has the longest distant context
    num_distant = prepared.windows.tokens_before(last_target) - prepared.windows.short
    if evaluates_every_unit and num_distant > MANY_DISTANT:
        say(
            f"selector={selector} evaluates {num_distant:,} distant tokens; "
            "add_one_nested a few hundred"
        )

    # The total is unknown for rules that evaluate few units: which ones depends on losses, and a
    # scorer that counts has none.
    total = None
    if evaluates_every_unit:
        total = count_evaluation(prepared, targets).token_forwards
    with prepared.scorer.showing_progress("explaining", total):
        return evaluate_targets(prepared, targets)


# --- cost -----------------------------------------------------------------------------------------


def count_evaluation(prepared: Prepared, targets: Spans, checked_against: Any = None) -> Cost:
    """Count what evaluating the targets costs, without running the model.

    Args:
        prepared: The text.
        targets: Its targets.
        checked_against: Unrelated texts with which the targets are checked. The check is counted,
            too, then. Default: no check.
    """
    scorer = counting_scorer(prepared.scorer)
    counted = replace(prepared, scorer=scorer)
    with in_use(scorer.model):
        evaluated = evaluate_targets(counted, targets)
        if checked_against is not None:
            compare_with_unrelated(counted, evaluated.targets, checked_against)
    return Cost(scorer.token_forwards, prepared.model.num_parameters)


def _estimate_seconds(prepared: Prepared, cost: Cost) -> float | None:
    """Return about how many seconds the counted token-forwards take on this machine, by the time of
    a passage and its repetition. Return None for distant_states="replaced", where the model may
    compute elsewhere."""
    if prepared.settings.interpretation.replaces:
        return None
    passage = prepared.document.tokens[:TRIED_TOKENS]
    for _ in range(2):  # the first forward is slower, so the second one counts
        forwards_before = prepared.scorer.token_forwards
        began_s = time.perf_counter()
        losses_of_repetition(prepared.scorer, [passage])
        tried_s = time.perf_counter() - began_s
    num_forwards = prepared.scorer.token_forwards - forwards_before
    return cost.token_forwards * tried_s / num_forwards
