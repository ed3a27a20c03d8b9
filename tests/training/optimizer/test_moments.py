"""Adam's moments on disk: read by any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.training.optimizer.moments import (
    KEYS,
    MomentSlice,
    SavedMoments,
    copy_moments,
    share_out,
)


def cut(state: dict[str, dict[str, torch.Tensor]], world_size: int) -> Iterator[list[MomentSlice]]:
    """As an engine of so many processes might hold it: equal stretches of every parameter."""
    for rank in range(world_size):
        pieces = []
        for name, moments in state.items():
            size = -(-len(moments[KEYS[0]]) // world_size)
            own = {key: value[rank * size : (rank + 1) * size] for key, value in moments.items()}
            if len(own[KEYS[0]]):
                pieces.append(MomentSlice(name, rank * size, own))
        yield pieces


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_moments_travel_between_any_numbers_of_processes(
    tmp_path: Path, before: int, after: int
) -> None:
    sizes = {"embedding": 37, "norm": 2, "matrix": 64}
    state = {name: {key: torch.randn(n) for key in KEYS} for name, n in sizes.items()}
    for rank, pieces in enumerate(cut(state, before)):
        copy_moments(pieces, rank, before)(tmp_path)
    empty = {name: {key: torch.zeros(n) for key in KEYS} for name, n in sizes.items()}
    for rank, pieces in enumerate(cut(empty, after)):
        saved = SavedMoments(tmp_path, rank)
        for piece in pieces:
            saved.fill(piece)
        assert before != after or saved.opened.cache_info().currsize <= 1, (
            "each process needs its own file only"
        )
    for name in sizes:
        for key in KEYS:
            assert torch.equal(empty[name][key], state[name][key])


def test_parts_are_about_equally_large() -> None:
    assert share_out({"b": 3, "a": 5, "c": 3, "d": 2}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_missing_optimizer_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds 0 files"):
        SavedMoments(tmp_path, 0)
    alone = copy_moments([])(tmp_path)
    assert alone.name == "moments-00000-of-00001.safetensors"
    alone.unlink()
    state = {"matrix": {key: torch.randn(8) for key in KEYS}}
    for rank, pieces in enumerate(cut(state, 2)):
        copy_moments(pieces, rank, 2)(tmp_path)
    with pytest.raises(DataError, match="lacks moments of other"):
        SavedMoments(tmp_path, 0).fill(MomentSlice("other", 0, state["matrix"]))
    (tmp_path / "moments-00001-of-00002.safetensors").write_bytes(b"no tensors")
    with pytest.raises(DataError, match=r"moments-00001.* is damaged"):
        SavedMoments(tmp_path, 1).fill(MomentSlice("matrix", 0, state["matrix"]))
    (tmp_path / "moments-00001-of-00002.safetensors").unlink()
    with pytest.raises(DataError, match=r"holds 1 files of optimizer state .* 2 were written"):
        SavedMoments(tmp_path, 0)
