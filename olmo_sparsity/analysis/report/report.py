"""Write an HTML page of a measurement or an explanation: the text, and distant units of each
target, by report_page.html and report_page.js, which reads the data from JSON. Never imports
torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.report.page import json_for_html, write_html
from olmo_sparsity.analysis.results.columns import SummaryColumn, page_columns
from olmo_sparsity.analysis.results.meta import SETS, main_set
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.statistics import distances, losses_of_targets, with_ends
from olmo_sparsity.analysis.results.summary import (
    conclude,
    describe_few,
    describe_gap,
    describe_induction,
    describe_noise,
    describe_placebo,
    describe_sink,
    has_net,
    quoted_row_of,
)
from olmo_sparsity.analysis.results.view import (
    escape,
    html_table,
    num_of,
    number,
    sentence,
    spell,
)
from olmo_sparsity.config.windows import long_window


def write_report(results: Results, out: Path, max_documents: int | None = None) -> None:
    """`max_documents`: the most documents on the page; documents with targets come first."""
    documents, reported = _choose_documents(results, max_documents), results.reported
    num_documents = num_of(reported.document.nunique(), "reported document")
    counted = f"{num_of(len(reported), 'target')} in {num_documents}"
    because = describe_gap(results) if results.meta.targets.get("threshold") is not None else ""
    slots = {
        "subtitle": escape(subtitle(results, counted)),
        "note": _induction(results),
        "headline": f'<p class="headline">{escape(conclude(results))}</p>'
        + (f'<p class="soft">{escape(sentence(because))}</p>' if because else ""),
        "shown": escape(_shown(results, documents)),
        "numbers_title": "The numbers",
        "numbers": _summary_tables(results),
    }
    write_page(Path(out), results, documents, slots, {"measurement", "numbers"})


def write_page(
    out: Path, results: Results, documents: list[int], slots: dict[str, str], parts: set[str]
) -> None:
    """Write texts with the distant units of their targets, without the placebo's. `parts`: the
    optional parts of the template to keep."""
    tables = {n: getattr(results, n) for n in ("influence", "recovery", "targets")}
    own = {name: rows[rows.distant_part == "document"] for name, rows in tables.items()}
    results = replace(results, **own)
    names = _names(results)
    written = [(d, _document_data(results, d, names)) for d in documents]
    titles = dict(zip(results.documents.document, results.documents.name, strict=True))
    page_data = names | {
        "set_names": [results.spell_set(name) for name in names["sets"]],
        "documents": [
            {"id": id, "name": titles.get(id) or str(id), "num_targets": len(data["chosen"])}
            for id, data in written
        ],
    }
    meta = {name: value for name, value in asdict(results.meta).items() if value or value == 0}
    slots = slots | {
        "title": f"{escape(results.meta.model['name'])} · distant units",
        "meta": escape(json.dumps(meta, indent=2, ensure_ascii=False)),
        "page_data": json_for_html(page_data),
        "document_data": "\n".join(
            f'<script type="application/json" id="document-{id}">{json_for_html(data)}</script>'
            for id, data in written
        ),
    }
    write_html(out, "report_page.html", slots, parts=parts, script="report_page.js")


def _names(results: Results) -> dict[str, list]:
    """Names that the documents' data refer to by index, in the order of the menus."""
    meta, recovery = results.meta, results.recovery
    return {
        "ks": sorted(recovery.k.unique().tolist()),
        "units": _in_order(meta.units, recovery.units, results.influence.units),
        "selectors": _in_order(meta.selectors, recovery.selector, results.influence.selector),
        "sets": _in_order(SETS, results.targets.target_set),
    }


def _in_order(order: Iterable[str], *columns: pd.Series) -> list[str]:
    names = pd.concat(columns).unique().tolist()
    return [name for name in order if name in names] + [n for n in names if n not in order]


def _choose_documents(results: Results, max_documents: int | None) -> list[int]:
    chosen = set(results.targets.document[results.targets.distant_part == "document"])
    documents = sorted(results.tokens.document.unique(), key=lambda d: (d not in chosen, d))
    return [int(document) for document in documents[:max_documents]]


def _document_data(results: Results, document: int, names: dict[str, list]) -> dict[str, Any]:
    """The data that `openDocument` and `fillPanel` of report_page.js read. `found` is keyed by the
    numbers of units and selector in the menus; `own` and `unrelated` hold a loss for each k, and
    `own` a list value for each rank."""
    tokens, targets = _rows(results.tokens, document), _rows(results.targets, document)
    losses = losses_of_targets(_rows(results.losses, document), targets)
    recovery, influence = _rows(results.recovery, document), _rows(results.influence, document)
    searched = [*targets.target, *recovery.target, *influence.target]
    losses = losses[losses.target.isin(searched)]
    numbers = _columns(losses, "target")[0], _rounded(losses.loss_short), _rounded(losses.loss_long)
    chosen: dict[int, dict[str, Any]] = {
        target: {"target": target, "short": short, "long": long, "sets": [], "found": {}}
        for target, short, long in zip(*numbers, strict=True)
    }

    def side(target: int, units: str, selector: str, control: str) -> dict[str, Any]:
        place = f"{names['units'].index(units)} {names['selectors'].index(selector)}"
        both = chosen[target]["found"].setdefault(place, {})
        empty: dict[str, Any] = {"first": [], "width": [], "influence": []}
        return both.setdefault(control, empty if control == "own" else {})

    for target, name in zip(*_columns(targets, "target", "target_set"), strict=True):
        chosen[target]["sets"].append(names["sets"].index(name))
    by = ["target", "units", "selector", "control"]
    ranked = influence[influence.control == "own"].sort_values([*by, "rank"])
    ranked = ranked.assign(width=ranked.distant_end - ranked.distant_first)
    columns = _columns(ranked, *by, "distant_first", "width", "influence")
    for key, rows in groupby(zip(*columns, strict=True), itemgetter(0, 1, 2, 3)):
        entry = side(*key)
        *_, entry["first"], entry["width"], scores = map(list, zip(*rows, strict=True))
        # Significant digits rather than decimals, as the scores of a selector may be small.
        entry["influence"] = [float(f"{score:.4g}") for score in scores]
    draws = recovery.groupby([*by, "k"]).loss_set.mean().unstack("k")
    draws = draws.reindex(columns=names["ks"])
    for key, curve in zip(draws.index, draws.to_numpy(), strict=True):
        side(*key)["loss"] = _rounded(curve)
    spans = losses if "end" in losses else with_ends(targets)
    ends = zip(*_columns(spans, "target", "end"), strict=True)
    ids = tokens.token_id.astype(str) + " "  # without a tokenizer
    return {
        "text": (tokens.text if any(tokens.text) else ids).tolist(),
        "ends": {target: end for target, end in ends if end > target + 1},
        "chosen": [chosen[target] for target in sorted(chosen)],
    }


def _columns(rows: pd.DataFrame, *names: str) -> list[list]:
    return [rows[name].tolist() for name in names]


def _rows(table: pd.DataFrame, document: int) -> pd.DataFrame:
    first, last = np.searchsorted(table.document, [document, document + 1])  # tables are sorted
    return table.iloc[first:last]


def _rounded(values: Any) -> list[float | None]:
    """To a ten-thousandth of a nat, which keeps the page of a book small."""
    rounded = np.round(np.asarray(values, dtype=float), 4).tolist()
    return [value if np.isfinite(value) else None for value in rounded]


def subtitle(results: Results, counted: str) -> str:
    meta, windows = results.meta, results.meta.windows
    long = long_window(windows["long"]).description
    long = f"of at most {windows['most']}" if windows.get("most") else long
    lengths = f"long window {long}, local window {windows['short']}"
    lengths += f", stride {windows['stride']}" if windows["stride"] > 1 else ""
    if num_prefix := len(windows.get("prefix", ())):
        lengths += f", both after a prefix of {num_prefix} token{'s' if num_prefix > 1 else ''}"
    parts = [str(meta.model["name"]), f"{number(meta.model['num_parameters'], 0)} parameters"]
    parts += [f"text: {meta.data['source']}"] if meta.data else []
    parts += [
        lengths,
        f"distant units {interpretation_of(windows['distant_states']).description}",
        counted,
        results.missing,
    ]
    parts += [describe_noise(meta.model)]
    return " · ".join(filter(None, parts))


def _shown(results: Results, documents: list[int]) -> str:
    num_documents = results.losses.document.nunique()
    too_short = results.meta.counts.get("documents_too_short")
    text = f"{len(documents):,} of {num_documents:,} measured documents are on this page."
    return text + (f" {number(too_short, 0)} more were too short." if too_short else "")


def _induction(results: Results) -> str:
    found = results.meta.induction
    if not found:
        return note(False, "Whether this model can copy from its context was not measured.")
    warning = describe_sink(results.meta.sink)
    first, *more = describe_induction(
        found, interpretation_of(results.meta.windows["distant_states"])
    ).splitlines()
    induction = note(bool(found["has_induction"]), sentence(first), " ".join(map(str.strip, more)))
    return induction + (note(False, sentence(warning)) if warning else "")


def note(is_good: bool, verdict: str, why: str = "") -> str:
    state = "verdict" if is_good else "verdict bad"
    return f'<p class="{state}" role="note"><strong>{escape(verdict)}</strong> {escape(why)}</p>'


def _summary_tables(results: Results) -> str:
    names, summary, tables = _names(results), results.summary, []
    order = {name: i for i, name in enumerate([*names["selectors"], *names["units"]])}
    for target_set in _in_order(SETS, summary.target_set):
        rows = summary[summary.target_set == target_set].sort_values(
            ["selector", "units", "k"], key=lambda c: c if c.name == "k" else c.map(order)
        )
        first = rows.iloc[0]
        is_main = target_set == main_set(summary.target_set)
        caption = (
            f"Targets: {results.spell_set(target_set)} · {num_of(first.num_targets, 'target')} in "
            f"{num_of(first.num_documents, 'document')}; {describe_placebo(first)}. "
        )
        few = describe_few(first, has_net(rows))
        caption += f"No intervals: {few}. " if few else "Intervals: 95%, over documents. "
        quoted_row = None
        if is_main:
            caption += "The row to quote is marked."
            is_quoted = rows.index == quoted_row_of(results)
            quoted_row = int(is_quoted.argmax()) if is_quoted.any() else None
        columns: dict[str, Iterable] = {
            "selector": rows.selector.map(spell),
            "units": rows.units,
            "k": rows.k,
        }
        for column in page_columns():
            columns[column.page] = _cells(rows, column)
        tables.append(html_table(caption, columns, is_main, quoted_row))
    if histogram := _distance_table(results):
        tables.append(histogram)
    return "\n".join(tables) or "<p>Nothing was measured.</p>"


NUM_BARS = 40
"""Characters of the longest bar of a histogram."""


def _distance_table(results: Results) -> str:
    """Return the histogram of how far back the units of the row to quote are, by powers of two."""
    if results.summary.empty:
        return ""
    row = results.summary.loc[quoted_row_of(results)]
    ranked = distances(results.targets, results.influence)
    for name in ("target_set", "units", "selector"):
        ranked = ranked[ranked[name] == row[name]]
    tokens_back = ranked.distance[ranked["rank"] <= row.k].to_numpy()
    if not len(tokens_back):
        return ""
    power_N = np.floor(np.log2(np.maximum(tokens_back, 1))).astype(int)
    powers = range(power_N.min(), power_N.max() + 1)
    counts = [int((power_N == power).sum()) for power in powers]
    columns: dict[str, Iterable] = {
        "tokens back": [f"{2**power:,} to {2 ** (power + 1) - 1:,}" for power in powers],
        "units": counts,
        "share": [f"{count / len(tokens_back):.0%}" for count in counts],
        "": ["█" * round(NUM_BARS * count / max(counts)) for count in counts],
    }
    k = num_of(int(row.k), "unit")
    caption = (
        f"How far back: first tokens of the {k} ({row.units}) that {spell(row.selector)} chose"
    )
    return html_table(caption, columns, True)


def _cells(rows: pd.DataFrame, column: SummaryColumn) -> Iterable:
    """Return a column of the page: values, or values with the ends of their intervals."""
    if column.has_interval and column.page_interval:
        return rows[[*column.names]].itertuples(index=False, name=None)
    if column.name == "token_forwards_per_target":
        return [number(value, 0) for value in rows[column.name]]
    return rows[column.name]
