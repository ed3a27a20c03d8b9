"""The jobs of slurm/ on a real SLURM: preempted, killed, cut off, and the same loss curve after it.

Each test asks about one scenario. All scenarios that are asked about run at once, as jobs of one
cluster: most of their time is waiting for SLURM.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pandas as pd
import pytest

from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.stored_results import read_results
from olmo_sparsity.base.launch import EXIT_FAULTY_NODE
from olmo_sparsity.command.cli import build_parser, main
from olmo_sparsity.experiment.file import read_experiment
from olmo_sparsity.experiment.jobs import jobs_of
from olmo_sparsity.training.metrics.read import read_metrics
from tests.conftest import data_section, small_run
from tests.integration import needs
from tests.integration.slurm_cluster import ROOT, Cluster

pytestmark = [
    pytest.mark.accept,
    needs(
        ("sbatch", "slurmctld", "slurmd", "munged"),
        "slurm-wlm munge",
        "OLMO_SPARSITY_REQUIRE_SLURM",
    ),
]

FEW = [
    *("--long", "24", "--short", "8", "--stride", "8", "--ks", "1,2", "--draws", "1"),
    *("--selectors", "random,nearest", "--min-gap", "0", "--max-documents", "4"),
]
NUM_STEPS = 120
# The time limit, or the test, ends it.
FOREVER = ("--training.num_steps=1000000", "--training.max_epochs=1000000")
PATIENCE_S = 300
NUM_AT_ONCE = 6  # scenarios; most of their time they wait


@dataclass
class Job:
    cluster: Cluster
    number: str
    run_folder: Path
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def fact(self, name: str) -> str:
        words = self.cluster.run("scontrol", "show", "job", "--oneliner", self.number).split()
        return next(word.split("=", 1)[1] for word in words if word.startswith(name + "="))

    def losses(self) -> dict[int, float]:
        rows = list(read_metrics(self.run_folder / "metrics.jsonl"))
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    def starts(self) -> list[dict]:
        path = self.run_folder / "environment.json"
        return json.loads(path.read_text()) if path.exists() else []

    def wait_for(self, holds: Callable[[], bool], what: str, patience_s: int = PATIENCE_S) -> None:
        try:
            self.cluster.wait_for(holds, what, patience_s)
        except (TimeoutError, RuntimeError) as error:
            error.add_note(f"{self.run_folder.name}, job {self.number}:\n{self.log}")
            raise

    def reach(self, step: int) -> None:
        self.wait_for(lambda: max(self.losses(), default=0) >= step, f"step {step}")

    def end(self, patience_s: int = PATIENCE_S) -> Job:
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(lambda: self.fact("JobState") in ends, "the job to end", patience_s)
        return self

    def go_on(self, start: int) -> None:
        """Until it has been started so often, and steps are done."""
        self.wait_for(lambda: len(self.starts()) == start, f"start {start}")
        # The rows beyond the checkpoint are those of the start before, until they are cut off.
        self.wait_for(lambda: bool(self.losses_since_start()), f"a step of start {start}")
        self.reach(self.starts()[-1]["resumed_at_step"] + 5)

    def losses_since_start(self) -> dict[int, float]:
        """The losses that were logged after the last start wrote its entry."""
        began = datetime.fromisoformat(self.starts()[-1]["started"])
        return {
            row["step"]: row["loss"]
            for row in read_metrics(self.run_folder / "metrics.jsonl")
            if "loss" in row and datetime.fromisoformat(row["timestamp"]) >= began
        }


Scenario = Callable[["Bench"], Job]


@dataclass
class Bench:
    """What a scenario is given: the cluster, a config, a place for its files."""

    cluster: Cluster
    config: Path
    folder: Path
    jobs: dict[Scenario, Future[Job]]

    def sbatch(self, name: str, *words: str, cwd: Path = ROOT, **variables: str) -> Job:
        log = self.folder / f"{name}.log"
        flags = ("--parsable", f"--output={log}")
        number = self.cluster.run("sbatch", *flags, *words, cwd=cwd, **variables)
        return Job(self.cluster, number.strip(), self.folder / name, log)

    def train(self, name: str, *words: str, flags: tuple[str, ...] = ()) -> Job:
        run_folder = f"--run_folder={self.folder / name}"
        return self.sbatch(name, *flags, "slurm/train.sbatch", str(self.config), run_folder, *words)

    def experiment(self, name: str) -> Job:
        """Four models at three lengths and two steps: one diverges, one is too flat to have
        targets; the caller disturbs the first two. Returns the training of the first."""
        base = json.loads(self.config.read_text())
        del base["run_folder"]
        changes: dict[str, dict] = {
            "rope": {"positions": {"scheme": "contiguous", "target_length": None}},
            "pose": {},
            "flat": {"optimizer": base["optimizer"] | {"learning_rate": 1e-12}},
            "bad": {"optimizer": base["optimizer"] | {"learning_rate": 1e30}},
        }
        for model, change in changes.items():
            (self.folder / f"{model}.json").write_text(json.dumps(base | change))
        measure = {
            **{"steps": [60, "last"], "long": [12, 16, 24], "short": 8, "stride": 8, "draws": 1},
            **{"ks": [1, 2], "selectors": ["random", "nearest"], "min_gap": 0.05, "halves": 0},
            **{"max_documents": 4, "targets": "own", "shards": 2},
        }
        file = {
            "folder": str(self.folder / name),
            "models": [f"{model}.json" for model in changes],
            "grid": {"seed": [3]},
            "measure": measure,
        }
        (self.folder / f"{name}.yaml").write_text(json.dumps(file))
        command = (sys.executable, "-m", "olmo_sparsity", "experiment")
        self.cluster.run(
            *(*command, str(self.folder / f"{name}.yaml"), "--max-jobs=3"),
            f"--slurm=--partition=low --output={self.folder}/{name}-%a.log",
            f"--measure-slurm=--output={self.folder}/{name}-measure-%A-%a.log",
        )
        numbers = json.loads((self.folder / name / "slurm.json").read_text())
        log = self.folder / f"{name}-0.log"
        return Job(self.cluster, numbers["rope"], self.folder / name / "rope", log)

    def pretend(self, name: str, script: str, *flags: str, **variables: str) -> Job:
        """train.sbatch, of a repository whose `olmo-sparsity` is this script of bash."""
        repository = self.folder / f"{name}-repository"
        program = repository / ".venv/bin/olmo-sparsity"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/bash\n{script}\n")
        program.chmod(0o755)
        (repository / "slurm").symlink_to(ROOT / "slurm")
        words = (*flags, "slurm/train.sbatch", "any.yaml")
        return self.sbatch(name, *words, cwd=repository, **variables)


# --- the scenarios --------------------------------------------------------------------------------

TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")


def undisturbed(bench: Bench) -> Job:
    return bench.train("undisturbed").end()


def stopped(bench: Bench) -> Job:
    """Preempted, cancelled."""
    job = bench.train("stopped", *FOREVER, flags=("--partition=low",))
    job.reach(20)
    urgent = bench.sbatch("urgent", "--partition=high", "--exclusive", "--wrap=true")
    assert urgent.end().fact("JobState") == "COMPLETED"
    job.go_on(start=2)
    bench.cluster.run("scancel", job.number)
    job.wait_for(lambda: job.log.count("ended by SLURM") == 2, "the job to save")
    return job.end()


def out_of_time(bench: Bench) -> Job:
    """Requeued by hand, out of time, cancelled. What a run does when it is told: `swept`."""
    traps = "trap 'kill $!; echo told; exit 75' USR2; trap 'kill $!; exit 75' TERM"
    # SLURM signals the `sleep` as well, at times first: its end must not end the script.
    endless = "while true; do sleep 1000 & wait; done"
    job = bench.pretend("out_of_time", f"{traps}; echo ready; {endless}", "--time=60")

    def start(number: int) -> None:
        job.wait_for(lambda: job.log.count("ready") == number, f"start {number}")

    start(1)
    bench.cluster.run("scontrol", "requeue", job.number)
    start(2)
    # SLURM looks every 30 s, and tells it when no more than 120 s are left.
    passed_s = time.time() - datetime.fromisoformat(job.fact("StartTime")).timestamp()
    minutes = int(passed_s) // 60 + 2
    bench.cluster.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes}")
    job.wait_for(lambda: job.fact("Restarts") == "2", "the job to be requeued")
    bench.cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    start(3)
    bench.cluster.run("scancel", job.number)
    job.wait_for(lambda: job.log.count("ended by SLURM") == 2, "the job to end")
    return job.end()


def saving_too_long(bench: Bench) -> Job:
    """Its time limit comes while it saves, and SLURM kills it."""
    script = "((SLURM_RESTART_COUNT > 0)) && exit 0; trap '' TERM USR2; exec sleep 1000"
    job = bench.pretend("saving_too_long", script, "--time=1")
    job.wait_for(lambda: job.fact("Restarts") == "1", "the job to be requeued")
    return job.end()


def losing(bench: Bench) -> Job:
    """A node with all that it runs, then only the daemon of a node."""
    flags = (*TWO_NODES, "--partition=doomed")

    def lose(job: Job, how: Callable[[str], None]) -> None:
        how("n4")
        job.wait_for(lambda: job.fact("JobState") == "PENDING", "the job to be requeued")
        bench.cluster.start_node("n4")

    script = "((SLURM_RESTART_COUNT > 0)) && exit 0; echo ready; exec sleep 1000"
    waiting = bench.pretend("waiting", script, *flags)
    waiting.wait_for(lambda: waiting.log.count("ready") == 2, "both tasks")
    lose(waiting, bench.cluster.lose_node)
    assert waiting.end().fact("JobState") == "COMPLETED"
    job = bench.train("losing", *FOREVER, flags=flags)

    def lose_daemon(node: str) -> None:
        """It hangs until SLURM has noticed: the steps of the run would take all cores."""
        bench.cluster.lose_daemon(node)
        bench.cluster.signal_steps(signal.SIGSTOP, node)
        job.wait_for(lambda: job.fact("JobState") != "RUNNING", "the loss to be noticed")
        bench.cluster.signal_steps(signal.SIGCONT, node)

    job.reach(35)
    lose(job, lose_daemon)
    job.go_on(start=2)
    bench.cluster.run("scancel", job.number)
    return job.end()


def stuck(bench: Bench) -> Job:
    """A task that hangs: the other one names it, and the job begins again without its node."""
    limits = ("--engine.step_timeout_s=10", "--engine.work_timeout_s=120")
    job = bench.train("stuck", *FOREVER, *limits, flags=(*TWO_NODES, "--partition=spare"))
    job.reach(35)
    (pid,) = tasks_of(job, rank=1)
    os.kill(pid, signal.SIGSTOP)
    job.go_on(start=2)
    job.reach(35)  # again
    bench.cluster.run("scancel", job.number)
    return job.end()


def accepted(bench: Bench) -> Job:
    device = ("--training.device=cpu", "--training.precision=fp32")
    words = ("slurm/accept.sbatch", str(bench.config), *device)
    variables = {
        "OLMO_SPARSITY_OUT": str(bench.folder / "accepted"),
        "OLMO_SPARSITY_ACCEPT_STEPS": "300",
        # Each start imports PyTorch on both nodes: all six engines take ten minutes of two cores.
        "OLMO_SPARSITY_ACCEPT_ENGINES": "fsdp fsdp_by_node",
        "OLMO_SPARSITY_LARGEST": "0.001",
        "OLMO_SPARSITY_MEASURE": " ".join(FEW),
    }
    return bench.sbatch("accepted", *TWO_NODES, *words, **variables).end(1100)


def tasks_of(job: Job, rank: int) -> list[int]:
    """The processes of a job's task that train."""
    found, wanted = [], {f"SLURM_JOB_ID={job.number}", f"SLURM_PROCID={rank}"}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = {*(process / "environ").read_bytes().decode(errors="replace").split("\0")}
            if (
                wanted <= variables
                and b"olmo-sparsity\0train" in (process / "cmdline").read_bytes()
            ):
                found.append(int(process.name))
    return found


def two_nodes(bench: Bench) -> Job:
    return bench.train("two_nodes", "--engine.name=zero2", flags=TWO_NODES).end()


def swept(bench: Bench) -> Job:
    grid = {"folder": f"{bench.folder}/swept", "models": ["config.yaml"]}
    grid |= {"grid": {"seed": [3, 2]}}
    (bench.folder / "grid.yaml").write_text(json.dumps(grid))
    command = (sys.executable, "-m", "olmo_sparsity", "experiment", f"{bench.folder}/grid.yaml")
    bench.cluster.run(*command, f"--slurm=--output={bench.folder}/swept-%a.log")
    array = re.search(r"(\d+)_0", (bench.folder / "swept/slurm.json").read_text())
    assert array is not None
    run_folder, log = bench.folder / "swept/config_seed3", bench.folder / "swept-0.log"
    # The last element has the number of the array, and its signals reach the others too.
    job = Job(bench.cluster, f"{array[1]}_0", run_folder, log)
    job.reach(20)
    bench.cluster.run("scancel", "--signal=USR2", job.number)
    # Of an array each element has its own state.
    job.wait_for(lambda: not bench.cluster.run("squeue", "-h", "-j", array[1]), "the end")
    return job


def crashing(bench: Bench) -> Job:
    """A job that crashes at once is not tried for ever. A restart that it asked for is no crash."""
    script = "((SLURM_RESTART_COUNT == 0)) && exit 75; exit 9"
    return bench.pretend("crashing", script, OLMO_SPARSITY_MAX_RESTARTS="1").end()


def leaving(bench: Bench) -> Job:
    """A task that crashes on one node, while the other says that it has lost it."""
    crash = '((SLURM_PROCID == 1)) && { echo "bad $SLURMD_NODENAME"; kill -SEGV $$; }'
    script = f"((SLURM_RESTART_COUNT > 0)) && exit 0; {crash}; sleep 1; exit 76"
    flags = (*TWO_NODES, "--partition=spare", "--exclude=n5")
    return bench.pretend("leaving", script, *flags).end()


def naming(bench: Bench) -> Job:
    """All tasks leave together: the weights on one node, which the first names, are wrong."""
    name_node = '((SLURM_PROCID)) || scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1'
    script = (
        f"((SLURM_RESTART_COUNT > 0)) && exit 0; {name_node} >>$OLMO_SPARSITY_SUSPECT; "
        f"sleep 1; exit {EXIT_FAULTY_NODE}"
    )
    return bench.pretend("naming", script, *TWO_NODES, "--partition=spare").end()


def staying(bench: Bench) -> Job:
    """The same, on a partition that has no other node."""
    script = "((SLURM_RESTART_COUNT > 0)) && exit 0; ((SLURM_PROCID)) && exit 9; sleep 1; exit 76"
    return bench.pretend("staying", script, *TWO_NODES).end()


def refusing(bench: Bench) -> Job:
    """The second task needs longer to say no: that is no crash."""
    return bench.pretend("refusing", "sleep $((3 * SLURM_PROCID)); exit 2", *TWO_NODES).end()


def experimented(bench: Bench) -> Job:
    """A training is killed, another preempted."""
    job = bench.experiment("experimented")
    job.reach(20)
    os.kill(job.starts()[-1]["pid"], signal.SIGKILL)
    numbers = json.loads((job.run_folder.parent / "slurm.json").read_text())
    log = job.log_path.with_name("experimented-1.log")
    other = Job(job.cluster, numbers["pose"], job.run_folder.with_name("pose"), log)
    other.reach(20)
    job.cluster.run("scontrol", "requeue", other.number)
    figure = Job(job.cluster, numbers["figure"], job.run_folder, job.log_path)
    figure.end(900)
    return job


def cancelled(bench: Bench) -> Job:
    """An experiment of which two trainings run, one waits, and all measurements wait for them."""
    job = bench.experiment("cancelled")
    job.reach(20)
    file = str(bench.folder / "cancelled.yaml")
    command = (sys.executable, "-m", "olmo_sparsity", "experiment", file, "--cancel")
    (bench.folder / "cancelled.txt").write_text(bench.cluster.run(*command))
    return job.end()


# --- all at once ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, data_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Scenario, Future[Job]]]:
    folder = tmp_path_factory.mktemp("slurm")
    config = small_run(folder / "run", data_section(data_folder))
    # Constant, so that runs of different lengths have the same curve.
    config["optimizer"] |= {"learning_rate": 1e-3, "schedule": "constant"}
    config["training"] |= {"num_steps": NUM_STEPS, "batch_size": 8, "micro_batch_size": 2}
    config["training"]["device"] = "cpu"
    config |= {"checkpoint": {"interval_steps": 20}, "logging": {"interval_steps": 5}}
    (folder / "config.yaml").write_text(json.dumps(config))
    asked = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = [call.params["job"] for call in asked if call is not None and "job" in call.params]
    longest = [
        scenario
        for scenario in (losing, out_of_time, experimented, cancelled, swept)
        if scenario in wanted
    ]
    with Cluster() as cluster, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        bench = Bench(cluster, folder / "config.yaml", folder, {})
        for scenario in dict.fromkeys([undisturbed, *longest, *wanted]):
            bench.jobs[scenario] = pool.submit(scenario, bench)
        yield bench.jobs


@pytest.fixture
def job(request: pytest.FixtureRequest, jobs: dict[Scenario, Future[Job]]) -> Job:
    return jobs[request.param].result()


@pytest.fixture
def expected(jobs: dict[Scenario, Future[Job]]) -> dict[int, float]:
    """The loss of every step of a run that nothing happened to."""
    losses = jobs[undisturbed].result().losses()
    assert list(losses) == list(range(1, NUM_STEPS + 1))
    return losses


def asks(scenario: Scenario) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("job", [scenario], indirect=True, ids=[scenario.__name__])


def as_far_as(job: Job, expected: dict[int, float]) -> dict[int, float]:
    """Of a job that was stopped for good, or has gone further."""
    losses = job.losses()
    assert list(losses) == list(range(1, len(losses) + 1))
    assert len(losses) > 30
    return {step: expected.get(step, loss) for step, loss in losses.items()}


# --- the tests ------------------------------------------------------------------------------------


@asks(undisturbed)
def test_a_job_says_what_it_runs_and_leaves_a_run_folder(job: Job) -> None:
    assert (job.fact("JobState"), job.fact("Restarts")) == ("COMPLETED", "0")
    (start,) = job.starts()
    assert f"job {job.number}, start 1 on n" in job.log
    assert f"code {start['commit']}" in job.log
    assert "olmo-sparsity 'train' " in job.log
    assert start["command"][-1] == f"--run_folder={job.run_folder}"


@asks(out_of_time)
def test_a_job_out_of_time_is_told_before_and_goes_on(job: Job) -> None:
    assert (job.fact("JobState"), job.fact("Restarts")) == ("CANCELLED", "2")
    assert job.log.count("told") == job.log.count("stopped when asked: requeued") == 1


@asks(saving_too_long)
def test_a_time_limit_that_comes_during_a_save_requeues(job: Job) -> None:
    assert job.fact("JobState") == "COMPLETED"
    assert "time limit while saving: requeued" in job.log


@asks(losing)
def test_the_loss_of_a_node_or_a_daemon(job: Job, expected: dict[int, float]) -> None:
    assert job.fact("Restarts") == "1"
    first, second = [start["resumed_at_step"] for start in job.starts()]
    assert first == 0
    assert second >= 20
    assert job.losses() == pytest.approx(as_far_as(job, expected), rel=1e-4)


@pytest.mark.timeout(1200)
@asks(accepted)
def test_the_acceptance_job_has_a_row_for_each_check(job: Job) -> None:
    page = (job.run_folder / "accept.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert [row[0].strip("| ") for row in rows if row[1] != "yes"] == [], page + job.log
    assert len(rows) == 19
    assert job.fact("JobState") == "COMPLETED"


@asks(stuck)
def test_a_job_of_which_a_task_hangs_names_it_and_goes_on(
    job: Job, expected: dict[int, float]
) -> None:
    assert job.fact("Restarts") == "1"
    named = re.search(r"engine\.step_timeout_s=10: process 1 on (n\d) did not come", job.log)
    assert named is not None
    assert f"{named[1]} failed: excluded from the next starts of this job" in job.log
    assert job.fact("ExcNodeList") == named[1]
    assert [path.name for path in (job.run_folder / "stacks").rglob("*.txt")] == [
        "process00000.txt"
    ]
    assert job.losses() == pytest.approx(as_far_as(job, expected), rel=1e-4)


@asks(leaving)
def test_a_requeued_job_leaves_the_node_at_which_it_crashed(job: Job) -> None:
    assert (job.fact("JobState"), job.fact("Restarts")) == ("COMPLETED", "1")
    bad = re.search(r"bad (n\d)", job.log)
    assert bad is not None
    assert f"{bad[1]} failed: excluded from the next starts" in job.log
    assert job.fact("ExcNodeList") == f"n5,{bad[1]}" or job.fact("ExcNodeList") == f"{bad[1]},n5"


@asks(naming)
def test_a_requeued_job_leaves_the_node_that_its_processes_have_named(job: Job) -> None:
    assert (job.fact("JobState"), job.fact("Restarts")) == ("COMPLETED", "1")
    excluded = job.fact("ExcNodeList")
    assert re.fullmatch(r"n[126]", excluded)
    assert f"{excluded} failed: excluded from the next starts" in job.log
    assert f"exit code {EXIT_FAULTY_NODE}: requeued" in job.log


@asks(staying)
def test_a_job_that_needs_all_nodes_leaves_none(job: Job) -> None:
    assert (job.fact("JobState"), job.fact("Restarts")) == ("COMPLETED", "1")
    assert job.fact("ExcNodeList") == "(null)"
    assert "and is not excluded: the partition has too few other nodes" in job.log


@asks(stopped)
def test_a_stopped_job_saves_and_goes_on_by_itself(job: Job, expected: dict[int, float]) -> None:
    first, second = job.starts()
    assert first["resumed_at_step"] == 0
    saved = f"SIGTERM: saved step {second['resumed_at_step']}; the same command goes on"
    assert saved in job.log
    assert f"job {job.number}, start 2 on n" in job.log
    # A cancelled job saves and stays away.
    assert (job.fact("JobState"), job.fact("Restarts")) == ("CANCELLED", "1")
    assert job.log.count("SIGTERM: saved step") == 2
    assert "requeued" not in job.log
    assert job.losses() == as_far_as(job, expected)


@asks(two_nodes)
def test_deepspeed_on_two_nodes(job: Job, expected: dict[int, float]) -> None:
    assert (job.fact("JobState"), job.fact("NumNodes")) == ("COMPLETED", "2")
    assert job.losses() == pytest.approx(expected, rel=1e-4)
    (start,) = job.starts()
    assert start["engine"]["class"] == "deepspeed.runtime.engine.DeepSpeedEngine"
    assert start["engine"]["optimizer"] == "DeepSpeedZeroOptimizer"
    assert (start["engine"]["name"], start["engine"]["world_size"]) == ("zero2", 2)


@asks(swept)
def test_a_grid_is_an_array(job: Job, expected: dict[int, float]) -> None:
    assert (job.fact("JobState"), job.fact("Restarts")) == ("COMPLETED", "1")
    runs = jobs_of(read_experiment(str(job.run_folder.parents[1] / "grid.yaml")))
    assert [run.name for run in runs] == ["config_seed3", "config_seed2"]
    assert [run.state().name for run in runs] == ["done", "done"]
    folders = [run.model.folder for run in runs if run.model is not None]
    assert folders[0] == job.run_folder
    starts = [json.loads((folder / "environment.json").read_text()) for folder in folders]
    assert list(map(len, starts)) == [2, 1]
    saved = job.starts()[1]["resumed_at_step"]
    assert f"SIGUSR2: saved step {saved}; the same command goes on" in job.log
    assert job.losses() == expected


ENDS = {
    crashing: ("FAILED", "2", "9:0", ["9: requeued", "9: not requeued after 1 restarts"]),
    refusing: ("FAILED", "0", "2:0", ["not requeued"]),
}


@pytest.mark.parametrize(
    ("job", "facts", "said"),
    [(scenario, facts, said) for scenario, (*facts, said) in ENDS.items()],
    indirect=["job"],
    ids=[scenario.__name__ for scenario in ENDS],
)
def test_what_becomes_of_a_job(job: Job, facts: list[str], said: list[str]) -> None:
    assert [job.fact(name) for name in ("JobState", "Restarts", "ExitCode")] == facts
    assert all(words in job.log for words in said)


@asks(experimented)
def test_an_experiment_draws_one_figure_whatever_becomes_of_its_jobs(job: Job) -> None:
    experiment = read_experiment(str(job.run_folder.parents[1] / "experimented.yaml"))
    assert experiment.figure.read_bytes().startswith(b"\x89PNG")
    states = {one.name: one.state() for one in jobs_of(experiment)}
    assert {states[name].name for name in ("rope", "pose", "flat")} == {"done"}
    assert "lower optimizer.learning_rate" in states["bad"].detail
    places = ("last-12", "last-16", "last-24", "60-24")
    for place in places:
        assert "its training failed" in states[f"bad-{place}"].detail
    # Which of the others have targets depends on how far models this small have come.
    others = [states[f"{model}-{place}"] for model in ("rope", "pose", "flat") for place in places]
    without_targets = [state for state in others if state.name == "failed"]
    assert 0 < len(without_targets) < len(others)
    for state in without_targets:
        assert "no target has a gap large enough" in state.detail


@asks(cancelled)
def test_a_cancelled_experiment_saves_and_starts_nothing_else(job: Job) -> None:
    folder = job.run_folder.parent
    said = folder.with_name("cancelled.txt").read_text()
    assert said.startswith("cancelled: rope, ")
    assert said.endswith(", figure; the same line with --slurm goes on\n")
    numbers = json.loads((folder / "slurm.json").read_text())
    in_queue = f"--jobs={','.join(numbers.values())}"
    job.wait_for(lambda: not job.cluster.run("squeue", "-h", in_queue), "an empty queue")
    assert "SIGTERM: saved step" in job.log
    assert not (folder / "measured").exists()


@pytest.fixture(scope="module")
def whole(jobs: dict[Scenario, Future[Job]]) -> Results:
    """What a measurement by one process gives."""
    run = str(jobs[undisturbed].result().run_folder)
    assert main(["measure", run, "--out", f"{run}-whole", *FEW]) == 0
    return read_results(f"{run}-whole")


def assert_same(found: Results, whole: Results) -> None:
    for name in ("losses", "tokens", "influence", "recovery", "costs", "summary"):
        # Other numbers of threads round otherwise, and a KL may be next to nothing.
        pd.testing.assert_frame_equal(getattr(whole, name), getattr(found, name), atol=1e-5)


# --- docs/train.md -------------------------------------------------------------------------------

COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(
        r"```bash\n(.*?)```", (ROOT / "docs/train.md").read_text(), flags=re.DOTALL
    )
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith(("sbatch", "squeue")) or "--slurm" in line
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_commands_of_the_pages(
    words: list[str], jobs: dict[Scenario, Future[Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM's own are submitted for a test, and a model of an experiment as ours submits it."""
    monkeypatch.chdir(ROOT)
    cluster = jobs[undisturbed].result().cluster
    if words[0] == "olmo-sparsity":
        options, overrides = build_parser().parse_known_args(words[1:])
        array = ("--array=0", "slurm/train.sbatch", options.config, *overrides)
        words = ["sbatch", *shlex.split(options.slurm), *array]
    if words[0] == "sbatch":
        cluster.run("sbatch", "--test-only", *words[1:], SBATCH_PARTITION="pair")
    else:
        cluster.run(*words)
