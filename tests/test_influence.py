"""Every selector and loss against brute force: one forward per subset, batch 1.

The brute force below shares no code with the package: it slices tokens, counts position IDs, lists
the far tokens of every unit and calls the model itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from analysis import influence
from analysis.documents import Controls, Document, Documents, FarText
from analysis.influence import (
    LASSO,
    NUM_ABLATIONS,
    SELECTORS,
    Choice,
    Question,
    fit_head_weights,
    influence_map,
)
from analysis.recovery import recover
from analysis.saliency import gate_gradients
from analysis.scoring import Context, Reading, Scorer, context_losses
from analysis.statistics import rank_correlations
from analysis.windows import NOTHING, Block, Units, Windows
from olmo_sparsity.config import ModelConfig
from olmo_sparsity.model.huggingface import HuggingFaceLM
from olmo_sparsity.model.load import build_model
from olmo_sparsity.model.relevance import attn_lrp
from tests.test_families import SUPPORTED, build, find

VOCAB = 61
CPU = torch.device("cpu")
shown_alone = partial(Scorer, device=CPU, far_states="isolated")


SHAPE = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB,
         "max_sequence_length": 64, "init_std": 0.2}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {
    "olmo": {"layer_norm_type": "rms"},
    "gpt_neox": {"architecture": "gpt_neox"},
}


def tiny(family: str) -> Any:
    torch.manual_seed(0)
    if family == "llama":
        return HuggingFaceLM(build(SUPPORTED[find("Llama 1, 2, 3")]))
    return build_model(ModelConfig(**SHAPE, **OURS[family])).eval()


@pytest.fixture(scope="module", params=[*OURS, "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


ONE_FAMILY = pytest.mark.parametrize("model", ["olmo"], indirect=True)
"""For what does not depend on how a model computes."""


@pytest.fixture(scope="module")
def document() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, 40)


@pytest.fixture(scope="module")
def block(document: np.ndarray) -> Block:
    return next(iter(Windows(16, 6, 4).blocks(document)))


# --- brute force ----------------------------------------------------------------------------------


class Brute:
    """All quantities of one target, from their definitions."""

    def __init__(
        self, model: Any, document: np.ndarray, windows: Windows, target: int,
        far_states: Reading = "isolated", start: int | None = None,
    ) -> None:  # fmt: skip
        """`start`: the first target of its block, where blocks are not counted from the first."""
        self.model, self.document, self.target = model, document, target
        self.far_states = far_states
        first = windows.short + 1 if windows.long == "all" else windows.long
        start = target - (target - first) % windows.stride if start is None else start
        self.origin = 0 if windows.long == "all" else start - windows.long
        self.prefix = list(windows.prefix)
        self.near = list(range(start - windows.short, target))
        self.far = list(range(self.origin, start - windows.short))
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def log_p(self, far: Iterable[int]) -> torch.Tensor:
        """log p(· | the window and these far tokens), `far` counted from the origin."""
        key = tuple(sorted(far))
        if key not in self.known:
            self.known[key] = self._log_p([self.origin + j for j in key])
        return self.known[key]

    @torch.no_grad()
    def _log_p(self, chosen: list[int]) -> torch.Tensor:
        if self.far_states == "isolated":
            return self._read([*chosen, *self.near])
        # The long text, of which the window sees the chosen far tokens only.
        places = [*self.far, *self.near]
        first, end = len(self.prefix), len(self.prefix) + len(self.far)
        seen = torch.ones(first + len(places), first + len(places)).tril().bool()
        hidden = torch.tensor([place not in chosen for place in self.far])
        seen[end:, first:end] &= ~hidden
        bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float).min)
        return self._read(places, bias[None, None])

    def _read(self, places: list[int], *bias: torch.Tensor) -> torch.Tensor:
        return self.model(*self.inputs(places), *bias)[0, -1].float().log_softmax(-1)

    def inputs(self, places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The prefix at the first position IDs, then these places at theirs."""
        size = len(self.prefix)
        tokens = [*self.prefix, *(int(self.document[place]) for place in places)]
        positions = [*range(size), *(size + place - self.origin for place in places)]
        return torch.tensor([tokens]), torch.tensor([positions])

    def loss(self, far: Iterable[int]) -> float:
        return -float(self.log_p(far)[int(self.document[self.target])])

    def kl(self, far: Iterable[int], log_p: torch.Tensor | None = None) -> float:
        """KL(p_long ‖ p_far), or of another p."""
        p = self.log_p(range(len(self.far))) if log_p is None else log_p
        return float((p.exp() * (p - self.log_p(far))).sum())

    def influences(self, selector: str, units: list[list[int]] | None = None) -> np.ndarray:
        every = list(range(len(self.far)))
        units = [[j] for j in every] if units is None else units
        if selector.startswith("add_one"):
            return np.array([self.loss([]) - self.loss(unit) for unit in units])
        if selector == "drop_one":
            rests = [[j for j in every if j not in unit] for unit in units]
            return np.array([self.loss(rest) - self.loss(every) for rest in rests])
        if selector == "divergence":
            return np.array([self.kl([]) - self.kl(unit) for unit in units])
        if selector in ("gradient", "lrp"):
            saliency = self.gradient_times_input(selector)
            return np.array([sum(float(saliency[j]) for j in unit) for unit in units])
        raise AssertionError(selector)

    def gradient_times_input(self, selector: str) -> np.ndarray:
        embedding = self.model.embedding.weight
        tokens, positions = self.inputs([*self.far, *self.near])
        change = torch.zeros(1, tokens.shape[1], embedding.shape[1], requires_grad=True)
        hook = self.model.embedding.register_forward_hook(lambda m, i, out: out + change)
        with attn_lrp(self.model) if selector == "lrp" else nullcontext():
            logits = self.model(tokens, positions)[0, -1].float()
            explained = logits if selector == "lrp" else logits.log_softmax(-1)
            loss = -explained[int(self.document[self.target])]
            (gradient,) = torch.autograd.grad(loss, change)
        hook.remove()
        inputs = embedding[tokens[0]]
        saliency = -(gradient[0] * inputs).sum(-1).detach().numpy()
        return saliency[len(self.prefix) : len(self.prefix) + len(self.far)]


def assert_ranked(choice: Choice, row: int, influence: np.ndarray, k: int) -> None:
    """The chosen have the k largest influences, in order; ties within rounding may swap."""
    chosen = choice.unit_TK[row]
    assert len(set(chosen.tolist())) == k
    np.testing.assert_allclose(choice.influence_TK[row], influence[chosen], atol=2e-5)
    best = np.sort(influence)[::-1][:k]
    np.testing.assert_allclose(influence[chosen], best, atol=2e-5)


# --- the tests ------------------------------------------------------------------------------------

LOSSES = ("loss_set", "loss_without", "kl_set")
READINGS = pytest.mark.parametrize("far_states", ["isolated", "contextual"])
WINDOWS = [Windows(16, 6, 1), Windows(16, 6, 4, prefix=(60, 3)), Windows(12, 5, 7)]
LONG_BLOCK = Windows(16, 6, 20)  # more targets than rows for single targets have in one run
RUNS = {"words": [0, 0, 1, 2, 2, 2, 3, 4, 4, 4], "sentences": [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]}
KINDS = ["tokens", "span:3", *RUNS]
OF_KINDS = [*zip([*WINDOWS[:2], *WINDOWS[1:]], KINDS, strict=True)]
"""Each kind of units with windows."""


def units_of(kind: str, num_far: int = 10) -> tuple[Units, list[list[int]]]:
    """The far units of a kind, and the far tokens of each, counted by hand."""
    if kind == "tokens":
        return Units.of_tokens(num_far), [[j] for j in range(num_far)]
    if kind == "span:3":
        return Units.of_spans(num_far, 3), [[j, j + 1, j + 2] for j in range(num_far - 2)]
    runs = np.array(RUNS[kind][:num_far])
    by_hand = [np.flatnonzero(runs == run).tolist() for run in range(max(runs) + 1)]
    return Units.of_runs(runs), by_hand


def log_p_long(scorer: Scorer, block: Block) -> torch.Tensor:
    (hidden_WD,) = scorer.hidden([Context(block).long_row()])
    return scorer.log_probabilities(hidden_WD)


def question(
    scorer: Scorer, block: Block, targets: Sequence[int], k: int, units: Units | None = None,
    aim: Block | None = None,
) -> Question:  # fmt: skip
    """About the far part of `block`; what aims, aims at the long window of `aim`."""
    units = Units.of_tokens(block.num_far) if units is None else units
    aim_WV = None if aim is None else log_p_long(scorer, aim)
    context, generator = scorer.context(block), np.random.default_rng(0)
    spans = [(target, target + 1) for target in targets]
    return Question(context, units, spans, k, generator, aim_WV)


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
            assert row.kl == pytest.approx(own.kl([]), abs=1e-5)
            assert row.placebo_loss_long == pytest.approx(other.loss(every), abs=1e-5)
            assert row.placebo_kl == pytest.approx(other.kl([]), abs=1e-5)
            for name, text, brute in (("", document, own), ("placebo_", mixed, other)):
                near, far = (text[places].tolist() for places in (brute.near, brute.far))
                token = text[target]
                expected = "near" if token in near else "recurs" if token in far else "new"
                assert row[f"{name}stratum"] == expected
    np.testing.assert_array_equal(plain, found[plain.columns])


def behind(document: np.ndarray, block: Block, text: FarText) -> np.ndarray:
    """The document with another text in the far part of a block."""
    first = block.start - block.windows.long
    tokens = text.document.tokens[text.places_F]
    return np.concatenate([document[:first], tokens, document[first + len(tokens) :]])


@READINGS
@pytest.mark.parametrize(("windows", "kind"), OF_KINDS)
@pytest.mark.parametrize(
    "selector",
    # Of so few units, the cheaper forms of add_one evaluate all.
    ["add_one", "add_one_screened", "add_one_nested", "drop_one", "divergence", "gradient", "lrp"],
)
def test_selectors(
    model: Any, document: np.ndarray, windows: Windows, selector: str, kind: str,
    far_states: Reading, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(influence, "PLACES_AT_ONCE", 30)  # of drop_one: its rows in parts
    monkeypatch.setattr("analysis.scoring.rows_per_chunk", lambda *_: 9)
    scorer = Scorer(model, CPU, far_states=far_states, batch_tokens=128)
    block = list(windows.blocks(document))[2]
    targets = list(range(block.num_targets))[-3:]
    units, by_hand = units_of(kind, block.num_far)
    k = min(4, len(by_hand))
    choice = SELECTORS[selector](scorer, question(scorer, block, targets, k, units, aim=block))
    for row, target in enumerate(targets):
        brute = Brute(model, document, windows, block.start + target, far_states)
        expected = brute.influences(selector, by_hand)
        np.testing.assert_allclose(choice.score_TU[row], expected, atol=2e-5)
        assert_ranked(choice, row, expected, k)


@READINGS
@pytest.mark.parametrize(("windows", "kind"), OF_KINDS[:3])
def test_greedy_picks_the_best_next_unit_each_time(
    model: Any, document: np.ndarray, windows: Windows, kind: str, far_states: Reading
) -> None:
    block = next(iter(windows.blocks(document)))
    targets = [0, block.num_targets - 1][-block.num_targets :]
    scorer = Scorer(model, CPU, far_states=far_states)
    units, by_hand = units_of(kind)
    choice = SELECTORS["greedy"](scorer, question(scorer, block, targets, 3, units))
    for row, target in enumerate(targets):
        brute = Brute(model, document, windows, block.start + target, far_states)
        for count in range(3):
            before = choice.unit_TK[row, :count].tolist()
            seen = {j for unit in before for j in by_hand[unit]}
            after = [
                np.inf if unit in before else brute.loss(seen.union(places))
                for unit, places in enumerate(by_hand)
            ]
            assert after[choice.unit_TK[row, count]] == pytest.approx(min(after), abs=1e-5)
            gain = brute.loss(seen) - min(after)
            assert choice.influence_TK[row, count] == pytest.approx(gain, abs=2e-5)


@READINGS
@pytest.mark.parametrize("kind", ["tokens", "span:3"])
def test_lasso_is_the_sparse_fit_to_losses_of_random_halves(
    model: Any, document: np.ndarray, block: Block, kind: str, far_states: Reading
) -> None:
    scorer, (units, by_hand) = Scorer(model, CPU, far_states=far_states), units_of(kind)
    asked = question(scorer, block, [0, 3], len(units), units)
    seen_AU = np.random.default_rng(0).random((NUM_ABLATIONS, len(units))) < 0.5
    choice = SELECTORS["lasso"](scorer, asked)
    for row, target in enumerate([0, 3]):
        brute = Brute(model, document, block.windows, block.start + target, far_states)
        fall_A = brute.loss([]) - np.array([
            brute.loss({j for unit in np.flatnonzero(seen_U) for j in by_hand[unit]})
            for seen_U in seen_AU
        ])  # fmt: skip
        # At the minimum the rest correlates with a column by the penalty, or less where its weight
        # is zero. Columns have a variance of 1.
        x_AU = (seen_AU - seen_AU.mean(0)) / seen_AU.std(0)
        weight_U = choice.score_TU[row] * seen_AU.std(0)
        pull_U = x_AU.T @ (fall_A - fall_A.mean() - x_AU @ weight_U) / len(fall_A)
        assert np.abs(pull_U).max() < LASSO + 1e-5
        np.testing.assert_allclose(
            pull_U[weight_U != 0], LASSO * np.sign(weight_U[weight_U != 0]), atol=1e-5
        )
        assert (weight_U != 0).any()


@READINGS
@pytest.mark.parametrize("kind", ["tokens", "span:3"])
def test_screened_evaluates_max_16_2k_candidates_exactly(
    model: Any, kind: str, far_states: Reading
) -> None:
    """Those with the largest gradients of their gates, and of them the best are chosen."""
    document = np.random.default_rng(3).integers(0, VOCAB, 61)
    windows = Windows(60, 6, 1)
    block = next(iter(windows.blocks(document)))
    units, by_hand = units_of(kind, 54)
    exact = Brute(model, document, windows, 60, far_states).influences("add_one", by_hand)
    scorer = Scorer(model, CPU, far_states=far_states)
    gate = gate_gradients(scorer, scorer.context(block), [(0, 1)])[0]
    candidates = np.argsort([-sum(gate[j] for j in unit) for unit in by_hand])
    for k, num_exact in ((2, 16), (20, 40)):
        asked = question(scorer, block, [0], k, units)
        before = scorer.token_forwards
        choice = SELECTORS["add_one_screened"](scorer, asked)
        np.testing.assert_allclose(choice.influence_TK[0], exact[choice.unit_TK[0]], atol=2e-5)
        best = np.sort(exact[candidates[:num_exact]])[::-1][:k]
        np.testing.assert_allclose(choice.influence_TK[0], best, atol=2e-5)
        # The gate's forward and backward over the window alone, the short window, the candidates;
        # far tokens that are shown alone have states of their own.
        length = 6 if far_states == "contextual" else 6 + len(by_hand[0])
        alone = 0 if far_states == "contextual" else 54
        assert scorer.token_forwards - before == alone + 3 * 6 + 6 + num_exact * length


@READINGS
def test_the_gate_gradient_is_a_finite_difference(
    model: Any, document: np.ndarray, far_states: Reading
) -> None:
    """Against opening one far token's gate a little, in a mask written out by hand."""
    block = next(iter(Windows(14, 6, 1).blocks(document)))
    scorer = Scorer(model, CPU, far_states=far_states)
    found = gate_gradients(scorer, scorer.context(block), [(0, 1)])[0]
    tokens = torch.from_numpy(block.tokens[:-1])[None]
    positions = torch.arange(14)[None]

    @torch.no_grad()
    def loss(gates: torch.Tensor) -> float:
        bias = torch.full((14, 14), torch.finfo(torch.float).min)
        for query in range(14):
            for key in range(query + 1):
                if key < 8 <= query:
                    bias[query, key] = gates[key]
                elif query >= 8 or query == key or far_states == "contextual":
                    bias[query, key] = 0.0
        logits = model(tokens, positions, bias[None, None])[0, -1].float()
        return -float(logits.log_softmax(-1)[int(block.targets_W[0])])

    for j in range(8):
        up, down = (torch.full((8,), float(np.log(0.1))) for _ in range(2))
        up[j] += 0.05
        down[j] -= 0.05
        assert found[j] == pytest.approx((loss(down) - loss(up)) / 0.1, abs=2e-3)


@pytest.mark.parametrize("kind", ["tokens", "span:3"])
def test_attention_is_that_of_the_long_window(document: np.ndarray, kind: str) -> None:
    """Against all weights of all layers, which transformers gives for a whole window."""
    model = tiny("llama")
    model.model.set_attn_implementation("eager")
    for windows in (Windows(14, 4, 3), Windows(14, 4, 3, prefix=(60, 3))):
        block, size = next(iter(windows.blocks(document))), len(windows.prefix)
        scorer, (units, by_hand) = shown_alone(model), units_of(kind)
        choice = SELECTORS["attention"](scorer, question(scorer, block, [0, 2], 3, units))
        for row, target in enumerate((0, 2)):
            tokens = torch.tensor([[*windows.prefix, *document[: 14 + target].tolist()]])
            with torch.no_grad():
                layers = model.model(tokens, output_attentions=True).attentions
            weights = torch.stack(layers)[:, 0, :, -1].mean((0, 1))[size:]
            expected = np.array([sum(float(weights[j]) for j in unit) for unit in by_hand])
            assert_ranked(choice, row, expected, 3)


@READINGS
def test_weights_of_heads_are_the_least_squares_fit_to_influences(
    model: Any, document: np.ndarray, far_states: Reading
) -> None:
    windows, places = Windows(16, 6, 4, prefix=(60, 3)), [17, 22, 30, 39]
    scorer = Scorer(model, CPU, far_states=far_states)
    before = scorer.token_forwards
    heads = fit_head_weights(scorer, windows, [(document, p) for p in places])
    assert heads.num_targets == 4
    assert heads.token_forwards == scorer.token_forwards - before > 0
    scorer.head_weights = np.array(heads.weights)
    x, y = [], []
    for place in places:
        brute = Brute(model, document, windows, place, far_states)
        tokens, positions = brute.inputs([*brute.far, *brute.near])
        states = model.far_states(tokens[:, :12], positions[:, :12])
        with torch.no_grad():
            weights_HF = model.last_attention(tokens[:, 12:], positions[:, 12:], states)[0, :, 2:12]
        x.append((weights_HF - weights_HF.mean(1, keepdim=True)).T.numpy())
        y.append(brute.influences("add_one") - brute.influences("add_one").mean())
    num_heads = x[0].shape[1]
    assert num_heads == 8
    squares = np.mean([(x_FH**2).sum(0) for x_FH in x], 0).mean() * len(x)
    x.append(np.eye(num_heads) * np.sqrt(1e-3 * squares))  # the ridge, as more rows
    y.append(np.zeros(num_heads))
    expected = np.linalg.lstsq(np.concatenate(x), np.concatenate(y), rcond=None)[0]
    np.testing.assert_allclose(scorer.head_weights, expected, rtol=2e-3, atol=2e-3)
    block = windows.block(document, 16, 20)
    choice = SELECTORS["attention_learned"](scorer, question(scorer, block, [1], 3))
    assert_ranked(choice, 0, x[0] @ expected + choice.score_TU[0].mean(), 3)


def test_last_attention_of_olmo_is_that_of_its_hugging_face_twin() -> None:
    from olmo_sparsity.model.exchange import hugging_face_model

    ours, config = tiny("olmo"), ModelConfig(**SHAPE, **OURS["olmo"])
    theirs = HuggingFaceLM(hugging_face_model(config, ours.state_dict(), "test").eval())
    tokens = torch.randint(0, VOCAB, (2, 9))
    positions = torch.tensor([[0, 1, 5, 6, 7, 20, 21, 22, 30]]).expand(2, 9)
    weights = []
    for model in (ours, theirs):
        states = model.far_states(tokens[:, :5], positions[:, :5])
        weights.append(model.last_attention(tokens[:, 5:], positions[:, 5:], states))
    torch.testing.assert_close(*weights)
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, 8))


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
def test_no_target_no_rows(model: Any) -> None:
    found = context_losses(shown_alone(model), Document(np.arange(5)), Windows(10, 4))
    assert len(found.target) == len(found.loss_long) == len(NOTHING) == 0


# --- costs ----------------------------------------------------------------------------------------


def test_cost_is_counted_in_token_forwards(block: Block) -> None:
    for kind, width in (("tokens", 1), ("span:3", 3)):
        scorer, (units, by_hand) = shown_alone(tiny("olmo")), units_of(kind)
        influence_map(scorer, scorer.context(block), units)
        assert scorer.token_forwards == len(by_hand) * (width + 6 + 3) + (6 + 3)


@pytest.fixture
def prefills(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The far tokens of every text whose states are made."""
    found: list[np.ndarray] = []
    really = model.far_states

    def counted(tokens_BL: torch.Tensor, positions_BL: torch.Tensor) -> Any:
        found.extend(tokens_BL.numpy())
        return really(tokens_BL, positions_BL)

    monkeypatch.setattr(model, "far_states", counted)
    return found


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


def test_a_batch_counts_the_far_states_it_looks_back_at(
    document: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tiny("olmo")
    block = next(iter(Windows(30, 6, 1).blocks(document)))
    scorer = Scorer(ours, CPU, batch_tokens=80)
    context = scorer.context(block)
    sizes, hidden = [], ours.hidden

    def counted(tokens_BL: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        sizes.append(len(tokens_BL))
        return hidden(tokens_BL, *given, **named)

    monkeypatch.setattr(ours, "hidden", counted)
    scorer.losses([context.set_row(np.arange(10))] * 20)  # the states of 10 places, in each row
    assert max(sizes) == 80 // (6 + 10)
    scorer.losses([context.set_row(np.arange(24))] * 20)  # all states, shared by the rows
    assert max(sizes) == 80 // 6


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
@pytest.mark.parametrize("selector", ["add_one", "add_one_screened", "gradient", "lrp"])
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


# --- controls -------------------------------------------------------------------------------------


def test_controls_choose_what_they_say(block: Block) -> None:
    scorer = shown_alone(tiny("olmo"))
    block = block.with_far(np.array([5, 7, 5, 9, 7, 5, 1, 2, 3, 4]))

    def chosen(selector: str, kind: str, targets: Sequence[int] = (0,)) -> list[list[int]]:
        asked = question(scorer, block, targets, 3, units_of(kind)[0])
        return SELECTORS[selector](scorer, asked).unit_TK.tolist()

    assert chosen("nearest", "tokens") == [[9, 8, 7]]
    assert chosen("nearest", "span:3") == [[7, 6, 5]]
    assert chosen("nearest", "words", (0, 2)) == [[4, 3, 2], [4, 3, 2]]
    assert chosen("most_frequent", "tokens")[0][:2] == [5, 4]
    # The last 5 counts three and the last 7 two; whoever holds both comes first, the nearer before.
    assert set(chosen("most_frequent", "span:3")[0][:2]) == {3, 4}
    assert chosen("most_frequent", "words")[0][0] == 3 - 1
    for kind in KINDS:
        drawn = chosen("random", kind, (0, 1, 2, 3))
        num_units = len(units_of(kind)[1])
        for row in drawn:
            assert len(set(row)) == len(row) == min(3, num_units)
            assert set(row) <= set(range(num_units))
        assert drawn == chosen("random", kind, (0, 1, 2, 3))
        # What is drawn for a target does not depend on which others are asked about.
        assert chosen("random", kind, (1, 3)) == [drawn[1], drawn[3]]
    asked = question(scorer, block, [0], 3)
    sets = {tuple(sorted(SELECTORS["random"](scorer, asked).unit_TK[0])) for _ in range(30)}
    assert len(sets) > 10
    assert scorer.token_forwards == 0


# --- all of it, of one document -------------------------------------------------------------------

RECOVERED = Windows(16, 6, 4)
TARGETS = {"document": np.array([17, 19, 26]), "placebo": np.array([16, 19])}  # of two blocks


@pytest.fixture(scope="module")
def documents() -> Documents:
    generator = np.random.default_rng(2)
    return Documents.of([generator.integers(0, VOCAB, 30 + 2 * i) for i in range(7)])


def recovered(scorer: Scorer, documents: Documents, **changed: Any) -> dict[str, Any]:
    options = {"targets": TARGETS, "units": ("tokens", "span:3"), "ks": (1, 2),
               "selectors": ("add_one", "divergence", "random")} | changed  # fmt: skip
    controls = Controls(documents, RECOVERED, num_draws=3)
    return recover(scorer, documents[1], RECOVERED, controls=controls, **options)


@ONE_FAMILY
@READINGS
def test_what_is_recovered_is_the_loss_of_the_chosen_set(
    model: Any, documents: Documents, far_states: Reading
) -> None:
    """Of each far part, and of the foreign texts put in its place by hand."""
    document, controls = documents[1], Controls(documents, RECOVERED, num_draws=3)
    tables = recovered(Scorer(model, CPU, far_states=far_states), documents)
    by = ["target", "far_part", "units", "selector", "control"]
    influence = {about: rows for about, rows in tables["influence"].groupby(by)}
    blocks = {block.start: block for block in RECOVERED.blocks(document.tokens)}

    @cache
    def brute_of(target: int, part: str, draw: int) -> Brute:
        block, text = blocks[target - (target - 16) % 4], document.tokens
        if part == "placebo":
            text = behind(text, block, controls.placebo(document, block))
        elif part == "foreign":
            text = behind(text, block, controls.unrelated(document, block, draw))
        return Brute(model, text, RECOVERED, target, far_states)

    num_seen = 0
    for about, rows in tables["recovery"].groupby([*by, "draw"]):
        target, part, kind, selector, control, draw = about
        own = brute_of(target, part, 0)
        brute = own if control == "own" else brute_of(target, "foreign", draw)
        aim = own.log_p(range(10))
        by_hand = units_of(kind)[1]
        assert rows.k.tolist() == [1, 2]
        # Which units are chosen, by brute force: the best, whatever the draw.
        if selector == "add_one":
            best = min(brute.loss(unit) for unit in by_hand)
            assert rows.loss_set.iloc[0] == pytest.approx(best, abs=2e-5)
        if selector == "divergence":
            best = min(brute.kl(unit, aim) for unit in by_hand)
            assert rows.kl_set.iloc[0] == pytest.approx(best, abs=2e-5)
        assert rows.kl_set.isna().all() == (selector != "divergence")
        if draw > 0:
            continue
        chosen = influence[about[:-1]]
        assert chosen["rank"].tolist() == [1, 2]
        for row in rows.itertuples():
            places = {
                place - brute.origin
                for first, end in zip(chosen.far_first[: row.k], chosen.far_end, strict=False)
                for place in range(first, end)
            }
            assert row.num_tokens == len(places)
            assert row.loss_set == pytest.approx(brute.loss(places), abs=2e-5)
            without = brute.loss({*range(10)} - places) if control == "own" else np.nan
            assert row.loss_without == pytest.approx(without, abs=2e-5, nan_ok=True)
            if selector == "divergence":
                assert row.kl_set == pytest.approx(brute.kl(places, aim), abs=2e-5)
        for row in chosen.itertuples():
            far = brute.document[row.far_first : row.far_end]
            assert row.far_text == " ".join(str(token) for token in far)
        num_seen += 1
    # Five targets of the far parts, two kinds of units, three selectors, own and foreign.
    assert num_seen == len(influence) == 5 * 2 * 3 * 2
    assert {about[:2] for about in influence} == {
        (target, part) for part, targets in TARGETS.items() for target in targets.tolist()
    }
    draws = tables["recovery"].groupby(["control", "selector"]).draw.nunique()
    assert draws.to_dict() == {
        (control, selector): 1 if control == "own" and selector != "random" else 3
        for control in ("own", "foreign")
        for selector in ("add_one", "divergence", "random")
    }


@ONE_FAMILY
@READINGS
@pytest.mark.parametrize("kind", ["tokens", "span:3"])
def test_lds_is_the_rank_correlation_with_the_losses_of_random_halves(
    model: Any, documents: Documents, far_states: Reading, kind: str
) -> None:
    selectors = ("add_one", "drop_one", "add_one_screened", "most_frequent")
    tables = recovered(
        Scorer(model, CPU, far_states=far_states), documents, units=kind, selectors=selectors,
        num_halves=7, seed=3,
    )  # fmt: skip
    document, (_, by_hand) = documents[1], units_of(kind)
    found = tables["lds"].set_index(["target", "selector"]).lds
    targets = TARGETS["document"].tolist()
    assert len(found) == len(targets) * len(selectors)
    for target in targets:
        brute = Brute(model, document.tokens, RECOVERED, target, far_states)
        start = target - (target - 16) % 4
        kept = units_of(kind)[0].halves(7, np.random.default_rng([3, document.number, start]))
        far = [{j for unit in np.flatnonzero(row) for j in by_hand[unit]} for row in kept]
        falls = pd.Series([brute.loss([]) - brute.loss(places) for places in far])
        for selector in ("add_one", "drop_one"):
            predicted = pd.Series(kept @ brute.influences(selector, by_hand))
            expected = np.corrcoef(predicted.rank(), falls.rank())[0, 1]
            assert found[target, selector] == pytest.approx(expected, abs=1e-6)
        # It evaluates all of so few units.
        assert found[target, "add_one_screened"] == pytest.approx(found[target, "add_one"])
    spent = tables["costs"].query("selector == 'halves'")
    assert spent.num_targets.sum() == len(targets)
    assert (spent.token_forwards > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_halves_have_the_same_number_of_units_that_do_not_overlap(kind: str) -> None:
    units, by_hand = units_of(kind)
    kept = units.halves(200, np.random.default_rng(0))
    apart = by_hand[::3] if kind == "span:3" else by_hand
    assert (kept.sum(1) == len(apart) // 2).all()
    assert [by_hand[unit] for unit in np.flatnonzero(kept.any(0))] == apart
    # So scores that say nothing predict nothing, not even where every unit helps.
    generator = np.random.default_rng(1)
    helps, scores = generator.random((300, len(units))), generator.random((300, len(units)))
    assert abs(rank_correlations(scores @ kept.T, helps @ kept.T).mean()) < 0.1


def test_rank_correlations() -> None:
    x = np.array([[1.0, 2, 3, 4], [1, 1, 2, 2], [5, 5, 5, 5], [3, 1, 2, 4]])
    y = np.array([[10.0, 20, 30, 90], [1, 2, 3, 4], [1, 2, 3, 4], [-3, -1, -2, -4]])
    found = rank_correlations(x, y)
    np.testing.assert_allclose(found, [1, 4 / np.sqrt(4 * 5), np.nan, -1])
    y[0, 0] = np.nan  # a loss that is no number is not a loss that nothing changes
    np.testing.assert_allclose(rank_correlations(x, y, of_equal_values=0.0)[[0, 2]], [np.nan, 0])


@ONE_FAMILY
def test_far_states_are_made_once_for_each_text_of_a_block(
    model: Any, documents: Documents, prefills: list[np.ndarray]
) -> None:
    """The own far part, the placebo, and three foreign texts, whatever is asked about them."""
    scorer = Scorer(model, CPU)
    scorer.head_weights = np.ones(8)
    tables = recovered(scorer, documents, selectors=tuple(SELECTORS))
    asked = {16: ["document", "placebo"], 24: ["document"]}  # the first targets of the blocks
    document, controls = documents[1], Controls(documents, RECOVERED, num_draws=3)
    expected = []
    for block in RECOVERED.blocks(document.tokens):
        own = {"document": block.far_F, "placebo": controls.placebo(document, block).tokens_F}
        foreign = [controls.unrelated(document, block, draw).tokens_F for draw in range(3)]
        if block.start in asked:
            texts = [*(own[part] for part in asked[block.start]), *foreign]
            expected += [far_F.tolist() for far_F in texts]
    assert [far_F.tolist() for far_F in prefills] == expected
    shared = tables["costs"].query("selector == 'shared'")
    assert (shared.token_forwards > 0).all()


@ONE_FAMILY
@READINGS
def test_a_target_has_the_same_rows_whichever_others_are_asked_about(
    model: Any, documents: Documents, far_states: Reading
) -> None:
    scorer = Scorer(model, CPU, far_states=far_states)
    every = {part: np.arange(16, 24) for part in TARGETS}
    whole = recovered(scorer, documents, targets=every)["recovery"]
    for part, target in (("document", 17), ("placebo", 17), ("document", 23)):
        alone = recovered(scorer, documents, targets={part: np.array([target])})["recovery"]
        same = whole[(whole.target == target) & (whole.far_part == part)]
        by = [name for name in alone.columns if name not in LOSSES]
        both = alone.merge(same, on=by, validate="one_to_one")
        assert len(both) == len(alone) == len(same)
        for name in LOSSES:
            np.testing.assert_allclose(both[f"{name}_x"], both[f"{name}_y"], atol=2e-6)


@ONE_FAMILY
def test_without_controls_there_is_nothing_foreign(model: Any, documents: Documents) -> None:
    found = recover(shown_alone(model), documents[0], RECOVERED, ks=(1,))["recovery"]
    assert found.target.tolist() == list(range(16, 30))
    assert set(found.control) == {"own"}
    assert set(found.far_part) == {"document"}


# --- windows that begin with the text, targets of several tokens ----------------------------------

EVERYTHING = Windows("all", 6, 3, prefix=(60,))


@READINGS
def test_windows_of_all_that_stands_before(
    model: Any, documents: Documents, far_states: Reading
) -> None:
    """Losses and recovery, of runs of targets that are asked about as one."""
    document = documents[1]
    controls = Controls(documents, EVERYTHING, num_draws=2)
    scorer = Scorer(model, CPU, far_states=far_states)
    losses = context_losses(scorer, document, EVERYTHING, controls)
    assert losses.target.tolist() == list(range(7, len(document.tokens)))
    for row in losses.iloc[::5].itertuples():
        brute = Brute(model, document.tokens, EVERYTHING, row.target)
        assert row.loss_long == pytest.approx(brute.loss(range(len(brute.far))), abs=1e-5)
        assert row.loss_short == pytest.approx(brute.loss([]), abs=1e-5)
        assert row.kl == pytest.approx(brute.kl([]), abs=1e-5)
    spans = {"document": np.array([(13, 16), (19, 21)]), "placebo": np.array([(13, 16)])}
    tables = recover(
        scorer, document, EVERYTHING, spans, ks=(1, 2), selectors=("add_one", "gradient"),
        controls=controls,
    )  # fmt: skip
    blocks = {block.start: block for block in EVERYTHING.blocks(document.tokens)}
    placebo = behind(document.tokens, blocks[13], controls.placebo(document, blocks[13]))
    num_seen = 0
    for part, text in (("document", document.tokens), ("placebo", placebo)):
        for target, end in spans[part].tolist():
            places = range(target, end)
            brutes = [Brute(model, text, EVERYTHING, place, far_states) for place in places]
            asked = {"target": target, "far_part": part, "control": "own"}
            for selector in ("add_one", "gradient"):
                chosen, found = (
                    rows_of(tables[name], selector=selector, **asked)
                    for name in ("influence", "recovery")
                )
                influence = sum(brute.influences(selector) for brute in brutes)
                np.testing.assert_allclose(
                    chosen.influence, np.sort(influence)[::-1][:2], atol=1e-4
                )
                for row in found.itertuples():
                    far = chosen.far_first[: row.k].tolist()
                    expected = sum(brute.loss(far) for brute in brutes)
                    assert row.loss_set == pytest.approx(expected, abs=5e-5)
                    num_seen += 1
    assert num_seen == 3 * 2 * 2
    foreign = rows_of(tables["recovery"], control="foreign", target=19, selector="add_one", k=1)
    for draw, row in enumerate(foreign.itertuples()):
        text = behind(document.tokens, blocks[19], controls.unrelated(document, blocks[19], draw))
        brutes = [Brute(model, text, EVERYTHING, place, far_states) for place in (19, 20)]
        best = min(sum(brute.loss([j]) for brute in brutes) for j in range(13))
        assert row.loss_set == pytest.approx(best, abs=5e-5)


def rows_of(table: Any, **values: Any) -> Any:
    for name, value in values.items():
        table = table[table[name] == value]
    return table


@ONE_FAMILY
def test_one_pass_over_a_text_serves_all_of_its_blocks(
    model: Any, documents: Documents, prefills: list[np.ndarray]
) -> None:
    document, controls = documents[1], Controls(documents, EVERYTHING, num_draws=2)
    places = {"document": np.array([8, 13, 20]), "placebo": np.array([10, 25])}
    recover(Scorer(model, CPU), document, EVERYTHING, places, ks=(1,), controls=controls)
    assert len(prefills) == 1 + 1 + 2  # the document, the placebo, two foreign texts
    assert {len(tokens) for tokens in prefills} == {1 + 25 - 6}
    assert recover(Scorer(model, CPU), document, EVERYTHING, [])["recovery"].empty


@READINGS
def test_nested_asks_groups_and_opens_the_best(
    monkeypatch: pytest.MonkeyPatch, far_states: Reading
) -> None:
    """Its influences are exact ones; what it opens is found here by hand."""
    model = tiny("olmo")
    document = np.random.default_rng(3).integers(0, VOCAB, 64)
    windows = Windows(63, 6, 1)
    block = next(iter(windows.blocks(document)))
    monkeypatch.setattr("analysis.influence.GROUPS", (16, 4))
    monkeypatch.setattr("analysis.influence.NUM_OPENED", 8)
    brute = Brute(model, document, windows, 63, far_states)
    scorer = Scorer(model, CPU, far_states=far_states)
    asked = question(scorer, block, [0], 1)
    choice = SELECTORS["add_one_nested"](scorer, asked)
    # 57 far tokens are too few for eight groups of 16; of 15 groups of 4, eight are opened.
    groups = [list(range(first, min(first + 4, 57))) for first in range(0, 57, 4)]
    falls = [brute.loss([]) - brute.loss(group) for group in groups]
    opened = [j for index in np.argsort(falls)[::-1][:8] for j in groups[index]]
    gate = gate_gradients(scorer, asked.context, asked.spans)[0]
    opened = sorted({*opened, *np.argsort(-gate)[:16].tolist()})
    exact = brute.influences("add_one")
    evaluated = np.flatnonzero(choice.score_TU[0])
    assert evaluated.tolist() == opened
    np.testing.assert_allclose(choice.score_TU[0, opened], exact[opened], atol=2e-5)
    assert choice.unit_TK[0, 0] == max(opened, key=lambda j: exact[j])
    assert choice.influence_TK[0, 0] == pytest.approx(exact[opened].max(), abs=2e-5)
