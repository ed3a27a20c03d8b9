"""Write the scores of documents as an HTML page: histograms, quantiles, and the extreme documents.

Place in the flow: the file that `score` writes → here, last. Never imports torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from olmo_sparsity import drawing
from olmo_sparsity.analysis.report.page import image, write_html
from olmo_sparsity.analysis.results.view import escape, html_table
from olmo_sparsity.errors import DataError

SCORES = ("net_gain", "gain", "gain_unrelated", "key_share", "gzip")
ABOUT = ("file", "row", "tokens", "context")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NUM_SHOWN = 10


def write_scores(scores: Path, out: Path) -> None:
    table = _read(scores)
    gained = table.dropna(subset=["net_gain"]).sort_values("net_gain", ascending=False)
    if gained.empty:
        raise DataError(f"{scores}: no document has a gain; all are shorter than the contexts")
    quantiles = gained[list(SCORES)].quantile(list(QUANTILES))
    by_score = {"score": SCORES} | {
        f"{share:.0%}": quantiles.loc[share].tolist() for share in QUANTILES
    }
    counted = f"{len(gained):,} of {len(table):,} documents have a gain"
    slots = {
        "title": f"Scores of {escape(scores.name)}",
        "subtitle": escape(f"{counted} · median length {gained.tokens.median():,.0f} tokens"),
        "alt": f"Histograms of {', '.join(SCORES)} over documents",
        "figure": image(drawing.render(lambda: _histograms(gained), "svg", {})),
        "quantiles": html_table("Quantiles over documents", by_score, True),
        "highest": _documents("Highest net gain", gained[:NUM_SHOWN]),
        "lowest": _documents("Lowest net gain", gained[: -NUM_SHOWN - 1 : -1]),
    }
    write_html(out, "scores_page.html", slots)


def _read(scores: Path) -> pd.DataFrame:
    wanted = [*ABOUT, *SCORES]
    if scores.suffix == ".parquet":
        there = set(pq.read_schema(scores).names)
    else:
        table = pd.read_json(scores, lines=True)
        there = set(table.columns)
    if missing := [name for name in wanted if name not in there]:
        raise DataError(
            f"{scores} has no column {', '.join(missing)}; pass the file that `score` writes"
        )
    return pd.read_parquet(scores, columns=wanted) if scores.suffix == ".parquet" else table[wanted]


def _histograms(gained: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(10.4, 3.1), layout="constrained")
    drawn = ("net_gain", "gain", "key_share", "gzip")
    for axes, name in zip(figure.subplots(1, len(drawn)), drawn, strict=True):
        shown = {name: drawing.BLUE} | ({"gain_unrelated": drawing.GREY} if name == "gain" else {})
        low, high = gained[list(shown)].stack().quantile([0.005, 0.995])
        for column, color in shown.items():
            values = gained[column].clip(low, high)  # the bins at the ends hold what is beyond
            bins = np.linspace(low, max(high, low + 1e-3), 41)
            axes.hist(values, bins, color=color, alpha=0.7, label=column)
        is_gain = "gain" in name
        axes.set_xlabel(name + (", nats a token" if is_gain else ""))
        if is_gain:
            axes.axvline(0, color=drawing.GREY, linewidth=0.8)
        if len(shown) > 1:
            axes.legend(fontsize="small")
    figure.axes[0].set_ylabel("documents")
    return figure


def _documents(caption: str, rows: pd.DataFrame) -> str:
    of_row = [f"{row.file} · {row.row}" for row in rows.itertuples()]
    columns = {"document": of_row, "tokens": rows.tokens.tolist()}
    return html_table(caption, columns | {name: rows[name].tolist() for name in SCORES}, True)
