"""Write an answer as an HTML page, each statement in the colour of its source.

Place in the flow: `Attribution.to_html` fills an `AnswerPage`, whose `write` fills the template
statements_page.html. The page has no script: a statement is a radio button, and CSS shows the
numbers of the chosen one, which each function here marks with the number i of its statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from olmo_sparsity.analysis.report.page import write_html
from olmo_sparsity.analysis.results.view import escape, format_number

NUM_COLOURS = 8
"""Number of colours in the template. Further sources share them; each also has its number."""


class NumberedText(NamedTuple):
    text: str
    number: int | None
    """The number of the statement, or of the source, that the text is. None: it is neither."""


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

    pieces: list[NumberedText]
    """Texts of the answer, each with the number of its statement."""

    statements: pd.DataFrame
    matrix: pd.DataFrame
    sources: pd.DataFrame
    prompt: list[NumberedText]
    """Texts before the answer, each with the number of its source."""

    chains: list[list[ReasoningStep]]
    """For each statement, the sentences of the reasoning behind it."""

    def write(self, path: Path) -> None:
        """Fill the template statements_page.html."""
        styles = [_style(self, i, row) for i, row in enumerate(self.statements.itertuples())]
        slots = {
            "title": f"{escape(self.model)} · sources",
            "subtitle": escape(_subtitle(self)),
            "rate": escape(self.error_rate),
            "key": _key(self),
            "answer": _answer(self),
            "panels": "".join(_panel(self, i) for i in range(len(self.statements))),
            "matrix": _matrix(self),
            "prompt": _prompt(self),
        }
        write_html(path, "statements_page.html", slots, style="\n".join(styles))


def _style(page: AnswerPage, i: int, row: Any) -> str:
    """Return the CSS that shows the numbers of statement i, and outlines its row and its sources,
    while it is chosen."""
    chosen = f"body:has(#s{i}:checked)"
    names = dict.fromkeys((*row.sources, *row.origins))  # each once
    sources = "".join(f", #source{page.names.index(name)}" for name in names)
    return (
        f"{chosen} :is(#panel{i}, .note{i}) {{ display: block; }}\n"
        f"{chosen} :is(#row{i}{sources}) {{ outline: 3px solid var(--focus); }}"
    )


def _subtitle(page: AnswerPage) -> str:
    """Return how many sources, decoys and verdicts there are, in a line."""
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


def _numbers_of_sources(page: AnswerPage, row: Any) -> list[int]:
    """Return the numbers of the sources that a verdict names, from 0."""
    return [page.names.index(name) for name in row.sources]


def _mark(page: AnswerPage, row: Any) -> str:
    """Return the numbers of a statement's sources: some readers cannot tell the colours apart."""
    if row.kind == "undecided":
        return "undecided"
    joint = " or " if row.kind == "either" else " + "
    numbers = [str(source + 1) for source in _numbers_of_sources(page, row)]
    return joint.join(numbers) or "none"


def _key(page: AnswerPage) -> str:
    """Return the list of sources with their colours and numbers."""
    return "".join(
        f'<li class="{_colour(i)}"><b>{i + 1}</b> {escape(name)}</li>'
        for i, name in enumerate(page.names)
    )


def _answer(page: AnswerPage) -> str:
    """Return the answer, with its statements to choose from."""
    return "".join(
        escape(text) if i is None else _statement(page, text, i) for text, i in page.pieces
    )


def _statement(page: AnswerPage, text: str, i: int) -> str:
    """Return a statement as a radio button, with a label in the colour of its first source."""
    row = page.statements.iloc[i]
    sources = _numbers_of_sources(page, row)
    classes = "no"
    second_colour = ""
    if sources:
        classes = f"{_colour(sources[0])} {'several' if len(sources) > 1 else ''}"
    if len(sources) > 1:
        second_colour = f' data-second="{_colour(sources[1])}"'
    words = text.strip()
    first = text.find(words)
    space_before = text[:first] if i else ""  # the answer begins where its first line does
    space_after = text[first + len(words) :]
    checked = " checked" if i == 0 else ""
    return (
        f'{escape(space_before)}<input type="radio" name="statement" id="s{i}"{checked} '
        f'aria-label="{escape(words)}: {escape(row.verdict)}">'
        f'<label for="s{i}" class="statement {classes}"{second_colour}>{escape(words)}'
        f"<sup>{_mark(page, row)}</sup></label>{escape(space_after)}"
    )


def _panel(page: AnswerPage, i: int) -> str:
    """Return the numbers of a statement, with a line for each source."""
    row = page.statements.iloc[i]
    lines = ""
    for source, cell in enumerate(page.matrix.loc[i].itertuples()):
        name = page.names[source]
        is_named = " class=named" if name in row.sources else ""
        lines += (
            f'<tr{is_named}><th scope="row" '
            f'class="{_colour(source)}"><b>{source + 1}</b> {escape(name)}</th>'
            f"<td>{format_number(cell.gives)}</td><td>{cell.beyond_gives}</td><td>{format_number(cell.lost)}</td>"
            f"<td>{cell.beyond_lost}</td></tr>"
        )
    verdict = row.verdict[:1].upper() + row.verdict[1:]
    by_word = f'<p class="soft">{escape(row.by_word)}</p>' if row.by_word else ""
    return (
        f'<section class="panel" id="panel{i}" aria-live="polite"><p class="quoted">'
        f"{escape(row.text)}</p><p><strong>{escape(verdict)}</strong></p>{by_word}{_chain(page.chains[i])}"
        f'<div class="wide" tabindex="0" role="region" aria-label="Numbers of the statement">'
        "<table><thead><tr><th rowspan=2></th><th colspan=2>among decoys</th>"
        "<th colspan=2>replaced by a decoy</th></tr><tr>"
        "<th>gives</th><th>beyond</th><th>lost</th><th>beyond</th>"
        f"</tr></thead><tbody>{lines}</tbody></table></div></section>"
    )


def _chain(steps: list[ReasoningStep]) -> str:
    """Return a list of what each sentence of the reasoning behind a statement relies on."""
    lines = "".join(
        f"<li>{'→ ' * (depth - 1)}{escape(f'{name}, “{row.text}”, {row.verdict}')}</li>"
        for depth, name, row in steps
    )
    return f'<ul class="chain">{lines}</ul>' if lines else ""


def _matrix(page: AnswerPage) -> str:
    """Return a table of statements and sources: the larger of what the source gives and what is
    lost without it."""
    head = "".join(
        f'<th scope="col" class="{_colour(i)}"><b title="{escape(name)}">{i + 1}</b></th>'
        for i, name in enumerate(page.names)
    )
    rows = []
    for i, row in enumerate(page.statements.itertuples()):
        effects = page.matrix.loc[i][["gives", "lost"]].max(axis=1)
        cells = ""
        for source, (name, nats) in enumerate(effects.items()):
            classes = f"{_colour(source)} named" if name in row.sources else ""
            cells += f'<td class="{classes}">{format_number(nats, 1)}</td>'
        rows.append(
            f'<tr id="row{i}"><th scope="row"><label for="s{i}">{i + 1}. {escape(row.text)}</label>'
            f"</th>{cells}</tr>"
        )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _prompt(page: AnswerPage) -> str:
    """Return all that precedes the answer, in order: sources, and between them what stays in
    view."""
    parts = list[str]()
    for text, source in page.prompt:
        text = escape(text.strip())
        if source is None:
            if text:
                parts.append(f'<p class="quoted soft">{text}</p>')
            continue
        row = page.sources.iloc[source]
        # Sources that a statement relies on are unfolded.
        is_open = " open" if row.statements else ""
        parts.append(
            f'<details id="source{source}" class="{_colour(source)}"{is_open}><summary>'
            f"<b>{source + 1}</b> {escape(row.source)} "
            f'<span class="soft">{escape(row.verdict)}</span></summary>'
            f'<p class="quoted">{text}</p></details>'
        )
    return "".join(parts)
