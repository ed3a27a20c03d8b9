"""Stages of a run change how position IDs are drawn and turned into angles; so do branches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.run import config_from_dict, load_saved_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.models.huggingface.config_of_weights import config_of
from olmo_sparsity.models.huggingface.exchange import export
from olmo_sparsity.models.load import load_model
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.metrics.read import read_metrics
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.processes.watchdog import Watchdog
from olmo_sparsity.training.setup.inputs import build_batches
from tests.conftest import data_section, small_run

YARN = {"scaling": "yarn", "factor": 4, "original_length": 16}
LONG = {"scheme": "pose", "target_length": 64, **YARN}


@pytest.fixture
def staged(data_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Six steps: three as the run says, then a base of 50,000 and YaRN, IDs up to 64."""
    run = small_run(tmp_path / "run", data_section(data_folder))
    run["model"] |= {"layer_norm_with_affine": True}  # Llama's shape, which is exported
    run["model"]["init_std"] = 0.3  # such that angles matter from the first step
    run["training"]["length"] = [
        {"tokens": 8, "until": 3},
        {"tokens": 16, "positions": LONG, "rope_theta": 50_000},
    ]
    run["checkpoint"] = {"interval_steps": 1, "keep": 9}
    return run


def losses_of(config: RunConfig) -> list[float]:
    rows = read_metrics(Path(config.run_folder) / "metrics.jsonl")
    return [row["loss"] for row in rows if "loss" in row]


def folder_of(config: RunConfig, step: int) -> Path:
    return Path(config.run_folder) / f"checkpoints/step{step:06d}"


def angles_of(checkpoint: Path) -> tuple[float, str | None]:
    """Return base and scaling of the model that is loaded from a checkpoint."""
    config = load_model(str(checkpoint), device="cpu").model.config
    return config.rope_theta, (config.rope_scaling or {}).get("rope_type")


def test_a_stage_is_trained_with_its_own_angles(staged: dict[str, Any], tmp_path: Path) -> None:
    """Step 4 of a run of stages is that of a branch which has these angles in all of its steps."""
    config = config_from_dict(staged)
    train(config)
    plain = staged | {"run_folder": str(tmp_path / "plain")}
    plain["training"] = staged["training"] | {"length": [{"tokens": 8, "until": 3}, {"tokens": 16}]}
    train(config_from_dict(plain))
    plain_losses = losses_of(config_from_dict(plain))
    assert losses_of(config)[:3] == plain_losses[:3]
    assert losses_of(config)[3] != plain_losses[3]

    branch = plain | {"run_folder": str(tmp_path / "branch"), "positions": LONG}
    branch["branch_from"] = str(tmp_path / "plain/checkpoints/step000003")
    branch["model"] = staged["model"] | {"rope_theta": 50_000}
    train(config_from_dict(branch))
    assert losses_of(config_from_dict(branch)) == losses_of(config)[3:]
    ends = [
        load_file(folder_of(config_from_dict(run), 6) / "model.safetensors")
        for run in (staged, branch)
    ]
    torch.testing.assert_close(*ends, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("engine", "first_step_left"), [("single", 2), ("single", 4), ("single", 5), ("fsdp", 5)]
)
def test_a_run_resumes_to_the_bit_before_at_and_in_a_stage(
    staged: dict[str, Any], engine: str, first_step_left: int
) -> None:
    staged["engine"] = {"name": engine}
    config = config_from_dict(staged)
    train(config)
    curve = losses_of(config)
    end = load_file(folder_of(config, 6) / "model.safetensors")
    for step in range(first_step_left, 7):
        shutil.rmtree(folder_of(config, step))
    train(config)
    assert losses_of(config) == curve
    resumed = load_file(folder_of(config, 6) / "model.safetensors")
    torch.testing.assert_close(resumed, end, rtol=0, atol=0)


def test_a_checkpoint_is_measured_and_exported_with_the_angles_of_its_step(
    staged: dict[str, Any], tmp_path: Path
) -> None:
    config = config_from_dict(staged)
    train(config)
    assert angles_of(folder_of(config, 3)) == (10_000.0, None)
    assert angles_of(folder_of(config, 4)) == (50_000.0, "yarn")
    loaded = load_model(config.run_folder, device="cpu")
    assert loaded.trained["target_length"] == 64
    assert config_of(str(folder_of(config, 3)))["rope_scaling"] is None
    export(Path(config.run_folder), tmp_path / "exported")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    parameters = theirs.config.rope_parameters
    assert parameters["rope_theta"] == 50_000
    assert (parameters["rope_type"], parameters["factor"]) == ("yarn", 4)
    tokens_BL = torch.arange(24)[None] * 7
    with torch.no_grad():
        expected = loaded.model(tokens_BL, torch.arange(24)[None])
        found = theirs(tokens_BL).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_position_ids_are_drawn_as_the_stage_says(staged: dict[str, Any]) -> None:
    config = config_from_dict(staged)
    assert config.largest_length == 64
    batches = build_batches(open_shards(config.data, "train"), config, Processes())
    largest = [int(batches.of_step(step).positions_BL.max()) for step in range(1, 7)]
    assert max(largest[:3]) < 32 <= max(largest[3:]) < 64


@pytest.mark.accept
@pytest.mark.filterwarnings("ignore")  # the compiler warns about what it does itself
def test_a_compiled_run_changes_its_angles_too(staged: dict[str, Any], tmp_path: Path) -> None:
    """A graph that was compiled for the first stage must not serve the second."""
    staged["training"]["length"][0]["tokens"] = 16  # so that no shape asks for another graph
    staged["model"]["n_layers"] = 1
    eager = config_from_dict(staged)
    train(eager)
    staged["run_folder"] = str(tmp_path / "compiled")
    staged["training"]["compile"] = True
    compiled = config_from_dict(staged)
    train(compiled)
    torch.compiler.reset()
    assert losses_of(compiled) == pytest.approx(losses_of(eager), abs=1e-3)
    staged["run_folder"] = str(tmp_path / "plain")
    staged["training"] |= {"length": 16, "compile": False}
    plain = config_from_dict(staged)
    train(plain)
    assert losses_of(plain)[:3] == losses_of(eager)[:3]
    assert abs(losses_of(plain)[3] - losses_of(eager)[3]) > 0.01


def test_a_branch_may_change_angles_and_forgets_no_scaling(
    staged: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config_from_dict(staged))
    staged["branch_from"] = str(tmp_path / "run/checkpoints/step000005")
    staged["run_folder"] = str(tmp_path / "branch")
    stage = staged["training"]["length"][1]
    stage["positions"] = {"scheme": "pose", "target_length": 64}
    with pytest.raises(ConfigError, match=r"branch_from=.*step000005 scales RoPE .*yarn"):
        train(config_from_dict(staged))
    stage["positions"] = LONG
    stage["rope_theta"] = 40_000
    with pytest.raises(ConfigError, match=r"rope_theta=40000.0 must be at least 50000.0, as in br"):
        train(config_from_dict(staged))
    stage["positions"] = LONG | {"factor": 8}
    stage["rope_theta"] = 60_000
    capsys.readouterr()
    train(config_from_dict(staged))
    assert "factor 4, original_max" in capsys.readouterr().err.split(" → ")[0]
    assert angles_of(tmp_path / "branch/checkpoints/step000006") == (60_000.0, "yarn")
    saved = load_saved_config(list_checkpoints(tmp_path / "branch")[0] / "config.yaml")
    assert saved.at(6).positions.factor == 8


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        ({"positions": {"scaling": "yarn"}}, {}, r"length\[1\]\.positions\.scaling=yarn needs"),
        ({"positions": LONG | {"target_length": 8}}, {}, r"\[1\]\.positions\.target_length=8 is"),
        (
            {"positions": LONG | {"target_length": 512}},
            {},
            r"max_sequence_length=64 is below the 512 positions trained",
        ),
        ({"positions": YARN | {"beta_slow": 32}}, {}, r"\[1\]\.positions\.beta_slow=32.0 must be"),
        (
            {"rope_theta": 50_000},
            {"rope": False, "alibi": True},
            r"\[1\]\.rope_theta is set, but model\.rope=false",
        ),
        (
            {"positions": LONG},
            {"architecture": "gpt_neox"},
            r"\[1\] changes RoPE, which model\.architecture=gpt_neox cannot do within a run; .*ini",
        ),
        (
            {"positions": LONG | {"per_document": True}},
            {},
            r"\[1\]\.positions\.per_document=True must be False, as in the run's",
        ),
    ],
)
def test_what_a_stage_cannot_have_is_refused(
    staged: dict[str, Any], stage: dict, changes: dict, message: str
) -> None:
    staged["training"]["length"][1] = {"tokens": 16} | stage
    staged["model"] |= changes
    with pytest.raises(ConfigError, match=message):
        config_from_dict(staged)


def test_positions_that_no_stage_uses_are_refused(staged: dict[str, Any]) -> None:
    staged["training"]["length"][0]["positions"] = {"scheme": "contiguous"}
    with pytest.raises(ConfigError, match="positions is set, but each stage of"):
        config_from_dict(staged)


def test_two_frequencies_are_too_few_for_scaling_in_any_stage(staged: dict[str, Any]) -> None:
    staged["model"] |= {"d_model": 4, "n_heads": 2}
    with pytest.raises(ConfigError, match="needs at least two frequencies"):
        train(config_from_dict(staged))


def test_the_first_step_of_a_stage_has_the_time_to_compile(
    staged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, str] = {}
    expect = Watchdog.expect
    expect_step = Watchdog.expect_step

    def noted(self: Watchdog, task: str) -> None:
        limits[task] = "work_timeout_s"
        expect(self, task)

    def noted_step(self: Watchdog, step: int) -> None:
        limits[f"step {step}"] = "step_timeout_s"
        expect_step(self, step)

    monkeypatch.setattr(Watchdog, "expect", noted)
    monkeypatch.setattr(Watchdog, "expect_step", noted_step)
    train(config_from_dict(staged))
    assert limits["the start"] == "work_timeout_s"
    assert limits["step 4"] == "work_timeout_s"
    for step in (2, 3, 5, 6):
        assert limits[f"step {step}"] == "step_timeout_s"
