"""Compute the angles of rotary position embeddings (RoPE), and how they are scaled so that a model
reaches beyond its trained length.

RoPE (Su et al. 2021) rotates pair i of the R pairs of coordinates of each query and key by the
angle

    angle_i = position · frequency_i,   frequency_i = theta ** (−i / R),   i = 0 … R − 1,

so that the product of a query and a key depends on the difference of their position IDs. PoSE
changes only the position IDs (data/positions.py); this module changes only the frequencies:

- `linear` divides all of them by a factor (position interpolation, Chen et al. 2023);
- `ntk` raises theta, which lowers low frequencies more than high ones;
- `yarn` (Peng et al. 2023) and `llama3` lower those that turn only a few times within the trained
  length, and keep the others. YaRN also multiplies attention scores by a factor.

    position IDs → `rotary_tables`: cosines and sines → `rotate` of layers.py: queries and keys

`ModelConfig.rope_scaling` holds the settings of a scaling under the names that transformers has in
`rope_parameters`.

Dimension key: B batch, L length, R pairs of rotated coordinates of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from olmo_sparsity.base.errors import ConfigError

if TYPE_CHECKING:
    from olmo_sparsity.config.model import ModelConfig

RotaryTables = tuple[Tensor, Tensor]
"""cos_BLR and sin_BLR of the angles of each token, one for each pair of coordinates."""


def rotary_tables(positions_BL: Tensor, config: ModelConfig) -> RotaryTables:
    """Return cos_BLR and sin_BLR of the angles of these position IDs, always computed in fp32: in
    bf16 neighbouring position IDs above 256 would be one number."""
    frequencies_R = rotary_frequencies(config, positions_BL.device)
    attention_scale = attention_factor(config)
    with torch.autocast(positions_BL.device.type, enabled=False):
        angles_BLR = positions_BL.float()[..., None] * frequencies_R
        if torch.compiler.is_compiling():
            cos_BLR, sin_BLR = _cos_and_sin(angles_BLR)
        else:
            # Eager models call PyTorch itself: the custom operation would import the compiler.
            cos_BLR = angles_BLR.cos()
            sin_BLR = angles_BLR.sin()
    if attention_scale == 1.0:
        return cos_BLR, sin_BLR
    return cos_BLR * attention_scale, sin_BLR * attention_scale


@torch.library.custom_op(
    "olmo_sparsity::cos_and_sin", mutates_args=(), schema="(Tensor angles) -> (Tensor, Tensor)"
)
def _cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines. The compiler keeps this operation whole; otherwise it would compute
    them again in each kernel that rotates queries or keys: 7 to 9% of a training step on a GPU."""
    return angles.cos(), angles.sin()


@_cos_and_sin.register_fake
def _empty_tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(angles), torch.empty_like(angles)


def rotated_width(config: ModelConfig) -> int:
    """Return how many coordinates of a head are rotated: an even number."""
    width = int(config.effective_head_width * config.rotary_fraction)
    return width - width % 2


def rotary_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Return frequencies_R, in radians a position, one for each pair of coordinates."""
    width = rotated_width(config)
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type")
    # In fp32, and each line as in transformers, so that both compute the same numbers. The
    # exponents are those of a head that is as wide as the rotated part (as in GPT-NeoX).
    exponents_R = torch.arange(0, width, 2, device=device, dtype=torch.float) / width
    powers_R = effective_theta(config) ** exponents_R
    frequencies_R = 1.0 / powers_R
    if kind == "linear":
        return frequencies_R / scaling["factor"]
    if kind == "yarn":
        kept_R = _fraction_that_yarn_keeps(scaling, config.rope_theta, width, device)
        return 1.0 / (scaling["factor"] * powers_R) * (1 - kept_R) + frequencies_R * kept_R
    if kind == "llama3":
        kept_R = _fraction_that_llama3_keeps(scaling, frequencies_R)
        return (1 - kept_R) * frequencies_R / scaling["factor"] + kept_R * frequencies_R
    return frequencies_R  # unscaled, or "ntk", which only has another theta


def effective_theta(config: ModelConfig) -> float:
    """Return the base of the frequencies. NTK-aware scaling raises it such that the lowest
    frequency is divided by the factor, and the highest stays."""
    theta = float(config.rope_theta)
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") == "ntk":
        width = rotated_width(config)
        theta *= scaling["factor"] ** (width / (width - 2))
    return theta


def attention_factor(config: ModelConfig) -> float:
    """Return the factor of cosines and sines. It multiplies queries and keys, so attention scores
    are multiplied by its square, as YaRN requires."""
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") != "yarn":
        return 1.0
    stated: float | None = scaling.get("attention_factor")
    return _yarn_temperature(scaling["factor"]) if stated is None else stated


def _yarn_temperature(length_factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's scale of queries and keys for lengths that are `length_factor` times as long.
    `mscale` is DeepSeek's weight of it."""
    if length_factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(length_factor) + 1.0


def _fraction_that_yarn_keeps(
    scaling: Mapping[str, Any], theta: float, width: int, device: torch.device
) -> Tensor:
    """Return kept_R, the weight of each unscaled frequency, between 0 and 1. It is 1 for a pair
    that makes more than `beta_fast` turns within the original length, and 0 for one that makes
    fewer than `beta_slow`. Between the two it falls linearly with the index of the pair."""

    def pair_of(num_turns: float) -> float:
        """Return the (fractional) index of the pair that makes this many turns."""
        original = scaling["original_max_position_embeddings"]
        return width * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    last_kept = max(math.floor(pair_of(scaling.get("beta_fast", 32.0))), 0)
    first_scaled = min(math.ceil(pair_of(scaling.get("beta_slow", 1.0))), width - 1)
    num_between: float = first_scaled - last_kept
    if num_between == 0:
        num_between = 0.001  # as transformers avoids dividing by 0
    pairs_R = torch.arange(width // 2, device=device, dtype=torch.float)
    return 1 - ((pairs_R - last_kept) / num_between).clamp(0, 1)


def _fraction_that_llama3_keeps(scaling: Mapping[str, Any], frequencies_R: Tensor) -> Tensor:
    """Return kept_R, the weight of each unscaled frequency, between 0 and 1. It is 1 for a pair
    that makes more than `high_freq_factor` turns within the original length, 0 for one that makes
    fewer than `low_freq_factor`, and linear in the number of turns between the two."""
    turns_R = scaling["original_max_position_embeddings"] / (2 * math.pi / frequencies_R)
    few = scaling["low_freq_factor"]
    many = scaling["high_freq_factor"]
    return ((turns_R - few) / (many - few)).clamp(0, 1)


# --- transformers' rope_parameters ----------------------------------------------------------------


def to_rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """Return `rope_parameters` of transformers for the angles of a config."""
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") == "ntk":  # transformers has no such kind; it is only another base
        scaling = {}
    return {"rope_type": "default", **scaling, "rope_theta": effective_theta(config)}


_LENGTH_SETTINGS = ("factor", "original_max_position_embeddings")
_SETTINGS_OF_KIND = {
    "linear": ("factor",),
    "llama3": (*_LENGTH_SETTINGS, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_LENGTH_SETTINGS, "attention_factor", "beta_fast", "beta_slow"),
}
"""The kinds of scaling in models of transformers that are supported here, and their settings."""


def from_rope_parameters(parameters: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    """Return `ModelConfig.rope_scaling` for `rope_parameters` of transformers; None if they scale
    nothing. A scaling that is not supported here raises ConfigError. `source`: the model, for
    messages."""
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return None
    supported = f"supported: default, {', '.join(_SETTINGS_OF_KIND)}; take another model"
    if kind not in _SETTINGS_OF_KIND:
        raise ConfigError(f"init_from='{source}': rope_type={kind}, {supported}")
    if not parameters.get("truncate", True):
        raise ConfigError(f"init_from='{source}': truncate=False of its YaRN, {supported}")
    scaling: dict[str, Any] = {}
    for name in _SETTINGS_OF_KIND[kind]:
        if parameters.get(name) is not None:
            scaling[name] = parameters[name]
    # DeepSeek states the factor of attention as a ratio: the temperatures that two weights give.
    mscale = parameters.get("mscale")
    mscale_all_dim = parameters.get("mscale_all_dim")
    if kind == "yarn" and mscale and mscale_all_dim and "attention_factor" not in scaling:
        factor = scaling["factor"]
        temperature = _yarn_temperature(factor, mscale)
        scaling["attention_factor"] = temperature / _yarn_temperature(factor, mscale_all_dim)
    return {"rope_type": kind} | scaling
