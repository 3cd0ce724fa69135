"""What must be known of a model of the Llama family to compute with it: Llama, Mistral, Qwen2, Qwen3, SmolLM.

They differ in a few yes or no questions, all of them here. Where the answers come from is the business of
`hf_config.py` and `gguf_llama.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.protos.errors import ConfigError

from .model_values import number, whole
from .rope_scaling import RopeScaling, Yarn

# Above what any model has, and soon enough that nothing is listed, looped over or allocated by a number of nonsense
MOST = {
    "vocab_size": 2**24,
    "hidden": 2**20,
    "intermediate": 2**20,
    "layers": 2**11,
    "heads": 2**14,
    "kv_heads": 2**14,
    "max_positions": 2**31,
}
EPS = (1e-20, 0.5)
THETA = (1, 2.0**64)


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float  # of the RMS norms
    rope_theta: float
    max_positions: int
    tied: bool  # the output matrix is the embedding
    rope_scaling: RopeScaling | None = None
    unrotated: tuple[int, ...] = ()  # layers whose queries and keys carry no position (NoPE)
    windows: tuple[int | None, ...] = ()  # per layer: how many positions it looks back, itself included; () is all
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normed per head before they are rotated

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            whole(name, getattr(self, name), most)
        number("the eps of the norms", self.eps, *EPS)
        number("rope_theta", self.rope_theta, *THETA)
        if self.rope_theta == 1 and isinstance(self.rope_scaling, Yarn):
            raise ConfigError("model: rope_theta is 1; allowed for YaRN is more")
        if self.heads % self.kv_heads:
            raise ConfigError(f"model: {self.heads} heads; allowed is a multiple of {self.kv_heads}, its KV heads")
        if type(self.head_dim) is not int or not 32 <= self.head_dim <= 256 or self.head_dim % 2:
            raise ConfigError(f"model: head_dim is {self.head_dim!r}; allowed is an even number from 32 to 256")
        for window in self.windows:
            if window is not None:
                whole("an attention window", window, MOST["max_positions"])
        assert len(self.windows) in (0, self.layers), "one window for each layer"

    def window(self, layer: int) -> int | None:
        """How many positions a token of this layer sees, itself included; None is all."""
        return self.windows[layer] if self.windows else None

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name (as Hugging Face has it) and shape of every weight, linears as [out, in]."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (queries, self.hidden, self.qkv_bias),
            "self_attn.k_proj": (keys, self.hidden, self.qkv_bias),
            "self_attn.v_proj": (keys, self.hidden, self.qkv_bias),
            "self_attn.o_proj": (self.hidden, queries, self.o_bias),
            "mlp.gate_proj": (self.intermediate, self.hidden, self.mlp_bias),
            "mlp.up_proj": (self.intermediate, self.hidden, self.mlp_bias),
            "mlp.down_proj": (self.hidden, self.intermediate, self.mlp_bias),
        }
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }
        for name, (out, into, bias) in linears.items():
            layer[f"{name}.weight"] = (out, into)
            if bias:
                layer[f"{name}.bias"] = (out,)
        if self.qk_norm:
            layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (self.head_dim,)
        names = {f"model.layers.{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()}
        names["model.embed_tokens.weight"] = (self.vocab_size, self.hidden)
        names["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            names["lm_head.weight"] = (self.vocab_size, self.hidden)
        return names
