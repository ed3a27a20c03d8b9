"""A small measurement at every evaluation of a training run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from olmo_sparsity import measure
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.models.load import load_model
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.probe import SparsityProbe, probe_documents, probe_settings
from olmo_sparsity.training.run_folder import loss_table, read_metrics
from olmo_sparsity.training.start import resolve
from tests.conftest import MakeConfig


def rows(config: RunConfig) -> list[dict]:
    return list(read_metrics(Path(config.run_folder) / "metrics.jsonl"))


def final_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_model(config.run_folder, device="cpu").model.state_dict()


def test_sparsity_is_probed_at_every_evaluation(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of a run's metrics are those that `measure` finds of its checkpoint."""
    targets = Plan.targets
    changes = {
        "training__length": 64,
        "positions__target_length": 64,
        "training__num_steps": 2,
        "evaluation__interval_steps": 1,
    }
    plain = make_config(**changes)
    train(plain)
    config = make_config(evaluation__sparsity_targets=4, run_folder=str(tmp_path / "probed"))
    with pytest.raises(ConfigError, match="sparsity_targets needs `"):
        train(config)
    train(config, probe=SparsityProbe)
    for name, weight in final_weights(plain).items():
        torch.testing.assert_close(final_weights(config)[name], weight, rtol=0, atol=0)
    found = [row["sparsity"] for row in rows(config) if "heldout" in row]
    assert len(found) == 2
    heldout = open_shards(config.data, "heldout")
    config = resolve(config, heldout, torch.device("cpu"))
    settings = probe_settings(config)
    documents = probe_documents(config, heldout, settings.windows)
    measured = measure(
        load_model(config.run_folder, device="cpu"),
        documents,
        settings.windows,
        units=settings.units,
        selectors=settings.selectors,
        ks=settings.ks,
        sets=settings.sets,
        max_targets=settings.max_targets,
        draws=settings.draws,
    )
    assert measured is not None
    summary = measured.summary.set_index(["target_set", "units"])
    for units in settings.units:
        for name, value in found[-1][units].items():
            assert value == pytest.approx(summary.loc["gap", units][name], abs=1e-6)
    monkeypatch.setattr(
        Plan, "targets", lambda plan, losses: targets(plan, losses).query("far_part == 'placebo'")
    )
    assert (
        SparsityProbe(config, heldout, torch.device("cpu"), Processes())(final_weights(config))
        == {}
    )
    assert "net span:4" in loss_table(config.run_folder)
    with pytest.raises(ConfigError, match="sparsity_targets"):
        make_config(training__length=16)
    with pytest.raises(DataError, match="sparsity_targets needs four"):
        train(
            make_config(
                training__length=4096,
                positions__target_length=4096,
                model__max_sequence_length=4096,
                run_folder=str(tmp_path / "long"),
            ),
            probe=SparsityProbe,
        )
