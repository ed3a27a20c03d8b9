"""Targets: chosen by their losses, or named by words and places."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity.analysis.inputs.documents import Document
from olmo_sparsity.analysis.measurement.targets import (
    choose_targets,
    find_spans,
    fit_threshold,
    parse_at,
    places_of,
    sampled_blocks,
    targets_by_text,
)
from olmo_sparsity.analysis.results.statistics import half_of
from olmo_sparsity.analysis.settings import Settings, parse_share
from olmo_sparsity.errors import ConfigError, DataError
from tests.support.explanations import make_tokenizer
from tests.support.measurements import losses_table


def test_names_of_targets() -> None:
    tokenizer = make_tokenizer()._tokenizer
    ids = tokenizer.encode("w1 w2 w11 w1 w2", add_special_tokens=False).ids
    document = Document(np.array(ids), tokenizer=tokenizer)
    assert "".join(document.texts) == "w1 w2 w11 w1 w2"
    assert find_spans(document, "w1 w2") == [(0, 2), (3, 5)]
    assert find_spans(document, re.compile(r"\bw1\b")) == [(0, 1), (3, 4)]
    assert find_spans(document, "w1") == [(0, 1), (2, 3), (3, 4)]
    assert find_spans(document, 2) == find_spans(document, np.int64(2)) == [(2, 3)]
    for strange in (5.0, [None], [1.5]):
        with pytest.raises(ConfigError, match="is neither words"):
            find_spans(document, strange)  # type: ignore[arg-type] # wrong on purpose
    assert find_spans(document, -1) == [(4, 5)]
    assert find_spans(document, slice(1, 3)) == [(1, 3)]
    assert find_spans(document, ["w11", slice(-2, None)]) == [(2, 3), (3, 5)]
    for wrong in ("w3", re.compile("z*"), 7, slice(4, 2), slice(0, 4, 2), []):
        with pytest.raises((ConfigError, DataError)):
            find_spans(document, wrong)
    assert parse_at("3:5") == slice(3, 5)
    assert parse_at("/a+/").pattern == "a+"  # type: ignore[union-attr] # a pattern here
    assert parse_at("a/b") == "a/b"


@pytest.mark.parametrize("long", ["all", 12])
def test_each_block_has_the_same_chance_to_be_sampled(long: Any) -> None:
    """So means, quantiles and totals of sampled targets are those of all targets."""
    lengths, share = (20, 45, 120), 0.3
    documents = [Document(np.arange(size), number) for number, size in enumerate(lengths)]
    settings = Settings(long=long, short=4, stride=5, sample=share)
    every = replace(settings, sample=1.0)
    drawn: dict[tuple[int, int], int] = defaultdict(int)
    num_seeds = 600
    for seed in range(num_seeds):
        for document in documents:
            for block in sampled_blocks(document, replace(settings, seed=seed)):
                drawn[document.number, block.start] += 1
    blocks = {(d.number, block.start) for d in documents for block in sampled_blocks(d, every)}
    assert drawn.keys() == blocks
    assert all(abs(num / num_seeds - share) < 0.09 for num in drawn.values())
    assert sum(drawn.values()) / num_seeds == pytest.approx(share * len(blocks), abs=0.2)
    first = sampled_blocks(documents[2], settings)
    assert [block.start for block in first] == sorted({block.start for block in first})
    found = targets_by_text(
        documents, replace(settings, sets=("every",), share=1.0, max_targets="all")
    )
    for document in documents:
        places = places_of(sampled_blocks(document, settings)).tolist()
        assert found.target[found.document == document.number].tolist() == places


def test_targets_are_chosen_as_said() -> None:
    losses = losses_table(
        document=[0] * 5 + [1] * 5,
        target=[*range(6, 11)] * 2,
        loss_short=[1.0] * 10,
        loss_long=[0.0] * 5 + [0.4, 0.999, 0.6, 1.002, -1.0],
        placebo_loss_long=[1.0] * 5 + [1.0, 0.1, 1.0, 1.0, 1.0],
        bigram=[False] * 5 + [False, True, False, True, True],
    )
    half = losses[losses.document == 0]
    assert fit_threshold(half, 0.1, 0.2) == 1.0
    assert fit_threshold(half, 0.1, 1.5) == 1.5
    assert fit_threshold(half, 1.0, 0.2) is None
    both: Any = {"share": 0.2, "sets": ("gap", "bigram")}
    found = choose_targets(losses, 0.5, Settings(**both))
    assert set(found.document) == {1}
    places = found.groupby(["far_part", "target_set"]).target.apply(list).to_dict()
    assert places["document", "gap"] == [6, 10]
    assert places["placebo", "gap"] == [7]
    # A fifth of five targets is one; which one has nothing to do with losses.
    (drawn,) = places["document", "bigram"]
    assert drawn in (7, 9, 10)
    other = choose_targets(losses.assign(loss_long=0.0), 0.5, Settings(**both))
    assert other.target[other.target_set == "bigram"].tolist() == [drawn]
    more = choose_targets(losses, 0.5, Settings(share=0.4, sets=("bigram",)))
    assert len(more) == 2
    assert set(more.target_set) == {"bigram"}
    few = choose_targets(losses, 0.5, Settings(**both, max_targets=1))
    assert (few.groupby(["far_part", "target_set", "document"]).size() == 1).all()
    assert len(few.merge(found)) == len(few)
    all_of_them = choose_targets(losses, None, Settings(share=1.0, max_targets="all"))
    assert all_of_them[all_of_them.far_part == "document"].target.tolist() == [*range(6, 11)]
    settings = [Settings(share=0.2, seed=seed, max_targets=1) for seed in range(9)]
    seeds = [choose_targets(losses, 0.5, one) for one in settings]
    assert len({tuple(one.target) for one in seeds}) > 1
    assert (parse_share("all"), parse_share("top10%")) == (1.0, 0.1)
    assert {half_of(0), half_of(1)} == {"threshold", "report"}


def test_every_token_has_the_same_chance() -> None:
    settings = Settings(long=4, short=2, share=0.5, sets=("every",), max_targets=10)
    sizes = [11, 104, 54, 254]
    documents = [Document(np.zeros(size, int), number) for number, size in enumerate(sizes)]
    counts = np.zeros(len(sizes))
    for seed in range(40):
        drawn = targets_by_text(documents, replace(settings, seed=seed))
        assert not drawn.duplicated().any()
        counts += drawn.groupby("document").size().reindex(range(len(sizes)), fill_value=0)
    rates = counts / 40 / (np.array(sizes) - 4)
    np.testing.assert_allclose(rates, 40 / (sum(sizes) - 16), atol=0.03)
    settings = replace(settings, share=0.1, max_targets="all")
    drawn = targets_by_text(documents, settings)
    assert abs(len(drawn) - 41) <= 3
    assert drawn.target.min() >= 4
    some = targets_by_text(documents[2:], settings)
    rest = drawn[drawn.document >= 2].reset_index(drop=True)
    pd.testing.assert_frame_equal(some, rest)  # which others there are does not matter
