"""Show targets with their distant units in the text: a list in a terminal, HTML in a notebook.

    Ayrton (token 61): loss 9.10 with the last 32 tokens alone, 0.40 with the long window, …
      1   +7.90 nats      49 back  …before him stood [ Ayrton], the former…

Two tables go through this module (explain/explanation.py makes them):

    targets    a row for each target: target, end, text, loss_short, loss_long, gap
    distant    a row for each distant unit of a target: target, rank, first, end, text, nats; and,
               where sets were evaluated, loss_set and loss_without: the loss with this unit and all
               of a higher rank, and with all but these

Never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.view import escape, on_one_line, places, quoted, strong

REACH = 6
"""Tokens shown on either side of a distant unit."""

MARGIN = 40
"""Tokens shown before the first highlighted one, and after the last."""


@dataclass(frozen=True)
class TargetsInText:
    """Shows targets of a text with their distant units: as highlighted text in a notebook, as a
    list in a terminal."""

    texts: list[str]
    """The text of each token."""

    targets: pd.DataFrame
    distant: pd.DataFrame
    short: int
    """Tokens of the local window."""

    def describe(self, bold: bool = False) -> str:
        """Return the list for a terminal.

        Args:
            bold: Whether it understands ANSI codes.
        """
        descriptions = [
            describe_target(self.texts, target, self.distant, self.short, bold)
            for target in self.targets.itertuples()
        ]
        return "\n\n".join(descriptions)

    def __repr__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        return highlight(self.texts, self.targets, self.distant)


def describe_target(
    texts: Sequence[str], target: Any, distant: pd.DataFrame, short: int, bold: bool = False
) -> str:
    """Describe a target with its distant units, one per line, in the text around them.

    Args:
        texts: The text of each token.
        target: A row of the table of targets.
        distant: The distant units of all targets.
        short: Tokens of the local window.
        bold: Whether the terminal understands ANSI codes.
    """
    name = strong(quoted(target.text), bold)
    word = word_around(texts, target.target, target.end)
    if word != quoted(target.text):
        name += f" in “{word}”"
    lines = [
        f"{name} ({places(target.target, target.end)}): loss "
        f"{target.loss_short:.2f} with the last {short} tokens alone, {target.loss_long:.2f} with "
        f"the long window, gap {target.gap:+.2f} nats"
    ]
    units = distant[distant.target == target.target]
    for unit in units.itertuples():
        back = f"{target.target - unit.first:,} back"
        passage = _describe_passage(texts, unit.first, unit.end, bold)
        lines.append(f"{unit.rank:>3}  {unit.nats:+7.2f} nats  {back:>11}  {passage}")
    if "loss_without" in units:
        # The row of the last rank has the losses with, and without, all units of the target.
        last_unit = units.iloc[-1]
        lines.append(
            f"     loss {last_unit.loss_set:.2f} with these and the last {short} tokens, "
            f"{last_unit.loss_without:.2f} with all but these"
        )
    return "\n".join(lines)


def word_around(texts: Sequence[str], first: int, end: int) -> str:
    """Return a target with the rest of the words that it begins and ends in, as tokens are often
    pieces of words."""
    text = "".join(texts[first:end])
    if not text.strip():
        return quoted(text)
    text_before = "".join(texts[max(0, first - REACH) : first])
    text_after = "".join(texts[end : end + REACH])
    # A token that begins with a space begins a word.
    if not text[0].isspace():
        beginning_of_word = re.sub(r".*[^\w'’]", "", text_before, flags=re.DOTALL)
        text = beginning_of_word + text
    if not text[-1].isspace():
        end_of_word = re.sub(r"[^\w'’].*", "", text_after, flags=re.DOTALL)
        text += end_of_word
    return quoted(text)


def _describe_passage(texts: Sequence[str], first: int, end: int, bold: bool) -> str:
    """Return a unit in brackets with the text before and after it, on one line."""
    text_before = on_one_line("".join(texts[max(0, first - REACH) : first]))
    unit_text = on_one_line("".join(texts[first:end]))
    text_after = on_one_line("".join(texts[end : end + REACH]))
    if not unit_text:
        # A token may hold only the first bytes of a character, which the next tokens complete.
        completed = next((text for text in texts[end:] if text), "")
        unit_text = f"part of {completed[:1]}"
    return f"…{text_before}{strong(f'[{unit_text}]', bold)}{text_after}…"


def highlight(texts: Sequence[str], targets: pd.DataFrame, distant: pd.DataFrame) -> str:
    """Return HTML of the text with highlighted units and targets, from before the first of them to
    after the last. The brightness of a unit is its effect relative to the strongest unit of its
    target."""
    brightness = _brightness_of_tokens(len(texts), distant)
    is_target = np.zeros(len(texts), dtype=bool)
    for target in targets.itertuples():
        is_target[target.target : target.end] = True

    highlighted = np.flatnonzero((brightness > 0) | is_target)
    first = max(0, highlighted.min() - MARGIN)
    end = min(len(texts), highlighted.max() + 1 + MARGIN)
    tokens = ["…"] if first else []
    for place in range(first, end):
        token = escape(texts[place])
        if brightness[place] > 0:
            color = f"rgba(255,150,0,{brightness[place]:.2f})"
            token = f'<mark style="background:{color}">{token}</mark>'
        tokens.append(f"<b><u>{token}</u></b>" if is_target[place] else token)
    if end < len(texts):
        tokens.append("…")
    return f'<div style="white-space:pre-wrap">{"".join(tokens)}</div>'


def _brightness_of_tokens(num_tokens: int, distant: pd.DataFrame) -> np.ndarray:
    """Return how bright each token of the text is, from 0 to 1: the effect of the unit that it is
    in, relative to the strongest unit of the same target."""
    brightness = np.zeros(num_tokens)
    strongest = distant.groupby("target").nats.max()
    for unit in distant.itertuples():
        # Units that raise the loss are not highlighted. Where all do, nothing is divided by 0.
        fraction = max(0.0, unit.nats) / max(strongest[unit.target], 1e-9)
        # A token may be in units of several targets.
        brightness[unit.first : unit.end] = np.maximum(brightness[unit.first : unit.end], fraction)
    return brightness
