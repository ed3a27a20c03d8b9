"""Choose the targets of an explanation: those that the user named, or those with the largest gaps.

    Prepared (with spans, or None) → `choose_targets` → spans, such as [(61, 63), (70, 71)]

answer.py calls it before anything is evaluated. Targets without distant units are left out, as
there is nothing to rank.
"""

from __future__ import annotations

from dataclasses import replace

from olmo_sparsity.analysis.explain.evaluation import LOSSES
from olmo_sparsity.analysis.explain.largest_gaps import first_place_with_units, largest_gaps
from olmo_sparsity.analysis.explain.prepared import Prepared
from olmo_sparsity.analysis.measurement.enough_text import SMALLER_UNITS
from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.scoring.tensors import check_finite
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.text.units import Spans


def choose_targets(prepared: Prepared) -> Spans:
    """Return the named targets, or else those with the largest gaps, without targets that have no
    distant units. Tell the user which are left out, and raise DataError if all are."""
    units = prepared.settings.units
    first_with_units = first_place_with_units(prepared.windows, units)
    spans = prepared.spans
    if spans is None:
        spans = _spans_of_largest_gaps(prepared, first_with_units)
    spans = _longest_of_each_start(spans)

    with_distant = [(first, end) for first, end in spans if first >= first_with_units]
    if not with_distant:
        raise DataError(
            f"no target has distant {units}, which begin at token {first_with_units:,} of "
            f"{len(prepared.document.tokens):,}; {_remedy_of_no_units(prepared, spans)}"
        )
    _check_num_units(prepared, with_distant)
    if len(with_distant) < len(spans):
        say(
            f"{len(spans) - len(with_distant)} of {len(spans)} targets precede token "
            f"{first_with_units:,} and "
            f"have no distant {units}: left out"
        )
    return with_distant


def _remedy_of_no_units(prepared: Prepared, spans: Spans) -> str:
    """Return what to do if no target has distant units. `spans`: the targets; if there are none,
    the last token of the text would be one."""
    windows = prepared.windows
    units = prepared.settings.units
    last_target = max((first for first, _ in spans), default=len(prepared.document.tokens) - 1)
    if last_target >= first_place_with_units(replace(windows, short=1), units):
        return f"lower short={windows.short}"
    return "name later targets, or pass a longer text" + (
        "" if units == "tokens" else ", or smaller units"
    )


def _spans_of_largest_gaps(prepared: Prepared, first_with_units: int) -> Spans:
    """Return the tokens with the largest gaps, among those that have distant units."""
    losses = context_losses(
        prepared.scorer, prepared.document, prepared.windows, blocks=prepared.blocks_to_search()
    )
    check_finite(losses[LOSSES].to_numpy(), "targets")
    losses = losses[losses.target >= first_with_units]
    spans = largest_gaps(losses)
    if prepared.max_num_units(spans) != 1 or _num_units_before(prepared, losses.target.max()) == 1:
        return spans
    # All of them have one distant unit, so there is nothing to rank. Later targets have more.
    nums_units = losses.target.map(lambda target: _num_units_before(prepared, target))
    return largest_gaps(losses[nums_units > 1])


def _num_units_before(prepared: Prepared, target: int) -> int:
    """Return the number of distant units of a target of one token."""
    return prepared.max_num_units([(target, target + 1)])


def _longest_of_each_start(spans: Spans) -> Spans:
    """Return the spans in order; of those with one first token, only the longest. Tables tell
    targets apart by their first tokens: (5, 6) and (5, 8) would be one target."""
    # The spans are sorted, so a dict keeps the last end of each first token.
    longest_end = dict(sorted(spans))
    return list(longest_end.items())


def _check_num_units(prepared: Prepared, spans: Spans) -> None:
    """Raise DataError if there is only one distant unit, and tell the user if there are fewer than
    k."""
    settings = prepared.settings
    num_units = prepared.max_num_units(spans)
    if num_units == 1 and settings.units == "tokens":
        raise DataError(
            "the distant text is one token, so there is nothing to rank; lower "
            f"short={prepared.windows.short}, or name later targets"
        )
    if num_units == 1:
        raise DataError(
            f"units={settings.units}: the distant text is one of them, so there is nothing to "
            f"rank; {SMALLER_UNITS}"
        )
    if settings.k > num_units:
        say(
            f"k={settings.k:,} is more than the {num_units:,} distant {settings.units}, "
            "which are all shown"
        )
