"""Write the page of losses by place: curves by step, paired differences, and all losses.

    LossesByPlace → `write_losses` → one HTML file, with the figure of `draw` in it

Never imports torch.
"""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

from matplotlib.figure import Figure

from olmo_sparsity.analysis.report.page import write_html
from olmo_sparsity.analysis.results.losses_by_place import (
    Checkpoint,
    LossesByPlace,
    spell,
    spell_places,
)
from olmo_sparsity.analysis.results.view import escape, html_table
from olmo_sparsity.base import drawing

COLORS = drawing.PALETTE[1:]
"""Colours of the models; without black, which is the colour of the text."""

MARKERS = "os^Dv"
"""Markers of the models."""


def write_losses(losses: LossesByPlace, path: Path) -> None:
    """Write the page: the differences of each pair of models, and all losses."""
    rows = losses.table
    tables = [_table_of_differences(losses, first, second) for first, second in losses.pairs()]
    columns = {
        "checkpoint": [spell(Checkpoint(row.model, row.step)) for row in rows.itertuples()],
        "places": [spell_places(row.first, row.end) for row in rows.itertuples()],
        "documents": rows.documents.tolist(),
        "tokens": rows.tokens.tolist(),
        "mean loss [95%]": zip(rows.loss, rows.low, rows.high, strict=True),
    }
    tables.append(html_table("Mean loss of every checkpoint", columns, is_open=len(rows) < 50))
    svg = drawing.render(lambda: draw(losses), "svg", {})
    slots = {
        "title": escape(f"{', '.join(losses.models)}: loss by place"),
        "text": escape(losses.name),
        "documents": f"{losses.num_documents:,}",
        "length": f"{losses.length:,}",
        "figure": f"data:image/svg+xml;base64,{b64encode(svg).decode()}",
        "tables": "".join(tables),
    }
    write_html(path, "losses_page.html", slots)


def _table_of_differences(losses: LossesByPlace, first: Checkpoint, second: Checkpoint) -> str:
    """Return HTML of the table of the first checkpoint's losses minus the second's."""
    rows = losses.compare(first, second)
    columns = {
        "places": [spell_places(row.first, row.end) for row in rows.itertuples()],
        "documents": rows.documents.tolist(),
        "difference [95%]": zip(rows.difference, rows.low, rows.high, strict=True),
    }
    title = f"{spell(first)} less {spell(second)}, in pairs"
    return html_table(title, columns, is_open=True)


def draw(losses: LossesByPlace) -> Figure:
    """Draw mean loss by step: a panel for each range of places, the farthest first, and a curve for
    each model."""
    names = drawing.short_labels(losses.models)
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flat
    for axes, (first, end) in zip(panels, losses.places, strict=True):
        axes.set_title(f"places {spell_places(first, end)}", loc="left")
        axes.set_xlabel("step")
        axes.set_ylabel("mean loss (nats)")
        is_of_panel = (losses.table["first"] == first) & (losses.table.end == end)
        rows_of_panel = losses.table[is_of_panel]
        for number, (model, rows) in enumerate(rows_of_panel.groupby("model", sort=False)):
            color = COLORS[number % len(COLORS)]
            marker = MARKERS[number % len(MARKERS)]
            label = names[model]
            axes.plot(rows.step, rows.loss, label=label, color=color, marker=marker, markersize=3)
            drawing.band(axes, rows.step, rows.low, rows.high, color)
            if len(rows) == 1:
                # A band of one point is not visible, so its interval is drawn as a bar.
                errors = [rows.loss - rows.low, rows.high - rows.loss]
                axes.errorbar(rows.step, rows.loss, errors, color=color)
    # Names may be long, and would press the panels together.
    figure.axes[0].legend(frameon=False).set_in_layout(False)
    return figure
