"""Read from a transformers config how many positions a model supports, and its attention windows.

`position_limit` returns the smallest of several limits: of position embeddings, of RoPE that
changes with the length, of scaled attention, and of attention windows in which the model counts
tokens. `windows_of` returns the windows that are computed here by position IDs, and limit nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.attention import AttentionWindow

SHORTER = "lower long (--long), or pass long=all, which omits the end of longer documents"
"""The remedy for a text that is longer than a model supports, for messages."""


@dataclass(frozen=True)
class PositionLimit:
    """The number of position IDs that a model supports, and why no more."""

    num_positions: int
    """One more than the largest supported position ID."""

    cause: str
    """The reason, for messages: most often the name of a field of the config."""

    wrong_beyond: bool = False
    """Whether the model computes wrong numbers beyond the limit. Otherwise it was not trained
    there, but can be used."""

    def check(self, num_positions: int, name: str, remedy: str = SHORTER) -> None:
        """Raise ConfigError if a text needs more positions than the model supports.

        Args:
            name: The name of the model, for the message.
            remedy: What to do then, for the message.
        """
        if num_positions > self.num_positions:
            kind = "right" if self.wrong_beyond else "prepared"
            raise ConfigError(
                f"{num_positions} positions are more than '{name}' is {kind} for: "
                f"{self.num_positions} ({self.cause}); {remedy}"
            )


def windows_of(config: Any) -> dict[str, AttentionWindow | None]:
    """Return the window of each kind of layer that a config names; None for a kind that sees all
    earlier tokens. If all layers are alike, their kind is "". The result is empty if no layer has a
    window.

        Mistral     {"": AttentionWindow(4096)}
        Gemma 3     {"sliding_attention": AttentionWindow(512), "full_attention": None}
    """
    text = config.get_text_config()
    sliding_size = getattr(text, "sliding_window", None)
    if not getattr(text, "use_sliding_window", True):
        sliding_size = None
    chunk_size = getattr(text, "attention_chunk_size", None)
    sliding = AttentionWindow(sliding_size) if sliding_size else None
    chunked = AttentionWindow(chunk_size, is_chunked=True) if chunk_size else None
    window_of_kind = {"": sliding, "sliding_attention": sliding, "chunked_attention": chunked}
    kinds = getattr(text, "layer_types", None) or ("",)
    windows = {kind: window_of_kind.get(kind) for kind in kinds}
    return windows if any(windows.values()) else {}


_WINDOW_SIZES = ("sliding_window", "attention_chunk_size", "window_size", "keep_window_size")
"""Fields of configs with the size of a window. Windows of the first two are computed here."""

_WINDOWED_LAYERS = {"sliding_attention", "chunked_attention", "local"}
"""Kinds of layers that have a window."""


def position_limit(
    config: Any, knows_windows: bool = False, only_wrong_beyond: bool = False
) -> PositionLimit | None:
    """Return the smallest limit that a config states; None if it states none.

    Args:
        knows_windows: Whether the model's attention windows are computed here, by position IDs.
            They limit nothing then.
        only_wrong_beyond: Leave out limits beyond which a model was only not trained.
    """
    text = config.get_text_config()
    limits = _position_limits(text) + _attention_limits(text)
    if not knows_windows:
        limits += _window_limits(text)
    if only_wrong_beyond:
        limits = [limit for limit in limits if limit.wrong_beyond]
    # Of equal limits, one beyond which numbers are wrong comes first.
    return min(
        limits, key=lambda limit: (limit.num_positions, not limit.wrong_beyond), default=None
    )


def _position_limits(text: Any) -> list[PositionLimit]:
    """Return the limits of a table of position embeddings, or of RoPE. LongRoPE and dynamic RoPE
    take other angles for rows beyond some length. This length is a limit, as rows of one text could
    not be compared beyond it."""
    trained = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope] if "rope_type" in rope else list(rope.values())  # one for each type of layer
    # Without RoPE, position IDs are indices into a table of this size.
    limits = _if_stated(trained, "max_position_embeddings", wrong_beyond=not ropes)
    for rope in ropes:
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            if not original:
                original = getattr(text, "original_max_position_embeddings", trained)
            cause = "original_max_position_embeddings of its LongRoPE"
            limits += _if_stated(original, cause, wrong_beyond=True)
        if rope.get("rope_type") == "dynamic":
            cause = "max_position_embeddings of its dynamic RoPE"
            limits += _if_stated(trained, cause, wrong_beyond=True)
    return limits


def _attention_limits(text: Any) -> list[PositionLimit]:
    """Return the limit of Llama 4, which scales attention from some token on. It counts tokens,
    which is wrong for a row whose position IDs have a gap."""
    floor = getattr(text, "floor_scale", None)
    if not floor or not getattr(text, "attn_temperature_tuning", False):
        return []
    return _if_stated(int(floor) - 1, "floor_scale of its attention", wrong_beyond=True)


def _window_limits(text: Any) -> list[PositionLimit]:
    """Return the sizes of attention windows in which the model counts tokens. In longer rows a gap
    in position IDs would hide other tokens than it should."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None)
    has_windowed_layers = not kinds or bool(_WINDOWED_LAYERS & set(kinds))
    if not has_windowed_layers or not getattr(text, "use_sliding_window", True):
        return []
    limits: list[PositionLimit] = []
    for name in _WINDOW_SIZES:
        size = getattr(text, name, None)
        limits += _if_stated(size, name.replace("_", " "), wrong_beyond=True)
    return limits


def _if_stated(num_positions: int | None, cause: str, *, wrong_beyond: bool) -> list[PositionLimit]:
    """Return a limit, or none if the config does not state the number, or states 0."""
    if not num_positions:
        return []
    return [PositionLimit(num_positions, cause, wrong_beyond)]
