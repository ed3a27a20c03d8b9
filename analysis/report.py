"""One page for people: the text, and for each target the far units that mattered.

Place in the flow: results → here, last. Never imports torch.

The page is one file that asks the network for nothing. Everything from a document, tokenizer,
model name or meta.json is untrusted: what Python writes goes through `html.escape`, what the page's
script shows is JSON that becomes `textContent`, and the Content-Security-Policy lets run only the
one script and style whose hashes it names. report_page.html and report_page.js are the page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.figures import figure2_svg
from analysis.results import SETS, Results, main_set
from analysis.statistics import KEYS
from analysis.summary import FAR_STATES, describe_gap
from olmo_sparsity.files import write_atomically

_FOLDER = Path(__file__).parent


def write_report(results: Results, out: Path, max_documents: int | None = None) -> None:
    """`max_documents`: at most so many on the page, those with chosen targets first."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    tables = ("influence", "recovery", "targets")
    of_documents = {name: _of_documents(getattr(results, name)) for name in tables}
    write_atomically(out, _page(results, replace(results, **of_documents), max_documents))


def _of_documents(rows: pd.DataFrame) -> pd.DataFrame:
    """The placebo stands in tables and figure; nobody points at it."""
    return rows[rows.far_part == "document"]


def _page(everything: Results, results: Results, max_documents: int | None) -> str:
    template = (_FOLDER / "report_page.html").read_text(encoding="utf-8")
    script = (_FOLDER / "report_page.js").read_text(encoding="utf-8")
    style = template.split("<style>")[1].split("</style>")[0]
    names = _names(results)
    documents = _choose_documents(results, max_documents)
    written = [(d, _document_data(results, d, names)) for d in documents]
    page_data = names | {
        "words": SETS,
        "windows": {name: results.meta.windows[name] for name in ("long", "short", "stride")},
        "documents": [
            [document, len(data["text"]), len(data["chosen"])] for document, data in written
        ],
        "start": _start(results, names, documents),
    }
    slots = {
        "policy": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "title": f"{_escape(results.meta.model['name'])} · far units",
        "subtitle": _escape(_subtitle(results)),
        "gate": _gate(results),
        "headline": _headline(results),
        "shown": _escape(_shown(results, documents)),
        "figure": _image(figure2_svg([everything])),
        "figure_dark": _image(figure2_svg([everything], dark=True)),
        "figure_text": _escape(f"Figure 2 for {_subtitle(results)}."),
        "summary": _summary_tables(results),
        "meta": _escape(json.dumps(asdict(results.meta), indent=2, ensure_ascii=False)),
        "page_data": _json_for_html(page_data),
        "document_data": "\n".join(
            f'<script type="application/json" id="document-{document}">'
            f"{_json_for_html(data)}</script>"
            for document, data in written
        ),
        "script": script,
    }
    # One pass: what fills a slot is never searched for slots.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], template)


# ------------------------------------------------------------------ what the script reads


def _names(results: Results) -> dict[str, list]:
    """Names that the documents' data refer to by number, in the order they are offered."""
    meta, asked = results.meta, results.recovery
    return {
        "ks": sorted(asked.k.unique().tolist()),
        "units": _in_order(meta.units, asked.units, results.influence.units),
        "selectors": _in_order(meta.selectors, asked.selector, results.influence.selector),
        "sets": _in_order(SETS, results.targets.target_set),
    }


def _in_order(order: Iterable[str], *columns: pd.Series) -> list[str]:
    found = pd.concat(columns).unique().tolist()
    return [name for name in order if name in found] + [n for n in found if n not in order]


def _choose_documents(results: Results, max_documents: int | None) -> list[int]:
    searched = set(results.targets.document)
    documents = sorted(results.tokens.document.unique(), key=lambda d: (d not in searched, d))
    return [int(document) for document in documents[:max_documents]]


def _start(results: Results, names: dict[str, list], documents: list[int]) -> int:
    """The place of the document whose target gains most by its own first units, net of foreign."""
    rows = results.recovery[results.recovery.document.isin(documents)]
    for column, values in (("k", "ks"), ("units", "units"), ("selector", "selectors")):
        rows = rows[rows[column].isin(names[values][:1])]
    losses = rows.groupby([*KEYS, "control"]).loss_set.mean().unstack("control")
    if not {"own", "foreign"} <= set(losses):
        return 0
    gains = (losses.foreign - losses.own).dropna()
    return documents.index(gains.idxmax()[0]) if len(gains) else 0


def _document_data(results: Results, document: int, names: dict[str, list]) -> dict:
    """See `openDocument` and `fillPanel` of report_page.js for the reader of each entry."""
    tokens, losses = _rows(results.tokens, document), _rows(results.losses, document)
    recovery, influence = _rows(results.recovery, document), _rows(results.influence, document)
    chosen: dict[int, tuple[list[int], dict[str, list]]] = {}
    in_sets = _columns(_rows(results.targets, document), "target", "target_set")
    for target, name in zip(*in_sets, strict=True):
        chosen.setdefault(target, ([], {}))[0].append(names["sets"].index(name))

    def side(target: int, units: str, selector: str, control: str) -> list:
        numbers = f"{names['units'].index(units)} {names['selectors'].index(selector)}"
        sides = chosen.setdefault(target, ([], {}))[1].setdefault(numbers, [None, None])
        place = 0 if control == "own" else 1
        sides[place] = sides[place] or [[], [], [], None, []]
        return sides[place]

    by = ["target", "units", "selector", "control"]
    ranked = influence.sort_values([*by, "rank"])
    ranked = ranked.assign(width=ranked.far_end - ranked.far_first)
    columns = _columns(ranked, *by, "far_first", "width", "influence", "far_text")
    for key, rows in groupby(zip(*columns, strict=True), itemgetter(0, 1, 2, 3)):
        entry = side(*key)
        *_, entry[0], entry[1], influences, texts = map(list, zip(*rows, strict=True))
        # Scores of a selector may all be small: so many digits, not so many decimals.
        entry[2] = [float(f"{value:.4g}") for value in influences]
        if key[-1] != "own":
            entry[4] = texts
    draws = recovery.groupby([*by, "k"]).loss_set.mean().unstack("k")
    draws = draws.reindex(columns=names["ks"])
    for key, curve in zip(draws.index, draws.to_numpy(), strict=True):
        side(*key)[3] = _rounded(curve)
    return {
        "text": _pieces(tokens),
        "targets": losses.target.tolist(),
        "long": _rounded(losses.loss_long),
        "short": _rounded(losses.loss_short),
        "chosen": [[target, *chosen[target]] for target in sorted(chosen)],
    }


def _columns(rows: pd.DataFrame, *names: str) -> list[list]:
    return [rows[name].tolist() for name in names]


def _pieces(tokens: pd.DataFrame) -> list[str]:
    """A model without a tokenizer has numbers for words."""
    if (tokens.text != "").any():
        return tokens.text.tolist()
    return [f"{token_id} " for token_id in tokens.token_id]


def _rows(table: pd.DataFrame, document: int) -> pd.DataFrame:
    first, last = np.searchsorted(table.document, [document, document + 1])  # tables are sorted
    return table.iloc[first:last]


def _rounded(values: Any) -> list[float | None]:
    """A ten-thousandth of a nat is enough to look at, and keeps a book's page small."""
    rounded = np.round(np.asarray(values, dtype=float), 4).tolist()
    return [value if np.isfinite(value) else None for value in rounded]


# ------------------------------------------------------------------ what stands on the page


def _subtitle(results: Results) -> str:
    meta, windows, reported = results.meta, results.meta.windows, results.reported
    parts = [
        str(meta.model["name"]),
        f"{_number(meta.model['num_parameters'], 0)} parameters",
        f"text: {meta.data['source']}",
        f"long window {windows['long']}, short window {windows['short']}, "
        f"stride {windows['stride']}",
        f"far units {FAR_STATES[windows['far_states']]}",
        f"{len(reported):,} targets in {reported.document.nunique():,} reported documents",
    ]
    return " · ".join(parts)


def _shown(results: Results, documents: list[int]) -> str:
    num_documents = results.losses.document.nunique()
    too_short = results.meta.counts.get("documents_too_short")
    said = f"{len(documents):,} of {num_documents:,} measured documents are on this page."
    return said + (f" {_number(too_short, 0)} more were too short." if too_short else "")


def _gate(results: Results) -> str:
    gate = results.meta.gate
    verdict, why = "Whether this model can copy from its context was not measured.", ""
    if gate:
        first, repeated, drop = (_number(gate[n]) for n in ("loss_first", "loss_repeated", "drop"))
        why = f"A passage costs it {first} nats per token, repeated once {repeated}: "
        why += f"a drop of {drop}."
        verdict = "This model can copy from its context."
        if not gate["has_induction"] and not len(results.planted):
            verdict = "This model has no induction."
            why += " It cannot use a far unit that says the answer, so the numbers below do not "
            why += "speak for or against the claim."
    state = "gate" if gate.get("has_induction") else "gate closed"
    return f'<p class="{state}" role="note"><strong>{verdict}</strong> {_escape(why)}</p>'


def _headline(results: Results) -> str:
    rows, names = results.summary, _names(results)
    rows = rows[rows.target_set == main_set(rows.target_set)].dropna(subset=["excess"])
    if not len(rows):
        return '<p class="headline">No target had influential units searched for.</p>'
    ks = sorted(rows.k.unique())
    k = 1 if 1 in ks else ks[len(ks) // 2]
    units = _in_order(names["units"], rows.units)[0]
    rows = rows[(rows.k == k) & (rows.units == units)].set_index("selector")
    sentences = []
    for selector in _in_order(names["selectors"], rows.index.to_series())[:2]:
        row = rows.loc[selector]
        name, title, placebo = "excess", "Excess", "there is no placebo"
        if not pd.isna(row.net):
            name, title = "net", "Net excess"
            placebo = f"with an unrelated text as far part the excess is {_number(row.placebo)}"
        beyond = _interval(row[name], row[f"{name}_low"], row[f"{name}_high"])
        sentences.append(
            f'<p class="headline">{title} recovery of '
            f"<b>{_escape(_spell(selector))}</b> with k = {k} ({_escape(units)}): "
            f'<span class="headline-number">{beyond}</span>. Its far units recover '
            f"{_number(row.recovery)} of the gap, those that it chose in another text "
            f"{_number(row.foreign)}; {placebo}.</p>"
        )
    if results.meta.targets.get("threshold") is not None:
        sentences.append(f"<p>{_escape(describe_gap(results))}.</p>")
    return "\n".join(sentences)


def _summary_tables(results: Results) -> str:
    names, summary, tables = _names(results), results.summary, []
    order = {name: i for i, name in enumerate([*names["selectors"], *names["units"]])}
    for target_set in _in_order(SETS, summary.target_set):
        some = summary[summary.target_set == target_set].sort_values(
            ["selector", "units", "k"], key=lambda c: c if c.name == "k" else c.map(order)
        )
        one = some.iloc[0]
        caption = (
            f"Targets: {_spell_set(target_set)} · {one.num_targets:,} targets in "
            f"{one.num_documents:,} documents, {one.num_placebo_targets:,} of the placebo. "
            "Intervals: 95%, over documents."
        )
        columns = {
            "selector": [_spell(name) for name in some.selector],
            "units": some.units.tolist(),
            "k": [str(k) for k in some.k],
            "net excess": _intervals(some, "net", "net_low", "net_high"),
            "excess": _intervals(some, "excess", "excess_low", "excess_high"),
            "placebo": _numbers(some.placebo),
            "recovery": _intervals(some, "recovery", "low", "high"),
            "foreign control": _numbers(some.foreign),
            "KL removed": _numbers(some.kl_removed),
            "token-forwards per target": _numbers(some.token_forwards_per_target, 0),
        }
        tables.append(_table(caption, columns, target_set == main_set(summary.target_set)))
    kinds = results.dependencies
    for target_set, some in kinds.groupby("target_set", sort=False):
        columns = {
            "selector": [_spell(name) for name in some.selector],
            "k": [str(k) for k in some.k],
            "kind": [_spell(kind) for kind in some.kind],
            "enrichment": _intervals(some, "enrichment", "low", "high"),
            "share of selected": _numbers(some.share),
            "share of far tokens": _numbers(some.base_share),
            "excess recovery": _intervals(some, "excess_recovery", "excess_low", "excess_high"),
            "targets": [f"{num:,}" for num in some.num_targets],
        }
        tables.append(
            _table(f"Kinds of far tokens, targets: {_spell_set(target_set)}", columns, False)
        )
    return "\n".join(tables) or "<p>Nothing was measured.</p>"


def _table(caption: str, columns: dict[str, list[str]], is_open: bool) -> str:
    """The first column groups the rows; its cell is written once per group."""
    head = "".join(f'<th scope="col">{_escape(name)}</th>' for name in columns)
    groups, *cells = columns.values()
    lines = []
    for i, group in enumerate(groups):
        begins = i == 0 or groups[i - 1] != group
        span = next((n for n, g in enumerate(groups[i:]) if g != group), len(groups) - i)
        first = f'<th scope="rowgroup" rowspan="{span}">{_escape(group)}</th>' if begins else ""
        others = "".join(f"<td>{_escape(column[i])}</td>" for column in cells)
        lines.append(f"<tr{' class=group' if begins else ''}>{first}{others}</tr>")
    return (
        f"<details{' open' if is_open else ''}><summary>{_escape(caption)}</summary>"
        f'<div class="wide" tabindex="0" role="region" aria-label="{_escape(caption)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def _intervals(rows: pd.DataFrame, *columns: str) -> list[str]:
    return [_interval(*row) for row in zip(*_columns(rows, *columns), strict=True)]


def _numbers(values: pd.Series, digits: int = 2) -> list[str]:
    return [_number(value, digits) for value in values]


def _interval(value: Any, low: Any, high: Any) -> str:
    said = _number(value)
    return said if said == "–" else f"{said} [{_number(low)}, {_number(high)}]"


def _number(value: Any, digits: int = 2) -> str:
    if not isinstance(value, int | float) or not np.isfinite(value):
        return "–"
    # Adding 0 turns a rounded −0 into 0.
    return f"{round(value, digits) + 0:,.{digits}f}".replace("-", "−")


def _spell(name: Any) -> str:
    return str(name).replace("_", " ")


def _spell_set(name: Any) -> str:
    return SETS.get(str(name), _spell(name))


# Marks that turn the direction of what follows them would reorder the page around a text.
_DIRECTIONS = {c: f"⟨U+{c:04X}⟩" for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def _escape(text: Any) -> str:
    return html.escape(str(text).translate(_DIRECTIONS), quote=True)


def _json_for_html(value: Any) -> str:
    """JSON that no HTML parser and no old script parser can mistake for anything else."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.translate(_DIRECTIONS)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _image(svg: bytes) -> str:
    """An image runs no script and loads nothing, whatever it holds."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
