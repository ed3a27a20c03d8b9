"""Targets: chosen by their losses, or named by words and places."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from olmo_sparsity import measure
from olmo_sparsity.analysis.explain.largest_gaps import first_place_with_units, largest_gaps
from olmo_sparsity.analysis.measurement.at import find_spans, parse_at
from olmo_sparsity.analysis.measurement.recovery import recover
from olmo_sparsity.analysis.measurement.target_tables import (
    TARGET_COLUMNS,
    check_all_evaluated,
    targets_fingerprint,
    targets_of_document,
    with_full_window,
)
from olmo_sparsity.analysis.measurement.targets import (
    choose_targets,
    fit_threshold,
    places_of,
    sampled_blocks,
    targets_by_text,
)
from olmo_sparsity.analysis.options import MIN_GAP, Settings, parse_share
from olmo_sparsity.analysis.results.target_rows import half_of
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.windows import Windows
from tests.support.explanations import make_tokenizer
from tests.support.measurements import VOCAB, loaded, losses_table, planned, untrained


@pytest.fixture
def five_words() -> Document:
    tokenizer = make_tokenizer()._tokenizer
    ids = tokenizer.encode("w1 w2 w11 w1 w2", add_special_tokens=False).ids
    return Document(np.array(ids), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("at", "spans"),
    [
        ("w1 w2", [(0, 2), (3, 5)]),
        ("w1", [(0, 1), (2, 3), (3, 4)]),
        (re.compile(r"\bw1\b"), [(0, 1), (3, 4)]),
        (2, [(2, 3)]),
        (np.int64(2), [(2, 3)]),
        (-1, [(4, 5)]),
        (slice(1, 3), [(1, 3)]),
        (["w11", slice(-2, None)], [(2, 3), (3, 5)]),
    ],
)
def test_a_name_finds_all_its_tokens(five_words: Document, at: Any, spans: Any) -> None:
    assert find_spans(five_words, at) == spans


@pytest.mark.parametrize(
    "at", ["w3", 5.0, [None], re.compile("z*"), 7, slice(4, 2), slice(0, 4, 2), []], ids=repr
)
def test_a_name_of_no_token_is_refused(five_words: Document, at: Any) -> None:
    with pytest.raises((ConfigError, DataError), match="at"):
        find_spans(five_words, at)


def test_a_target_typed_in_a_shell_is_words_tokens_or_a_pattern() -> None:
    assert parse_at("3:5") == slice(3, 5)
    assert parse_at("/a+/").pattern == "a+"  # type: ignore[union-attr] # a pattern here
    for words in ("a/b", "//", "/", "a/", "3:x"):
        assert parse_at(words) == words


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


def test_of_every_token_as_many_are_drawn_as_wanted_on_average() -> None:
    """The same share of each document, and no more than the mean of `max_targets`."""
    documents = [Document(np.arange(size), number) for number, size in enumerate((20, 45, 120))]
    for share, most, rate in ((0.25, 100, 0.25), (1.0, 10, 30 / 149), (1.0, 1000, 1.0)):
        settings = Settings(long=12, short=4, sets=("every",), share=share, max_targets=most)
        found = targets_by_text(documents, settings)
        assert not found.duplicated().any()
        for document in documents:
            num_drawn, size = (found.document == document.number).sum(), len(document.tokens) - 12
            assert abs(num_drawn - rate * size) < 1
    assert not len(targets_by_text(documents, replace(settings, sets=("gap",))))


@given(
    gaps=st.lists(st.sampled_from([-1.0, 0.0, MIN_GAP / 2, MIN_GAP, 2 * MIN_GAP]), max_size=12),
    num_targets=st.integers(1, 9),
    column=st.sampled_from(["loss_long", "placebo_loss_long"]),
)
def test_a_first_look_is_at_the_largest_gaps(
    gaps: list[float], num_targets: int, column: str
) -> None:
    """Of equal gaps at the first. If all are small, at the largest alone."""
    places = [*range(10, 10 + len(gaps))]
    losses = losses_table(document=0, target=places, loss_short=0.0, loss_long=9.0)
    losses[column] = -np.array(gaps)
    order = sorted(range(len(gaps)), key=lambda i: -gaps[i])[:num_targets]
    chosen = [i for i in order if gaps[i] >= MIN_GAP] or order[:1]
    found = largest_gaps(losses, column, num_targets)
    assert found == [(10 + i, 11 + i) for i in sorted(chosen)]


def test_the_first_target_has_a_unit() -> None:
    for windows, units, first in (
        (Windows(16, 6), "tokens", 16),
        (Windows("all", 4), "span:3", 7),
        (Windows("all", 4), "words", 5),
        (Windows("all", 4, min_distant=5), "span:3", 9),
    ):
        assert first_place_with_units(windows, units) == first


def test_targets_are_those_of_their_document_and_all_are_evaluated(tmp_path: Path) -> None:
    rows = [(0, 6, "document", "gap", 8), (0, 6, "document", "bigram", 8)]
    rows += [(0, 4, "placebo", "gap", 5), (1, 9, "document", "gap", 10)]
    targets = pd.DataFrame(rows, columns=[*TARGET_COLUMNS, "end"])
    found = targets_of_document(targets, Document(np.arange(20), 0))
    assert {part: spans.tolist() for part, spans in found.items()} == {
        "document": [[6, 8]], "placebo": [[4, 5]],
    }  # fmt: skip
    single = targets.assign(end=targets.target + 1)
    assert targets_fingerprint(single) == targets_fingerprint(single.drop(columns="end"))
    assert targets_fingerprint(targets) != targets_fingerprint(targets.assign(end=9))
    check_all_evaluated(tmp_path, targets, targets)
    with pytest.raises(
        DataError,
        match=r"1 targets were not evaluated, such as 9 of document 1.* delete .*parts/recovery",
    ):
        check_all_evaluated(tmp_path, targets, targets[:3])
    windows = Windows(6, 2)
    assert with_full_window(targets, windows, keep_placebo=True).target.tolist() == [6, 6, 9]
    moved = targets.assign(target=targets.target + 2)
    assert len(with_full_window(moved, windows, keep_placebo=True)) == 4
    assert len(with_full_window(moved, windows, keep_placebo=False)) == 3


@pytest.fixture
def losses() -> pd.DataFrame:
    """Of a document of the threshold half, and of one of the report half."""
    return losses_table(
        document=[0] * 5 + [1] * 5,
        target=[*range(6, 11)] * 2,
        loss_short=[1.0] * 10,
        loss_long=[0.0] * 5 + [0.4, 0.999, 0.6, 1.002, -1.0],
        placebo_loss_long=[1.0] * 5 + [1.0, 0.1, 1.0, 1.0, 1.0],
        bigram=[False] * 5 + [False, True, False, True, True],
    )


TWO_SETS: dict[str, Any] = {"share": 0.2, "sets": ("gap", "bigram")}


def test_a_threshold_is_a_quantile_of_gaps_and_at_least_the_smallest_gap(
    losses: pd.DataFrame,
) -> None:
    half = losses[losses.document == 0]
    assert fit_threshold(half, 0.1, 0.2) == 1.0
    assert fit_threshold(half, 0.1, 1.5) == 1.5
    assert fit_threshold(half, 1.0, 0.2) is None


def test_targets_by_gap_are_those_above_the_threshold_in_the_report_half(
    losses: pd.DataFrame,
) -> None:
    targets = choose_targets(losses, 0.5, Settings(**TWO_SETS))
    assert set(targets.document) == {1}
    places = targets.groupby(["distant_part", "target_set"]).target.apply(list).to_dict()
    assert places["document", "gap"] == [6, 10]
    assert places["placebo", "gap"] == [7]


def test_targets_by_bigram_are_a_share_that_does_not_depend_on_losses(
    losses: pd.DataFrame,
) -> None:
    def drawn(losses: pd.DataFrame, **changed: Any) -> list[int]:
        targets = choose_targets(losses, 0.5, Settings(**TWO_SETS | changed))
        return targets[targets.target_set == "bigram"].target.tolist()

    (one,) = drawn(losses)  # a fifth of five
    assert one in (7, 9, 10)
    assert drawn(losses.assign(loss_long=0.0)) == [one]
    assert len(drawn(losses, share=0.4)) == 2


def test_only_the_sets_that_are_asked_for_are_chosen(losses: pd.DataFrame) -> None:
    targets = choose_targets(losses, 0.5, Settings(share=0.4, sets=("bigram",)))
    assert set(targets.target_set) == {"bigram"}


def test_the_most_targets_of_a_set_are_some_of_all(losses: pd.DataFrame) -> None:
    targets = choose_targets(losses, 0.5, Settings(**TWO_SETS))
    few = choose_targets(losses, 0.5, Settings(**TWO_SETS, max_targets=1))
    assert (few.groupby(["distant_part", "target_set", "document"]).size() == 1).all()
    assert len(few.merge(targets)) == len(few)


def test_without_a_threshold_every_token_is_a_target(losses: pd.DataFrame) -> None:
    targets = choose_targets(losses, None, Settings(share=1.0, max_targets="all"))
    assert targets[targets.distant_part == "document"].target.tolist() == [*range(6, 11)]


def test_another_seed_draws_other_targets(losses: pd.DataFrame) -> None:
    settings = [Settings(share=0.2, seed=seed, max_targets=1) for seed in range(9)]
    drawn = [choose_targets(losses, 0.5, seeded) for seeded in settings]
    assert len({tuple(targets.target) for targets in drawn}) > 1


def test_a_share_is_all_or_a_percentage() -> None:
    assert (parse_share("all"), parse_share("top10%")) == (1.0, 0.1)


def test_documents_take_turns_between_the_halves() -> None:
    assert [half_of(number) for number in range(3)] == ["threshold", "report", "threshold"]


@pytest.fixture(scope="module")
def model() -> Any:
    return untrained(n_layers=2)


@pytest.mark.parametrize("long", [16, "all"])
def test_a_first_look_draws_blocks_from_whole_documents(model: Any, long: Any) -> None:
    rng = np.random.default_rng(0)
    letters, texts = of_letters(model), [rng.integers(0, VOCAB, 400) for _ in range(6)]
    quick = planned(letters, Documents.of(texts), long=long, short=6, ks=(1,), quick=True)
    places = [block.start for d in quick.documents for block in sampled_blocks(d, quick.settings)]
    assert (quick.settings.stride, quick.settings.draws) == (16, 1)
    assert len(places) == 4 * 6
    assert max(places) > 200, "beginnings alone"
    half = planned(
        letters, Documents.of(texts), long=long, short=6, ks=(1,), quick=True, sample=0.5
    )
    assert half.settings.sample == 0.5, "a given share comes first"


def test_blocks_of_a_first_look_fit_the_model(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last target of a block sees stride − 1 tokens more than the first."""
    monkeypatch.setattr(LoadedModel, "max_positions", property(lambda self: 24))
    texts = [np.random.default_rng(i).integers(0, VOCAB, 200) for i in range(6)]
    options = {"long": 16, "short": 6, "ks": (1,), "quick": True}
    fits = planned(of_letters(model), Documents.of(texts), **options)
    num_prefix = len(fits.settings.prefix_ids)
    assert fits.settings.windows.num_positions(longest_document=200) == 24
    assert fits.settings.stride == 24 - 16 - num_prefix + 1


def test_no_more_units_are_asked_for_than_a_model_of_few_positions_has(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its local window is shortened, so that its first targets have fewer distant tokens."""
    monkeypatch.setattr(LoadedModel, "max_positions", property(lambda self: 40))
    texts = Documents.of([np.random.default_rng(i).integers(0, VOCAB, 40) for i in range(6)])
    assert planned(of_letters(model), texts, long="all", ks=(1, 10)).settings.short == 10
    with pytest.raises(ConfigError, match="ks: 11 is more than the 10 distant units"):
        planned(of_letters(model), texts, long="all", ks=(1, 11))


# --- records of prompt and target -----------------------------------------------------------------


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Prompts of 15 to 26 letters, targets of 1 to 3."""
    rng = np.random.default_rng(0)
    letters = [chr(97 + i) for i in rng.integers(0, 26, 400)]
    rows = [
        {"prompt": "".join(letters[i : i + 15 + i]), "target": "".join(letters[-1 - i % 3 :])}
        for i in range(12)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def of_letters(model: Any) -> LoadedModel:
    tokenizer = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(26)}, "a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return replace(loaded(model), tokenizer=tokenizer)


WINDOWS = {"long": 18, "short": 4}
OPTIONS: dict[str, Any] = {**WINDOWS, "selectors": "add_one", "ks": (1, 4), "draws": 2, "halves": 0}


def test_all_tokens_of_a_records_target_and_no_others_are_targets(
    model: Any, pairs: Path, tmp_path: Path
) -> None:
    """With the losses that they have in the whole text."""
    letters, rows = of_letters(model), [*map(json.loads, pairs.read_text().splitlines())]
    options = OPTIONS | {"prompt_field": "prompt", "out": tmp_path / "out"}
    results: Any = measure(letters, pairs, **options)
    assert set(results.targets.target_set) == {"named"}
    assert set(results.targets.distant_part) == {"document"}
    long_enough = [number for number, row in enumerate(rows) if len(row["prompt"]) >= 18]
    sizes = [len(rows[number]["target"]) for number in long_enough]
    assert results.targets.groupby("document").size().tolist() == sizes
    assert results.documents.name.tolist() == [f"{pairs}:{number + 1}" for number in long_enough]
    assert results.meta.counts["documents_too_short"] == len(rows) - len(long_enough) == 3
    assert set(results.recovery.control) == {"own", "unrelated"}
    assert len(results.losses) == sum(sizes), "no other loss is computed"
    windows = Windows(18, 4)
    for number, record in enumerate(long_enough):
        prompt, target = (letters.encode([rows[record][n]])[0] for n in ("prompt", "target"))
        whole, first = Document(np.array([*prompt, *target])), len(prompt)
        places = np.arange(first, len(whole.tokens))
        found = recover(Scorer(model), whole, windows, places, ks=(1, 4))["recovery"]
        own = results.recovery.query(f"document == {number} and control == 'own'")
        assert (own.target - 18 + first).tolist() == found.target.tolist()
        np.testing.assert_allclose(own.loss_set, found.loss_set, atol=1e-5)


@pytest.mark.parametrize(
    ("at", "said"),
    [(b"a", r"at=b'a' must be words"), (slice(4, 8, 2), r"slice\(4, 8, 2\) has a step")],
)
def test_targets_that_are_no_run_of_tokens_are_refused(at: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_spans(Document(np.arange(20)), at)
