"""Several corpora are drawn by weight, in an order that follows from step and seed alone."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.config.run import config_from_dict, flatten, load_saved_config, save_config
from olmo_sparsity.config.sections import PositionsConfig
from olmo_sparsity.config.text import DataConfig
from olmo_sparsity.data.batches import BatchPlan, TrainingBatches
from olmo_sparsity.data.mixture import SeveralCorpora, Weights
from olmo_sparsity.data.order import stored_order
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.shards import TokenShards, open_shards


def several(sizes: dict[str, int], *weights: Weights, batch_size: int = 8) -> SeveralCorpora:
    return SeveralCorpora(sizes, weights, batch_size=batch_size, seed=3, order="stored")


SIZES = {"web": 50, "code": 7, "books": 20}
FIRST = Weights({"web": 0.6, "code": 0.1, "books": 0.3}, until=20)
SECOND = Weights({"web": 1, "code": 2, "books": 0}, until=None)


def test_the_order_is_that_of_a_loop_over_all_sequences() -> None:
    """Which counts what it has drawn, where the module computes any place directly."""
    expected = []
    drawn = dict.fromkeys(SIZES, 0)
    first_index = {"web": 0, "code": 50, "books": 57}
    for stretch, num_batches in ((FIRST, 20), (SECOND, 30)):
        weights = {name: Fraction(str(weight)) for name, weight in stretch.by_corpus.items()}
        offered = dict.fromkeys(SIZES, 0)
        taken = dict.fromkeys(SIZES, 0)
        for _ in range(8 * num_batches):
            rest = sum(weights.values())
            for name, weight in weights.items():
                offered[name] += 1
                if rest and offered[name] * weight / rest >= taken[name] + 1:
                    break
                rest -= weight
            taken[name] += 1
            epoch, place = divmod(drawn[name], SIZES[name])
            drawn[name] += 1
            expected.append((epoch, first_index[name] + stored_order(SIZES[name], 3, epoch)[place]))
    order = several(SIZES, FIRST, SECOND)
    assert [order.find(number) for number in range(400)] == expected
    assert order.count_reads(50) == {name: drawn[name] / SIZES[name] for name in SIZES}


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=5).filter(lambda weights: sum(weights) > 1e-3),
    st.integers(0, 10**9),
)
def test_each_corpus_has_its_share_of_any_beginning(weights: list[float], batches: int) -> None:
    names = [f"corpus{number}" for number in range(len(weights))]
    order = several(dict.fromkeys(names, 1), Weights(dict(zip(names, weights, strict=True)), None))
    counts = order.count_reads(batches)
    assert sum(counts.values()) == 8 * batches
    for name, weight in zip(names, weights, strict=True):
        expected = 8 * batches * weight / sum(weights)
        assert abs(counts[name] - expected) <= len(names) + 1e-6 * expected


# --- prepared ------------------------------------------------------------------------------------


def settings(folder: Path) -> dict[str, Any]:
    return {
        "folder": str(folder / "prepared"),
        "tokenizer": {"train_vocab": 300},
        "heldout_share": 0.3,
        "corpus": [
            {"name": "words", "weight": 3, "source": "files", "path": str(folder / "words")},
            {"name": "digits", "weight": 1, "source": "files", "path": str(folder / "digits")},
        ],
    }


@pytest.fixture
def mixed(tmp_path: Path) -> DataConfig:
    for name, unit in (("words", "river"), ("digits", "1984")):
        (tmp_path / name).mkdir()
        for number in range(40):
            text = " ".join(f"{unit}{number * place}" for place in range(60))
            (tmp_path / name / f"{number}.txt").write_text(text)
    return config_from_dict({"data": settings(tmp_path)}).data


def test_processes_share_the_files_of_every_corpus(tmp_path: Path) -> None:
    corpora = {"words": "river", "digits": "1984"}
    for name, unit in corpora.items():
        (tmp_path / name).mkdir()
        for file in "ab":
            lines = [json.dumps({"text": f"{unit}{number} " * 40}) for number in range(30)]
            (tmp_path / name / f"{file}.jsonl").write_text("\n".join(lines))
    alone = config_from_dict({"data": settings(tmp_path)}).data
    shared = config_from_dict(
        {"data": settings(tmp_path) | {"folder": str(tmp_path / "shared")}}
    ).data
    assert prepare(shared, (1, 2)) is None
    assert prepare(shared, (0, 2)) is not None
    prepare(alone)
    for split in ("train", "heldout"):
        of_one, of_two = open_shards(alone, split), open_shards(shared, split)
        assert len(of_one) == len(of_two) > 0
        for number in range(len(of_one)):
            assert of_one.document(number).tolist() == of_two.document(number).tolist()


def batches_of(shards: TokenShards, rank: int = 0, world_size: int = 1) -> TrainingBatches:
    plan = BatchPlan(
        PositionsConfig(scheme="pose", target_length=64),
        length=16,
        batch_size=8,
        seed=5,
        weights=[Weights({"words": 3, "digits": 1}, 2), Weights({"words": 0, "digits": 1}, None)],
    )
    return TrainingBatches(shards, plan, rank, world_size)


def is_digits(shards: TokenShards, tokens: list[int]) -> bool:
    return "river" not in shards.tokenizer.decode(tokens).replace(" ", "")


def test_batches_have_the_shares_of_their_stage_on_any_number_of_processes(
    mixed: DataConfig,
) -> None:
    prepare(mixed)
    shards = open_shards(mixed, "train")
    whole = batches_of(shards)
    for step in range(1, 5):
        batch = whole.of_step(step)
        kinds = Counter(is_digits(shards, row) for row in batch.tokens_BL.tolist())
        assert kinds == ({False: 6, True: 2} if step <= 2 else {True: 8})
        parts = [batches_of(shards, rank, 4).of_step(step) for rank in range(4)]
        for name in ("tokens_BL", "positions_BL"):
            joined = torch.empty_like(getattr(batch, name))
            for rank, part in enumerate(parts):
                joined[rank::4] = getattr(part, name)
            assert torch.equal(joined, getattr(batch, name))
    ahead = list(islice(batches_of(shards).from_step(3), 2))
    assert torch.equal(ahead[1].tokens_BL, whole.of_step(4).tokens_BL)


def test_corpora_share_a_tokenizer_and_keep_their_shards_when_one_is_added(
    mixed: DataConfig, tmp_path: Path
) -> None:
    given = settings(tmp_path)
    prepare(mixed)
    before = open_shards(mixed, "train")
    assert list(before.corpora) == ["words", "digits"]
    assert before.num_tokens == sum(part.num_tokens for part in before.corpora.values())
    (tmp_path / "more").mkdir()
    for number in range(20):
        (tmp_path / "more" / f"{number}.txt").write_text(f"more words {number} " * 30)
    given["corpus"].append({"name": "more", "source": "files", "path": str(tmp_path / "more")})
    larger = config_from_dict({"data": given}).data
    with pytest.raises(DataError, match="more is not prepared; run `olmo-sparsity prepare`"):
        open_shards(larger, "train")
    prepare(larger)
    after = open_shards(larger, "train")
    assert after.corpora["words"].fingerprint == before.corpora["words"].fingerprint
    assert after.fingerprint != before.fingerprint
    assert len(after) == len(before) + len(after.corpora["more"])


def test_a_corpus_that_is_too_short_is_named(mixed: DataConfig) -> None:
    prepare(mixed)
    shards = open_shards(mixed, "train")
    weights = [Weights({"words": 1, "digits": 0}, None)]
    plan = BatchPlan(PositionsConfig(), length=10**6, batch_size=1, seed=5, weights=weights)
    with pytest.raises(DataError, match="the corpus words holds no sequence of 1000000 tokens"):
        TrainingBatches(shards, plan)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["corpus"][0].pop("name"), r"data.corpus\[0\].name is missing"),
        (lambda d: d["corpus"][0].update(name="../up"), r"name '../up' must consist of letters"),
        (lambda d: d["corpus"][0].update(name="digits"), "two corpora have one name"),
        (lambda d: d["corpus"][0].update(path=d["corpus"][1]["path"]), "are the same text"),
        (lambda d: [c.update(weight=0) for c in d["corpus"]], "one of them above 0"),
        (lambda d: d["corpus"][0].update(weight=-1), "must be at least 0"),
    ],
)
def test_wrong_names_and_weights_are_refused(tmp_path: Path, change: Any, problem: str) -> None:
    given = settings(tmp_path)
    change(given)
    with pytest.raises(ConfigError, match=problem):
        config_from_dict({"data": given})


def test_weights_of_a_stage_name_every_corpus(tmp_path: Path) -> None:
    stages = [{"tokens": 16, "until": 3, "weights": {"words": 1}}, {"tokens": 16}]
    run = {"data": settings(tmp_path), "training": {"length": stages}}
    with pytest.raises(ConfigError, match=r"length\[0\].weights has words; .*: words, digits"):
        config_from_dict(run)
    stages[0]["weights"] = {"words": 1, "digits": 0}
    config = config_from_dict(run)
    save_config(config, tmp_path / "saved.yaml")
    saved = flatten(load_saved_config(tmp_path / "saved.yaml"))
    assert saved == flatten(config) | {"data.order": "auto"}
    assert saved["data.corpus[1].name"] == "digits"
