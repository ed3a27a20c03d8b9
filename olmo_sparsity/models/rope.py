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
        else:  # the operation imports the compiler
            cos_BLR, sin_BLR = angles.cos(), angles.sin()
    return (cos_BLR, sin_BLR) if factor == 1.0 else (cos_BLR * factor, sin_BLR * factor)


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
    width = int(config.effective_head_width * config.rotary_fraction)
    return width - width % 2


def rotary_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians a position, one for each pair of coordinates; in fp32 what transformers computes."""
    width, scaling = rotated_width(config), config.rope_scaling or {}
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
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi / frequencies)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / scaling["factor"] + kept * frequencies
    return frequencies


def effective_theta(config: ModelConfig) -> float:
    """The base of the frequencies. NTK-aware scaling raises it such that the lowest frequency is
    divided by the factor, and the highest stays."""
    theta, scaling = float(config.rope_theta), config.rope_scaling or {}
    if scaling.get("rope_type") == "ntk":
        width = rotated_width(config)
        theta *= scaling["factor"] ** (width / (width - 2))
    return theta


def attention_factor(config: ModelConfig) -> float:
    """By which cosines and sines are multiplied; the square root of what attention scores are."""
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") != "yarn":
        return 1.0
    given = scaling.get("attention_factor")
    return _yarn_temperature(scaling["factor"]) if given is None else given


def _yarn_temperature(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


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
    index = torch.arange(width // 2, device=device, dtype=torch.float)
    return 1 - ((index - first) / (last - first if last != first else 0.001)).clamp(0, 1)


# --- transformers' rope_parameters ----------------------------------------------------------------


def to_rope_parameters(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") == "ntk":  # a base, for a model of any length
        scaling = {}
    return {"rope_type": "default", **scaling, "rope_theta": effective_theta(config)}


_OF_LENGTH = ("factor", "original_max_position_embeddings")
_READ = {
    "linear": ("factor",),
    "llama3": (*_OF_LENGTH, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_OF_LENGTH, "attention_factor", "beta_fast", "beta_slow"),
}


def from_rope_parameters(given: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    """The scaling of a transformers model; ConfigError for one that is not known here."""
    kind = given.get("rope_type", "default")
    if kind == "default":
        return None
    if kind not in _READ or not given.get("truncate", True):
        found = f"rope_type={kind}" if kind not in _READ else "truncate=False of its YaRN"
        raise ConfigError(f"init_from='{source}': {found}, supported: default, {', '.join(_READ)}")
    scaling = {name: given[name] for name in _READ[kind] if given.get(name) is not None}
    factors = [given.get(name) or 0 for name in ("mscale", "mscale_all_dim")]
    if kind == "yarn" and all(factors):  # of DeepSeek
        numerator, denominator = (_yarn_temperature(scaling["factor"], m) for m in factors)
        scaling.setdefault("attention_factor", numerator / denominator)
    return {"rope_type": kind} | scaling
