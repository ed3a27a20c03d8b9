"""Show targets and their distant units in their text, in a terminal and a notebook; tables in HTML.
Never imports torch. `targets` has target, end, text, loss_short, loss_long, gap; `distant` has
target, rank, first, end, text, nats."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.base.errors import printable

REACH = 6  # tokens shown on either side of a distant unit
MARGIN = 40  # tokens shown before the first highlighted one, and after the last


def quoted(text: str) -> str:
    """Untrusted text on one line of a terminal."""
    return _line(text).strip()


def _line(text: str) -> str:
    return printable(re.sub(r"\s+", " ", text))


def number(value: Any, digits: int = 2, sign: str = "", minus: str = "−") -> str:
    if not isinstance(value, int | float) or not np.isfinite(value):
        return "–"
    # Adding 0 turns a rounded −0 into 0.
    return f"{round(value, digits) + 0:{sign},.{digits}f}".replace("-", minus)


def num_of(count: int, noun: str) -> str:
    """Return a count with its noun: "1 target", "2,000 targets"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def interval(value: Any, low: Any, high: Any, **how: Any) -> str:
    """Return a value and its interval, or the value alone if it has none; `how`: as in `number`."""
    shown = number(value, **how)
    ends = f"{number(low, **how)}, {number(high, **how)}"
    return shown if "–" in (shown, number(low, **how)) else f"{shown} [{ends}]"


def html_table(
    caption: str, columns: dict[str, Iterable], is_open: bool, quoted_row: int | None = None
) -> str:
    """Return a table. The first column groups the rows, and is shown once per group. `quoted_row`:
    the index of the row to quote, which is marked."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    lines, before = [], None
    for index, (group, *values) in enumerate(zip(*columns.values(), strict=True)):
        cells = "".join(f"<td>{_cell(value)}</td>" for value in values)
        classes = [] if group == before else ["group"]
        if index == quoted_row:
            classes.append("quote")
        marks = f' class="{" ".join(classes)}"' if classes else ""
        lines.append(f'<tr{marks}><th scope="row">{escape(group)}</th>{cells}</tr>')
        before = group
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(caption)}</summary>"
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return interval(*value)
    digits = 0 if isinstance(value, int) else 2
    return escape(value) if isinstance(value, str) else number(value, digits)


def spell(name: Any) -> str:
    return str(name).replace("_", " ")


def sentence(text: str) -> str:
    return re.sub(r"-(?=\d)", "−", f"{text[:1].upper()}{text[1:]}.")


def places(first: int, end: int) -> str:
    """As `--at` takes them."""
    return f"token {first}" if end == first + 1 else f"tokens {first}:{end}"


# Unicode marks of writing direction, which would reorder the page around a text.
DIRECTIONS = {c: f"⟨U+{c:04X}⟩" for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def escape(text: Any) -> str:
    """Untrusted text as HTML."""
    return html.escape(str(text).translate(DIRECTIONS), quote=True)


@dataclass(frozen=True)
class Shown:
    """Shows as the text with highlighted distant units in a notebook, as a list in a terminal."""

    texts: list[str]
    targets: pd.DataFrame
    distant: pd.DataFrame
    short: int

    def describe(self, bold: bool = False) -> str:
        """For a terminal. `bold`: whether it understands ANSI codes."""
        rows = self.targets.itertuples()
        return "\n\n".join(
            described(self.texts, row, self.distant, self.short, bold) for row in rows
        )

    def __repr__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        return lit_text(self.texts, self.targets, self.distant)


def described(
    texts: Sequence[str], target: Any, distant: pd.DataFrame, short: int, bold: bool = False
) -> str:
    """A target with its distant units, one per line, in the text around them. `short`: tokens of
    the short window."""
    lines = [
        f"{strong(quoted(target.text), bold)} ({places(target.target, target.end)}): loss "
        f"{target.loss_short:.2f} with the last {short} tokens alone, {target.loss_long:.2f} with "
        f"the long window, gap {target.gap:+.2f} nats"
    ]
    units = distant[distant.target == target.target]
    for unit in units.itertuples():
        bounds = (max(0, unit.first - REACH), unit.first, unit.end, unit.end + REACH)
        before, inside, after = (_line("".join(texts[a:b])) for a, b in pairwise(bounds))
        if not inside:  # a token that only begins a character, which the next ones complete
            inside = f"part of {next((text for text in texts[unit.end :] if text), '')[:1]}"
        back = f"{target.target - unit.first:,} back"
        around = f"…{before}{strong(f'[{inside}]', bold)}{after}…"
        lines.append(f"{unit.rank:>3}  {unit.nats:+7.2f} nats  {back:>11}  {around}")
    if "loss_without" in units:
        last = units.iloc[-1]
        lines.append(
            f"     loss {last.loss_set:.2f} with these and the last {short} tokens, "
            f"{last.loss_without:.2f} with all but these"
        )
    return "\n".join(lines)


def strong(text: str, bold: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if bold else text


def lit_text(texts: Sequence[str], targets: pd.DataFrame, distant: pd.DataFrame) -> str:
    """HTML of the text from before the first distant unit to after the last target. The brightness
    of a unit is its effect relative to the strongest unit of its target."""
    lit, is_target = np.zeros(len(texts)), np.zeros(len(texts), dtype=bool)
    most = distant.groupby("target").nats.max()
    for unit in distant.itertuples():
        share = max(0.0, unit.nats) / max(most[unit.target], 1e-9)
        lit[unit.first : unit.end] = np.maximum(lit[unit.first : unit.end], share)
    for target in targets.itertuples():
        is_target[target.target : target.end] = True
    shown = np.flatnonzero((lit > 0) | is_target)
    first, end = max(0, shown.min() - MARGIN), min(len(texts), shown.max() + MARGIN)
    spans = ["…"] if first else []
    for place in range(first, end):
        text = escape(texts[place])
        if lit[place] > 0:
            text = f'<mark style="background:rgba(255,150,0,{lit[place]:.2f})">{text}</mark>'
        spans.append(f"<b><u>{text}</u></b>" if is_target[place] else text)
    return (
        f'<div style="white-space:pre-wrap">{"".join(spans)}{"…" if end < len(texts) else ""}</div>'
    )
