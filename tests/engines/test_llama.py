"""llama.cpp in this process and behind a real server, with SmolLM2: `make test-engines` alone.

vLLM and SGLang are not here: their requests and replies are tried as documented, on the server of
tests/support/fake_server.py, and not against real ones.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_sparsity import attribute, load_model
from olmo_sparsity.analysis.engines.server import Servers
from olmo_sparsity.analysis.kernels.engine import Prompt
from olmo_sparsity.analysis.models.smollm2 import find_smollm2_gguf
from olmo_sparsity.analysis.scoring.logprobs import ModelLogprobs
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.errors import DataError

pytest.importorskip("llama_cpp", reason="make test-engines")
SERVER = os.environ.get("LLAMA_SERVER", "")
"""examples/server/server.py of llama-cpp-python, or llama.cpp's own llama-server."""

TEXTS = {
    "bridge.txt": "The bridge over the Elm was opened in 1921 by Katharina Weissenborn.",
    "mill.txt": "The mill at the lake has four wheels and grinds rye for two villages.",
}
DECOYS = [
    "The school in the valley teaches ninety children in three rooms.",
    "A ferry leaves the northern quay at noon and returns before dusk.",
    "The baker sells loaves of barley on Tuesdays, and cakes on Fridays.",
    "The tower was painted white after the great storm of that winter.",
    "Two brothers from the coast built the first boats with iron keels.",
    "The library lends books for a month, and maps for a single week.",
]
GIVEN: dict[str, Any] = {
    "sources": TEXTS,
    "question": "Who opened the bridge?",
    "answer": ["The bridge was opened by Katharina Weissenborn."],
    "decoys": DECOYS,
    "prefix": "\n",
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return load_model("llama:smollm2")


def prompts(model: Any) -> list[Prompt]:
    texts = ["\nThe capital of France is", "\nThe capital of France, as we know, is the city of"]
    after = np.array(model.encode([" Paris, on the Seine."])[0])
    return [Prompt(np.array(ids), after) for ids in model.encode(texts)]


def test_numbers_are_near_those_of_transformers(llama: Any) -> None:
    asked = prompts(llama)
    here = llama.model.score(asked)
    reference = ModelLogprobs(Scorer(load_model("smollm2", dtype="fp32").model)).score(asked)
    for own, other in zip(here, reference, strict=True):
        # llama.cpp rounds activations to 8 bits.
        assert np.abs(own - other).mean() < 0.2
        assert abs(own.sum() - other.sum()) < 1.0


def test_what_prompts_share_changes_no_number(llama: Any) -> None:
    asked = prompts(llama)
    together = llama.model.score(asked)
    for prompt, own in zip(asked, together, strict=True):
        np.testing.assert_allclose(llama.model.score([prompt])[0], own, atol=1e-4)


def test_the_source_is_named(llama: Any) -> None:
    found = attribute(llama, **GIVEN)
    assert found.relies_on("bridge.txt")
    assert attribute(llama, **GIVEN).statements.equals(found.statements)
    made = attribute(llama, **GIVEN | {"answer": None, "max_new_tokens": 8})
    assert made.layout.block.num_targets <= 8


@contextmanager
def started(*words: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model, script = str(find_smollm2_gguf()), Path(__file__).with_name("llama_server.py")
    command = [sys.executable, str(script), SERVER, model, str(port), *words]
    if not SERVER.endswith(".py"):
        command = [SERVER, "-m", model, "--port", str(port), "-np", "1", "-t", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            assert process.poll() is None, "the server has ended"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=1):
                    break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


needs_server = pytest.mark.skipif(not SERVER, reason="LLAMA_SERVER names no server")


@needs_server
def test_verdicts_over_http_are_those_in_this_process(llama: Any) -> None:
    with started() as url, started() as other:
        remote = load_model(f"{url},{other}", tokenizer="smollm2")
        there, here = attribute(remote, **GIVEN), attribute(llama, **GIVEN)
        assert there.statements.sources.equals(here.statements.sources)
        np.testing.assert_allclose(there.matrix.gives, here.matrix.gives, atol=1.0)


@pytest.mark.skipif(not SERVER.endswith(".py"), reason="LLAMA_SERVER is not the example")
def test_a_server_that_returns_too_few_tokens_is_noticed(llama: Any) -> None:
    """As the example of llama-cpp-python 0.3.36 does for what prompts share."""
    with started("--unchanged") as url, pytest.raises(DataError, match=url):
        Servers([url], llama.tokenizer, timeout_s=20, patience_s=5)
