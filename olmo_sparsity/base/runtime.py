"""The process and its machine: launcher, device, versions, progress.

Imports nothing of ours but errors, and torch only inside functions."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmo_sparsity.base.errors import ConfigError, printable

if TYPE_CHECKING:
    import torch

EXIT_STOPPED = 75
"""A signal has stopped a command; the same command resumes."""

EXIT_LOST_PROCESS = 76
"""Another process of the run died or did not come; the same command resumes."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


# --- the launcher ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine, and the number of its GPU."""

    local_world_size: int = 1
    """Processes on this machine."""


def read_launch() -> Launch:
    """Read what `torchrun`, `deepspeed` or a bare `srun` set; without any, rank 0 of 1."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if any(name in os.environ for name in names[:2]):
        missing = [name for name in names[:2] if name not in os.environ]
        if missing:
            raise ConfigError(f"the launcher sets some of {', '.join(names)}, but not {missing[0]}")
        rank, world_size = _number("RANK"), _number("WORLD_SIZE")
        # Launchers that leave these two out start one process per machine. DeepSpeed's sets
        # LOCAL_SIZE.
        local_rank = _number("LOCAL_RANK", 0)
        local_size = max(_number("LOCAL_SIZE", 1), local_rank + 1)
        launch = Launch(rank, world_size, local_rank, _number("LOCAL_WORLD_SIZE", local_size))
    elif "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:  # inside srun, not sbatch
        # 2(x3),1: two tasks on each of three nodes, one on the fourth.
        groups = re.findall(
            r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
        )
        per_node = [int(tasks) for tasks, times in groups for _ in range(int(times or 1))]
        launch = Launch(
            _number("SLURM_PROCID"),
            _number("SLURM_STEP_NUM_TASKS", _number("SLURM_NTASKS", 1)),
            _number("SLURM_LOCALID", 0),
            per_node[_number("SLURM_NODEID", 0)],
        )
    else:
        launch = Launch()
    if not 0 <= launch.rank < launch.world_size:
        raise ConfigError(f"RANK={launch.rank} must be below WORLD_SIZE={launch.world_size}")
    return launch


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name}={text} in the environment must be a whole number") from None


@contextlib.contextmanager
def handling(signals: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Inside, `handler` gets these signals."""
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


# --- devices --------------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def choose_device(
    name: str, own_gpu: Callable[[int], int] | None = None, setting: str = "device"
) -> torch.device:
    """A GPU always has its index: torch.cuda.set_device rejects a device without. `own_gpu`: of so
    many GPUs, the one of this process; by default, processes may share them."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        # Launchers make all GPUs of the machine visible to a process, or only its own.
        seen = torch.cuda.device_count()
        name = f"cuda:{own_gpu(seen) if own_gpu else read_launch().local_rank % seen}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{setting}={name} cannot be used ({reason}); try cpu") from None
    return device


PCIE_GIGABYTES_PER_S = 20.0
"""What a GPU without NVLink sends to another one of its machine."""


@dataclass(frozen=True)
class Gpu:
    name: str
    tflops: float
    """Dense bf16, from the data sheet."""

    gigabytes: float
    gigabytes_per_s: float = PCIE_GIGABYTES_PER_S
    """What one of several GPUs of a machine sends to the next in a ring, about two thirds of
    NVLink's data sheet: assumed."""

    has_own_nic: bool = False
    """Whether machines usually have a network card for each of these GPUs: assumed."""


# Of names with a common beginning the longer one comes first.
GPUS = [
    Gpu("GB200", 2500, 186, 600, has_own_nic=True),
    Gpu("B200", 2250, 180, 600, has_own_nic=True),
    Gpu("GH200", 989, 96, 300, has_own_nic=True),
    Gpu("H200 NVL", 835, 141),
    Gpu("H200", 989, 141, 300, has_own_nic=True),
    Gpu("H100 PCIe", 756, 80),
    Gpu("H100 NVL", 835, 94),
    Gpu("H100", 989, 80, 300, has_own_nic=True),
    Gpu("H800 PCIe", 756, 80),
    Gpu("H800", 989, 80, 130, has_own_nic=True),
    Gpu("A100 40GB PCIe", 312, 40),
    Gpu("A100 40GB", 312, 40, 200, has_own_nic=True),
    Gpu("A100 PCIe", 312, 80),
    Gpu("A100", 312, 80, 200, has_own_nic=True),
    Gpu("A800", 312, 80, 130, has_own_nic=True),
    Gpu("A30", 165, 24),
    Gpu("A40", 150, 48),
    Gpu("A10", 125, 24),
    Gpu("L40S", 362, 48),
    Gpu("L40", 181, 48),
    Gpu("L4", 121, 24),
]


def find_gpu(device_name: str) -> Gpu | None:
    """None if unknown, or for a slice of a GPU (MIG). The memory of an A100 may be 40 or 40GB."""
    words = set(re.split(r"\W+", device_name.upper()))
    words |= {f"{word}GB" for word in words if word.isdigit()}
    known = (gpu for gpu in GPUS if words >= set(gpu.name.upper().split()))
    return None if "MIG" in words else next(known, None)


def known_gpu(name: str, option: str) -> Gpu:
    if (gpu := find_gpu(name)) is None:
        raise ConfigError(f"{option}={name} must be one of {', '.join(one.name for one in GPUS)}")
    sizes = re.findall(r"\b(\d+)(?:GB)?\b", name.upper())
    if sizes and int(sizes[0]) != gpu.gigabytes:
        raise ConfigError(f"{option}={name}: {gpu.name} has {gpu.gigabytes:.0f} GB")
    return gpu


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices of this dtype are multiplied in hardware. A CPU that does not takes 6 to 50
    times as long as with fp32."""
    import torch

    if device.type == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported()
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    # PyTorch's names. Names of ARM are left out: whether it uses them differs between systems.
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    abilities: dict = getattr(torch.cpu, "get_capabilities", dict)()
    return any(abilities.get(f"{unit}_{kind}") for unit in ("avx512", "amx"))


def release_freed_memory() -> None:
    """Return freed main memory to the system, which glibc's heap keeps in holes that tensors of
    another length do not fit."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries lack it
        ctypes.CDLL(None).malloc_trim(0)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process so far: on the GPU, or main memory without one."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # in KiB on Linux


SMALL = 2 * 10**6
"""Parameters. Threads of smaller models mostly wait for each other: next to other work a model of
0.56M took seven times the CPU time with two threads."""


@contextlib.contextmanager
def threads_for(num_parameters: int) -> Iterator[None]:
    """One thread for a small model on the CPU, unless OMP_NUM_THREADS says how many."""
    import torch

    before = torch.get_num_threads()
    if num_parameters >= SMALL or before == 1 or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- versions -------------------------------------------------------------------------------------


PACKAGES = (
    *("olmo-sparsity", "ai2-olmo", "torch", "numpy", "transformers", "datasets", "tokenizers"),
    *("deepspeed", "accelerate"),
)


def typed_command() -> list[str]:
    """The command line, without the installation path of this program."""
    program = Path(sys.argv[0])
    ours = program.name in ("olmo-sparsity", "__main__.py")
    return ["olmo-sparsity" if ours else sys.argv[0], *sys.argv[1:]]


def provenance(device: str) -> dict[str, Any]:
    """Commit, package versions and machine; `device`: what it ran on."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {device}"
    return {"commit": code_version(), "versions": versions(), "machine": machine}


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def versions_of_numbers() -> dict[str, str | None]:
    """Return the versions of packages that numbers may depend on."""
    return {name: _version(name) for name in ("olmo-sparsity", "torch", "transformers")}


def code_version(folder: Path = Path(__file__).parents[2]) -> str | None:
    """The commit of the running code, marked -dirty if it has uncommitted changes outside docs/,
    which results are written to. If the folder is not a clone (a repository around it is another),
    the commit that a container was built from, or None."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        if not folder.samefile(git("rev-parse", "--show-toplevel")):
            return _image_commit()
        commit = git("describe", "--always", "--abbrev=40")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return _image_commit()
    return f"{commit}-dirty" if changed else commit


def _image_commit() -> str | None:
    """Set by containers/."""
    commit = os.environ.get("OLMO_SPARSITY_COMMIT", "unknown")
    return None if commit == "unknown" else commit


def _version(name: str) -> str | None:
    if name == "torch" and name in sys.modules:
        return str(sys.modules[name].__version__)  # names the CUDA it was built for, too
    return _installed(name)


@cache
def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- progress -------------------------------------------------------------------------------------


class Progress:
    """with Progress("training", total=1000, unit="steps") as progress:
    progress.update(10, loss="3.21")"""

    LOG_EVERY_S = 30.0

    def __init__(self, title: str, total: int | None, unit: str, *, enabled: bool = True) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.enabled = enabled
        self.done = self.done_at_start = 0
        self.live = sys.stderr.isatty()
        self.pause_s = 0.1 if self.live else self.LOG_EVERY_S
        self.started = time.perf_counter()
        self.shown_at = -float("inf") if self.live else self.started
        self.text = ""

    def __enter__(self) -> Progress:
        return self

    def resume_at(self, done: int) -> None:
        """Progress of an earlier run: shown as done, not counted in the rate."""
        self.done = self.done_at_start = done

    def update(self, done: int, **values: str) -> None:
        self.done = done
        now = time.perf_counter()
        fresh = done - self.done_at_start
        rate = fresh / (now - self.started) if now > self.started else 0.0
        of_total = f"/{self.total:,}" if self.total else ""
        parts = [self.title, f"{done:,}{of_total} {self.unit}"]
        parts += [f"{name.replace('_', ' ')} {value}" for name, value in values.items()]
        left = ""
        if rate > 0:
            parts.append(f"{rate:,{'.3g' if rate < 1e3 else '.0f'}} {self.unit}/s")
            if self.total and done < self.total:
                left = f" · {format_duration((self.total - done) / rate)} left"
        self.text = printable(" · ".join(parts))
        if now - self.shown_at >= self.pause_s:
            self.shown_at = now
            self._show(self.text + left)

    def note(self, message: str) -> None:
        """Print a line that stays."""
        self._show(printable(message), stays=True)

    def _show(self, text: str, stays: bool = False) -> None:
        """Print a line; on a terminal, one that the next replaces."""
        if not self.enabled:
            return
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            text = "\r\x1b[K" + (text if stays else text[:width])
        print(text, end="" if self.live and not stays else "\n", file=sys.stderr, flush=True)

    def __exit__(self, kind: object, *_: object) -> None:
        if self.text:
            took = format_duration(time.perf_counter() - self.started)
            self._show(f"{self.text} · {'stopped' if kind else 'done'} in {took}", stays=True)


def say(message: str) -> None:
    """Print a message to stderr; stdout is for results."""
    print(printable(message), file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
