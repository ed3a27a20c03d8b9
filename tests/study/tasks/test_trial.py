"""One model, trained and tested under one scheme."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from olmo_sparsity.training.optimizer.learning_rate import learning_rate
from study.tasks import trial
from study.tasks.schemes import SCHEMES, Sizes
from study.tasks.settings import ExperimentSettings
from study.tasks.trial import Bench, Trial, _draw_batch, _masters, build, measure, train
from tests.study.tasks.support import make


def bench_of(settings: ExperimentSettings, scheme: str, train_k: int | None = None) -> Bench:
    return Bench(settings, Trial(scheme, train_k, 0), torch.device("cpu"))


def test_sizes_are_those_of_the_longest_test(tmp_path: Path) -> None:
    """Eight bits: 17 places, coupled IDs up to 9; the end token adds a place."""
    for end_token in (False, True):
        settings = make(tmp_path, schemes=list(SCHEMES), end_token=end_token)
        words, places = 3 + end_token, 17 + end_token
        expected = dict.fromkeys(("rope", "pose", "auxiliary"), Sizes(places, words))
        expected |= dict.fromkeys(("coupled", "ppc"), Sizes(10, words))
        expected["pointers"] = Sizes(places, words, 10)
        assert {name: bench_of(settings, name).sizes for name in expected} == expected


@pytest.mark.parametrize("num_lengths", [1, 4])
def test_a_batch_mixes_so_many_lengths(tmp_path: Path, num_lengths: int) -> None:
    training = {"batch_size": 8, "lengths_per_batch": num_lengths}
    settings = make(tmp_path, schemes=["rope"], train_lengths=[1, 90], training=training)
    bench, generator = bench_of(settings, "rope"), np.random.default_rng(0)
    drawn = [_draw_batch(bench, generator)[2] for _ in range(20)]
    assert max(len(response_BL.sum(1).unique()) for response_BL in drawn) == num_lengths


def test_what_a_scheme_is_told_about_positions(tmp_path: Path) -> None:
    """RoPE sees differences only, NoPE nothing; ALiBi distances."""
    settings = make(tmp_path, schemes=["rope", "nope", "alibi"])
    tokens = torch.randint(0, 3, (2, 8), generator=torch.Generator().manual_seed(0))
    near = torch.arange(8).expand(2, 8)
    shifted, spread = near + 4, near + 5 * (near > 3)
    for scheme, sees_gaps in (("rope", True), ("nope", False), ("alibi", True)):
        torch.manual_seed(0)
        model = build(bench_of(settings, scheme)).eval()
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
        training={"num_steps": 200, "batch_size": 64},
    )
    bench = bench_of(settings, scheme)
    model, course = train(bench, lambda step, loss: None)
    assert course.losses[-1][1] < course.losses[0][1] / 4
    for row in measure(bench, model):
        assert row.exact_match > 0.95
        assert row.id_accuracy is not None
        assert row.id_accuracy > 0.95
        assert min(row.token_accuracy, row.teacher_forced) >= row.exact_match


def parity(folder: Path, **training: float) -> Bench:
    settings = make(
        folder,
        task={"name": "sparse_parity"},
        schemes=["pose"],
        train_lengths=[20, 24],
        test_lengths=[20],
        train_ks=[3],
        test_ks=[2],
        optimizer={"schedule": "constant", "warmup_steps": 2, "cooldown_steps": 3},
        training={"num_steps": 10, "batch_size": 4, "check_steps": 4, **training},
    )
    return bench_of(settings, "pose", train_k=3)


@pytest.mark.parametrize(("mastery", "ends", "mastered"), [(0.0, 10, None), (0.01, 7, 4)])
def test_a_stopped_training_ends_as_an_uninterrupted_one(
    tmp_path: Path, mastery: float, ends: int, mastered: int | None
) -> None:
    bench, kept = parity(tmp_path, mastery=mastery), tmp_path / "state"
    model, course = train(bench, lambda step, loss: None)
    assert (course.step, course.mastered) == (ends, mastered)
    assert [step for step, _ in course.losses] == [ends]

    def stop(step: int, loss: float) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(bench, stop, kept)
    steps: list[int] = []
    again, course_again = train(bench, lambda step, loss: steps.append(step), kept)
    assert steps == list(range(5, ends + 1))
    assert course_again == course
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_past_mastery_trains_so_many_times_as_long_before_the_rate_falls(tmp_path: Path) -> None:
    bench = parity(tmp_path, mastery=0.01, past_mastery=2.25)
    _, course = train(bench, lambda step, loss: None)
    assert course.mastered == 4
    assert course.step == 9 + 3  # beyond num_steps, with the cooldown


@pytest.mark.parametrize("right", [[0.9, 1, 1], [1, 1, 0.89], [1, 0.89, 1]])
def test_mastery_asks_each_k_at_the_longest_training_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: list[float]
) -> None:
    bench, asked = parity(tmp_path, mastery=0.9), []

    def at(bench: Bench, model: Any, task: Any, length: int, k: int, stream: int) -> Any:
        asked.append((length, k))
        return SimpleNamespace(exact_match=right[k - 1])

    monkeypatch.setattr(trial, "_measure_at", at)
    assert _masters(bench, build(bench)) == (min(right) >= 0.9)
    assert asked == [(24, k) for k in (3, 2, 1)[: len(asked)]]  # the last to be learnt first


def test_the_rate_falls_once_all_is_known_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, rates = parity(tmp_path, mastery=0.9), []

    def note(*given: Any) -> float:
        rates.append(learning_rate(*given))
        return rates[-1]

    monkeypatch.setattr(trial, "learning_rate", note)
    for known, falling in ((False, []), (True, [2 / 3, 1 / 3, 0])):
        rates.clear()
        monkeypatch.setattr(trial, "_masters", lambda bench, model, of=known: of)
        train(bench, lambda step, loss: None)
        peak = bench.settings.optimizer.learning_rate
        risen = [rate / peak for rate in rates[2:]]
        assert risen == pytest.approx([1.0] * (2 if known else 8) + falling)
