"""Describe what a reader must know about the numbers of a measurement, in sentences.

    describe_losses(results)       "losses, 3,200 tokens of 10 measured documents: L_short 3.512, …"
    describe_intervals(row, True)  "intervals: 95%, by a bootstrap over documents"
    describe_noise(meta.model)     "" if there is nothing to say

Each `describe_…` is about one thing: the text and its losses, the gaps, the intervals, and what
makes numbers doubtful, such as a model that does not copy. summary.py prints these texts in a
terminal, and report.py writes them on the page. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.interpretation import Interpretation
from olmo_sparsity.analysis.results.doubts import INDUCTION_SHARE, describe_few, warnings_of_few
from olmo_sparsity.analysis.results.intervals import BOOTSTRAP
from olmo_sparsity.analysis.results.meta import main_set
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.student_t import FEW_FOR_BOOTSTRAP
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, KEYS, losses_of_targets
from olmo_sparsity.analysis.results.view import num_of

LOUD_NOISE = 0.02
"""Nats of noise from other rows of a batch; above, the summary reports it."""

INTERVALS = (
    f"Intervals are {BOOTSTRAP}. With fewer than {FEW_FOR_BOOTSTRAP} documents of targets or of "
    "placebo targets, those of net excess are by Student's t."
)
"""The sentence about intervals on the page and in docs/measure.md. For one table,
`describe_intervals` says which of the two kinds it has."""


# --- the text and its losses ----------------------------------------------------------------------


def describe_parts(results: Results) -> str:
    """Return how many documents were split into how many parts, and which of the two are
    counted."""
    total = sum(map(len, results.parts.values()))
    return (
        f"{num_of(len(results.parts), 'document')} in {num_of(total, 'part')} (--split-long). Rows "
        "of targets count whole documents, and their intervals resample whole documents; lines of "
        "losses count parts. Unrelated texts come from other documents"
    )


def describe_losses(results: Results) -> str:
    """Describe the losses of all measured tokens."""
    ppl = results.meta.longppl
    key_tokens = "no key tokens"
    if ppl["longppl"] is not None:
        key_tokens = f"LongPPL {ppl['longppl']:.2f}"
    losses = "losses"
    if results.meta.targets.get("only_named"):
        losses = "losses of named targets' blocks"
    table = results.losses
    documents = num_of(table.document.nunique(), "measured document")
    halves = ", both halves" if results.meta.targets.get("threshold") is not None else ""
    # The mean gap is in the line of the reported documents alone, as in the figure.
    return (
        f"{losses}, {len(table):,} tokens of {documents}{halves}: L_short "
        f"{table.loss_short.mean():.3f}, perplexity {ppl['ppl']:.2f}, {key_tokens} "
        f"({ppl['key_share']:.2%} of these tokens)"
    )


def describe_gap(results: Results) -> str:
    """Describe the gaps of the chosen targets, of all targets, and with an unrelated text."""
    rows = results.reported
    if not len(rows):
        return "no target is reported"
    gap = rows.loss_short - rows.loss_long
    placebo_gap = rows.loss_short - rows.placebo_loss_long
    threshold = results.meta.targets.get("threshold")
    if threshold is None:
        half = "reported"
        chosen_gap = _gaps_of_evaluated_targets(results)
        chosen_by = "evaluated"
        by_placebo = ""
    else:
        half = "reported half"
        # All targets that pass the threshold, evaluated or not.
        chosen_gap = gap[gap >= threshold]
        chosen_by = "of largest gap"
        placebo_share = (placebo_gap >= threshold).mean()
        by_placebo = (
            f"; an unrelated text gains as much ({threshold:.2f} nats) on {placebo_share:.1%}"
        )
    # Sums are over the measured tokens; divided by the sampled fraction, they estimate those of all
    # tokens.
    sample = results.meta.windows.get("sample", 1.0)
    estimated = f", estimated from a sample of {sample:.1%}," if sample < 1 else ""
    return (
        f"{half}, {len(rows):,} tokens of {num_of(rows.document.nunique(), 'document')}: mean gap "
        f"{gap.mean():+.3f} nats; in total{estimated} distant text "
        f"{_describe_change(gap.sum() / sample)}, an unrelated text "
        f"{_describe_change(placebo_gap.sum() / sample)}; the {len(chosen_gap) / len(rows):.1%} "
        f"{chosen_by} gain {chosen_gap.sum() / sample:+,.0f}{by_placebo}"
    )


def _gaps_of_evaluated_targets(results: Results) -> pd.Series:
    """Return the gaps of the targets of the main set, in nats."""
    targets = results.targets[results.targets.distant_part == DOCUMENT]
    main_targets = targets[targets.target_set == main_set(targets.target_set)]
    losses = losses_of_targets(results.losses, main_targets).merge(main_targets[KEYS], on=KEYS)
    return losses.loss_short - losses.loss_long


def _describe_change(nats: float) -> str:
    """Return what a text does to the loss, as words. The loss falls by `nats`, or rises if they are
    below 0."""
    changes = "reduces" if nats >= 0 else "raises"
    return f"{changes} the loss by {abs(nats):,.0f} nats"


# --- what makes numbers doubtful ------------------------------------------------------------------


def describe_intervals(row: Any, shows_net: bool) -> str:
    """Return which intervals a table has, as words: by a bootstrap, by Student's t, or none.

    Args:
        row: A row of the summary.
        shows_net: Whether the table shows net excess, which has an interval only if the placebo has
            enough targets.
    """
    warnings = warnings_of_few(row, shows_net)
    if describe_few(row, shows_net):
        return "; ".join(warnings)
    text = f"intervals: {BOOTSTRAP}"
    num_documents = row.num_documents
    if shows_net:
        num_documents = min(num_documents, row.num_placebo_documents)
        if num_documents < FEW_FOR_BOOTSTRAP:
            text += f"; of net excess by Student's t, over {num_documents} documents"
    return "; ".join([text, *warnings])


def describe_placebo(row: Any) -> str:
    """Return the number of placebo targets, and of their documents."""
    documents = num_of(row.num_placebo_documents, "document")
    return f"{row.num_placebo_targets:,} of the placebo in {documents}"


def describe_noise(model: Mapping[str, Any]) -> str:
    """Return a warning if losses depend on the other rows of a batch, or an empty text if they
    hardly do.

    Args:
        model: The section of meta.json.
    """
    nats = model.get("batch_noise", 0.0)
    if nats < LOUD_NOISE:
        return ""
    return (
        f"this model's losses change by up to {nats:.2f} nats with the other rows of a batch; "
        "smaller differences mean nothing"
    )


def describe_induction(check: Mapping[str, Any], interpretation: Interpretation) -> str:
    """Describe the result of the induction check, and its consequence for the measurement.

    Args:
        check: An `InductionCheck`.
        interpretation: What the measurement does with distant states.
    """
    lines = [
        f"induction: loss {check['loss_first']:.2f} on a passage, {check['loss_repeated']:.2f} "
        f"when it is repeated, a drop of {check['drop']:.2f} nats "
        f"({check['drop'] / max(check['loss_first'], 1e-9):.0%})"
    ]
    if not check["has_induction"]:
        lines += [
            f"  below {INDUCTION_SHARE:.0%}: this model copies little from its context. Copying",
            "  is most of what distant tokens give to models of text: read nats, not shares alone",
        ]
    elif interpretation.shows_alone:
        lines += [
            "  this model copies; a single distant token that is shown alone has no states of the",
            "  tokens before it: measure with spans (span:4), or contextual distant states, too",
        ]
    return "\n".join(lines)


def describe_sink(check: Mapping[str, Any]) -> str:
    """Return a warning if the measured model needs a prefix and had none, or an empty text.

    Args:
        check: A `SinkCheck`, or an empty mapping if none was made.
    """
    if not check.get("needs_prefix"):
        return ""
    return (
        f"warning: no prefix precedes the windows, and any distant token raises this model's loss "
        f"by {check['harm']:.2f} nats ({check['harm_with_prefix']:+.2f} after a line break): the "
        r"numbers below are distorted; measure again with --prefix '\n'"
    )
