"""What the scripts of slurm/ give to srun and to the processes that it starts. What SLURM then does
with the jobs: integration/test_slurm.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.command.share import parse_shard
from olmo_sparsity.training.checkpoint import PATIENCE_S
from tests.conftest import until

ROOT = Path(__file__).parents[1]

SRUN = f"""#!{sys.executable}
import json, os, sys
given = {{"words": sys.argv[1:], "variables": dict(os.environ)}}
open(os.environ["GIVEN"], "w").write(json.dumps(given))
sys.exit(int(os.environ.get("EXIT", 0)))
"""
ONE_NODE = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}
THREE_NODES = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}


class Submitted:
    """A job's script, run with an srun that writes down what it is given."""

    def __init__(self, folder: Path, *words: str, **variables: str) -> None:
        srun = folder / "srun"
        srun.write_text(SRUN)
        srun.chmod(0o755)
        environment = {"PATH": f"{folder}:/usr/bin:/bin", "GIVEN": str(folder / "given.json")}
        environment |= {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "12345"}
        self.done = subprocess.run(
            ["bash", *words],
            cwd=ROOT,
            env=environment | ONE_NODE | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        given = json.loads((folder / "given.json").read_text())
        self.words: list[str] = given["words"]
        self.variables: dict[str, str] = given["variables"]


def train(folder: Path, **variables: str) -> Submitted:
    return Submitted(folder, "slurm/train.sbatch", "any.yaml", **variables)


def test_processes_find_each_other(tmp_path: Path) -> None:
    job = train(tmp_path)
    assert job.done.returncode == 0, job.done.stderr
    assert job.words[-3:] == ["olmo-sparsity", "train", "any.yaml"]
    assert job.variables["MASTER_ADDR"] == os.uname().nodename
    assert job.variables["MASTER_PORT"] == "20345"


@pytest.mark.parametrize(
    ("variables", "cores"),
    [
        ({"SLURM_CPUS_PER_TASK": "6", "SLURM_JOB_CPUS_PER_NODE": "64"}, "6"),
        ({"SLURM_TASKS_PER_NODE": "4", "SLURM_JOB_CPUS_PER_NODE": "64"}, "16"),
        ({"SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_JOB_CPUS_PER_NODE": "52(x2)"}, "6"),
        ({"SLURM_TASKS_PER_NODE": "4(x2),2", "SLURM_JOB_CPUS_PER_NODE": "64(x3)"}, "1"),
        ({"SLURM_TASKS_PER_NODE": "8", "SLURM_JOB_CPUS_PER_NODE": "4"}, "1"),
        ({}, "1"),
    ],
)
def test_tasks_share_the_cores_of_a_node(
    tmp_path: Path, variables: dict[str, str], cores: str
) -> None:
    given = train(tmp_path, **variables).variables
    assert (given["SRUN_CPUS_PER_TASK"], given["OMP_NUM_THREADS"]) == (cores, cores)
    given = train(tmp_path, **variables, OMP_NUM_THREADS="3").variables
    assert (given["SRUN_CPUS_PER_TASK"], given["OMP_NUM_THREADS"]) == (cores, "3")


@pytest.mark.parametrize(
    ("variables", "interface"),
    [(THREE_NODES, None), (THREE_NODES | {"GLOO_SOCKET_IFNAME": "eth7"}, "eth7")],
)
def test_the_first_node_chooses_no_interface_for_the_others(
    tmp_path: Path, variables: dict[str, str], interface: str | None
) -> None:
    assert train(tmp_path, **variables).variables.get("GLOO_SOCKET_IFNAME") == interface


def test_the_tasks_of_a_measurement_do_not_wait_for_each_other(tmp_path: Path) -> None:
    job = Submitted(tmp_path, "slurm/measure.sbatch", "runs/x", "--out", "y")
    assert job.words[-5:] == ["olmo-sparsity", "measure", "runs/x", "--out", "y"]
    assert "--wait=0" in job.words


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}
STEP |= {"SLURM_STEP_TASKS_PER_NODE": "3"}


def array(number: int, least: int, most: int, count: int) -> dict[str, str]:
    numbers = {"ID": number, "MIN": least, "MAX": most, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in numbers.items()}


@pytest.mark.parametrize(
    ("variables", "typed", "alone", "expected"),
    [
        ({}, None, True, (0, 1)),
        ({}, "2/5", True, (2, 5)),
        (array(2, 0, 7, 8), None, True, (2, 8)),
        (array(2, 0, 7, 8), "0/1", True, (0, 1)),
        (STEP, None, True, (1, 3)),
        (STEP, None, False, (0, 1)),
        (array(2, 0, 7, 8) | STEP, None, True, (10, 24)),
        (array(2, 0, 7, 8) | STEP, None, False, (2, 8)),
        (array(2, 1, 7, 7), None, True, "whole array, --array=0-7"),
        (array(2, 0, 8, 5), None, True, "whole array"),
        ({"SLURM_ARRAY_TASK_ID": "1"}, None, True, "without SLURM_ARRAY_TASK_COUNT"),
        (STEP, "0/3", False, "3 processes of this launch"),
        ({}, "3/3", True, "--shard=3/3"),
    ],
)
def test_a_task_takes_its_shard_from_slurm(
    variables: dict[str, str],
    typed: str | None,
    alone: bool,
    expected: object,
    monkeypatch: pytest.MonkeyPatch,
    no_launcher: None,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, tuple):
        assert parse_shard(typed, alone) == expected
    else:
        with pytest.raises(ConfigError, match=str(expected)):
            parse_shard(typed, alone)


def test_the_exit_code_of_the_command_is_that_of_the_job(tmp_path: Path) -> None:
    job = train(tmp_path, EXIT="2")
    assert job.done.returncode == 2
    assert "not requeued" in job.done.stdout


SRUN_THAT_ENDS = """#!/bin/bash
# Ends as `olmo-sparsity` of a test does.
{command}
"""
SCONTROL = """#!/bin/sh
[ "$1" = show ] && echo "JobId=12345 JobState=COMPLETING Reason=$REASON Dependency=(null)"
[ "$1" = requeue ] && echo "$2" >>"$REQUEUES"
exit 0
"""


class Queue:
    """SLURM, as far as a job of one id sees it: each start runs train.sbatch with an srun that
    does `command`."""

    def __init__(self, folder: Path, command: str, reason: str = "None") -> None:
        clone = folder / "clone"
        (clone / "slurm/logs").mkdir(parents=True)
        for path in (ROOT / "slurm").glob("*.*"):
            (clone / "slurm" / path.name).write_text(path.read_text())
        tools = folder / "tools"
        tools.mkdir()
        for name, text in (
            ("srun", SRUN_THAT_ENDS.format(command=command)),
            ("scontrol", SCONTROL),
        ):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.requeues = folder / "requeues"
        self.environment = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "SLURM_SUBMIT_DIR": str(clone),
            "SLURM_JOB_ID": "12345",
            "REQUEUES": str(self.requeues),
            "REASON": reason,
            **ONE_NODE,
        }

    def start(self, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", "slurm/train.sbatch", "any.yaml"],
            cwd=self.environment["SLURM_SUBMIT_DIR"],
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def num_requeues(self) -> int:
        return len(self.requeues.read_text().splitlines()) if self.requeues.exists() else 0


def run_starts(queue: Queue, number: int, **variables: str) -> str:
    """Start the job so often, and return what it printed."""
    return "".join(queue.start(**variables).communicate(timeout=60)[0] for _ in range(number))


def test_deaths_are_counted_however_long_the_start_ran(tmp_path: Path) -> None:
    queue = Queue(tmp_path, "exit 76")
    log = run_starts(queue, 3, SECONDS="1850", OLMO_SPARSITY_MAX_RESTARTS="2")
    assert queue.num_requeues == 2
    assert "exit code 76: not requeued after 2 restarts without getting on" in log


def test_a_job_that_gets_on_may_die_more_often(tmp_path: Path) -> None:
    queue = Queue(tmp_path, 'rm "$OLMO_SPARSITY_DEATHS" 2>/dev/null; exit 1')
    run_starts(queue, 4, OLMO_SPARSITY_MAX_RESTARTS="2")
    assert queue.num_requeues == 4


def test_stops_without_progress_are_counted_apart_from_deaths(tmp_path: Path) -> None:
    """As of a job whose signal comes as soon as it begins."""
    queue = Queue(tmp_path, "exit 75")
    log = run_starts(queue, 6, OLMO_SPARSITY_MAX_RESTARTS="1")
    assert queue.num_requeues == 4
    assert "stopped when asked: not requeued after 4 restarts" in log


SAVES_TOO_LONG = 'echo $$ >"$REQUEUES.srun"; trap "" TERM; sleep 2; exit 75'


@pytest.mark.parametrize(("reason", "num_requeues"), [("TimeLimit", 1), ("None", 0)])
def test_a_time_limit_that_comes_during_a_save_requeues_and_scancel_does_not(
    tmp_path: Path, reason: str, num_requeues: int
) -> None:
    queue = Queue(tmp_path, SAVES_TOO_LONG, reason)
    job = queue.start()
    until((tmp_path / "requeues.srun").exists, lambda: job.poll() is None)
    job.terminate()
    until(lambda: queue.num_requeues == num_requeues, lambda: job.poll() is None)
    assert job.poll() is None, "requeued while the tasks still save, as SLURM may kill the shell"
    log, _ = job.communicate(timeout=60)
    assert queue.num_requeues == num_requeues
    assert job.returncode == 75
    assert "ended by SLURM" in log


def test_srun_waits_for_the_first_process_which_waits_for_parts_of_checkpoints(
    tmp_path: Path,
) -> None:
    (wait,) = (word for word in train(tmp_path).words if word.startswith("--wait="))
    assert int(wait.removeprefix("--wait=")) > PATIENCE_S


def accept(folder: Path, *configs: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run slurm/accept.sbatch where neither srun nor olmo-sparsity is installed."""
    clone = folder / "clone"
    clone.mkdir()
    (clone / "slurm").symlink_to(ROOT / "slurm")
    environment = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(clone), "SLURM_JOB_ID": "12345"}
    environment |= {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}
    return subprocess.run(
        ["bash", "slurm/accept.sbatch", *(configs or ["any.yaml"])],
        cwd=clone,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_acceptance_hands_on_the_least_speeds_of_links(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tools / "srun").chmod(0o755)
    accept(
        tmp_path,
        PATH=f"{tools}:/usr/bin:/bin",
        SLURM_NTASKS="4",
        SLURM_JOB_NUM_NODES="2",
        OLMO_SPARSITY_LEAST_WITHIN="150",
    )
    page = (tmp_path / "clone/results/accept/accept.md").read_text()
    within, between = (line for line in page.splitlines() if line.startswith("| all-reduce"))
    assert "--ntasks=2 python -m olmo_sparsity.training.all_reduce --least=150 |" in within
    assert "python -m olmo_sparsity.training.all_reduce |" in between


def test_acceptance_takes_no_variable_of_the_login_shell(tmp_path: Path) -> None:
    (somebodys := tmp_path / "out").mkdir()
    (somebodys / "results.txt").write_text("a year of work")
    accept(tmp_path, OUT=str(somebodys))
    assert [path.name for path in somebodys.iterdir()] == ["results.txt"]
    assert (tmp_path / "clone/results/accept/accept.md").is_file()


def test_acceptance_refuses_a_folder_that_is_not_empty_and_deletes_nothing(tmp_path: Path) -> None:
    (filled := tmp_path / "out").mkdir()
    (filled / ".hidden").write_text("a year of work")
    done = accept(tmp_path, OLMO_SPARSITY_OUT=str(filled))
    assert done.returncode == 2
    assert f"OLMO_SPARSITY_OUT={filled} must be a new or empty folder" in done.stdout
    assert [path.name for path in filled.iterdir()] == [".hidden"]


SRUN_THAT_TRAINS = """#!/bin/sh
# Notes the checkpoints that are there, then leaves those of a training with its metrics.
ls -d "$SLURM_SUBMIT_DIR"/results/accept/*/checkpoints 2>/dev/null | tr '\\n' ' ' >>"$SEEN"
echo >>"$SEEN"
for word; do case $word in --run_folder=*) run=${word#*=};; esac; done
[ -n "$run" ] || exit 0
mkdir -p "$run/checkpoints/step000050"
for step in $(seq 50); do echo "{\\"step\\": $step, \\"loss\\": 3.0}"; done >"$run/metrics.jsonl"
"""


def test_acceptance_keeps_the_checkpoints_of_one_small_run_and_of_the_current_one(
    tmp_path: Path,
) -> None:
    """Those of all engines of a 1B model would fill 200 GB."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").write_text(SRUN_THAT_TRAINS)
    (tools / "srun").chmod(0o755)
    seen = tmp_path / "seen"
    accept(tmp_path, "small.yaml", "large.yaml", PATH=f"{tools}:/usr/bin:/bin", SEEN=str(seen))
    out = tmp_path / "clone/results/accept"
    exported = f"{out}/small-ddp/checkpoints"
    of_calls = [line.split() for line in seen.read_text().splitlines()]
    assert len(of_calls) > 2 * 6
    for checkpoints in of_calls:
        # Before a start: none of a run that was judged; of `killed` and `preempted`, their own.
        others = {Path(path).parent.name for path in checkpoints} - {"small-ddp"}
        assert others <= {"killed"} or others <= {"preempted"}
    assert [str(path) for path in out.glob("*/checkpoints")] == [exported]
    assert len([*out.glob("*/metrics.jsonl")]) == 2 * 6 + 2


def test_no_script_deletes_a_folder_or_takes_a_plain_variable() -> None:
    """But those of SLURM and of the libraries that the job runs; and the acceptance its own
    checkpoints, below a folder that was new."""
    known = ("SLURM_", "OLMO_SPARSITY_", "OMP_", "HF_", "GLOO_", "MASTER_", "SRUN_", "PATH", "PWD")
    for path in sorted((ROOT / "slurm").glob("*.*")):
        text = path.read_text()
        deletions = [line.strip() for line in text.splitlines() if "rm -r" in line]
        own = ['rm -rf -- "${out:?}/${1:?}/checkpoints"'] if path.name == "accept.sbatch" else []
        assert deletions == own, path
        for name in re.findall(r"\$\{?!?([A-Z][A-Z_]+)", text):
            assert name.startswith((*known, "SECONDS")), f"{path}: {name}"
