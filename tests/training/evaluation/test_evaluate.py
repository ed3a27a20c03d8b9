"""Held-out losses by position, and induction."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.data.heldout import heldout_batches
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.losses import token_losses
from olmo_sparsity.text.vocabulary import IGNORED
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.setup.inputs import build_evaluation
from olmo_sparsity.training.setup.resolve import resolve
from tests.conftest import MakeConfig

CPU = torch.device("cpu")


def test_losses_by_position_are_means_over_those_positions(make_config: MakeConfig) -> None:
    config = make_config(evaluation__length=50, evaluation__batch_size=3)
    heldout = open_shards(config.data, "heldout")
    config = resolve(config, heldout, CPU, Hardware.here(CPU))
    engine = Engine(build_model(config.model), config.training, config.optimizer)
    found = build_evaluation(heldout, config).losses(engine)
    assert [(row["from"], row["to"]) for row in found] == [(0, 16), (16, 32), (32, 50)]
    (whole,) = heldout_batches(heldout, length=50, num_sequences=4, batch_size=4)
    nll_BL = token_losses(engine.model, whole.tokens_BL, whole.positions_BL, whole.labels_BL)
    for row, columns in zip(found, (slice(0, 15), slice(15, 31), slice(31, 49)), strict=True):
        assert row["loss"] == pytest.approx(float(nll_BL[:, columns].mean()), rel=1e-5)
        assert row["num_tokens"] == nll_BL[:, columns].numel()
        # The same with the bytes counted document by document.
        texts = [
            heldout.tokenizer.decode(heldout.document(i).tolist()) for i in range(len(heldout))
        ]
        num_bytes = sum(len(text.encode()) for text in texts)
        bits = row["loss"] / math.log(2) * heldout.num_tokens / num_bytes
        assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-3)


def test_induction_is_the_fall_in_loss_on_a_second_reading(make_config: MakeConfig) -> None:
    """Of a parrot, which knows what followed a token the last time, and of a fresh model."""
    config = make_config(training__length=20, evaluation__batch_size=1)
    heldout = open_shards(config.data, "heldout")
    config = resolve(config, heldout, CPU, Hardware.here(CPU))
    engine = Engine(build_model(config.model), config.training, config.optimizer)
    assert abs(build_evaluation(heldout, config).induction_drop(engine)) < 0.1

    def parrot(batch: Batch) -> torch.Tensor:
        nll_BL = torch.zeros(batch.labels_BL.shape)
        for row, labels in enumerate(batch.labels_BL.tolist()):
            for place, label in enumerate(labels):
                nll_BL[row, place] = 3.0 * (label != IGNORED and place < 10)
        return nll_BL

    engine.token_losses = parrot
    assert build_evaluation(heldout, config).induction_drop(engine) == pytest.approx(3.0)
    shares = []
    for rank in range(30):  # more processes than the last batch has passages
        engine.processes = SimpleNamespace(
            rank=rank, world_size=30, sum_in_place=lambda sums: shares.append(sums) or torch.ones(3)
        )
        build_evaluation(heldout, config).induction_drop(engine)
    assert sum(shares).tolist() == [3 * 64, 0, 64]


def test_a_range_of_positions_counts_the_documents_that_reach_it(make_config: MakeConfig) -> None:
    """With position IDs of each document's own, few documents are as long as the last range."""
    config = make_config(
        evaluation__length=400,
        evaluation__num_sequences=20,
        data__mask_documents=True,
        positions__per_document=True,
    )
    heldout = open_shards(config.data, "heldout")
    config = resolve(config, heldout, CPU, Hardware.here(CPU))
    engine = Engine(build_model(config.model), config.training, config.optimizer)
    found = build_evaluation(heldout, config).losses(engine)
    (batch,) = heldout_batches(
        heldout, length=400, num_sequences=20, batch_size=20,
        mask_documents=True, per_document=True,
    )  # fmt: skip
    assert batch.documents_BL is not None
    for row in found:
        documents = {
            (number, int(batch.documents_BL[number, place]))
            for number in range(len(batch.tokens_BL))
            for place in range(399)
            if row["from"] <= int(batch.positions_BL[number, place]) + 1 < row["to"]
        }
        assert row["num_documents"] == len(documents)
    assert found[0]["num_documents"] > found[-1]["num_documents"]


def test_too_few_documents_of_the_length_are_rejected_before_training(
    make_config: MakeConfig,
) -> None:
    config = make_config(evaluation__documents=8, evaluation__document_length=5000)
    heldout = open_shards(config.data, "heldout")
    with pytest.raises(DataError, match="0 held-out documents have 5,000 tokens"):
        build_evaluation(heldout, config).check()
