"""Training: a run, its log, what it refuses, and starting from weights."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from olmo_sparsity.base import files, retry
from olmo_sparsity.base.errors import ConfigError, DataError, UnreadableNowError, UserError
from olmo_sparsity.base.files import naming_written_file, read_bounded
from olmo_sparsity.config.run import load_saved_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.batches import Batch, TrainingBatches
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.models.huggingface.config_of_weights import config_of
from olmo_sparsity.models.huggingface.exchange import export
from olmo_sparsity.models.load import load_model
from olmo_sparsity.models.olmo.layers import first_query_scale
from olmo_sparsity.training import restore, start
from olmo_sparsity.training.after_step.log import slowest_process
from olmo_sparsity.training.dry_run import dry_run
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.engines.losses import ForwardClock
from olmo_sparsity.training.evaluation.evaluate import Evaluation
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.metrics import read as metrics_files
from olmo_sparsity.training.metrics.loss_table import describe_losses
from olmo_sparsity.training.metrics.read import read_metrics
from olmo_sparsity.training.optimizer.learning_rate import learning_rate
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.run_folder import environment, gpu_hours, skipped_batches
from olmo_sparsity.training.run_folder import folder as run_folder
from olmo_sparsity.training.run_folder.gpu_hours import GpuHours
from olmo_sparsity.training.run_folder.trainer_state import TrainerState
from olmo_sparsity.training.steps import Outcome
from tests.conftest import MakeConfig, until
from tests.support import children
from tests.support.metrics import repeatable_rows
from tests.support.models import SIZES, tiny


def rows(config: RunConfig) -> list[dict]:
    return list(read_metrics(Path(config.run_folder) / "metrics.jsonl"))


def test_a_run_learns_and_leaves_a_whole_folder(make_config: MakeConfig) -> None:
    config = make_config(training__num_steps=40, training__batch_size=16)
    assert train(config) is Outcome.FINISHED
    folder = Path(config.run_folder)
    whole = {"config.yaml", "environment.json", "metrics.jsonl", "checkpoints", "attempts.json"}
    whole |= {"gpu_hours.json"}
    assert {path.name for path in folder.iterdir()} == whole
    curve = [row["loss"] for row in rows(config) if "loss" in row]
    assert len(curve) == 40
    assert sum(curve[-5:]) / 5 < curve[0] - 0.5
    (start,) = json.loads((folder / "environment.json").read_text())
    assert start["engine"]["class"] == "Engine"
    assert start["versions"]["torch"] == torch.__version__
    assert [path.name for path in list_checkpoints(folder)] == ["step000040", "step000038"]
    assert "held-out loss by position" in describe_losses(folder)


def test_a_run_ends_at_its_gpu_hours_counts_those_of_earlier_starts_and_goes_on_if_they_are_raised(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    whole = make_config(training__num_steps=12)
    train(whole)
    expected = [row["loss"] for row in rows(whole) if "loss" in row]
    config = make_config(run_folder=str(tmp_path / "limited"), training__max_gpu_hours=1e-9)
    with pytest.raises(
        UserError, match=r"max_gpu_hours=1e-09 is reached: .*, step 1 is saved"
    ) as e:
        train(config)
    assert e.value.exit_code == 2
    stored = Path(config.run_folder) / "gpu_hours.json"
    first_hours = json.loads(stored.read_text())["gpu_hours"]
    assert first_hours > 1e-9
    # A requeued job trains no further step, also where its own time is below the limit.
    stored.write_text('{"gpu_hours": 50.0}')
    config.training.max_gpu_hours = 50.0
    with pytest.raises(UserError, match="step 1 is saved; raise it"):
        train(config)
    assert [row["step"] for row in rows(config) if "loss" in row] == [1]
    config.training.max_gpu_hours = 60.0
    assert train(config) is Outcome.FINISHED
    assert [row["loss"] for row in rows(config) if "loss" in row] == expected
    assert 50 < json.loads(stored.read_text())["gpu_hours"] < 51


def test_a_finished_run_is_no_error_whatever_it_has_cost(
    make_config: MakeConfig, trained: Path
) -> None:
    """A job may be repeated for its export."""
    (trained / "gpu_hours.json").write_text('{"gpu_hours": 50.0}')
    assert train(make_config(training__max_gpu_hours=50.0)) is Outcome.FINISHED


def test_hours_are_stored_while_a_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a process that is killed in its start loses a minute at most."""
    monkeypatch.setattr(gpu_hours, "WRITE_EVERY_S", 0.01)
    (tmp_path / "gpu_hours.json").write_text('{"gpu_hours": 7.0}')
    hours = GpuHours(tmp_path, None, Processes(rank=0, world_size=8))

    def read() -> float:
        return float(json.loads((tmp_path / "gpu_hours.json").read_text())["gpu_hours"])

    with hours.keep_stored():
        until(lambda: read() > 7.0)
        seen = read()
    assert 7.0 < seen < read() < 7.1


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ESTALE, 74), (errno.EIO, 74), (errno.EACCES, None)]
)
def test_a_read_that_a_disk_refuses_for_a_while_ends_a_run_such_that_its_job_is_requeued(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, number: int, code: int | None
) -> None:
    """As of held-out documents, which are mapped into memory when an evaluation reads them."""

    def fail(*given: object) -> None:
        raise OSError(number, os.strerror(number), "heldout-00000.tokens.uint16")

    monkeypatch.setattr(Evaluation, "losses", fail)
    with pytest.raises((UserError, OSError), match=re.escape(os.strerror(number))) as error:
        train(make_config())
    assert getattr(error.value, "exit_code", None) == code


def test_a_start_whose_files_cannot_be_written_for_a_while_is_requeued(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **named: object) -> None:
        with naming_written_file(Path("environment.json")):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(restore, "add_start", fail)
    with pytest.raises(UserError, match=r"environment\.json cannot be written: Stale") as error:
        train(make_config())
    assert error.value.exit_code == 74


def test_a_resumed_run_draws_no_random_weights(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_by: list[bool] = []
    build = start.build_model

    def counted(config: Any) -> Any:
        before = torch.get_rng_state()
        model = build(config)
        drawn_by.append(not torch.equal(before, torch.get_rng_state()))
        return model

    monkeypatch.setattr(start, "build_model", counted)
    config = make_config()
    train(config)
    before = repeatable_rows(config.run_folder)
    shutil.rmtree(list_checkpoints(config.run_folder)[0])
    train(config)
    assert drawn_by == [True, False]
    assert repeatable_rows(config.run_folder) == before


@pytest.mark.parametrize("engine", ["single", "fsdp"])
def test_a_run_from_given_weights_draws_none_and_ends_as_if_it_had(
    make_config: MakeConfig,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
) -> None:
    """Also its dropout, which draws random numbers in each step."""
    was_filled: list[bool] = []
    build = start.build_new_model
    draws_all_the_same = False

    def watched(config: RunConfig, is_filled: bool) -> start.NewModel:
        was_filled.append(is_filled)
        before = torch.get_rng_state()
        new_model = build(config, is_filled and not draws_all_the_same)
        has_drawn = not torch.equal(before, torch.get_rng_state())
        assert has_drawn == draws_all_the_same
        return new_model

    monkeypatch.setattr(start, "build_new_model", watched)
    ends = []
    for draws_all_the_same in (False, True):
        config = make_config(
            run_folder=str(tmp_path / f"from_{draws_all_the_same}"),
            init_from=str(trained),
            model__residual_dropout=0.1,
            engine__name=engine,
        )
        train(config)
        weights = load_model(config.run_folder, device="cpu").model.state_dict()
        ends.append((weights, repeatable_rows(config.run_folder)))
    assert was_filled == [True, True]
    (weights, losses), (expected_weights, expected_losses) = ends
    assert losses == expected_losses
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)


def test_a_damaged_environment_json_does_not_stop_a_run(
    make_config: MakeConfig, trained: Path, capsys: pytest.CaptureFixture
) -> None:
    path = trained / "environment.json"
    damaged = path.read_bytes()[:50]
    path.write_bytes(damaged)
    assert train(make_config()) is Outcome.FINISHED
    kept = trained / "environment.json.damaged"
    assert f"the file is damaged; it is now {kept}" in capsys.readouterr().err
    assert kept.read_bytes() == damaged
    (start,) = json.loads(path.read_text())
    assert start["resumed_at_step"] == 6


def test_without_checkpoints_a_damaged_environment_json_does_not_stop_a_run(
    make_config: MakeConfig, trained: Path
) -> None:
    """As that of a run whose first start was killed before it saved."""
    shutil.rmtree(trained / "checkpoints")
    for name in ("attempts.json", "metrics.jsonl"):
        (trained / name).unlink()
    (trained / "environment.json").write_text("[{")
    assert train(make_config()) is Outcome.FINISHED


def test_an_environment_json_that_cannot_be_read_is_kept_and_not_called_damaged(
    make_config: MakeConfig,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    fail_to_read(monkeypatch, trained / "environment.json")
    monkeypatch.setattr(retry, "RETRY_AFTER_S", (0.0,))
    content = (trained / "environment.json").read_bytes()
    assert train(make_config()) is Outcome.FINISHED
    kept = trained / "environment.json.damaged"
    shown = capsys.readouterr().err
    assert f"cannot be read now (Stale file handle); it is now {kept}" in shown
    assert "environment.json cannot be read now (Stale file handle); it may be intact" in shown
    assert "the file is damaged" not in shown
    assert kept.read_bytes() == content


def test_a_run_whose_notes_cannot_be_read_does_not_begin_again(
    make_config: MakeConfig, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints are gone, and these files alone show that there were any."""
    shutil.rmtree(trained / "checkpoints")
    (trained / "checkpoints").mkdir()
    metrics = (trained / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(retry, "RETRY_AFTER_S", (0.0,))
    for name in ("attempts.json", "environment.json"):
        with monkeypatch.context() as patch:
            fail_to_read(patch, trained / name)
            with pytest.raises(UnreadableNowError, match=rf"{name} cannot be read now") as error:
                train(make_config(start_over=True))
        assert error.value.exit_code == 74
        (trained / "attempts.json").unlink(missing_ok=True)
    assert (trained / "metrics.jsonl").read_bytes() == metrics
    assert not (trained / "set_aside_1").exists()


def test_metrics_that_cannot_be_read_now_are_not_taken_for_damaged(
    make_config: MakeConfig, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_read(monkeypatch, trained / "metrics.jsonl")
    with pytest.raises(UnreadableNowError, match=r"metrics\.jsonl cannot be read now") as error:
        train(make_config())
    assert error.value.exit_code == 74


def fail_to_read(monkeypatch: pytest.MonkeyPatch, unreadable: Path) -> None:
    """Let the disk be away whenever this file is read."""

    def read(path: Path, *given: Any) -> bytes:
        if path == unreadable:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read_bounded(path, *given)

    for module in (files, metrics_files):
        monkeypatch.setattr(module, "read_bounded", read)


@pytest.mark.parametrize(("is_begun", "code"), [(True, 74), (False, 2)])
def test_a_full_disk_at_a_start_requeues_a_run_that_has_begun(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, is_begun: bool, code: int
) -> None:
    config = make_config()
    if is_begun:
        train(make_config(training__num_steps=6))

    def fail(*given: object) -> None:
        with naming_written_file(Path("config.yaml")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_folder, "write_atomically", fail)
    with pytest.raises(UserError, match=r"config\.yaml cannot be written: No space") as error:
        train(config)
    assert error.value.exit_code == code


def test_a_start_with_other_code_than_the_last_one_says_so(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    config = make_config()
    for commit in ("1111", "1111", "2222"):
        monkeypatch.setattr(environment, "provenance", lambda _, name=commit: {"commit": name})
        train(config)
    shown = capsys.readouterr().err
    assert shown.count("the code is commit") == 1
    assert "the code is commit 2222; the last start of this run ran 1111" in shown


def test_a_disk_that_takes_no_count_of_hours_does_not_end_a_run(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(path: Path, content: object) -> None:
        raise UserError(f"{path} cannot be written: Stale file handle")

    monkeypatch.setattr(gpu_hours, "write_json", fail)
    assert train(make_config(training__num_steps=4)) is Outcome.FINISHED
    said = "gpu_hours.json cannot be written: Stale file handle; training goes on"
    assert capsys.readouterr().err.count(said) == 1


def test_a_finished_run_is_left_alone(
    make_config: MakeConfig, trained: Path, capsys: pytest.CaptureFixture
) -> None:
    metrics = trained / "metrics.jsonl"
    before = metrics.read_bytes()
    assert train(make_config()) is Outcome.FINISHED
    assert metrics.read_bytes() == before
    metrics.unlink()
    assert train(make_config()) is Outcome.FINISHED
    assert "held-out loss by position: lost" in capsys.readouterr().err
    written = (trained / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"was evaluated with evaluation\.num_seq"):
        train(make_config(evaluation__num_sequences=7))
    assert (trained / "config.yaml").read_bytes() == written


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("seed:", "colour: 3\nseed:", "colour"),
        *(("d_model: ", f"d_model: {value}", r"d_model") for value in (2, "x", "-")),
        *(("", text, r"config\.yaml") for text in ("", "- 1\n", "\x00", "\udce9", "a: [")),
    ],
)
def test_a_config_that_was_edited_by_hand_is_an_error_that_names_it(
    old: str, new: str, named: str, make_config: MakeConfig, trained: Path
) -> None:
    """Of the run folder, by another start and by who loads the run."""
    path = trained / "config.yaml"
    text = path.read_text().replace(old, new, 1) if old else new
    path.write_bytes(text.encode(errors="surrogateescape"))
    for call in (lambda: train(make_config()), lambda: load_model(trained, device="cpu")):
        with pytest.raises(UserError, match=named) as caught:
            call()
        assert str(caught.value).count("\n") <= 1


def test_lengths_grow_and_cannot_change(make_config: MakeConfig, tmp_path: Path) -> None:
    length = [{"tokens": 8, "until": 4}, {"tokens": 16}]
    config = make_config(training__length=length, training__num_steps=12)
    train(config)
    *_, last = rows(config)
    places = [(part["from"], part["to"]) for part in last["heldout"]]
    assert places == [(0, 16), (16, 32), (32, 64)]
    table = describe_losses(config.run_folder)
    assert table.splitlines()[-1].split()[-1] == f"{last['induction_drop']:.4f}"
    assert [row["learning_rate"] for row in rows(config) if "loss" in row] == [
        learning_rate(config.optimizer, step, 12) for step in range(1, 13)
    ]
    states = [TrainerState.read(path) for path in list_checkpoints(config.run_folder)]
    assert [(state.step, state.tokens) for state in states] == [(12, 12 * 64), (10, 10 * 64)]
    # A folder whose order of text is another one.
    config.training.lengths[0].until = 5
    with pytest.raises(ConfigError, match=r"training\.length\[0\]\.until=4 \(now 5\)"):
        train(config)
    last = str(list_checkpoints(config.run_folder)[0])
    branch = replace(config, run_folder=str(tmp_path / "branch"), branch_from=last)
    with pytest.raises(ConfigError, match=r"was trained with training\.length\[0\]\.until=4"):
        train(branch)


def test_micro_batches_of_shorter_sequences_hold_as_many_tokens(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, backward = [], Engine.backward

    def noting(self: Engine, part: Batch, *given: Any) -> torch.Tensor:
        shapes.append(tuple(part.tokens_BL.shape))
        return backward(self, part, *given)

    monkeypatch.setattr(Engine, "backward", noting)
    length = [{"tokens": 4, "until": 1}, {"tokens": 16}]
    train(make_config(training__length=length, training__micro_batch_size=2, training__num_steps=2))
    assert shapes == [(8, 4), (8, 4), (2, 16), (2, 16)]


def test_init_from_starts_with_those_weights(
    make_config: MakeConfig, trained: Path, tmp_path: Path
) -> None:
    first = make_config()
    second = make_config(
        run_folder=str(tmp_path / "second"),
        init_from=str(trained),
        positions__target_length=48,
        optimizer__learning_rate=1e-30,
        optimizer__weight_decay=0.0,
        training__num_steps=1,
    )
    train(second)
    expected, found = (
        load_model(config.run_folder, device="cpu").model.state_dict() for config in (first, second)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_learned_scales_of_queries_are_loaded_and_not_exported(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(model__query_scale_learned=True)
    train(config)
    scales = load_model(config.run_folder, device="cpu").model.blocks[0].query_scale
    first = first_query_scale(config.model.max_sequence_length)
    assert (scales - first).abs().min() > 1e-3, "each of them was trained"
    with pytest.raises(ConfigError, match=r"query_scale_learned=True .* pass the run itself"):
        export(Path(config.run_folder), tmp_path / "exported")


@pytest.mark.parametrize("engine", ["single", "fsdp"])
def test_learned_scales_of_queries_begin_at_their_first_value_in_a_trained_model(
    make_config: MakeConfig,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    engine: str,
) -> None:
    """`fsdp` makes a model without memory, and looks up each weight."""
    scaled = make_config(
        run_folder=str(tmp_path / "scaled"),
        init_from=str(trained),
        model__query_scale_learned=True,
        optimizer__learning_rate=1e-30,
        optimizer__weight_decay=0.0,
        training__num_steps=1,
        engine__name=engine,
    )
    train(scaled)
    assert "; adds learned scales of queries" in capsys.readouterr().err
    expected = load_model(trained, device="cpu").model.state_dict()
    found = load_model(scaled.run_folder, device="cpu").model.state_dict()
    first = torch.full((2,), first_query_scale(64))
    for layer in range(2):
        scale = found.pop(f"transformer.blocks.{layer}.query_scale")
        torch.testing.assert_close(scale, first, rtol=0, atol=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_learned_scales_of_queries_cannot_be_left_out(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    scaled = make_config(model__query_scale_learned=True, training__num_steps=1)
    train(scaled)
    plain = make_config(
        run_folder=str(tmp_path / "plain"),
        init_from=scaled.run_folder,
        model__query_scale_learned=False,
    )
    with pytest.raises(ConfigError, match=r"another one; pass --model\.query_scale_learned=true"):
        train(plain)


@pytest.mark.accept
@pytest.mark.parametrize(
    ("name", "more"), [("Olmo2ForCausalLM", {}), ("Olmo3ForCausalLM", {"sliding_window": 5})]
)
def test_olmo_2_and_3_go_on_with_pose_and_back_to_transformers(
    make_config: MakeConfig, tmp_path: Path, name: str, more: dict
) -> None:
    """A model of 1M parameters from a folder of transformers."""
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    shape |= {"vocab_size": 768, "tie_word_embeddings": False}
    theirs = tiny(name, **SIZES | shape | more)
    assert 8e5 < theirs.num_parameters() < 1.2e6
    theirs.save_pretrained(tmp_path / "theirs")
    implied = {k: v for k, v in config_of(str(tmp_path / "theirs")).items() if k != "rope_scaling"}
    implied |= {"vocab_size": 0, "embedding_size": 768}
    config = make_config(
        init_from=str(tmp_path / "theirs"), model=implied, checkpoint__export_at_end=True,
        positions__scheme="pose", training__num_steps=20,
    )  # fmt: skip
    assert train(config) is Outcome.FINISHED
    ours = load_model(config.run_folder, device="cpu").model
    (folder,) = Path(config.run_folder).glob("**/config.json")
    back = transformers.AutoModelForCausalLM.from_pretrained(folder.parent)
    tokens_BL = torch.arange(2 * 16).view(2, 16) * 7
    with torch.no_grad():
        found = ours(tokens_BL, torch.arange(16)[None])
        torch.testing.assert_close(back(tokens_BL).logits, found, atol=1e-5, rtol=1e-5)
        assert float((theirs(tokens_BL).logits - found).abs().max()) > 1e-3
    assert type(back).__name__ == name
    assert not more or ours.windows["sliding_attention"].size == 5


def test_a_profile_holds_the_steps_it_names(make_config: MakeConfig) -> None:
    config = make_config(training__num_steps=4)
    for steps in ("3:9", "0:2", "3:2", "x"):
        with pytest.raises(ConfigError, match=f"--profile={steps} must"):
            train(config, profile=steps)
    train(config, profile="2:3")
    trace = json.loads((Path(config.run_folder) / "trace_2_3.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("aten::_fused_adamw_") == 2


@pytest.mark.usefixtures("trained")
def test_another_config_in_the_same_folder_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate=0\.01 \(now 0\.5\)"):
        train(make_config(optimizer__learning_rate=0.5))
    train(make_config(optimizer__learning_rate=0.01, logging__interval_steps=1))


def test_a_start_that_was_refused_before_its_first_step_may_be_mended(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="does not exist"):
        train(make_config(init_from=str(tmp_path / "nowhere")))
    config = make_config(init_from=None, optimizer__learning_rate=0.02)
    train(config)
    saved = load_saved_config(Path(config.run_folder) / "config.yaml")
    assert (saved.init_from, saved.optimizer.learning_rate) == (None, 0.02)


def test_other_data_under_the_same_run_is_refused(
    make_config: MakeConfig, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = TrainerState.read(list_checkpoints(trained)[0])
    state.data_fingerprint = "another"
    monkeypatch.setattr(TrainerState, "read", staticmethod(lambda folder: state))
    with pytest.raises(DataError, match="other tokens"):
        train(make_config())


def test_a_loss_that_is_not_a_number_stops_the_run(make_config: MakeConfig) -> None:
    config = make_config(optimizer__learning_rate=1e30, training__num_steps=30)
    with pytest.raises(UserError, match=r"step \d+: loss .*optimizer\.learning_rate"):
        train(config)
    for folder in list_checkpoints(config.run_folder):
        for tensor in load_model(str(folder), device="cpu").model.state_dict().values():
            assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("sigmas", [None, 6.0])
def test_the_steps_before_a_number_that_is_not_finite_are_logged(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, sigmas: float | None
) -> None:
    children.give_no_numbers([4], monkeypatch.setattr)
    config = make_config(optimizer__skip_sigmas=sigmas, checkpoint__interval_steps=1000)
    with pytest.raises(UserError, match=r"step 5: loss nan.*--training\.on_nan=skip"):
        train(config)
    assert [row["step"] for row in rows(config)] == [1, 2, 3, 4]


SKIPS = {"training__on_nan": "skip", "logging__interval_steps": 1}


def losses_of(config: RunConfig) -> list[float]:
    return [row["loss"] for row in rows(config) if "loss" in row]


@pytest.fixture(params=[2, 1000], ids=["saved at step 4", "never saved"])
def skipping(
    request: pytest.FixtureRequest, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> RunConfig:
    """A finished run whose fifth batch, number 4, has given no numbers and was skipped."""
    children.give_no_numbers([4], monkeypatch.setattr)
    config = make_config(checkpoint__interval_steps=request.param, **SKIPS)
    assert train(config) is Outcome.FINISHED
    return config


def was_saved(config: RunConfig) -> bool:
    return config.checkpoint.interval_steps == 2


def test_a_skip_goes_back_to_the_last_checkpoint_or_to_the_start(skipping: RunConfig) -> None:
    starts = json.loads((Path(skipping.run_folder) / "environment.json").read_text())
    first_step = 4 if was_saved(skipping) else 0
    assert [start["resumed_at_step"] for start in starts] == [0, first_step]
    counts = [row["skipped_batches"] for row in rows(skipping) if "skipped_batches" in row]
    # The row of step 4 was written before the skip, if the run went back to that step.
    assert counts == [1.0] * (6 - first_step)


def test_a_run_that_skips_a_batch_reads_the_others_one_after_the_other(
    skipping: RunConfig, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a run whose text never had the batch."""
    leaving_out = make_config(run_folder=str(tmp_path / "left out"))
    of_step = TrainingBatches.of_step
    without_5 = [1, 2, 3, 4, 6, 7]
    monkeypatch.setattr(
        TrainingBatches, "of_step", lambda self, step: of_step(self, without_5[step - 1])
    )
    train(leaving_out)
    assert losses_of(leaving_out) == losses_of(skipping)


def test_only_the_steps_after_a_skipped_batch_change(
    skipping: RunConfig, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    undisturbed = make_config(run_folder=str(tmp_path / "undisturbed"))
    train(undisturbed)
    assert losses_of(skipping)[:4] == losses_of(undisturbed)[:4]
    assert losses_of(skipping)[4] != losses_of(undisturbed)[4]


@pytest.mark.accept
def test_a_resumed_run_skips_the_same_batch(skipping: RunConfig) -> None:
    if not was_saved(skipping):
        pytest.skip("there is no checkpoint to resume from")
    before = repeatable_rows(skipping.run_folder)
    shutil.rmtree(list_checkpoints(skipping.run_folder)[0])
    assert train(skipping) is Outcome.FINISHED
    assert repeatable_rows(skipping.run_folder) == before


def test_no_more_batches_are_left_out_than_allowed(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    children.give_no_numbers(range(4, 99), monkeypatch.setattr)
    config = make_config(training__max_skips=2, **SKIPS)
    with pytest.raises(UserError, match=r"step 5 is not finite, after training\.max_skips=2"):
        train(config)
    assert [row["step"] for row in rows(config)] == [1, 2, 3, 4]
    assert list_checkpoints(config.run_folder)[0].name == "step000004"


def test_a_number_that_is_not_finite_again_is_left_behind_with_an_older_checkpoint(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    children.give_no_numbers([8, 9], monkeypatch.setattr)
    config = make_config(training__num_steps=12, checkpoint__keep=4, **SKIPS)
    assert train(config) is Outcome.FINISHED
    starts = json.loads((Path(config.run_folder) / "environment.json").read_text())
    assert [start["resumed_at_step"] for start in starts] == [0, 8, 6]
    shown = capsys.readouterr().err
    assert "batch 8 is skipped (1 of at most 3); going on from the checkpoint of step 8\n" in shown
    assert (
        "batch 9 is skipped (2 of at most 3); going on from the checkpoint of step 6, as" in shown
    )
    folder = Path(config.run_folder) / "checkpoints"
    assert [path.name for path in folder.glob("*.set_aside")] == ["step000008.set_aside"]
    assert list_checkpoints(config.run_folder)[0].name == "step000012"


def test_a_later_number_that_is_not_finite_goes_back_to_the_last_checkpoint(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skipped_batches, "COMES_BACK_WITHIN", 2)
    children.give_no_numbers([4, 8], monkeypatch.setattr)
    config = make_config(training__num_steps=10, **SKIPS)
    assert train(config) is Outcome.FINISHED
    starts = json.loads((Path(config.run_folder) / "environment.json").read_text())
    assert [start["resumed_at_step"] for start in starts] == [0, 4, 6]
    assert not list(Path(config.run_folder).glob("checkpoints/*.set_aside"))


def test_without_an_older_checkpoint_the_last_one_stays(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    children.give_no_numbers([4, 5], monkeypatch.setattr)
    config = make_config(checkpoint__keep=1, **SKIPS)
    assert train(config) is Outcome.FINISHED
    starts = json.loads((Path(config.run_folder) / "environment.json").read_text())
    assert [start["resumed_at_step"] for start in starts] == [0, 4, 4]


def test_a_branch_of_a_run_that_skipped_a_batch_skips_the_one_of_its_own_step(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without batch 4, which the first run skipped, step 9 takes batch 9 and not batch 8."""
    children.give_no_numbers([4, 9], monkeypatch.setattr)
    first = make_config(training__num_steps=6, **SKIPS)
    assert train(first) is Outcome.FINISHED
    branch = make_config(
        run_folder=str(tmp_path / "branch"),
        branch_from=str(list_checkpoints(first.run_folder)[0]),
        training__num_steps=12,
        checkpoint__interval_steps=1000,
        **SKIPS,
    )
    assert train(branch) is Outcome.FINISHED
    assert skipped_batches.read_skipped_batches(Path(branch.run_folder)) == [9]


def test_a_branch_that_dies_before_it_saves_begins_again_at_its_origin(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has saved, and whose checkpoints are gone, does not."""
    trunk = make_config(training__num_steps=6)
    train(trunk)

    def branch(name: str) -> RunConfig:
        return make_config(
            run_folder=str(tmp_path / name),
            branch_from=str(list_checkpoints(trunk.run_folder)[0]),
            training__num_steps=12,
            checkpoint__interval_steps=2,
            logging__interval_steps=1,
        )

    undisturbed = branch("undisturbed")
    train(undisturbed)
    dying = branch("dying")
    with monkeypatch.context() as patch:
        children.give_no_numbers([7], patch.setattr)
        with pytest.raises(UserError, match="step 8: loss nan"):
            train(dying)
    assert not list_checkpoints(dying.run_folder)
    assert train(dying) is Outcome.FINISHED
    starts = json.loads((Path(dying.run_folder) / "environment.json").read_text())
    assert [start["resumed_at_step"] for start in starts] == [6, 6]
    assert losses_of(dying) == losses_of(undisturbed)

    shutil.rmtree(Path(dying.run_folder) / "checkpoints")
    with pytest.raises(DataError, match="has saved step 12, and no checkpoint is there now"):
        train(dying)


# --- how often the text is read -------------------------------------------------------------------


def test_a_text_that_is_read_more_than_four_times_is_refused_unless_it_is_allowed(
    make_config: MakeConfig, capsys: pytest.CaptureFixture
) -> None:
    epoch = build_steps_per_epoch(make_config())
    config = make_config(training__num_steps=4 * epoch + 1)
    for call in (train, dry_run):
        with pytest.raises(ConfigError, match=r"training\.max_epochs=4; .*max_epochs=5"):
            call(config)
    assert not Path(config.run_folder).exists()
    capsys.readouterr()
    dry_run(make_config(training__max_epochs=5))
    assert "tokens, read 4 times" in capsys.readouterr().out
    dry_run(make_config(training__num_steps=4 * epoch, training__max_epochs=4))


def build_steps_per_epoch(config: RunConfig) -> int:
    arrays = open_shards(config.data, "train").arrays
    return sum(len(array) // config.training.length for array in arrays) // 4


def test_a_run_says_how_often_it_has_read_its_text_and_one_that_has_begun_goes_on(
    make_config: MakeConfig, trained: Path, capsys: pytest.CaptureFixture
) -> None:
    epoch = build_steps_per_epoch(make_config())
    (trained / "metrics.jsonl").unlink()
    shutil.rmtree(trained / "checkpoints/step000006")
    config = make_config(training__max_epochs=0)
    train(config)
    assert re.search(r"tokens, read 0\.\d+ times in the whole run", capsys.readouterr().err)
    assert rows(config)[-2]["epochs"] == pytest.approx(6 / epoch)


def test_a_last_step_that_diverges_is_no_finished_run(make_config: MakeConfig) -> None:
    """Its own loss was still that of the weights before."""
    config = make_config(
        model__layer_norm_type="default",
        optimizer__learning_rate=1e30,
        optimizer__schedule="constant",
        optimizer__warmup_steps=0,
        training__num_steps=1,
    )
    with pytest.raises(UserError, match=r"step 1: held-out loss nan"):
        train(config)
    assert list_checkpoints(config.run_folder) == []


def test_weights_that_are_no_numbers_are_not_saved(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def spoil(self: Engine, *given: object) -> object:
        found = step(self, *given)
        next(self.model.parameters()).data[0] = torch.nan
        return found

    monkeypatch.setattr(Engine, "step", spoil)
    with pytest.raises(UserError, match=r"step 1: sum of the weights nan"):
        train(make_config(checkpoint__interval_steps=1))


def test_the_process_with_the_longest_forward_passes_is_the_slowest() -> None:
    gathered = [0.2, 0.2, 0.9, 0.3]
    processes = SimpleNamespace(world_size=4, gather=lambda seconds: gathered)
    engine: Any = SimpleNamespace(processes=processes, losses=SimpleNamespace(clock=ForwardClock()))
    assert slowest_process(engine) == {"slowest_process": 2.0, "slowest_to_median": 4.5}


def test_processes_ask_each_other_once_a_step(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a step and the next, whether to stop and whether the next batch can be read."""
    num_asked = [0]
    calls_of_step: dict[int, int] = {}
    sum_integers = Processes.sum_integers
    step = Engine.step

    def counted(processes: Processes, number: int) -> int:
        num_asked[0] += 1
        return sum_integers(processes, number)

    def noting(engine: Engine, *given: Any) -> Any:
        calls_of_step[len(calls_of_step) + 1] = num_asked[0]
        return step(engine, *given)

    monkeypatch.setattr(Processes, "sum_integers", counted)
    monkeypatch.setattr(Engine, "step", noting)
    train(make_config(training__num_steps=6, checkpoint__interval_steps=6))
    assert [calls_of_step[index + 1] - calls_of_step[index] for index in range(1, 5)] == [1] * 4
