"""TensorBoard and W&B receive every row, and cannot end a run."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.dry_run import dry_run
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.metrics.read import read_metrics
from olmo_sparsity.training.metrics.writers import MAX_FAILURES, _scalars
from olmo_sparsity.training.steps import Outcome
from tests.conftest import MakeConfig
from tests.support import children


class FakeWandb(types.ModuleType):
    """W&B, as far as a run calls it. Like the real one it drops a row whose step is below that of
    the last one."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.received: list[tuple[dict, int]] = []
        self.opened: list[dict] = []
        self.num_finished = 0

    def init(self, **settings: Any) -> Any:
        assert self.num_finished == len(self.opened), "the earlier run of this process goes on"
        self.opened.append(settings)
        return types.SimpleNamespace(id="a1", log=self.log, finish=self.finish)

    def log(self, row: dict, step: int) -> None:
        if not self.received or step >= self.received[-1][1]:
            self.received.append((row, step))

    def finish(self) -> None:
        self.num_finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_receives_every_row_and_goes_on_in_the_same_curves(
    make_config: MakeConfig, wandb: FakeWandb
) -> None:
    train(config := make_config(logging__wandb_project="test"))
    assert [step for _, step in wandb.received] == [1, 2, 3, 4, 5, 6, 6]
    assert {"train/tokens_per_s", "train/peak_memory_gib"} <= wandb.received[-2][0].keys()
    places = ("0-16", "16-32", "32-64")
    assert set(wandb.received[-1][0]) == {
        *(f"{name}/{place}" for name in ("heldout", "heldout_bits_per_byte") for place in places),
        "heldout/induction_drop",
    }
    shutil.rmtree(list_checkpoints(config.run_folder)[0])
    train(config)
    assert [settings["id"] for settings in wandb.opened] == [None, "a1"]


def test_a_run_that_begins_again_or_gets_wandb_later_has_new_curves(
    make_config: MakeConfig, wandb: FakeWandb
) -> None:
    train(config := make_config())
    shutil.rmtree(list_checkpoints(config.run_folder)[0])
    train(make_config(logging__wandb_project="test"))
    for checkpoint in list_checkpoints(config.run_folder):
        shutil.rmtree(checkpoint)
    train(make_config(start_over=True))
    assert [settings["id"] for settings in wandb.opened] == [None, None]


def test_steps_before_an_evaluation_reach_wandb_before_it(
    make_config: MakeConfig, wandb: FakeWandb
) -> None:
    train(make_config(logging__wandb_project="test", evaluation__interval_steps=3))
    assert [step for _, step in wandb.received] == [1, 2, 3, 3, 4, 5, 6, 6]


def test_wandb_ends_before_a_run_goes_on_without_a_batch(
    make_config: MakeConfig, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    children.give_no_numbers([3], monkeypatch.setattr)
    train(make_config(logging__wandb_project="test", training__on_nan="skip"))
    assert len(wandb.opened) == wandb.num_finished == 2


class NoNetwork:
    """Fails like W&B without network."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, *given: Any, **named: Any) -> None:
        self.num_calls += 1
        raise ConnectionError("api.wandb.ai is away")


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_failing_wandb_is_one_line_and_the_run_goes_on(
    make_config: MakeConfig, wandb: FakeWandb, capsys: pytest.CaptureFixture, where: str
) -> None:
    setattr(wandb, where, NoNetwork())
    config = make_config(logging__wandb_project="test")
    assert train(config) is Outcome.FINISHED
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "is away" in line]
    assert "metrics.jsonl has all of them" in line
    rows = read_metrics(Path(config.run_folder) / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 6]


def test_a_writer_that_takes_no_row_gets_no_more_of_them(
    make_config: MakeConfig, wandb: FakeWandb
) -> None:
    broken = wandb.log = NoNetwork()
    train(make_config(logging__wandb_project="test", training__num_steps=MAX_FAILURES + 5))
    assert broken.num_calls == MAX_FAILURES


def test_a_measure_has_a_curve_for_each_of_its_numbers() -> None:
    row = {
        "step": 1,
        "by_place": [{"from": 8, "to": 16, "loss": 1.0}],
        "lm_eval": {"words/acc": 0.5},
    }
    assert dict(_scalars(row)) == {"by_place/8-16": 1.0, "lm_eval/words/acc": 0.5}


@pytest.mark.parametrize("module", ["wandb", "lm_eval"])
def test_a_missing_package_is_named_before_a_run(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = make_config(logging__wandb_project="test" if module == "wandb" else None)
    config.evaluation.lm_eval = ["hellaswag"] if module == "lm_eval" else []
    for start in (dry_run, train):
        with pytest.raises(ConfigError, match=rf"pip install 'olmo-sparsity\[{module}\]'"):
            start(config)
