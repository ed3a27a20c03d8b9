"""Store the losses of finished checkpoints, so that the same call does not compute them again.

    store = StoredLosses.open(Path("out"), identity)    # out/identity.json, out/checkpoints/
    store.read(checkpoint)                              # None: its losses are not stored yet
    store.write(checkpoint, rows)

losses_by_place.py calls it, if it has a folder for the losses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.scoring.checkpoints import CheckpointToRead
from olmo_sparsity.base.work_folder import Pieces, WorkFolder


@dataclass(frozen=True)
class StoredLosses:
    """The folder with the rows of finished checkpoints."""

    pieces: Pieces
    identity: str
    """What all checkpoints share: text, tokenizer and settings."""

    @staticmethod
    def open(out: Path, identity: dict[str, Any]) -> StoredLosses:
        """Create the folder `out`, or open it. Raise ConfigError if its identity is another one."""
        work = WorkFolder(out, "out", "identity.json", own_key="text")
        work.create("checkpoints")
        work.identify(identity)
        return StoredLosses(Pieces(work.path / "checkpoints"), json.dumps(identity))

    def read(self, checkpoint: CheckpointToRead) -> pd.DataFrame | None:
        """Return the rows of a checkpoint that an earlier call has stored; None if there are none,
        or if its files have changed."""
        stored = self.pieces.read(self._name_of(checkpoint), self.identity + checkpoint.files)
        return pd.DataFrame(stored["rows"]) if stored else None

    def write(self, checkpoint: CheckpointToRead, rows: pd.DataFrame) -> None:
        """Store the rows of a checkpoint."""
        content = {"rows": rows.to_dict("records")}
        self.pieces.write(self._name_of(checkpoint), self.identity + checkpoint.files, content)

    def _name_of(self, checkpoint: CheckpointToRead) -> str:
        """Return the name under which the rows of a checkpoint are stored. It is a hash, as the
        name of a run may hold slashes."""
        return sha256(f"{checkpoint.name} {checkpoint.step}".encode()).hexdigest()[:16]
