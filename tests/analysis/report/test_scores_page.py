from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity.analysis.report.scores_page import SCORES, write_scores
from olmo_sparsity.command.cli import main
from olmo_sparsity.errors import DataError


def scores(num: int = 40) -> pd.DataFrame:
    """As `score` writes them; some documents are too short for a gain."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({name: rng.normal(size=num) for name in SCORES})
    table.loc[num - 3 :, [name for name in SCORES if name != "gzip"]] = np.nan
    return table.assign(file="<b>a.txt", row=range(num), tokens=100, context=64.0)


def test_a_page_of_scores_lists_the_extreme_documents(tmp_path: Path) -> None:
    table, out = scores(), tmp_path / "scores.html"
    table.to_parquet(tmp_path / "scores.parquet")
    assert main(["report", str(tmp_path / "scores.parquet"), "--out", str(out)]) == 0
    page = out.read_text()
    assert "37 of 40 documents have a gain" in page
    assert "<b>a.txt" not in page, "names are untrusted"
    ordered = table.net_gain[:37].sort_values()
    for index in (ordered.index[0], ordered.index[-1]):
        assert f"&lt;b&gt;a.txt · {index}</th>" in page
    assert f"&lt;b&gt;a.txt · {ordered.index[18]}</th>" not in page
    assert f"<td>{ordered.median():.2f}</td>".replace("-", "−") in page
    table.to_json(tmp_path / "scores.jsonl", orient="records", lines=True)
    write_scores(tmp_path / "scores.jsonl", tmp_path / "again.html")
    assert "37 of 40 documents" in (tmp_path / "again.html").read_text()


def test_a_file_without_scores_is_refused(tmp_path: Path) -> None:
    scores().drop(columns="gain").to_parquet(tmp_path / "other.parquet")
    with pytest.raises(DataError, match="has no column gain; pass the file that `score` writes"):
        write_scores(tmp_path / "other.parquet", tmp_path / "out.html")
    scores()[-3:].to_parquet(tmp_path / "short.parquet")
    with pytest.raises(DataError, match="no document has a gain"):
        write_scores(tmp_path / "short.parquet", tmp_path / "out.html")
