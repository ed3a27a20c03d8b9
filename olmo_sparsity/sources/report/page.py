"""Write an answer as an HTML page, each statement in the colour of its source.

Place in the flow: `Attribution.to_html` (attribution.py) fills an `AnswerPage`, whose **`write`**
fills the slots of the template analysis/report/statements_page.html. The page shows, from top to
bottom:

    title, subtitle, error rate
    legend    1 bridge.txt   2 mayor.txt                       number and colour of each source
    answer    [It opened in 1921.]¹ [Weiss opened it.]² …      beside it the matrix of effects
    panel     verdict and numbers of the statement that is chosen
    prompt    the sources, folded, and the texts between them

It has no script. A statement is a radio button, and CSS shows what belongs to the one that is
chosen, by the ids of elements. In them, and in this module, i is the index of a statement and j of
a source; readers see numbers, which begin with 1:

    #s<i>       radio button of a statement
    #panel<i>   its panel
    #row<i>     its row of the matrix
    #source<j>  a source in the prompt

All functions but `write` return HTML, or a part of it. What the user or the model has written goes
through `escape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from olmo_sparsity.analysis.report.page import write_html
from olmo_sparsity.analysis.results.view import escape, format_number
from olmo_sparsity.sources.prompt.layout import AnswerText, PromptText
from olmo_sparsity.sources.report.table_rows import MatrixRow, StatementRow
from olmo_sparsity.sources.verdicts.verdict import KINDS_WITH_SOURCES

NUM_COLOURS = 8
"""Number of colours in the template. Further sources share them; each also has its number."""


class ReasoningStep(NamedTuple):
    """A sentence of the reasoning on which a statement relies, itself or through others."""

    depth: int
    """How far the sentence is indented. The verdict on the statement has 1, a sentence that it
    names 2, a sentence that this one relies on 3."""

    name: str
    row: StatementRow
    """The verdict on the sentence."""


@dataclass(frozen=True)
class AnswerPage:
    """What the page shows of an answer."""

    model: str
    """The name of the model."""

    error_rate: str
    """The error rate of the verdicts, in words."""

    source_names: list[str]

    draws: int
    """Largest number of decoys of each source."""

    answer_texts: list[AnswerText]
    """Texts that together are the answer."""

    statements: pd.DataFrame
    """A `StatementRow` for each statement."""

    matrix: pd.DataFrame
    """A `MatrixRow` for each statement and source, by the statement's index and the source's
    name. Sources are in the order of `source_names`."""

    source_table: pd.DataFrame
    """A row for each source (`sources_table`, report/tables.py)."""

    prompt_texts: list[PromptText]
    """Texts before the answer."""

    reasoning: list[list[ReasoningStep]]
    """For each statement, the sentences of the reasoning behind it."""

    def write(self, path: Path) -> None:
        """Fill the template."""
        num_statements = len(self.statements)
        styles = [_style_when_chosen(self, i) for i in range(num_statements)]
        panels = [_panel(self, i) for i in range(num_statements)]
        slots = {
            "title": f"{escape(self.model)} · sources",
            "subtitle": escape(_subtitle(self)),
            "rate": escape(self.error_rate),
            "key": _legend(self),
            "answer": _answer(self),
            "panels": "".join(panels),
            "matrix": _matrix(self),
            "prompt": _prompt(self),
        }
        write_html(path, "statements_page.html", slots, style="\n".join(styles))

    def source_indices(self, row: StatementRow) -> list[int]:
        """Return the indices of the sources that the verdict on a statement names."""
        return [self.source_names.index(name) for name in row.sources]


def _style_when_chosen(page: AnswerPage, i: int) -> str:
    """Return CSS that applies while statement i is chosen: its panel is shown, and its row of the
    matrix and its sources in the prompt are outlined."""
    row = page.statements.iloc[i]
    when_chosen = f"body:has(#s{i}:checked)"
    # A sentence of the reasoning is among the sources; what it relies on is outlined, too.
    names = dict.fromkeys((*row.sources, *row.origins))  # each once
    source_ids = "".join(f", #source{page.source_names.index(name)}" for name in names)
    return (
        f"{when_chosen} #panel{i} {{ display: block; }}\n"
        f"{when_chosen} :is(#row{i}{source_ids}) {{ outline: 3px solid var(--focus); }}"
    )


def _subtitle(page: AnswerPage) -> str:
    """Return a line with the numbers of sources, decoys and verdicts."""
    num_named = page.statements.kind.isin(KINDS_WITH_SOURCES).sum()
    num_undecided = page.statements.kind.eq("undecided").sum()
    undecided = f", {num_undecided} undecided" if num_undecided else ""
    return (
        f"{page.model} · {len(page.source_names)} sources, {page.draws} decoys of each at most · "
        f"{num_named} of {len(page.statements)} statements rely on a source{undecided}"
    )


def _colour(j: int) -> str:
    """Return the CSS class of a source's colour, such as "c1"."""
    return f"c{j % NUM_COLOURS}"


def _badge(j: int) -> str:
    """Return the number of a source, as the page shows it beside the colour: some readers cannot
    tell the colours apart."""
    return f"<b>{j + 1}</b>"


def _legend(page: AnswerPage) -> str:
    """Return the list of sources with their colours and numbers."""
    return "".join(
        f'<li class="{_colour(j)}">{_badge(j)} {escape(name)}</li>'
        for j, name in enumerate(page.source_names)
    )


# --- the answer -----------------------------------------------------------------------------------


def _answer(page: AnswerPage) -> str:
    """Return the text of the answer, in which statements can be chosen."""
    elements: list[str] = []
    for text, i in page.answer_texts:
        if i is None:
            elements.append(escape(text))
        else:
            elements.append(_statement(page, text, i))
    return "".join(elements)


def _statement(page: AnswerPage, text: str, i: int) -> str:
    """Return statement i as a radio button, with its text as the label in the colour of its first
    source. `text`: the statement, with the white space around it."""
    row = page.statements.iloc[i]
    source_indices = page.source_indices(row)
    second_colour = ""
    if not source_indices:
        classes = "no"  # a dotted line in place of a colour
    elif len(source_indices) == 1:
        classes = _colour(source_indices[0])
    else:
        # A label has two colours at most; the superscript has all numbers.
        classes = f"{_colour(source_indices[0])} several"
        second_colour = f' data-second="{_colour(source_indices[1])}"'

    # White space stays outside of the label, which would be coloured.
    words = text.strip()
    first = text.find(words)
    space_before = text[:first]
    if i == 0:
        space_before = ""  # the answer begins where its first line does
    space_after = text[first + len(words) :]
    checked = " checked" if i == 0 else ""
    return (
        f'{escape(space_before)}<input type="radio" name="statement" id="s{i}"{checked} '
        f'aria-label="{escape(words)}: {escape(row.verdict)}">'
        f'<label for="s{i}" class="statement {classes}"{second_colour}>{escape(words)}'
        f"<sup>{_superscript(page, row)}</sup></label>{escape(space_after)}"
    )


def _superscript(page: AnswerPage, row: StatementRow) -> str:
    """Return the numbers of a statement's sources: "1", "1 or 2", "1 + 2", "none" or
    "undecided"."""
    if row.kind == "undecided":
        return "undecided"
    conjunction = " or " if row.kind == "either" else " + "
    numbers = [str(j + 1) for j in page.source_indices(row)]
    return conjunction.join(numbers) or "none"


# --- the statement that is chosen -----------------------------------------------------------------


def _panel(page: AnswerPage, i: int) -> str:
    """Return the verdict on statement i, and a table with a line for each source."""
    row = page.statements.iloc[i]
    lines = [
        _panel_line(page, j, effects, is_named=page.source_names[j] in row.sources)
        for j, effects in enumerate(page.matrix.loc[i].itertuples())
    ]
    verdict = row.verdict[:1].upper() + row.verdict[1:]
    by_word = f'<p class="soft">{escape(row.by_word)}</p>' if row.by_word else ""
    return (
        f'<section class="panel" id="panel{i}" aria-live="polite"><p class="quoted">'
        f"{escape(row.text)}</p><p><strong>{escape(verdict)}</strong></p>{by_word}"
        f"{_reasoning_list(page.reasoning[i])}"
        f'<div class="wide" tabindex="0" role="region" aria-label="Numbers of the statement">'
        "<table><thead><tr><th rowspan=2></th><th colspan=2>among decoys</th>"
        "<th colspan=2>replaced by a decoy</th></tr><tr>"
        "<th>gives</th><th>beyond</th><th>lost</th><th>beyond</th>"
        f"</tr></thead><tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def _panel_line(page: AnswerPage, j: int, effects: MatrixRow, is_named: bool) -> str:
    """Return the effects of source j on a statement, as a line of the statement's table.
    `is_named`: whether the verdict names the source."""
    class_of_line = " class=named" if is_named else ""
    return (
        f'<tr{class_of_line}><th scope="row" class="{_colour(j)}">{_badge(j)} '
        f"{escape(page.source_names[j])}</th>"
        f"<td>{format_number(effects.gives)}</td><td>{effects.beyond_gives}</td>"
        f"<td>{format_number(effects.lost)}</td><td>{effects.beyond_lost}</td></tr>"
    )


def _reasoning_list(steps: list[ReasoningStep]) -> str:
    """Return a list of the sentences of the reasoning behind a statement, with the verdict on
    each; empty if there are none. An arrow for each step shows how a sentence is reached:

        → reasoning 2, “So it opened in 1921.”, rests on reasoning 1 (…)
        → → reasoning 1, “The report says 1921.”, rests on report.txt (…)
    """
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
        f'<th scope="col" class="{_colour(j)}"><b title="{escape(name)}">{j + 1}</b></th>'
        for j, name in enumerate(page.source_names)
    )
    rows = "".join(_matrix_line(page, i) for i in range(len(page.statements)))
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _matrix_line(page: AnswerPage, i: int) -> str:
    """Return the line of statement i, whose text is a second label of its radio button."""
    row = page.statements.iloc[i]
    largest_effects = page.matrix.loc[i][["gives", "lost"]].max(axis=1)
    cells = ""
    for j, (name, nats) in enumerate(largest_effects.items()):
        classes = f"{_colour(j)} named" if name in row.sources else ""
        cells += f'<td class="{classes}">{format_number(nats, 1)}</td>'
    return (
        f'<tr id="row{i}"><th scope="row"><label for="s{i}">{i + 1}. {escape(row.text)}</label>'
        f"</th>{cells}</tr>"
    )


def _prompt(page: AnswerPage) -> str:
    """Return all that precedes the answer, in order: sources, each to be unfolded, and between them
    the texts that are no sources."""
    elements: list[str] = []
    for text, j in page.prompt_texts:
        text_html = escape(text.strip())
        if j is not None:
            elements.append(_source_in_prompt(page, j, text_html))
        elif text_html:
            elements.append(f'<p class="quoted soft">{text_html}</p>')
    return "".join(elements)


def _source_in_prompt(page: AnswerPage, j: int, text_html: str) -> str:
    """Return source j with its verdict and its text; unfolded if a statement relies on it."""
    source = page.source_table.iloc[j]
    # Folded otherwise: a prompt may hold many pages.
    is_open = " open" if source.statements else ""
    return (
        f'<details id="source{j}" class="{_colour(j)}"{is_open}><summary>'
        f"{_badge(j)} {escape(source.source)} "
        f'<span class="soft">{escape(source.verdict)}</span></summary>'
        f'<p class="quoted">{text_html}</p></details>'
    )
