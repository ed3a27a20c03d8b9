"""The command's work from YAML to figure, what it refuses, and what is stored."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from olmo_sparsity import drawing
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.theory import figure
from olmo_sparsity.theory.bridge import build_transformer, draw_batch, label_logits
from olmo_sparsity.theory.cases import SETTINGS, build_planted
from olmo_sparsity.theory.experiment import run
from olmo_sparsity.theory.results import (
    markdown_tables,
    read_results,
    read_summary,
    summarise,
)
from olmo_sparsity.theory.settings import CaseConfig, TheoryConfig, load_theory_config

ROOT = Path(__file__).parents[1]

TINY = """
train_length: 8
test_multiples: [1, 2]
local_span: 2
seeds: [0, 1]
num_strings: 50
learning: {num_steps: 5, batch_per_length: 16}
cases:
  - {setting: local, num_places: 2}
  - {setting: nonlocal, num_places: 2}
  - {setting: coupled, num_places: 2, objective: minimax}
  - {setting: order, num_places: 2, attention_places: 1}
"""


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY + f"output: {tmp_path}/run\nfigure: {tmp_path}/figure\n")
    return path


def test_from_config_to_figure(config_path: Path, tmp_path: Path) -> None:
    run(
        str(config_path),
        [
            "--worst_case.seeds=[0]",
            "--worst_case.num_steps=3",
            "--bridge.num_steps=3",
            "--bridge.num_strings=20",
            "--bridge.width=16",
            "--bridge.cases=[{setting: coupled, num_places: 2}]",
        ],
    )
    rows, meta = read_results(tmp_path / "run")
    assert {row.model for row in rows} == {"attention", "worst_case", "rope", "pose"}
    # Lengths 4 … 8 and 16, two seeds; the search at 16 only; the bridge with one seed, two schemes.
    assert len(rows) == 4 * 6 * 2 + 1 + 2 * 6
    for end in ("svg", "png", "csv", "md", "meta.json"):
        assert (tmp_path / f"figure.{end}").stat().st_size > 100
    assert meta["seeds"] == [0, 1]
    assert {"torch", "numpy"} <= meta["versions"].keys()

    longest = {(row.model, row.setting): row for row in rows if row.length == 16 and row.seed == 0}
    local, apart = longest["attention", "local"], longest["attention", "nonlocal"]
    assert local.method == "transfer"
    assert local.low == local.risk == local.high
    assert np.isfinite([local.bound_stated, local.bound_improved]).all()
    assert np.isnan([apart.bound_stated, apart.bound_improved]).all()
    assert "exceeds L/4" in apart.refusal
    assert longest["attention", "order"].risk == pytest.approx(0.5, abs=1e-6)

    text = (tmp_path / "figure.md").read_text()
    assert text == markdown_tables(summarise(rows), meta)
    assert "| coupled | 2 | over 2 | 8 | minimax |" in text
    again = drawing.render(lambda: figure._figure(summarise(rows), meta), "svg", figure._SETTINGS)
    assert (tmp_path / "figure.svg").read_bytes() == again


@pytest.mark.parametrize("case", ["nonlocal_token_keys, num_places: 2", "drifting, num_places: 2",
                                  "nonlocal, num_places: 2, train_length: 10"])  # fmt: skip
def test_cases_that_are_compared_with_nothing_are_drawn(
    case: str, config_path: Path, tmp_path: Path
) -> None:
    run(str(config_path), ["--local_span=3", f"--cases=[{{setting: {case}}}]"])
    assert (tmp_path / "figure.svg").stat().st_size > 100


def test_the_fastest_growth_is_that_of_one_starting_point(
    config_path: Path, tmp_path: Path
) -> None:
    overrides = ["--worst_case.seeds=[0,1,2]", "--worst_case.num_steps=2"]
    run(str(config_path), ["--cases=[{setting: local, num_places: 1}]", *overrides])
    rows, _ = read_results(tmp_path / "run")
    (found,) = (s for s in summarise(rows) if s.model == "worst_case")
    growths = [row.risk / row.delta_worst for row in rows if row.model == "worst_case"]
    assert len(growths) == 3
    assert found.risk / found.delta_worst == max(growths)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "learning.num_step=3",
            "unknown key 'learning.num_step'; did you mean 'learning.num_steps'",
        ),
        ("train_lenght=3", "did you mean 'train_length'"),
        ("train_length=0", "train_length=0 must be at least 1"),
        ("train_length=x", "train_length"),
        ("seeds=[1,1]", r"seeds=\[1, 1\] holds one value twice"),
        ("test_multiples=[1,2,2]", "test_multiples=.* holds one value twice"),
        ("worst_case.seeds=[1,1]", "worst_case.seeds=.* holds one value twice"),
        ("worst_case.train_length=28", "worst_case.train_length=28 must be at most 27"),
        ("bridge.seeds=[1,1]", "bridge.seeds=.* holds one value twice"),
        ("bridge.seeds=[-1]", "bridge.seeds=.*-1"),
        ("bridge.schemes=[rope,rope]", "bridge.schemes=.* holds one value twice"),
        ("bridge.cases=[{setting: local, num_places: 7}]", r"bridge.cases\[0\].num_places=7"),
        (
            "bridge.cases=[{setting: local, num_places: 1, objective: minimax}]",
            r"bridge.cases\[0\].objective=minimax has no effect",
        ),
        (
            "cases=[{setting: local, num_places: 1},"
            "{setting: local, num_places: 1, train_length: 8, attention_places: 1}]",
            r"cases\[1\] is there twice",
        ),
        ("cases=[]", "cases is empty"),
        ("cases=[{setting: local, num_places: 7}]", r"num_places=7.*L/2=4"),
        ("cases=[{setting: nowhere, num_places: 1}]", "'nowhere' is not one of local"),
        ("cases=[{setting: order, num_places: 3}]", "must be 2"),
        ("cases=[{setting: local, num_places: 1, marker_rate: 1}]", r"must lie in \[0, 1\)"),
        ("cases=[{setting: local, num_place: 1}]", "num_place"),
        ("cases=[{setting: nonlocal_token_keys, num_places: 4}]", "GiB"),
        ("bridge.schemes=[alibi]", "must be among rope, pose"),
        ("bridge.cases=[{setting: nowhere, num_places: 1}]", "'nowhere' is not one of local"),
        ("train_length", "nor a setting with a value"),
    ],
)
def test_bad_settings_are_refused(
    override: str, says: str, config_path: Path, tmp_path: Path
) -> None:
    long = ["--test_multiples=[1,40]"] if "GiB" in says else []
    with pytest.raises(ConfigError, match=says):
        run(str(config_path), [*long, f"--{override}"])
    assert not (tmp_path / "run").exists()


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_theory_config(tmp_path / "none.yaml", [])
    with pytest.raises(DataError, match=r"table.parquet; make it with"):
        read_results(tmp_path)


# --- bridge ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["local", "nonlocal", "coupled"])
def test_the_transformer_is_given_the_ids_of_the_data(setting: str) -> None:
    planted = build_planted(TheoryConfig(), CaseConfig(setting, 3))
    plain = draw_batch(planted, 11, 6, np.random.default_rng(0))
    spread = draw_batch(planted, 11, 6, np.random.default_rng(0), spread_over=88, num_chunks=4)
    assert (plain[0] == spread[0]).all()
    target = int(planted.ids(88)[-1]) + 2
    for plain_L, spread_L in zip(plain[1], spread[1], strict=True):
        # Spreading keeps what shares an ID together and the order of the others.
        _, plain_rank = plain_L.unique(return_inverse=True)
        _, spread_rank = spread_L.unique(return_inverse=True)
        assert (plain_rank == spread_rank).all()
        assert spread_L.max() < target
        assert plain_L[-1] > plain_L[:-1].max()


def test_the_label_is_read_at_the_query() -> None:
    config = TheoryConfig()
    planted = build_planted(config, CaseConfig("local", 2))
    model = build_transformer(config.bridge, planted, 128)
    tokens_BL, positions_BL, _ = draw_batch(planted, 9, 2, np.random.default_rng(0))
    logits_BY = label_logits(model, tokens_BL, positions_BL, 2)
    assert logits_BY.shape == (2, 2)
    # RoPE knows differences only: the same relativity as Assumption 3.2 asks of keys.
    shifted = label_logits(model, tokens_BL, positions_BL + 40, 2)
    torch.testing.assert_close(logits_BY, shifted, atol=1e-4, rtol=1e-3)


# --- what is stored, and what the docs say of it --------------------------------------------------


def test_bounds_hold_wherever_they_apply() -> None:
    """With constant 1, up to the noise of what is sampled."""
    applies = 0
    for summary in read_summary(ROOT / "docs/figures/theory_quick.csv"):
        for bound in (summary.bound_stated, summary.bound_improved):
            if not np.isnan(bound):
                applies += 1
                assert summary.risk <= bound * (1 + 1e-5), summary
    assert applies > 40


def test_stored_tables_are_made_from_the_stored_summaries() -> None:
    for name in ("theory_quick", "theory_bridge"):
        stored = read_summary(ROOT / f"docs/figures/{name}.csv")
        meta = json.loads((ROOT / f"docs/figures/{name}.meta.json").read_text())
        assert markdown_tables(stored, meta) == (ROOT / f"docs/figures/{name}.md").read_text()


def test_the_quick_table_holds_every_panel() -> None:
    summaries = read_summary(ROOT / "docs/figures/theory_quick.csv")
    stored = {(s.setting, s.num_places, s.objective): s.num_seeds for s in summaries}
    for k in (1, 2, 3):
        for setting in ("local", "nonlocal", "coupled"):
            assert stored[setting, k, "mixture"] >= 5
        assert stored["local", k, "minimax"] >= 5
    assert {setting for setting, _, _ in stored} == set(SETTINGS)
