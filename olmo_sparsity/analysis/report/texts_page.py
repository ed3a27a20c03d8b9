"""Write an HTML page with texts, in which targets and their distant units are highlighted.

    Results, numbers of documents, slots → `write_page` → one HTML file

The page of a measurement (report.py) and that of an explanation (explain/page.py) are both written
here; they fill other slots of the template report_page.html. report_page.js shows the texts, from
the data of document_data.py. Never imports torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.report.document_data import Menus, document_data
from olmo_sparsity.analysis.report.page import json_for_html, write_html
from olmo_sparsity.analysis.results.notes import describe_noise, describe_parts
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.target_rows import DOCUMENT
from olmo_sparsity.analysis.results.view import escape, format_number, num_of
from olmo_sparsity.config.windows import long_window


def write_page(
    out: Path, results: Results, documents: list[int], slots: dict[str, str], sections: set[str]
) -> None:
    """Write a page with the texts of documents, and the distant units of their targets.

    Args:
        out: The file to write.
        results: A measurement. Its placebo targets are not shown.
        documents: Numbers of the documents to show.
        slots: HTML for slots of the template: its head and its tables.
        sections: Names of the optional sections of the template to keep.
    """
    shown_results = _without_placebo(results)
    menus = Menus.of(shown_results)
    titles = dict(zip(results.documents.document, results.documents.name, strict=True))
    # The data of each document is in a script element of its own, so that the page parses only the
    # documents that a reader opens.
    scripts = []
    entries = []
    for document in documents:
        data = document_data(shown_results, document, menus)
        scripts.append(
            f'<script type="application/json" id="document-{document}">{json_for_html(data)}'
            "</script>"
        )
        title = titles.get(document) or str(document)
        entries.append({"id": document, "name": title, "num_targets": len(data["chosen"])})

    page_data = asdict(menus) | {
        "set_names": [results.spell_set(name) for name in menus.sets],
        "documents": entries,
    }
    # A number of 0 says something; an empty list, text or object does not.
    meta = {name: value for name, value in asdict(results.meta).items() if value or value == 0}
    common_slots = {
        "title": f"{escape(results.meta.model['name'])} · distant units",
        "meta": escape(json.dumps(meta, indent=2, ensure_ascii=False)),
        "page_data": json_for_html(page_data),
        "document_data": "\n".join(scripts),
    }
    write_html(
        out,
        "report_page.html",
        {**slots, **common_slots},
        sections=sections,
        script="report_page.js",
    )


def _without_placebo(results: Results) -> Results:
    """Return a measurement without the rows of its placebo targets."""
    tables = {}
    for name in ("influence", "recovery", "targets"):
        rows = getattr(results, name)
        tables[name] = rows[rows.distant_part == DOCUMENT]
    return replace(results, **tables)


# --- the head of a page ---------------------------------------------------------------------------


def subtitle(results: Results, counted: str) -> str:
    """Return the line below the title: model, text, windows, and what makes numbers doubtful.

    Args:
        results: The measurement.
        counted: A phrase on how much was measured, such as "40 targets in 5 reported documents".
    """
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
    facts = [
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
    return " · ".join(fact for fact in facts if fact)


def note(verdict: str, why: str = "", *, is_good: bool) -> str:
    """Return an HTML paragraph with a verdict, marked as good or bad, and its reason. Both are
    escaped here."""
    state = "verdict" if is_good else "verdict bad"
    return f'<p class="{state}" role="note"><strong>{escape(verdict)}</strong> {escape(why)}</p>'
