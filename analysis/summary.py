"""What a finished measurement says, in words and one table.

Place in the flow: results → **for people**. Never imports torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.results import Results, main_set

LSD_NATS, LCL_NATS = 2.0, 2.0
"""LongPPL (Fang et al. 2024): a token is key when the long context lowers its loss by more than the
first and leaves less than the second."""


FEW_DOCUMENTS = 10

FEW_NATS = 0.1

INDUCTION_NATS = 1.0
"""Drop in loss on a repeated passage from which on a model is said to have induction."""

FAR_STATES = {"isolated": "shown alone", "contextual": "with their context"}
"""In words, what a chosen far token is to the window."""

LEARNED_NATS = 0.5
"""What planted tokens must be worth to a model that is asked where they are."""


def longppl(losses: pd.DataFrame) -> dict[str, float | int | None]:
    """Of all targets together; the paper's package averages over one text at a time."""
    gap = losses.loss_short - losses.loss_long
    key = losses.loss_long[(gap > LSD_NATS) & (losses.loss_long < LCL_NATS)]
    return {
        "key_share": len(key) / len(losses),
        "num_key_tokens": len(key),
        "longppl": float(np.exp(key.mean())) if len(key) else None,
        "ppl": float(np.exp(min(losses.loss_long.mean(), 700))),
    }


def describe(results: Results) -> str:
    meta, summary = results.meta, results.summary
    gate, windows, long = meta["gate"], meta["windows"], meta["longppl"]
    lines = [
        f"{meta['model']['name']} on {meta['data']['source']}: long {windows['long']}, short "
        f"{windows['short']}, stride {windows['stride']}, far tokens "
        f"{FAR_STATES[windows['far_states']]}",
    ]
    name = main_set(summary.target_set)
    lines.append(describe_gate(gate, windows["far_states"], name == "planted"))
    key = "no key tokens" if long["longppl"] is None else f"LongPPL {long['longppl']:.2f}"
    gap = results.losses.loss_short - results.losses.loss_long
    lines += [
        f"losses: L_short {results.losses.loss_short.mean():.3f}, mean gap {gap.mean():+.3f}, "
        f"perplexity {long['ppl']:.2f}, {key} ({long['key_share']:.2%} of {len(gap):,} targets)",
    ]
    if name is None:
        return "\n".join(lines)
    one = summary[summary.target_set == name].iloc[0]
    lines.append(
        f"{one.num_targets:,} targets in {one.num_documents:,} documents, mean gap "
        f"{one.gap:.2f} nats"
    )
    if one.gap < FEW_NATS:
        lines.append(
            f"  below {FEW_NATS} nats ratios to the gap say little; compare the excess in nats"
        )
    if one.num_documents < FEW_DOCUMENTS:
        lines.append("  intervals are over documents, of which these are too few to trust them")
    if name == "planted":
        planted = gap[results.losses.document.isin(results.planted.document)]
        lines.append(f"planted tokens lower the loss by {planted.mean():.2f} nats")
        if planted.mean() < LEARNED_NATS:
            lines += [
                "  below half a nat: this model does not know what is planted, so there is nothing",
                "  for a selector to find; train it longer on planted text (data.planted.share)",
            ]
            return "\n".join(lines)
    lines.append(format_summary(summary, name))
    if name == "planted":
        lines.append("without the planted tokens, in the same unit:")
        lines.append(format_summary(summary, "planted_removed"))
    return "\n".join(lines)


def describe_gate(gate: dict[str, Any], far_states: str, planted: bool) -> str:
    """What the gate found, and what that means for what is asked (planted text tells itself)."""
    lines = [
        f"gate: loss {gate['loss_first']:.2f} on a passage, {gate['loss_repeated']:.2f} when it is "
        f"repeated, a drop of {gate['drop']:.2f} nats"
    ]
    if not planted and not gate["has_induction"]:
        lines += [
            "  below 1 nat: this model does not look up what it has read, so what follows says",
            "  how it fails, not how language works",
        ]
    elif not planted and far_states == "isolated":
        lines += [
            "  this model copies; shown alone, a far token does not know what stood before it,",
            "  so a 'no' says little: ask with --far-states contextual as well",
        ]
    return "\n".join(lines)


def format_summary(summary: pd.DataFrame, target_set: str = "gap") -> str:
    """The headline table; `nats`: the excess in nats a target, to compare models by."""
    rows = summary[summary.target_set == target_set]
    own, foreign = (
        rows[rows.control == c].set_index(["selector", "k"]) for c in ("own", "foreign")
    )
    hits = own.hit_rate.notna().any()
    head = f"{'selector':<18}{'k':>3}  {'recovery':>20}  {'foreign':>8}  {'excess':>23}"
    head += f"  {'nats':>6}"
    lines = [head + (f"  {'planted found':>20}" if hits else "")]
    for key, row in own.iterrows():
        selector, k = key
        line = (
            f"{selector:<18}{k:>3}  {row.recovery:>6.2f} [{row.low:.2f}, {row.high:.2f}]"
            f"  {foreign.loc[key].recovery:>8.2f}"
            f"  {row.excess:>+7.3f} [{row.excess_low:+.3f}, {row.excess_high:+.3f}]"
            f"  {row.excess_nats:>+6.2f}"
        )
        if hits:
            line += f"  {row.hit_rate:>6.2f} [{row.hit_low:.2f}, {row.hit_high:.2f}]"
        lines.append(line)
    return "\n".join(lines)
