"""Try a model of transformers on eight tokens, and reject it if it would give wrong numbers here.

No config says how a family treats position IDs, so `try_model` runs it. It asks, in this order:

    is the family of a kind that is supported at all?        _check_kind
    how do logits follow from the last linear map?           _check_logits
    are the losses of a row its own?                         row_independence.py
    do windows by position IDs hide what its own hide?       _knows_windows
    is a gap in position IDs harmless, and can kept keys
    and values replace the tokens before it?                 trial_with_gap.py

A model that fails is rejected with the reason. For the others the answers are returned as a `Fit`.
`HuggingFaceLM.fit` calls `try_model` once for each state of a model.

Dimension key: B rows, L tokens of a row, D width, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from olmo_sparsity.base.errors import (
    NO_DOCSTRINGS,
    ConfigError,
    UserError,
    is_out_of_memory,
    one_line,
)
from olmo_sparsity.models.attention import AttentionWindow
from olmo_sparsity.models.huggingface.attention_names import REPLACEABLE
from olmo_sparsity.models.huggingface.logit_map import LogitMap, possible_logit_maps
from olmo_sparsity.models.huggingface.position_limits import windows_of
from olmo_sparsity.models.huggingface.row_independence import check_rows_are_independent
from olmo_sparsity.models.huggingface.trial_with_gap import TrialWithGap
from olmo_sparsity.models.huggingface.tried_model import (
    NUM_BEFORE_GAP,
    NUM_TOKENS,
    TriedModel,
    distance,
    eight_tokens,
    unfit,
)


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


@torch.no_grad()
def try_model(tried: TriedModel, original: nn.Module) -> Fit:
    """Return what a trial shows of a model. Raise ConfigError if the model would give wrong
    numbers.

    Args:
        tried: A `HuggingFaceLM` that computes no windows itself: its `windows` are empty.
        original: The model as it was passed, with its adapters, whose logits are compared.
    """
    _check_kind(tried, original)
    try:
        logits = _check_logits(tried, original)
        # Before the others, which such a model fails for reasons that mislead.
        _check_rows(tried, logits.logit_map)
        knows_windows = _knows_windows(tried, logits.rounding)
        # The rest is tried with the windows with which the model will be used.
        windows = windows_of(tried.model.config) if knows_windows else {}
        with _having_windows(tried, windows):
            trial = TrialWithGap(tried, logits.rounding)
            trial.check_gap()
            trial.check_kept_states()
            can_share_distant = trial.can_share_distant()
    except UserError:
        raise
    except Exception as error:  # unknown families may raise almost any
        reason = f"{reason_of(error)}; torch's default dtype is {torch.get_default_dtype()}"
        raise unfit(tried, f"eight tokens do not pass through it ({reason})") from None
    with _having_windows(tried, windows):
        batch_noise = _measure_batch_noise(tried, logits.logit_map)
    return Fit(logits.logit_map, can_share_distant, batch_noise, knows_windows)


@contextmanager
def _having_windows(
    tried: TriedModel, windows: dict[str, AttentionWindow | None]
) -> Iterator[None]:
    """Let the wrapper of a model compute these attention windows inside the block."""
    before = tried.windows
    tried.windows = windows
    try:
        yield
    finally:
        tried.windows = before


def reason_of(error: Exception) -> str:
    """Return an error of a model's own code in one line. Raise it, or one that explains it, if its
    cause is not the model, but a full memory or a Python without docstrings, which transformers
    needs."""
    if is_out_of_memory(error):
        raise error
    if sys.flags.optimize > 1:
        raise ConfigError(NO_DOCSTRINGS)
    return one_line(f"{type(error).__name__}: {error}")


# --- checks ---------------------------------------------------------------------------------------

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers that are supported. Others, such as recurrent ones, count tokens and cannot see a
gap."""

_USE_REPLACED_STATES = (
    "explain and measure take --distant-states replaced (load_model: whole_prompts=True)"
)
"""The remedy for a model that cannot be measured with position IDs, for messages."""


def _check_kind(tried: TriedModel, original: nn.Module) -> None:
    """Raise ConfigError if the config or the signature shows that a model is not supported."""
    model = tried.model
    text = model.config.get_text_config()
    if any(weight.dtype == torch.float64 for weight in model.parameters()):
        remedy = "call model.float(), or load_model(…, dtype='fp32')"
        raise unfit(tried, f"its weights are float64, and losses are computed in fp32; {remedy}")
    if model.config.is_encoder_decoder:
        raise unfit(tried, "it reads its text with an encoder")
    if model.get_output_embeddings() is None or tried.body is model:
        raise unfit(tried, "it has no last linear map from states to logits")
    parameters = inspect.signature(tried.body.forward).parameters
    if "position_ids" not in parameters or getattr(text, "alibi", False):
        raise unfit(tried, f"it uses no position_ids; {_USE_REPLACED_STATES}")
    other_kinds = set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if other_kinds:
        kinds = ", ".join(sorted(other_kinds))
        raise unfit(tried, f"its layers ({kinds}) count tokens; {_USE_REPLACED_STATES}")
    adapter = getattr(original, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise unfit(tried, f"its adapter ({type(adapter).__name__}) puts places before the text")
    kernel = getattr(text, "_attn_implementation", None)
    if kernel is not None and kernel not in REPLACEABLE:
        remedy = 'first model.set_attn_implementation("sdpa")'
        raise unfit(tried, f"its attention ({kernel}) takes gaps for other texts; {remedy}")


class _CheckedLogits(NamedTuple):
    """What the logits of eight tokens have shown."""

    logit_map: LogitMap
    """How logits follow from the last linear map."""

    rounding: float
    """The relative difference that rounding may cause in the model's dtype."""


def _check_logits(tried: TriedModel, original: nn.Module) -> _CheckedLogits:
    """Raise ConfigError unless logits follow from the last linear map in one of the known ways."""
    tokens_BL, counted_BL = eight_tokens(tried)
    hidden_BLD = tried.hidden(tokens_BL, counted_BL)
    raw = tried.raw_logits(hidden_BLD)
    logits = original(
        input_ids=tokens_BL,
        attention_mask=torch.ones_like(tokens_BL),
        position_ids=counted_BL,
        use_cache=False,
    ).logits.to(tried.device)
    if not bool(hidden_BLD.isfinite().all()) or not bool(logits.isfinite().all()):
        raise unfit(tried, f"eight tokens give no numbers{_not_finite(original)}")

    # Rounding adds up over layers, hence many times the precision of one number.
    rounding = min(0.1, 1024 * torch.finfo(logits.dtype).eps)
    logit_map = min(
        possible_logit_maps(tried.model.config),
        key=lambda candidate: distance(candidate(raw), logits),
    )
    if distance(logit_map(raw), logits) > rounding * distance(logits):
        raise unfit(tried, "its logits do not follow from the last linear map and its config")
    return _CheckedLogits(logit_map, rounding)


def _not_finite(model: nn.Module) -> str:
    """Return the end of a message that says why a model may give NaN or infinity, and what to
    do."""
    for name, weight in model.named_parameters():
        if not weight.is_meta and not bool(weight.isfinite().all()):
            return f": its weight {name} holds NaN or infinity; take other weights"
    return "; its weights are finite, so try dtype=fp32"


def _knows_windows(tried: TriedModel, rounding: float) -> bool:
    """Return whether windows that are computed here give the same hidden states as the model's own
    windows. Both are set to four tokens, so that they hide some of the eight."""
    if not windows_of(tried.model.config):
        return False
    # The model with windows of four tokens: a shallow copy with another config, as other threads
    # may use the model with its own.
    narrow = copy(tried.body)
    # The config is copied deeply, as inner configurations have the windows.
    config: Any = deepcopy(narrow.config)  # no class of transformers: a user's code may define it
    narrow.config = config
    text = config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(text, name, None):
            setattr(text, name, NUM_BEFORE_GAP)

    tokens_BL, counted_BL = eight_tokens(tried)
    try:
        output = type(narrow).forward(
            narrow,
            input_ids=tokens_BL,
            position_ids=counted_BL,
            attention_mask=torch.ones_like(tokens_BL),
            use_cache=False,
        )
        without_windows = tried.hidden(tokens_BL, counted_BL)
        with _having_windows(tried, windows_of(narrow.config)):
            ours = tried.hidden(tokens_BL, counted_BL)
    except Exception:  # of the model's own code
        return False

    # Windows that are computed wrongly differ from theirs about as much as none do.
    theirs = output.last_hidden_state.to(ours.device)
    error = distance(ours, theirs)
    effect = distance(without_windows, theirs)
    return error <= min(rounding * distance(theirs), effect / 4)


def _check_rows(tried: TriedModel, logit_map: LogitMap) -> None:
    """Raise ConfigError if the losses of a row depend on the texts in other rows of its batch."""

    def losses(tokens_BL: Tensor) -> Tensor:
        positions_BL = torch.arange(tokens_BL.shape[1], device=tried.device).expand_as(tokens_BL)
        hidden_BLD = tried.hidden(tokens_BL, positions_BL)
        log_p_BLV = logit_map(tried.raw_logits(hidden_BLD)).float().log_softmax(-1)
        targets_BL = tokens_BL.roll(-1, 1)  # after the last token any will do
        return -log_p_BLV.gather(-1, targets_BL[..., None].to(log_p_BLV.device))[..., 0]

    vocab_size = tried.embedding.weight.shape[0]
    check_rows_are_independent(tried.model, losses, vocab_size, tried.device)


def _measure_batch_noise(tried: TriedModel, logit_map: LogitMap) -> float:
    """Return by how much a loss changes with the other rows of its batch, in nats: the largest
    change of the first row's seven losses if three more rows are computed with it. Some quantized
    models round all rows of a batch by their largest number."""
    # Multiples of 7, so that rows have different tokens in a small vocabulary, too.
    tokens_BL = torch.arange(4 * NUM_TOKENS, device=tried.device).view(4, NUM_TOKENS) * 7
    tokens_BL %= tried.embedding.weight.shape[0]
    positions_BL = torch.arange(NUM_TOKENS, device=tried.device)[None]

    def losses(rows_BL: Tensor) -> Tensor:
        hidden_BLD = tried.hidden(rows_BL, positions_BL.expand_as(rows_BL))
        log_p_LV = logit_map(tried.raw_logits(hidden_BLD[:1])[0].float()).log_softmax(-1)
        return log_p_LV[:-1].gather(1, tokens_BL[0, 1:, None].to(log_p_LV.device))

    return float((losses(tokens_BL) - losses(tokens_BL[:1])).abs().max())
