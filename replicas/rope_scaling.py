"""The ways a model stretches its rotary positions that are computed here, and which of them a `config.json` means.

Data alone: `rope_frequencies.py` has the formulas. Also what a number of a configuration has to be, whoever reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bifolio.protos.errors import ConfigError

from .model_values import number, whole

SUPPORTED = "'default', 'linear', 'llama3' and 'yarn'"
_WHY_NOT = {
    "dynamic": "its angles depend on the total length, so a chunked or resumed prompt would be computed differently",
    "longrope": "its angles depend on the total length, so a chunked or resumed prompt would be computed differently",
}
_PLAIN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned"}
# What no model leaves: a number outside would end as NaN or as a division by zero, far from the file that said it
_FACTORS = (1, 2.0**20)
_WEIGHTS = (2.0**-10, 2.0**20)
_POSITIONS = 2**31
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
    if not isinstance(kind, str) or kind not in _KEYS:
        because = f", because {_WHY_NOT[kind]}" if str(kind) in _WHY_NOT else ""
        raise ConfigError(f"model: rope type is {kind!r}; allowed are {SUPPORTED}{because}")
    if strange := sorted(key for key, value in rope.items() if key not in _KEYS[kind] and value is not None):
        raise ConfigError(f"model: rope type {kind!r} with {', '.join(strange)}, which this engine does not compute")
    key = "original_max_position_embeddings"
    original = original if rope.get(key) is None else whole(key, rope[key], _POSITIONS)
    if kind == "default":
        return None
    if kind == "linear":
        return linear(rope.get("factor"))
    factor = number(_of("factor"), rope.get("factor"), *_FACTORS)
    if kind == "llama3":
        low, high = (number(_of(key), rope.get(key), *_WEIGHTS) for key in ("low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise ConfigError(f"model: low_freq_factor is {low}; allowed is less than high_freq_factor, {high}")
        return Llama3(factor, low, high, original)
    truncate = rope.get("truncate", True)
    if truncate is not None and not isinstance(truncate, bool):
        raise ConfigError(f"model: {_of('truncate')} is {truncate!r}; allowed is true or false")
    attention = _attention_factor(rope, factor)
    return yarn(factor, original, rope.get("beta_fast"), rope.get("beta_slow"), attention, bool(truncate))


def linear(factor: Any) -> Linear:
    return Linear(number(_of("factor"), factor, *_FACTORS))


def yarn(
    factor: Any, original: Any, fast: Any, slow: Any, attention: float | None = None, truncate: bool = True
) -> Yarn:
    """Of what a file says; None is what the paper has."""
    factor = number(_of("factor"), factor, *_FACTORS)
    fast = number(_of("beta_fast"), 32 if fast is None else fast, *_WEIGHTS)
    slow = number(_of("beta_slow"), 1 if slow is None else slow, *_WEIGHTS)
    if fast <= slow:
        raise ConfigError(f"model: beta_fast of the rope scaling is {fast}; allowed is more than beta_slow, {slow}")
    attention = yarn_attention_factor(factor) if attention is None else attention
    return Yarn(factor, whole("the length before YaRN", original, _POSITIONS), attention, fast, slow, truncate)


def divided(divisors: Iterable[Any]) -> Divided:
    return Divided(tuple(number("a divisor of the rope frequencies", each, *_WEIGHTS) for each in divisors))


def longest(scaling: RopeScaling, positions: int) -> int:
    """How many positions are good: what the model says, or what YaRN makes of its pre-training. Who switches YaRN on,
    as the Qwen models advise, does not change `max_position_embeddings`."""
    return max(positions, int(scaling.original * scaling.factor)) if isinstance(scaling, Yarn) else positions


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """The paper's answer to longer contexts flattening the softmax."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return number(_of("attention_factor"), rope["attention_factor"], *_WEIGHTS)
    weights = [number(_of(key), rope.get(key) or 0, 0, _WEIGHTS[1]) for key in ("mscale", "mscale_all_dim")]
    if all(weights):  # 0 is none
        above, below = (yarn_attention_factor(factor, weight) for weight in weights)
        return above / below
    return yarn_attention_factor(factor)


def _of(key: str) -> str:
    return f"{key} of the rope scaling"
