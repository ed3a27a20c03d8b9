"""Losses given chosen parts of the context, against brute force and in batches of any size."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch

from olmo_sparsity.analysis.inputs.documents import Controls, Document, Documents
from olmo_sparsity.analysis.inputs.windows import NOTHING, Block, Windows
from olmo_sparsity.analysis.measurement.recovery import recover
from olmo_sparsity.analysis.scoring.scorer import Context, Row, Scorer, bigrams, context_losses
from olmo_sparsity.analysis.settings import Reading
from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.model.build import build_model
from tests.support.brute import (
    CPU,
    LONG_BLOCK,
    ONE_FAMILY,
    OURS,
    READINGS,
    SHAPE,
    VOCAB,
    WINDOWS,
    Brute,
    behind,
    shown_alone,
    tiny,
)


@pytest.fixture(scope="module", params=[*OURS, "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@pytest.fixture(scope="module")
def document() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, 40)


@pytest.fixture(scope="module")
def block(document: np.ndarray) -> Block:
    return next(iter(Windows(16, 6, 4).blocks(document)))


@pytest.mark.parametrize("windows", [*WINDOWS, LONG_BLOCK], ids=str)
def test_context_losses(model: Any, document: np.ndarray, windows: Windows) -> None:
    """Of the document, and with another text in place of its far part."""
    documents = Documents.of([document, *(document[::-1] for _ in range(4))])
    controls = Controls(documents, windows)
    scorer = shown_alone(model, batch_tokens=64)
    found = context_losses(scorer, documents[0], windows, controls)
    plain = context_losses(scorer, documents[0], windows)
    assert found.target.tolist() == list(range(windows.long, len(document)))
    assert found.token_id.tolist() == document[windows.long :].tolist()
    every = list(range(windows.num_far))
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


@torch.no_grad()
@pytest.mark.parametrize("prefix", [(), (1,)])
def test_the_losses_of_a_whole_document_are_those_of_plain_forwards(
    model: Any, document: np.ndarray, prefix: tuple[int, ...]
) -> None:
    """One pass serves all blocks; behind another text, too."""
    windows = Windows("all", 6, 4, prefix=prefix)
    documents = Documents.of([document, *(document[::-1] for _ in range(4))])
    controls = Controls(documents, windows)
    found = context_losses(Scorer(model, batch_tokens=64), documents[0], windows, controls)
    assert len(found) == len(document) - int(found.target.min())
    blocks = list(windows.blocks(document))
    for row in found.itertuples():
        (block,) = (b for b in blocks if b.start <= row.target < b.start + b.num_targets)
        far = controls.placebo(documents[0], block).tokens_F
        mixed = np.concatenate([far, document[len(far) :]])
        for text, loss in ((document, row.loss_long), (mixed, row.placebo_loss_long)):
            inputs = torch.tensor([[*prefix, *text[: row.target]]])
            hidden = model.hidden(inputs, torch.arange(inputs.shape[1])[None])
            nll = -model.unembed(hidden[:, -1]).log_softmax(-1)[0, document[row.target]]
            assert loss == pytest.approx(float(nll), abs=1e-5)


@ONE_FAMILY
@READINGS
def test_rows_for_single_targets_equal_those_for_the_whole_block(
    model: Any, document: np.ndarray, far_states: Reading
) -> None:
    block = next(iter(LONG_BLOCK.blocks(document)))
    scorer = Scorer(model, CPU, far_states=far_states)
    context = scorer.context(block)
    for far in (NOTHING, np.array([1, 4]), np.arange(10)):
        (whole_W,) = scorer.losses([context.set_row(far)])
        single = scorer.losses([context.set_row(far, (i, i + 1)) for i in range(20)])
        np.testing.assert_allclose(np.array(single)[:, 0], whole_W, atol=1e-6, rtol=1e-6)
        for first, end in ((0, 3), (5, 20), (14, 18)):
            (some,) = scorer.losses([context.set_row(far, (first, end))])
            np.testing.assert_allclose(some, whole_W[first:end], atol=1e-6, rtol=1e-6)
    (long_W,) = scorer.losses([context.long_row()])
    (dense_W,) = scorer.losses([context.dense_row()])
    np.testing.assert_allclose(dense_W, long_W, atol=2e-6, rtol=1e-6)


@ONE_FAMILY
def test_rows_of_several_contexts_look_back_at_their_own_far_tokens(
    model: Any, document: np.ndarray
) -> None:
    scorer = Scorer(model, CPU)
    blocks = list(Windows(16, 6, 4).blocks(document))[:3]
    blocks.append(blocks[0].with_far(np.arange(10)))  # the same window behind other far tokens
    contexts = [scorer.context(block) for block in blocks]
    rows = [context.set_row(np.array([far, 9])) for far in (2, 5) for context in contexts]
    alone = [Scorer(model, CPU).losses([row])[0] for row in rows]
    for together, apart in zip(scorer.losses(rows), alone, strict=True):
        np.testing.assert_allclose(together, apart, atol=1e-5)
    assert np.abs(alone[0] - alone[3]).max() > 1e-3


@pytest.mark.parametrize("change", [{}, {"n_kv_heads": 2}, {"query_scale_length": 40.0}])
def test_hidden_far_places_are_no_keys(change: dict, block: Block) -> None:
    """Rows that see all far places but one, against rows that hold these alone."""
    torch.manual_seed(1)
    scorer = Scorer(build_model(ModelConfig(**SHAPE, **change)).eval(), CPU)
    context = scorer.context(block)
    rows = [context.set_row(np.delete(np.arange(10), place)) for place in range(10)]
    hidden = scorer.losses(rows)
    assert scorer._hides(context, 9) == ("query_scale_length" not in change)
    scorer._hides = lambda *_: False  # type: ignore[method-assign] # states are copied
    np.testing.assert_allclose(hidden, scorer.losses(rows), atol=1e-5)


@READINGS
@pytest.mark.parametrize("selector", ["add_one", "add_one_screened", "gradient"])
def test_where_memory_does_not_suffice_batches_are_halved(
    selector: str, far_states: Reading, document: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, windows = tiny("olmo"), Windows(16, 6, 4)
    targets = np.arange(20, 28)

    def recovered(scorer: Scorer) -> pd.DataFrame:
        found = recover(scorer, Document(document), windows, targets, selectors=selector, ks=(1, 3))
        return found["recovery"]

    wanted = recovered(Scorer(ours, CPU, far_states=far_states))
    most, sizes, hidden, far_states_of = 40, [], ours.hidden, ours.far_states

    def within(tokens_BL: torch.Tensor) -> torch.Tensor:
        if tokens_BL.numel() > most and len(tokens_BL) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(tokens_BL.numel())
        return tokens_BL

    monkeypatch.setattr(
        ours, "hidden", lambda tokens, *given, **named: hidden(within(tokens), *given, **named)
    )
    monkeypatch.setattr(ours, "far_states", lambda t, *given: far_states_of(within(t), *given))
    scorer = Scorer(ours, CPU, far_states=far_states)
    pd.testing.assert_frame_equal(recovered(scorer), wanted, atol=1e-5)
    assert len(sizes) > 1
    assert scorer.batch_tokens < 4096
    most = -1  # not even for one row

    def never(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ours, "hidden", never)
    with pytest.raises(torch.OutOfMemoryError):
        recovered(scorer)


@pytest.mark.parametrize("given", ["runs/mine", None])
def test_a_name_is_no_model(given: Any) -> None:
    with pytest.raises(ConfigError, match="model="):
        Scorer(given)


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
                assert ([] if kept.seen is None else kept.seen.tolist()) == near
            else:
                assert kept.places.tolist() == reached


@pytest.mark.parametrize("windows", [Windows(16, 6, 4), Windows("all", 6, 4, prefix=(1,))], ids=str)
def test_a_bigram_recurs_among_the_distant_tokens_and_nowhere_nearer(windows: Windows) -> None:
    document = np.random.default_rng(0).integers(0, 3, 60)
    seen = set()
    for block in windows.blocks(document):
        far_end = block.num_prefix + block.num_far
        far = [*pairwise(block.tokens[block.num_prefix : far_end])]
        for i, found in enumerate(bigrams(block)):
            place = block.num_before + i
            near = [*pairwise(block.tokens[far_end:place])]
            pair = tuple(block.tokens[place - 1 : place + 1])
            assert found == (pair in far and pair not in near)
            seen.add(bool(found))
    assert seen == {False, True}
