"""Many models side by side: what the table holds, what is refused, what the figure shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.command.cli import EXIT_BAD_INPUT
from olmo_sparsity.errors import DataError
from study.ladder import (
    ladder_table,
    main,
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


def test_the_command(
    results: Results, results_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "new" / "ladder.csv"
    assert main([str(results_folder), "--out", str(out)]) == 0
    kept = pd.read_csv(out)
    assert set(kept.selector) == set(results.summary.selector)
    assert list(json.loads(out.with_suffix(".meta.json").read_text())) == list(set(kept.model))
    assert main([str(results_folder), str(results_folder), "--out", str(out)]) == EXIT_BAD_INPUT
    assert "duplicate measurement" in capsys.readouterr().err


def test_a_model_name_that_is_a_formula_is_text_in_the_file(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["=cmd|' /C calc'!A0", "@sum(1)"])

    def read(folder: Path) -> Results:
        model = results.meta.model | {"name": next(names)}
        return replace(results, meta=replace(results.meta, model=model))

    monkeypatch.setattr("study.ladder.read_results", read)
    out = tmp_path / "ladder.csv"
    assert main(["one", "other", "--out", str(out)]) == 0
    assert set(pd.read_csv(out).model.str[:2]) == {"'=", "'@"}
