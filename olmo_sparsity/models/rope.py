"""Angles of position IDs. RoPE turns pair i of R pairs of a head's coordinates by position ·
frequency_i; scaling lowers frequencies: all alike (linear: Chen et al. 2023), by a raised base
(ntk), or those of few turns within the trained length (yarn, Peng et al. 2023; llama3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from olmo_sparsity.base.errors import ConfigError

if TYPE_CHECKING:
    from olmo_sparsity.config.sections import ModelConfig

RotaryTables = tuple[Tensor, Tensor]
"""cos_BLR and sin_BLR of each place's position ID, one for each pair of coordinates."""


def rotary_tables(positions_BL: Tensor, config: ModelConfig) -> RotaryTables:
    """Return cos_BLR and sin_BLR, always computed in fp32."""
    frequencies = rotary_frequencies(config, positions_BL.device)
    factor = attention_factor(config)
    with torch.autocast(positions_BL.device.type, enabled=False):
        angles = positions_BL.float()[..., None] * frequencies
        if torch.compiler.is_compiling():
            cos_BLR, sin_BLR = _cos_and_sin(angles)
        else:  # not the operation, which imports the compiler
            cos_BLR = angles.cos()
            sin_BLR = angles.sin()
    if factor == 1.0:
        return cos_BLR, sin_BLR
    return cos_BLR * factor, sin_BLR * factor


@torch.library.custom_op(
    "olmo_sparsity::cos_and_sin", mutates_args=(), schema="(Tensor angles) -> (Tensor, Tensor)"
)
def _cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """A compiler keeps this operation whole. Otherwise it computes cosines and sines again in each
    kernel that rotates queries or keys: 7 to 9% of a training step on a GPU."""
    return angles.cos(), angles.sin()


@_cos_and_sin.register_fake
def _empty_tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(angles), torch.empty_like(angles)


def rotated_width(config: ModelConfig) -> int:
    """Return how many coordinates of a head are rotated: an even number."""
    width = int(config.effective_head_width * config.rotary_fraction)
    return width - width % 2


def rotary_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Return radians a position, one for each pair of coordinates: in fp32 the same numbers as
    transformers computes."""
    width = rotated_width(config)
    scaling = config.rope_scaling or {}
    # Frequencies as for a head as wide as the rotated part (GPT-NeoX).
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float) / width
    powers = effective_theta(config) ** exponents
    frequencies = 1.0 / powers
    if scaling.get("rope_type") == "linear":
        return frequencies / scaling["factor"]
    if scaling.get("rope_type") == "yarn":
        kept = _share_that_yarn_keeps(scaling, config.rope_theta, width, device)
        return 1.0 / (scaling["factor"] * powers) * (1 - kept) + frequencies * kept
    if scaling.get("rope_type") == "llama3":
        # Turns within the trained length. Few of them: divided by the factor; many: kept.
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi / frequencies)
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / scaling["factor"] + kept * frequencies
    return frequencies


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
    """Return the factor of cosines and sines. Attention scores are multiplied by its square, as
    queries and keys are both rotated."""
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") != "yarn":
        return 1.0
    stated: float | None = scaling.get("attention_factor")
    return _yarn_temperature(scaling["factor"]) if stated is None else stated


def _yarn_temperature(factor: float, weight: float = 1.0) -> float:
    if factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(factor) + 1.0


def _share_that_yarn_keeps(
    scaling: Mapping[str, Any], theta: float, width: int, device: torch.device
) -> Tensor:
    """Return for each frequency 1 where it makes more than beta_fast turns within the original
    length, 0 below beta_slow, linear in the index between."""

    def index_of(num_turns: float) -> float:
        original = scaling["original_max_position_embeddings"]
        return width * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(index_of(scaling.get("beta_fast", 32.0))), 0)
    last = min(math.ceil(index_of(scaling.get("beta_slow", 1.0))), width - 1)
    num_between = last - first if last != first else 0.001  # as transformers avoids dividing by 0
    index = torch.arange(width // 2, device=device, dtype=torch.float)
    return 1 - ((index - first) / num_between).clamp(0, 1)


# --- transformers' rope_parameters ----------------------------------------------------------------


def to_rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of transformers for our scaling."""
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") == "ntk":  # it has no name there, but is only another base
        scaling = {}
    return {"rope_type": "default", **scaling, "rope_theta": effective_theta(config)}


_OF_LENGTH = ("factor", "original_max_position_embeddings")
_READ = {
    "linear": ("factor",),
    "llama3": (*_OF_LENGTH, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_OF_LENGTH, "attention_factor", "beta_fast", "beta_slow"),
}
"""Kinds of scaling that are known here, and the settings that each has."""


def from_rope_parameters(parameters: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    """Return the scaling of a transformers model; raise ConfigError for one that is not known
    here."""
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return None
    supported = f"supported: default, {', '.join(_READ)}; take another model"
    if kind not in _READ:
        raise ConfigError(f"init_from='{source}': rope_type={kind}, {supported}")
    if not parameters.get("truncate", True):
        raise ConfigError(f"init_from='{source}': truncate=False of its YaRN, {supported}")
    scaling: dict[str, Any] = {}
    for name in _READ[kind]:
        if parameters.get(name) is not None:
            scaling[name] = parameters[name]
    # DeepSeek states the factor of attention by two weights.
    mscale = parameters.get("mscale")
    mscale_all_dim = parameters.get("mscale_all_dim")
    if kind == "yarn" and mscale and mscale_all_dim and "attention_factor" not in scaling:
        factor = scaling["factor"]
        temperature = _yarn_temperature(factor, mscale)
        scaling["attention_factor"] = temperature / _yarn_temperature(factor, mscale_all_dim)
    return {"rope_type": kind} | scaling
