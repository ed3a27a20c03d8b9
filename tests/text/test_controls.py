"""The texts that controls put in the place of distant tokens."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.distant_text import DistantText, ReplacedText
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.windows import Block, Windows

WINDOWS = Windows(20, 8, 3)


@pytest.fixture(scope="module")
def documents() -> Documents:
    generator = np.random.default_rng(0)
    lengths = [30, 21, 45, 20, 33, 26, 40, 8]  # two of them have no target
    return Documents.of([generator.integers(0, 12, length) for length in lengths])


def blocks_of(documents: Documents, windows: Windows = WINDOWS) -> list[tuple[Document, Block]]:
    return [(d, block) for d in documents for block in windows.blocks(d.tokens)]


def place_of(distant: DistantText) -> tuple[int, list[int]]:
    return distant.document.number, distant.places_F.tolist()


def control_texts(controls: Controls, document: Document, block: Block, draw: int = 0) -> list:
    distant = DistantText.at(document, block.first_distant, block.num_distant)
    spans = [(target, target + 1) for target in range(block.num_targets)]
    found = controls.control_texts(document, block, {"own": ReplacedText(distant, spans)}, draw)
    return [(text, np.array([first for first, _ in some["own"]])) for text, some in found]


@pytest.mark.parametrize("kind", ["unrelated", "matched", "shuffled"])
def test_draws_are_the_same_in_any_order(documents: Documents, kind: Any) -> None:
    def draws(reverse: bool, **changed: Any) -> dict:
        controls = Controls(documents, WINDOWS, kind, **changed)
        asked = [(d, block, draw) for d, block in blocks_of(documents) for draw in range(3)]
        return {
            (document.number, block.start, draw): [
                (*place_of(distant), targets.tolist())
                for distant, targets in control_texts(controls, document, block, draw)
            ]
            + [place_of(controls.placebo(document, block))]
            for document, block, draw in (asked[::-1] if reverse else asked)
        }

    found = draws(reverse=False)
    assert found == draws(reverse=True)
    assert found != draws(reverse=False, seed=1)
    assert len({str(some[:-1]) for some in found.values()}) > len(found) / 2


def test_stored_measurements_have_the_same_unrelated_texts(documents: Documents) -> None:
    digest = hashlib.sha256()
    for windows in (WINDOWS, Windows("all", 8, 3)):
        for kind in ("unrelated", "matched", "shuffled"):
            controls = Controls(documents, windows, kind)
            assert controls == Controls(documents, windows, kind, num_draws=3, seed=0)
            document, block = blocks_of(documents, windows)[3]
            texts = [distant for distant, _ in control_texts(controls, document, block, 1)]
            texts += [controls.placebo(document, block), controls.replacement(document, block, 2)]
            for distant in texts:
                digest.update(repr((kind, distant.tokens_F.tolist())).encode())
    assert digest.hexdigest()[:16] == "0ba6ced96dda853b"


def test_unrelated_text_is_a_stretch_of_another_document(documents: Documents) -> None:
    controls, seen = Controls(documents, WINDOWS), set()
    for document, block in blocks_of(documents):
        for distant, targets in (
            control_texts(controls, document, block, draw)[0] for draw in range(3)
        ):
            assert distant.document.number != document.number
            assert distant.document is documents[distant.document.number]
            first = int(distant.places_F[0])
            assert distant.places_F.tolist() == list(range(first, first + WINDOWS.num_distant))
            assert 0 <= first <= len(distant.document.tokens) - WINDOWS.num_distant
            assert targets.tolist() == list(range(block.num_targets))
            seen.add(distant.document.number)
    assert seen == {0, 1, 2, 4, 5, 6}  # those that are longer than the long window


def test_the_placebo_is_none_of_the_unrelated_documents_where_there_are_enough(
    documents: Documents,
) -> None:
    """One document is asked about, three may stand in as unrelated: five are enough."""
    five = Documents("five", [d for d in documents if len(d.tokens) > WINDOWS.long][:5])
    controls = Controls(five, WINDOWS)
    for document, block in blocks_of(five):
        placebo = controls.placebo(document, block)
        drawn = {controls.unrelated(document, block, draw).document.number for draw in range(3)}
        assert placebo.document.number not in {document.number, *drawn}
        unused = {other.number for other in five} - {document.number, *drawn}
        left = unused - {placebo.document.number} or unused
        others = {controls.replacement(document, block, n).document.number for n in range(20)}
        assert others == left
    two = Controls(five[:2], WINDOWS)
    for document, block in blocks_of(five[:2]):
        assert two.placebo(document, block).document.number == 1 - document.number
    with pytest.raises(DataError, match="need another document of at least"):
        Controls(five[:1], WINDOWS).placebo(five[0], next(WINDOWS.blocks(five[0].tokens)))


def test_documents_of_one_group_are_never_unrelated_to_each_other(documents: Documents) -> None:
    groups = ["a", "b", "a", "a", "", "", "b", "b"]
    grouped = Documents(
        "grouped", [replace(d, group=group) for d, group in zip(documents, groups, strict=True)]
    )
    for kind in ("unrelated", "matched"):
        controls, pairs = Controls(grouped, WINDOWS, kind), set()
        for document, block in blocks_of(grouped):
            texts = [controls.placebo(document, block)]
            texts += [
                distant
                for draw in range(3)
                for distant, _ in control_texts(controls, document, block, draw)
            ]
            pairs |= {(document.number, distant.document.number) for distant in texts}
        for one, other in pairs:
            assert one != other
            assert groups[one] != groups[other] or not groups[one]
        assert {(4, 5), (5, 4), (0, 1)} <= pairs  # what has no group shares text with none
    alone = Documents("alone", [replace(d, group="a") for d in documents])
    with pytest.raises(DataError, match="need another document of at least"):
        Controls(alone, WINDOWS).unrelated(*blocks_of(alone)[0], 0)


def test_a_copy_is_not_unrelated_to_its_document(documents: Documents) -> None:
    copied = [replace(documents[n], number=i) for i, n in enumerate([0, 1, 0, 0, 2])]
    controls = Controls(Documents("copied", copied), WINDOWS)
    assert controls.num_candidates == 3
    for draw in range(20):
        distant = controls.unrelated(*blocks_of(controls.documents)[0], draw)
        assert distant.document.number in (1, 4)
    alone = Documents("alone", copied[2:4])
    with pytest.raises(DataError, match="need another document of at least"):
        Controls(alone, WINDOWS).unrelated(*blocks_of(alone)[0], 0)


NOWHERE_ELSE = 99
ONCE_ELSEWHERE = 77


@pytest.fixture
def with_rare_tokens(documents: Documents) -> Documents:
    """Document 2 has one token that no other has, and one that document 0 has once."""
    tokens = {d.number: d.tokens.copy() for d in documents}
    tokens[2][25] = NOWHERE_ELSE
    tokens[2][33] = tokens[0][15] = ONCE_ELSEWHERE
    return Documents("rare", [replace(d, tokens=tokens[d.number]) for d in documents])


def test_each_target_is_served_by_one_matched_text(with_rare_tokens: Documents) -> None:
    controls = Controls(with_rare_tokens, WINDOWS, "matched")
    for document, block in blocks_of(with_rare_tokens):
        for draw in range(3):
            texts = control_texts(controls, document, block, draw)
            served = np.concatenate([targets for _, targets in texts])
            assert sorted(served.tolist()) == list(range(block.num_targets))


def test_matched_text_of_another_document_holds_the_token_of_its_targets(
    with_rare_tokens: Documents,
) -> None:
    controls = Controls(with_rare_tokens, WINDOWS, "matched")
    for document, block in blocks_of(with_rare_tokens):
        for distant, targets in control_texts(controls, document, block, 0):
            (token,) = set(block.targets_W[targets].tolist())
            assert distant.document.number != document.number
            assert distant.tokens_F.shape == (WINDOWS.num_distant,)
            if token == NOWHERE_ELSE:
                assert (distant.tokens_F == token).sum() == 1, "it is inserted"
            else:
                assert token in distant.tokens_F


def test_a_placebo_is_not_matched_with_its_own_document(with_rare_tokens: Documents) -> None:
    controls = Controls(with_rare_tokens, WINDOWS, "matched")
    for document, block in blocks_of(with_rare_tokens):
        placebo = controls.placebo(document, block)
        replaced = {"placebo": ReplacedText(placebo, [(0, 1)])}
        for distant, _ in controls.control_texts(document, block, replaced, 0):
            assert distant.document.number not in (document.number, placebo.document.number)


def test_the_token_stands_anywhere_in_a_matched_text(with_rare_tokens: Documents) -> None:
    controls = Controls(with_rare_tokens, WINDOWS, "matched")
    document = with_rare_tokens[2]
    (block,) = (b for b in WINDOWS.blocks(document.tokens) if b.start <= 33 < b.start + 3)
    texts = [
        distant
        for draw in range(100)
        for distant, targets in control_texts(controls, document, block, draw)
        if block.targets_W[targets[0]] == ONCE_ELSEWHERE
    ]
    places = {15 - int(distant.places_F[0]) for distant in texts}
    assert places == set(range(WINDOWS.num_distant))


def test_shuffled_text_is_the_distant_part_in_another_order(documents: Documents) -> None:
    controls, orders = Controls(documents, WINDOWS, "shuffled"), set()
    for document, block in blocks_of(documents):
        for own in (
            DistantText.at(document, block.first_distant, WINDOWS.num_distant),
            controls.placebo(document, block),
        ):
            targets = [(0, 1)]
            for draw in range(3):
                ((distant, some),) = controls.control_texts(
                    document, block, {"own": ReplacedText(own, targets)}, draw
                )
                assert distant.document is own.document
                assert sorted(distant.places_F.tolist()) == own.places_F.tolist()
                assert own.is_run
                assert not distant.is_run
                assert some == {"own": targets}
                orders.add((document.number, *(distant.places_F - own.places_F[0]).tolist()))
    # Each block and draw has its own order, which the placebo shares.
    assert len(orders) == 3 * len(blocks_of(documents))


LENGTHS = [60, 20, 25, 18, 33]


@pytest.fixture
def of_lengths() -> Documents:
    """Documents of which each token says in which it is: its hundreds."""
    return Documents.of([100 * n + np.arange(length) for n, length in enumerate(LENGTHS)])


def draws_of(documents: Documents, most: int | None) -> list[DistantText]:
    """Return twelve draws for the last block of the first document, the longest."""
    windows = Windows("all", 4, 4, max_tokens=most)
    *_, last = windows.blocks(documents[0].tokens)
    controls = Controls(documents, windows)
    return [controls.unrelated(documents[0], last, draw) for draw in range(12)]


@pytest.mark.parametrize("most", [None, 30])
def test_with_all_before_it_a_block_has_the_beginning_of_one_draw(
    of_lengths: Documents, most: int | None
) -> None:
    windows = Windows("all", 4, 4, max_tokens=most)
    controls = Controls(of_lengths, windows)
    for draw, whole in enumerate(draws_of(of_lengths, most)):
        assert whole.is_run
        for block in windows.blocks(of_lengths[0].tokens):
            distant = controls.unrelated(of_lengths[0], block, draw)
            assert distant.tokens_F.tolist() == whole.tokens_F[: block.num_distant].tolist()


def test_a_draw_is_of_the_only_other_document_that_is_long_enough(of_lengths: Documents) -> None:
    for whole in draws_of(of_lengths, most=30):
        assert set((whole.tokens_F // 100).tolist()) == {4}


def test_if_none_is_long_enough_several_whole_documents_are_joined_in_random_order(
    of_lengths: Documents,
) -> None:
    orders = set()
    for whole in draws_of(of_lengths, most=None):
        order = list(dict.fromkeys((whole.tokens_F // 100).tolist()))
        orders.add(tuple(order))
        assert 0 not in order, "its own text"
        # From the beginning of the first on, each whole but for the last.
        joined = np.concatenate([of_lengths[number].tokens for number in order])
        assert joined[: len(whole.tokens_F)].tolist() == whole.tokens_F.tolist()
        assert len(whole.document.tokens) == 60 - 4
        assert sum(LENGTHS[number] for number in order[:-1]) < 60 - 4
    assert len(orders) > 4


def test_too_few_other_documents_to_join_are_an_error(of_lengths: Documents) -> None:
    few = Documents("few", of_lengths.items[:3])
    with pytest.raises(DataError, match="need another document"):
        draws_of(few, most=None)


@pytest.mark.parametrize(("length", "num_others"), [(36, 2), (56, 1)])
def test_documents_that_are_just_long_enough_are_drawn_alone_or_joined(
    of_lengths: Documents, length: int, num_others: int
) -> None:
    """56 distant tokens: of one document, or of 36 and of 20."""
    other = replace(of_lengths[2], tokens=np.arange(200, 200 + length))
    others = [of_lengths[1], other][-num_others:]
    (distant, *_) = draws_of(Documents("enough", [of_lengths[0], *others]), most=None)
    assert (distant.document is other) == (num_others == 1)
    assert distant.document.number == (2 if num_others == 1 else -1)
