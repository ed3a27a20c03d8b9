"""A real SLURM on this machine: private configuration, key and ports; always stopped.

Nothing outside its own folder is touched, so it neither needs nor disturbs an installed cluster.
It needs no systemd and no /etc/munge; every daemon runs as whoever runs the tests.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

PARTITIONS = """\
PartitionName=pair Nodes=n[1-2] Default=YES
PartitionName=doomed Nodes=n[3-4]
PartitionName=low Nodes=n5 PriorityTier=1
PartitionName=high Nodes=n5 PriorityTier=2
PartitionName=spare Nodes=n[1-2,6]
"""
ROOT = Path(__file__).parents[2]
NODES = [f"n{number}" for number in range(1, 7)]

# Requeued jobs wait for their old credential to expire, and a lost node for its time-out: both are
# minutes by default and seconds here. Nodes claim more cores than there are: tests wait, not race.
CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,defer_batch
SelectType=select/cons_tres
GresTypes=gpu
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
FirstJobId={first_job}
SlurmdTimeout=5
MessageTimeout=3
TCPTimeout=1
KillWait=60
MinJobAge=600
NodeName=n[1-{num_nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] \\
  CPUs=64 RealMemory=500000 Gres=gpu:8
"""


class Cluster:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
        } | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen] = {}
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        self.folder.chmod(0o711)  # munged wants everybody to reach its socket
        (self.folder / "state").mkdir()
        host = socket.gethostname().split(".")[0]
        controller, *ports = _free_ports(1 + len(NODES))
        (self.folder / "slurm.conf").write_text(
            CONFIG.format(
                folder=self.folder,
                host=host,
                user=getpass.getuser(),
                controller_port=controller,
                ports=",".join(map(str, ports)),
                num_nodes=len(NODES),
                # Jobs meet at a port that follows from it, none of those that the kernel hands out.
                first_job=random.randrange(10_000, 32_000),
            )
            + PARTITIONS
        )
        for gpu in range(8):  # in name only
            (self.folder / f"gpu{gpu}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._launch(
            *("munged", "--foreground", "--force"),
            *(f"--key-file={key}", f"--socket={self.folder}/munge.socket"),
            *(f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munged.seed"),
            name="munged",
        )
        self.wait_for(lambda: (self.folder / "munge.socket").exists(), "munged to listen")
        self._launch("slurmctld", "-D", "-c", name="slurmctld")
        for node in NODES:
            self.start_node(node)
        self.wait_for_nodes()

    def start_node(self, node: str) -> None:
        self._launch("slurmd", "-D", "-N", node, name=node)

    def lose_daemon(self, node: str) -> None:
        """What runs on the node goes on, but SLURM hears nothing of it any more."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def lose_node(self, node: str) -> None:
        """Its daemon and all that it runs die at once, as if the power had gone."""
        self.lose_daemon(node)
        self.signal_steps(signal.SIGKILL, node)

    def signal_steps(self, number: signal.Signals, *nodes: str) -> None:
        """Send a signal to all that runs on these nodes, but to no daemon."""
        logs = {str(self.folder / f"slurmd.{node}.log") for node in nodes}
        children, found = defaultdict(list), []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                status = process.joinpath("stat").read_text().rpartition(")")[2].split()
                children[int(status[1])].append(int(process.name))
                # slurmstepd, which starts a step's processes, logs into its daemon's file.
                if any(os.path.realpath(fd) in logs for fd in process.glob("fd/*")):
                    found.append(int(process.name))
        for pid in found:  # grows: a step's processes, and theirs
            found += [child for child in children[pid] if child not in found]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait_for_nodes(self) -> None:
        def ready() -> bool:
            try:
                return set(self.run("sinfo", "-h", "-o", "%T").split()) == {"idle"}
            except subprocess.CalledProcessError:
                return False

        self.wait_for(ready, "all nodes to be idle")

    def run(self, *command: str, cwd: Path = ROOT, **variables: str) -> str:
        """A SLURM command; what it prints."""
        return subprocess.run(
            command,
            cwd=cwd,
            env=self.environment | variables,
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            timeout=120,
        ).stdout

    def wait_for(self, holds: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            for name, daemon in list(self.daemons.items()):
                # Another thread may have taken it down since the list was made.
                if daemon.poll() is not None and self.daemons.get(name) is daemon:
                    raise RuntimeError(f"{name} has left with {daemon.returncode}:\n{self.logs()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s} s for {what}\n{self.logs()}")
            time.sleep(0.4)

    def logs(self) -> str:
        """The ends of the daemons' logs, for a failure's message."""
        return "\n".join(
            f"--- {name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:])
            for name in self.daemons
            if (path := self.folder / f"{name}.out.log").exists() and not name.startswith("n")
        )

    def stop(self) -> None:
        if "slurmctld" in self.daemons and self.daemons["slurmctld"].poll() is None:
            with contextlib.suppress(subprocess.SubprocessError, OSError):
                self.run("scancel", f"--user={getpass.getuser()}")
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.signal_steps(signal.SIGKILL, *NODES)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _launch(self, *command: str, name: str) -> None:
        with (self.folder / f"{name}.out.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                ("setpriv", "--pdeathsig", "TERM", *command),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
