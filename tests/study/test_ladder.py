"""Many models side by side: what the table holds, what is refused, what the figure shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.command.cli import EXIT_BAD_INPUT
from olmo_sparsity.errors import DataError
from study.ladder import (
    describe_ladder,
    draw_ladder,
    ladder_table,
    main,
    rank_correlation,
)

SIZES = (300_000, 1_000_000, 3_000_000)


def as_model(result: Results, size: int, positions: str, seed: int, **about: Any) -> Results:
    """The larger, the larger the drop and the net excess."""
    rung = SIZES.index(size)
    name, trained = f"runs/{positions}{size}_seed{seed}", {"positions": positions, "seed": seed}
    model = {"name": name, "num_parameters": size, "trained": trained}
    gate = result.meta.induction | {"drop": 0.5 * rung + 0.1 * seed}
    summary = result.summary.assign(net=result.summary.net + 0.1 * rung + 0.02 * seed)
    return replace(
        result, meta=replace(result.meta, model=model, induction=gate, **about), summary=summary
    )


@pytest.fixture(scope="module")
def table(results: Results) -> pd.DataFrame:
    return ladder_table(
        [
            as_model(results, size, positions, seed)
            for size in SIZES
            for positions in ("pose", "contiguous")
            for seed in (1, 2)
        ]
    )


def test_a_row_per_model_units_selector_and_k(results: Results, table: pd.DataFrame) -> None:
    summary = results.summary[results.summary.target_set == "gap"]
    assert len(table) == 12 * len(summary)
    by = ["units", "selector", "k"]
    row = table[(table.model == "runs/pose300000_seed1")].set_index(by).loc["span:4", "add_one", 8]
    expected = summary.set_index(by).loc["span:4", "add_one", 8]
    for name in ("recovery", "foreign", "excess", "placebo", "net_low", "net_high", "num_targets"):
        assert row[name] == expected[name]
    assert row.net == pytest.approx(expected.net + 0.02)
    assert row.loss_long == results.losses.loss_long.mean()
    assert row["drop"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("windows", [{"long": 96}, {"long": 64}], r"windows\.long is 96 and 64; measure both"),
        ("targets", [{"share": 0.1, "min_gap": gap} for gap in (0.1, 0.7)], r"targets\.min_gap"),
        ("targets", [{"given": "a"}, {"given": "b"}], r"targets\.given is a and b"),
        ("data", [{"fingerprint": "x"}, {"fingerprint": "y"}], r"data\.fingerprint"),
        ("dtype", ["float32", "bfloat16"], "dtype is float32 and bfloat16"),
    ],
)
def test_models_that_were_measured_otherwise_are_refused(
    results: Results, key: str, values: list, message: str
) -> None:
    models = [
        as_model(results, SIZES[i], "pose", 1, **{key: value}) for i, value in enumerate(values)
    ]
    names = "pose300000_seed1 and runs/pose1000000_seed1 were not measured alike"
    with pytest.raises(DataError, match=f"{names}: {message}"):
        ladder_table(models)
    with pytest.raises(DataError, match=r"duplicate measurement: .*pose300000_seed1;"):
        ladder_table(models[:1] * 2)
    left = models[0].meta.counts | {"documents_left": 3}
    partial = replace(models[0], meta=replace(models[0].meta, counts=left))
    with pytest.raises(DataError, match=r"3 of .* documents are not finished; finish"):
        ladder_table([partial])


def test_rank_correlation() -> None:
    rng = np.random.default_rng(0)
    x = pd.Series(rng.normal(size=30))
    assert rank_correlation(x, np.exp(x)) == pytest.approx((1, 1, 1))
    value, low, high = rank_correlation(x, pd.Series(rng.normal(size=30)))
    assert low < 0 < high
    assert low < value < high


def test_what_is_said_and_drawn(table: pd.DataFrame, tmp_path: Path) -> None:
    text = describe_ladder(table, "add_one", 8)
    rows = table[(table.selector == "add_one") & (table.k == 8) & (table.units == "tokens")]
    of_largest = rows[(rows.num_parameters == SIZES[-1]) & (rows.positions == "pose")]
    assert f"{of_largest.net.mean():+.2f} [{of_largest.net.min():+.2f}" in text
    assert "over 12 models" in text
    assert re.search(r"^pose3000000 +3,000,000 +2 ", text, re.MULTILINE)
    draw_ladder(table, tmp_path / "ladder.svg", "add_one", 8)
    drawn = (tmp_path / "ladder.svg").read_text()
    for word in ("0.3M", "1M", "3M", "add one, RoPE + PoSE", "random", "net excess recovery"):
        assert word in drawn
    draw_ladder(table, tmp_path / "ladder.svg", "add_one", 8, "span:4")
    assert "add one, span:4, RoPE" in (tmp_path / "ladder.svg").read_text()
    assert describe_ladder(table, "add_one", 8, "span:4").startswith("add_one, span:4, k = 8")
    with pytest.raises(
        DataError,
        match=r"no model was measured with greedy \(tokens\) at k = 8; .*selector add_one",
    ):
        draw_ladder(table, tmp_path / "ladder.svg", "greedy", 8)


def test_a_model_that_was_not_asked_is_not_left_out_in_silence(results: Results) -> None:
    few = as_model(results, SIZES[1], "pose", 1)
    few = replace(few, summary=few.summary[few.summary.k < 8])
    both = ladder_table([as_model(results, SIZES[0], "pose", 1), few])
    with pytest.raises(
        DataError, match=r"pose1000000_seed1 was not measured with add_one \(tokens\) at"
    ):
        describe_ladder(both, "add_one", 8)
    assert "pose1000000" in describe_ladder(both, "add_one", 1)


def test_models_of_one_size_are_drawn_in_one_panel(results: Results, tmp_path: Path) -> None:
    same = ladder_table([as_model(results, SIZES[0], "pose", seed) for seed in (1, 2)])
    for names, wanted in (((), ">net excess recovery"), (("net", "placebo"), ">excess recovery")):
        some = same.assign(**dict.fromkeys(names, np.nan))
        draw_ladder(some, tmp_path / "same.svg", "add_one", 8)
        drawn = (tmp_path / "same.svg").read_text()
        assert wanted in drawn
        assert "parameters" not in drawn


def test_the_command(
    results: Results, results_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "new" / "ladder.png"
    assert main([str(results_folder), "--out", str(out)]) == 0
    assert "add_one, tokens, k = 8" in capsys.readouterr().out
    kept = pd.read_csv(out.with_suffix(".csv"))
    assert set(kept.selector) == set(results.summary.selector)
    assert list(json.loads(out.with_suffix(".meta.json").read_text())) == list(set(kept.model))
    assert main([str(results_folder), "--out", str(out), "--k", "3"]) == EXIT_BAD_INPUT
    assert "no model was measured with add_one (tokens) at k = 3" in capsys.readouterr().err
