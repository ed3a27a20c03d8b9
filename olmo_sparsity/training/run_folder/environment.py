"""Note on what each start of a run ran: `environment.json` of the run folder.

    [{"started": "2026-03-01T12:00:00+0000", "resumed_at_step": 0, "commit": "58c06bfa…", …},
     {"started": "2026-03-01T14:10:00+0000", "resumed_at_step": 300, …}]

restore.py adds an entry for each start. checkpoints/resume.py asks for the last step at which one
resumed: a run has saved it, even if no checkpoint is there any more.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmo_sparsity.base.devices import device_name
from olmo_sparsity.base.errors import DataError, UnreadableNowError
from olmo_sparsity.base.files import read_json, write_json
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.provenance import provenance, typed_command
from olmo_sparsity.base.retry import may_pass, retry

if TYPE_CHECKING:
    import torch

FILE_NAME = "environment.json"


def add_start(
    run_folder: Path, engine: dict[str, Any], device: torch.device, resumed_at: int
) -> str:
    """Add an entry for this start. Return a line if its code is another one than that of the last
    start, as a requeued job runs what the clone has by then; otherwise an empty text.

    Args:
        engine: What `Engine.describe` returns.
        resumed_at: The step from which the start goes on.
    """
    import torch

    path = run_folder / FILE_NAME
    try:
        earlier_starts = retry(lambda: _read_starts(path), may_pass, say)
    except DataError as error:
        # Only a note, which must not stop a run. It is kept, as one that cannot be read may be
        # intact.
        kept = path.with_name(f"{FILE_NAME}.damaged")
        path.replace(kept)
        what = "" if isinstance(error, UnreadableNowError) else ": the file is damaged"
        say(f"{error.problem}{what}; it is now {kept}, and a new one begins")
        earlier_starts = []
    this_start = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "resumed_at_step": resumed_at,
        "command": typed_command(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "engine": engine,
        "num_threads": torch.get_num_threads(),
        **provenance(device_name(device)),
    }
    # Written anew as a whole, which is atomic: a run has few starts.
    write_json(path, [*earlier_starts, this_start])

    commit = this_start["commit"]
    last_commit = earlier_starts[-1].get("commit") if earlier_starts else None
    # A commit is not known outside of a clone.
    if commit is None or last_commit in (None, commit):
        return ""
    return f"the code is commit {commit}; the last start of this run ran {last_commit}"


def has_started(run_folder: Path) -> bool:
    """Return whether a start of this run has come as far as its first step."""
    return (run_folder / FILE_NAME).exists()


def resumed_steps(run_folder: Path) -> list[int]:
    """Return the step from which each start went on, the first start first; nothing if the file is
    damaged. Raise UnreadableNowError if it cannot be read now."""
    try:
        starts = _read_starts(run_folder / FILE_NAME)
    except UnreadableNowError:
        raise
    except DataError:  # `add_start` says so
        return []
    return [int(start.get("resumed_at_step", 0)) for start in starts]


def _read_starts(path: Path) -> list[dict]:
    """Return the entries of all starts, the first one first. Raise DataError if the file is
    damaged, and UnreadableNowError if it cannot be read now."""
    if not path.exists():
        return []
    return read_json(path, list[dict], "")
