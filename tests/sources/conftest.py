from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def questions(tmp_path: Path) -> Callable[[Any], Path]:
    """Write a file of one question that expects this, and return its path."""

    def write_questions(expect: Any) -> Path:
        path = tmp_path / "q.jsonl"
        path.write_text(json.dumps({"sources": {}, "question": "q", "expect": expect}))
        return path

    return write_questions
