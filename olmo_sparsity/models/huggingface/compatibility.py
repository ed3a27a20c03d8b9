"""Try a model of transformers on eight tokens, and reject it if it would give wrong numbers here.

No config says how a family treats position IDs, so `try_model` runs it, on rows such as

    tokens         0 1 2 3  4  5  6  7
    counted IDs    0 1 2 3  4  5  6  7
    gapped IDs     0 1 2 3  8  9 10 11       a gap in the middle

and compares, in this order:

- our logits with those of the model itself: by which `LogitMap` do they follow from the last linear
  map?
- windows that are computed here by position IDs with the model's own: do both hide the same?
- hidden states of counted and gapped IDs: do position IDs reach the attention, and does a gap hide
  nothing?
- hidden states of the last four tokens, after kept keys and values of the first four, with those of
  the whole row: can kept states replace earlier tokens?

A model that fails is rejected with the reason. For the others the answers are returned as a `Fit`.
`HuggingFaceLM.fit` calls it once for each state of a model.

Dimension key: B rows, L tokens of a row, D width, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from olmo_sparsity.base.errors import (
    NO_DOCSTRINGS,
    ConfigError,
    UserError,
    is_out_of_memory,
    one_line,
)
from olmo_sparsity.models.attention import AttentionWindow, causal_bias
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.huggingface.attention_names import REPLACEABLE
from olmo_sparsity.models.huggingface.logit_map import LogitMap, possible_logit_maps
from olmo_sparsity.models.huggingface.position_limits import windows_of
from olmo_sparsity.models.language_model import LanguageModel


class Wrapped(LanguageModel, Protocol):
    """What a trial needs of a `HuggingFaceLM`, which cannot be imported here: it imports this."""

    model: Any
    """The model of transformers."""

    windows: dict[str, AttentionWindow | None]
    """The attention window of each kind of layer, computed here; empty if the model computes them
    itself."""

    @property
    def body(self) -> nn.Module:
        """Return the model without its last linear map."""

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Return the output of the last linear map."""

    def hidden_sharing(
        self, tokens_BL: Tensor, positions_BL: Tensor, distant: DistantStates
    ) -> Tensor:
        """Return what `hidden` returns for rows that share distant states."""


_USE_REPLACED_STATES = (
    "explain and measure take --distant-states replaced (load_model: whole_prompts=True)"
)
"""The remedy for a model that cannot be measured with position IDs, for messages."""


@dataclass(frozen=True)
class Fit:
    """What the trial has shown of a model that is supported. The defaults hold for any model."""

    logit_map: LogitMap = LogitMap()

    can_share_distant: bool = False
    """Whether rows that share kept states (`hidden_sharing`) get the same numbers as rows that have
    copies of them."""

    batch_noise: float = 0.0
    """By how much a loss changes with the other rows of its batch, in nats."""

    knows_windows: bool = False
    """Whether the attention windows of the model are those that `windows_of` reads from its config.
    Then they are computed here, by position IDs, where the model itself counts tokens."""


# --- the trial ------------------------------------------------------------------------------------

NUM_TOKENS = 8
"""The number of tokens on which a model is tried: enough for a gap and for a window inside it."""

NUM_BEFORE_GAP = 4
"""The number of tokens before the gap in the position IDs. Windows that are tried have this size,
too, so that they hide some of the eight tokens."""

GAP = 4
"""The number of position IDs that the gap leaves out."""

BEFORE_GAP = slice(NUM_BEFORE_GAP)
AFTER_GAP = slice(NUM_BEFORE_GAP, None)

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers that are supported. Others, such as recurrent ones, count tokens and cannot see a
gap."""


@torch.no_grad()
def try_model(wrapped: Wrapped, original: nn.Module) -> Fit:
    """Return what a trial shows of a model. Raise ConfigError if the model would give wrong numbers
    (see the module).

    Args:
        wrapped: A `HuggingFaceLM`. Its `windows` are changed while it is tried.
        original: The model as it was passed, with its adapters, whose logits are compared.
    """
    _check_kind(wrapped, original)
    try:
        logits = _check_logits(wrapped, original)
        knows_windows = _knows_windows(wrapped, logits.rounding)
        # The next check runs with the windows with which the model will be used.
        wrapped.windows = windows_of(wrapped.model.config) if knows_windows else {}
        can_share_distant = _check_positions(wrapped, logits.rounding)
    except UserError:
        raise
    except Exception as error:  # unknown families may raise almost any
        reason = f"{reason_of(error)}; torch's default dtype is {torch.get_default_dtype()}"
        raise _unfit(wrapped, f"eight tokens do not pass through it ({reason})") from None
    return Fit(
        logits.logit_map,
        can_share_distant,
        _measure_batch_noise(wrapped, logits.logit_map),
        knows_windows,
    )


def reason_of(error: Exception) -> str:
    """Return an error of a model's own code in one line. Raise it, or one that explains it, if its
    cause is not the model, but a full memory or a Python without docstrings, which transformers
    needs."""
    if is_out_of_memory(error):
        raise error
    if sys.flags.optimize > 1:
        raise ConfigError(NO_DOCSTRINGS)
    return one_line(f"{type(error).__name__}: {error}")


def _unfit(wrapped: Wrapped, problem: str) -> ConfigError:
    """Return the error with which a model is rejected. `problem`: why, and what to do."""
    family = f"{type(wrapped.model).__name__} (model_type {wrapped.model.config.model_type})"
    return ConfigError(f"{family} is not supported: {problem}")


def _check_kind(wrapped: Wrapped, original: nn.Module) -> None:
    """Raise ConfigError if the config or the signature shows that a model is not supported."""
    model = wrapped.model
    text = model.config.get_text_config()
    if any(weight.dtype == torch.float64 for weight in model.parameters()):
        remedy = "call model.float(), or load_model(…, dtype='fp32')"
        raise _unfit(wrapped, f"its weights are float64, and losses are computed in fp32; {remedy}")
    if model.config.is_encoder_decoder:
        raise _unfit(wrapped, "it reads its text with an encoder")
    if model.get_output_embeddings() is None or wrapped.body is model:
        raise _unfit(wrapped, "it has no last linear map from states to logits")
    parameters = inspect.signature(wrapped.body.forward).parameters
    if "position_ids" not in parameters or getattr(text, "alibi", False):
        raise _unfit(wrapped, f"it uses no position_ids; {_USE_REPLACED_STATES}")
    other_kinds = set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if other_kinds:
        kinds = ", ".join(sorted(other_kinds))
        raise _unfit(wrapped, f"its layers ({kinds}) count tokens; {_USE_REPLACED_STATES}")
    adapter = getattr(original, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise _unfit(wrapped, f"its adapter ({type(adapter).__name__}) puts places before the text")
    kernel = getattr(text, "_attn_implementation", None)
    if kernel is not None and kernel not in REPLACEABLE:
        remedy = 'first model.set_attn_implementation("sdpa")'
        raise _unfit(wrapped, f"its attention ({kernel}) takes gaps for other texts; {remedy}")


class _CheckedLogits(NamedTuple):
    """What the logits of eight tokens have shown."""

    logit_map: LogitMap
    """How logits follow from the last linear map."""

    rounding: float
    """The relative difference that rounding may cause in the model's dtype."""


def _check_logits(wrapped: Wrapped, original: nn.Module) -> _CheckedLogits:
    """Raise ConfigError unless logits follow from the last linear map in one of the known ways."""
    tokens_BL, counted_BL = _eight_tokens(wrapped)
    hidden_BLD = wrapped.hidden(tokens_BL, counted_BL)
    raw = wrapped.raw_logits(hidden_BLD)
    logits = original(
        input_ids=tokens_BL,
        attention_mask=torch.ones_like(tokens_BL),
        position_ids=counted_BL,
        use_cache=False,
    ).logits.to(wrapped.device)
    if not bool(hidden_BLD.isfinite().all()) or not bool(logits.isfinite().all()):
        raise _unfit(wrapped, f"eight tokens give no numbers{_not_finite(original)}")

    # Rounding adds up over layers, hence many times the precision of one number.
    rounding = min(0.1, 1024 * torch.finfo(logits.dtype).eps)
    logit_map = min(
        possible_logit_maps(wrapped.model.config),
        key=lambda candidate: _distance(candidate(raw), logits),
    )
    if _distance(logit_map(raw), logits) > rounding * _distance(logits):
        raise _unfit(wrapped, "its logits do not follow from the last linear map and its config")
    return _CheckedLogits(logit_map, rounding)


@dataclass(frozen=True)
class _Tolerance:
    """How much two hidden states may differ that should be equal, as root mean squares."""

    rounding: float
    """The relative difference that rounding in their dtype may cause."""

    noise: float
    """The absolute difference that a tiny change of the input causes. Kernels round differently,
    and layers that round to 8 bits sometimes amplify this."""

    def are_alike(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two hidden states are equal up to rounding and noise."""
        return _distance(a, b) <= self.rounding * _distance(b) + self.noise

    def is_small(self, error: float, effect: float) -> bool:
        """Return whether an error is much smaller than the effect that a check looks for, such as
        that of hiding tokens: a quarter of it at most."""
        return error <= max(self.noise, effect / 4)


def _check_positions(wrapped: Wrapped, rounding: float) -> bool:
    """Raise ConfigError if a gap in position IDs, or kept states before it, give wrong hidden
    states. Return whether rows can share kept states (`Fit.can_share_distant`)."""
    tokens_BL, counted_BL = _eight_tokens(wrapped)
    gapped_BL = counted_BL + GAP * (counted_BL >= NUM_BEFORE_GAP)  # 0 … 3 and 8 … 11
    causal = causal_bias(NUM_TOKENS, wrapped.device)

    # The right result, as an explicit causal bias hides nothing across the gap.
    expected = wrapped.hidden(tokens_BL, gapped_BL, causal).float()

    # How much a tiny change of the input changes the result: a ten-thousandth of the embeddings, or
    # what their dtype resolves, with every second coordinate turned round.
    nudge_BLD = wrapped.embedding(tokens_BL)
    nudge_BLD[..., ::2] *= -1
    nudge_BLD *= max(1e-4, torch.finfo(nudge_BLD.dtype).eps)
    nudged = wrapped.hidden(tokens_BL, gapped_BL, causal, added_BLD=nudge_BLD).float()
    # Twice, as one nudge is only a sample of what rounding may do.
    tolerance = _Tolerance(rounding, noise=2 * _distance(nudged, expected))

    _check_gap(wrapped, tokens_BL, counted_BL, gapped_BL, expected, tolerance)
    return _check_kept_states(wrapped, tokens_BL, gapped_BL, expected, tolerance)


def _check_gap(
    wrapped: Wrapped,
    tokens_BL: Tensor,
    counted_BL: Tensor,
    gapped_BL: Tensor,
    expected: Tensor,
    tolerance: _Tolerance,
) -> None:
    """Raise ConfigError unless position IDs reach the attention, and a gap after four of the eight
    tokens hides nothing.

    Args:
        counted_BL, gapped_BL: Position IDs without the gap and with it.
        expected: Hidden states with the gap and an explicit causal bias, which hides nothing.
    """

    def hidden(positions_BL: Tensor, bias: Tensor | None = None) -> Tensor:
        return wrapped.hidden(tokens_BL, positions_BL, bias).float()

    causal = causal_bias(NUM_TOKENS, wrapped.device)
    # How transformers interprets a gap unless it is told otherwise: as the start of another text,
    # which does not see the first four tokens.
    packed = causal.clone()
    hiding_bias = causal[..., 0, 1]  # the first token does not see the second
    packed[..., AFTER_GAP, BEFORE_GAP] = hiding_bias

    counted = hidden(counted_BL)
    counted_again = hidden(counted_BL)  # by what a forward pass that is repeated differs
    gapped = hidden(gapped_BL)
    cut_at_gap = hidden(gapped_BL, packed)

    effect_of_gap = _distance(gapped[:, AFTER_GAP], counted[:, AFTER_GAP])
    if effect_of_gap <= _distance(counted_again, counted):
        raise _unfit(wrapped, "position IDs do not reach its attention")

    error = _distance(gapped[:, AFTER_GAP], expected[:, AFTER_GAP])
    effect_of_cut = _distance(cut_at_gap[:, AFTER_GAP], expected[:, AFTER_GAP])
    if not (tolerance.are_alike(gapped, expected) and tolerance.is_small(error, effect_of_cut)):
        raise _unfit(wrapped, "its attention is not causal, or a gap in position IDs changes it")
    if not tolerance.are_alike(gapped[:, BEFORE_GAP], counted[:, BEFORE_GAP]):
        raise _unfit(wrapped, "a gap in its position IDs changes the places before it")


def _check_kept_states(
    wrapped: Wrapped,
    tokens_BL: Tensor,
    gapped_BL: Tensor,
    expected: Tensor,
    tolerance: _Tolerance,
) -> bool:
    """Raise ConfigError unless the last four tokens have the hidden states `expected` when they
    attend to kept states of the first four. Return whether they have them, too, when rows share the
    kept states."""
    earlier = wrapped.distant_states(tokens_BL[:, BEFORE_GAP], gapped_BL[:, BEFORE_GAP])
    later = (tokens_BL[:, AFTER_GAP], gapped_BL[:, AFTER_GAP])
    with_copies = wrapped.hidden(*later, distant=earlier).float()
    if not tolerance.are_alike(with_copies, expected[:, AFTER_GAP]):
        raise _unfit(wrapped, "keys and values that it keeps of earlier places do not replace them")

    try:
        shared = wrapped.hidden_sharing(*later, earlier).float()
    except Exception:  # of the model's own code, which may use its attention in any way
        return False
    without_earlier = wrapped.hidden(*later).float()
    error = _distance(shared, with_copies)
    effect = _distance(without_earlier, with_copies)
    return tolerance.are_alike(shared, with_copies) and tolerance.is_small(error, effect)


def _knows_windows(wrapped: Wrapped, rounding: float) -> bool:
    """Return whether windows that are computed here give the same hidden states as the model's own
    windows. Both are set to four tokens, so that they hide some of the eight."""
    if not windows_of(wrapped.model.config):
        return False
    # A shallow copy with another config: other threads may use the model with its own.
    narrow = copy(wrapped.body)
    # A deep one of the config, whose inner configurations have the windows.
    config: Any = deepcopy(narrow.config)  # no class of transformers: a user's code may define it
    narrow.config = config
    text = config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(text, name, None):
            setattr(text, name, NUM_BEFORE_GAP)

    tokens_BL, counted_BL = _eight_tokens(wrapped)
    try:
        output = type(narrow).forward(
            narrow,
            input_ids=tokens_BL,
            position_ids=counted_BL,
            attention_mask=torch.ones_like(tokens_BL),
            use_cache=False,
        )
        without_windows = wrapped.hidden(tokens_BL, counted_BL)
        wrapped.windows = windows_of(narrow.config)
        ours = wrapped.hidden(tokens_BL, counted_BL)
    except Exception:  # of the model's own code
        return False
    finally:
        wrapped.windows = {}

    # Windows that are computed wrongly differ from theirs about as much as none do.
    theirs = output.last_hidden_state.to(ours.device)
    error = _distance(ours, theirs)
    effect = _distance(without_windows, theirs)
    return error <= min(rounding * _distance(theirs), effect / 4)


class _EightTokens(NamedTuple):
    """The row on which a model is tried."""

    tokens_BL: Tensor
    counted_BL: Tensor
    """Their position IDs without a gap: 0 … 7."""


def _eight_tokens(wrapped: Wrapped) -> _EightTokens:
    """Return the row on which a model is tried, on the model's device."""
    counted_BL = torch.arange(NUM_TOKENS, device=wrapped.device)[None]
    # Token IDs count up, too, unless the vocabulary is smaller than eight.
    return _EightTokens(counted_BL % wrapped.embedding.weight.shape[0], counted_BL)


def _not_finite(model: nn.Module) -> str:
    """Return the end of a message that says why a model may give NaN or infinity, and what to
    do."""
    for name, weight in model.named_parameters():
        if not weight.is_meta and not bool(weight.isfinite().all()):
            return f": its weight {name} holds NaN or infinity; take other weights"
    return "; its weights are finite, so try dtype=fp32"


def _measure_batch_noise(wrapped: Wrapped, logit_map: LogitMap) -> float:
    """Return by how much a loss changes with the other rows of its batch, in nats: the largest
    change of the first row's seven losses if three more rows are computed with it. Some quantized
    models round all rows of a batch by their largest number."""
    # Multiples of 7, so that rows have different tokens in a small vocabulary, too.
    tokens_BL = torch.arange(4 * NUM_TOKENS, device=wrapped.device).view(4, NUM_TOKENS) * 7
    tokens_BL %= wrapped.embedding.weight.shape[0]
    positions_BL = torch.arange(NUM_TOKENS, device=wrapped.device)[None]

    def losses(rows_BL: Tensor) -> Tensor:
        hidden_BLD = wrapped.hidden(rows_BL, positions_BL.expand_as(rows_BL))
        log_p_LV = logit_map(wrapped.raw_logits(hidden_BLD[:1])[0].float()).log_softmax(-1)
        return log_p_LV[:-1].gather(1, tokens_BL[0, 1:, None].to(log_p_LV.device))

    return float((losses(tokens_BL) - losses(tokens_BL[:1])).abs().max())


def _distance(a: Tensor, b: Tensor | float = 0.0) -> float:
    """Return the root mean square of a − b. Unlike a maximum, it changes little if a mixture of
    experts routes one token differently."""
    return float((a.float() - b).square().mean().sqrt())
