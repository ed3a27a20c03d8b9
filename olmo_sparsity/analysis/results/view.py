"""Write numbers and tables as text and HTML, and show targets with their distant units in the text.

Summary, page and explanation are built from these functions. Two tables go through them: `targets`
has the columns target, end, text, loss_short, loss_long and gap, a row for each target; `distant`
has target, rank, first, end, text and nats, a row for each distant unit of a target. Never imports
torch.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.base.errors import printable

REACH = 6
"""Tokens shown on either side of a distant unit."""

MARGIN = 40
"""Tokens shown before the first highlighted one, and after the last."""


def quoted(text: str) -> str:
    """Return untrusted text on one line of a terminal, without white space around it."""
    return _on_one_line(text).strip()


def _on_one_line(text: str) -> str:
    return printable(re.sub(r"\s+", " ", text))


def format_number(value: Any, digits: int = 2, sign: str = "", minus: str = "−") -> str:
    """Return a number as text, or an en dash if there is none or it is not finite. `sign`: `+`
    gives numbers above 0 a sign, too. `minus`: the sign of numbers below 0."""
    # `Real` includes NumPy's numbers, which a row of a table may hold.
    if not isinstance(value, Real) or not np.isfinite(float(value)):
        return "–"
    # Adding 0 turns a rounded −0 into 0.
    return f"{round(float(value), digits) + 0:{sign},.{digits}f}".replace("-", minus)


def num_of(count: int, noun: str) -> str:
    """Return a count with its noun: "1 target", "2,000 targets"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_interval(
    value: Any, low: Any, high: Any, digits: int = 2, sign: str = "", minus: str = "−"
) -> str:
    """Return a value and its interval as text, or the value alone if it has no interval. `digits`,
    `sign` and `minus` are those of `format_number`."""
    shown, shown_low, shown_high = (
        format_number(end, digits, sign, minus) for end in (value, low, high)
    )
    if "–" in (shown, shown_low):
        return shown
    return f"{shown} [{shown_low}, {shown_high}]"


with_interval = partial(format_interval, sign="+", minus="-")
"""A value and its interval, as a terminal shows differences."""


def html_table(
    caption: str, columns: dict[str, Iterable], is_open: bool, quoted_row: int | None = None
) -> str:
    """Return an HTML table that folds. The first column names the group of a row; the style shows
    it once for each group. `is_open`: whether the table is unfolded at first. `quoted_row`: the
    number of the row to quote, which is marked."""
    headings = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    lines = []
    previous_group = None
    for index, (group, *values) in enumerate(zip(*columns.values(), strict=True)):
        classes = [] if group == previous_group else ["group"]
        if index == quoted_row:
            classes.append("quote")
        marks = f' class="{" ".join(classes)}"' if classes else ""
        cells = "".join(f"<td>{_cell(value)}</td>" for value in values)
        lines.append(f'<tr{marks}><th scope="row">{escape(group)}</th>{cells}</tr>')
        previous_group = group
    name = escape(caption)
    return (
        f"<details{' open' if is_open else ''}><summary>{name}</summary>"
        # A wide table scrolls by itself, so it takes the focus of the keyboard and needs a name.
        f'<div class="wide" tabindex="0" role="region" aria-label="{name}"><table>'
        f"<thead><tr>{headings}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def _cell(value: Any) -> str:
    """Return the HTML of a cell: a text, a number, or a tuple of a value and the ends of its
    interval."""
    if isinstance(value, tuple):
        return format_interval(*value)
    if isinstance(value, str):
        return escape(value)
    return format_number(value, digits=0 if isinstance(value, int) else 2)


def spell(name: Any) -> str:
    """Return a name of the code as words: "add_one" as "add one"."""
    return str(name).replace("_", " ")


def sentence(text: str) -> str:
    """Return a text of the terminal as a sentence of a page, with typographic minus signs."""
    return re.sub(r"-(?=\d)", "−", f"{text[:1].upper()}{text[1:]}.")


def places(first: int, end: int) -> str:
    """Return the places of a target as `--at` takes them: "token 7", "tokens 7:9"."""
    return f"token {first}" if end == first + 1 else f"tokens {first}:{end}"


DIRECTIONS = {code: f"⟨U+{code:04X}⟩" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""Unicode's marks of writing direction, which would reorder the page around a text."""


def escape(text: Any) -> str:
    """Return untrusted text as HTML."""
    return html.escape(str(text).translate(DIRECTIONS), quote=True)


# --- targets with their distant units -------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """Shows targets of a text with their distant units: as highlighted text in a notebook, as a
    list in a terminal."""

    texts: list[str]
    targets: pd.DataFrame
    distant: pd.DataFrame
    short: int

    def describe(self, bold: bool = False) -> str:
        """Return the list for a terminal. `bold`: whether it understands ANSI codes."""
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
    """Describe a target with its distant units, one per line, in the text around them. `short`:
    tokens of the local window."""
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
    before = "".join(texts[max(0, first - REACH) : first])
    after = "".join(texts[end : end + REACH])
    if not text[0].isspace():
        text = re.sub(r".*[^\w'’]", "", before, flags=re.DOTALL) + text
    if not text[-1].isspace():
        text += re.sub(r"[^\w'’].*", "", after, flags=re.DOTALL)
    return quoted(text)


def _describe_passage(texts: Sequence[str], first: int, end: int, bold: bool) -> str:
    """Return a unit in brackets with the text before and after it, on one line."""
    text_before = _on_one_line("".join(texts[max(0, first - REACH) : first]))
    unit_text = _on_one_line("".join(texts[first:end]))
    text_after = _on_one_line("".join(texts[end : end + REACH]))
    if not unit_text:
        # A token may hold only the first bytes of a character, which the next tokens complete.
        completed = next((text for text in texts[end:] if text), "")
        unit_text = f"part of {completed[:1]}"
    return f"…{text_before}{strong(f'[{unit_text}]', bold)}{text_after}…"


def strong(text: str, bold: bool) -> str:
    """Return a text in bold type, if the terminal has it."""
    return f"\x1b[1m{text}\x1b[0m" if bold else text


def highlight(texts: Sequence[str], targets: pd.DataFrame, distant: pd.DataFrame) -> str:
    """Return HTML of the text with highlighted units and targets, from before the first of them to
    after the last. The brightness of a unit is its effect relative to the strongest unit of its
    target."""
    brightness = np.zeros(len(texts))
    strongest = distant.groupby("target").nats.max()
    for unit in distant.itertuples():
        share = max(0.0, unit.nats) / max(strongest[unit.target], 1e-9)
        # A token may be in units of several targets.
        brightness[unit.first : unit.end] = np.maximum(brightness[unit.first : unit.end], share)
    is_target = np.zeros(len(texts), dtype=bool)
    for target in targets.itertuples():
        is_target[target.target : target.end] = True

    highlighted = np.flatnonzero((brightness > 0) | is_target)
    first = max(0, highlighted.min() - MARGIN)
    end = min(len(texts), highlighted.max() + 1 + MARGIN)
    spans = ["…"] if first else []
    for place in range(first, end):
        text = escape(texts[place])
        if brightness[place] > 0:
            color = f"rgba(255,150,0,{brightness[place]:.2f})"
            text = f'<mark style="background:{color}">{text}</mark>'
        spans.append(f"<b><u>{text}</u></b>" if is_target[place] else text)
    if end < len(texts):
        spans.append("…")
    return f'<div style="white-space:pre-wrap">{"".join(spans)}</div>'
