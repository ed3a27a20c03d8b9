"""Write an answer as an HTML page, each statement in the colour of its source. It has no script: a
statement is a radio button, and CSS shows the numbers of the chosen one (statements_page.html)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.report.page import write_html
from olmo_sparsity.analysis.results.view import escape, number

NUM_COLOURS = 8  # sources beyond share them; each also has its number


@dataclass(frozen=True)
class AnswerPage:
    """What the page shows of an answer."""

    model: str
    error_rate: str
    names: list[str]  # of the sources
    draws: int  # decoys of each source at most
    pieces: list[tuple[str, int | None]]  # texts of the answer, each with its statement's number
    statements: pd.DataFrame
    matrix: pd.DataFrame
    sources: pd.DataFrame
    prompt: list[tuple[str, int | None]]  # texts before the answer, each with its source's number
    chains: list[list[tuple[int, str, Any]]]  # of each statement: depth, name, row of reasoning

    def write(self, path: Path) -> None:
        style = "\n".join(
            f"body:has(#s{i}:checked) :is(#panel{i}, .note{i}) {{ display: block; }}\n"
            f"body:has(#s{i}:checked) :is(#row{i}{_relied_on(self, row)}) "
            "{ outline: 3px solid var(--focus); }"
            for i, row in enumerate(self.statements.itertuples())
        )
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
        write_html(path, "statements_page.html", slots, style=style)


def _subtitle(page: AnswerPage) -> str:
    count = page.statements.kind.ne("none").sum()
    return (
        f"{page.model} · {len(page.names)} sources, {page.draws} decoys of each at most · "
        f"{count} of {len(page.statements)} statements rely on a source"
    )


def _colour(source: int) -> str:
    return f"c{source % NUM_COLOURS}"


def _chosen(page: AnswerPage, row: Any) -> list[int]:
    return [page.names.index(name) for name in row.sources]


def _mark(page: AnswerPage, row: Any) -> str:
    """The numbers of its sources: colour alone would not do."""
    joint = " or " if row.kind == "either" else " + "
    return joint.join(str(source + 1) for source in _chosen(page, row)) or "none"


def _key(page: AnswerPage) -> str:
    return "".join(
        f'<li class="{_colour(i)}"><b>{i + 1}</b> {escape(name)}</li>'
        for i, name in enumerate(page.names)
    )


def _answer(page: AnswerPage) -> str:
    parts = []
    for text, i in page.pieces:
        if i is None:
            parts.append(escape(text))
            continue
        row = page.statements.iloc[i]
        chosen = _chosen(page, row)
        classes = f"{_colour(chosen[0])} {'several' if len(chosen) > 1 else ''}" if chosen else "no"
        second = f' data-second="{_colour(chosen[1])}"' if len(chosen) > 1 else ""
        word = text.strip()
        before, after = text[: text.find(word)], text[text.find(word) + len(word) :]
        before = before if i else ""  # the answer begins where its first line does
        checked = " checked" if i == 0 else ""
        parts.append(
            f'{escape(before)}<input type="radio" name="statement" id="s{i}"{checked} '
            f'aria-label="{escape(word)}: {escape(row.verdict)}">'
            f'<label for="s{i}" class="statement {classes}"{second}>{escape(word)}'
            f"<sup>{_mark(page, row)}</sup></label>{escape(after)}"
        )
    return "".join(parts)


def _panel(page: AnswerPage, i: int) -> str:
    row, cells = page.statements.iloc[i], page.matrix.loc[i]
    lines = "".join(
        f'<tr{" class=named" if name in row.sources else ""}><th scope="row" '
        f'class="{_colour(number_of)}"><b>{number_of + 1}</b> {escape(name)}</th>'
        f"<td>{number(cell.gives)}</td><td>{cell.beyond_gives}</td><td>{number(cell.lost)}</td>"
        f"<td>{cell.beyond_lost}</td></tr>"
        for number_of, (name, cell) in enumerate(zip(cells.index, cells.itertuples(), strict=True))
    )
    verdict = row.verdict[:1].upper() + row.verdict[1:]
    return (
        f'<section class="panel" id="panel{i}" aria-live="polite"><p class="quoted">'
        f"{escape(row.text)}</p><p><strong>{escape(verdict)}</strong></p>{_chain(page.chains[i])}"
        f'<div class="wide" tabindex="0" role="region" aria-label="Numbers of the statement">'
        "<table><thead><tr><th rowspan=2></th><th colspan=2>among decoys</th>"
        "<th colspan=2>replaced by a decoy</th></tr><tr>"
        "<th>gives</th><th>beyond</th><th>lost</th><th>beyond</th>"
        f"</tr></thead><tbody>{lines}</tbody></table></div></section>"
    )


def _chain(chain: list[tuple[int, str, Any]]) -> str:
    """List what each sentence of the reasoning behind a statement relies on."""
    lines = "".join(
        f"<li>{'→ ' * (depth - 1)}{escape(f'{name}, “{step.text}”, {step.verdict}')}</li>"
        for depth, name, step in chain
    )
    return f'<ul class="chain">{lines}</ul>' if lines else ""


def _matrix(page: AnswerPage) -> str:
    """The larger of what each source gives and what is lost without it."""
    head = "".join(
        f'<th scope="col" class="{_colour(i)}"><b title="{escape(name)}">{i + 1}</b></th>'
        for i, name in enumerate(page.names)
    )
    rows = []
    for i, row in enumerate(page.statements.itertuples()):
        cells = page.matrix.loc[i]
        shown = "".join(
            f'<td class="{f"{_colour(s)} named" if name in row.sources else ""}">{number(value, 1)}'
            "</td>"
            for s, (name, value) in enumerate(cells[["gives", "lost"]].max(axis=1).items())
        )
        rows.append(
            f'<tr id="row{i}"><th scope="row"><label for="s{i}">{i + 1}. {escape(row.text)}</label>'
            f"</th>{shown}</tr>"
        )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _prompt(page: AnswerPage) -> str:
    """All that precedes the answer, in order: sources, and between them what stays in view."""
    parts = list[str]()
    for text, source in page.prompt:
        text = escape(text.strip())
        if source is None:
            parts += [f'<p class="quoted soft">{text}</p>'] if text else []
            continue
        row = page.sources.iloc[source]
        is_open = " open" if row.statements else ""
        parts.append(
            f'<details id="source{source}" class="{_colour(source)}"{is_open}><summary>'
            f"<b>{source + 1}</b> {escape(row.source)} "
            f'<span class="soft">{escape(row.verdict)}</span></summary>'
            f'<p class="quoted">{text}</p></details>'
        )
    return "".join(parts)


def _relied_on(page: AnswerPage, row: Any) -> str:
    names = dict.fromkeys((*row.sources, *row.origins))
    return "".join(f", #source{page.names.index(name)}" for name in names)
