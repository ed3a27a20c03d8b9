"""llama.cpp in this process and behind a real server, and vLLM, with SmolLM2: `make test-engines`.

SGLang is not here: its requests and replies are tried as documented, on the server of
tests/support/fake_server.py, and not against a real one.
"""

from __future__ import annotations

import os
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
from olmo_sparsity.analysis.scoring.logprobs import ModelLogprobs
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.models.gguf.smollm2 import find_smollm2_gguf
from olmo_sparsity.models.prompts import Prompt
from olmo_sparsity.sources.servers.pool import Servers

SERVER = os.environ.get("LLAMA_SERVER", "")
"""examples/server/server.py of llama-cpp-python, or llama.cpp's own llama-server."""

VLLM = os.environ.get("VLLM_SERVER", "")
"""The URL of a running vLLM server, whose model is the folder that `smollm2` is converted to."""

GIVEN: dict[str, Any] = {
    "sources": {
        "bridge.txt": "The bridge over the Elm was opened in 1921 by Katharina Weissenborn.",
        "mill.txt": "The mill at the lake has four wheels and grinds rye for two villages.",
    },
    "question": "Who opened the bridge?",
    "answer": ["The bridge was opened by Katharina Weissenborn."],
    "decoys": Path(__file__).parents[2] / "docs/examples/other_notes.jsonl",
    "prefix": "\n",
}


@pytest.fixture(scope="module", params=["llama:smollm2", VLLM])
def engine(request: pytest.FixtureRequest) -> Any:
    if request.param != VLLM:
        pytest.importorskip("llama_cpp", reason="make test-engines")
        return load_model(request.param)
    if not VLLM:
        pytest.skip("VLLM_SERVER names no server")
    return load_model(VLLM, tokenizer="smollm2")


def prompts(model: Any) -> list[Prompt]:
    texts = ["\nThe capital of France is", "\nThe capital of France, as we know, is the city of"]
    after = np.array(model.encode([" Paris, on the Seine."])[0])
    return [Prompt(np.array(ids), after) for ids in model.encode(texts)]


def test_numbers_are_near_those_of_transformers(engine: Any) -> None:
    asked = prompts(engine)
    here = engine.model.score(asked)
    reference = ModelLogprobs(Scorer(load_model("smollm2", dtype="fp32").model)).score(asked)
    # llama.cpp rounds activations to 8 bits.
    most = 1e-3 if isinstance(engine.model, Servers) else 0.2
    for own, other in zip(here, reference, strict=True):
        assert np.abs(own - other).mean() < most
        assert abs(own.sum() - other.sum()) < 5 * most


def test_what_prompts_share_changes_no_number(engine: Any) -> None:
    asked = prompts(engine)
    together = engine.model.score(asked)
    for prompt, own in zip(asked, together, strict=True):
        np.testing.assert_allclose(engine.model.score([prompt])[0], own, atol=1e-4)


def test_the_source_is_named(engine: Any) -> None:
    found = attribute(engine, **GIVEN)
    assert found.relies_on("bridge.txt")
    assert attribute(engine, **GIVEN).statements.equals(found.statements)
    made = attribute(engine, **GIVEN | {"answer": None, "max_new_tokens": 8})
    assert made.layout.block.num_targets <= 8


@contextmanager
def started() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model, script = str(find_smollm2_gguf()), Path(__file__).with_name("llama_server.py")
    command = [sys.executable, str(script), SERVER, model, str(port)]
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
        process.kill()
        process.wait()


@pytest.mark.skipif(not SERVER, reason="LLAMA_SERVER names no server")
def test_verdicts_over_http_are_those_in_this_process() -> None:
    llama = load_model("llama:smollm2")
    with started() as url, started() as other:
        remote = load_model(f"{url},{other}", tokenizer="smollm2")
        there, here = attribute(remote, **GIVEN), attribute(llama, **GIVEN)
        assert there.statements.sources.equals(here.statements.sources)
        np.testing.assert_allclose(there.matrix.gives, here.matrix.gives, atol=1.0)
