"""The engines in real processes: the same curve on all of them, checkpoints that any of them reads,
one end and one message for all processes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from olmo_sparsity.base import retry
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.run import config_from_dict
from olmo_sparsity.data.batches import Batch, TrainingBatches
from olmo_sparsity.models.checkpoint_files import StoredWeights, list_checkpoints, step_of
from olmo_sparsity.models.huggingface.exchange import export
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.metrics.read import read_metrics
from olmo_sparsity.training.optimizer.jump_detector import JumpDetector
from tests.conftest import data_section, small_run
from tests.support import children

NUM_STEPS = 20
ENGINES = ["ddp", "fsdp", "zero1", "zero2", "zero3"]


@pytest.fixture(scope="module")
def settings(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Gradient accumulation, clipping, PoSE; ZeRO-3 cuts even the smallest weights."""
    folder = tmp_path_factory.mktemp("engines")
    smallest = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 5000}
    smallest["contiguous_gradients"] = False  # as shipped
    (folder / "zero3.json").write_text(json.dumps({"zero_optimization": smallest}))
    settings = small_run(folder / "run", data_section(data_folder))
    settings["training"] |= {"batch_size": 8, "micro_batch_size": 2, "max_grad_norm": 0.5}
    settings["training"]["num_steps"] = NUM_STEPS
    return settings | {
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 5, "decay_norm_and_bias": False},
        "evaluation": {"num_sequences": 5, "batch_size": 2},
        "checkpoint": {"interval_steps": 1000},
        "logging": {"interval_steps": 1},
    }


def on(settings: dict, name: str, engine: str, **sections: dict) -> dict:
    """The settings with another run folder, engine, and whatever else."""
    changed = json.loads(json.dumps(settings))
    folder = Path(settings["run_folder"]).parent
    changed["run_folder"] = str(folder / name)
    changed["engine"] = {"name": engine}
    if engine == "zero3":
        changed["engine"]["deepspeed_config"] = str(folder / "zero3.json")
    for section, values in sections.items():
        changed[section] = changed.get(section, {}) | values
    return changed


def curve(folder: str | Path, name: str = "loss") -> list[float]:
    return [row[name] for row in read_metrics(Path(folder) / "metrics.jsonl") if name in row]


def finish(settings: dict, world_size: int = 2) -> Path:
    job = children.start(settings, world_size)
    assert job.wait() == [0] * world_size, "\n".join(job.texts())
    return Path(settings["run_folder"])


@pytest.fixture(scope="module")
def one_process(settings: dict) -> Path:
    alone = on(settings, "single", "single")
    train(config_from_dict(alone))
    return Path(alone["run_folder"])


@pytest.fixture(scope="module")
def whole(settings: dict) -> Callable[[str], Path]:
    """The undisturbed run of an engine."""
    return cache(lambda engine: finish(on(settings, engine, engine)))


# --- the same curve -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_are_the_same_on_every_engine(
    whole: Callable[[str], Path], one_process: Path, engine: str
) -> None:
    folder = whole(engine)
    found = json.loads((folder / "environment.json").read_text())[-1]["engine"]
    assert (found["world_size"], found["backend"]) == (2, "gloo")
    if engine == "ddp":
        assert found["class"] == "DistributedDataParallel"
    elif engine == "fsdp":
        assert found["class"] == "torch.distributed.fsdp.fully_shard"
        assert found["mesh"] == [2]
    else:
        assert found["class"] == "deepspeed.runtime.engine.DeepSpeedEngine"
        assert found["zero_stage"] == int(engine[-1])
        suffix = "_Stage3" if engine == "zero3" else ""
        assert found["optimizer"] == f"DeepSpeedZeroOptimizer{suffix}"
    for name in ("loss", "gradient_norm", "learning_rate"):
        expected = curve(one_process, name)
        assert len(expected) == NUM_STEPS
        assert curve(folder, name) == pytest.approx(expected, rel=1e-4)
    assert curve(one_process)[-1] < curve(one_process)[0] - 0.3, "it learned something"
    for ours, theirs in zip(
        curve(folder, "heldout")[-1], curve(one_process, "heldout")[-1], strict=True
    ):
        assert ours["num_tokens"] == theirs["num_tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    saved = list_checkpoints(folder)[0]
    sizes = [path.stat().st_size for path in (saved / "engine").iterdir()]
    assert max(sizes) < 0.6 * sum(sizes), "each process writes its part"
    consolidated = StoredWeights(saved / "model.safetensors")
    for name, tensor in load_file(list_checkpoints(one_process)[0] / "model.safetensors").items():
        torch.testing.assert_close(consolidated[name], tensor, rtol=1e-3, atol=1e-4)


BF16 = {"num_steps": 14, "precision": "bf16"}


@pytest.fixture(scope="module")
def ddp_in_bf16(settings: dict) -> Path:
    return finish(on(settings, "bf16-ddp", "ddp", training=BF16))


@pytest.mark.accept
@pytest.mark.parametrize("engine", ["fsdp", "zero1", "zero2", "zero3"])
def test_bf16_follows_ddp(settings: dict, ddp_in_bf16: Path, engine: str) -> None:
    """DDP casts inside matmuls, the others compute in bf16 weights: near, not equal."""
    given = on(settings, f"bf16-{engine}", engine, training=BF16, checkpoint={"interval_steps": 8})
    ours = finish(given)
    assert curve(ours) == pytest.approx(curve(ddp_in_bf16), rel=3e-3)
    weights = dict(StoredWeights(list_checkpoints(ours)[0] / "model.safetensors"))
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    matrix = max(weights.values(), key=torch.Tensor.numel)
    assert not torch.equal(matrix, matrix.bfloat16().float()), "the fp32 copy, not the rounded one"

    shutil.rmtree(list_checkpoints(ours)[0])
    finish(given)  # from step 8
    again = StoredWeights(list_checkpoints(ours)[0] / "model.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)


# --- checkpoints ----------------------------------------------------------------------------------


def interrupt(settings: dict, num_steps: int, name: str, world_size: int = 2, rank: int = 0) -> int:
    """Signals one process in a step; all must save it together and leave. The step saved."""
    asked = {rank: partial(children.signal_at_step, num_steps, name)}
    job = children.start(settings, world_size, disturb=asked)
    assert job.wait() == [75] * world_size, "\n".join(job.texts())
    first, *others = job.texts()
    assert first.count(f"{name}: saved step") == 1
    assert not any(others)
    return step_of(list_checkpoints(settings["run_folder"])[0])


def test_all_processes_share_the_documents_of_losses_by_place(settings: dict) -> None:
    found = []
    for engine, world_size in (("single", 1), ("ddp", 2), ("zero3", 2)):
        given = on(settings, f"by-place-{engine}", engine)
        given["training"]["num_steps"] = 2
        given["evaluation"] |= {"documents": 9, "document_length": 64}
        finish(given, world_size)
        found += curve(given["run_folder"], "by_place")
    assert len(found) == 3
    for parts in found[1:]:
        for part, expected in zip(parts, found[0], strict=True):
            assert part == pytest.approx(expected, abs=1e-3)


def test_zero_3_begins_from_a_folder_of_transformers(settings: dict, one_process: Path) -> None:
    source = one_process.parent / "of-transformers"
    export(one_process, source)
    found = []
    for engine, world_size in (("single", 1), ("zero3", 2)):
        given = on(settings, f"begun-{engine}", engine, training={"num_steps": 1})
        finish(given | {"init_from": str(source)}, world_size)
        found += curve(given["run_folder"])
    assert found == pytest.approx([found[0]] * 2, rel=1e-4)
    assert found[0] < curve(one_process)[0] - 0.3, "not random weights"


def test_a_signal_to_one_process_stops_all_and_the_run_goes_on_exactly(
    settings: dict, whole: Callable[[str], Path]
) -> None:
    asked = on(settings, "asked", "zero2")
    assert interrupt(asked, 5, "SIGUSR2", rank=1) == 5
    last, expected = list_checkpoints(finish(asked))[0], list_checkpoints(whole("zero2"))[0]
    assert last.name == expected.name
    files = {path.relative_to(expected) for path in expected.rglob("*.safetensors")}
    assert len(files) == 4, "weights and optimizer state of each process"
    for file in files:
        found, wanted = load_file(last / file), load_file(expected / file)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), file
    assert curve(asked["run_folder"]) == curve(whole("zero2"))


ALL_ENGINES = [("zero2", 2), ("zero3", 2), ("single", 1), ("zero1", 4), ("ddp", 2)]
TO_AND_FROM_FSDP = [("fsdp", 2), ("zero3", 2), ("fsdp", 4), ("ddp", 2), ("fsdp", 1), ("zero1", 2)]


@pytest.mark.parametrize(
    ("relay", "last"),
    [
        pytest.param(ALL_ENGINES, ("zero2", 1), id="all"),
        pytest.param(TO_AND_FROM_FSDP, ("fsdp", 2), id="fsdp", marks=pytest.mark.accept),
    ],
)
def test_every_engine_goes_on_from_the_checkpoint_of_another(
    settings: dict, one_process: Path, relay: list[tuple[str, int]], last: tuple[str, int]
) -> None:
    name = f"relay-{last[0]}"
    for leg, (engine, world_size) in enumerate(relay, start=1):
        saved = interrupt(on(settings, name, engine), 3, "SIGTERM", world_size)
        assert saved == 3 * leg, "each takes three steps"
    engine, world_size = last
    folder = finish(on(settings, name, engine), world_size)
    assert curve(folder) == pytest.approx(curve(one_process), rel=1e-4)


@pytest.mark.accept
def test_learned_scales_of_queries_begin_and_go_on_in_shards(settings: dict) -> None:
    """Born and saved with ZeRO-3, resumed with fsdp; against a run of one process."""
    scaled = {"query_scale_learned": True}
    expected = finish(on(settings, "scaled-single", "single", model=scaled), world_size=1)
    assert interrupt(on(settings, "scaled", "zero3", model=scaled), 3, "SIGTERM") == 3
    folder = finish(on(settings, "scaled", "fsdp", model=scaled))
    assert curve(folder) == pytest.approx(curve(expected), rel=1e-4)
    name = "transformer.blocks.1.query_scale"
    ours, theirs = (
        StoredWeights(list_checkpoints(run)[0] / "model.safetensors")[name]
        for run in (folder, expected)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert ours.std() > 1e-4, "each head has learned its own"


@pytest.mark.accept
@pytest.mark.parametrize("engine", ENGINES)
def test_a_stage_changes_the_angles_of_every_engine(settings: dict, engine: str) -> None:
    scaled = {"scaling": "yarn", "factor": 4, "original_length": 16}
    positions = {"scheme": "pose", "target_length": 64, **scaled}
    stages = [{"tokens": 16, "until": 2}, {"tokens": 16, "positions": positions}]
    staged = {"length": stages, "num_steps": 5}
    large = {"init_std": 0.3}  # such that angles matter from the first step
    alone = on(settings, "stages-single", "single", training=staged, model=large)
    expected = curve(finish(alone, world_size=1))
    folder = finish(on(settings, f"stages-{engine}", engine, training=staged, model=large))
    assert curve(folder) == pytest.approx(expected, rel=2e-4)
    plain = {"length": [stages[0], {"tokens": 16}], "num_steps": 5}
    alone = on(settings, "stages-none", "single", training=plain, model=large)
    unchanged = curve(finish(alone, world_size=1))
    assert unchanged[:2] == expected[:2]
    assert unchanged[2] != pytest.approx(expected[2], rel=1e-3)


def test_a_killed_process_takes_the_others_along_and_the_run_recovers(
    settings: dict, one_process: Path
) -> None:
    often = on(settings, "killed", "ddp", checkpoint={"interval_steps": 4})
    job = children.start(often, disturb={1: partial(children.signal_at_step, 7, "SIGKILL")})
    assert job.wait() == [76, -signal.SIGKILL], "\n".join(job.texts())
    assert "another process of this run is gone" in job.texts()[0]
    assert curve(finish(often)) == pytest.approx(curve(one_process), rel=1e-4)


# --- skipped steps --------------------------------------------------------------------------------


def states_of(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Weights and moments of all processes in each checkpoint, the newest first."""
    return [
        {f"{file.name} {name}": t for file in files for name, t in load_file(file).items()}
        for files in (path.rglob("*.safetensors") for path in list_checkpoints(folder))
    ]


@pytest.mark.accept
def test_two_processes_with_muon_take_the_steps_of_one_and_go_on_to_the_bit(settings: dict) -> None:
    muon = {"name": "muon"}
    alone = finish(on(settings, "muon-single", "single", optimizer=muon), world_size=1)
    given = on(settings, "muon-ddp", "ddp", optimizer=muon, checkpoint={"interval_steps": 12})
    folder = finish(given)
    # An orthogonal update is of one size however small its gradient, so rounding of gradients
    # shows sooner than with AdamW.
    assert curve(folder) == pytest.approx(curve(alone), rel=1e-3)
    assert curve(folder)[-1] < curve(folder)[0] - 0.1, "it learned something"
    (end, *_) = states_of(folder)
    shutil.rmtree(list_checkpoints(folder)[0])
    finish(given)  # from step 12
    torch.testing.assert_close(states_of(folder)[0], end, rtol=0, atol=0)


@pytest.mark.accept
def test_processes_that_skip_steps_go_on_to_the_bit(settings: dict) -> None:
    steady = {"skip_sigmas": 1, "learning_rate": 1e-5, "warmup_steps": 0}
    curves = []
    for engine, world_size in (("single", 1), ("ddp", 2), ("zero2", 2)):
        given = on(settings, f"skips-{engine}", engine, checkpoint={"interval_steps": 44})
        given["training"]["num_steps"] = 56
        folder = finish(given | {"optimizer": steady}, world_size)
        (end, _), skipped = states_of(folder), curve(folder, "skipped_steps")
        assert 0 == skipped[31] < skipped[43] < skipped[-1]
        shutil.rmtree(list_checkpoints(folder)[0])
        finish(given | {"optimizer": steady}, world_size)  # from step 44
        torch.testing.assert_close(states_of(folder)[0], end, rtol=0, atol=0)
        curves += [skipped, curve(folder, "skipped_steps")]
    assert curves[1:] == curves[:1] * 5


def find_a_jump() -> None:
    """In a child: in its third step."""
    found = iter([False, False, True, False])
    JumpDetector.is_jump = lambda *_: next(found)  # type: ignore[method-assign, assignment]


@pytest.mark.accept
@pytest.mark.parametrize(
    ("engine", "precision"),
    [
        ("ddp", "fp32"),
        ("fsdp", "bf16"),
        ("zero1", "fp32"),
        ("zero1", "bf16"),
        ("zero2", "bf16"),
        ("zero3", "fp32"),
    ],
)
def test_a_step_that_one_process_skips_is_skipped_by_all(
    settings: dict, engine: str, precision: str
) -> None:
    given = on(settings, f"jumps-{engine}-{precision}", engine, optimizer={"skip_sigmas": 9})
    given["training"] |= {"num_steps": 4, "precision": precision}
    given["checkpoint"]["keep_steps"] = [2, 3]
    job = children.start(given, disturb={1: find_a_jump})
    assert job.wait() == [0, 0], "\n".join(job.texts())
    assert curve(given["run_folder"], "skipped_steps") == [0, 0, 1, 1]
    last, third, second = states_of(Path(given["run_folder"]))
    torch.testing.assert_close(third, second, rtol=0, atol=0)
    assert not any(torch.equal(tensor, third[name]) for name, tensor in last.items())


@pytest.mark.accept
@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
def test_a_batch_that_one_process_finds_no_numbers_in_is_left_out_by_all(
    settings: dict, engine: str
) -> None:
    curves = []
    for name, world_size in (("single", 1), (engine, 2)):
        given = on(settings, f"nan-{engine}-{name}", name, checkpoint={"interval_steps": 2})
        given["training"] |= {"num_steps": 6, "on_nan": "skip"}
        last = world_size - 1
        bad = {last: partial(children.give_no_numbers, (4,))}
        job = children.start(given, world_size, disturb=bad | ({0: note} if last else {}))
        assert job.wait() == [0] * world_size, "\n".join(job.texts())
        assert "batch 4 is skipped (1 of at most 3)" in job.texts()[0]
        curves.append(curve(given["run_folder"]))
        assert curve(given["run_folder"], "skipped_batches") == [1, 1]
    assert len(curves[0]) == 6
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def note() -> None:
    """In a child: numbers of batches are noted as in the process that finds no numbers."""
    children.give_no_numbers(())


# --- tasks of lm_eval -----------------------------------------------------------------------------

TASKS = {
    "choices": {"output_type": "multiple_choice", "doc_to_text": "{{text}}"}
    | {"doc_to_choice": "choices", "doc_to_target": "answer", "target_delimiter": ""},
    "words": {"output_type": "loglikelihood", "doc_to_text": "{{text}}"}
    | {"doc_to_target": "{{choices[1]}}", "metric_list": [{"metric": "perplexity"}]},
    "texts": {"output_type": "loglikelihood_rolling", "doc_to_text": ""}
    | {"doc_to_target": "{{text}}", "metric_list": [{"metric": "bits_per_byte"}]},
}


@pytest.mark.filterwarnings("ignore")
def test_tasks_in_training_are_those_of_the_exported_model(settings: dict, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="pip install 'olmo-sparsity[lm_eval]'")
    rows = [
        {"text": f"the {word} and the " * n, "choices": [word, "of"], "answer": n % 2}
        for n, word in enumerate(("king", "house", "tree", "sea", "war"), start=1)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "test_split": "test"}
    data["dataset_kwargs"] = {"data_files": {"test": str(tmp_path / "rows.jsonl")}}
    names = []
    for name, task in TASKS.items():
        names.append(str(tmp_path / f"{name}.yaml"))
        Path(names[-1]).write_text(json.dumps({"task": name} | data | task))
    given = on(settings, "tasks", "zero3", evaluation={"lm_eval": names, "interval_steps": 10})
    folder, job = Path(given["run_folder"]), children.start(given)
    assert job.wait(600) == [0, 0], "\n".join(job.texts())  # lm_eval reads all its tasks
    first, last = curve(folder, "lm_eval")
    export(folder, tmp_path / "exported")
    model = f"pretrained={tmp_path / 'exported'},dtype=float32"
    found = lm_eval.simple_evaluate("hf", model, names, device="cpu", bootstrap_iters=0)
    for name in ("choices/acc", "words/perplexity", "texts/bits_per_byte"):
        task, metric = name.split("/")
        assert last[name] == pytest.approx(found["results"][task][f"{metric},none"], rel=1e-5)
    assert first["texts/bits_per_byte"] > last["texts/bits_per_byte"]


def fill_the_disk() -> None:
    """In a child: a write past the limit fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )
    retry.RETRY_AFTER_S = (0.0,)


@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_a_full_disk_stops_all_and_is_said_once(settings: dict, engine: str) -> None:
    given = on(settings, f"full-{engine}", engine, checkpoint={"interval_steps": 4})
    job = children.start(given, disturb=dict.fromkeys(range(2), fill_the_disk))
    assert job.wait() == [2, 2], "\n".join(job.texts())
    assert [text.count("saves in a row have failed") for text in job.texts()] == [1, 0]
    assert [text.count("NOT SAVED: ") for text in job.texts()] == [2, 0]
    assert "Traceback" not in job.texts()[0]
    assert len(curve(given["run_folder"])) <= 16, "at the save after the third at the latest"
    assert not any((Path(given["run_folder"]) / "checkpoints").iterdir())


def damage_the_text() -> None:
    """In a child: the batch of step 7 cannot be read."""
    of_step = TrainingBatches.of_step

    def read(self: TrainingBatches, step: int) -> Batch:
        if step == 7:
            raise DataError("train-00000.bin changed after this run started")
        return of_step(self, step)

    TrainingBatches.of_step = read  # type: ignore[method-assign]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_text_that_one_process_cannot_read_ends_all_at_once(settings: dict, rank: int) -> None:
    """The others do not leave with 76, as if its node had failed: the job would start again."""
    given = on(settings, f"damaged-{rank}", "ddp")
    job = children.start(given, disturb={rank: damage_the_text})
    assert job.wait() == [2, 2], "\n".join(job.texts())
    assert "changed after this run started" in job.texts()[rank]
    assert "gone" not in job.texts()[1 - rank]
    assert len(curve(given["run_folder"])) <= 6


def test_the_gpu_hours_of_both_processes_count_and_end_the_run_on_both(settings: dict) -> None:
    limited = on(settings, "limited", "ddp", training={"max_gpu_hours": 1e-6})
    for num_start in range(2):
        job = children.start(limited)
        assert job.wait() == [2, 2], "\n".join(job.texts())
        said = [text.count("training.max_gpu_hours=1e-06 is reached") for text in job.texts()]
        assert said == [1, 0]
        assert len(curve(limited["run_folder"])) == 1, f"the first step alone, start {num_start}"
    limited["training"]["max_gpu_hours"] = None
    finish(limited)


@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_the_metrics_name_the_slowest_process(
    whole: Callable[[str], Path], one_process: Path, engine: str
) -> None:
    rows = [row for row in read_metrics(whole(engine) / "metrics.jsonl") if "loss" in row]
    assert {row["slowest_process"] for row in rows} <= {0.0, 1.0}
    assert all(row["slowest_to_median"] >= 1 for row in rows)
    alone = read_metrics(one_process / "metrics.jsonl")
    assert all("slowest_process" not in row for row in alone)


def be_slow() -> None:
    """Disturbs: each layer of this process takes longer."""
    from olmo_sparsity.models.olmo.block import PositionedBlock

    forward = PositionedBlock.forward

    def slow(self: PositionedBlock, *given: Any, **named: Any) -> Any:
        time.sleep(0.05)
        return forward(self, *given, **named)

    PositionedBlock.forward = slow  # type: ignore[method-assign] # as on a hot GPU


@pytest.mark.accept
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_slow_process_is_the_slowest_although_the_others_wait_for_its_weights(
    settings: dict, engine: str
) -> None:
    training = {"num_steps": 4}
    given = on(settings, f"slow-{engine}", engine, training=training, logging={"interval_steps": 2})
    job = children.start(given, disturb={1: be_slow})
    assert job.wait() == [0, 0], "\n".join(job.texts())
    rows = list(read_metrics(Path(given["run_folder"]) / "metrics.jsonl"))
    logged = [row for row in rows if "slowest_process" in row]
    assert [row["slowest_process"] for row in logged] == [1.0, 1.0]
    assert all(row["slowest_to_median"] > 2 for row in logged)


# --- launchers ------------------------------------------------------------------------------------

MEET = """
import os
from olmo_sparsity.training.processes.process_group import connect
with connect() as processes:
    met = processes.gather((processes.rank, processes.local_rank, processes.local_world_size))
    assert met == [(0, 0, 2), (1, 1, 2)], met
os._exit(0)  # as cli.entry does: gloo's threads do not survive Python's shutdown
"""


@pytest.mark.accept
def test_the_processes_of_torchrun_meet(tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    options = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
    options += [f"--master_port={children.free_port()}"]
    done = subprocess.run(
        [sys.executable, *options, str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.accept
def test_accelerate_starts_the_processes_of_a_run(
    settings: dict, one_process: Path, tmp_path: Path
) -> None:
    changed = on(settings, "accelerate", "ddp")
    changed["training"]["device"] = "cpu"
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(changed))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    command += ["--dynamo_backend=no", f"--main_process_port={children.free_port()}"]
    script = Path(__file__).parents[2] / "scripts/train.py"
    done = subprocess.run(
        [*command, str(script), str(config)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path(changed["run_folder"])
    started = json.loads((folder / "environment.json").read_text())[-1]["engine"]
    assert started["world_size"] == 2
    assert curve(folder) == pytest.approx(curve(one_process), rel=1e-4)


# --- one message ----------------------------------------------------------------------------------


def test_a_mistake_of_one_process_is_said_by_that_one(settings: dict) -> None:
    job = children.start(on(settings, "wrong", "ddp"), arguments=[[], ["--training.device=cuda:7"]])
    assert job.wait() == [2, 2]
    first, second = job.texts()
    assert first == ""
    assert second.startswith("olmo-sparsity: process 1 of 2 on ")
    assert "training.device=cuda:7 cannot be used" in second
