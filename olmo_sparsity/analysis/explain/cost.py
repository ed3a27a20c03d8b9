"""Count what an explanation costs, without running it.

Place in the flow: below `estimate_cost(explain, …)`.
"""

from __future__ import annotations

from olmo_sparsity.analysis.explain.prompt import Asked
from olmo_sparsity.analysis.inputs.windows import Spans
from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.analysis.selectors.selector import Rows, find_selector


def count_explanation(asked: Asked, spans: Spans) -> Cost:
    """For a rule that evaluates every unit; others cost less. A check costs as much for each
    unrelated text."""
    settings, windows = asked.settings, asked.windows
    is_contextual, total, longest = settings.far_states == "contextual", 0, 0
    for first, end in spans:
        block = windows.block(asked.document.tokens, first, end)
        units = asked.document.units(settings.units, block.first, block.first + block.num_far)
        widths, near = units.end - units.first, len(block.near())
        longest = max(longest, block.num_prefix + block.num_far)
        width, every = 0.0, near
        if not is_contextual:
            width, every = float(widths.mean()), near + block.num_prefix + block.num_far
            near += block.num_prefix
        row = near + width
        rows = Rows(row, every, width, len(units), settings.k)
        total += int(find_selector(settings.selector).cost(rows))
        # The long window, the first 0 … k units, without them, and each alone.
        total += int(every * (settings.k + 1) + row * (2 * settings.k + 1))
    total += longest if is_contextual else 0
    return Cost(total, asked.model.num_parameters)
