"""Engines without other processes: what is refused before the first step, who stands where, what a
run that dies again and again is told, optimizer state in pieces."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from olmo_sparsity.config import RunConfig
from olmo_sparsity.errors import ConfigError, DataError, ReportedElsewhere, UserError
from olmo_sparsity.training import distributed, preflight
from olmo_sparsity.training.choose_engine import check_engine
from olmo_sparsity.training.deepspeed_engine import CONFIG_FOLDER, deepspeed_settings
from olmo_sparsity.training.distributed import Processes, first_node
from olmo_sparsity.training.engine import own_gpu
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.moments import KEYS, MomentSlice, SavedMoments, copy_moments
from olmo_sparsity.training.preflight import (
    attempt,
    check_devices,
    check_readable,
    check_room,
    check_shared,
)

MakeConfig = Callable[..., RunConfig]
TWO = Processes(rank=0, world_size=2, local_world_size=2)
ALONE = Processes()


# --- what an engine refuses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "processes", "message"),
    [
        ({"engine__name": "single"}, TWO, "engine.name=single, but 2 processes"),
        ({"engine__name": "ddp"}, ALONE, "engine.name=ddp, but this is one process"),
        ({"training__batch_size": 5}, TWO, r"training\.batch_size=5 cannot be shared .* by 2"),
        (
            {"training__batch_size": 12, "training__micro_batch_size": 4},
            TWO,
            r"leaves 6 sequences .* training\.micro_batch_size=4; set that to 6",
        ),
        (
            {"engine__name": "zero2", "engine__deepspeed_config": "/nowhere/zero.json"},
            TWO,
            r"/nowhere/zero\.json: No such file or directory; engine\.deepspeed_config names",
        ),
    ],
)
def test_what_processes_cannot_share_is_refused(
    make_config: MakeConfig, changes: dict, processes: Processes, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_engine(make_config(**changes), processes)


def test_ddp_of_one_process_is_for_those_who_launched_it(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_engine(make_config(engine__name="ddp"), ALONE)


def test_deterministic_training_turns_on_deterministic_kernels(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # to be put back as it was
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    try:
        train(make_config(training__deterministic=True, training__num_steps=2))
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    train(make_config(training__deterministic=False, training__num_steps=2))  # it may go on without


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_batch_size": 64}, "train_batch_size=64 contradicts .* makes it 4"),
        ({"gradient_clipping": 0.3}, r"gradient_clipping=0\.3 contradicts .* makes it 1\.0"),
        ({"bf16": {"enabled": True}}, r"bf16\.enabled=True .* training\.precision makes it False"),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled=True contradicts"),
        ({"zero_optimization": {"stage": 3}}, r"stage=3 .* engine\.name makes it 2"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            r"optimizer\.params\.lr=0\.001 .* optimizer\.learning_rate makes it 0\.01",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, r"scheduler\.type=WarmupLR is no engine setting"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            r"offload_optimizer\.device=cpu is no engine setting",
        ),
    ],
)
def test_a_deepspeed_file_that_contradicts_the_run_is_refused(
    make_config: MakeConfig, tmp_path: Path, given: dict, message: str
) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(given))
    config = make_config(engine__name="zero2", engine__deepspeed_config=str(path))
    with pytest.raises(ConfigError, match=message):
        deepspeed_settings(config, TWO)


def test_a_deepspeed_file_that_agrees_is_passed_on(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"reduce_bucket_size": 1000},
    }
    path.write_text(json.dumps(given))
    config = make_config(
        engine__name="zero2", engine__deepspeed_config=str(path), training__micro_batch_size=1
    )
    assert deepspeed_settings(config, TWO) == {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    }


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_the_shipped_files_say_nothing_but_engine_settings(
    make_config: MakeConfig, name: str
) -> None:
    given = json.loads((CONFIG_FOLDER / f"{name}.json").read_text())
    assert set(given) == {"zero_optimization"}
    settings = deepspeed_settings(make_config(engine__name=name), TWO)
    assert settings["zero_optimization"] == given["zero_optimization"]


# --- who stands where -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[07-09,12],cpu1", "gpu07"), ("a-[3,5]", "a-3")],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.usefixtures("no_launcher")
def test_where_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
        distributed._meeting_point()
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[3-4]")
    monkeypatch.setenv("SLURM_JOB_ID", "123456")
    assert distributed._meeting_point() == ("n3", "23456")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert distributed._meeting_point() == ("10.0.0.1", "29500")


def test_every_process_takes_its_own_gpu() -> None:
    assert own_gpu(1, Processes(3, 4, 3, 4)) == 0, "the launcher shows it only its own"
    assert own_gpu(4, Processes(7, 8, 3, 4)) == 3
    with pytest.raises(ConfigError, match="runs 4 processes, but PyTorch sees 2 GPUs"):
        own_gpu(2, Processes(3, 4, 3, 4))


# --- before the first step ------------------------------------------------------------------------


def test_no_gpu_where_slurm_gave_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    check_devices("cpu", torch.device("cpu"), ALONE)
    with pytest.raises(ConfigError, match=r"gave this machine 4 GPUs .* PyTorch sees none"):
        check_devices("auto", torch.device("cpu"), ALONE)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    check_devices("auto", torch.device("cpu"), ALONE)


def test_a_disk_without_room_for_the_checkpoints_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(num_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))

    config = make_config()
    needed = 3 * 10**6 * 12  # two that are kept, one being written
    free(needed)
    check_room(Path("/"), config, 10**6, step=0)
    free(needed - 1)
    with pytest.raises(UserError, match=r"0\.03 GiB free, .* need 0\.03 .*keep=2"):
        check_room(Path("/"), config, 10**6, step=0)
    config = make_config(checkpoint__keep_steps=[1, 3])
    free(needed)
    with pytest.raises(UserError, match=r"need 0\.06 .*keep=2, 2 to stay forever"):
        check_room(Path("/"), config, 10**6, step=0)
    free(10**6)
    with pytest.raises(UserError, match="run_folder="):
        train(config)
    assert not (Path(config.run_folder) / "metrics.jsonl").exists()


def test_checkpoints_are_as_large_as_the_check_assumes(trained: Path) -> None:
    (*_, last) = (trained / "checkpoints").iterdir()
    written = sum(path.stat().st_size for path in last.rglob("*.safetensors"))
    parameters = 37_024
    assert 0 <= written - parameters * preflight.BYTES_PER_PARAMETER < 10_000, "headers"


def test_shards_whose_bytes_do_not_come_are_named(tmp_path: Path) -> None:
    shards: Any = SimpleNamespace(paths=[tmp_path / "train-00000.tokens.uint16"])
    with pytest.raises(DataError, match=r"train-00000\.tokens\.uint16 cannot be read: No such"):
        check_readable(shards)


def test_an_unusable_run_folder_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run_folder=.*file/run cannot be written"):
        train(make_config(run_folder=str(tmp_path / "file" / "run")))


def test_a_disk_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    class SecondOfTwo(Processes):
        def gather(self, value: Any) -> list[Any]:
            return ["token", value] if isinstance(value, str) else [None, value]

        def agree(self) -> Any:
            return contextlib.nullcontext()

    second = SecondOfTwo(rank=1, world_size=2)
    with pytest.raises(UserError, match="what process 0 writes there cannot be seen"):
        check_shared(tmp_path, second, patience_s=0.2)
    (tmp_path / ".seen-by-all-token").touch()
    check_shared(tmp_path, second, patience_s=0.2)


# --- one mistake, one message ---------------------------------------------------------------------


def agreeing(rank: int, texts: list[str | None]) -> Processes:
    class Scripted(Processes):
        def gather(self, value: Any) -> list[Any]:
            assert value == texts[rank]
            return texts

    return Scripted(rank=rank, world_size=len(texts))


@pytest.mark.parametrize(
    ("texts", "speaker"), [(["bad", "bad"], 0), (["bad", None], 0), ([None, "bad"], 1)]
)
def test_one_process_speaks_for_all(texts: list[str | None], speaker: int) -> None:
    def attempted(rank: int) -> None:
        with agreeing(rank, texts).agree():
            if texts[rank] is not None:
                raise DataError(texts[rank])

    for rank in range(2):
        with pytest.raises(UserError) as caught:
            attempted(rank)
        if rank == speaker:
            assert str(caught.value).endswith("bad")
            assert isinstance(caught.value, DataError)
            alone = texts.count("bad") == 1
            assert str(caught.value).startswith(f"process {rank} of 2" if alone else "bad")
        else:
            assert isinstance(caught.value, ReportedElsewhere)


# --- a run that dies again and again --------------------------------------------------------------


def die(folder: Path, start: int, reached: int) -> None:
    """A start that logs up to a step and is never heard of again."""
    dying = attempt(folder, start, ALONE)
    dying.__enter__()
    rows = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, reached + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(rows))


def test_dying_twice_at_the_same_step_is_enough(tmp_path: Path) -> None:
    die(tmp_path, 0, 7)
    die(tmp_path, 0, 7)
    for _ in range(2):  # it stays refused
        with pytest.raises(UserError, match=r"from step 0 and died 2 times after step 7"):
            die(tmp_path, 0, 7)
    (tmp_path / "attempts.json").unlink()  # as the message says
    die(tmp_path, 0, 7)


def test_dying_in_different_places_is_given_more_patience(tmp_path: Path) -> None:
    for reached in (7, 9, 8, 12, 11):
        die(tmp_path, 0, reached)
    with pytest.raises(UserError, match=r"after \[7, 9, 8, 12, 11\]"):
        die(tmp_path, 0, 3)


def test_progress_and_an_orderly_end_are_no_deaths(tmp_path: Path) -> None:
    for start in range(0, 12, 2):  # preempted without notice, but a checkpoint further each time
        die(tmp_path, start, start + 3)
    for _ in range(4):
        with attempt(tmp_path, 12, ALONE):
            pass  # stopped by a signal after saving, or finished
        with pytest.raises(UserError, match="full"), attempt(tmp_path, 12, ALONE):
            raise UserError("disk full")
    assert not (tmp_path / "attempts.json").exists()


def test_a_poisoned_run_is_refused_by_training(make_config: MakeConfig, trained: Path) -> None:
    shutil.rmtree(trained / "checkpoints")
    (trained / "attempts.json").write_text(json.dumps({"start": 0, "deaths": [6]}))
    with pytest.raises(UserError, match=r"died 2 times after step 6, without a new checkpoint"):
        train(make_config())
    (trained / "attempts.json").unlink()
    train(make_config())


# --- optimizer state in pieces --------------------------------------------------------------------


def cut(state: dict[str, dict[str, torch.Tensor]], world_size: int) -> Iterator[list[MomentSlice]]:
    """As an engine of so many processes might hold it: equal stretches of every parameter."""
    for rank in range(world_size):
        pieces = []
        for name, moments in state.items():
            size = -(-len(moments[KEYS[0]]) // world_size)
            own = {key: value[rank * size : (rank + 1) * size] for key, value in moments.items()}
            if len(own[KEYS[0]]):
                pieces.append(MomentSlice(name, rank * size, own))
        yield pieces


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_moments_travel_between_any_numbers_of_processes(
    tmp_path: Path, before: int, after: int
) -> None:
    sizes = {"embedding": 37, "norm": 2, "matrix": 64}
    state = {name: {key: torch.randn(n) for key in KEYS} for name, n in sizes.items()}
    for rank, pieces in enumerate(cut(state, before)):
        copy_moments(pieces, rank, before)(tmp_path)
    empty = {name: {key: torch.zeros(n) for key in KEYS} for name, n in sizes.items()}
    for rank, pieces in enumerate(cut(empty, after)):
        saved = SavedMoments(tmp_path, rank)
        for piece in pieces:
            saved.fill(piece)
        assert before != after or len(saved.open_files) <= 1, "each process needs its own file only"
    for name in sizes:
        for key in KEYS:
            assert torch.equal(empty[name][key], state[name][key])


def test_missing_optimizer_state_is_named(tmp_path: Path) -> None:
    state = {"matrix": {key: torch.randn(8) for key in KEYS}}
    for rank, pieces in enumerate(cut(state, 2)):
        copy_moments(pieces, rank, 2)(tmp_path)
    with pytest.raises(DataError, match="lacks moments of other"):
        SavedMoments(tmp_path, 0).fill(MomentSlice("other", 0, state["matrix"]))
    (tmp_path / "moments-00001-of-00002.safetensors").write_bytes(b"no tensors")
    with pytest.raises(DataError, match=r"moments-00001.* is no optimizer state"):
        SavedMoments(tmp_path, 1).fill(MomentSlice("matrix", 0, state["matrix"]))
    (tmp_path / "moments-00001-of-00002.safetensors").unlink()
    with pytest.raises(DataError, match=r"holds 1 files of optimizer state .* 2 were written"):
        SavedMoments(tmp_path, 0)
