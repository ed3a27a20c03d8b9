"""Turn results into values that JSON can hold.

    to_json_value({"loss": np.float32(2.5), "low": nan, "path": Path("out")})
    {"loss": 2.5, "low": None, "path": "out"}

Never imports torch.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from olmo_sparsity.base.files import write_atomically


def to_json_value(value: Any) -> Any:
    """Convert arrays, NumPy numbers, tuples and paths to what JSON can hold. NaN and infinities
    become null, as JSON has no word for them."""
    if isinstance(value, dict):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return to_json_value(value.tolist())
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    # `json` would write NaN, which other readers of JSON refuse.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def write_as_json(path: Path, value: Any) -> None:
    """Write a JSON file, atomically, of a value that may hold arrays, NaN and paths."""
    text = json.dumps(to_json_value(value), ensure_ascii=False, indent=2)
    write_atomically(path, text + "\n")
