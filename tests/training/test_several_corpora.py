"""A run on several corpora: weights by stage, losses of each, resumed exactly, none too often."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.run import config_from_dict, load_saved_config
from olmo_sparsity.config.sections import EarlierWeights, RunConfig
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.dry_run import dry_run
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.metrics.read import read_metrics
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.setup.inputs import build_batches
from olmo_sparsity.training.setup.resolve import resolve
from tests.conftest import small_run


@pytest.fixture
def mixed_run(tmp_path: Path) -> dict[str, Any]:
    """Six steps of 4 sequences: in the first four half of each corpus, then digits alone."""
    for name, unit in (("words", "river"), ("digits", "1984")):
        (tmp_path / name).mkdir()
        for number in range(60):
            text = " ".join(f"{unit}{number * place}" for place in range(60))
            (tmp_path / name / f"{number}.txt").write_text(text)
    corpora = [
        {"name": name, "source": "text", "path": str(tmp_path / name)}
        for name in ("words", "digits")
    ]
    data = {
        "folder": str(tmp_path / "prepared"),
        "corpus": corpora,
        "tokenizer": {"train_vocab": 300},
        "heldout_share": 0.3,
    }
    run = small_run(tmp_path / "run", data)
    run["training"]["length"] = [
        {"tokens": 16, "until": 4},
        {"tokens": 16, "weights": {"words": 0, "digits": 1}},
    ]
    prepare(config_from_dict(run).data)
    return run


def test_losses_and_reads_of_each_corpus_are_logged_and_a_resumed_run_repeats_them(
    mixed_run: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_from_dict(mixed_run)
    train(config)
    assert "text digits: " in capsys.readouterr().err
    path = Path(config.run_folder) / "metrics.jsonl"
    rows = list(read_metrics(path))
    steps = [row for row in rows if "loss" in row]
    corpora = open_shards(config.data, "train").corpora
    for name, num_read in (("words", 8), ("digits", 16)):  # of the 24 sequences
        assert steps[-1][f"epochs/{name}"] == num_read / corpora[name].count_sequences(16)
    assert steps[-1]["epochs"] == steps[-1]["epochs/digits"]
    (heldout,) = [row for row in rows if "heldout" in row]
    losses = {name: part[0]["loss"] for name, part in heldout["by_corpus"].items()}
    assert losses["words"] != losses["digits"]
    assert heldout["heldout"][0]["loss"] == pytest.approx(sum(losses.values()) / 2)

    curve = [row["loss"] for row in steps]
    for folder in list_checkpoints(config.run_folder):
        if folder.name != "step000004":
            shutil.rmtree(folder)
    train(config)
    assert [row["loss"] for row in read_metrics(path) if "loss" in row] == curve

    mixed_run["data"]["corpus"][0]["weight"] = 2
    with pytest.raises(ConfigError, match=r"data\.corpus\[0\]\.weight=1.0 \(now 2.0\)"):
        train(config_from_dict(mixed_run))


def test_each_corpus_has_its_limit_of_epochs(
    mixed_run: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    dry_run(config_from_dict(mixed_run))
    lines = capsys.readouterr().out.splitlines()
    read = {
        line.split()[2].rstrip(":"): float(line.split("read ")[1].split()[0])
        for line in lines
        if line.startswith("# text ")
    }
    assert read["digits"] > read["words"] > 0
    mixed_run["training"]["max_epochs"] = (read["digits"] + read["words"]) / 2
    for call in (train, dry_run):
        with pytest.raises(ConfigError, match=r"reads the corpus digits .* times, above"):
            call(config_from_dict(mixed_run))


# --- a branch with other weights ------------------------------------------------------------------


@pytest.fixture
def branch_of_digits(mixed_run: dict[str, Any], tmp_path: Path) -> RunConfig:
    """A branch from step 4 of a run with half of each corpus, which goes on with digits alone. Its
    trunk is trained."""
    mixed_run["training"]["length"] = 16
    mixed_run["checkpoint"] = {"interval_steps": 1, "keep_steps": [4]}
    train(config_from_dict(mixed_run))
    mixed_run["branch_from"] = str(tmp_path / "run/checkpoints/step000004")
    mixed_run["run_folder"] = str(tmp_path / "branch")
    mixed_run["data"]["corpus"][0]["weight"] = 0
    return config_from_dict(mixed_run)


def batches_of(config: RunConfig) -> list[list[list[int]]]:
    """Return the tokens of all steps, as a run resolves its config."""
    shards = open_shards(config.data, "train")
    cpu = torch.device("cpu")
    resolved = resolve(config, shards, cpu, Hardware.here(cpu))
    batches = build_batches(shards, resolved, Processes())
    steps = range(1, config.training.num_steps + 1)
    return [batches.of_step(step).tokens_BL.tolist() for step in steps]


def test_a_branch_with_other_weights_reads_on_as_the_run_that_planned_them(
    branch_of_digits: RunConfig, mixed_run: dict[str, Any], tmp_path: Path
) -> None:
    train(branch_of_digits)
    planned = mixed_run | {"branch_from": None, "run_folder": str(tmp_path / "planned")}
    planned["training"] = mixed_run["training"] | {
        "length": [
            {"tokens": 16, "until": 4, "weights": {"words": 1, "digits": 1}},
            {"tokens": 16},
        ]
    }
    planned_config = config_from_dict(planned)
    train(planned_config)
    assert batches_of(branch_of_digits) == batches_of(planned_config)
    branch_rows = list(read_metrics(Path(branch_of_digits.run_folder) / "metrics.jsonl"))
    planned_rows = list(read_metrics(Path(planned_config.run_folder) / "metrics.jsonl"))
    losses = {row["step"]: row["loss"] for row in planned_rows if "loss" in row}
    assert [row["loss"] for row in branch_rows if "loss" in row] == [losses[5], losses[6]]
    # Of the 24 sequences the trunk has read 8 of each corpus; the branch reads 8 of digits.
    corpora = open_shards(branch_of_digits.data, "train").corpora
    last = [row for row in branch_rows if "loss" in row][-1]
    for name, num_read in (("words", 8), ("digits", 16)):
        assert last[f"epochs/{name}"] == num_read / corpora[name].count_sequences(16)


def test_a_branch_with_other_weights_goes_on_without_its_trunk(
    branch_of_digits: RunConfig, tmp_path: Path
) -> None:
    train(branch_of_digits)
    path = Path(branch_of_digits.run_folder) / "metrics.jsonl"
    curve = [row["loss"] for row in read_metrics(path) if "loss" in row]
    shutil.rmtree(tmp_path / "run")
    last, before = list_checkpoints(branch_of_digits.run_folder)
    assert before.name == "step000005"
    shutil.rmtree(last)
    train(branch_of_digits)
    assert [row["loss"] for row in read_metrics(path) if "loss" in row] == curve


def test_a_branch_of_a_branch_knows_the_weights_of_both(
    branch_of_digits: RunConfig, mixed_run: dict[str, Any], tmp_path: Path
) -> None:
    train(branch_of_digits)
    mixed_run["branch_from"] = str(tmp_path / "branch/checkpoints/step000006")
    mixed_run["run_folder"] = str(tmp_path / "second")
    mixed_run["training"]["num_steps"] = 8
    mixed_run["data"]["corpus"][0]["weight"] = 3
    second = config_from_dict(mixed_run)
    train(second)
    saved = load_saved_config(tmp_path / "second/config.yaml").training.earlier_weights
    assert saved == [
        EarlierWeights(4, {"words": 1.0, "digits": 1.0}),
        EarlierWeights(6, {"words": 0.0, "digits": 1.0}),
    ]
    assert batches_of(second)[:6] == batches_of(branch_of_digits)


def test_a_branch_may_not_have_other_corpora(
    branch_of_digits: RunConfig, mixed_run: dict[str, Any]
) -> None:
    mixed_run["data"]["corpus"].pop()
    mixed_run["data"]["corpus"][0]["weight"] = 1
    prepare(config_from_dict(mixed_run).data)
    with pytest.raises(ConfigError, match=r"reads the corpora .*digits.*, this run \['words'\]"):
        train(config_from_dict(mixed_run))
