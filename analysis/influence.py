"""How much each far unit matters to a target, and which k matter most: Eq. (20) and its rivals.

Place in the flow: contexts of chosen targets → **ranked far units** → recovery.

Every selector has one signature, `(scorer, question) → Choice`, and pays for its own forwards, so
that their costs can be compared. Eq. (20) in our reading is `add_one` over single tokens: the
influence of a far unit is the fall in the target's loss when it alone is put before the short
window.

Dimension key: T chosen targets, F far places, U far units, K ranks, W targets of a block, L tokens
of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.scoring import Context, Scorer, as_tensors
from analysis.windows import NOTHING, Units
from olmo_sparsity.model.layers import causal_bias


@dataclass(frozen=True)
class Question:
    context: Context
    """Its far part holds the candidates."""

    units: Units
    targets: np.ndarray
    """Which targets of the block are asked about (indices into it)."""

    k: int
    generator: np.random.Generator
    """For the selectors that draw."""

    aim_WV: Tensor | None = None
    """log p of the block's targets with the document's own long window, for `divergence`: where the
    candidates are of another text, it still aims at that prediction."""


@dataclass(frozen=True)
class Choice:
    unit_TK: np.ndarray
    """The chosen units, the most influential first."""

    influence_TK: np.ndarray
    """The selector's own score of each."""


def influence_map(scorer: Scorer, context: Context, units: Units) -> np.ndarray:
    """I_UW in nats: L_short − L_set(unit) of every far unit on every target of the block.

    One forward of [far unit + short window + block] serves all W targets.
    """
    alone = [context.set_row(units.places(unit)) for unit in range(len(units))]
    (short_W,) = scorer.losses([context.set_row(NOTHING)])
    return short_W[None] - np.stack(scorer.losses(alone))


def add_one(scorer: Scorer, question: Question) -> Choice:
    """Eq. (20): the largest falls in loss when a far unit is added alone."""
    influence_UW = influence_map(scorer, question.context, question.units)
    return _best(influence_UW.T[question.targets], question.k)


def add_one_screened(scorer: Scorer, question: Question) -> Choice:
    """add_one on the max(16, 2k) candidates that a gradient ranks highest.

    One forward and backward of the short window with every far token barely there: its column of
    attention scores carries a log-gate of ln 0.1. The gradient of the loss with respect to the gate
    predicts what opening it would do. Far tokens shown alone see only themselves, those with their
    context all that is before them, at full strength.
    """
    context, units = question.context, question.units
    gate_TU = units.total(_gate_gradients(scorer, question))
    screened = _best(gate_TU, min(len(units), max(16, 2 * question.k)))
    short = scorer.losses([context.set_row(NOTHING, int(t)) for t in question.targets])
    alone = scorer.losses(
        [
            context.set_row(units.places(unit), int(target))
            for target, candidates in zip(question.targets, screened.unit_TK, strict=True)
            for unit in candidates
        ]
    )
    exact_TM = np.array(short).reshape(-1, 1) - np.array(alone).reshape(screened.unit_TK.shape)
    exact = _best(exact_TM, question.k)
    return Choice(np.take_along_axis(screened.unit_TK, exact.unit_TK, axis=1), exact.influence_TK)


def drop_one(scorer: Scorer, question: Question) -> Choice:
    """The largest rises in loss when a far unit is left out of the long window."""
    context, units = question.context, question.units
    every = np.arange(context.block.windows.num_far)
    left_out = [context.set_row(np.delete(every, units.places(unit))) for unit in range(len(units))]
    (long_W,) = scorer.losses([context.long_row()])
    influence_UW = np.stack(scorer.losses(left_out)) - long_W[None]
    return _best(influence_UW.T[question.targets], question.k)


def greedy(scorer: Scorer, question: Question) -> Choice:
    """add_one, then add_one again beside what is already chosen, k times."""
    context, units = question.context, question.units
    first = add_one(scorer, replace(question, k=1))
    chosen, influence = first.unit_TK.tolist(), first.influence_TK.tolist()
    for row, target in enumerate(question.targets.tolist()):
        (before,) = scorer.losses([context.set_row(units.places(*chosen[row]), target)])
        for _ in range(1, min(question.k, len(units))):
            rest = [unit for unit in range(len(units)) if unit not in chosen[row]]
            rows = [context.set_row(units.places(*chosen[row], unit), target) for unit in rest]
            after = np.array(scorer.losses(rows))[:, 0]
            best = int(after.argmin())
            chosen[row].append(rest[best])
            influence[row].append(float(before[0] - after[best]))
            before = after[best : best + 1]
    return Choice(np.array(chosen), np.array(influence))


def divergence(scorer: Scorer, question: Question) -> Choice:
    """Label-free: the largest falls in KL(p_long ‖ ·) when a far unit is added alone."""
    context, units, aim_WV = question.context, question.units, question.aim_WV
    assert aim_WV is not None
    rows = [context.set_row(NOTHING)]
    rows += [context.set_row(units.places(unit)) for unit in range(len(units))]
    short_W, *alone = scorer.divergences(rows, aim_WV)
    return _best((short_W[None] - np.stack(alone)).T[question.targets], question.k)


def gradient(scorer: Scorer, question: Question) -> Choice:
    """Gradient × input on the long window: the rise in loss, to first order, when embeddings are
    taken away."""
    saliency_TF = np.concatenate(
        [
            _embedding_saliency(scorer, question.context, targets)
            for targets in _in_batches(scorer, question)
        ]
    )
    return _best(question.units.total(saliency_TF), question.k)


def attention(scorer: Scorer, question: Question) -> Choice:
    """Mean attention, over the heads of the last layer, from the place that predicts the target."""
    found = []
    for target in question.targets.tolist():
        row = question.context.long_row(last=target + 1)
        tokens_BL, positions_BL = as_tensors([row], scorer.device)
        scorer.token_forwards += tokens_BL.numel()
        with torch.no_grad():
            weights_BL = scorer.model.last_attention(tokens_BL, positions_BL)
        found.append(weights_BL[0, : question.context.block.windows.num_far].float().cpu().numpy())
    return _best(question.units.total(np.stack(found)), question.k)


def nearest(scorer: Scorer, question: Question) -> Choice:
    """Control: the far units next to the short window."""
    scores_U = question.units.end.astype(float)
    return _best(np.tile(scores_U, (len(question.targets), 1)), question.k)


def random(scorer: Scorer, question: Question) -> Choice:
    """Control: any far units. What is drawn for a target does not depend on which others are asked
    about."""
    shape = (question.context.block.num_targets, len(question.units))
    return _best(question.generator.random(shape)[question.targets], question.k)


def most_frequent(scorer: Scorer, question: Question) -> Choice:
    """Control: the nearest occurrence of each of the most frequent types among the far tokens."""
    far_F = question.context.block.far_F
    counts = {token: int((far_F == token).sum()) for token in set(far_F.tolist())}
    scores_F = np.zeros(len(far_F))
    for place, token in enumerate(far_F.tolist()):
        last = place == int(np.flatnonzero(far_F == token)[-1])
        # Fractions break ties by nearness; all of them together never outweigh a count.
        scores_F[place] = (counts[token] if last else 0) + place / len(far_F) ** 2
    scores_TU = question.units.total(np.tile(scores_F, (len(question.targets), 1)))
    return _best(scores_TU, question.k)


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


AIMED = frozenset({"divergence"})
"""Selectors that aim at the prediction of the document's own long window."""


def _best(influence_TU: np.ndarray, k: int) -> Choice:
    """The k largest of each row; equal scores in order of place, so that results repeat."""
    order = np.argsort(-influence_TU, axis=1, kind="stable")[:, :k]
    return Choice(order, np.take_along_axis(influence_TU, order, axis=1))


# --- gradients ------------------------------------------------------------------------------------


def _in_batches(scorer: Scorer, question: Question) -> list[np.ndarray]:
    size = max(1, scorer.batch_tokens // len(question.context.block.tokens))
    return [question.targets[i : i + size] for i in range(0, len(question.targets), size)]


def _target_losses(
    scorer: Scorer, hidden_BLD: Tensor, context: Context, targets: np.ndarray
) -> Tensor:
    """Row b's loss at its own target; rows are the same window, one for each target."""
    block = context.block
    places = torch.from_numpy(targets).to(scorer.device) - block.num_targets
    rows = torch.arange(len(targets), device=scorer.device)
    wanted = torch.from_numpy(block.targets_W[targets].astype(np.int64)).to(scorer.device)
    logits_BV = scorer.model.unembed(hidden_BLD[rows, places]).float()
    return torch.nn.functional.cross_entropy(logits_BV, wanted, reduction="sum")


def _embedding_saliency(scorer: Scorer, context: Context, targets: np.ndarray) -> np.ndarray:
    model: Any = scorer.model
    tokens_BL, positions_BL = as_tensors([context.long_row()] * len(targets), scorer.device)
    scorer.token_forwards += 3 * tokens_BL.numel()  # a backward pass costs two forwards
    kept: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[0]

    hook = model.embedding.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            hidden_BLD = model.hidden(tokens_BL, positions_BL)
            loss = _target_losses(scorer, hidden_BLD, context, targets)
            (gradient_BLD,) = torch.autograd.grad(loss, kept)
    finally:
        hook.remove()
    saliency_BL = -(gradient_BLD * kept[0]).sum(-1)
    return saliency_BL[:, : context.block.windows.num_far].detach().float().cpu().numpy()


GATE = 0.1


def _gate_gradients(scorer: Scorer, question: Question) -> np.ndarray:
    return np.concatenate(
        [_gate_batch(scorer, question.context, part) for part in _in_batches(scorer, question)]
    )


def _gate_batch(scorer: Scorer, context: Context, targets: np.ndarray) -> np.ndarray:
    num_far, batch = context.block.windows.num_far, len(targets)
    row = context.long_row()
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
        loss = _target_losses(scorer, hidden_BLD, context, targets)
        (gradient_BF,) = torch.autograd.grad(loss, gate_BF)
    return (-gradient_BF).float().cpu().numpy()
