"""The ways a model stretches its rotary positions that are computed here, and which of them a `config.json` means.

Data alone: `rope_frequencies.py` has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bifolio.protos.errors import ConfigError

SUPPORTED = "'default', 'linear', 'llama3' and 'yarn'"
_WHY_NOT = {
    "dynamic": "its angles depend on the total length, so a chunked or resumed prompt would be computed differently",
    "longrope": "its angles depend on the total length, so a chunked or resumed prompt would be computed differently",
}
_PLAIN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned"}
_KEYS = {
    "default": _PLAIN,
    "linear": _PLAIN | {"factor"},
    "llama3": _PLAIN | {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": _PLAIN | {"factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"},
}


@dataclass(frozen=True, slots=True)
class Linear:
    """Every frequency divided by one factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Long waves divided by the factor, short ones kept, with a ramp between (Llama 3.1)."""

    factor: float
    low: float  # waves longer than original / low are divided
    high: float  # waves shorter than original / high are kept
    original: int  # positions of the pre-training


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023): as Llama3, with a ramp over the pairs, and cos and sin scaled besides."""

    factor: float
    original: int  # positions of the pre-training
    attention_factor: float  # of cos and sin
    beta_fast: float = 32.0  # pairs that turn more often than this over `original` are kept
    beta_slow: float = 1.0  # those that turn less often are divided
    truncate: bool = True  # the ramp begins and ends at whole pairs


@dataclass(frozen=True, slots=True)
class Divided:
    """Each frequency divided by a number of its own: llama3 as GGUF files hold it."""

    divisors: tuple[float, ...]  # [head_dim / 2]


RopeScaling = Linear | Llama3 | Yarn | Divided


def from_hf(rope: Mapping[str, Any], original: int) -> RopeScaling | None:
    """What `rope_parameters` or `rope_scaling` asks for; None for plain RoPE. `original` is the length of the
    pre-training where it does not say. Raises ConfigError for what is not computed here.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _KEYS:
        because = f", because {_WHY_NOT[kind]}" if kind in _WHY_NOT else ""
        raise ConfigError(f"model: rope type is {kind!r}; allowed are {SUPPORTED}{because}")
    if strange := sorted(key for key, value in rope.items() if key not in _KEYS[kind] and value is not None):
        raise ConfigError(f"model: rope type {kind!r} with {', '.join(strange)}, which this engine does not compute")
    original = int(rope.get("original_max_position_embeddings") or original)
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(_number(rope, "factor"))
    if kind == "llama3":
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        if low >= high:
            raise ConfigError(f"model: low_freq_factor is {low}; allowed is less than high_freq_factor, {high}")
        return Llama3(_number(rope, "factor"), low, high, original)
    factor = _number(rope, "factor")
    return Yarn(
        factor,
        original,
        _attention_factor(rope, factor),
        float(rope.get("beta_fast") or 32),
        float(rope.get("beta_slow") or 1),
        bool(rope.get("truncate", True)),
    )


def longest(scaling: RopeScaling, positions: int) -> int:
    """How many positions are good: what the model says, or what YaRN makes of its pre-training. Who switches YaRN on,
    as the Qwen models advise, does not change `max_position_embeddings`."""
    return max(positions, int(scaling.original * scaling.factor)) if isinstance(scaling, Yarn) else positions


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """The paper's answer to longer contexts flattening the softmax."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    if above and below:
        return yarn_attention_factor(factor, above) / yarn_attention_factor(factor, below)
    return yarn_attention_factor(factor)


def _number(rope: Mapping[str, Any], key: str) -> float:
    value = rope.get(key)
    if not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"model: {key} of the rope scaling is {value!r}; allowed is a number above 0")
    return float(value)
