"""Estimate what failures add to the hours of a run: work that is done again, and starts.

    failures_of(config, hardware, time)    # 6.7B on 64 H100s, 557 GPU-hours
    # Failures(num=0.011, lost_s=296, start_s=460, hours=8.704, gpu_hours=557.03)

How often GPUs fail is an option of the dry run (`Hardware.gpu_hours_per_failure`). A crash, a hang
and a node that is lost count alike. Failures while work is done again are not counted, nor is the
time that a job waits in the queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.training.estimate.cost import RunTime
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.host import checkpoint_bytes

SECONDS_TO_START = 300.0
"""Seconds from a failure to the first step of the next start, without those in which it reads the
checkpoint: to notice the failure, to requeue the job, to import, to meet and to compile. Assumed,
not measured."""

CHECKPOINT_READS = 2
"""How often a start reads its checkpoint: to hash it, and to load it."""


@dataclass(frozen=True)
class Failures:
    """What failures are expected to cost a run."""

    num: float
    """How many failures are expected in the hours of the run."""

    lost_s: float
    """Seconds of work that each of them loses: half of the time between two saves."""

    start_s: float
    """Seconds that each takes until the next start trains."""

    hours: float
    """Hours of the run, with these."""

    gpu_hours: float
    """These hours, times the number of GPUs."""


def failures_of(config: RunConfig, hardware: Hardware, time: RunTime) -> Failures:
    """Return what failures are expected to cost a run. `time`: its time without any."""
    num = time.gpu_hours / hardware.gpu_hours_per_failure
    # A failure comes at any time between two saves alike.
    lost_s = 3600 * time.hours / time.pauses.num_saves / 2
    read_bytes = CHECKPOINT_READS * checkpoint_bytes(config)
    start_s = SECONDS_TO_START + read_bytes / hardware.disk_bytes_per_s
    hours = time.hours + num * (lost_s + start_s) / 3600
    return Failures(num, lost_s, start_s, hours, gpu_hours=hours * hardware.num_processes)
