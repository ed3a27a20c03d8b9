"""Write the numbers of tracked checkpoints: a page with curves and paired differences, a verdict.

Place in the flow: last, after `Tracked`. Never imports torch.
"""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

from matplotlib.figure import Figure

from olmo_sparsity.analysis.report.page import write_html
from olmo_sparsity.analysis.results.tables import plain, write_json
from olmo_sparsity.analysis.results.tracked import Tracked
from olmo_sparsity.analysis.results.view import escape, html_table, spell
from olmo_sparsity.base import drawing

PANELS = {
    "net gain of all context": r"net_gain",
    "net gain of each doubling": r"net_gain_\d+",
    "loss by position": r"loss_.*",
    "net gain of copies and others": r"net_gain_[a-z]+",
    "one unit": r"one_unit",
    "induction drop": r"induction_drop",
}
"""Title → the names of the numbers that are drawn."""


def write_tracked(tracked: Tracked, out: Path) -> str:
    """Write `track.html`, and for several runs `verdict.json` of the first two. Returns what the
    verdict says, or the number of the last checkpoint."""
    rows, tables = tracked.numbers, list[str]()
    (last,) = rows[rows.number == tracked.headline][-1:].itertuples()
    ends = f"{last.value:.3f} [{last.low:.3f}, {last.high:.3f}] nats a token"
    few = f"{last.documents:,.0f} documents give a standard error of a tenth"
    said = f"{last.run}, step {last.step:,}: {spell(tracked.headline)} {ends}; {few}"
    if len(tracked.runs) > 1:
        first, second = tracked.runs[:2]
        verdict = tracked.verdict(first, second)
        write_json(out / "verdict.json", plain(verdict))
        ends = "{difference:+.3f} [{low:+.3f}, {high:+.3f}] nats at step {step:,}".format(**verdict)
        ahead = f"{verdict['ahead'] or 'neither'} is ahead"
        said = f"{spell(tracked.headline)} of {first} less {second}: {ends}: {ahead}"
        tables.append(_differences(tracked, first, second, verdict["step"]))
    columns = {
        "checkpoint": [f"{row.run}, step {row.step:,}" for row in rows.itertuples()],
        "number": rows.number.map(spell),
        "value [95%]": zip(rows.value, rows.low, rows.high, strict=True),
        "documents for a tenth": [f"{n:,.0f}" if n < 1e6 else "–" for n in rows.documents],
    }
    tables.append(html_table("Every number of every checkpoint", columns, is_open=len(rows) < 50))
    svg = drawing.render(lambda: draw(tracked), "svg", {})
    slots = {
        "title": escape(f"{', '.join(tracked.runs)} · tracked"),
        "said": escape(said),
        "figure": f"data:image/svg+xml;base64,{b64encode(svg).decode()}",
        "tables": "".join(tables),
    }
    write_html(out / "track.html", "track_page.html", slots)
    return said


def _differences(tracked: Tracked, first: str, second: str, step: int) -> str:
    rows = tracked.compare((first, step), (second, step))
    columns = {
        "step": [f"{step:,}"] * len(rows),
        "number": rows.number.map(spell),
        f"{first} less {second} [95%]": zip(rows.difference, rows.low, rows.high, strict=True),
        "ahead": [name or "–" for name in rows.ahead],
    }
    return html_table("Paired differences; each interval holds by itself", columns, is_open=True)


def draw(tracked: Tracked) -> Figure:
    """A panel for each group of numbers, by step; a colour for each run."""
    figure, numbers = Figure(figsize=(7.2, 5.6), layout="constrained"), tracked.numbers
    for axes, (title, pattern) in zip(figure.subplots(3, 2).flat, PANELS.items(), strict=True):
        axes.set_title(title, loc="left")
        axes.set_xlabel("step")
        axes.axhline(0, color=drawing.GREY, linewidth=0.6)
        some = numbers[numbers.number.str.fullmatch(pattern)]
        for i, ((run, name), rows) in enumerate(some.groupby(["run", "number"], sort=False)):
            color = drawing.PALETTE[1 + tracked.runs.index(run) % (len(drawing.PALETTE) - 1)]
            style = {"marker": "os^Dv"[i % 5], "markersize": 3, "color": color}
            axes.plot(rows.step, rows.value, label=f"{run}, {spell(name)}", **style)
            drawing.band(axes, rows.step, rows.low, rows.high, color, 0.08)
        axes.legend(frameon=False, fontsize=5.5).set_in_layout(False)  # as names may be long
    return figure
