"""What a user may set about the model, the engine and the pools. Knows nothing of YAML or of the cluster."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from bifolio.kv_manager.config import FrozenConfig

from .kv_memory import CPU_FORMS, FORMS, parse

Dtype = Literal["bfloat16", "float16", "float32"]
Quantization = Literal["int8"]
Backend = Literal["auto", "avx512", "avx2", "generic", "triton", "torch"]
DeviceChoice = Literal["auto", "cuda", "cpu"]

CPU_KERNELS = ("avx512", "avx2", "generic")
# What fields of the engine are on GPUs where they are not set: there, steps are large and blocks are Triton's tiles
GPU_DEFAULTS = {"block_size": 64, "max_batched_tokens": 2048, "max_sequences": 256, "speculate": 0}

_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"  # as Ray and Kubernetes have it
_LABEL_NAME = re.compile(rf"([a-zA-Z0-9.-]{{1,253}}/)?{_LABEL}")
_LABEL_VALUE = re.compile(_LABEL)


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
        description="int8 rounds the linears' weights to 8 bits when a replica starts, on CPUs; null leaves them.",
    )


class EngineConfig(FrozenConfig):
    """The engine of every replica, prefill and decode alike."""

    device: DeviceChoice = Field(
        default="auto",
        description="What replicas compute on; auto takes cuda if the cluster has a GPU and nothing asked for is the "
        "CPU's (exact, int8 weights, native kernels).",
    )
    block_size: int = Field(
        default=16,
        ge=8,
        le=256,
        description="Token positions in one KV block; if it is not set, 64 on GPUs and 16 on CPUs.",
    )
    kv_memory: str = Field(
        default="auto",
        json_schema_extra={"type": ["string", "number"], "x-allowed": FORMS},
        description="What the KV cache of one replica takes: bytes (12 GiB), tokens (16384 tokens), on GPUs also a "
        "fraction of what weights and steps leave; auto is what they leave on a GPU but for a spare 3%, and 16384 "
        "tokens on a CPU.",
    )
    context: int | None = Field(
        default=None,
        ge=2,
        le=2**31,
        description="Token positions one sequence may have, of prompt and answer; null: as many as the model has, and "
        "at most what the cache is asked to hold. A replica on a GPU does not start unless its cache holds one such "
        "sequence.",
    )
    max_batched_tokens: int = Field(
        default=256,
        ge=8,
        le=65536,
        description="Tokens computed in one step; longer prompts are cut into chunks. If it is not set, 2048 on GPUs "
        "and 256 on CPUs.",
    )
    max_sequences: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="Sequences computed in one step; if it is not set, 256 on GPUs and 32 on CPUs.",
    )
    speculate: int = Field(
        default=8,
        ge=0,
        le=63,
        description="Tokens guessed behind each sequence's next one, from its own text, and computed in the same step, "
        "at most, and no more than make eight in all; changes how fast an answer comes, never what it is. 0 guesses "
        "none; if it is not set, 0 on GPUs.",
    )
    prompt_stretch: float | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="A step that decodes may take so many times as long for the prompt tokens computed beside; what a "
        "token costs is measured. Low keeps streams steady, high brings first tokens sooner. null: 1.5 beside prefill "
        "replicas, and 4 without them.",
    )
    threads: int = Field(default=1, ge=1, le=256, description="CPU threads of one replica's computing.")
    kernels: Backend = Field(
        default="auto",
        description="What computes: auto takes the native kernels that suit the CPU best, torch where none were built, "
        "and triton on GPUs; triton on a CPU needs TRITON_INTERPRET=1 in the environment and is for tests.",
    )
    cuda_graphs: bool = Field(
        default=True,
        description="On GPUs, decode steps are recorded at the start as CUDA graphs and replayed; false launches each "
        "kernel anew.",
    )
    exact: bool = Field(
        default=False,
        description="Bit-equal logits however they are computed, on CPUs; refused where that does not hold.",
    )
    flush_s: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="After its first token a stream's tokens leave the decode replica at most this often: what came "
        "meanwhile is one message, which costs little more than one token.",
    )
    stall_s: float = Field(
        default=30.0,
        ge=1,
        le=3600,
        description="An engine that has work and ends no step for this long stands still: its requests go on "
        "elsewhere and the replica is replaced. Longer than the longest step.",
    )

    @model_validator(mode="before")
    @classmethod
    def _cache_tokens_has_another_name(cls, given: Any) -> Any:
        if isinstance(given, dict) and "cache_tokens" in given:
            before = given["cache_tokens"]
            now = f"{before} tokens" if type(before) is int and before >= 256 else "16384 tokens"
            raise ValueError(f"cache_tokens is now kv_memory; write `kv_memory: {now}` in its place")
        return given

    @model_validator(mode="before")
    @classmethod
    def _a_gpu_has_other_defaults(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("device") == "cuda":
            return GPU_DEFAULTS | given
        return given

    @field_validator("kv_memory", mode="before")
    @classmethod
    def _kv_memory_has_one_form(cls, given: Any) -> str:
        return str(parse(given))

    @model_validator(mode="after")
    def _the_device_can(self) -> EngineConfig:
        if self.device == "cuda" and self.exact:
            raise ValueError("exact with device cuda; allowed with exact: device auto or cpu")
        if self.device == "cuda" and self.kernels in CPU_KERNELS:
            raise ValueError(f"kernels {self.kernels} with device cuda; allowed on GPUs: auto, triton and torch")
        tokens = parse(self.kv_memory).tokens
        if self.context is not None and tokens is not None and self.context > tokens:
            raise ValueError(
                f"context is {self.context}, and kv_memory {self.kv_memory}; lower the one or raise the other"
            )
        if self.device == "cpu" and parse(self.kv_memory).fraction is not None:
            raise ValueError(f"kv_memory is {self.kv_memory} with device cpu; allowed on CPUs: {CPU_FORMS}")
        return self

    @model_validator(mode="after")
    def _steps_have_room(self) -> EngineConfig:
        if self.device == "auto":  # until it is decided, what fits on either is let through
            gpu = GPU_DEFAULTS | {name: getattr(self, name) for name in GPU_DEFAULTS if name in self.model_fields_set}
            if gpu["max_batched_tokens"] >= gpu["max_sequences"] + gpu["block_size"]:
                return self
        least = self.max_sequences + self.block_size
        if self.max_batched_tokens < least:
            raise ValueError(
                f"max_batched_tokens is {self.max_batched_tokens}, but must be at least {least}: a step holds a block "
                f"(block_size {self.block_size}) and one token of each sequence (max_sequences {self.max_sequences})"
            )
        return self


class PoolConfig(FrozenConfig):
    """What both pools have: how much of a GPU a replica takes, and where it may run."""

    replicas: int = Field(default=1, ge=0, le=64, description="How many.")
    num_gpus: float | None = Field(
        default=None,
        ge=0.0001,
        le=1,
        description="Share of a GPU that one replica takes, of its memory too; null: a whole one if there are enough, "
        "else replicas share evenly. More than one GPU for a replica would be tensor parallelism, which is not there.",
    )
    accelerator_type: str | None = Field(
        default=None,
        pattern=r"^\S+$",
        description="The kind of GPU a replica needs, as Ray names it (H200, A100, L4); null takes any.",
    )
    cpus_per_replica: int | None = Field(
        default=None,
        ge=0,
        le=256,
        description="CPU cores on which a replica's engine computes alone, in as many threads; null: engine.threads of "
        "them, where the machine has enough for all replicas; 0: none, it shares all cores.",
    )
    labels: dict[str, str] = Field(
        default={},
        json_schema_extra={"x-allowed": "an object of label names and values, all of them texts (quote numbers)"},
        description="Ray node labels, each with its value, that a replica's node must have.",
    )

    @field_validator("num_gpus")
    @classmethod
    def _ray_counts_in_ten_thousandths(cls, share: float | None) -> float | None:
        if share is not None and abs(share * 10_000 - round(share * 10_000)) > 1e-6:
            raise ValueError(f"got {share}; allowed: 0.0001 to 1, with at most 4 digits after the point")
        return share

    @field_validator("labels")
    @classmethod
    def _labels_are_those_of_ray(cls, labels: dict[str, str]) -> dict[str, str]:
        for name, value in labels.items():
            if not (_LABEL_NAME.fullmatch(name) and _LABEL_VALUE.fullmatch(value)):
                raise ValueError(
                    f"got {name!r}: {value!r}; allowed: names and values of letters, digits, '-', '_' and '.', at most "
                    "63, and DOMAIN/ before a name"
                )
        return labels


class IngressConfig(FrozenConfig):
    """The processes behind the doors."""

    replicas: int = Field(
        default=1,
        ge=1,
        le=16,
        description="How many. Streams of one that is lost break, and with two or more others answer meanwhile.",
    )
    attempts: int = Field(
        default=5,
        ge=1,
        le=100,
        description="A request ends with an error when so many placements in a row have brought no token.",
    )


class PrefillPoolConfig(PoolConfig):
    """The replicas that compute prompts."""

    replicas: int = Field(
        default=1,
        ge=0,
        le=64,
        description="0 is single-pool serving: decode replicas prefill for themselves.",
    )


class DecodePoolConfig(PoolConfig):
    """The replicas that generate tokens."""

    replicas: int = Field(default=1, ge=1, le=64, description="At least one: every answer is decoded somewhere.")
