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
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from olmo_sparsity.cli import main
from olmo_sparsity.config_file import config_from_dict
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.model.checkpoint_files import list_checkpoints
from olmo_sparsity.model.load import build_model
from olmo_sparsity.training.choose_engine import build_engine
from olmo_sparsity.training.distributed import Processes, connect
from olmo_sparsity.training.engine import DDPEngine
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.moments import KEYS
from olmo_sparsity.training.run_folder import read_metrics
from olmo_sparsity.training.scaling import collective_bytes, state_bytes
from tests import children
from tests.conftest import data_section

ROOT = Path(__file__).parents[2]
NUM_STEPS = 50
FEW_STEPS = 40
"""Where the subject is a checkpoint, not the curve; enough to be interrupted long before."""

ENGINES = ["ddp", "zero1", "zero2", "zero3"]


@pytest.fixture(scope="module")
def settings(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Gradient accumulation, clipping, PoSE; ZeRO-3 cuts even the smallest weights."""
    folder = tmp_path_factory.mktemp("engines")
    smallest = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 5000}
    (folder / "zero3.json").write_text(json.dumps({"zero_optimization": smallest}))
    return {
        "run_folder": str(folder / "run"),
        "seed": 3,
        "data": data_section(data_folder),
        "positions": {"scheme": "pose", "target_length": 32},
        "model": {
            "d_model": 32,
            "n_heads": 2,
            "n_layers": 2,
            "max_sequence_length": 64,
            "layer_norm_type": "rms",
            "weight_tying": True,
        },
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 5, "decay_norm_and_bias": False},
        "training": {
            "length": 16,
            "batch_size": 8,
            "micro_batch_size": 2,
            "num_steps": NUM_STEPS,
            "precision": "fp32",
            "max_grad_norm": 0.5,
        },
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
def few_steps(settings: dict) -> dict:
    return on(settings, "few", "auto", training={"num_steps": FEW_STEPS, "micro_batch_size": None})


@pytest.fixture(scope="module")
def undisturbed(few_steps: dict) -> Path:
    return finish(on(few_steps, "undisturbed", "zero2"))


# --- the same curve -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_fifty_steps_are_the_same_on_every_engine(
    settings: dict, one_process: Path, engine: str
) -> None:
    folder = finish(on(settings, engine, engine))
    found = json.loads((folder / "environment.json").read_text())[-1]["engine"]
    assert (found["world_size"], found["backend"]) == (2, "gloo")
    if engine == "ddp":
        assert found["class"] == "DistributedDataParallel"
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
    if engine != "ddp":
        assert max(sizes) < 0.6 * sum(sizes), "nobody gathers the optimizer's state"
    consolidated = load_file(saved / "model.safetensors")
    for name, tensor in load_file(list_checkpoints(one_process)[0] / "model.safetensors").items():
        torch.testing.assert_close(consolidated[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_bf16_follows_ddp(settings: dict, engine: str) -> None:
    """DDP casts inside matmuls, DeepSpeed keeps bf16 weights and an fp32 copy: near, not equal."""
    short = {"num_steps": 14, "precision": "bf16"}
    given = on(settings, f"bf16-{engine}", engine, training=short, checkpoint={"interval_steps": 8})
    ours = finish(given)
    folder = Path(on(settings, "bf16-ddp", "ddp")["run_folder"])
    if not folder.exists():
        finish(on(settings, "bf16-ddp", "ddp", training=short))
    assert curve(ours) == pytest.approx(curve(folder), rel=3e-3)
    weights = load_file(list_checkpoints(ours)[0] / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    matrix = max(weights.values(), key=torch.Tensor.numel)
    assert not torch.equal(matrix, matrix.bfloat16().float()), "the fp32 copy, not the rounded one"

    shutil.rmtree(list_checkpoints(ours)[0])
    finish(given)  # from step 8
    again = load_file(list_checkpoints(ours)[0] / "model.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)


# --- checkpoints ----------------------------------------------------------------------------------


def interrupt_one(settings: dict, rank: int, name: str) -> int:
    """Signals one process after a few steps; all must save together and leave. The step saved."""
    job = children.start(settings)
    metrics = Path(settings["run_folder"]) / "metrics.jsonl"
    while job.processes[0].is_alive() and len(curve(metrics.parent)) < 5:
        time.sleep(0.005)
    os.kill(job.processes[rank].pid, getattr(signal, name))
    assert job.wait() == [75, 75], "\n".join(job.texts())
    assert job.texts()[0].count(f"{name}: saved step") == 1
    assert job.texts()[1] == ""
    (saved,) = list_checkpoints(settings["run_folder"])
    return int(saved.name.removeprefix("step"))


def test_a_signal_to_one_process_stops_all_and_the_run_goes_on_exactly(
    few_steps: dict, undisturbed: Path
) -> None:
    asked = on(few_steps, "asked", "zero2")
    step = interrupt_one(asked, rank=1, name="SIGUSR2")
    assert 5 <= step < FEW_STEPS
    folder = Path(asked["run_folder"])
    copies = {}
    others = (("single", 1), ("ddp", 2), ("zero3", 2), ("zero1", 4), ("zero2", 1))
    for engine, world_size in others:
        copies[engine] = on(few_steps, f"asked-{engine}", engine), world_size
        shutil.copytree(folder, copies[engine][0]["run_folder"])

    finish(asked)
    last, expected = list_checkpoints(folder)[0], list_checkpoints(undisturbed)[0]
    assert last.name == expected.name
    files = {path.relative_to(expected) for path in expected.rglob("*.safetensors")}
    assert len(files) == 3, "the weights, and what each process holds of the optimizer state"
    for file in files:
        found, wanted = load_file(last / file), load_file(expected / file)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), file
    assert curve(folder) == curve(undisturbed)

    for engine, (other, world_size) in copies.items():
        finish(other, world_size)
        found = curve(other["run_folder"])
        assert found[:step] == curve(undisturbed)[:step]
        assert found == pytest.approx(curve(undisturbed), rel=1e-4), engine


@pytest.mark.parametrize("engine", ["single", "zero3"])
def test_zero_goes_on_from_other_engines(few_steps: dict, undisturbed: Path, engine: str) -> None:
    """The way back: optimizer state of one process, and of ZeRO-3, under ZeRO-2."""
    often = on(few_steps, f"from-{engine}", engine, checkpoint={"interval_steps": 15, "keep": 5})
    finish(often, 1 if engine == "single" else 2)
    folder = Path(often["run_folder"])
    for path in list_checkpoints(folder)[:2]:
        shutil.rmtree(path)
    (kept,) = list_checkpoints(folder)
    assert kept.name == "step000015"
    finish(on(few_steps, f"from-{engine}", "zero2"))
    assert curve(folder) == pytest.approx(curve(undisturbed), rel=1e-4)


def test_a_killed_process_takes_the_others_along_and_the_run_recovers(
    few_steps: dict, undisturbed: Path
) -> None:
    often = on(few_steps, "killed", "ddp", checkpoint={"interval_steps": 4})
    job = children.start(often)
    folder = Path(often["run_folder"])
    while job.processes[0].is_alive() and len(curve(folder)) < 6:
        time.sleep(0.005)
    os.kill(job.processes[1].pid, signal.SIGKILL)
    assert job.wait() == [76, -signal.SIGKILL], "\n".join(job.texts())
    assert "another process of this run is gone" in job.texts()[0]
    finish(often)
    assert curve(folder) == pytest.approx(curve(undisturbed), rel=1e-4)


def train_on_a_full_disk(config: str) -> int:
    """In a child: a write past the limit fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )
    return main(["train", config])


@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_a_full_disk_stops_all_and_is_said_once(few_steps: dict, engine: str) -> None:
    given = on(few_steps, f"full-{engine}", engine, checkpoint={"interval_steps": 4})
    config = Path(given["run_folder"] + ".yaml")
    config.write_text(json.dumps(given))
    job = children.start_each(given, train_on_a_full_disk, [str(config)] * 2)
    assert job.wait() == [2, 2], "\n".join(job.texts())
    assert [text.count("could not write checkpoint") for text in job.texts()] == [1, 0]
    assert "Traceback" not in job.texts()[0]
    assert len(curve(given["run_folder"])) <= 8, "at the next save at the latest"
    assert not any((Path(given["run_folder"]) / "checkpoints").iterdir())


# --- what they hold and send ----------------------------------------------------------------------


def measure(given: dict) -> int:
    """In a child: two steps, then what this process holds and the second step called for."""
    with connect() as processes:
        found = measured(given, processes)  # a function of its own: the engine must not outlive it
        Path(f"{given['run_folder']}-{processes.rank}.json").write_text(json.dumps(found))
    return 0


def measured(given: dict, processes: Processes) -> dict[str, Any]:
    config = config_from_dict(given)
    config.model.vocab_size = 512
    found: dict[str, Any] = {}
    engine = build_engine(build_model(config.model), config, processes)
    parameters = list(engine.model.parameters())
    found["parameters"] = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    tokens_BL = torch.randint(0, 512, (4, 16))
    batch = Batch(tokens_BL, torch.arange(16).expand(4, 16), tokens_BL)
    engine.step(batch, 1e-3)
    if isinstance(engine, DDPEngine):
        data = engine.parallel._get_ddp_logging_data()
        found["all_reduce"] = sum(map(int, data["bucket_sizes"].split(", ")))
        states = list(engine.optimizer.state.values())
        found["optimizer"] = sum(size_of(state[key]) for state in states for key in KEYS)
        found["weights"] = sum(map(size_of, parameters))
    else:
        from deepspeed.comm.comm import comms_logger

        comms_logger.comms_dict.clear()
        engine.step(batch, 1e-3)
        for name, sizes in comms_logger.comms_dict.items():
            # DeepSpeed logs the part a process brings to an all-gather.
            times = processes.world_size if "all_gather" in name else 1
            name = name.replace("_into_tensor", "").replace("_tensor", "")
            found[name] = times * sum(size * calls[0] for size, calls in sizes.items())
        zero = engine.zero
        flat = "fp32_partitioned_groups_flat" if engine.stage == 3 else None
        masters = getattr(zero, flat or "single_partition_of_fp32_groups")
        held = [*masters, *(engine.optimizer.state[m][key] for m in masters for key in KEYS)]
        found["optimizer"] = sum(map(size_of, held))
        weights = [p.ds_tensor if engine.stage == 3 else p for p in parameters]
        found["weights"] = sum(map(size_of, weights))
    return found


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@pytest.mark.parametrize(
    ("engine", "precision"), [("ddp", "fp32"), ("zero1", "fp32"), ("zero2", "bf16"),
                              ("zero3", "fp32"), ("zero3", "bf16")],
)  # fmt: skip
def test_formulas_are_what_is_held_and_sent(
    settings: dict, tmp_path: Path, engine: str, precision: str
) -> None:
    given = on(settings, f"measured-{engine}-{precision}", engine)
    given["training"] |= {"batch_size": 8, "micro_batch_size": 2, "precision": precision}
    if engine != "ddp":
        never_keep = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
        smallest = {"stage3_param_persistence_threshold": 0} | never_keep
        zero = {"stage": int(engine[-1])} | (smallest if engine == "zero3" else {})
        path = tmp_path / "zero.json"
        path.write_text(json.dumps(
            {"zero_optimization": zero, "comms_logger": {"enabled": True, "prof_all": True}}
        ))  # fmt: skip
        given["engine"]["deepspeed_config"] = str(path)
    job = children.start_each(given, measure, [given, given])
    assert job.wait() == [0, 0], "\n".join(job.texts())
    for rank in range(2):
        found = json.loads(Path(f"{given['run_folder']}-{rank}.json").read_text())
        parameters = found.pop("parameters")
        state = state_bytes(engine, parameters, 2, precision)
        # Flat parts are padded to equal lengths.
        assert found.pop("optimizer") == pytest.approx(state.optimizer, rel=0.01)
        cast = 2 * parameters if engine == "ddp" and precision == "bf16" else 0
        assert found.pop("weights") == pytest.approx(state.weights - cast, rel=0.01)
        expected = collective_bytes(engine, parameters, precision, num_micro_batches=2)
        for kind in found.keys() | expected.keys():
            # Besides, a few numbers: overflow, the gradient's norm.
            assert found.get(kind, 0) == pytest.approx(expected.get(kind, 0), rel=0.01, abs=64)


# --- launchers ------------------------------------------------------------------------------------

LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=PORT"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus=2", "--master_port=PORT"],
    # Its --cpu wants MPI, and without it starts one process only.
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"),
        *("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
        "--main_process_port=PORT",
    ],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_deepspeed_itself(settings: dict, launcher: str) -> None:
    short = on(settings, launcher, "zero2", training={"num_steps": 2})
    config = Path(short["run_folder"] + ".yaml")
    config.write_text(json.dumps(short))
    words = [word.replace("PORT", str(children.free_port())) for word in LAUNCHERS[launcher]]
    done = subprocess.run(
        [sys.executable, *words, str(ROOT / "scripts/train.py"), str(config)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads((Path(short["run_folder"]) / "environment.json").read_text())
    assert found["engine"]["class"] == "deepspeed.runtime.engine.DeepSpeedEngine"
    assert found["engine"]["world_size"] == 2


BUSY_AT_ITS_END = """
import time, torch, torch.distributed as dist
from olmo_sparsity import cli

def main(arguments):
    dist.init_process_group("gloo")
    group = dist.new_group()
    for _ in range(400):
        numbers = torch.ones(200_000)
        numbers.seen_by_python = True  # who frees it last needs Python's lock
        dist.all_reduce(numbers, group=group, async_op=True)
    if dist.get_rank() == 1:
        time.sleep(60)
    return 75

cli.main = main
cli.entry()
"""


def test_a_command_ends_with_its_exit_code_whatever_threads_are_alive() -> None:
    """With sys.exit process 0 aborts (-6) more often than not."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    variables |= {"MASTER_PORT": str(children.free_port())}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", BUSY_AT_ITS_END],
            env=os.environ | variables | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert both[0].wait(60) == 75
    both[1].kill()
    both[1].wait()


# --- one message ----------------------------------------------------------------------------------


def test_a_mistake_is_said_once(settings: dict) -> None:
    wrong = on(settings, "wrong", "zero2", training={"batch_size": 9, "micro_batch_size": None})
    job = children.start(wrong)
    assert job.wait() == [2, 2]
    first, second = job.texts()
    assert first.startswith("olmo-sparsity: training.batch_size=9 cannot be shared equally by 2")
    assert len(first.splitlines()) == 1
    assert second == ""
    assert not Path(wrong["run_folder"]).exists(), "before the first step, before anything"


def test_another_optimizer_than_was_asked_for_is_an_error(settings: dict, tmp_path: Path) -> None:
    """These settings make DeepSpeed replace ZeRO-1 by itself."""
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"data_types": {"grad_accum_dtype": "fp32"}}))
    given = on(settings, "replaced", "zero1", training={"precision": "bf16"})
    given["engine"]["deepspeed_config"] = str(path)
    job = children.start(given)
    assert job.wait() == [2, 2]
    wanted = (
        "engine.name=zero1 asks for DeepSpeedEngine with DeepSpeedZeroOptimizer, DeepSpeed built"
    )
    assert [text.count(wanted) for text in job.texts()] == [1, 0]
    assert not (Path(given["run_folder"]) / "metrics.jsonl").exists()


def test_a_mistake_of_one_process_is_said_by_that_one(settings: dict) -> None:
    job = children.start(on(settings, "wrong", "ddp"), arguments=[[], ["--training.device=cuda:7"]])
    assert job.wait() == [2, 2]
    first, second = job.texts()
    assert first == ""
    assert second.startswith("olmo-sparsity: process 1 of 2 on ")
    assert "training.device=cuda:7 cannot be used" in second
