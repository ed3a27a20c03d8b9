"""Write the HTML page of a measurement or an explanation.

The page shows the texts. Pointing at a target, or a click on it, highlights its distant units and
lists them with its losses by k. Above are the conclusion, and the tables of numbers. `write_report`
is the entry point for a measurement; an explanation calls `write_page`.

report_page.html is the template. report_page.js reads the data of each document from JSON in the
page, which `_document_data` makes; its keys are short, as a page may hold a book. Never imports
torch.
"""

from __future__ import annotations

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

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.report.page import json_for_html, write_html
from olmo_sparsity.analysis.results.by_distance import (
    SPLIT,
    cells_of_distances,
    describe_distances,
    split_by_distance,
)
from olmo_sparsity.analysis.results.columns import HEADINGS, ShownColumn, page_columns
from olmo_sparsity.analysis.results.conclusion import conclude, quoted_row_of
from olmo_sparsity.analysis.results.meta import SETS, main_set
from olmo_sparsity.analysis.results.notes import (
    INTERVALS,
    describe_gap,
    describe_induction,
    describe_intervals,
    describe_noise,
    describe_parts,
    describe_sink,
)
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.target_rows import losses_of_targets, with_ends
from olmo_sparsity.analysis.results.terminal_table import describe_placebo
from olmo_sparsity.analysis.results.view import (
    escape,
    format_number,
    html_table,
    num_of,
    sentence,
    spell,
)
from olmo_sparsity.config.windows import long_window


def write_report(results: Results, out: Path, max_documents: int | None = None) -> None:
    """Write the page of a measurement. `max_documents`: how many documents it shows at most; those
    with targets come first."""
    documents = _choose_documents(results, max_documents)
    reported = results.reported
    num_documents = num_of(reported.document.nunique(), "reported document")
    counted = f"{num_of(len(reported), 'target')} in {num_documents}"
    headline = f'<p class="headline">{escape(conclude(results))}</p>'
    if results.meta.targets.get("threshold") is not None:
        headline += f'<p class="soft">{escape(sentence(describe_gap(results)))}</p>'
    slots = {
        "subtitle": escape(subtitle(results, counted)),
        "note": _notes_on_model(results),
        "headline": headline,
        "shown": escape(_describe_documents(results, documents)),
        "numbers_title": "The numbers",
        "numbers": _summary_tables(results),
        "intervals": escape(INTERVALS),
        "columns": _describe_columns(),
    }
    write_page(Path(out), results, documents, slots, {"measurement", "numbers"})


def write_page(
    out: Path, results: Results, documents: list[int], slots: dict[str, str], parts: set[str]
) -> None:
    """Write a page with the texts of documents, and the distant units of their targets.

    Args:
        out: The file to write.
        results: A measurement. Its placebo targets are not shown.
        documents: Numbers of the documents to show.
        slots: HTML for slots of the template: its head and its tables.
        parts: The optional parts of the template to keep.
    """
    tables_without_placebo = {}
    for name in ("influence", "recovery", "targets"):
        rows = getattr(results, name)
        tables_without_placebo[name] = rows[rows.distant_part == "document"]
    results = replace(results, **tables_without_placebo)

    names = _names(results)
    titles = dict(zip(results.documents.document, results.documents.name, strict=True))
    scripts = []
    entries = []
    for document in documents:
        data = _document_data(results, document, names)
        scripts.append(
            f'<script type="application/json" id="document-{document}">{json_for_html(data)}'
            "</script>"
        )
        title = titles.get(document) or str(document)
        entries.append({"id": document, "name": title, "num_targets": len(data["chosen"])})

    page_data = names | {
        "set_names": [results.spell_set(name) for name in names["sets"]],
        "documents": entries,
    }
    # A number of 0 says something; an empty list, text or object does not.
    meta = {name: value for name, value in asdict(results.meta).items() if value or value == 0}
    slots = slots | {
        "title": f"{escape(results.meta.model['name'])} · distant units",
        "meta": escape(json.dumps(meta, indent=2, ensure_ascii=False)),
        "page_data": json_for_html(page_data),
        "document_data": "\n".join(scripts),
    }
    write_html(out, "report_page.html", slots, parts=parts, script="report_page.js")


# --- the data of the page -------------------------------------------------------------------------


def _names(results: Results) -> dict[str, list]:
    """Return the names of k, units, selectors and target sets, in the order of the page's menus.
    The data of documents refer to them by their index."""
    meta = results.meta
    recovery = results.recovery
    influence = results.influence
    return {
        "ks": sorted(recovery.k.unique().tolist()),
        "units": _in_order(meta.units, recovery.units, influence.units),
        "selectors": _in_order(meta.selectors, recovery.selector, influence.selector),
        "sets": _in_order(SETS, results.targets.target_set),
    }


def _in_order(order: Iterable[str], *columns: pd.Series) -> list[str]:
    """Return the names that the columns hold, each once: first those in `order`, then the others as
    they come."""
    order = list(order)
    names = pd.concat(columns).unique().tolist()
    names_in_order = [name for name in order if name in names]
    return names_in_order + [name for name in names if name not in order]


def _choose_documents(results: Results, max_documents: int | None) -> list[int]:
    """Return the numbers of the documents on the page, those with targets first."""
    with_targets = set(results.targets.document[results.targets.distant_part == "document"])
    documents = sorted(
        results.tokens.document.unique(), key=lambda number: (number not in with_targets, number)
    )
    return [int(document) for document in documents[:max_documents]]


def _document_data(results: Results, document: int, names: dict[str, list]) -> dict[str, Any]:
    """Return the data that `openDocument` and `fillPanel` of report_page.js read."""
    tokens = _rows(results.tokens, document)
    targets = _rows(results.targets, document)
    losses = losses_of_targets(_rows(results.losses, document), targets)
    recovery = _rows(results.recovery, document)
    influence = _rows(results.influence, document)
    searched = [*targets.target, *recovery.target, *influence.target]
    losses = losses[losses.target.isin(searched)]

    entries = _entries_of_targets(losses)
    for target, name in zip(*_columns(targets, "target", "target_set"), strict=True):
        entries[target]["sets"].append(names["sets"].index(name))
    _add_influence(entries, influence, names)
    _add_losses(entries, recovery, names)

    # An explanation has the ends of its targets in the table of losses.
    spans = losses if "end" in losses else with_ends(targets)
    ends = zip(*_columns(spans, "target", "end"), strict=True)
    texts = tokens.text
    if not any(texts):
        # Without a tokenizer, token IDs are shown.
        texts = tokens.token_id.astype(str) + " "
    return {
        "text": texts.tolist(),
        "ends": {target: end for target, end in ends if end > target + 1},
        "chosen": [entries[target] for target in sorted(entries)],
    }


Entries = dict[int, dict[str, Any]]
"""Place of a target → its data for the page, which become JSON. The key `found` holds a table for
each pair of units and selector, by their numbers in the page's menus. In such a table, `own` and
`unrelated` have a loss for each k, and `own` also has the influence of each ranked unit."""


def _entries_of_targets(losses: pd.DataFrame) -> Entries:
    """Return an entry for each target, with its losses, and without units."""
    (places,) = _columns(losses, "target")
    short = _rounded(losses.loss_short)
    long = _rounded(losses.loss_long)
    entries: Entries = {}
    for target, loss_short, loss_long in zip(places, short, long, strict=True):
        entries[target] = {
            "target": target,
            "short": loss_short,
            "long": loss_long,
            "sets": [],
            "found": {},
        }
    return entries


_RANKING_KEYS = ["target", "units", "selector", "control"]
"""The columns that tell one ranking of a document from others."""


def _add_influence(entries: Entries, influence: pd.DataFrame, names: dict[str, list]) -> None:
    """Add the ranked units of each target to its entry: their places, widths and scores."""
    ranked = influence[influence.control == "own"].sort_values([*_RANKING_KEYS, "rank"])
    ranked = ranked.assign(width=ranked.distant_end - ranked.distant_first)
    columns = _columns(ranked, *_RANKING_KEYS, "distant_first", "width", "influence")
    for key, rows in groupby(zip(*columns, strict=True), itemgetter(0, 1, 2, 3)):
        table = _table_of_ranking(entries, key, names)
        *_, first, width, scores = map(list, zip(*rows, strict=True))
        table["first"] = first
        table["width"] = width
        # Significant digits rather than decimals, as the scores of a selector may be small.
        table["influence"] = [float(f"{score:.4g}") for score in scores]


def _add_losses(entries: Entries, recovery: pd.DataFrame, names: dict[str, list]) -> None:
    """Add the loss with k units to the entry of each target, for each k: the mean over draws."""
    means = recovery.groupby([*_RANKING_KEYS, "k"]).loss_set.mean().unstack("k")
    means = means.reindex(columns=names["ks"])
    for key, curve in zip(means.index, means.to_numpy(), strict=True):
        _table_of_ranking(entries, key, names)["loss"] = _rounded(curve)


def _table_of_ranking(
    entries: Entries, key: tuple[int, str, str, str], names: dict[str, list]
) -> dict[str, Any]:
    """Return the part of a target's entry for units, selector and control. It is created empty, and
    filled by the caller. `key`: values of `_RANKING_KEYS`."""
    target, units, selector, control = key
    place = f"{names['units'].index(units)} {names['selectors'].index(selector)}"
    controls = entries[target]["found"].setdefault(place, {})
    empty: dict[str, Any] = {}
    if control == "own":
        empty = {"first": [], "width": [], "influence": []}
    return controls.setdefault(control, empty)


def _columns(rows: pd.DataFrame, *names: str) -> list[list]:
    """Return columns of a table as lists, of Python's own numbers."""
    return [rows[name].tolist() for name in names]


def _rows(table: pd.DataFrame, document: int) -> pd.DataFrame:
    """Return the rows of a document."""
    # They are neighbours, as tables are sorted.
    first, end = np.searchsorted(table.document, [document, document + 1])
    return table.iloc[first:end]


def _rounded(values: Any) -> list[float | None]:
    """Round losses to a ten-thousandth of a nat, which keeps the page of a book small. Values that
    are not finite become None, as JSON has no word for them."""
    rounded = np.round(np.asarray(values, dtype=float), 4).tolist()
    return [value if np.isfinite(value) else None for value in rounded]


# --- the head of the page -------------------------------------------------------------------------


def subtitle(results: Results, counted: str) -> str:
    """Return a line on model, text and windows. `counted`: a phrase on how much was measured."""
    meta = results.meta
    windows = meta.windows
    long = long_window(windows["long"]).description
    if windows.get("most"):
        long = f"of at most {windows['most']}"
    lengths = f"long window {long}, local window {windows['short']}"
    if windows["stride"] > 1:
        lengths += f", stride {windows['stride']}"
    num_prefix = len(windows.get("prefix", ()))
    if num_prefix:
        lengths += f", both after a prefix of {num_of(num_prefix, 'token')}"
    parts = [
        str(meta.model["name"]),
        f"{format_number(meta.model['num_parameters'], 0)} parameters",
        f"text: {meta.data['source']}" if meta.data else "",
        lengths,
        f"distant units {interpretation_of(windows['distant_states']).description}",
        counted,
        describe_parts(results) if "parts" in meta.data else "",
        results.missing,
        describe_noise(meta.model),
    ]
    return " · ".join(part for part in parts if part)


def _describe_documents(results: Results, documents: list[int]) -> str:
    """Return a sentence on how many of the measured documents are on the page."""
    num_documents = results.losses.document.nunique()
    text = f"{len(documents):,} of {num_documents:,} measured documents are on this page."
    too_short = results.meta.counts.get("documents_too_short")
    if too_short:
        text += f" {format_number(too_short, 0)} more were too short."
    return text


def _notes_on_model(results: Results) -> str:
    """Return HTML of notes on whether the model copies, and whether it needs a prefix."""
    check = results.meta.induction
    if not check:
        return note(False, "Whether this model can copy from its context was not measured.")
    interpretation = interpretation_of(results.meta.windows["distant_states"])
    first, *others = describe_induction(check, interpretation).splitlines()
    why = " ".join(line.strip() for line in others)
    notes = note(bool(check["has_induction"]), sentence(first), why)
    warning = describe_sink(results.meta.sink)
    if warning:
        notes += note(False, sentence(warning))
    return notes


def note(is_good: bool, verdict: str, why: str = "") -> str:
    """Return an HTML paragraph with a verdict, marked as good or bad, and its reason."""
    state = "verdict" if is_good else "verdict bad"
    return f'<p class="{state}" role="note"><strong>{escape(verdict)}</strong> {escape(why)}</p>'


# --- the numbers ----------------------------------------------------------------------------------


def _summary_tables(results: Results) -> str:
    """Return HTML of a table for each target set, and of the histogram of distances."""
    names = _names(results)
    summary = results.summary
    order = {name: i for i, name in enumerate([*names["selectors"], *names["units"]])}

    def order_of(column: pd.Series) -> pd.Series:
        return column if column.name == "k" else column.map(order)

    main = main_set(summary.target_set)
    tables = []
    for target_set in _in_order(SETS, summary.target_set):
        rows = summary[summary.target_set == target_set]
        rows = rows.sort_values(["selector", "units", "k"], key=order_of)
        caption = _caption(results, target_set, rows)
        quoted_row = None
        if target_set == main:
            caption += " The row to quote is marked."
            is_quoted = rows.index == quoted_row_of(results)
            quoted_row = int(is_quoted.argmax()) if is_quoted.any() else None
        columns: dict[str, Iterable] = {
            "selector": rows.selector.map(spell),
            "units": rows.units,
            "k": rows.k,
        }
        for shown in page_columns():
            columns[shown.display.heading] = _cells_of_page(rows, shown)
        tables.append(html_table(caption, columns, target_set == main, quoted_row))
    histogram = _distance_table(results)
    if histogram:
        tables.append(histogram)
    return "\n".join(tables) or "<p>Nothing was measured.</p>"


def _caption(results: Results, target_set: str, rows: pd.DataFrame) -> str:
    """Return the caption of the table of a target set: its targets, and which intervals it has."""
    first = rows.iloc[0]
    targets = num_of(first.num_targets, "target")
    documents = num_of(first.num_documents, "document")
    intervals = describe_intervals(first, bool(rows.net.notna().any()))
    return (
        f"Targets: {results.spell_set(target_set)} · {targets} in {documents}; "
        f"{describe_placebo(first)}. {sentence(intervals)}"
    )


def _cells_of_page(rows: pd.DataFrame, shown: ShownColumn) -> Iterable:
    """Return the cells of a column of the page: numbers as text, or tuples of a value and the ends
    of its interval."""
    column, display = shown
    if column.has_interval and display.has_interval:
        return rows[[*column.names]].itertuples(index=False, name=None)
    return [
        format_number(value, display.digits, display.sign) for value in rows[column.name].tolist()
    ]


def _describe_columns() -> str:
    """Return an HTML list of the columns with what they mean."""
    items = []
    for column, display in page_columns():
        meaning = re.sub(r"`(.*?)`", r"<code>\1</code>", escape(column.meaning))
        name = f"{escape(display.heading)} (<code>{escape(column.name)}</code>)"
        items.append(f"<dt>{name}</dt><dd>{meaning}</dd>")
    return f"<dl>{''.join(items)}</dl>"


LENGTH_OF_BAR = 40
"""Length of the longest bar of the histogram, in characters."""


def _distance_table(results: Results) -> str:
    """Return HTML of a table with bars that splits the row to quote by how far back its units
    are."""
    if results.summary.empty:
        return ""
    row = results.summary.loc[quoted_row_of(results)]
    bins = split_by_distance(results, row)
    if bins.empty:
        return ""
    headings = ["tokens back", "units here", "random units", *(HEADINGS[name] for name in SPLIT)]
    cells = [
        [cell.replace("-", "−") for cell in column]
        for column in zip(*cells_of_distances(bins), strict=True)
    ]
    columns: dict[str, Iterable] = dict(zip(headings, cells, strict=True))
    # The bars show what depends on the distance, as far as it is known.
    shown = next(name for name in ("net", "excess", "recovery") if bins[name].notna().any())
    values = bins[shown].clip(lower=0).fillna(0)
    largest = max(values.max(), 1e-9)
    columns[f"{HEADINGS[shown]}, as bars"] = [
        "█" * round(LENGTH_OF_BAR * value / largest) for value in values
    ]
    caption = sentence(describe_distances(row))
    return html_table(f"{caption} {ABOUT_DISTANCES}", columns, True)


ABOUT_DISTANCES = (
    "Units lie where there is text, as random ones show; only excess and net excess say at which "
    "distance the targets depend on it."
)
"""What the table of distances means, on the page and in the documentation."""
