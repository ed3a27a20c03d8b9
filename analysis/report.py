"""One page for people: the text, and for each target the far tokens that mattered.

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
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.figures import figure2_svg
from analysis.results import Results, main_set
from analysis.summary import FAR_STATES
from olmo_sparsity.files import write_atomically

_FOLDER = Path(__file__).parent
_SETS = {
    "gap": "large gap",
    "content": "rare token seen far back",
    "zero_gap": "gap near zero",
    "planted": "planted dependency",
    "planted_removed": "planted dependency, taken out",
}


def write_report(results: Results, out: Path, max_documents: int | None = None) -> None:
    """`max_documents`: at most so many on the page, those with chosen targets first."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, _page(results, max_documents))


def _page(results: Results, max_documents: int | None) -> str:
    template = (_FOLDER / "report_page.html").read_text(encoding="utf-8")
    script = (_FOLDER / "report_page.js").read_text(encoding="utf-8")
    style = template.split("<style>")[1].split("</style>")[0]
    names = _names(results)
    documents = _choose_documents(results, max_documents)
    vocabulary = _vocabulary(results)
    written = [(d, _document_data(results, d, names, vocabulary)) for d in documents]
    page_data = names | {
        "words": _SETS,
        "windows": {
            name: int(_meta(results, "windows", name) or 0) for name in ("long", "short", "stride")
        },
        "documents": [
            [document, len(data["text"]), len(data["chosen"])] for document, data in written
        ],
    }
    slots = {
        "policy": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "title": f"{_escape(_meta(results, 'model', 'name') or 'a model')} · far tokens",
        "subtitle": _escape(_subtitle(results)),
        "gate": _gate(results),
        "headline": _headline(results),
        "shown": _escape(_shown(results, documents)),
        "figure": _image(figure2_svg([results])),
        "figure_dark": _image(figure2_svg([results], dark=True)),
        "figure_text": _escape(f"Figure 2 for {_subtitle(results)}."),
        "summary": _summary_tables(results),
        "meta": _escape(json.dumps(results.meta, indent=2, ensure_ascii=False)),
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
    both = pd.concat([results.influence.selector, results.recovery.selector])
    found = both.unique().tolist()
    asked = [s for s in results.meta.get("selectors", []) if s in found]
    return {
        "ks": [int(k) for k in sorted(results.recovery.k.unique())],
        "selectors": [*asked, *(s for s in found if s not in asked)],
        "sets": results.recovery.target_set.unique().tolist(),
    }


def _choose_documents(results: Results, max_documents: int | None) -> list[int]:
    searched = {*results.influence.document.unique(), *results.recovery.document.unique()}
    documents = sorted(results.tokens.document.unique(), key=lambda d: (d not in searched, d))
    return [int(document) for document in documents[:max_documents]]


def _document_data(
    results: Results, document: int, names: dict[str, list], vocabulary: dict[int, str]
) -> dict:
    """See `openDocument` and `fillPanel` of report_page.js for the reader of each entry."""
    tokens, losses = _rows(results.tokens, document), _rows(results.losses, document)
    recovery, influence = _rows(results.recovery, document), _rows(results.influence, document)
    chosen: dict[int, tuple[list[int], dict[int, list]]] = {}
    in_sets = recovery[["target", "target_set"]].drop_duplicates()
    for target, target_set in in_sets.itertuples(index=False):
        chosen.setdefault(target, ([], {}))[0].append(names["sets"].index(target_set))

    def side(target: int, selector: str, control: str) -> list:
        if target not in chosen:
            chosen[target] = ([], {})
        entry = chosen[target][1].setdefault(names["selectors"].index(selector), [None, None])
        place = 0 if control == "own" else 1
        if entry[place] is None:
            entry[place] = [[], [], None, []]
        return entry[place]

    by = ["target", "selector", "control"]
    ranked = influence.drop_duplicates([*by, "rank"])  # of several draws, the first
    ranked = ranked.sort_values([*by, "rank"])
    columns = [ranked[name].tolist() for name in (*by, "far_position", "influence", "far_token_id")]
    for (target, selector, control), rows in groupby(
        zip(*columns, strict=True), itemgetter(0, 1, 2)
    ):
        entry = side(target, selector, control)
        *_, entry[0], influences, token_ids = map(list, zip(*rows, strict=True))
        # Scores of a selector may all be small: so many digits, not so many decimals.
        entry[1] = [float(f"{value:.4g}") for value in influences]
        if control != "own":
            entry[3] = [vocabulary.get(i, f"token {i}") for i in token_ids]
    draws = recovery.groupby([*by, "k"]).loss_set.mean().unstack("k")
    draws = draws.reindex(columns=names["ks"])
    for (target, selector, control), curve in zip(draws.index, draws.to_numpy(), strict=True):
        side(int(target), selector, control)[2] = _rounded(curve)
    return {
        "text": _pieces(tokens),
        "targets": losses.target.tolist(),
        "long": _rounded(losses.loss_long),
        "short": _rounded(losses.loss_short),
        "chosen": [[target, *chosen[target]] for target in sorted(chosen)],
    }


def _pieces(tokens: pd.DataFrame) -> list[str]:
    """A model without a tokenizer has numbers for words."""
    if (tokens.text != "").any():
        return tokens.text.tolist()
    return [f"{token_id} " for token_id in tokens.token_id]


def _vocabulary(results: Results) -> dict[int, str]:
    """What token ids look like, as far as the measured documents show it."""
    seen = results.tokens[results.tokens.text != ""].drop_duplicates("token_id")
    return dict(zip(seen.token_id.tolist(), seen.text.tolist(), strict=True))


def _rows(table: pd.DataFrame, document: int) -> pd.DataFrame:
    first, last = np.searchsorted(table.document, [document, document + 1])  # tables are sorted
    return table.iloc[first:last]


def _rounded(values: Any) -> list[float | None]:
    """A ten-thousandth of a nat is enough to look at, and keeps a book's page small."""
    rounded = np.round(np.asarray(values, dtype=float), 4).tolist()
    return [value if np.isfinite(value) else None for value in rounded]


# ------------------------------------------------------------------ what stands on the page


def _meta(results: Results, section: str, name: str) -> Any:
    """meta.json is a file like any other: a section may be absent or no section at all."""
    found = results.meta.get(section)
    return found.get(name) if isinstance(found, dict) else None


def _subtitle(results: Results) -> str:
    parameters = _meta(results, "model", "num_parameters")
    reported = results.losses[results.losses.half == "report"]
    parts = [
        str(_meta(results, "model", "name") or "model without a name"),
        f"{parameters:,} parameters" if isinstance(parameters, int) else "",
        f"text: {_meta(results, 'data', 'source') or 'unknown'}",
        f"long window {_meta(results, 'windows', 'long')}, short window "
        f"{_meta(results, 'windows', 'short')}, stride {_meta(results, 'windows', 'stride')}",
        f"far tokens {FAR_STATES.get(_meta(results, 'windows', 'far_states'), '?')}",
        f"{len(reported):,} targets in {reported.document.nunique():,} reported documents",
    ]
    return " · ".join(part for part in parts if part)


def _shown(results: Results, documents: list[int]) -> str:
    num_documents = results.losses.document.nunique()
    too_short = _meta(results, "counts", "documents_too_short")
    said = f"{len(documents):,} of {num_documents:,} measured documents are on this page."
    return said + (f" {too_short:,} more were too short." if isinstance(too_short, int) else "")


def _gate(results: Results) -> str:
    has_induction = _meta(results, "gate", "has_induction")
    numbers = [_meta(results, "gate", name) for name in ("loss_first", "loss_repeated", "drop")]
    first, repeated, drop = (_number(value) for value in numbers)
    cost = f"A passage costs it {first} nats per token, repeated once {repeated}: a drop of {drop}."
    if has_induction is None:
        return _gate_note(
            True, "Whether this model can copy from its context was not measured.", ""
        )
    if has_induction:
        return _gate_note(False, "This model can copy from its context.", cost)
    return _gate_note(
        True,
        "This model has no induction.",
        f"{cost} It cannot use a far token that says the answer, so the numbers below do not speak "
        "for or against the claim.",
    )


def _gate_note(closed: bool, verdict: str, why: str) -> str:
    state = "gate closed" if closed else "gate"
    return f'<p class="{state}" role="note"><strong>{verdict}</strong> {_escape(why)}</p>'


def _headline(results: Results) -> str:
    rows = _paired(results.summary)
    rows = rows[rows.target_set == main_set(rows.target_set)]
    rows = rows.dropna(subset=["excess"])
    if not len(rows):
        return '<p class="headline">No target had influential tokens searched for.</p>'
    ks = sorted(rows.k.unique())
    k = 4 if 4 in ks else ks[len(ks) // 2]
    names = _names(results)["selectors"]
    first = [s for s in names if s in set(rows.selector)][:2]
    sentences = []
    for selector in first:
        for row in rows[(rows.selector == selector) & (rows.k == k)].itertuples():
            excess = _interval(row.excess, row.excess_low, row.excess_high)
            sentences.append(
                f'<p class="headline">With {k} far tokens, <b>{_escape(_spell(selector))}</b> '
                f"recovers {_number(row.recovery)} of the gap; tokens it chose in another document "
                f"recover {_number(row.recovery_foreign)}. Excess recovery: "
                f'<span class="headline-number">{excess}</span>.</p>'
            )
    return "\n".join(sentences)


def _paired(summary: pd.DataFrame) -> pd.DataFrame:
    """Rows of the document's own tokens, each with the recovery of its foreign control."""
    by = ["target_set", "selector", "k"]
    foreign = summary.loc[summary.control == "foreign", [*by, "recovery"]].drop_duplicates(by)
    own = summary[summary.control == "own"]
    return own.merge(foreign, on=by, how="left", suffixes=("", "_foreign"))


def _summary_tables(results: Results) -> str:
    rows = _paired(results.summary)
    order = {selector: i for i, selector in enumerate(_names(results)["selectors"])}
    tables: list[str] = []
    for target_set, some in rows.groupby("target_set", sort=False):
        some = some.sort_values(["k"]).sort_values(
            "selector", key=lambda s: s.map(order).fillna(len(order)), kind="stable"
        )
        one = some.iloc[0]
        caption = (
            f"Targets: {_spell_set(target_set)} · {one.num_targets:,} targets in "
            f"{one.num_documents:,} documents. Intervals: 95%, over documents."
        )
        columns = {
            "selector": [_spell(name) for name in some.selector],
            "k": [str(k) for k in some.k],
            "excess recovery": _intervals(some, "excess", "excess_low", "excess_high"),
            "recovery": _intervals(some, "recovery", "low", "high"),
            "foreign control": [_number(value) for value in some.recovery_foreign],
            "KL removed": [_number(value) for value in some.kl_removed],
            "token-forwards per target": [
                _number(value, 0) for value in some.token_forwards_per_target
            ],
        }
        tables.append(_table(caption, columns, is_open=not tables))
    kinds = results.dependencies
    for target_set, some in kinds.groupby("target_set", sort=False):
        columns = {
            "selector": [_spell(name) for name in some.selector],
            "kind": [_spell(kind) for kind in some.kind],
            "enrichment": _intervals(some, "enrichment", "low", "high"),
            "share of selected": [_number(value) for value in some.share],
            "share of far tokens": [_number(value) for value in some.base_share],
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
    values = [rows[column].tolist() for column in columns]
    return [_interval(*row) for row in zip(*values, strict=True)]


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
    return _SETS.get(str(name), _spell(name))


def _escape(text: Any) -> str:
    return html.escape(str(text), quote=True)


def _json_for_html(value: Any) -> str:
    """JSON that no HTML parser and no old script parser can mistake for anything else."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _image(svg: bytes) -> str:
    """An image runs no script and loads nothing, whatever it holds."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
