"""Trials, their files, their table; what is refused before anything is trained."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from olmo_sparsity.cli import main
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.tasks import experiment
from olmo_sparsity.tasks.results import Row, format_table, read_results, wilson
from olmo_sparsity.tasks.samples import Samples
from olmo_sparsity.tasks.schemes import SCHEMES, Placed, PositionSettings, Sizes, place
from olmo_sparsity.tasks.scratchpad_parity import ScratchpadParity
from olmo_sparsity.tasks.settings import ExperimentSettings, load_settings
from olmo_sparsity.tasks.sparse_parity import SparseParity
from olmo_sparsity.tasks.trial import (
    Bench,
    Trial,
    _draw_batch,
    _draw_training,
    build,
    measure,
    train,
)
from olmo_sparsity.tasks.variable_assignment import VariableAssignment
from tests.conftest import running, small_task, until

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]


def write(given: dict[str, Any], folder: Path) -> Path:
    path = folder / "task.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(given)))
    return path


def make(folder: Path, *overrides: str, **changes: Any) -> ExperimentSettings:
    return load_settings(write(small_task(folder / "run") | changes, folder), list(overrides))


# --- position IDs ---------------------------------------------------------------------------------


def ids(
    scheme: str, samples: Samples, *, training: bool, seed: int = 0, **given: Any
) -> np.ndarray:
    return placed(scheme, samples, training=training, seed=seed, **given).ids_BL


def placed(scheme: str, samples: Samples, *, training: bool, seed: int = 0, **given: Any) -> Placed:
    sizes = Sizes(64, 3, 32)
    generator = np.random.default_rng(seed)
    return place(scheme, samples, generator, PositionSettings(**given), sizes, training=training)


def cut_places(scheme: str, samples: Samples, num_places: int, *, aligned: bool) -> set[int]:
    """Which of the first places have an ID that is not one more than that before."""
    drawn_BL = ids(scheme, samples, training=True, num_chunks=5, aligned_cuts=aligned)
    assert (np.diff(drawn_BL[:, :num_places]) > 1).sum(1).max() == 4
    return set(np.nonzero(np.diff(drawn_BL[:, :num_places]) > 1)[1] + 1)


def test_at_test_ids_are_counted_or_the_tasks_own() -> None:
    samples = ScratchpadParity().sample(np.random.default_rng(0), 20, 9)
    given_BL = np.concatenate((samples.prompt_ids_BP, samples.response_ids_BR), axis=1)
    for scheme in set(SCHEMES) - {"randomized", "auxiliary", "pointers"}:
        wanted_BL = given_BL if scheme in ("coupled", "ppc") else np.tile(np.arange(19), (20, 1))
        np.testing.assert_array_equal(ids(scheme, samples, training=False), wanted_BL)
    random_BL = ids("randomized", samples, training=False)
    assert (np.diff(random_BL) > 0).all()
    assert len(np.unique(random_BL, axis=0)) == 20


def test_aligned_cuts_leave_units_together() -> None:
    pairs = SparseParity().sample(np.random.default_rng(0), 4000, 20)
    assert cut_places("pose", pairs, 21, aligned=False) == set(range(1, 21))
    assert cut_places("pose", pairs, 21, aligned=True) == set(range(2, 21, 2))
    statements = VariableAssignment(name_length=2).sample(np.random.default_rng(0), 500, 6)
    # The IDs of a prompt count its places.
    assert cut_places("ppc", statements, 27, aligned=False) == set(range(1, 27))
    assert cut_places("ppc", statements, 27, aligned=True) == set(range(4, 27, 4))


def test_coupled_ids_are_spread_as_they_are_coupled() -> None:
    samples = ScratchpadParity().sample(np.random.default_rng(0), 3000, 9)
    spread_BL = ids("ppc", samples, training=True, num_chunks=3)
    bits_Bn, equals_B, response_Bn = spread_BL[:, :9], spread_BL[:, 9], spread_BL[:, 10:]
    np.testing.assert_array_equal(bits_Bn, response_Bn)
    assert (np.diff(bits_Bn) >= 1).all()
    assert (equals_B < bits_Bn[:, 0]).all()
    assert set(np.unique(spread_BL)) == set(range(64))


@pytest.mark.parametrize("training", [False, True])
def test_auxiliary_ids_are_those_of_the_coupled_prompt_token(training: bool) -> None:
    samples = ScratchpadParity().sample(np.random.default_rng(0), 200, 9)
    own, pose = (
        placed(scheme, samples, training=training, num_chunks=3) for scheme in ("auxiliary", "pose")
    )
    np.testing.assert_array_equal(own.ids_BL, pose.ids_BL)
    np.testing.assert_array_equal(own.target_ids_BL[:, 10:], own.ids_BL[:, :9])


def test_pointers_are_the_coupled_ids_as_tokens() -> None:
    samples = ScratchpadParity().sample(np.random.default_rng(0), 200, 9)
    for training in (False, True):
        drawn = placed("pointers", samples, training=training, num_chunks=3)
        assert drawn.num_prompt == 20
        labels_BL = drawn.tokens_BL[:, ::2] - 3  # behind the task's three words
        np.testing.assert_array_equal(drawn.tokens_BL[:, 1:20:2], samples.prompt_BP)
        np.testing.assert_array_equal(drawn.tokens_BL[:, 21::2], samples.response_BR)
        np.testing.assert_array_equal(labels_BL[:, 10:], labels_BL[:, :9])
        assert (np.diff(labels_BL[:, :9]) >= 1).all()
        assert set(np.unique(labels_BL)) == set(range(32) if training else range(1, 11))
        np.testing.assert_array_equal(drawn.ids_BL[:, ::2], drawn.ids_BL[:, 1::2])
        assert (np.diff(drawn.ids_BL[:, ::2]) > 1).any() == training


def test_sizes_are_those_of_the_longest_test(tmp_path: Path) -> None:
    """Eight bits: 17 places, coupled IDs up to 9; the end token adds a place."""
    for end_token in (False, True):
        bench = Bench(make(tmp_path, schemes=list(SCHEMES), end_token=end_token), CPU)
        words, places = 3 + end_token, 17 + end_token
        for scheme, expected in {
            "rope": (places, words),
            "pose": (places, words),
            "coupled": (10, words),
            "ppc": (10, words),
            "auxiliary": (places, words),
            "pointers": (places, words, 10),
        }.items():
            assert bench.sizes(scheme) == Sizes(*expected), scheme


def test_published_chunks_start_at_0_and_are_short() -> None:
    samples = SparseParity().sample(np.random.default_rng(0), 4000, 20)
    drawn_BL = ids("pose", samples, training=True, num_chunks=2, published=True)
    assert not drawn_BL[:, 0].any()
    cuts = np.nonzero(np.diff(drawn_BL) > 1)[1] + 1
    assert set(cuts) == set(range(1, 12))  # 21 tokens: at most 22 // 2 in the first chunk
    assert set(np.unique(drawn_BL)) == set(range(64))


# --- one trial ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_lengths", [1, 4])
def test_a_batch_mixes_so_many_lengths(tmp_path: Path, num_lengths: int) -> None:
    training = {"batch_size": 8, "lengths_per_batch": num_lengths}
    settings = make(tmp_path, schemes=["rope"], train_lengths=[1, 90], training=training)
    bench, generator = Bench(settings, CPU), np.random.default_rng(0)
    num_drawn = []
    for step in range(20):
        _, _, response_BL, _ = _draw_batch(
            bench, Trial("rope", None, 1), generator, bench.sizes("rope"), step
        )
        num_drawn.append(len(response_BL.sum(1).unique()))
    assert max(num_drawn) == num_lengths


def test_what_a_scheme_is_told_about_positions(tmp_path: Path) -> None:
    """RoPE sees differences only, NoPE nothing; ALiBi distances."""
    bench = Bench(make(tmp_path, schemes=["rope", "nope", "alibi"]), CPU)
    tokens = torch.randint(0, 3, (2, 8), generator=torch.Generator().manual_seed(0))
    near = torch.arange(8).expand(2, 8)
    shifted, spread = near + 4, near + 5 * (near > 3)
    for scheme, sees_gaps in (("rope", True), ("nope", False), ("alibi", True)):
        torch.manual_seed(0)
        model = build(bench, scheme).eval()
        here, there, apart = (model(tokens, p)[0] for p in (near, shifted, spread))
        torch.testing.assert_close(here, there)
        assert torch.allclose(here, apart, atol=1e-5) != sees_gaps, scheme


@pytest.mark.parametrize("scheme", ["ppc", "auxiliary", "pointers"])
def test_what_is_learnt_is_done_freely(tmp_path: Path, scheme: str) -> None:
    """Copying the bits' own IDs, parity and the end at the training length, in seconds."""
    settings = make(
        tmp_path,
        schemes=[scheme],
        end_token=True,
        train_lengths=[2, 3],
        test_lengths=[2, 3],
        model={"d_model": 32, "n_heads": 2, "n_layers": 2, "mlp_ratio": 2, "init_std": 0.1},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 20},
        training={"num_steps": 400, "batch_size": 64},
    )
    bench, trial = Bench(settings, CPU), Trial(scheme, None, 0)
    model, losses = train(bench, trial, lambda step, loss: None)
    assert losses[-1][1] < losses[0][1] / 4
    for row in measure(bench, trial, model):
        assert row.exact_match > 0.95
        assert row.id_accuracy is not None
        assert row.id_accuracy > 0.95
        assert min(row.token_accuracy, row.teacher_forced) >= row.exact_match


def test_a_growing_k_starts_at_two(tmp_path: Path) -> None:
    settings = make(
        tmp_path, task={"name": "sparse_parity"}, schemes=["rope"], train_lengths=[20, 20],
        test_lengths=[20], train_ks=[6], test_ks=[2],
        training={"num_steps": 100, "batch_size": 200, "grow_k_steps": 60},
    )  # fmt: skip
    bench, largest = Bench(settings, CPU), []
    for step in (1, 10, 30, 60):
        generator = np.random.default_rng(0)
        samples = _draw_training(bench, Trial("rope", 6, 0), generator, 200, 20, step)
        largest.append(samples.num_relevant_B.max())
    assert largest == [2, 2, 4, 6]


# --- many trials ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """The folder and the rows of a run of every scheme."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, experiment.run_settings(make(folder, schemes=list(SCHEMES), seeds=[1]))


def test_every_scheme_trains_and_is_tested(finished: tuple[Path, list[Row]]) -> None:
    folder, rows = finished
    tested = [(row.scheme, row.length) for row in rows]
    assert tested == [(scheme, length) for scheme in sorted(SCHEMES) for length in (4, 8)]
    for row in rows:
        assert row.low <= row.exact_match <= row.high
        assert row.exact_match <= row.token_accuracy
        assert (row.id_accuracy is None) == (row.scheme not in ("ppc", "auxiliary", "pointers"))
    trial = json.loads((folder / "run/trials/ppc_seed1.json").read_text())
    assert [step for step, _ in trial["losses"]] == [3]
    assert trial["num_parameters"] > 0


def test_the_table_is_read_back_as_written(finished: tuple[Path, list[Row]]) -> None:
    folder, rows = finished
    stored, meta = read_results(folder / "run")
    assert stored == rows
    assert meta["settings"]["train_lengths"] == [3, 5]
    assert meta["trial_losses"].keys() == meta["trial_seconds"].keys()
    assert all(0 < loss < 10 for loss in meta["trial_losses"].values())
    with pytest.raises(DataError, match=r"has no accuracy.parquet"):
        read_results(folder)


def test_the_parts_of_an_array_add_up_to_one_run(
    finished: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    settings = make(tmp_path, schemes=list(SCHEMES), seeds=[1])
    for part in range(3):
        rows = experiment.run_settings(settings, shard=(part, 3))
    assert rows == finished[1]


def test_trials_have_one_thread_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads round sums differently."""
    seen = []
    run_trial = experiment.run_trial

    def counted(*given: Any) -> str:
        seen.append(torch.get_num_threads())
        return run_trial(*given)

    monkeypatch.setattr(experiment, "run_trial", counted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        experiment.run_settings(make(tmp_path, schemes=["rope"], seeds=[1]))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_of_two_shards_that_end_together_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, written = experiment.write_results, []

    def slow(folder: Path, rows: list[Row], about: Any) -> None:
        if not written:  # the other shard ends while this one writes
            (here,) = (folder / "trials").glob("*.json")
            shutil.copy(here, here.with_name("rope_seed2.json"))
        written.append(len(rows))
        really(folder, rows, about)

    monkeypatch.setattr(experiment, "write_results", slow)
    experiment.run_settings(make(tmp_path, schemes=["rope"], seeds=[1, 2]), shard=(0, 2))
    assert written == [2, 4]
    assert len(read_results(tmp_path / "run")[0]) == 4


@pytest.mark.parametrize("path", sorted((ROOT / "configs/tasks").glob("*_paper.yaml")), ids=str)
def test_presets_of_the_paper_draw_its_chunks(path: Path) -> None:
    positions = load_settings(path, []).positions
    assert (positions.num_chunks, positions.published) == (2, True)


def test_other_settings_in_the_same_folder_are_refused(finished: tuple[Path, list[Row]]) -> None:
    with pytest.raises(ConfigError, match=r"holds trials with test_lengths=\[4, 8\] \(now \[4\]\)"):
        experiment.run_settings(make(finished[0], test_lengths=[4]))


def test_a_folder_of_before_a_setting_existed_resumes(
    finished: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    settings = make(tmp_path, schemes=list(SCHEMES), seeds=[1])
    fixed = experiment.fixed_settings(settings)
    del fixed["end_token"], fixed["positions"]["published"]
    (tmp_path / "run/settings.json").write_text(json.dumps(fixed))
    assert experiment.run_settings(settings) == finished[1]
    with pytest.raises(ConfigError, match=r"end_token=False \(now True\)"):
        experiment.run_settings(make(tmp_path, schemes=["rope"], end_token=True))


def test_a_damaged_file_is_named(finished: tuple[Path, list[Row]], tmp_path: Path) -> None:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "run" / "trials" / "rope_seed1.json"
    file.write_text(file.read_text()[:-40])
    with pytest.raises(DataError, match=r"rope_seed1.json: not readable JSON .* delete it"):
        experiment.run_settings(make(tmp_path, schemes=["rope"], seeds=[1]))


def test_a_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_trial, made = experiment.run_trial, []

    def stop_once(settings: Any, trial: Trial, *rest: Any) -> str:
        made.append(trial.name)
        if len(made) == 2:
            raise KeyboardInterrupt
        return run_trial(settings, trial, *rest)

    monkeypatch.setattr(experiment, "run_trial", stop_once)
    path = write(small_task(tmp_path / "run"), tmp_path)
    assert main(["task", str(path)]) == 75
    assert [file.name for file in (tmp_path / "run" / "trials").iterdir()] == ["rope_seed1.json"]
    assert main(["task", str(path)]) == 0
    assert made[1:] == ["ppc_seed1", "ppc_seed1", "rope_seed2", "ppc_seed2"]
    assert format_table(read_results(tmp_path / "run")[0]) in capsys.readouterr().out
    assert not list((tmp_path / "run").rglob("*.tmp"))


OWN_TASK = """
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
from olmo_sparsity.tasks.samples import Samples
@dataclass(frozen=True)
class Copy:
    num_words: int = 3
    length_step: ClassVar[int] = 1
    @property
    def vocabulary(self): return tuple(map(str, range(self.num_words)))
    def sample(self, generator, num_samples, length, k=None):
        x = generator.integers(0, self.num_words, (num_samples, length))
        i = np.tile(np.arange(1, length + 1), (num_samples, 1))
        return Samples(x, x, i, i[:, :length])
    def largest_k(self, length): return None
    def largest_id(self, length): return length
    def solve(self, samples): return samples.prompt_BP
    def show(self, samples, index): return str(samples.prompt_BP[index])
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_workers_end_with_their_parent_and_their_trials_are_as_in_one_process(
    tmp_path: Path, name: str
) -> None:
    """Of a task of one's own too: every process reads its file."""
    file = tmp_path / "copy_task.py"
    file.write_text(OWN_TASK)
    own = {"task": {"name": f"{file}:Copy", "num_words": 5}, "schemes": ["ppc"]}
    settings = small_task(tmp_path / "run") | own | {"num_workers": 2, "seeds": list(range(1000))}
    command = [sys.executable, "-m", "olmo_sparsity.cli", "task", str(write(settings, tmp_path))]
    trials = [tmp_path / "run" / "trials" / f"ppc_seed{seed}.json" for seed in (0, 1)]
    with running(command, stderr=subprocess.PIPE, text=True) as parent:
        until(lambda: all(map(Path.exists, trials)), lambda: parent.poll() is None)
        group = name == "SIGINT"  # as a terminal does
        (os.killpg if group else os.kill)(parent.pid, getattr(signal, name))
        _, error = parent.communicate(timeout=120)
        with contextlib.suppress(ProcessLookupError):
            until(lambda: os.killpg(parent.pid, 0), timeout_s=30)  # its workers, which end too
    if name == "SIGINT":
        assert parent.returncode == 75
        assert "Traceback" not in error
        assert "the same command goes on" in error
    resumed, alone = (
        experiment.run_settings(make(tmp_path, **own, seeds=[0, 1], output=str(tmp_path / name)))
        for name in ("run", "alone")
    )
    assert [row for row in resumed if row.seed < 2] == alone
    assert len({row.token_accuracy for row in alone}) > 1


@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [
        ("i[:, :length]", "i[:, :-1]", "response_ids_BR has shape"),
        ("def largest_k", "def biggest_k", "Copy lacks largest_k"),
        ("map(str, range(self.num_words))", "map(str, range(2))", "the vocabulary has 2 words"),
        ("return length\n", "return length - 1\n", "position IDs 1 to 5, but the first is 1"),
        ("return samples.prompt_BP", "return 0 * samples.prompt_BP", "solve() does not give"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_wrong_with_it_is_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture, right: str, wrong: str, expected: str
) -> None:
    assert right in OWN_TASK
    file = tmp_path / "copy_task.py"
    file.write_text(OWN_TASK.replace(right, wrong))
    path = write(small_task(tmp_path / "run") | {"task": {"name": f"{file}:Copy"}}, tmp_path)
    assert main(["task", str(path)]) == 2
    assert expected in capsys.readouterr().err


# --- what is refused ------------------------------------------------------------------------------

K = {"task": {"name": "sparse_parity"}, "schemes": ["rope"], "train_lengths": [20, 20],
     "test_lengths": [20], "train_ks": [4], "test_ks": [4]}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"schemes": ["ppc"], "positions": {"num_ids": 8}},
            "test_lengths: length 8 has position IDs up to 9 under ppc, beyond the largest ID of",
        ),
        ({**K, "test_ks": [11]}, "test_ks: k=11 must lie between 1 and 10, the places of"),
        ({**K, "train_ks": [11]}, "train_ks: k=11 must lie between 1 and 10, the places of"),
        ({**K, "schemes": ["ppc"]}, "scheme ppc: this task has no coupled IDs"),
        ({**K, "test_lengths": [21]}, "21 is no length of this task, which are multiples of 2"),
        ({**K, "train_lengths": [21, 21]}, "holds no multiple of 2"),
        ({"schemes": ["spiral"]}, "scheme spiral is not known; choose among rope"),
        ({"schemes": []}, "schemes is empty"),
        ({"schemes": "rope"}, r"schemes must be a list: schemes=\[rope\]"),
        ({**K, "task": {"name": "sparse_parity", "max_k": 3}}, "task: unknown key 'max_k'$"),
        ({"seeds": [1, 1]}, "holds one value twice"),
        ({"task": "addition"}, "task=addition must be a section"),
        ({"task": "???"}, "mandatory value: task"),
        ({"task": {"name": "subtraction"}}, "task.name=subtraction is not known"),
        ({"task": {"name": ["addition"]}}, "is not known"),
        ({"task": {"name": "addition", "base": 8}}, "base"),
        ({"task": {"name": "nowhere.py:Task"}}, "'nowhere.py' does not exist"),
        ({"train_lengths": [5, 3]}, r"train_lengths=\[5, 3\] must be \[shortest, longest\]"),
        ({"train_ks": [2], "test_ks": [2]}, "this task has no k; remove it"),
        ({"schemes": ["rope"], "positions": {"num_chunks": 3}}, "positions.num_chunks=3 is set"),
        (
            {"schemes": ["rope"], "positions": {"aligned_cuts": True}},
            "positions.aligned_cuts=True is set",
        ),
        ({"schemes": ["rope"], "coupling": {"embed_ids": False}}, "coupling.embed_ids=False is"),
        ({"schemes": ["auxiliary"], "coupling": {"embed_ids": False}}, "cannot predict IDs"),
        ({**K, "schemes": ["pointers"]}, "scheme pointers: this task has no coupled IDs"),
        ({"schemes": ["auxiliary"], "task": {"name": "addition"}}, "coupled with no prompt token"),
        ({"schemes": ["rope"], "positions": {"published": True}}, "positions.published=True is"),
        (
            {"schemes": ["pose"], "positions": {"published": True, "aligned_cuts": True}},
            "with several chunks, cut anywhere",
        ),
        ({"model": {"alibi": True}}, "model.alibi=True is set, but the scheme decides it"),
        ({"model": {"vocab_size": 9}}, "model.vocab_size=9 is set, but the task decides it"),
        ({"model": {"d_model": 32, "n_heads": 2, "mlp_hidden_size": 3}}, "model.mlp_hidden_size=3"),
        ({"schemes": ["ppc"], "positions": {"aligned_cuts": True}}, "units are single tokens"),
        ({"model": {"embedding_size": 9}}, "model.embedding_size=9 is set, but the task decides"),
        ({"model": {"max_sequence_length": 9}}, "model.max_sequence_length=9 is set, but the long"),
        (
            {"task": {"name": "variable_assignment"}, "train_ks": [2], "test_ks": [2]},
            "takes one k for all samples; leave train_ks empty",
        ),
        ({"training": {"num_steps": 0}}, "training.num_steps=0 must be at least 1"),
        ({"training": {"max_grad_norm": -1}}, "training.max_grad_norm=-1.0 must be at least"),
        ({**K, "training": {"grow_k_steps": -1}}, "training.grow_k_steps=-1 must be at least 0"),
        ({"speed": 3}, "speed"),
    ],
)
def test_bad_input_ends_in_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(small_task(tmp_path / "run") | changes, tmp_path)
    assert main(["task", str(path)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_gpt_neox_has_neither_nope_nor_alibi(tmp_path: Path) -> None:
    model = small_task(tmp_path)["model"] | {"architecture": "gpt_neox", "rotary_fraction": 0.5}
    settings = make(tmp_path, schemes=["nope"], model=model)
    with pytest.raises(ConfigError, match=r"means nothing to model\.architecture=gpt_neox"):
        experiment.run_settings(settings)
    rows = experiment.run_settings(
        make(tmp_path, schemes=["ppc"], seeds=[1], model=model, output=str(tmp_path / "neox"))
    )
    assert len(rows) == 2


# --- the table ------------------------------------------------------------------------------------


def test_wilson_is_the_textbook_interval() -> None:
    low, high = wilson(0.5, 100)
    assert (round(low, 4), round(high, 4)) == (0.4038, 0.5962)
    assert wilson(1.0, 500)[1] == 1.0
    assert wilson(0.0, 500)[0] == 0.0
    assert 0.99 < wilson(1.0, 500)[0] < 1.0
