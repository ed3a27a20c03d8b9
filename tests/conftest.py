"""Shared by all tests: a small prepared folder of real English, and a run of a few seconds."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from olmo_sparsity.base.files import partial_name

# The process that hands out tests imports this file too, before it starts the others.
if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from olmo_sparsity.analysis.results.results import Results
    from olmo_sparsity.config.sections import RunConfig
    from olmo_sparsity.data.shards import TokenShards
    from olmo_sparsity.models.loaded import LoadedModel

VOCAB = 512

# Tests may wait for a busy machine. A test's settings are fixed when its file is imported.
settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")

LONGEST = (
    "integration/test_slurm",
    "test_docs",
    "integration/test_engines",
    "training/engines/test_engine",
    "training/checkpoints/test_writer",
    "test_kill_and_resume",
)

SHARE_A_SERVER = (  # of tests/support/children.py
    "tests/integration/test_engines.py",
    "tests/test_kill_and_resume.py",
    "tests/training/checkpoints/test_writer.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no process ends alone with one of them."""
    longest = tuple(f"tests/{name}.py" for name in LONGEST)
    items.sort(key=lambda item: not item.nodeid.startswith(longest))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out the files whose children fork from one server as if they were one file."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return SHARE_A_SERVER[0] if file in SHARE_A_SERVER else file

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the garbage collector, which finds nothing while tests are imported and takes long.
    What is imported stays, so later it need not look through that."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# A shell's background jobs ignore Ctrl-C, and so would every command that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is alone, whatever has started the tests."""
    names = ("SLURM_", "TORCHELASTIC", "MASTER_")
    for name in list(os.environ):
        if name.startswith(names) or name.endswith(("RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)


@contextlib.contextmanager
def running(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """A command that ends with the test, and so does what it has started."""
    with subprocess.Popen(words, process_group=0, **options) as child:
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def until(
    holds: Callable[[], object], alive: Callable[[], bool] = lambda: True, timeout_s: float = 300
) -> None:
    """Wait, but not for a process that has ended."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert alive() or holds(), "it has ended"
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)


def left_by_a_killed_process(path: Path) -> Path:
    """What a process that is gone was writing for hours."""
    left = partial_name(path)
    left.touch()
    os.utime(left, (0, 0))
    return left


@pytest.fixture(autouse=True)
def _no_child_stays() -> Iterator[None]:
    """What a test that failed has started in tests/support/children.py ends with it."""
    yield
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    # Tiny models gain nothing from threads, and bit-exactness is promised for an equal number.
    torch.set_num_threads(1)


@pytest.fixture
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("olmo_sparsity.base.files.sync", lambda path: None)


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from olmo_sparsity.config.run import config_from_dict
    from olmo_sparsity.data.prepare import prepare

    folder = tmp_path_factory.mktemp("data")
    prepare(config_from_dict({"data": data_section(folder)}).data)
    return folder


def _open(folder: Path, split: str) -> TokenShards:
    from olmo_sparsity.config.run import config_from_dict
    from olmo_sparsity.data.shards import open_shards

    return open_shards(config_from_dict({"data": data_section(folder)}).data, split)


def data_section(folder: Path) -> dict:
    return {
        "folder": str(folder),
        "corpus": {"source": "embedded", "max_documents": 300},
        "tokenizer": {"train_vocab": VOCAB},
        "heldout_share": 0.2,
    }


@pytest.fixture(scope="session")
def shards(data_folder: Path) -> TokenShards:
    return _open(data_folder, "train")


@pytest.fixture(scope="session")
def heldout(data_folder: Path) -> TokenShards:
    return _open(data_folder, "heldout")


@pytest.fixture(scope="session")
def tokenizer(shards: TokenShards) -> Tokenizer:
    return shards.tokenizer


def small_run(run_folder: Path, data: dict) -> dict:
    """A run of a few seconds, as a nested dict that a test may change."""
    return {
        "run_folder": str(run_folder),
        "seed": 3,
        "data": data,
        "positions": {"scheme": "pose", "target_length": 32},
        "model": {
            "d_model": 32,
            "n_heads": 2,
            "n_layers": 2,
            "max_sequence_length": 64,
            "layer_norm_type": "rms",
            "weight_tying": True,
        },
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "training": {"length": 16, "batch_size": 4, "num_steps": 6, "precision": "fp32"},
        "evaluation": {"num_sequences": 4},
        "checkpoint": {"interval_steps": 2},
    }


def small_task(output: Path) -> dict[str, Any]:
    """A comparison of two schemes in seconds, as a nested dict that a test may change."""
    return {
        "output": str(output),
        "task": {"name": "scratchpad_parity"},
        "schemes": ["rope", "ppc"],
        "seeds": [1, 2],
        "train_lengths": [3, 5],
        "test_lengths": [4, 8],
        "num_test_samples": 150,
        "model": {"d_model": 16, "n_heads": 2, "n_layers": 1, "mlp_ratio": 2},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "training": {"num_steps": 3, "batch_size": 8},
    }


def named(name: str, tokenizer: Tokenizer | None, vocab_size: int = VOCAB) -> LoadedModel:
    """Somebody's model, of which nothing is computed."""
    from olmo_sparsity.models.loaded import LoadedModel

    model: Any = type("Sized", (), {"vocab_size": vocab_size})()
    return LoadedModel(model, tokenizer, name, 1, None, "weights")


@pytest.fixture
def run_dict(data_folder: Path, tmp_path: Path) -> dict:
    return small_run(tmp_path / "run", data_section(data_folder))


@pytest.fixture(scope="session")
def _trained_once(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from olmo_sparsity.config.run import config_from_dict
    from olmo_sparsity.training.loop import train

    folder = tmp_path_factory.mktemp("trained") / "run"
    train(config_from_dict(small_run(folder, data_section(data_folder))))
    return folder


@pytest.fixture
def trained(_trained_once: Path, run_dict: dict) -> Path:
    """The run of `run_dict`, finished."""
    return shutil.copytree(_trained_once, Path(run_dict["run_folder"]))


MakeConfig = Callable[..., "RunConfig"]


@pytest.fixture
def make_config(run_dict: dict) -> MakeConfig:
    """make_config(training__num_steps=3): the run of `run_dict` with some settings changed."""
    from olmo_sparsity.config.run import config_from_dict

    def make(**changes: object) -> RunConfig:
        for key, value in changes.items():
            *parents, leaf = key.split("__")
            section = run_dict
            for parent in parents:
                section = section.setdefault(parent, {})
            section[leaf] = value
        return config_from_dict(run_dict)

    return make


@pytest.fixture(scope="session")
def results_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a measurement that never happened, for figures and pages."""
    from tests.support.fake_results import write_fake_results

    write_fake_results(folder := tmp_path_factory.mktemp("fake"))
    return folder


@pytest.fixture(scope="session")
def results(results_folder: Path) -> Results:
    from olmo_sparsity.analysis.results.stored_results import read_results

    return read_results(results_folder)
