"""Token files are hashed once, and a later change is noticed at the start and while training."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from olmo_sparsity.base import manifest
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.sections import DataConfig, PositionsConfig
from olmo_sparsity.data import sequences as sequences_module
from olmo_sparsity.data.batches import BatchPlan, TrainingBatches
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sequences import Sequences
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.data.token_files import BLOCK_BYTES, SAMPLED_BLOCKS, sample_of


@pytest.fixture
def hashed(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were hashed, of a text that was prepared a while ago."""
    prepare(data)
    for path in Path(data.folder).iterdir():
        os.utime(path, (10**9, 10**9))
    names: list[str] = []
    compute = manifest.sha256_of

    def noting(path: Path) -> str:
        names.append(path.name)
        return compute(path)

    monkeypatch.setattr(manifest, "sha256_of", noting)
    return names


def tokens_of(data: DataConfig) -> Path:
    return sorted(Path(data.folder).glob("train-*.tokens.*"))[0]


def test_a_start_hashes_no_file_that_an_earlier_one_has_verified(
    data: DataConfig, hashed: list[str]
) -> None:
    open_shards(data, "train")
    first = sorted(hashed)
    assert {name.partition("-")[0] for name in first} == {"train"}
    hashed.clear()
    open_shards(data, "train")
    assert hashed == []
    open_shards(data, "train", (0, 2))  # another number of processes
    open_shards(data, "train", (1, 2))
    assert hashed == []
    os.utime(tokens_of(data))  # touched: another time, the same content
    open_shards(data, "train")
    assert tokens_of(data).name in hashed


def test_a_file_of_the_same_size_and_time_is_told_by_its_sample(
    data: DataConfig, hashed: list[str]
) -> None:
    open_shards(data, "train")
    path = tokens_of(data)
    path.write_bytes(bytes(path.stat().st_size))
    os.utime(path, (10**9, 10**9))
    with pytest.raises(DataError, match=f"{path.name} does not have the SHA-256"):
        open_shards(data, "train")


def test_the_sample_of_a_file_has_its_ends_and_is_evenly_spaced(tmp_path: Path) -> None:
    """Each of its blocks decides it, and nothing else does."""
    path = tmp_path / "train-00000.tokens.u16"
    num_between = 3
    distance = num_between * BLOCK_BYTES
    starts = [index * distance for index in range(SAMPLED_BLOCKS)]
    content = bytes(starts[-1] + BLOCK_BYTES)

    def sample_with_change_at(place: int) -> str:
        path.write_bytes(content[:place] + b"x" + content[place + 1 :])
        return sample_of(path, len(content))

    path.write_bytes(content)
    unchanged = sample_of(path, len(content))
    for start in starts:
        assert sample_with_change_at(start) != unchanged
        assert sample_with_change_at(start + BLOCK_BYTES - 1) != unchanged
    for start in starts[:-1]:
        assert sample_with_change_at(start + BLOCK_BYTES) == unchanged
    for start in starts[1:]:
        assert sample_with_change_at(start - 1) == unchanged


def test_a_file_that_changed_just_now_is_hashed_again(data: DataConfig, hashed: list[str]) -> None:
    for path in Path(data.folder).iterdir():
        os.utime(path)
    open_shards(data, "train")
    assert not list(Path(data.folder).glob("verified-*"))


def test_a_damaged_record_of_what_was_verified_counts_as_none(
    data: DataConfig, hashed: list[str]
) -> None:
    open_shards(data, "train")
    (record,) = Path(data.folder).glob("verified-*.json")
    record.write_text('{"files": 3}')
    hashed.clear()
    open_shards(data, "train")
    assert hashed


@pytest.mark.parametrize("damage", ["overwritten", "truncated", "longer"])
def test_a_file_that_changes_in_training_is_an_error(
    data: DataConfig, hashed: list[str], damage: str
) -> None:
    shards = open_shards(data, "train")
    source = TrainingBatches(shards, BatchPlan(PositionsConfig(), 16, batch_size=4, seed=1))
    assert source.of_step(1).tokens_BL.shape == (4, 16)
    for path in shards.paths:
        size = path.stat().st_size
        with path.open("r+b") as file:
            if damage == "overwritten":
                file.write(bytes(size))
            else:
                file.truncate(0 if damage == "truncated" else size + 2)
    with pytest.raises(DataError, match=r"train-.* changed after this run started .*restore it"):
        source.of_step(2)


def test_files_are_reopened_where_there_are_more_than_may_be_open(
    data: DataConfig, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = open_shards(data, "train")
    assert len(shards.paths) > 2
    whole = [Sequences(shards, 16)[number] for number in range(len(Sequences(shards, 16)))]
    monkeypatch.setattr(sequences_module, "MAX_OPEN_FILES", 2)
    sequences = Sequences(shards, 16)
    order = np.random.default_rng(0).permutation(len(whole))
    for number in order:
        assert (sequences[int(number)] == whole[number]).all()
    assert len(sequences._open_files) == 2
