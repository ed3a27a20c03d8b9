"""Write an answer as an HTML page, each statement in the colour of its source.

Place in the flow: `Attribution.to_html` (attribution.py) fills an `AnswerPage`, whose **`write`**
fills the slots of the template statements_page.html. The page shows, from top to bottom:

    title, subtitle, error rate
    key       1 bridge.txt   2 mayor.txt                       colour and number of each source
    answer    [It opened in 1921.]¹ [Weiss opened it.]² …      beside it the matrix of effects
    panel     verdict and numbers of the statement that is chosen
    prompt    the sources, folded, and the texts between them

It has no script. A statement is a radio button, and CSS shows what belongs to the one that is
chosen, by the ids of elements. In them i is the index of a statement and j of a source:

    #s<i>   radio button        #row<i>      row of the matrix
    #panel<i>, .note<i>         #source<j>   source in the prompt
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from olmo_sparsity.analysis.report.page import write_html
from olmo_sparsity.analysis.results.view import escape, format_number
from olmo_sparsity.sources.prompt.layout import AnswerText

NUM_COLOURS = 8
"""Number of colours in the template. Further sources share them; each also has its number."""


class PromptText(NamedTuple):
    """A text of the prompt."""

    text: str
    source: int | None
    """The index of the source that the text is. None means that it is not a source."""


class ReasoningStep(NamedTuple):
    """A sentence of the reasoning on which a statement relies."""

    depth: int
    """How far the sentence is indented below the statement."""

    name: str
    row: Any
    """Its row of `statements`, with text and verdict."""


@dataclass(frozen=True)
class AnswerPage:
    """What the page shows of an answer."""

    model: str
    error_rate: str
    names: list[str]
    """Names of the sources."""

    draws: int
    """Largest number of decoys of each source."""

    answer_texts: list[AnswerText]
    """Texts that together are the answer."""

    statements: pd.DataFrame
    """A row for each statement (statement_rows.py)."""

    matrix: pd.DataFrame
    """A row for each statement and source (report/tables.py)."""

    sources: pd.DataFrame
    """A row for each source (report/tables.py)."""

    prompt_texts: list[PromptText]
    """Texts before the answer."""

    chains: list[list[ReasoningStep]]
    """For each statement, the sentences of the reasoning behind it."""

    def write(self, path: Path) -> None:
        """Fill the template statements_page.html."""
        styles = [_style_of_choice(self, i) for i in range(len(self.statements))]
        panels = [_panel(self, i) for i in range(len(self.statements))]
        slots = {
            "title": f"{escape(self.model)} · sources",
            "subtitle": escape(_subtitle(self)),
            "rate": escape(self.error_rate),
            "key": _key(self),
            "answer": _answer(self),
            "panels": "".join(panels),
            "matrix": _matrix(self),
            "prompt": _prompt(self),
        }
        write_html(path, "statements_page.html", slots, style="\n".join(styles))

    def sources_of(self, row: Any) -> list[int]:
        """Return the indices of the sources that a verdict names. `row`: a row of `statements`."""
        return [self.names.index(name) for name in row.sources]


def _style_of_choice(page: AnswerPage, i: int) -> str:
    """Return CSS for while statement i is chosen: its panel is shown, and its row of the matrix and
    its sources are outlined."""
    row = page.statements.iloc[i]
    is_chosen = f"body:has(#s{i}:checked)"
    names = dict.fromkeys((*row.sources, *row.origins))  # each once
    source_ids = "".join(f", #source{page.names.index(name)}" for name in names)
    return (
        f"{is_chosen} :is(#panel{i}, .note{i}) {{ display: block; }}\n"
        f"{is_chosen} :is(#row{i}{source_ids}) {{ outline: 3px solid var(--focus); }}"
    )


def _subtitle(page: AnswerPage) -> str:
    """Return a line with the numbers of sources, decoys and verdicts."""
    num_named = page.statements.kind.isin(["one", "either", "both"]).sum()
    num_undecided = page.statements.kind.eq("undecided").sum()
    undecided = f", {num_undecided} undecided" if num_undecided else ""
    return (
        f"{page.model} · {len(page.names)} sources, {page.draws} decoys of each at most · "
        f"{num_named} of {len(page.statements)} statements rely on a source{undecided}"
    )


def _colour(source: int) -> str:
    """Return the CSS class of a source's colour."""
    return f"c{source % NUM_COLOURS}"


def _badge(source: int) -> str:
    """Return the number of a source, from 1, as the page shows it: some readers cannot tell the
    colours apart."""
    return f"<b>{source + 1}</b>"


def _key(page: AnswerPage) -> str:
    """Return the list of sources with their colours and numbers."""
    return "".join(
        f'<li class="{_colour(source)}">{_badge(source)} {escape(name)}</li>'
        for source, name in enumerate(page.names)
    )


# --- the answer -----------------------------------------------------------------------------------


def _answer(page: AnswerPage) -> str:
    """Return the text of the answer, in which statements can be chosen."""
    elements: list[str] = []
    for text, statement in page.answer_texts:
        if statement is None:
            elements.append(escape(text))
        else:
            elements.append(_statement(page, text, statement))
    return "".join(elements)


def _statement(page: AnswerPage, text: str, i: int) -> str:
    """Return statement i as a radio button, with its text as the label in the colour of its first
    source. `text`: the statement, with the white space around it."""
    row = page.statements.iloc[i]
    sources = page.sources_of(row)
    classes = "no"
    second_colour = ""
    if sources:
        # A label has two colours at most; the superscript has all numbers.
        classes = f"{_colour(sources[0])} {'several' if len(sources) > 1 else ''}"
    if len(sources) > 1:
        second_colour = f' data-second="{_colour(sources[1])}"'

    # White space stays outside of the label, which would be coloured.
    words = text.strip()
    first = text.find(words)
    space_before = text[:first] if i else ""  # the answer begins where its first line does
    space_after = text[first + len(words) :]
    checked = " checked" if i == 0 else ""
    return (
        f'{escape(space_before)}<input type="radio" name="statement" id="s{i}"{checked} '
        f'aria-label="{escape(words)}: {escape(row.verdict)}">'
        f'<label for="s{i}" class="statement {classes}"{second_colour}>{escape(words)}'
        f"<sup>{_superscript(page, row)}</sup></label>{escape(space_after)}"
    )


def _superscript(page: AnswerPage, row: Any) -> str:
    """Return the numbers of a statement's sources, from 1: "1", "1 or 2", "1 + 2", "none" or
    "undecided". `row`: a row of `statements`."""
    if row.kind == "undecided":
        return "undecided"
    conjunction = " or " if row.kind == "either" else " + "
    numbers = [str(source + 1) for source in page.sources_of(row)]
    return conjunction.join(numbers) or "none"


# --- the statement that is chosen -----------------------------------------------------------------


def _panel(page: AnswerPage, i: int) -> str:
    """Return the verdict on statement i, and a table with a line for each source."""
    row = page.statements.iloc[i]
    lines = [
        _panel_line(page, source, cell, is_named=page.names[source] in row.sources)
        for source, cell in enumerate(page.matrix.loc[i].itertuples())
    ]
    verdict = row.verdict[:1].upper() + row.verdict[1:]
    by_word = f'<p class="soft">{escape(row.by_word)}</p>' if row.by_word else ""
    return (
        f'<section class="panel" id="panel{i}" aria-live="polite"><p class="quoted">'
        f"{escape(row.text)}</p><p><strong>{escape(verdict)}</strong></p>{by_word}"
        f"{_chain(page.chains[i])}"
        f'<div class="wide" tabindex="0" role="region" aria-label="Numbers of the statement">'
        "<table><thead><tr><th rowspan=2></th><th colspan=2>among decoys</th>"
        "<th colspan=2>replaced by a decoy</th></tr><tr>"
        "<th>gives</th><th>beyond</th><th>lost</th><th>beyond</th>"
        f"</tr></thead><tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def _panel_line(page: AnswerPage, source: int, cell: Any, is_named: bool) -> str:
    """Return both effects of a source on a statement, as a line of the statement's table.

    Args:
        cell: A row of the matrix.
        is_named: Whether the verdict names the source.
    """
    class_of_line = " class=named" if is_named else ""
    return (
        f'<tr{class_of_line}><th scope="row" class="{_colour(source)}">{_badge(source)} '
        f"{escape(page.names[source])}</th>"
        f"<td>{format_number(cell.gives)}</td><td>{cell.beyond_gives}</td>"
        f"<td>{format_number(cell.lost)}</td><td>{cell.beyond_lost}</td></tr>"
    )


def _chain(steps: list[ReasoningStep]) -> str:
    """Return a list of the sentences of the reasoning behind a statement, with the verdict on
    each; empty if there are none."""
    lines = "".join(
        f"<li>{'→ ' * (depth - 1)}{escape(f'{name}, “{row.text}”, {row.verdict}')}</li>"
        for depth, name, row in steps
    )
    return f'<ul class="chain">{lines}</ul>' if lines else ""


# --- all statements and sources -------------------------------------------------------------------


def _matrix(page: AnswerPage) -> str:
    """Return a table with a row for each statement and a column for each source: the larger of what
    the source gives and what is lost without it."""
    head = "".join(
        f'<th scope="col" class="{_colour(source)}"><b title="{escape(name)}">{source + 1}</b></th>'
        for source, name in enumerate(page.names)
    )
    rows = "".join(_matrix_row(page, i) for i in range(len(page.statements)))
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _matrix_row(page: AnswerPage, i: int) -> str:
    """Return the row of statement i, whose text is a second label of its radio button."""
    row = page.statements.iloc[i]
    largest_effects = page.matrix.loc[i][["gives", "lost"]].max(axis=1)
    cells = ""
    for source, (name, nats) in enumerate(largest_effects.items()):
        classes = f"{_colour(source)} named" if name in row.sources else ""
        cells += f'<td class="{classes}">{format_number(nats, 1)}</td>'
    return (
        f'<tr id="row{i}"><th scope="row"><label for="s{i}">{i + 1}. {escape(row.text)}</label>'
        f"</th>{cells}</tr>"
    )


def _prompt(page: AnswerPage) -> str:
    """Return all that precedes the answer, in order: sources, each to be unfolded, and between them
    the texts that are no sources."""
    elements: list[str] = []
    for text, source in page.prompt_texts:
        text = escape(text.strip())
        if source is not None:
            elements.append(_source_in_prompt(page, source, text))
        elif text:
            elements.append(f'<p class="quoted soft">{text}</p>')
    return "".join(elements)


def _source_in_prompt(page: AnswerPage, source: int, text: str) -> str:
    """Return a source with its verdict; unfolded if a statement relies on it. `text`: the text of
    the source, as HTML."""
    row = page.sources.iloc[source]
    # Folded otherwise: a prompt may hold many pages.
    is_open = " open" if row.statements else ""
    return (
        f'<details id="source{source}" class="{_colour(source)}"{is_open}><summary>'
        f"{_badge(source)} {escape(row.source)} "
        f'<span class="soft">{escape(row.verdict)}</span></summary>'
        f'<p class="quoted">{text}</p></details>'
    )
