"""A run on several corpora: weights by stage, losses of each, resumed exactly, none too often."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.run import config_from_dict
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.data.tokens import prepare
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.run_folder import read_metrics
from olmo_sparsity.training.start import dry_run
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
