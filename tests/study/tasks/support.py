"""A comparison of schemes in seconds, and its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from study.tasks.settings import ExperimentSettings, load_settings
from tests.conftest import small_task


def write(given: dict[str, Any], folder: Path) -> Path:
    path = folder / "task.yaml"
    path.write_text(json.dumps(given))
    return path


def make(folder: Path, *overrides: str, **changes: Any) -> ExperimentSettings:
    return load_settings(write(small_task(folder / "run") | changes, folder), list(overrides))
