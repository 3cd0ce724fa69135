"""A Hugging Face `config.json` of the Llama family, as transformers 4 or 5 wrote it, read as transformers reads it.

What a family leaves to its class in transformers stands in `_FAMILIES`. What is not computed here is a ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bifolio.protos.errors import ConfigError

from .model_config import EPS, MOST, THETA, LlamaConfig
from .model_values import number, only, reader, whole
from .rope_scaling import from_hf, longest

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Family:
    """A bias of None is what the config says; the rest holds where the config says nothing."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    tied: bool = False
    theta: float = 10000.0
    windowed: Literal["none", "all", "upper", "unrotated"] = "none"  # the layers that a sliding_window is for
    window: int | None = 4096


_FAMILIES = {
    "LlamaForCausalLM": _Family(mlp_bias=None),
    "MistralForCausalLM": _Family(qkv_bias=False, o_bias=False, windowed="all"),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, o_bias=False, windowed="upper"),
    "Qwen3ForCausalLM": _Family(qk_norm=True, windowed="upper"),
    "SmolLM3ForCausalLM": _Family(mlp_bias=None, tied=True, theta=2000000.0, windowed="unrotated", window=None),
}
_SIZES = {
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
}
# Where one of these says something, the tensors or the arithmetic are not those of the family.
_NOT_COMPUTED = (
    "quantization_config",
    "num_experts",
    "num_local_experts",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


def read_hf(config: Config) -> LlamaConfig:
    """Raises ConfigError for what is not computed here."""
    architectures = config.get("architectures") or ["unknown"]
    if not isinstance(architectures, list):
        raise ConfigError(f'model: architectures is {architectures!r}; allowed is a list, as in ["LlamaForCausalLM"]')
    name = architectures[0]
    only("architecture", name, *_FAMILIES)
    family = _FAMILIES[name]
    only("hidden_act", config.get("hidden_act", "silu"), "silu")
    for key in _NOT_COMPUTED:
        if config.get(key):
            raise ConfigError(f"model: config.json has {key}, which this engine does not compute; use a model without")
    need = reader(config, "config.json")
    layers, heads, hidden, intermediate, vocab_size, max_positions = (
        whole(key, need(key), MOST[field]) for key, field in _SIZES.items()
    )
    # what stands for a missing one differs from family to family
    kv_heads = config.get("num_key_value_heads") if name == "LlamaForCausalLM" else need("num_key_value_heads")
    head_dim = need("head_dim") if name == "Qwen3ForCausalLM" else config.get("head_dim")
    rope = _rope(config)
    scaling = from_hf(rope, max_positions)
    unrotated = _unrotated(name, config, layers)
    attention_bias, mlp_bias = _flag(config, "attention_bias"), _flag(config, "mlp_bias")
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=heads if kv_heads is None else whole("num_key_value_heads", kv_heads, MOST["kv_heads"]),
        head_dim=hidden // heads if head_dim is None else head_dim,
        eps=number("rms_norm_eps", need("rms_norm_eps"), *EPS),
        rope_theta=number("rope_theta", _said(rope, "rope_theta", _said(config, "rope_theta", family.theta)), *THETA),
        max_positions=max_positions if scaling is None else longest(scaling, max_positions),
        tied=_flag(config, "tie_word_embeddings", family.tied),
        rope_scaling=scaling,
        unrotated=unrotated,
        windows=_windows(family, config, layers, unrotated),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
    )


def _rope(config: Config) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`; before, `rope_theta` stood alone and `rope_scaling` held the rest."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and new != old:
        raise ConfigError("model: config.json has rope_parameters and rope_scaling, which differ; keep one of them")
    if not isinstance(new or old or {}, dict):
        raise ConfigError(f"model: the rope parameters are {new or old!r}; allowed is an object")
    rope: dict[str, Any] = dict(new or old or {})
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ConfigError(f"model: the rope parameters differ by layer ({', '.join(nested)}); allowed is one for all")
    for source in (config, rope):
        only("partial_rotary_factor", _said(source, "partial_rotary_factor", 1.0), 1.0)
    if config.get("original_max_position_embeddings") is not None:
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return rope


def _unrotated(name: str, config: Config, layers: int) -> tuple[int, ...]:
    """SmolLM3 alone has layers without positions: each `no_rope_layer_interval`-th, or where a list holds 0."""
    if name != "SmolLM3ForCausalLM":
        if config.get("no_rope_layers"):
            raise ConfigError(f"model: no_rope_layers in a {name}; allowed only in a SmolLM3ForCausalLM")
        return ()
    rotated = config.get("no_rope_layers")  # the name says the opposite of what its ones mean
    if rotated is None:
        interval = whole("no_rope_layer_interval", _said(config, "no_rope_layer_interval", 4), MOST["layers"])
        rotated = [(layer + 1) % interval for layer in range(layers)]
    elif not isinstance(rotated, list) or any(each not in (0, 1) for each in rotated):
        raise ConfigError(f"model: no_rope_layers is {rotated!r}; allowed is a list of 0 and 1")
    if len(rotated) < layers:
        raise ConfigError(
            f"model: no_rope_layers has {len(rotated)} entries; allowed is one for each of {layers} layers"
        )
    return tuple(layer for layer in range(layers) if not rotated[layer])


def _windows(family: _Family, config: Config, layers: int, unrotated: tuple[int, ...]) -> tuple[int | None, ...]:
    """How far each layer looks back, by the rule of the family or, where they have a say, by `layer_types`."""
    asked = family.windowed == "all" or (family.windowed != "none" and _flag(config, "use_sliding_window"))
    width = config.get("sliding_window", family.window) if asked else None
    if width is not None:
        whole("sliding_window", width, MOST["max_positions"])
    full = whole("max_window_layers", _said(config, "max_window_layers", 28), MOST["max_positions"], least=0)
    windowed = {
        "none": (),
        "all": range(layers),
        "upper": range(full, layers),
        "unrotated": unrotated,
    }[family.windowed]
    windows = tuple(width if layer in windowed else None for layer in range(layers))
    if (types := config.get("layer_types")) is not None:
        if not isinstance(types, list):
            raise ConfigError(f"model: layer_types is {types!r}; allowed is a list")
        only("the number of layer_types", len(types), layers)
        for kind in types:
            only("layer type", kind, "full_attention", "sliding_attention")
        said = tuple(width if kind == "sliding_attention" else None for kind in types)
        # transformers takes no notice of them in a Llama or Mistral: then they must at least agree
        fixed = family.windowed in ("none", "all")
        if (width is None and "sliding_attention" in types) or (fixed and said != windows):
            raise ConfigError(f"model: layer_types do not fit a sliding_window of {width}; correct config.json")
        windows = said
    return windows if any(window is not None for window in windows) else ()


def _said(source: Config, key: str, otherwise: Any) -> Any:
    """As `get`, and null says nothing. A 0 does say something, if only nonsense."""
    return otherwise if source.get(key) is None else source[key]


def _flag(config: Config, key: str, otherwise: bool = False) -> bool:
    value = config.get(key, otherwise)
    only(key, value, True, False, None)
    return bool(value)
