"""Every selector and loss against brute force: one forward per subset, batch 1.

The brute force below shares no code with the package: it slices tokens, counts position IDs and
calls the model itself.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from analysis.influence import SELECTORS, Choice, Question, influence_map
from analysis.losses import NOTHING, context_losses
from analysis.recovery import set_losses
from analysis.scoring import Reading, Scorer, long_row
from analysis.windows import Block, Windows
from olmo_sparsity.config import ModelConfig
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.model.huggingface import HuggingFaceLM
from olmo_sparsity.model.load import build_model

VOCAB = 61
CPU = torch.device("cpu")
shown_alone = partial(Scorer, device=CPU, far_states="isolated")


def tiny(family: str) -> Any:
    torch.manual_seed(0)
    shape = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB}
    if family == "olmo":
        model: nn.Module = build_model(
            ModelConfig(**shape, max_sequence_length=64, layer_norm_type="rms", init_std=0.2)
        )
    elif family == "gpt_neox":
        model = build_model(
            ModelConfig(**shape, architecture="gpt_neox", max_sequence_length=64, init_std=0.2)
        )
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        model = HuggingFaceLM(
            LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=32,
                    intermediate_size=48,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    num_hidden_layers=2,
                    vocab_size=VOCAB,
                    max_position_embeddings=64,
                    initializer_range=0.2,
                )
            )
        )
    return model.eval()


FAMILIES = ["olmo", "gpt_neox", "llama"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@pytest.fixture(scope="module")
def document() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, 40)


# --- brute force ----------------------------------------------------------------------------------


class Brute:
    """All quantities of one target, from their definitions."""

    def __init__(
        self,
        model: Any,
        document: np.ndarray,
        windows: Windows,
        target: int,
        far_states: Reading = "isolated",
    ) -> None:
        self.model, self.document, self.target = model, document, target
        self.far_states = far_states
        start = target - (target - windows.long) % windows.stride
        self.origin = start - windows.long
        self.near = list(range(start - windows.short, target))
        self.far = list(range(self.origin, start - windows.short))

    @torch.no_grad()
    def log_p(self, far: list[int]) -> torch.Tensor:
        """log p(· | the window and these far tokens), `far` counted from the origin."""
        chosen = [self.origin + j for j in sorted(far)]
        if self.far_states == "isolated":
            return self._read([*chosen, *self.near])
        # The long text, of which the window sees the chosen far tokens only.
        places = [*self.far, *self.near]
        seen = torch.ones(len(places), len(places)).tril().bool()
        hidden = torch.tensor([place not in chosen for place in self.far])
        seen[len(self.far) :, : len(self.far)] &= ~hidden
        bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float).min)
        return self._read(places, bias[None, None])

    def _read(self, places: list[int], *bias: torch.Tensor) -> torch.Tensor:
        tokens = torch.tensor([[int(self.document[place]) for place in places]])
        positions = torch.tensor([[place - self.origin for place in places]])
        return self.model(tokens, positions, *bias)[0, -1].float().log_softmax(-1)

    def loss(self, far: list[int]) -> float:
        return -float(self.log_p(far)[int(self.document[self.target])])

    def influences(self, selector: str) -> np.ndarray:
        every = list(range(len(self.far)))
        if selector in ("add_one", "greedy"):
            return np.array([self.loss([]) - self.loss([j]) for j in every])
        if selector == "drop_one":
            return np.array(
                [self.loss([i for i in every if i != j]) - self.loss(every) for j in every]
            )
        if selector == "divergence":
            p = self.log_p(every)

            def kl(far: list[int]) -> float:
                return float((p.exp() * (p - self.log_p(far))).sum())

            return np.array([kl([]) - kl([j]) for j in every])
        if selector == "gradient":
            return self.gradient_times_input()
        raise AssertionError(selector)

    def gradient_times_input(self) -> np.ndarray:
        places = [*self.far, *self.near]
        embedding = self.model.embedding.weight
        tokens = torch.tensor([[int(self.document[place]) for place in places]])
        positions = torch.tensor([[place - self.origin for place in places]])
        change = torch.zeros(1, len(places), embedding.shape[1], requires_grad=True)
        hook = self.model.embedding.register_forward_hook(lambda m, i, out: out + change)
        logits = self.model(tokens, positions)[0, -1]
        hook.remove()
        loss = -logits.float().log_softmax(-1)[int(self.document[self.target])]
        (gradient,) = torch.autograd.grad(loss, change)
        inputs = embedding[tokens[0]]
        return -(gradient[0] * inputs).sum(-1).detach().numpy()[: len(self.far)]


def assert_ranked(choice: Choice, row: int, influence: np.ndarray, k: int) -> None:
    """The chosen have the k largest influences, in order; ties within rounding may swap."""
    chosen = choice.far_TK[row]
    assert len(set(chosen.tolist())) == k
    np.testing.assert_allclose(choice.influence_TK[row], influence[chosen], atol=2e-5)
    best = np.sort(influence)[::-1][:k]
    np.testing.assert_allclose(influence[chosen], best, atol=2e-5)


# --- the tests ------------------------------------------------------------------------------------

READINGS = pytest.mark.parametrize("far_states", ["isolated", "contextual"])
WINDOWS = [Windows(16, 6, 1), Windows(16, 6, 4), Windows(12, 5, 7)]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_context_losses(model: Any, document: np.ndarray, windows: Windows) -> None:
    found = context_losses(shown_alone(model, batch_tokens=64), document, windows)
    assert found.target.tolist() == list(range(windows.long, len(document)))
    for index, target in enumerate(found.target.tolist()):
        brute = Brute(model, document, windows, target)
        assert found.loss_short[index] == pytest.approx(brute.loss([]), abs=1e-5)
        every = list(range(windows.num_far))
        assert found.loss_long[index] == pytest.approx(brute.loss(every), abs=1e-5)


@READINGS
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_influence_map(
    model: Any, document: np.ndarray, windows: Windows, far_states: Reading
) -> None:
    scorer = Scorer(model, CPU, far_states=far_states, batch_tokens=100)
    for block in list(windows.blocks(document))[::3]:
        influence_FW = influence_map(scorer, block)
        for i in range(block.num_targets):
            brute = Brute(model, document, windows, block.start + i, far_states)
            np.testing.assert_allclose(influence_FW[:, i], brute.influences("add_one"), atol=1e-5)


@READINGS
@pytest.mark.parametrize("windows", WINDOWS[:2], ids=str)
@pytest.mark.parametrize("selector", ["add_one", "drop_one", "divergence", "gradient"])
def test_selectors(
    model: Any, document: np.ndarray, windows: Windows, selector: str, far_states: Reading
) -> None:
    scorer = Scorer(model, CPU, far_states=far_states, batch_tokens=128)
    block = list(windows.blocks(document))[2]
    targets = np.arange(block.num_targets)[::-1][:3][::-1].copy()
    choice = SELECTORS[selector](scorer, question(block, targets, 4))
    for row, target in enumerate(targets.tolist()):
        brute = Brute(model, document, windows, block.start + target, far_states)
        assert_ranked(choice, row, brute.influences(selector), 4)


def question(block: Block, targets: np.ndarray, k: int, own: Block | None = None) -> Question:
    return Question(block, own or block, targets, k, np.random.default_rng(0))


@READINGS
@pytest.mark.parametrize("windows", WINDOWS[:2], ids=str)
def test_greedy_picks_the_best_next_token_each_time(
    model: Any, document: np.ndarray, windows: Windows, far_states: Reading
) -> None:
    block = next(iter(windows.blocks(document)))
    targets = np.array([block.num_targets - 1])
    scorer = Scorer(model, CPU, far_states=far_states)
    choice = SELECTORS["greedy"](scorer, question(block, targets, 3))
    brute = Brute(model, document, windows, block.start + int(targets[0]), far_states)
    for count in range(3):
        before = choice.far_TK[0, :count].tolist()
        after = [
            brute.loss([*before, j]) if j not in before else np.inf for j in range(windows.num_far)
        ]
        assert after[choice.far_TK[0, count]] == pytest.approx(min(after), abs=1e-5)
        gain = brute.loss(before) - min(after)
        assert choice.influence_TK[0, count] == pytest.approx(gain, abs=2e-5)


def test_screened_equals_add_one_when_it_screens_nothing_out(
    model: Any, document: np.ndarray
) -> None:
    windows = Windows(16, 6, 4)  # ten far tokens, sixteen are evaluated exactly
    block = next(iter(windows.blocks(document)))
    asked = question(block, np.array([0, 3]), 5)
    exact, screened = (
        SELECTORS[name](shown_alone(model), asked) for name in ("add_one", "add_one_screened")
    )
    np.testing.assert_allclose(screened.influence_TK, exact.influence_TK, atol=2e-5)


def test_screened_evaluates_max_16_2k_candidates_exactly(model: Any) -> None:
    document = np.random.default_rng(3).integers(0, VOCAB, 61)
    windows = Windows(60, 6, 1)
    block = next(iter(windows.blocks(document)))
    influence = Brute(model, document, windows, 60).influences("add_one")
    for k, num_exact in ((2, 16), (20, 40)):
        scorer = shown_alone(model)
        choice = SELECTORS["add_one_screened"](scorer, question(block, np.array([0]), k))
        np.testing.assert_allclose(choice.influence_TK[0], influence[choice.far_TK[0]], atol=2e-5)
        assert (np.diff(choice.influence_TK[0]) <= 0).all()
        # The gate's forward and backward, the short window, and the candidates.
        assert scorer.token_forwards == 3 * 60 + 6 + num_exact * (6 + 1)


@READINGS
def test_the_gate_gradient_is_a_finite_difference(
    model: Any, document: np.ndarray, far_states: Reading
) -> None:
    """Against opening one far token's gate a little, in a mask written out by hand."""
    from analysis import influence

    windows = Windows(14, 6, 1)
    block = next(iter(windows.blocks(document)))
    scorer = Scorer(model, CPU, far_states=far_states)
    found = influence._gate_batch(scorer, block, np.array([0]))[0]
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


def test_attention_is_that_of_the_last_layer(model: Any, document: np.ndarray) -> None:
    """Against weights recomputed from how the output of attention changes with each value."""
    tokens = torch.from_numpy(document[:12])[None]
    positions = torch.arange(12)[None] * 2
    with torch.no_grad():
        weights = model.last_attention(tokens, positions)[0]
    assert weights.shape == (12,)
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-5)
    assert (weights >= 0).all()
    windows = Windows(12, 4, 1)
    block = next(iter(windows.blocks(document)))
    choice = SELECTORS["attention"](shown_alone(model), question(block, np.array([0]), 3))
    with torch.no_grad():
        expected = model.last_attention(
            torch.from_numpy(block.tokens[:-1])[None], torch.arange(12)[None]
        )[0, :8].numpy()
    assert_ranked(choice, 0, expected, 3)


def test_last_attention_of_olmo_is_that_of_its_hugging_face_twin() -> None:
    from olmo_sparsity.model.exchange import hugging_face_model

    config = ModelConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=VOCAB, max_sequence_length=64,
        layer_norm_type="rms", init_std=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    ours: Any = build_model(config).eval()
    theirs = HuggingFaceLM(hugging_face_model(config, ours.state_dict(), "test").eval())
    tokens = torch.randint(0, VOCAB, (2, 9))
    positions = torch.tensor([[0, 1, 5, 6, 7, 20, 21, 22, 30]]).expand(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(
            ours.last_attention(tokens, positions), theirs.last_attention(tokens, positions)
        )


@pytest.mark.parametrize("windows", WINDOWS[:2], ids=str)
def test_losses_and_divergences_of_sets(model: Any, document: np.ndarray, windows: Windows) -> None:
    scorer = shown_alone(model, batch_tokens=64)
    block = list(windows.blocks(document))[1]
    targets = np.array([0, block.num_targets - 1])
    choice = Choice(np.array([[3, 0, 7], [9, 2, 1]]), np.zeros((2, 3)))
    found = set_losses(scorer, block, block, targets, choice, (1, 3), with_kl=True)
    assert found.kl_TK is not None
    assert found.kl_short_T is not None
    for row, target in enumerate(targets.tolist()):
        brute = Brute(model, document, windows, block.start + target)
        p = brute.log_p(list(range(windows.num_far)))

        def kl(far: list[int], p: torch.Tensor = p, brute: Brute = brute) -> float:
            return float((p.exp() * (p - brute.log_p(far))).sum())

        for column, k in enumerate((1, 3)):
            far = choice.far_TK[row, :k].tolist()
            assert found.loss_TK[row, column] == pytest.approx(brute.loss(far), abs=1e-5)
            assert found.kl_TK[row, column] == pytest.approx(kl(far), abs=1e-5)
        assert found.kl_short_T[row] == pytest.approx(kl([]), abs=1e-5)


def test_how_much_is_unembedded_at_once_changes_nothing(
    model: Any, document: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = list(Windows(16, 6, 4).blocks(document))[1]
    scorer = shown_alone(model)
    rows = [scorer.set_row(block, np.array([j])) for j in range(10)]
    log_p_WV = scorer.log_probabilities(long_row(block))
    whole = scorer.losses(rows), scorer.divergences(rows, [log_p_WV] * 10)
    monkeypatch.setattr("analysis.scoring.rows_per_chunk", lambda *_: 9)
    parts = scorer.losses(rows), scorer.divergences(rows, [log_p_WV] * 10)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(np.stack(one), np.stack(other), atol=1e-6)
    assert np.stack(whole[0]).std() > 0.1


def test_foreign_candidates_stand_at_the_same_position_ids(
    model: Any, document: np.ndarray
) -> None:
    windows = Windows(16, 6, 1)
    block = next(iter(windows.blocks(document)))
    other = np.random.default_rng(5).integers(0, VOCAB, 10)
    mixed = np.concatenate([other, document[10:]])
    choice = SELECTORS["add_one"](
        shown_alone(model), question(block.with_far(other), np.array([0]), 4, own=block)
    )
    brute = Brute(model, mixed, windows, block.start)
    assert_ranked(choice, 0, brute.influences("add_one"), 4)
    # Divergence aims at the own long context, whatever the candidates.
    choice = SELECTORS["divergence"](
        shown_alone(model), question(block.with_far(other), np.array([0]), 4, own=block)
    )
    p = Brute(model, document, windows, block.start).log_p(list(range(10)))
    kl = [
        float((p.exp() * (p - brute.log_p(far))).sum()) for far in [[], *([j] for j in range(10))]
    ]
    assert_ranked(choice, 0, kl[0] - np.array(kl[1:]), 4)


@READINGS
def test_with_all_far_tokens_a_set_is_the_long_window(
    model: Any, document: np.ndarray, far_states: Reading
) -> None:
    windows = Windows(16, 6, 3)
    scorer = Scorer(model, CPU, far_states=far_states)
    losses = context_losses(scorer, document, windows)
    for block in windows.blocks(document):
        everything = scorer.set_row(block, np.arange(windows.num_far))
        first = block.start - windows.long
        np.testing.assert_allclose(
            scorer.losses([everything])[0],
            losses.loss_long[first : first + block.num_targets],
            atol=1e-5,
        )


def test_the_two_readings_differ(model: Any, document: np.ndarray) -> None:
    block = next(iter(Windows(12, 5, 1).blocks(document)))
    found = []
    for scorer in (Scorer(model, CPU), shown_alone(model)):
        found += scorer.losses([scorer.set_row(block, np.array([1, 4]))])
    assert abs(found[0][0] - found[1][0]) > 1e-4


def test_cost_is_counted_in_token_forwards(document: np.ndarray) -> None:
    model = tiny("olmo")
    windows = Windows(16, 6, 4)
    block = next(iter(windows.blocks(document)))
    scorer = shown_alone(model)
    influence_map(scorer, block)
    assert scorer.token_forwards == 10 * (1 + 6 + 3) + (6 + 3)


def test_with_context_the_far_text_is_read_once_for_a_block(document: np.ndarray) -> None:
    block = next(iter(Windows(16, 6, 4).blocks(document)))
    scorer = Scorer(tiny("olmo"), CPU)
    influence_map(scorer, block)
    once = 10
    assert scorer.token_forwards == once + 10 * (6 + 3) + (6 + 3)
    influence_map(scorer, block)
    assert scorer.token_forwards == once + 2 * (10 * (6 + 3) + (6 + 3))


def test_rows_of_several_blocks_look_back_at_their_own_far_tokens(
    model: Any, document: np.ndarray
) -> None:
    scorer = Scorer(model, CPU)
    blocks = list(Windows(16, 6, 4).blocks(document))[:3]
    blocks.append(blocks[0].with_far(np.arange(10)))  # the same window behind other far tokens
    rows = [scorer.set_row(block, np.array([far, 9])) for far in (2, 5) for block in blocks]
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
    sizes, hidden = [], ours.hidden

    def counted(tokens_BL: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        sizes.append(len(tokens_BL))
        return hidden(tokens_BL, *given, **named)

    monkeypatch.setattr(ours, "hidden", counted)
    scorer.losses([scorer.set_row(block, np.arange(24))] * 6)
    assert max(sizes) == 80 // (6 + 24)


def test_controls_choose_what_they_say(document: np.ndarray) -> None:
    scorer = shown_alone(tiny("olmo"))
    block = next(iter(Windows(16, 6, 1).blocks(document)))
    block = block.with_far(np.array([5, 7, 5, 9, 7, 5, 1, 2, 3, 4]))
    asked = question(block, np.array([0]), 3)
    assert SELECTORS["nearest"](scorer, asked).far_TK.tolist() == [[9, 8, 7]]
    assert SELECTORS["most_frequent"](scorer, asked).far_TK[0, :2].tolist() == [5, 4]
    drawn = {tuple(sorted(SELECTORS["random"](scorer, asked).far_TK[0])) for _ in range(30)}
    assert len(drawn) > 10
    assert scorer.token_forwards == 0


# --- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 3, 50])
@pytest.mark.parametrize("length", [0, 10, 11, 12, 40])
def test_blocks_cover_every_target_with_a_full_window_once(stride: int, length: int) -> None:
    document = np.arange(length)
    windows = Windows(10, 4, stride)
    blocks = list(windows.blocks(document))
    targets = [t for b in blocks for t in b.targets_W.tolist()]
    assert targets == list(range(10, length))
    for block in blocks:
        assert block.tokens[0] == block.start - 10
        assert block.far_F.tolist() == list(range(block.start - 10, block.start - 4))
    assert all(b.start - a.start == stride for a, b in pairwise(blocks))


@pytest.mark.parametrize(
    ("windows", "limit", "message"),
    [
        (Windows(8, 8), None, "must be below --long=8"),
        (Windows(8, 0), None, "at least 1"),
        (Windows(8, 4, 0), None, "at least 1"),
        (Windows(8, 4, 2), 8, "needs 9 positions, the model is prepared for 8"),
    ],
)
def test_windows_that_mean_nothing_are_refused(
    windows: Windows, limit: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        windows.check(limit)


def test_no_target_no_rows(model: Any) -> None:
    found = context_losses(shown_alone(model), np.arange(5), Windows(10, 4))
    assert len(found.target) == len(found.loss_long) == len(NOTHING) == 0
