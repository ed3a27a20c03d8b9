"""Lines of C4, and processes that read corpora."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def c4_line(text: str) -> bytes:
    row = {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"}
    return json.dumps(row).encode() + b"\n"


def run(code: str, *arguments: str, **environment: str) -> str:
    """What a process of its own prints."""
    code = (
        "from olmo_sparsity.analysis.inputs import corpus, records\n"
        "from olmo_sparsity.errors import DataError\n"
    ) + code
    command, env = [sys.executable, "-c", code, *arguments], os.environ | environment
    return subprocess.run(
        command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=60
    ).stdout
