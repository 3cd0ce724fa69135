"""One YAML, one frozen object, and a clear word about every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from bifolio import kernels
from bifolio.cluster.config import ClusterConfig, load, resolved, schema, show
from bifolio.kv_manager.config import TlsConfig
from bifolio.protos.errors import ConfigError
from bifolio.replicas import config

DEPLOY = Path(__file__).parents[3] / "deploy"
EXAMPLE = DEPLOY / "cluster.example.yaml"


def load_text(tmp_path: Path, text: str, **overrides: object) -> ClusterConfig:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load(path, overrides)


@pytest.mark.parametrize(
    ("given", "stretch"), [({}, 1.5), ({"pools.prefill.replicas": 0}, 4.0), ({"engine.prompt_stretch": 1}, 1.0)]
)
def test_prompts_hold_up_streams_least_where_prefill_replicas_take_them(given, stretch):
    assert resolved(load(None, given)).engine.prompt_stretch == stretch


def test_the_example_is_a_configuration() -> None:
    config = load(EXAMPLE)
    assert config.pools.decode.replicas == 2
    assert config.kv.admission_queue == 64


def test_the_gpu_example_is_a_configuration() -> None:
    config = load(DEPLOY / "cluster.gpu.example.yaml")
    assert (config.engine.device, config.engine.block_size, config.engine.kv_memory) == ("cuda", 64, "auto")
    assert (config.pools.prefill.num_gpus, config.pools.decode.num_gpus) == (0.5, 0.5)
    assert config.pools.decode.accelerator_type is None


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_text(tmp_path, "# nothing\n") == load() == ClusterConfig()


def test_show_is_read_back_as_the_same_configuration(tmp_path: Path) -> None:
    config = resolved(load(EXAMPLE))
    assert load_text(tmp_path, show(config)) == config


def test_a_password_of_redis_is_shown_where_it_is_read_back_and_nowhere_else(tmp_path: Path) -> None:
    config = load_text(tmp_path, "redis: {url: 'redis://:s3cret@localhost:6380/1'}")
    assert load_text(tmp_path, show(config)) == config
    assert "s3cret" not in repr(config)
    with pytest.raises(ConfigError) as refused:
        load_text(tmp_path, "redis: {url: 'redis://:s3cret@localhost:6380/one'}")
    assert "s3cret" not in refused.value.message


TLS = "kv: {tls: {ca: /tls/ca.pem, certificate: /tls/replica.pem, key: /tls/replica.key}}"


def test_files_of_tls_are_read_back_and_their_name_has_a_default(tmp_path: Path) -> None:
    config = load_text(tmp_path, TLS)
    assert config.kv.tls is not None
    assert (config.kv.tls.key, config.kv.tls.name) == ("/tls/replica.key", "bifolio")
    assert load_text(tmp_path, show(config)) == config
    assert load_text(tmp_path, show(load())).kv.tls is None


def test_tls_is_whole_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv\.tls\.key: is missing; allowed: a text"):
        load_text(tmp_path, "kv: {tls: {ca: /ca.pem, certificate: /replica.pem}}")


def test_overrides_win_and_reach_any_depth(tmp_path: Path) -> None:
    config = load_text(tmp_path, "pools: {prefill: {replicas: 3}}", **{"pools.prefill.replicas": 0, "http.port": 80})
    assert (config.pools.prefill.replicas, config.http.port) == (0, 80)


def test_resolving_names_the_model_and_leaves_the_original_open() -> None:
    config = load(None, {"model.source": "/models/Tiny.Q4.gguf"})
    assert resolved(config).model.served_name == "Tiny.Q4"
    assert config.model.served_name is None
    named = load(None, {"model.served_name": "mine"})
    assert resolved(named).model.served_name == "mine"


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, "bfloat16"),
        ({"engine.exact": True}, "float32"),
        ({"engine.exact": True, "model.dtype": "float32"}, "float32"),
        ({"model.dtype": "float16"}, "float16"),
    ],
)
def test_exact_decides_a_dtype_that_was_left_open(given: dict[str, object], dtype: str) -> None:
    assert resolved(load(None, given)).model.dtype == dtype


def test_exact_is_never_float16() -> None:
    with pytest.raises(ConfigError, match=r"engine\.exact with model\.dtype float16; allowed with exact: float32"):
        load(None, {"engine.exact": True, "model.dtype": "float16"})


def test_exact_is_never_triton() -> None:
    with pytest.raises(ConfigError, match=r"engine\.exact with engine\.kernels triton; allowed with exact: native"):
        load(None, {"engine.exact": True, "engine.kernels": "triton"})


@pytest.mark.parametrize("model", [{"model.dtype": "bfloat16"}, {"model.quantization": "int8"}])
def test_exact_is_float32_in_torch(model: dict[str, str]) -> None:
    assert load(None, {"engine.exact": True, **model}).engine.exact
    with pytest.raises(ConfigError, match=r"engine\.exact with engine\.kernels torch"):
        load(None, {"engine.exact": True, "engine.kernels": "torch", **model})


def test_the_kernels_to_choose_from_are_those_there_are() -> None:
    assert get_args(config.Backend) == get_args(kernels.Backend)
    assert get_args(config.Quantization) == get_args(kernels.Quantization)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pools: {prefil: {replicas: 2}}", "pools.prefil: unknown name; did you mean pools.prefill?"),
        ("block_size: 32", "block_size: unknown name; did you mean engine.block_size?"),
        (
            "engine: {block_sise: 3}",
            "did you mean engine.block_size? allowed: engine.block_size, engine.context",
        ),
        ("qqq: 1", "qqq: unknown name; allowed: engine, grpc, http, ingress, kv, model, pools, redis"),
        ("http: {port: '80'}", "http.port: got '80'; allowed: a whole number, at least 1, at most 65535"),
        ("http: {port: 0}", "http.port: got 0; allowed: a whole number, at least 1, at most 65535"),
        ("model: {dtype: fp8}", "model.dtype: got 'fp8'; allowed: one of bfloat16, float16, float32 or null"),
        (
            "model: {served_name: 3}",
            "model.served_name: got 3; allowed: a text, of length at least 1 or null",
        ),
        ("engine: 3", "engine: got 3; allowed: an object with any of device, block_size"),
        (
            "kv: {split: always}\npools: {prefill: {replicas: 0}}",
            "kv.split is always and pools.prefill.replicas is 0; start one at least, or set kv.split to auto",
        ),
        ("engine: {cache_tokens: 2048}", "engine: cache_tokens is now kv_memory; write `kv_memory: 2048 tokens`"),
        ("engine: {cache_tokens: null}", "cache_tokens is now kv_memory; write `kv_memory: 16384 tokens` in its place"),
        (
            "engine: {context: 4096, kv_memory: 2048 tokens}",
            "engine: context is 4096, and kv_memory 2048 tokens; lower",
        ),
        ("model: {quantization: int4}", "model.quantization: got 'int4'; allowed: int8 or null"),
        ("pools: {decode: {accelerator_type: ' '}}", "pools.decode.accelerator_type: got ' '; allowed: "),
        ("pools: {decode: {labels: {zone: 1}}}", "got 1; allowed: an object of label names and values, all of them"),
        ("engine: {kv_memry: auto}", "engine.kv_memry: unknown name; did you mean engine.kv_memory?"),
        (
            "engine: {kv_memory: 2048}",
            "engine.kv_memory: got 2048; allowed: auto, a fraction above 0 to 1 of the memory that is left, bytes such "
            "as 12 GiB, or tokens such as 16384 tokens",
        ),
        ("engine: {kv_memory: [1]}", "engine.kv_memory: got [1]; allowed: auto, a fraction"),
        ("engine: {kv_memory: 9 tokens}", "engine.kv_memory: got 9 tokens; allowed: 256 to 2147483648 tokens"),
        ("engine: {device: gpu}", "engine.device: got 'gpu'; allowed: one of auto, cuda, cpu"),
        (
            "engine: {context: 1}",
            "engine.context: got 1; allowed: a whole number, at least 2, at most 2147483648 or null",
        ),
        (
            "engine: {device: cuda, exact: true}",
            "engine: exact with device cuda; allowed with exact: device auto or cpu",
        ),
        (
            "engine: {device: cuda, kernels: avx2}",
            "engine: kernels avx2 with device cuda; allowed on GPUs: auto, triton and torch",
        ),
        (
            "engine: {device: cpu, kv_memory: 0.5}",
            "engine: kv_memory is 0.5 with device cpu; allowed on CPUs: auto, bytes or tokens",
        ),
        (
            "{engine: {device: cuda}, model: {quantization: int8}}",
            "model.quantization int8 with engine.device cuda; allowed on GPUs: null, fp8 and int8 weights on GPUs are "
            "not there yet",
        ),
        ("engine: {device: cuda, max_batched_tokens: 256}", "is 256, but must be at least 320: a step holds a block"),
        (
            "{engine: {device: cpu}, pools: {decode: {num_gpus: 1}}}",
            "pools.decode.num_gpus is 1.0 with engine.device cpu; allowed on CPUs: null",
        ),
        (
            "{engine: {device: cpu}, pools: {prefill: {accelerator_type: L4}}}",
            "pools.prefill.accelerator_type is L4 with engine.device cpu; allowed on CPUs: null",
        ),
        (
            "pools: {decode: {num_gpus: 2}}",
            "pools.decode.num_gpus: got 2; allowed: a number, at least 0.0001, at most 1",
        ),
        ("pools: {decode: {num_gpus: 0}}", "pools.decode.num_gpus: got 0; allowed: a number, at least 0.0001"),
        ("pools: {decode: {num_gpus: 0.33333}}", "got 0.33333; allowed: 0.0001 to 1, with at most 4 digits after the"),
        ("pools: {decode: {labels: {zone: 1}}}", "pools.decode.labels: got 1; allowed: an object of label names and"),
        (
            "pools: {decode: {labels: {zone: '!a'}}}",
            "pools.decode.labels: got 'zone': '!a'; allowed: names and values of",
        ),
        (
            "pools: {decode: {replicas: 0}}",
            "pools.decode.replicas: got 0; allowed: a whole number, at least 1",
        ),
        ("kv: {tls: on}", "kv.tls: got True; allowed: an object with any of ca, certificate, key, name, or null"),
        ("kv: {tls: {certificat: /a}}", "kv.tls.certificat: unknown name; did you mean kv.tls.certificate?"),
        (
            "kv: {tls: {ca: /a, certificate: /b, key: c.key}}",
            "kv.tls.key: 'c.key' is not an absolute path; needed is one, the same on every machine",
        ),
        ("kv: {copies: 1}", "kv.copies: got 1; allowed: true or false"),
        ("kv: {stall_s: 0}", "kv.stall_s: got 0; allowed: a number, at least 0.1, at most 600"),
        ("kv: {heartbeat_s: .nan}", "kv.heartbeat_s: got nan; allowed: a number, at least"),
        ("redis: {url: 6379}", "redis.url: got 6379; allowed: redis://[:PASSWORD@]HOST[:PORT][/DATABASE], rediss://"),
        (
            "redis: {url: localhost}",
            "redis.url: this address begins with none of redis://, rediss:// and unix://; allo",
        ),
        ("redis: {url: 'redis://h/main'}", "redis.url: what follows the host is not the number of a database; allowed"),
        ("redis: {ur: x}", "redis.ur: unknown name; did you mean redis.url?"),
        ("http: {port: 9000}", "http.port and grpc.port are both 9000"),
        ("engine: {max_batched_tokens: 16}", "engine: max_batched_tokens is 16, but must be at least 48"),
        ("a: [", "is not YAML"),
        ("http: {}\nhttp: {}", "key 'http' is here twice"),
        ("1: 2", "key 1 is not a name"),
        ("- model", "holds a list"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    assert says in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"http\.port.*; model\.dtype|model\.dtype.*; http\.port"):
        load_text(tmp_path, "model: {dtype: x}\nhttp: {port: x}")


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        load(tmp_path / "none.yaml")


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().http.port = 1  # type: ignore[misc]


def test_every_field_is_described_and_bounded() -> None:
    def walk(cls: type[BaseModel]) -> None:
        for name, field in cls.model_fields.items():
            assert field.description, f"{cls.__name__}.{name}"
            assert field.description.endswith(".")
            assert not field.is_required(), f"{cls.__name__}.{name}"
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                walk(field.annotation)
            elif field.annotation in (int, float):
                assert len(field.metadata) >= 2, f"{cls.__name__}.{name} has no range"

    walk(ClusterConfig)
    assert all(field.description for field in TlsConfig.model_fields.values())


def test_the_schema_describes_every_section() -> None:
    properties = schema()["properties"]
    assert set(properties) == set(yaml.safe_load(show(load())))
