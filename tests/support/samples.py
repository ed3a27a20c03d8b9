"""Samples of any task."""

from __future__ import annotations

from typing import Any

import numpy as np

from olmo_sparsity.tasks.samples import Task


def draw(task: Task, num: int = 200, length: int = 12, seed: int = 0, k: Any = None) -> Any:
    return task.sample(np.random.default_rng(seed), num, length, k)
