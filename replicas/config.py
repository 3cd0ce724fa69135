"""What a user may set about the model, the engine and the pools. Knows nothing of YAML or of the cluster."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bifolio.kv_manager.config import FrozenConfig

Dtype = Literal["bfloat16", "float16", "float32"]
Quantization = Literal["int8"]
Backend = Literal["auto", "avx512", "avx2", "generic", "triton", "torch"]


class ModelConfig(FrozenConfig):
    """The model that is served."""

    source: str = Field(
        default="smollm2-135m",
        min_length=1,
        description="A known model (`bifolio models list`), ORG/NAME of the hub, a .gguf file or a model directory.",
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        description="The name users ask for; null takes the known model's, the file's or the directory's.",
    )
    dtype: Dtype | None = Field(
        default=None,
        description="Of weights, activations and KV cache; null takes float32 if engine.exact, else bfloat16.",
    )
    quantization: Quantization | None = Field(
        default=None,
        description="int8 rounds the linears' weights to 8 bits when a replica starts; null leaves them as they are.",
    )


class EngineConfig(FrozenConfig):
    """The engine of every replica, prefill and decode alike."""

    block_size: int = Field(default=16, ge=8, le=256, description="Token positions in one KV block.")
    cache_tokens: int = Field(
        default=16384,
        ge=256,
        le=2**31,
        description="Token positions the KV cache of one replica holds, in all.",
    )
    max_batched_tokens: int = Field(
        default=256,
        ge=8,
        le=65536,
        description="Tokens computed in one step; longer prompts are cut into chunks.",
    )
    max_sequences: int = Field(default=32, ge=1, le=1024, description="Sequences computed in one step.")
    threads: int = Field(default=1, ge=1, le=256, description="CPU threads of one replica's computing.")
    kernels: Backend = Field(
        default="auto",
        description="What computes: auto takes the native kernels that suit the CPU best, torch where none were built, "
        "and triton on GPUs; triton on a CPU needs TRITON_INTERPRET=1 in the environment and is for tests.",
    )
    exact: bool = Field(
        default=False,
        description="Bit-equal logits however they are computed, on CPUs; refused where that does not hold.",
    )

    @model_validator(mode="after")
    def _steps_have_room(self) -> EngineConfig:
        least = self.max_sequences + self.block_size
        if self.max_batched_tokens < least:
            raise ValueError(
                f"max_batched_tokens is {self.max_batched_tokens}, but must be at least {least}: a step holds a block "
                f"(block_size {self.block_size}) and one token of each sequence (max_sequences {self.max_sequences})"
            )
        return self


class PrefillPoolConfig(FrozenConfig):
    """The replicas that compute prompts."""

    replicas: int = Field(
        default=1,
        ge=0,
        le=64,
        description="0 is single-pool serving: decode replicas prefill for themselves.",
    )


class DecodePoolConfig(FrozenConfig):
    """The replicas that generate tokens."""

    replicas: int = Field(default=1, ge=1, le=64, description="At least one: every answer is decoded somewhere.")
