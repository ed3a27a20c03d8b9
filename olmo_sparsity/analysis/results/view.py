"""Write names, numbers and tables as text for a terminal, and as HTML.

    format_number(0.5), format_interval(0.5, 0.4, 0.6)    "0.50", "0.50 [0.40, 0.60]"
    num_of(2000, "target"), spell("add_one")              "2,000 targets", "add one"
    quoted(text), escape(text)                            untrusted text in a terminal, in HTML
    html_table(caption, columns, is_open)                 a table that folds

Summary, page and explanation are built from these functions. Never imports torch.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from olmo_sparsity.base.errors import printable


def quoted(text: str) -> str:
    """Return untrusted text on one line of a terminal, without white space around it."""
    return on_one_line(text).strip()


def on_one_line(text: str) -> str:
    """Return untrusted text on one line of a terminal."""
    return printable(re.sub(r"\s+", " ", text))


def format_number(value: Any, digits: int = 2, sign: str = "", minus: str = "−") -> str:
    """Return a number as text, or an en dash if there is none or it is not finite.

    Args:
        value: A number of any library's type, or something else for none.
        digits: Digits after the point.
        sign: `+` gives numbers above 0 a sign, too.
        minus: The sign of numbers below 0.
    """
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
        format_number(number, digits, sign, minus) for number in (value, low, high)
    )
    if "–" in (shown, shown_low):
        return shown
    return f"{shown} [{shown_low}, {shown_high}]"


with_interval = partial(format_interval, sign="+", minus="-")
"""A value and its interval, as a terminal shows differences."""


def html_table(
    caption: str, columns: dict[str, Iterable], is_open: bool, quoted_row: int | None = None
) -> str:
    """Return an HTML table that folds.

    Args:
        caption: The line that is always visible.
        columns: Heading → cells. The first column names the group of a row, such as its selector;
            the style shows it once for each group.
        is_open: Whether the table is unfolded at first.
        quoted_row: The index of the row to quote, which is marked. Default: no row is marked.
    """
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
    """Return a text of the terminal as a sentence of a page: with a capital, a full stop and
    typographic minus signs. "gpt-2 loses -0.3" becomes "Gpt-2 loses −0.3."."""
    return re.sub(r"(?<!\w)-(?=\d)", "−", f"{text[:1].upper()}{text[1:]}.")


def places(first: int, end: int) -> str:
    """Return the places of a target in words: "token 7"; "tokens 7:9" for tokens 7 and 8."""
    return f"token {first}" if end == first + 1 else f"tokens {first}:{end}"


# 0x202A … 0x202E and 0x2066 … 0x2069 are marks such as RIGHT-TO-LEFT OVERRIDE.
DIRECTIONS = {code: f"⟨U+{code:04X}⟩" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""Unicode's marks of writing direction, which would reorder the page around a text."""


def escape(text: Any) -> str:
    """Return untrusted text as HTML."""
    return html.escape(str(text).translate(DIRECTIONS), quote=True)


def strong(text: str, bold: bool) -> str:
    """Return a text in bold type, if the terminal has it."""
    return f"\x1b[1m{text}\x1b[0m" if bold else text
