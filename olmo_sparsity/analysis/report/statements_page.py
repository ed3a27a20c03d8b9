"""Write an answer as an HTML page, each statement in the colour of its source.

Place in the flow: verdicts (statements.py) → here, last. Never imports torch.

The page is one file without script: a statement is a radio button, which arrow keys move between,
and CSS shows the numbers of the chosen one. Text of sources and models is untrusted and written
through `escape`. The template is statements_page.html.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmo_sparsity.analysis.report.page import write_html
from olmo_sparsity.analysis.results.view import escape, number

if TYPE_CHECKING:
    from olmo_sparsity.analysis.attribution.statements import Attribution

NUM_COLOURS = 8
"""Sources beyond share them; each also has its number."""


def write_page(found: Attribution, path: Path) -> None:
    style = "\n".join(
        f"body:has(#s{i}:checked) :is(#panel{i}, .note{i}) {{ display: block; }}\n"
        f"body:has(#s{i}:checked) :is(#row{i}{_relied_on(found, row)}) "
        "{ outline: 3px solid var(--focus); }"
        for i, row in enumerate(found.statements.itertuples())
    )
    slots = {
        "title": f"{escape(found.prompt.model.name)} · sources",
        "subtitle": escape(_subtitle(found)),
        "rate": escape(found.error_rate),
        "key": _key(found),
        "answer": _answer(found),
        "panels": "".join(_panel(found, i) for i in range(len(found.texts))),
        "matrix": _matrix(found),
        "prompt": _prompt(found),
    }
    write_html(path, "statements_page.html", slots, style=style)


def lit_answer(found: Attribution) -> str:
    """Return the answer and its verdicts as HTML for a notebook, with inline colours."""
    colours = (
        "#ffd9b3",
        "#cfe5fb",
        "#cdeedd",
        "#f6d2ea",
        "#fdf1ac",
        "#dcd6f7",
        "#d9e6b8",
        "#e4e0d8",
    )
    spans, rows = [], []
    for text, number_of in found.pieces:
        if number_of is None:
            spans.append(escape(text))
            continue
        row = found.statements.iloc[number_of]
        tints = [colours[found.names.index(name) % NUM_COLOURS] for name in row.sources]
        stops = ", ".join([*tints, *tints][: max(2, len(tints))]) or "transparent, transparent"
        style = f"background:linear-gradient(90deg, {stops});color:#1d1b18" if tints else ""
        spans.append(f'<span style="{style}">{escape(text)}</span>')
        rows.append(f"<li>{escape(row.verdict)}</li>")
    return (
        f'<div style="white-space:pre-wrap">{"".join(spans)}</div><ol>{"".join(rows)}</ol>'
        f"<small>{escape(found.error_rate)}</small>"
    )


# --- parts of the page ----------------------------------------------------------------------------


def _subtitle(found: Attribution) -> str:
    count, settings = found.statements.kind.ne("none").sum(), found.settings
    return (
        f"{found.prompt.model.name} · {len(found.names)} sources, {settings.draws} decoys of each "
        f"at most · {count} of {len(found.texts)} statements rely on a source"
    )


def _colour(source: int) -> str:
    return f"c{source % NUM_COLOURS}"


def _chosen(found: Attribution, row: Any) -> list[int]:
    return [found.names.index(name) for name in row.sources]


def _mark(found: Attribution, row: Any) -> str:
    """The numbers of its sources: colour alone would not do."""
    joint = " or " if row.kind == "either" else " + "
    return joint.join(str(source + 1) for source in _chosen(found, row)) or "none"


def _key(found: Attribution) -> str:
    return "".join(
        f'<li class="{_colour(i)}"><b>{i + 1}</b> {escape(name)}</li>'
        for i, name in enumerate(found.names)
    )


def _answer(found: Attribution) -> str:
    parts = []
    for text, i in found.pieces:
        if i is None:
            parts.append(escape(text))
            continue
        row = found.statements.iloc[i]
        chosen = _chosen(found, row)
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
            f"<sup>{_mark(found, row)}</sup></label>{escape(after)}"
        )
    return "".join(parts)


def _panel(found: Attribution, i: int) -> str:
    row, cells = found.statements.iloc[i], found.matrix.loc[i]
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
        f"{escape(row.text)}</p><p><strong>{escape(verdict)}</strong></p>{_chain(found, row)}"
        f'<div class="wide" tabindex="0" role="region" aria-label="Numbers of the statement">'
        "<table><thead><tr><th rowspan=2></th><th colspan=2>among decoys</th>"
        "<th colspan=2>replaced by a decoy</th></tr><tr>"
        "<th>gives</th><th>beyond</th><th>lost</th><th>beyond</th>"
        f"</tr></thead><tbody>{lines}</tbody></table></div></section>"
    )


def _chain(found: Attribution, row: Any) -> str:
    """List what each sentence of the reasoning behind a statement relies on."""
    lines = "".join(
        f"<li>{'→ ' * (depth - 1)}{escape(f'{name}, “{step.text}”, {step.verdict}')}</li>"
        for depth, name, step in found.chain(row.sources)
    )
    return f'<ul class="chain">{lines}</ul>' if lines else ""


def _matrix(found: Attribution) -> str:
    """The larger of what each source gives and what is lost without it."""
    head = "".join(
        f'<th scope="col" class="{_colour(i)}"><b title="{escape(name)}">{i + 1}</b></th>'
        for i, name in enumerate(found.names)
    )
    rows = []
    for i, row in enumerate(found.statements.itertuples()):
        cells = found.matrix.loc[i]
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


def _prompt(found: Attribution) -> str:
    """All that precedes the answer, in order: sources, and between them what stays in view."""
    texts, verdicts = found.layout.document.texts, found.sources
    parts, at = list[str](), 0
    for piece in [*found.prompt.pieces, None]:
        num = len(found.prompt.near_ids) if piece is None else len(piece.text_ids)
        text = escape("".join(texts[at : at + num]).strip())
        at += num + (0 if piece is None else len(piece.after_ids))
        if piece is None or piece.source is None:
            parts += [f'<p class="quoted soft">{text}</p>'] if text else []
            continue
        i, row = piece.source, verdicts.iloc[piece.source]
        is_open = " open" if row.statements else ""
        parts.append(
            f'<details id="source{i}" class="{_colour(i)}"{is_open}><summary><b>{i + 1}</b> '
            f'{escape(row.source)} <span class="soft">{escape(row.verdict)}</span></summary>'
            f'<p class="quoted">{text}</p></details>'
        )
    return "".join(parts)


def _relied_on(found: Attribution, row: Any) -> str:
    names = dict.fromkeys((*row.sources, *row.origins))
    return "".join(f", #source{found.names.index(name)}" for name in names)
