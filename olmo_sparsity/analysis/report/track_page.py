"""Write the numbers of tracked checkpoints: a page with curves and paired differences, a verdict.

Place in the flow: last, after `Tracked`. Never imports torch.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from olmo_sparsity import drawing
from olmo_sparsity.analysis.report.page import image, write_html
from olmo_sparsity.analysis.results.tables import plain, write_json
from olmo_sparsity.analysis.results.tracked import HEADLINE, Tracked
from olmo_sparsity.analysis.results.view import Safe, escape, html_table, intervals, spell

PANELS = {
    "net gain of all context": (HEADLINE,),
    "gain of each doubling, less unrelated text": ("net_gain_",),
    "loss by position": ("loss_",),
    "net gain of copies and others": ("net_gain_copies", "net_gain_others"),
    "one unit": ("one_unit",),
    "induction drop": ("induction_drop",),
}
"""Title → the numbers that are drawn, or how their names begin."""


def write_tracked(tracked: Tracked, out: Path) -> str:
    """Write `track.html`, and for several runs `verdict.json` of the first two. Returns what the
    verdict says, or the headline number of the last checkpoint."""
    said, parts = _describe_last(tracked), [_numbers(tracked)]
    if len(tracked.runs) > 1:
        first, second = tracked.runs[:2]
        verdict = tracked.verdict(first, second)
        write_json(out / "verdict.json", plain(verdict))
        step = verdict["step"]
        said = _describe(verdict)
        parts.insert(0, _differences(tracked, first, second, step))
    figure = drawing.render(lambda: draw(tracked), "svg", {})
    slots = {
        "title": escape(f"{', '.join(tracked.runs)} · tracked"),
        "said": escape(said),
        "figure": image(figure),
        "tables": "".join(parts),
    }
    write_html(out / "track.html", "track_page.html", slots)
    return said


def _describe(verdict: dict) -> str:
    first, second = verdict["first"], verdict["second"]
    numbers = f"{verdict['difference']:+.3f} [{verdict['low']:+.3f}, {verdict['high']:+.3f}] nats"
    where = f"{spell(HEADLINE)} at step {verdict['step']:,}: {numbers}, {first} less {second}"
    return f"{where}: {verdict['ahead'] or 'neither'} is ahead"


def _describe_last(tracked: Tracked) -> str:
    run, step = tracked.checkpoints[-1]
    rows = tracked.numbers
    (row,) = rows[(rows.run == run) & (rows.step == step) & (rows.number == HEADLINE)].itertuples()
    numbers = f"{row.value:.3f} [{row.low:.3f}, {row.high:.3f}] nats a token"
    few = f"{row.documents:,.0f} documents give a standard error of a tenth"
    return f"{run}, step {step:,}: {spell(HEADLINE)} {numbers}; {few}"


def _numbers(tracked: Tracked) -> str:
    rows = tracked.numbers
    columns = {
        "checkpoint": [f"{row.run}, step {row.step:,}" for row in rows.itertuples()],
        "number": rows.number.map(spell).tolist(),
        "value [95%]": intervals(rows, "value", "low", "high"),
        "documents for a tenth": [_count(number) for number in rows.documents],
    }
    return html_table("Every number of every checkpoint", columns, is_open=len(rows) < 50)


def _count(number: float) -> str:
    return f"{number:,.0f}" if number < 1e6 else "–"


def _differences(tracked: Tracked, first: str, second: str, step: int) -> str:
    rows = tracked.compare((first, step), (second, step))
    columns = {
        "step": [f"{step:,}"] * len(rows),
        "number": rows.number.map(spell).tolist(),
        f"{first} less {second} [95%]": intervals(rows, "difference", "low", "high"),
        "ahead": [Safe(escape(name or "–")) for name in rows.ahead],
    }
    return html_table("Paired differences; each interval holds by itself", columns, is_open=True)


def draw(tracked: Tracked) -> Figure:
    """A panel for each group of numbers, by step; a colour for each run."""
    figure, numbers = Figure(figsize=(7.2, 5.6), layout="constrained"), tracked.numbers
    for axes, (title, names) in zip(figure.subplots(3, 2).flat, PANELS.items(), strict=True):
        axes.set_title(title, loc="left")
        for color, run in zip(drawing.PALETTE[1:] * 99, tracked.runs, strict=False):
            rows = numbers[numbers.run == run]
            of_panel = [n for n in rows.number.unique() if _is_in(n, names)]
            for i, name in enumerate(of_panel):
                of_name = rows[rows.number == name]
                style = {"color": color, "marker": "o", "markersize": 3, "alpha": 1 - 0.15 * i}
                axes.plot(of_name.step, of_name.value, label=f"{run}, {spell(name)}", **style)
                drawing.band(axes, of_name.step, of_name.low, of_name.high, color, 0.08)
        axes.axhline(0, color=drawing.GREY, linewidth=0.6)
        axes.set_xlabel("step")
        axes.legend(frameon=False, fontsize=5.5)
    return figure


def _is_in(name: str, of: tuple[str, ...]) -> bool:
    return name in of or any(p[-1] == "_" and name[len(p) :][:1].isdigit() for p in of)
