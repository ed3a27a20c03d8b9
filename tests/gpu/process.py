"""A process of its own for tests on pretended GPUs: what they add to PyTorch must be there before
PyTorch is imported, and stays.

    @on_pretended_gpus
    def test_something(tmp_path: Path) -> None:
        from tests.gpu.pretend import pretend
        ...

The test runs there, with the values of its fixtures, which are pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("pretend.cpp")

IMPORTED = (
    "olmo_sparsity.command.cli",
    "olmo_sparsity.analysis.measurement.measurement",
    "olmo_sparsity.analysis.explain.ask",
    "olmo_sparsity.training.loop",
    "torch.nn.attention.varlen",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "tests.conftest",
)
"""By several tests, each of which runs in a copy of a process that has them."""


def on_pretended_gpus(test: Callable[..., None]) -> Callable[..., None]:
    lacks = _what_is_missing()

    @pytest.mark.skipif(bool(lacks), reason=lacks)
    @functools.wraps(test)
    def there(**fixtures: Any) -> None:
        child = _process()
        try:
            pickle.dump((test.__module__, test.__name__, fixtures), child.stdin)
            child.stdin.flush()
            failure = pickle.load(child.stdout)
        except BaseException:  # a timeout, or it died: the next test must not read a late answer
            child.kill()
            child.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            child.wait()
            _process.cache_clear()
            raise
        if failure:
            pytest.fail(failure, pytrace=False)

    return there


@functools.cache
def _what_is_missing() -> str:
    if not shutil.which("g++"):
        return "needs g++"
    built = list((_torch_folder() / "lib").glob("libtorch_cuda*"))
    return "needs a PyTorch without CUDA, which has its place taken" if built else ""


@functools.cache
def _process() -> Any:
    build()
    command = [sys.executable, "-m", "tests.gpu.process"]
    pipe = subprocess.PIPE  # it ends with its input, when this process does
    return subprocess.Popen(command, cwd=ROOT, env=_environment(), stdin=pipe, stdout=pipe)


def _environment() -> dict[str, str]:
    """Without what launchers, other tests (tests/support/children.py) or a user have set: these
    would choose another device or engine than that of a process alone on a machine with GPUs."""
    chosen = ("SLURM_", "TORCHELASTIC", "MASTER_", "DS_", "CUDA_", "CUBLAS_", "PYTORCH_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(chosen) and not name.endswith(("RANK", "WORLD_SIZE"))
    }
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def build() -> Path:
    """pretend.cpp, compiled once for each version of it and of PyTorch, in a few seconds."""
    torch = _torch_folder()
    version = (torch / "version.py").read_bytes()
    name = hashlib.sha256(SOURCE.read_bytes() + version).hexdigest()[:16]
    built = ROOT / f".pytest_cache/pretended_gpus/{name}.so"
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    being_built = built.with_suffix(f".{os.getpid()}")
    headers = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    libraries = [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-lc10", "-ltorch_cpu"]
    options = ["-std=c++20", "-O1", "-fPIC", "-shared"]
    command = ["g++", *options, *headers, SOURCE, "-o", being_built, *libraries]
    subprocess.run(list(map(str, command)), check=True)
    being_built.replace(built)
    return built


def _torch_folder() -> Path:
    origin = getattr(importlib.util.find_spec("torch"), "origin", None)
    assert origin is not None
    return Path(origin).parent


@functools.cache
def library() -> ctypes.CDLL:
    """Loaded; before PyTorch's own part is."""
    assert "torch" not in sys.modules, "only in a process of its own"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)


def _serve() -> None:
    """Run the tests that are asked for; answer with what went wrong."""
    library()
    warnings.simplefilter("error")
    # As in pyproject.toml, and of os.fork, which Python 3.12 warns about where there are threads.
    for text in ("torch.(get|is)_autocast", "register_new_resolver", "This process .*fork"):
        warnings.filterwarnings("ignore", text, DeprecationWarning)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what tests print is no answer
        for name in ("tests.gpu.pretend", *IMPORTED):
            importlib.import_module(name)
        while True:
            try:
                module, name, fixtures = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            test = getattr(importlib.import_module(module), name).__wrapped__
            failure = ""
            try:
                apart(functools.partial(test, **fixtures))
            except Failed as error:
                failure = str(error)
            pickle.dump(failure, answers)
            answers.flush()


class Failed(Exception):
    """What happened in a copy of this process."""


def apart(function: Callable[[], Any]) -> Any:
    """What the function gives in a copy of this process: DeepSpeed's ZeRO-3 exchanges functions of
    PyTorch and never puts them back, and later steps would take other amounts of memory."""
    reads, writes = os.pipe()
    copy = os.fork()
    if copy == 0:
        try:
            answer = pickle.dumps((True, function()))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(answer)
        sys.stderr.flush()
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(copy, 0)
    done, given = pickle.loads(answer or pickle.dumps((False, f"it ended with status {status}")))
    if not done:
        raise Failed(given)
    return given


if __name__ == "__main__":
    _serve()
