"""Batches: OLMo's own sequences in OLMo's own order, the same for every world size."""

from __future__ import annotations

import hashlib
import threading
from copy import copy
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.sections import PositionsConfig, StageConfig, TrainingConfig
from olmo_sparsity.config.text import DataConfig
from olmo_sparsity.data.background import in_background
from olmo_sparsity.data.batches import Batch, BatchPlan, TrainingBatches
from olmo_sparsity.data.heldout import heldout_batches
from olmo_sparsity.data.order import stored_order
from olmo_sparsity.data.sequences import Sequences
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.data.transform import Transform, load_transform
from olmo_sparsity.text.vocabulary import IGNORED
from olmo_sparsity.training.steps import draw

POSE = PositionsConfig(scheme="pose", target_length=256)
ROOT = Path(__file__).parents[2]


def study_transform(shards: TokenShards, **shares: float) -> Transform | None:
    """The study's, found in its file, as a run finds it."""
    options = {name: {"share": share} for name, share in shares.items()}
    name = f"{ROOT}/study/transforms.py:plant_or_repeat"
    data = DataConfig(transform=name, transform_options=options)
    return load_transform(data, shards.tokenizer, 256)


def batches(
    shards: TokenShards,
    positions: PositionsConfig = POSE,
    rank: int = 0,
    world_size: int = 1,
    **changes: Any,
) -> TrainingBatches:
    settings = {"length": 16, "batch_size": 8, "seed": 5} | changes
    return TrainingBatches(shards, BatchPlan(positions, **settings), rank, world_size)


def same(left: Batch, right: Batch) -> bool:
    return all(
        torch.equal(getattr(left, name), getattr(right, name))
        for name in ("tokens_BL", "positions_BL", "labels_BL")
    )


@pytest.mark.parametrize("epoch", [0, 3])
def test_order_is_that_of_olmos_iterable_dataset(epoch: int) -> None:
    from olmo.data.iterable_dataset import IterableDataset

    theirs = IterableDataset(
        [[0]] * 101, 4, seed=9, epoch=epoch, drop_last=True, rank=0, world_size=1
    )
    assert (stored_order(101, 9, epoch) == theirs.get_global_indices()).all()


def test_from_step_continues_exactly_across_epochs(shards: TokenShards) -> None:
    source = batches(shards, length=128, batch_size=64)
    per_epoch = source.steps_per_epoch
    whole = list(islice(source.from_step(1), 2 * per_epoch + 2))
    for start in (1, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch):
        assert same(next(source.from_step(start + 1)), whole[start])


def test_each_epoch_sees_every_sequence_once_with_new_positions(shards: TokenShards) -> None:
    source = batches(shards, length=128, batch_size=32)
    steps = source.steps_per_epoch
    first, second = (list(islice(source.from_step(epoch * steps + 1), steps)) for epoch in range(2))
    rows = [
        {tuple(row) for b in epoch for row in b.tokens_BL.tolist()} for epoch in (first, second)
    ]
    assert len(rows[0]) > 0.9 * steps * 32
    for epoch, found in enumerate((first, second)):  # without what is no full batch
        order = stored_order(len(source.sequences), 5, epoch)[: steps * 32].tolist()
        tokens = np.stack([source.sequences[index] for index in order])
        assert (torch.cat([batch.tokens_BL for batch in found]).numpy() == tokens).all()
    assert not same(first[0], second[0])


def staged(shards: TokenShards, **changes: Any) -> TrainingBatches:
    """Sequences of 16 tokens in the first three steps, of 32 in two more, then of 64."""
    length_at = TrainingConfig(
        lengths=[StageConfig(16, until=3), StageConfig(32, until=5), StageConfig(64)]
    ).length_at
    return batches(shards, length=64, batch_size=4, length_at=length_at, **changes)


@pytest.mark.parametrize("world_size", [1, 2])
def test_shorter_sequences_are_cut_from_the_same_text(shards: TokenShards, world_size: int) -> None:
    longest = list(islice(batches(shards, length=64, batch_size=4).from_step(1), 7))
    shares = [
        list(islice(staged(shards, rank=rank, world_size=world_size).from_step(1), 7))
        for rank in range(world_size)
    ]
    for step, length in enumerate([16, 16, 16, 32, 32, 64, 64]):
        parts = [share[step] for share in shares]
        assert [tuple(part.tokens_BL.shape) for part in parts] == [
            (4 * 64 // length // world_size, length)
        ] * world_size
        rows = sorted(row for part in parts for row in part.tokens_BL.tolist())
        assert rows == sorted(longest[step].tokens_BL.view(-1, length).tolist())
        for part in parts:
            assert torch.equal(part.labels_BL[:, :-1], part.tokens_BL[:, 1:])
            assert (part.labels_BL[:, -1] == IGNORED).all()
            assert len(part.positions_BL.unique(dim=0)) > 1, "each piece has IDs of its own"
            assert part.positions_BL.max() < 256
    whole = list(islice(staged(shards).from_step(1), 7))
    for start in range(7):
        assert same(next(staged(shards).from_step(start + 1)), whole[start])


def test_each_document_may_have_position_ids_of_its_own(shards: TokenShards) -> None:
    positions = PositionsConfig(scheme="pose", target_length=400, per_document=True)
    batch = next(batches(shards, positions, length=200, mask_documents=True).from_step(1))
    assert next(batches(shards).from_step(1)).documents_BL is None
    ends_BL = (batch.tokens_BL == shards.eos_id).int()
    assert torch.equal(batch.documents_BL, ends_BL.cumsum(1) - ends_BL)
    (part, *_) = batch.split(3)
    assert torch.equal(part.to(torch.device("cpu")).documents_BL, batch.documents_BL[:3])
    first_BL = torch.cat([torch.ones(8, 1), batch.documents_BL.diff(dim=1)], 1) > 0
    assert first_BL.sum() > 8
    assert torch.equal(batch.positions_BL == 0, first_BL)
    (heldout, *_) = heldout_batches(
        shards, length=300, num_sequences=3, batch_size=3, mask_documents=True, per_document=True
    )
    first_BL = torch.cat([torch.ones(3, 1), heldout.documents_BL.diff(dim=1)], 1) > 0
    assert torch.equal(heldout.positions_BL == 0, first_BL)
    assert ((heldout.positions_BL.diff(dim=1) == 1) == ~first_BL[:, 1:]).all()


def test_rows_of_several_kinds_do_not_change_each_other(shards: TokenShards) -> None:
    mixed: dict[str, Any] = {
        "positions": PositionsConfig(scheme="pose", target_length=512, per_document=True),
        "length": 300,
        "mask_documents": True,
        "transform": study_transform(shards, planted=0.3, repeated=0.3),
    }
    whole = next(batches(shards, **mixed).from_step(4))
    assert whole.documents_BL is not None
    kinds = {
        (bool(documents_L.any()), bool((labels_L[:-1] == tokens_L[1:]).all()))
        for tokens_L, labels_L, documents_L in zip(
            whole.tokens_BL, whole.labels_BL, whole.documents_BL, strict=True
        )
    }
    assert {(True, True), (False, True), (False, False)} <= kinds, "plain, planted, repeated"
    for rank in range(8):
        alone = next(batches(shards, **mixed, rank=rank, world_size=8).from_step(4))
        assert same(alone, whole.rows(slice(rank, rank + 1)))
        assert torch.equal(alone.documents_BL, whole.documents_BL[rank : rank + 1])


def test_a_step_is_what_it_was_for_runs_that_go_on(shards: TokenShards) -> None:
    """Positions, planted marks and repeated passages, of two lengths."""
    source = staged(shards, transform=study_transform(shards, planted=0.4, repeated=0.3))
    digest = hashlib.sha256()
    for step in (1, 4, 7, 401):
        batch = source.of_step(step)
        for tensor in (batch.tokens_BL, batch.positions_BL, batch.labels_BL):
            digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest()[:16] == "5496423f6ef9938a"


@pytest.mark.parametrize("mask_documents", [False, True])
def test_heldout_text_is_read_from_its_start(shards: TokenShards, mask_documents: bool) -> None:
    text = np.concatenate(shards.arrays).astype(np.int64)[: 7 * 20].reshape(7, 20)
    found = list(
        heldout_batches(
            shards, length=20, num_sequences=7, batch_size=3, mask_documents=mask_documents
        )
    )
    assert [len(batch.tokens_BL) for batch in found] == [3, 3, 1]
    assert torch.equal(found[0].positions_BL[1], torch.arange(20))
    assert (torch.cat([batch.tokens_BL for batch in found]).numpy() == text).all()
    labels = torch.cat([batch.labels_BL for batch in found]).numpy()
    assert (labels[:, :-1] == text[:, 1:]).all()
    assert (labels[:, -1] == IGNORED).all()
    whole = next(heldout_batches(shards, length=20, num_sequences=10**9, batch_size=10**9))
    assert len(whole.tokens_BL) == len(Sequences(shards, 20))


def test_an_epoch_has_a_batch_at_least(shards: TokenShards) -> None:
    size = len(Sequences(shards, 64))
    assert batches(shards, length=64, batch_size=size).steps_per_epoch == 1
    with pytest.raises(DataError, match="below batch_size="):
        batches(shards, length=64, batch_size=size + 1)
    longest = min(len(array) for array in shards.arrays)
    of_longest = batches(shards, PositionsConfig(), length=longest, batch_size=1)
    assert len(of_longest.of_step(1).tokens_BL) == 1
    with pytest.raises(DataError, match="no held-out file holds"):
        next(heldout_batches(shards, length=10**9, num_sequences=1, batch_size=1))


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path, shards: TokenShards) -> None:
    damaged = copy(shards)
    damaged.paths = [tmp_path / path.name for path in shards.paths]
    for path, original in zip(damaged.paths, shards.paths, strict=True):
        path.write_bytes(original.read_bytes()[:64] + b"\xff\xff" + original.read_bytes()[66:])
    with pytest.raises(DataError, match=r"holds token 65535 near place 32, .*512"):
        Sequences(damaged, 16)[2]
    damaged.vocab_size = 65536
    assert Sequences(damaged, 16)[2].max() == 65535
    damaged.vocab_size = 65535
    with pytest.raises(DataError, match="has 65535"):
        Sequences(damaged, 16)[2]
    assert len(Sequences(damaged, 16)[1]) == 16


# --- drawn ahead ----------------------------------------------------------------------------------


def test_what_is_drawn_ahead_is_the_same_and_nothing_is_drawn_beyond_the_end(
    shards: TokenShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    collate = TrainingBatches._collate

    def noting(self: TrainingBatches, *given: Any) -> Batch:
        threads.append(threading.current_thread())
        return collate(self, *given)

    monkeypatch.setattr(TrainingBatches, "_collate", noting)
    source = batches(shards)
    plain = list(islice(source.from_step(4), 4))
    threads.clear()
    ahead = list(in_background(draw(source, 4, 7, torch.device("cpu")), depth=1))
    assert len(ahead) == len(plain) == len(threads) == 4
    assert all(map(same, ahead, plain))
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("step", [1, 6])
def test_each_process_knows_the_labels_of_the_whole_step(shards: TokenShards, step: int) -> None:
    parts = [staged(shards, rank=rank, world_size=2).of_step(step) for rank in range(2)]
    counted = sum(int((part.labels_BL != IGNORED).sum()) for part in parts)
    assert [part.num_labels for part in parts] == [counted, counted]
