"""Write the HTML page of a measurement: `olmo-sparsity report results/mine --out page.html`.

    Results → `write_report` → page.html, from top to bottom:

        title, model, text, windows         texts_page.py
        does the model copy?                here
        the conclusion, in a sentence       results/conclusion.py
        the texts                           texts_page.py, with the data of document_data.py
        the numbers                         number_tables.py

In the texts, pointing at a target or clicking on it highlights its distant units, and lists them
with its losses by k. Never imports torch.
"""

from __future__ import annotations

from pathlib import Path

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.report.number_tables import describe_columns, summary_tables
from olmo_sparsity.analysis.report.texts_page import note, subtitle, write_page
from olmo_sparsity.analysis.results.conclusion import conclude
from olmo_sparsity.analysis.results.notes import (
    INTERVALS,
    describe_gap,
    describe_induction,
    describe_sink,
)
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.target_rows import DOCUMENT
from olmo_sparsity.analysis.results.view import escape, format_number, num_of, sentence


def write_report(results: Results, out: Path, max_documents: int | None = None) -> None:
    """Write the page of a measurement.

    Args:
        results: The measurement.
        out: The file to write.
        max_documents: The largest number of documents whose texts are shown, those with targets
            first. Default: all.
    """
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
        "numbers": summary_tables(results),
        "intervals": escape(INTERVALS),
        "columns": describe_columns(),
    }
    write_page(Path(out), results, documents, slots, {"measurement", "numbers"})


def _choose_documents(results: Results, max_documents: int | None) -> list[int]:
    """Return the numbers of the documents on the page, those with targets first. There are at most
    `max_documents`, or all if it is None."""
    with_targets = set(results.targets.document[results.targets.distant_part == DOCUMENT])
    # False is sorted before True.
    numbers = sorted(
        results.tokens.document.unique(), key=lambda number: (number not in with_targets, number)
    )
    return [int(number) for number in numbers[:max_documents]]


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
        return note("Whether this model can copy from its context was not measured.", is_good=False)
    interpretation = interpretation_of(results.meta.windows["distant_states"])
    first, *others = describe_induction(check, interpretation).splitlines()
    # A terminal has it in indented lines, the page in one paragraph.
    why = " ".join(line.strip() for line in others)
    notes = note(sentence(first), why, is_good=bool(check["has_induction"]))
    warning = describe_sink(results.meta.sink)
    if warning:
        notes += note(sentence(warning), is_good=False)
    return notes
