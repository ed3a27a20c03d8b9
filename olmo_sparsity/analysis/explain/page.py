"""Write the HTML page of an explanation.

    ExplainedText → `as_measurement` → Results of one document → `write_page` of texts_page.py

The page of a measurement already shows a text with the distant units of its targets. So an
explanation is put into the form of a measurement, and only head and tables differ.
`Explanation.to_html` calls `write_explanation_page`, and `Explanation.results` `as_measurement`.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from olmo_sparsity.analysis.explain.explained_text import ExplainedText
from olmo_sparsity.analysis.report.texts_page import note, subtitle, write_page
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.schemas import SCHEMAS
from olmo_sparsity.analysis.results.view import escape, sentence, spell
from olmo_sparsity.base.path_options import path_of

NOT_CHECKED = "Not checked against unrelated texts:"
WHY_CHECK = "any text lowers a loss by something. Use --check, or check() in Python."

_DOCUMENT = 0
"""The number that the explained text has as the only document of a measurement."""


def write_explanation_page(explained: ExplainedText, path: str | Path) -> None:
    """Write an HTML page that needs no other file."""
    settings = explained.settings
    check = explained.checked
    results = as_measurement(explained)
    method = (
        f"{settings.units} ranked by {spell(settings.selector)} · text of "
        f"{len(explained.document.tokens):,} tokens"
    )
    slots = {
        "subtitle": escape(subtitle(results, method)),
        "note": _notes(explained),
        "headline": "",
        "shown": "",
        "numbers_title": "Against unrelated texts",
        "numbers": check.html if check else "",
    }
    sections = {"explanation", "numbers"} if check else {"explanation"}
    write_page(path_of("path", path), results, [_DOCUMENT], slots, sections)


def as_measurement(explained: ExplainedText) -> Results:
    """Return an explanation as a measurement of one document. Its targets are in no target set."""
    settings = explained.settings
    check = explained.checked
    texts = explained.document.texts
    tokens = {"place": range(len(texts)), "token_id": explained.document.tokens, "text": texts}
    # The tables of the check hold the text's own distant tokens and the unrelated texts.
    evaluated = explained.tables if check is None else check.tables
    tables = {
        "tokens": pd.DataFrame(tokens),
        "losses": explained.targets,
        "influence": evaluated["influence"],
        "recovery": evaluated["recovery"],
    }
    meta = Meta(
        model=explained.model_meta,
        windows=explained.windows.as_stored() | {"distant_states": settings.distant_states},
        units=[settings.units],
        selectors=[settings.selector],
        seed=settings.seed,
        controls={"draws": check.draws} if check else {},
        targets={"chosen_by_gap": explained.chosen_by_gap},
    )
    empty = {name: pd.DataFrame(columns=schema.names) for name, schema in SCHEMAS.items()}
    filled = {name: rows.assign(document=_DOCUMENT) for name, rows in tables.items()}
    return Results(**empty | filled, meta=meta)


def _notes(explained: ExplainedText) -> str:
    """Return HTML of the check's verdict, or of a note that nothing was checked, and of
    warnings."""
    check = explained.checked
    notes = [note(NOT_CHECKED, WHY_CHECK, is_good=False) if check is None else check.note]
    notes += [note(sentence(warning), is_good=False) for warning in explained.warnings]
    return "".join(notes)
