"""What the scripts of slurm/ give to srun and to the processes that it starts. What SLURM then does
with the jobs: integration/test_slurm.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.command.share import parse_shard
from olmo_sparsity.config.run import load_config
from olmo_sparsity.training.checkpoints.writer import PATIENCE_S
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


def test_a_job_that_starts_again_meets_at_another_port(tmp_path: Path) -> None:
    """Another job on the node may have the first one."""
    ports = set()
    for count in range(6):
        ports.add(train(tmp_path, SLURM_RESTART_COUNT=str(count)).variables["MASTER_PORT"])
    assert len(ports) == 6
    assert all(20_000 <= int(port) < 32_000 for port in ports)


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


@pytest.mark.parametrize("script", ["train", "measure", "accept"])
def test_a_job_that_is_submitted_from_another_folder_says_so(tmp_path: Path, script: str) -> None:
    done = run_without_srun(script, SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 2
    said = f"submit from the root of olmo-sparsity, not from {tmp_path}"
    assert done.stderr.splitlines()[-1] == said


@pytest.mark.parametrize("name", ["OLMO_SPARSITY_MAX_RESTARTS", "OLMO_SPARSITY_MAX_EXCLUDED"])
@pytest.mark.parametrize("value", ["08", "1.5", "abc", "-1"])
def test_a_limit_that_bash_cannot_count_to_is_refused_at_once(name: str, value: str) -> None:
    """Otherwise a job that is stopped at its time limit is not requeued."""
    done = run_without_srun("train", **{name: value})
    assert done.returncode == 2
    assert f"{name}={value} must be a whole number" in done.stderr


def run_without_srun(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script that ends before it starts anything."""
    environment = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "12345"}
    return subprocess.run(
        ["bash", f"slurm/{script}.sbatch", "any.yaml"],
        cwd=ROOT,
        env=environment | ONE_NODE | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


SRUN_THAT_ENDS = """#!/bin/bash
# Ends as `olmo-sparsity` of a test does.
{command}
"""
SCONTROL = """#!/bin/sh
case "$1 $2 $3" in
  "show job "*)
    excluded=$(cat "$REQUEUES.excluded" 2>/dev/null || echo "(null)")
    echo "JobId=12345 Reason=$REASON Dependency=(null) ExcNodeList=$excluded NodeList=n[1-2]" ;;
  "show hostnames "*) echo "$3" | tr , '\\n' ;;
  requeue*) echo "$2" >>"$REQUEUES" ;;
  update*StartTime=*) echo "${3#StartTime=}" >>"$REQUEUES.pauses" ;;
  update*) echo "${3#ExcNodeList=}" >"$REQUEUES.excluded" ;;
esac
exit 0
"""
SINFO = """#!/bin/sh
for node in $NODES; do echo "$node (null) 64 500000 gpu:8"; done
echo "small1 (null) 8 16000 (null)"
"""


class Queue:
    """SLURM, as far as a job of one id sees it: each start runs train.sbatch with an srun that
    does `command`. `nodes`: of its partition, beside a node of another kind."""

    def __init__(
        self, folder: Path, command: str, reason: str = "None", nodes: str = "n1 n2 n3 n4"
    ) -> None:
        clone = folder / "clone"
        (clone / "slurm/logs").mkdir(parents=True)
        for path in (ROOT / "slurm").glob("*.*"):
            (clone / "slurm" / path.name).write_text(path.read_text())
        tools = folder / "tools"
        tools.mkdir()
        for name, text in (
            ("srun", SRUN_THAT_ENDS.format(command=command)),
            ("scontrol", SCONTROL),
            ("sinfo", SINFO),
        ):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.requeues = folder / "requeues"
        self.errors = folder / "errors.log"
        self.environment = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "SLURM_SUBMIT_DIR": str(clone),
            "SLURM_JOB_ID": "12345",
            "SLURM_JOB_PARTITION": "any",
            "REQUEUES": str(self.requeues),
            "REASON": reason,
            "NODES": nodes,
            **ONE_NODE,
        }

    def start(self, **variables: str) -> subprocess.Popen:
        with self.errors.open("a") as errors:
            return subprocess.Popen(
                ["bash", "slurm/train.sbatch", "any.yaml"],
                cwd=self.environment["SLURM_SUBMIT_DIR"],
                env=self.environment | variables,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    @property
    def num_requeues(self) -> int:
        return len(self.requeues.read_text().splitlines()) if self.requeues.exists() else 0

    @property
    def pauses(self) -> list[str]:
        """When the next starts may begin, of those that do not begin at once."""
        path = self.requeues.with_name("requeues.pauses")
        return path.read_text().splitlines() if path.exists() else []

    @property
    def excluded(self) -> str:
        """The nodes that SLURM does not give to the next start."""
        path = self.requeues.with_name("requeues.excluded")
        return path.read_text().strip() if path.exists() else ""


def run_starts(queue: Queue, number: int, **variables: str) -> str:
    """Start the job so often, and return what it printed."""
    return "".join(queue.start(**variables).communicate(timeout=60)[0] for _ in range(number))


@pytest.mark.accept
def test_deaths_are_counted_however_long_the_start_ran(tmp_path: Path) -> None:
    queue = Queue(tmp_path, "exit 76")
    log = run_starts(queue, 3, SECONDS="1850", OLMO_SPARSITY_MAX_RESTARTS="2")
    assert queue.num_requeues == 2
    assert "exit code 76: not requeued after 2 restarts without getting on" in log


@pytest.mark.accept
def test_a_job_whose_disk_is_away_starts_again_after_a_pause(tmp_path: Path) -> None:
    queue = Queue(tmp_path, "exit 74")
    log = run_starts(queue, 6)
    assert queue.pauses == ["now+12minutes"] * 5, "an hour in all, before the job stays"
    assert "exit code 74: not requeued after 5 restarts" in log


def test_a_job_that_died_otherwise_starts_again_at_once(tmp_path: Path) -> None:
    queue = Queue(tmp_path, "exit 76")
    run_starts(queue, 1)
    assert queue.num_requeues == 1
    assert queue.pauses == []


@pytest.mark.accept
def test_a_job_that_gets_on_may_die_more_often(tmp_path: Path) -> None:
    queue = Queue(tmp_path, 'rm "$OLMO_SPARSITY_DEATHS" 2>/dev/null; exit 1')
    run_starts(queue, 4, OLMO_SPARSITY_MAX_RESTARTS="2")
    assert queue.num_requeues == 4


@pytest.mark.accept
def test_stops_without_progress_are_counted_apart_from_deaths(tmp_path: Path) -> None:
    """As of a job whose signal comes as soon as it begins."""
    queue = Queue(tmp_path, "exit 75")
    log = run_starts(queue, 6, OLMO_SPARSITY_MAX_RESTARTS="1")
    assert queue.num_requeues == 4
    assert "stopped when asked: not requeued after 4 restarts" in log


SAVES_TOO_LONG = 'echo $$ >"$REQUEUES.srun"; trap "" TERM; sleep 2; exit 75'


@pytest.mark.accept
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


@pytest.mark.accept
@pytest.mark.parametrize(
    ("lines", "excluded"),
    [
        (["n4: task 1: Killed", "n3: task 0: Exited with exit code 76"], "n4"),
        (
            [
                "n4: tasks 4-7: Exited with exit code 1",
                "n[2-3]: tasks 0-3: Exited with exit code 76",
            ],
            "n4",
        ),
        # The connection of n2 to n4 breaks, and PyTorch aborts it.
        (
            [
                "n4: task 4: Killed",
                "n2: tasks 0-1: Aborted (core dumped)",
                "n3: task 2: Exited with exit code 76",
            ],
            "n4",
        ),
        # It does not reach the first process, which waits for it.
        (["n4: task 1: Exited with exit code 69", "n3: task 0: Exited with exit code 76"], "n4"),
        # Its GPU has no memory left.
        (["n4: task 1: Exited with exit code 2", "n3: task 0: Exited with exit code 76"], "n4"),
        # Nobody reaches the first process.
        (["n[3-4]: tasks 1-2: Exited with exit code 69", "n2: task 0: Killed"], ""),
        # A mistake of the program, or of its input.
        (["n[3-4]: tasks 0-1: Exited with exit code 2"], ""),
        (["n3: task 0: Aborted", "n4: task 1: Aborted"], ""),
        (["n[3-4]: tasks 0-1: Exited with exit code 1"], ""),
        (["n3: task 0: Segmentation fault", "n4: task 1: Segmentation fault"], ""),
        (["n[3-4]: tasks 0-1: Exited with exit code 76"], ""),
    ],
)
def test_a_node_whose_tasks_alone_crash_is_excluded_from_the_next_start(
    tmp_path: Path, lines: list[str], excluded: str
) -> None:
    says = "".join(f"echo 'srun: error: {line}' >&2; " for line in lines)
    queue = Queue(tmp_path, says + "exit 137")
    log = run_starts(queue, 1)
    assert queue.num_requeues == 1
    assert queue.excluded == excluded
    said = f"{excluded} failed: excluded from the next starts of this job (1 of at most 2 nodes)"
    assert (said in log) == bool(excluded)


NAMED_BY_THE_OTHERS = 'echo "$FAILED" >"$OLMO_SPARSITY_SUSPECT"; exit 76'


@pytest.mark.accept
def test_at_most_two_nodes_are_excluded_beside_those_of_the_user(tmp_path: Path) -> None:
    queue = Queue(tmp_path, NAMED_BY_THE_OTHERS)
    queue.requeues.with_name("requeues.excluded").write_text("n9")
    log = "".join(run_starts(queue, 1, FAILED=node) for node in ("n1", "n2", "n3"))
    assert queue.num_requeues == 3
    assert queue.excluded == "n9,n1,n2"
    assert "n3 failed, and is not excluded: at most 2 nodes are" in log


def test_no_node_is_excluded_that_the_job_needs(tmp_path: Path) -> None:
    """Else SLURM would hold the job for ever."""
    queue = Queue(tmp_path, NAMED_BY_THE_OTHERS, nodes="n1 n2 n3")
    log = run_starts(queue, 1, FAILED="n1", **THREE_NODES)
    assert (queue.num_requeues, queue.excluded) == (1, "")
    assert "n1 failed, and is not excluded: the partition has too few other nodes" in log


def test_the_node_of_an_earlier_start_is_not_blamed_again(tmp_path: Path) -> None:
    queue = Queue(tmp_path, NAMED_BY_THE_OTHERS)
    run_starts(queue, 1, FAILED="n1")
    (tmp_path / "tools/srun").write_text(SRUN_THAT_ENDS.format(command="exit 76"))
    assert "failed" not in run_starts(queue, 1)
    assert queue.excluded == "n1"


def test_a_time_limit_that_comes_during_each_save_does_not_requeue_for_ever(
    tmp_path: Path,
) -> None:
    queue = Queue(tmp_path, SAVES_TOO_LONG, "TimeLimit")
    job = queue.start(OLMO_SPARSITY_MAX_RESTARTS="0")
    until((tmp_path / "requeues.srun").exists, lambda: job.poll() is None)
    job.terminate()
    log, _ = job.communicate(timeout=60)
    assert queue.num_requeues == 0
    assert "time limit while saving: not requeued after 0 restarts" in log


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
    command = "python -m olmo_sparsity.training.processes.all_reduce"
    assert f"--ntasks=2 {command} --least=150 |" in within
    assert f"{command} |" in between


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


def test_acceptance_asks_for_a_config(tmp_path: Path) -> None:
    done = accept(tmp_path, "--training.num_steps=50")
    assert done.returncode == 2
    assert "no config is given" in done.stdout
    assert not (tmp_path / "clone/results").exists()


def test_acceptance_refuses_a_number_of_steps_that_is_none(tmp_path: Path) -> None:
    done = accept(tmp_path, OLMO_SPARSITY_ACCEPT_STEPS="fifty")
    assert done.returncode == 2
    assert "OLMO_SPARSITY_ACCEPT_STEPS=fifty must be a whole number" in done.stderr


SRUN_THAT_TRAINS = """#!/bin/sh
# Notes what it is given and the checkpoints that are there, then leaves those of a training with
# its metrics.
echo "$@" >>"$GIVEN"
ls -d "$SLURM_SUBMIT_DIR"/results/accept/*/checkpoints 2>/dev/null | tr '\\n' ' ' >>"$SEEN"
echo >>"$SEEN"
for word; do case $word in --run_folder=*) run=${word#*=};; esac; done
[ -n "$run" ] || exit 0
mkdir -p "$run/checkpoints/step000050"
for step in $(seq 50); do echo "{\\"step\\": $step, \\"loss\\": 3.0}"; done >"$run/metrics.jsonl"
"""


@dataclass
class Acceptance:
    """What slurm/accept.sbatch did with an srun that only pretends to train."""

    out: Path
    given: list[list[str]]
    """The words of each call of srun."""

    checkpoints: list[list[str]]
    """The runs that had checkpoints at each call."""

    @property
    def trainings(self) -> dict[str, list[str]]:
        """The words of each run, by the name of its folder; of one that is resumed the last."""
        trainings = {}
        for words in self.given:
            for word in words:
                if word.startswith("--run_folder="):
                    trainings[Path(word).name] = words
        return trainings


def pretend_to_accept(folder: Path, *configs: str, **variables: str) -> Acceptance:
    tools = folder / "tools"
    tools.mkdir()
    (tools / "srun").write_text(SRUN_THAT_TRAINS)
    (tools / "srun").chmod(0o755)
    files = {"GIVEN": str(folder / "given"), "SEEN": str(folder / "seen")}
    accept(folder, *configs, PATH=f"{tools}:/usr/bin:/bin", **files, **variables)
    given = [line.split() for line in (folder / "given").read_text().splitlines()]
    seen = [line.split() for line in (folder / "seen").read_text().splitlines()]
    checkpoints = [[Path(path).parent.name for path in paths] for paths in seen]
    return Acceptance(folder / "clone/results/accept", given, checkpoints)


def test_acceptance_keeps_the_checkpoints_of_one_small_run_and_of_the_current_one(
    tmp_path: Path,
) -> None:
    """Those of all engines of a 1B model would fill 200 GB."""
    accepted = pretend_to_accept(tmp_path, "small.yaml", "large.yaml")
    assert len(accepted.checkpoints) > 2 * 8
    for names in accepted.checkpoints:
        # Before a start: none of a run that was judged; of one that goes on, its own.
        others = {*names} - {"small"}
        assert len(others) <= 1
        assert all(name.endswith(("-killed", "-preempted")) for name in others)
    kept = [str(path) for path in accepted.out.glob("*/checkpoints")]
    assert kept == [f"{accepted.out}/small/checkpoints"]
    assert len([*accepted.out.glob("*/metrics.jsonl")]) == 2 * 8 + 3


def test_acceptance_compares_engines_on_two_layers_and_tries_the_config_itself(
    tmp_path: Path,
) -> None:
    """One process does not hold a model of 7B."""
    two_nodes = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4"}
    trainings = pretend_to_accept(tmp_path, "7b.yaml", **two_nodes).trainings
    on_two_layers = {"single", "ddp", "fsdp", "fsdp_by_node", "zero1", "zero2", "zero3"}
    on_two_layers |= {"ddp-killed", "fsdp-killed", "preempted"}
    assert {*trainings} == {"7b", "7b-killed"} | {f"7b-2-{name}" for name in on_two_layers}
    for name, words in trainings.items():
        is_whole = name in ("7b", "7b-killed")
        assert ("--model.n_layers=2" in words) == (not is_whole)
        assert any(word.startswith("--engine.name=") for word in words) == (not is_whole)
    by_node = ["--engine.shard_over=null", "--engine.shard_over=node"]
    words = trainings["7b-2-fsdp_by_node"]
    assert [word for word in words if "shard_over" in word] == by_node
    assert "--engine.name=fsdp" in trainings["7b-2-fsdp-killed"]


def test_the_options_of_the_acceptance_are_valid_with_those_of_any_engine(tmp_path: Path) -> None:
    """A config's own options of an engine must not be refused by another one."""
    two_nodes = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4"}
    own = ("--engine.name=fsdp", "--engine.shard_over=node", "--logging.layer_gradient_norms=true")
    trainings = pretend_to_accept(tmp_path, "c4_1b_pose.yaml", *own, **two_nodes).trainings
    for name, words in trainings.items():
        overrides = [word for word in words if word.startswith("--") and "." in word]
        config = load_config(ROOT / "configs/c4_1b_pose.yaml", overrides)
        has_two_layers = name not in ("c4_1b_pose", "c4_1b_pose-killed")
        assert (config.model.n_layers == 2) == has_two_layers
        assert (config.engine.shard_over == "node") == (not has_two_layers or "by_node" in name)


def test_no_hsdp_is_tried_on_one_node(tmp_path: Path) -> None:
    trainings = pretend_to_accept(tmp_path, "7b.yaml").trainings
    assert "7b-2-fsdp" in trainings
    assert "7b-2-fsdp_by_node" not in trainings


def test_the_acceptance_loses_no_exit_code_of_a_task_that_waits_for_parts(tmp_path: Path) -> None:
    given = pretend_to_accept(tmp_path, "any.yaml").given
    waits = [word for words in given for word in words if word.startswith("--wait=")]
    seconds = [int(wait.removeprefix("--wait=")) for wait in waits]
    assert seconds.count(0) == 1, "of the measurement, whose tasks do not need each other"
    assert all(number == 0 or number > PATIENCE_S for number in seconds)


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
            assert name.startswith((*known, "SECONDS", "BASH_REMATCH")), f"{path}: {name}"
