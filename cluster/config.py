"""One YAML file for the whole cluster, read into one frozen object.

Each layer owns the class of its part; this file composes them. Starts nothing, and looks for no model.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from bifolio.kv_manager import redis_url
from bifolio.kv_manager.config import FrozenConfig, KvConfig
from bifolio.protos.errors import ConfigError
from bifolio.replicas.config import (
    GPU_DEFAULTS,
    DecodePoolConfig,
    EngineConfig,
    IngressConfig,
    ModelConfig,
    PoolConfig,
    PrefillPoolConfig,
)

from .mistakes import allowed, explain
from .models import default_name

STRETCH_BESIDE, STRETCH_ALONE = 1.5, 4.0  # engine.prompt_stretch with prefill replicas, and without


class PoolsConfig(FrozenConfig):
    """The two replica pools."""

    prefill: PrefillPoolConfig = Field(default=PrefillPoolConfig(), description="The replicas that compute prompts.")
    decode: DecodePoolConfig = Field(default=DecodePoolConfig(), description="The replicas that generate tokens.")
    drain_s: float = Field(
        default=60.0,
        ge=1,
        le=86_400,
        description="What a replica of any role that leaves has left is given this long to end; then streams of decode "
        "replicas go on at others, and those of an ingress break.",
    )

    @property
    def wanted(self) -> dict[str, int]:
        """How many replicas of each role."""
        return {"prefill": self.prefill.replicas, "decode": self.decode.replicas}

    @property
    def used(self) -> dict[str, PoolConfig]:
        """The pools that have replicas, by role."""
        return {role: getattr(self, role) for role, replicas in self.wanted.items() if replicas}


class RedisConfig(FrozenConfig):
    """Where the cluster keeps what must outlive its KV manager."""

    url: str | None = Field(
        default=None,
        repr=False,  # it may hold a password, and what is logged may hold a configuration
        description="Address of a Redis or Valkey for what must outlive the KV manager, a database of this cluster's "
        "own; null starts a Valkey with the cluster.",
        json_schema_extra={"x-allowed": f"{redis_url.FORMS}, or null"},
    )

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        return None if url is None else redis_url.checked(url)


class HttpConfig(FrozenConfig):
    """The OpenAI-compatible door."""

    host: Literal["127.0.0.1", "localhost"] = Field(
        default="127.0.0.1",
        description="Where both doors listen: this machine alone, until there are API keys.",
    )
    port: int = Field(
        default=8000,
        ge=1,
        le=65535,
        description="Port of /v1/chat/completions, /v1/completions, /v1/models and the rest.",
    )


class GrpcConfig(FrozenConfig):
    """The gRPC door."""

    port: int = Field(default=9000, ge=1, le=65535, description="Port of bifolio.v1.Inference, with reflection.")


class ClusterConfig(FrozenConfig):
    """Everything a cluster is started from."""

    model: ModelConfig = Field(default=ModelConfig(), description="The model that is served.")
    engine: EngineConfig = Field(default=EngineConfig(), description="The engine of every replica.")
    pools: PoolsConfig = Field(default=PoolsConfig(), description="How many replicas do what.")
    kv: KvConfig = Field(default=KvConfig(), description="The KV manager: leases, heartbeats, waiting.")
    ingress: IngressConfig = Field(default=IngressConfig(), description="The processes behind the doors.")
    redis: RedisConfig = Field(
        default=RedisConfig(), description="Where the cluster keeps what must outlive its KV manager."
    )
    http: HttpConfig = Field(default=HttpConfig(), description="The OpenAI-compatible door.")
    grpc: GrpcConfig = Field(default=GrpcConfig(), description="The gRPC door.")

    @model_validator(mode="after")
    def _ports_differ(self) -> ClusterConfig:
        if self.http.port == self.grpc.port:
            raise ValueError(f"http.port and grpc.port are both {self.http.port}; they must differ")
        return self

    @model_validator(mode="after")
    def _what_is_split_has_prefill_replicas(self) -> ClusterConfig:
        if self.kv.split == "always" and not self.pools.prefill.replicas:
            raise ValueError(
                "kv.split is always and pools.prefill.replicas is 0; start one at least, or set kv.split to auto"
            )
        return self

    @model_validator(mode="after")
    def _exact_can_be_kept(self) -> ClusterConfig:
        dtype, quantization = self.model.dtype or "float32", self.model.quantization
        if self.engine.exact and self.engine.kernels == "triton":
            raise ValueError("engine.exact with engine.kernels triton; allowed with exact: native kernels and torch")
        if not self.engine.exact or (dtype, quantization) == ("float32", None):
            return self
        if dtype == "float16":
            raise ValueError("engine.exact with model.dtype float16; allowed with exact: float32 and bfloat16")
        if self.engine.kernels == "torch":
            raise ValueError(
                f"engine.exact with engine.kernels torch, model.dtype {dtype} and model.quantization {quantization}; "
                "torch is exact with float32 and without quantization, native kernels also otherwise"
            )
        return self

    @model_validator(mode="after")
    def _what_is_asked_suits_the_device(self) -> ClusterConfig:
        if self.engine.device == "cuda" and self.model.quantization is not None:
            raise ValueError(
                f"model.quantization {self.model.quantization} with engine.device cuda; allowed on GPUs: null, "
                "fp8 and int8 weights on GPUs are not there yet"
            )
        for role, pool in self.pools.used.items():
            for name in ("num_gpus", "accelerator_type"):
                if self.engine.device == "cpu" and (value := getattr(pool, name)) is not None:
                    raise ValueError(f"pools.{role}.{name} is {value} with engine.device cpu; allowed on CPUs: null")
        return self


def load(path: Path | str | None = None, overrides: Mapping[str, Any] | None = None) -> ClusterConfig:
    """The configuration in a YAML file, or the defaults; `overrides` are values by dotted path and win."""
    source = "the command line" if path is None else f"{path} and the command line" if overrides else str(path)
    tree = {} if path is None else _read(Path(path))
    for dotted, value in (overrides or {}).items():
        *parents, name = dotted.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
            if not isinstance(branch, dict):
                raise ConfigError(f"{source}: {parent} is {branch!r}; a mapping is needed to set {dotted}")
        branch[name] = value
    return validated(tree, source)


def validated(tree: Mapping[str, Any], source: str) -> ClusterConfig:
    """ConfigError says what is wrong with `tree`, after the name of where it comes from."""
    try:
        return ClusterConfig.model_validate(tree)
    except ValidationError as error:
        mistakes = [explain(ClusterConfig, details) for details in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(mistakes)) from error


def resolved(config: ClusterConfig) -> ClusterConfig:
    """A new configuration in which everything left open is decided."""
    model = config.model
    decided = {
        "served_name": model.served_name or default_name(model.source),
        "dtype": model.dtype or ("float32" if config.engine.exact else "bfloat16"),
    }
    engine = config.engine
    stretch = engine.prompt_stretch or (STRETCH_BESIDE if config.pools.prefill.replicas else STRETCH_ALONE)
    engine = engine.model_copy(update={"prompt_stretch": stretch})
    return config.model_copy(update={"model": model.model_copy(update=decided), "engine": engine})


def schema() -> dict[str, Any]:
    """JSON Schema of the YAML file, for editors and for `bifolio config schema`."""
    return ClusterConfig.model_json_schema()


def show(config: ClusterConfig) -> str:
    """The whole configuration as YAML that `load` reads back, each field under its description.

    Fields that depend on the device, while neither is decided, are comments: as values they would no longer be open.
    """
    return "\n".join(_lines(config)) + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; a mapping such as `model: …` is needed")
    return tree


class _Loader(yaml.SafeLoader):
    """YAML's own loader lets the last of two equal keys win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in seen:
                problem = "is here twice" if key in seen else "is not a name"
                raise yaml.MarkedYAMLError(problem=f"key {key!r} {problem}", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _lines(config: BaseModel, indent: str = "") -> Iterator[str]:
    cls = type(config)
    for name, field in cls.model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield f"{indent}# {field.description}"
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}# {field.description} [{allowed(cls, [name])}]"
            lines = yaml.safe_dump({name: value}, allow_unicode=True, width=10_000).strip()
            yield textwrap.indent(lines, f"{indent}# " if _is_open(config, name) else indent)


def _is_open(config: BaseModel, name: str) -> bool:
    undecided = isinstance(config, EngineConfig) and config.device == "auto" and name in GPU_DEFAULTS
    return undecided and name not in config.model_fields_set
