"""How much each far token matters to a target, and which k matter most: Eq. (20) and its rivals.

Place in the flow: blocks of chosen targets → **ranked far tokens** → recovery.

Every selector has one signature, `(scorer, question) → Choice`, and pays for its own forwards, so
that their costs can be compared. Eq. (20) in our reading is `add_one`: the influence of far token j
is the fall in the target's loss when j alone is put before the short window.

A question holds two blocks: the one whose far tokens are the candidates, and the document's own.
They differ in the foreign control, where candidates come from another document while the label-free
`divergence` still aims at the prediction that the document's own long context gives.

Dimension key: T chosen targets, F far tokens, K ranks, W targets of a block, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.scoring import Row, Scorer, as_tensors, long_row
from analysis.windows import NOTHING, Block
from olmo_sparsity.model.layers import causal_bias


@dataclass(frozen=True)
class Question:
    block: Block
    """Its far tokens are the candidates."""

    own: Block
    """The document's own block; the same one unless candidates are foreign."""

    targets: np.ndarray
    """Which targets of the block are asked about (indices into it)."""

    k: int
    generator: np.random.Generator
    """For the selectors that draw."""


@dataclass(frozen=True)
class Choice:
    far_TK: np.ndarray
    """Position IDs of the chosen far tokens, the most influential first."""

    influence_TK: np.ndarray
    """The selector's own score of each."""


def influence_map(scorer: Scorer, block: Block) -> np.ndarray:
    """I_FW in nats: L_short − L_set({j}) of every far token on every target of the block.

    One forward of [far token + short window + block] serves all W targets.
    """
    alone = [scorer.set_row(block, np.array([j])) for j in range(block.windows.num_far)]
    (short_W,) = scorer.losses([scorer.set_row(block, NOTHING)])
    return short_W[None] - np.stack(scorer.losses(alone))


def add_one(scorer: Scorer, question: Question) -> Choice:
    """Eq. (20): the largest falls in loss when a far token is added alone."""
    return _best(influence_map(scorer, question.block).T[question.targets], question.k)


def add_one_screened(scorer: Scorer, question: Question) -> Choice:
    """add_one on the max(16, 2k) candidates that a gradient ranks highest.

    One forward and backward of the short window with every far token barely there: its column of
    attention scores carries a log-gate of ln 0.1. The gradient of the loss with respect to the gate
    predicts what opening it would do. Far tokens shown alone see only themselves, those with their
    context all that is before them, at full strength.
    """
    gate_TF = _gate_gradients(scorer, question)
    screened = _best(gate_TF, min(gate_TF.shape[1], max(16, 2 * question.k)))
    short = scorer.losses(
        [scorer.set_row(question.block, NOTHING, int(target)) for target in question.targets]
    )
    alone = scorer.losses(
        [
            scorer.set_row(question.block, np.array([far]), int(target))
            for target, candidates in zip(question.targets, screened.far_TK, strict=True)
            for far in candidates
        ]
    )
    exact_TM = np.array(short).reshape(-1, 1) - np.array(alone).reshape(screened.far_TK.shape)
    exact = _best(exact_TM, question.k)
    return Choice(np.take_along_axis(screened.far_TK, exact.far_TK, axis=1), exact.influence_TK)


def drop_one(scorer: Scorer, question: Question) -> Choice:
    """The largest rises in loss when a far token is left out of the long window."""
    every = np.arange(question.block.windows.num_far)
    left_out = [scorer.set_row(question.block, np.delete(every, j)) for j in every]
    (long_W,) = scorer.losses([long_row(question.block)])
    influence_FW = np.stack(scorer.losses(left_out)) - long_W[None]
    return _best(influence_FW.T[question.targets], question.k)


def greedy(scorer: Scorer, question: Question) -> Choice:
    """add_one, then add_one again beside what is already chosen, k times."""
    num_far = question.block.windows.num_far
    first = add_one(scorer, Question(question.block, question.own, question.targets, 1,
                                     question.generator))  # fmt: skip
    far, influence = first.far_TK.tolist(), first.influence_TK.tolist()
    for row, target in enumerate(question.targets.tolist()):
        (before,) = scorer.losses([scorer.set_row(question.block, np.array(far[row]), target)])
        for _ in range(1, question.k):
            rest = [j for j in range(num_far) if j not in far[row]]
            rows = [scorer.set_row(question.block, np.array([*far[row], j]), target) for j in rest]
            after = np.array(scorer.losses(rows))[:, 0]
            best = int(after.argmin())
            far[row].append(rest[best])
            influence[row].append(float(before[0] - after[best]))
            before = after[best : best + 1]
    return Choice(np.array(far), np.array(influence))


def divergence(scorer: Scorer, question: Question) -> Choice:
    """Label-free: the largest falls in KL(p_long ‖ ·) when a far token is added alone."""
    log_p_WV = scorer.log_probabilities(long_row(question.own))
    rows = [scorer.set_row(question.block, NOTHING)]
    rows += [
        scorer.set_row(question.block, np.array([j])) for j in range(question.block.windows.num_far)
    ]
    short_W, *alone = scorer.divergences(rows, [log_p_WV] * len(rows))
    return _best((short_W[None] - np.stack(alone)).T[question.targets], question.k)


def gradient(scorer: Scorer, question: Question) -> Choice:
    """Gradient × input on the long window: the rise in loss, to first order, when an embedding is
    taken away."""
    saliency_TF = np.concatenate(
        [
            _embedding_saliency(scorer, question.block, targets)
            for targets in _in_batches(scorer, question)
        ]
    )
    return _best(saliency_TF, question.k)


def attention(scorer: Scorer, question: Question) -> Choice:
    """Mean attention, over the heads of the last layer, from the place that predicts the target."""
    found = []
    for target in question.targets.tolist():
        row = Row(question.block, question.block.long_places(last=target + 1), 1)
        tokens_BL, positions_BL = as_tensors([row], scorer.device)
        scorer.token_forwards += tokens_BL.numel()
        with torch.no_grad():
            weights_BL = scorer.model.last_attention(tokens_BL, positions_BL)
        found.append(weights_BL[0, : question.block.windows.num_far].float().cpu().numpy())
    return _best(np.stack(found), question.k)


def nearest(scorer: Scorer, question: Question) -> Choice:
    """Control: the far tokens next to the short window."""
    scores = np.arange(question.block.windows.num_far, dtype=float)
    return _best(np.tile(scores, (len(question.targets), 1)), question.k)


def random(scorer: Scorer, question: Question) -> Choice:
    """Control: any far tokens."""
    shape = (len(question.targets), question.block.windows.num_far)
    return _best(question.generator.random(shape), question.k)


def most_frequent(scorer: Scorer, question: Question) -> Choice:
    """Control: the nearest occurrence of each of the most frequent types among the far tokens."""
    far_F = question.block.far_F
    counts = {token: int((far_F == token).sum()) for token in set(far_F.tolist())}
    scores = np.zeros(len(far_F))
    for place, token in enumerate(far_F.tolist()):
        last = place == int(np.flatnonzero(far_F == token)[-1])
        # Fractions break ties by nearness and never outweigh a count.
        scores[place] = (counts[token] if last else 0) + place / (len(far_F) + 1)
    return _best(np.tile(scores, (len(question.targets), 1)), question.k)


Selector = Callable[[Scorer, Question], Choice]

SELECTORS: dict[str, Selector] = {
    "add_one": add_one,
    "add_one_screened": add_one_screened,
    "drop_one": drop_one,
    "greedy": greedy,
    "gradient": gradient,
    "attention": attention,
    "divergence": divergence,
    "nearest": nearest,
    "random": random,
    "most_frequent": most_frequent,
}


def _best(influence_TF: np.ndarray, k: int) -> Choice:
    """The k largest of each row; equal scores in order of place, so that results repeat."""
    order = np.argsort(-influence_TF, axis=1, kind="stable")[:, :k]
    return Choice(order, np.take_along_axis(influence_TF, order, axis=1))


# --- gradients ------------------------------------------------------------------------------------


def _in_batches(scorer: Scorer, question: Question) -> list[np.ndarray]:
    size = max(1, scorer.batch_tokens // len(question.block.tokens))
    return [question.targets[i : i + size] for i in range(0, len(question.targets), size)]


def _target_losses(scorer: Scorer, hidden_BLD: Tensor, block: Block, targets: np.ndarray) -> Tensor:
    """Row b's loss at its own target; rows are the same window, one for each target."""
    places = torch.from_numpy(targets).to(scorer.device) - block.num_targets
    rows = torch.arange(len(targets), device=scorer.device)
    wanted = torch.from_numpy(block.targets_W[targets].astype(np.int64)).to(scorer.device)
    logits_BV = scorer.model.unembed(hidden_BLD[rows, places]).float()
    return torch.nn.functional.cross_entropy(logits_BV, wanted, reduction="sum")


def _embedding_saliency(scorer: Scorer, block: Block, targets: np.ndarray) -> np.ndarray:
    model: Any = scorer.model
    tokens_BL, positions_BL = as_tensors([long_row(block)] * len(targets), scorer.device)
    scorer.token_forwards += 3 * tokens_BL.numel()  # a backward pass costs two forwards
    kept: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[0]

    hook = model.embedding.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            hidden_BLD = model.hidden(tokens_BL, positions_BL)
            loss = _target_losses(scorer, hidden_BLD, block, targets)
            (gradient_BLD,) = torch.autograd.grad(loss, kept)
    finally:
        hook.remove()
    saliency_BL = -(gradient_BLD * kept[0]).sum(-1)
    return saliency_BL[:, : block.windows.num_far].detach().float().cpu().numpy()


GATE = 0.1


def _gate_gradients(scorer: Scorer, question: Question) -> np.ndarray:
    return np.concatenate(
        [_gate_batch(scorer, question.block, part) for part in _in_batches(scorer, question)]
    )


def _gate_batch(scorer: Scorer, block: Block, targets: np.ndarray) -> np.ndarray:
    num_far, batch = block.windows.num_far, len(targets)
    row = long_row(block)
    tokens_BL, positions_BL = as_tensors([row] * batch, scorer.device)
    scorer.token_forwards += 3 * tokens_BL.numel()
    bias = causal_bias(len(row.places), scorer.device)
    if scorer.far_states == "isolated":
        bias[:, :, :num_far, :num_far] = torch.finfo(torch.float).min
        bias[:, :, range(num_far), range(num_far)] = 0.0
    with torch.enable_grad():
        gate_BF = torch.full(
            (batch, num_far), float(np.log(GATE)), device=scorer.device, requires_grad=True
        )
        length = len(row.places)
        column_BL = torch.nn.functional.pad(gate_BF, (0, length - num_far))
        # The window sees far tokens dimly.
        sees_L = (torch.arange(length, device=scorer.device) >= num_far).float()
        gated = bias + column_BL[:, None, None, :] * sees_L[None, None, :, None]
        hidden_BLD = scorer.model.hidden(tokens_BL, positions_BL, gated)
        loss = _target_losses(scorer, hidden_BLD, block, targets)
        (gradient_BF,) = torch.autograd.grad(loss, gate_BF)
    return (-gradient_BF).float().cpu().numpy()
