"""Rank distant units by further rules: `--selectors study/selectors.py:NAME`, from a clone.

NAME: drop_one, divergence, or lrp (AttnLRP, Achtibat et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.analysis.inputs.windows import NOTHING
from olmo_sparsity.analysis.models.use import in_this_thread
from olmo_sparsity.analysis.scoring.cost import CountingModel
from olmo_sparsity.analysis.scoring.scorer import Row, Scorer
from olmo_sparsity.analysis.selectors.influence import (
    Choice,
    Question,
    best_of,
)
from olmo_sparsity.analysis.selectors.saliency import embedding_saliency
from olmo_sparsity.errors import ConfigError

PLACES_AT_ONCE = 2**22
"""How many far places the rows of `drop_one` that are evaluated together see at most."""


def drop_one(scorer: Scorer, question: Question) -> Choice:
    """The largest rises in loss when a far unit is left out of the long window."""
    context, units = question.context, question.units
    far_F = np.arange(context.block.num_far)
    (long_W,) = scorer.losses([context.long_row()])
    influence_UW = np.empty((len(units), len(long_W)))
    at_once = max(1, PLACES_AT_ONCE // len(far_F))
    for first in range(0, len(units), at_once):
        part = range(first, min(first + at_once, len(units)))
        rows = [context.set_row(np.delete(far_F, units.places(unit))) for unit in part]
        influence_UW[part] = np.stack(scorer.losses(rows)) - long_W[None]
    return best_of(question.total(influence_UW), question.k)


def divergence(scorer: Scorer, question: Question) -> Choice:
    """The largest falls in KL(p_long ‖ ·) when a far unit is added alone; needs no label.

    p_long is the prediction with the whole distant text that is ranked, also for an unrelated one.
    """
    context, units = question.context, question.units
    (hidden_WD,) = scorer.hidden([context.long_row()])
    aim_WV = scorer.log_probabilities(hidden_WD)

    def kl(row: Row) -> np.ndarray:
        (hidden_WD,) = scorer.hidden([row])
        log_q_WV = scorer.log_probabilities(hidden_WD)
        return (aim_WV.exp() * (aim_WV - log_q_WV)).sum(-1).cpu().numpy()

    alone = [kl(context.set_row(units.places(unit))) for unit in range(len(units))]
    return best_of(question.total(kl(context.set_row(NOTHING)) - np.stack(alone)), question.k)


# --- AttnLRP --------------------------------------------------------------------------------------
#
# Each rule replaces the gradient of one operation and leaves its value as it is, so that input ×
# gradient is the relevance of the input:
#
# - RMSNorm, LayerNorm: the scale is a constant. Subtracting the mean is linear, and stays.
# - Activations: f(x) is x times the constant f(x) / x (identity rule).
# - Products (gate · up, query · key, weights · values): each factor gets half (uniform rule). For
#   attention this is a quarter for queries and keys, which pass two products, and half for values.
#   As all between projection and product is linear, the projections' outputs take these factors,
#   and any kernel may compute the attention.
# - Softmax keeps its gradient, as does all that is linear. Its linear approximation has a constant,
#   which, like a bias, takes relevance that no input gets.


def negative_logit(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    return -logits_NV.gather(1, labels_N[:, None]).sum()


def lrp(scorer: Scorer, question: Question) -> Choice:
    """Relevance for the target's logit on the long window, by the rules of AttnLRP."""
    with attn_lrp(scorer.model):
        relevance_TF = embedding_saliency(scorer, question.context, question.spans, negative_logit)
    return best_of(question.units.total(relevance_TF), question.k)


Rule = Callable[[nn.Module, Any, Tensor], Tensor]
"""A forward hook: (module, its inputs, its output) → the output with another gradient."""


@contextmanager
def attn_lrp(model: Any) -> Iterator[None]:
    """Inside, gradients of the model's outputs follow the rules."""
    rules = list(_rules(model))
    with ExitStack() as stack:
        for module, rule in rules:
            stack.callback(module.register_forward_hook(in_this_thread(rule)).remove)
        yield


def _rules(model: Any) -> Iterator[tuple[nn.Module, Rule]]:
    if isinstance(model, CountingModel):  # of a dry run
        return iter(())
    if hasattr(model, "blocks"):  # a PositionedOLMo, which needs more packages than transformers
        return _rules_of_olmo(model)
    raise ConfigError(
        f"selector=lrp has rules for runs of this package of architecture olmo alone, none for "
        f"{type(model).__name__}"
    )


def _rules_of_olmo(model: Any) -> Iterator[tuple[nn.Module, Rule]]:
    rules: dict[str, Rule] = dict.fromkeys(("RMSNorm", "GELU", "ReLU"), _identity)
    rules |= {"LayerNorm": _norm, "SwiGLU": _swiglu}
    for module in model.modules():
        if rule := rules.get(type(module).__name__):
            yield module, rule
    for block in model.blocks:
        q, k, v = (torch.ones(width, dtype=torch.float) for width in block.fused_dims)
        factors = torch.cat((q / 4, k / 4, v / 2))
        yield block.att_proj, _factor(factors.to(block.att_proj.weight))


# --- the rules ------------------------------------------------------------------------------------


class _AsLinear(torch.autograd.Function):
    """The output, bit by bit, with the gradient of `slope` · x."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.mark_dirty(output)  # not a view, which the model could not change in place
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (slope,) = ctx.saved_tensors
        return None, gradient * slope, None


def _as_linear(output: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    # Detached here: else what its own gradient needs would be kept too.
    linear: Tensor = _AsLinear.apply(output.detach(), x, slope.detach())
    return linear


def _identity(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """The rule for activations and RMSNorm, which multiply each coordinate by a number."""
    x, bias = inputs[0], getattr(module, "bias", None)
    scaled = output if bias is None else output - bias
    # An x of 0 has no relevance, whatever its slope.
    return _as_linear(output, x, torch.where(x == 0, 0, scaled / x))


def _norm(module: Any, inputs: Any, output: Tensor) -> Tensor:
    centred = inputs[0] - inputs[0].mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + module.eps).rsqrt()
    slope = scale if module.weight is None else scale * module.weight
    return _as_linear(output, centred, slope)


def _swiglu(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    up, gate = inputs[0].chunk(2, dim=-1)
    activated = _as_linear(F.silu(gate), gate, gate.sigmoid())
    return _as_linear(output, activated * up, torch.tensor(1 / 2, dtype=torch.float))


def _factor(factor: Tensor) -> Rule:
    return lambda module, inputs, output: _as_linear(output, output, factor)
