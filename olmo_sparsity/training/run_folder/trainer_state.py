"""Read what a checkpoint holds besides weights and the state of the optimizer: `trainer.json`.

    {"step": 300, "tokens": 9830400, "data_fingerprint": "5e1f…", "metrics_crc32": "a1b2c3d4",
     "recent": [], "num_skipped": 0, "skipped_batches": []}

after_step/save.py makes a `TrainerState` for each save, restore.py reads that of the checkpoint
from which a run goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from olmo_sparsity.base.files import read_json

STATE_FILE = "trainer.json"

ENGINE_FOLDER = "engine"
"""Name of the folder of a checkpoint that has the state of the optimizer."""


@dataclass
class TrainerState:
    """The content of `trainer.json`."""

    step: int
    """The last step that was taken."""

    tokens: int
    """The tokens of all steps so far."""

    data_fingerprint: str
    """The hash of the training text, which a resumed run must read, too."""

    metrics_crc32: str | None = None
    """CRC of this step's line of metrics.jsonl, by which a file of another run is noticed."""

    recent: list[list[float]] = field(default_factory=list)
    """Loss and gradient norm of the last steps, for `optimizer.skip_sigmas`."""

    num_skipped: int = 0
    """How many updates `optimizer.skip_sigmas` has skipped."""

    skipped_batches: list[int] = field(default_factory=list)
    """Numbers of the batches that are left out (`training.on_nan=skip`), from 0."""

    @staticmethod
    def read(folder: Path) -> TrainerState:
        """Return the state in a checkpoint folder."""
        return read_json(folder / STATE_FILE, TrainerState, "use another checkpoint")
