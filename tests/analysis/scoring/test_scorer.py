"""Losses given chosen parts of the context, against brute force and in batches of any size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from olmo_sparsity.analysis.interpretation import InterpretationName
from olmo_sparsity.analysis.scoring.document_losses import bigrams, context_losses
from olmo_sparsity.analysis.scoring.row_groups import RowGrouping
from olmo_sparsity.analysis.scoring.rows import Context, Row, distinct_rows
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.scoring.tensors import check_finite
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.identity.use import in_use
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.units import NO_INDICES
from olmo_sparsity.text.windows import Block, Windows
from tests.support.brute import (
    CPU,
    DOCUMENT,
    LONG_BLOCK,
    ONE_FAMILY,
    OURS,
    READINGS,
    WINDOWS,
    Brute,
    behind,
    shown_alone,
    tiny,
)
from tests.support.models import FIELDS


@pytest.fixture(scope="module", params=[*OURS, "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@pytest.fixture(scope="module")
def document() -> np.ndarray:
    return DOCUMENT


@pytest.fixture(scope="module")
def block(document: np.ndarray) -> Block:
    return next(iter(Windows(16, 6, 4).blocks(document)))


@pytest.mark.parametrize("windows", [*WINDOWS, LONG_BLOCK], ids=str)
def test_context_losses(model: Any, document: np.ndarray, windows: Windows) -> None:
    """Of the document, and with another text in place of its distant part."""
    documents = Documents.of([document, *(document[::-1] for _ in range(4))])
    controls = Controls(documents, windows)
    scorer = shown_alone(model, batch_tokens=64)
    found = context_losses(scorer, documents[0], windows, controls)
    plain = context_losses(scorer, documents[0], windows)
    assert found.target.tolist() == list(range(windows.long, len(document)))
    assert found.token_id.tolist() == document[windows.long :].tolist()
    every = list(range(windows.num_distant))
    for block in windows.blocks(document):
        mixed = behind(document, block, controls.placebo(documents[0], block))
        for target in range(block.start, block.start + block.num_targets):
            row = found.loc[target - windows.long]
            own = Brute(model, document, windows, target)
            other = Brute(model, mixed, windows, target)
            assert row.loss_short == pytest.approx(own.loss([]), abs=1e-5)
            assert row.loss_long == pytest.approx(own.loss(every), abs=1e-5)
            assert row.placebo_loss_long == pytest.approx(other.loss(every), abs=1e-5)
    np.testing.assert_array_equal(plain, found[plain.columns])
    assert "bigram" not in plain


@pytest.mark.parametrize("windows", [*WINDOWS, LONG_BLOCK], ids=str)
def test_bigrams_are_looked_for_in_the_document_and_in_the_placebo(
    document: np.ndarray, windows: Windows
) -> None:
    documents = Documents.of([document, *(document[::-1] for _ in range(4))])
    controls = Controls(documents, windows, num_draws=1)
    losses = context_losses(Scorer(tiny("olmo"), CPU), documents[0], windows, controls)
    own = list(windows.blocks(document))
    assert losses.bigram.tolist() == np.concatenate([bigrams(block) for block in own]).tolist()
    placebo = [block.with_distant(controls.placebo(documents[0], block).tokens_F) for block in own]
    found = losses.placebo_bigram.tolist()
    assert found == np.concatenate([bigrams(block) for block in placebo]).tolist()


def test_a_document_without_a_full_long_window_has_no_losses(document: np.ndarray) -> None:
    windows = WINDOWS[0]
    losses = context_losses(Scorer(tiny("olmo"), CPU), Document(document[: windows.long]), windows)
    assert len(losses) == 0
    assert list(losses) == ["target", "token_id", "loss_short", "loss_long"]


@torch.no_grad()
@pytest.mark.parametrize(("prefix", "most"), [((), None), ((1,), None), ((1,), 17)])
def test_the_losses_of_a_whole_document_are_those_of_plain_forwards(
    model: Any, document: np.ndarray, prefix: tuple[int, ...], most: int | None
) -> None:
    """One pass serves all blocks; behind another text, too."""
    windows = Windows("all", 6, 4, prefix=prefix, max_tokens=most)
    documents = Documents.of([document, *(document[::-1] for _ in range(4))])
    controls = Controls(documents, windows)
    found = context_losses(Scorer(model, batch_tokens=64), documents[0], windows, controls)
    assert len(found) == len(document) - int(found.target.min())
    blocks = list(windows.blocks(document))
    for row in found.itertuples():
        (block,) = (b for b in blocks if b.start <= row.target < b.start + b.num_targets)
        distant = controls.placebo(documents[0], block).tokens_F
        first_distant = block.first_distant
        mixed = np.concatenate(
            [document[:first_distant], distant, document[first_distant + len(distant) :]]
        )
        for text, loss in ((document, row.loss_long), (mixed, row.placebo_loss_long)):
            inputs = torch.tensor([[*prefix, *text[block.first_distant : row.target]]])
            hidden = model.hidden(inputs, torch.arange(inputs.shape[1])[None])
            nll = -model.unembed(hidden[:, -1]).log_softmax(-1)[0, document[row.target]]
            assert loss == pytest.approx(float(nll), abs=1e-5)


@ONE_FAMILY
@READINGS
def test_rows_for_single_targets_equal_those_for_the_whole_block(
    model: Any, document: np.ndarray, distant_states: InterpretationName
) -> None:
    block = next(iter(LONG_BLOCK.blocks(document)))
    scorer = Scorer(model, CPU, distant_states=distant_states)
    context = scorer.context(block)
    for distant in (NO_INDICES, np.array([1, 4]), np.arange(10)):
        (whole_W,) = scorer.losses([context.set_row(distant)])
        single = scorer.losses([context.set_row(distant, (i, i + 1)) for i in range(20)])
        np.testing.assert_allclose(np.array(single)[:, 0], whole_W, atol=1e-6, rtol=1e-6)
        for first, end in ((0, 3), (5, 20), (14, 18)):
            (some,) = scorer.losses([context.set_row(distant, (first, end))])
            np.testing.assert_allclose(some, whole_W[first:end], atol=1e-6, rtol=1e-6)
    (long_W,) = scorer.losses([context.long_row()])
    (dense_W,) = scorer.losses([context.dense_row()])
    np.testing.assert_allclose(dense_W, long_W, atol=2e-6, rtol=1e-6)


@ONE_FAMILY
def test_rows_of_several_contexts_look_back_at_their_own_distant_tokens(
    model: Any, document: np.ndarray
) -> None:
    scorer = Scorer(model, CPU)
    blocks = list(Windows(16, 6, 4).blocks(document))[:3]
    blocks.append(
        blocks[0].with_distant(np.arange(10))
    )  # the same window behind other distant tokens
    contexts = [scorer.context(block) for block in blocks]
    rows = [context.set_row(np.array([distant, 9])) for distant in (2, 5) for context in contexts]
    alone = [Scorer(model, CPU).losses([row])[0] for row in rows]
    for together, apart in zip(scorer.losses(rows), alone, strict=True):
        np.testing.assert_allclose(together, apart, atol=1e-5)
    assert np.abs(alone[0] - alone[3]).max() > 1e-3


@pytest.mark.parametrize(
    "change",
    [{}, {"n_kv_heads": 2}, {"query_scale_length": 40.0}, {"query_scale_learned": True}],
)
def test_hidden_distant_places_are_no_keys(
    change: dict, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that see all distant tokens but one, against rows that hold these alone."""
    torch.manual_seed(1)
    scorer = Scorer(build_model(ModelConfig(**FIELDS, **change)).eval(), CPU)
    context = scorer.context(block)
    rows = [context.set_row(np.delete(np.arange(10), place)) for place in range(10)]
    hidden = scorer.losses(rows)
    grouping = RowGrouping(scorer.model, scorer.device, lambda: scorer.batch_tokens)
    hiding = [grouping._prefers_mask(num, num_states=10) for num in (5, 6, 9)]
    counts_keys = "query_scale_length" in change or "query_scale_learned" in change
    assert hiding == [False, not counts_keys, not counts_keys]
    monkeypatch.setattr(RowGrouping, "_prefers_mask", lambda *_: False)  # states are copied
    np.testing.assert_allclose(hidden, scorer.losses(rows), atol=1e-5)


@READINGS
def test_rows_in_batches_of_any_size_and_their_sums(
    model: Any,
    document: np.ndarray,
    distant_states: InterpretationName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with states of a longer text, and unembedded three targets at a time."""
    block, longer = itemgetter(0, 3)([*Windows("all", 6, 4, prefix=(1,)).blocks(document)])
    scorer = Scorer(model, distant_states=distant_states)
    assert (scorer.token_forwards, scorer.batch_tokens) == (0, 4096)
    contexts = [scorer.context(one) for one in (block, longer)]
    distant = [np.arange(n) for n in range(block.num_distant + 1)]
    rows = [context.set_row(one, (1, 3)) for context in contexts for one in distant]
    expected = scorer.losses(rows)
    monkeypatch.setattr("olmo_sparsity.analysis.scoring.model_runner.rows_per_chunk", lambda *_: 3)
    one_by_one = Scorer(model, distant_states=distant_states, batch_tokens=1)
    states = one_by_one.states(longer.tokens) if distant_states == "contextual" else None
    rows = [
        one_by_one.context(b, states).set_row(o, (1, 3)) for b in (block, longer) for o in distant
    ]
    np.testing.assert_allclose(one_by_one.losses(rows), expected, atol=1e-5)
    np.testing.assert_allclose(one_by_one.sums(rows), np.sum(expected, 1), atol=2e-5)
    assert one_by_one.losses([]) == []


def test_rows_hold_what_they_say(block: Block) -> None:
    """Of distant states computed alone, with their context, and replaced; targets in runs of 16."""
    block = next(LONG_BLOCK.blocks(np.arange(60)))
    some, every, (num_distant, before) = np.array([1, 4]), np.arange(35), (10, 16)
    alone = Context(block)
    states: Any = object()
    seeing = Context(block, states)
    replaced = Context(block, unrelated_XF=np.zeros((2, 10)))

    def shape(row: Row) -> tuple[Any, ...]:
        distant = row.attended if row.kept_distant is None else row.kept_distant
        distant = None if distant is None else distant.tolist()
        return row.positions.tolist(), row.num_targets, distant, row.span

    near = every[num_distant:].tolist()
    assert shape(alone.long_row()) == (every.tolist(), 20, None, None)
    assert shape(alone.dense_row(3)) == ([*range(before + 2)], 3, None, None)
    assert shape(seeing.long_row()) == (near, 20, [*range(num_distant)], None)
    assert shape(seeing.set_row(NO_INDICES)) == (near, 20, None, None)
    assert shape(replaced.long_row()) == (every.tolist(), 20, [*range(num_distant)], (0, 20))
    assert shape(replaced.set_row(some, (2, 4))) == ([*range(19)], 4, [1, 4], (2, 4))
    for first, end in ((0, 1), (15, 16), (14, 18), (16, 17), (19, 20)):
        begin, last = (0, max(16, end)) if first < 16 else (16, 20)
        inputs, wanted = [*range(num_distant, before + last - 1)], (first - begin, end - begin)
        span, num = (first, end), last - begin
        assert shape(seeing.set_row(some, span)) == (inputs, num, [1, 4], wanted)
        assert shape(alone.set_row(some, span)) == ([1, 4, *inputs], num, None, wanted)
        assert alone.set_row(some, span).targets.tolist() == block.targets_W[first:end].tolist()


def test_rows_that_see_different_places_share_a_forward_if_these_are_few(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = Scorer(tiny("olmo"), CPU)
    context = scorer.context(block)
    rows = [context.set_row(np.arange(num)) for num in (1, 5, 6, 6)]
    size, where = len(rows[0].positions), "olmo_sparsity.analysis.scoring.row_groups.FEW_PAIRS"
    monkeypatch.setattr(type(scorer.model), "shares_distant", lambda *_: True)

    def groups() -> list[Any]:
        grouping = RowGrouping(scorer.model, scorer.device, lambda: scorer.batch_tokens)
        found = grouping.groups(rows)
        return [(indices, is_masked, num - size) for indices, is_masked, num in found]

    apart = [([0], False, 1), ([1], False, 5), ([2, 3], True, 0)]
    for few, batch_tokens, together in (
        (4 * size * 10, 4 * size, True),
        (4 * size * 10 - 1, 4 * size, False),
        (4 * size * 10, 4 * size - 1, False),
    ):
        monkeypatch.setattr(where, few)
        scorer.batch_tokens = batch_tokens
        assert groups() == ([([0, 1, 2, 3], True, 0)] if together else apart)
    scorer.device = torch.device("cuda")  # where a launch costs more
    assert len(groups()) == 3
    scorer.batch_tokens = 4 * size
    assert len(groups()) == 1
    monkeypatch.setattr(type(scorer.model), "shares_distant", lambda *_: False)
    assert groups() == [*apart[:2], ([2, 3], True, 10)]
    for num_parameters, expected in ((0, 8), (5e8, 2), (1e9, 1), (3e9, 1)):
        scorer.num_parameters = int(num_parameters)
        assert scorer._default_batch_tokens() == 16384 * expected


def test_batches_are_halved_from_the_one_on_that_is_too_large(block: Block) -> None:
    scorer, done = Scorer(tiny("olmo"), CPU, batch_tokens=43), []
    scorer.after_batch = lambda: done.append(scorer.token_forwards)

    def compute(batch: Sequence[int]) -> list[int]:
        scorer.token_forwards += len(batch)
        if len(batch) > 3 and 4 in batch:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return list(batch)

    assert scorer.in_batches(range(11), 4, compute) == [
        [0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10],
    ]  # fmt: skip
    assert (scorer.batch_tokens, done) == (8, [2, 4, 6, 8, 10, 11])
    with pytest.raises(ZeroDivisionError):
        scorer.in_batches([0, 0], 4, lambda batch: [1 // one for one in batch])
    scorer.batch_tokens = 4
    with pytest.raises(torch.OutOfMemoryError):  # not even for one
        scorer.in_batches([4], 4, lambda batch: compute([*batch, 5, 6, 7]))


def test_states_of_a_beginning_are_not_computed_again(document: np.ndarray) -> None:
    model = tiny("olmo")
    scorer, spent = Scorer(model, CPU), []
    assert scorer.known_text is None
    for tokens in (document[:9], document[:5], document[:12], document[1:5], document[1:5]):
        assert scorer.states(tokens).num_tokens == len(tokens)
        spent.append(scorer.token_forwards)
    assert spent == [9, 9, 21, 25, 25]
    known = scorer.known_text
    assert known is not None
    tokens, states = known.tokens, known.states
    assert tokens is not None
    assert tokens.tolist() == document[1:5].tolist()
    assert states is not None
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with in_use(model):
        assert scorer.known_text is None
    scorer.states(document[1:5])
    assert scorer.token_forwards == 29


def test_rows_without_what_no_layer_reaches_are_computed_once(block: Block) -> None:
    context = Context(block)
    rows = [context.set_row(np.array(distant), (0, 2)) for distant in ([0], [9], [1], [0, 9])]
    found, each = distinct_rows(rows, 3)
    assert [len(row.positions) for row in found] == [9, 10]
    assert list(each) == [0, 1, 0, 1]
    assert [list(of) for of in distinct_rows(rows, None)] == [rows, [0, 1, 2, 3]]


def test_losses_that_are_no_numbers_are_refused() -> None:
    check_finite(np.array([[1.0, 2.0]]), "tests")
    with pytest.raises(DataError, match="2 of 3 losses of tests"):
        check_finite(np.array([1.0, np.nan, np.inf]), "tests")


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        *(("runs/mine", {}), (None, {})),
        *((nn.Linear, {"distant_states": "replaced"}), (nn.Linear, {"batch_tokens": 0})),
    ],
)
def test_what_a_scorer_cannot_evaluate_is_refused(given: Any, changed: dict[str, Any]) -> None:
    model = given(1, 1) if given is nn.Linear else given
    with pytest.raises(ConfigError, match=rf"{next(iter(changed), 'model')}="):
        Scorer(model, CPU, **changed)


@pytest.mark.parametrize("seen", [False, True])
def test_a_row_keeps_what_a_layer_can_reach_from_a_later_place(seen: bool) -> None:
    rng, context = np.random.default_rng(0), cast(Context, None)
    for reach in (1, 3, 8, 100):
        for _ in range(50):
            places = np.sort(rng.choice(60, 12, replace=False))
            row = Row(context, places, 1, np.arange(places[0]) if seen else None)
            reached = [places[-1]]  # walking back from place to place
            for place in places[-2::-1]:
                if reached[0] - place >= reach:
                    break
                reached.insert(0, place)
            kept = row.within(reach)
            if seen:
                near = [place for place in range(places[0]) if places[0] - place < reach]
                assert ([] if kept.attended is None else kept.attended.tolist()) == near
            else:
                assert kept.positions.tolist() == reached


@pytest.mark.parametrize("windows", [Windows(16, 6, 4), Windows("all", 6, 4, prefix=(1,))], ids=str)
def test_a_bigram_recurs_among_the_distant_tokens_and_nowhere_nearer(windows: Windows) -> None:
    document = np.random.default_rng(0).integers(0, 3, 60)
    seen = set()
    for block in windows.blocks(document):
        distant_end = block.num_prefix + block.num_distant
        distant = [*pairwise(block.tokens[block.num_prefix : distant_end])]
        for i, found in enumerate(bigrams(block)):
            place = block.num_before + i
            near = [*pairwise(block.tokens[distant_end:place])]
            pair = tuple(block.tokens[place - 1 : place + 1])
            assert found == (pair in distant and pair not in near)
            seen.add(bool(found))
    assert seen == {False, True}
