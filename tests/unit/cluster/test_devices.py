"""What replicas compute on: tables of what is asked for, what the cluster has, and what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bifolio.cluster.app import actor_options, replica_environment
from bifolio.cluster.config import ClusterConfig, load, show
from bifolio.cluster.devices import WHOLE, Node, describe, on_devices
from bifolio.protos.errors import ConfigError
from bifolio.replicas.config import EngineConfig

H200 = frozenset({"H200"})
CPU = (Node(),)
ONE, TWO, FOUR = ((Node(n, H200),) for n in (1, 2, 4))
PAIR = (Node(1, H200), Node(1, H200))
MIXED = (Node(2, H200, {"zone": "a", "ray.io/node-id": "f00"}), Node(4, frozenset({"L4"}), {"zone": "b"}), Node())


def asked(prefill: int = 1, decode: int = 1, **given: Any) -> ClusterConfig:
    """`prefill_num_gpus=0.5` is a pool's field, `kernels="triton"` the engine's, `quantization` the model's."""
    overrides: dict[str, Any] = {"pools.prefill.replicas": prefill, "pools.decode.replicas": decode}
    for name, value in given.items():
        role, _, field = name.partition("_")
        if role in ("prefill", "decode"):
            overrides[f"pools.{role}.{field}"] = value
        else:
            overrides[f"{'engine' if name in EngineConfig.model_fields else 'model'}.{name}"] = value
    return load(None, overrides)


def shares(config: ClusterConfig) -> tuple[float | None, float | None]:
    return config.pools.prefill.num_gpus, config.pools.decode.num_gpus


def test_a_node_is_read_as_ray_describes_it() -> None:
    resources = {"CPU": 16.0, "GPU": 8.0, "accelerator_type:H200": 1.0, "node:10.0.0.1": 1.0}
    assert Node.of(resources, {"zone": "a"}) == Node(8, H200, {"zone": "a"})
    assert Node.of({"CPU": 2.0}, {}) == Node()


@pytest.mark.parametrize(
    ("given", "nodes", "device"),
    [
        ({}, CPU, "cpu"),
        ({}, ONE, "cuda"),
        ({"device": "cpu"}, ONE, "cpu"),
        ({"device": "cuda"}, ONE, "cuda"),
        ({"exact": True}, ONE, "cpu"),
        ({"quantization": "int8"}, ONE, "cpu"),
        ({"kernels": "avx512"}, ONE, "cpu"),
        ({"kernels": "avx2"}, ONE, "cpu"),
        ({"kernels": "generic"}, ONE, "cpu"),
        ({"kernels": "torch"}, ONE, "cuda"),
        ({"kernels": "triton"}, ONE, "cuda"),
        ({"kernels": "triton"}, CPU, "cpu"),
        ({"kernels": "triton", "device": "cpu"}, ONE, "cpu"),
        ({"dtype": "float16", "device": "cuda"}, ONE, "cuda"),
        ({"kv_memory": 0.5}, ONE, "cuda"),
    ],
)
def test_auto_takes_a_gpu_unless_something_is_the_cpus(given: dict[str, Any], nodes: Any, device: str) -> None:
    config = on_devices(asked(**given), nodes)
    assert config.engine.device == device
    assert on_devices(config, nodes) == config, "what is decided stays"


@pytest.mark.parametrize(
    ("given", "nodes", "sizes"),
    [
        ({}, CPU, (16, 256, 32)),
        ({}, ONE, (64, 2048, 256)),
        ({"device": "cpu"}, ONE, (16, 256, 32)),
        ({"block_size": 16}, ONE, (16, 2048, 256)),  # set, though to what it is on CPUs
        ({"max_sequences": 128, "max_batched_tokens": 512}, ONE, (64, 512, 128)),
        ({"max_sequences": 300}, ONE, (64, 2048, 300)),  # which a CPU's defaults would refuse
        ({"max_batched_tokens": 64}, CPU, (16, 64, 32)),  # which a GPU's would
    ],
)
def test_what_is_not_set_suits_the_device(given: dict[str, Any], nodes: Any, sizes: tuple[int, ...]) -> None:
    engine = on_devices(asked(**given), nodes).engine
    assert (engine.block_size, engine.max_batched_tokens, engine.max_sequences) == sizes


def test_a_configuration_that_was_shown_is_still_open(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    given: dict[str, Any] = {"max_sequences": 64, "decode_labels": {"zone": "a", "ray.io/region": "x"}}
    file.write_text(show(asked(**given)))
    assert "  # block_size: 16\n" in file.read_text()
    assert "\n  max_sequences: 64\n" in file.read_text()
    assert load(file) == asked(**given)
    nodes = (Node(1, H200, given["decode_labels"]),)
    assert on_devices(load(file), nodes) == on_devices(asked(**given), nodes)
    decided = on_devices(asked(), ONE)
    file.write_text(show(decided))
    assert "\n  block_size: 64\n" in file.read_text()
    assert load(file) == decided


@pytest.mark.parametrize(
    ("given", "nodes", "expected", "line"),
    [
        ({}, CPU, (None, None), "device cpu"),
        ({}, ONE, (0.5, 0.5), "device cuda: 1 GPU, half of it for each of 1 prefill and 1 decode replica"),
        ({}, TWO, (1, 1), "device cuda: 2 GPUs, one for each of 1 prefill and 1 decode replica"),
        ({}, PAIR, (1, 1), "device cuda: 2 GPUs, one for each of 1 prefill and 1 decode replica"),
        ({"prefill": 0}, ONE, (None, 1), "device cuda: 1 GPU, all of it for 1 decode replica"),
        ({"prefill": 0}, FOUR, (None, 1), "device cuda: 4 GPUs, one for 1 decode replica"),
        (
            {"decode": 2},
            ONE,
            (0.3333, 0.3333),
            "device cuda: 1 GPU, 0.3333 of it for each of 1 prefill and 2 decode replicas",
        ),
        (
            {"decode": 2},
            TWO,
            (0.5, 0.5),
            "device cuda: 2 GPUs, half of one for each of 1 prefill and 2 decode replicas",
        ),
        (
            {"prefill": 3, "decode": 4},
            FOUR,
            (0.5, 0.5),
            "device cuda: 4 GPUs, half of one for each of 3 prefill and 4 decode replicas",
        ),
        (
            {"decode_num_gpus": 0.7},
            ONE,
            (0.25, 0.7),  # a quarter is the largest 1/k beside it
            "device cuda: 1 GPU, 0.25 of it for each of 1 prefill, 0.7 of it for each of 1 decode replica",
        ),
        (
            {"prefill_num_gpus": 0.4, "decode_num_gpus": 0.6},
            ONE,
            (0.4, 0.6),
            "device cuda: 1 GPU, 0.4 of it for each of 1 prefill, 0.6 of it for each of 1 decode replica",
        ),
        (
            {"prefill_accelerator_type": "H200", "decode": 8, "decode_accelerator_type": "L4"},
            MIXED,
            (1, 0.5),  # the one pool's nodes are not the other's: each shares its own
            "device cuda: 6 GPUs, one for each of 1 prefill, half of one for each of 8 decode replicas",
        ),
        (
            {"prefill": 4, "decode": 2, "decode_labels": {"zone": "a"}},
            MIXED,
            (1, 1),  # prefill keeps off the GPUs that only decode can take
            "device cuda: 6 GPUs, one for each of 4 prefill and 2 decode replicas",
        ),
    ],
)
def test_gpus_are_shared(
    given: dict[str, Any], nodes: Any, expected: tuple[float | None, float | None], line: str
) -> None:
    config = on_devices(asked(**given), nodes)
    assert shares(config) == expected
    assert describe(config, nodes) == line


@given(st.integers(0, 12), st.integers(1, 12), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_an_open_share_is_one_over_the_replicas_on_each_gpu(prefill: int, decode: int, nodes: list[int]) -> None:
    gpus = sum(nodes)
    if gpus == 0:
        return
    config = on_devices(asked(prefill, decode), [Node(n) for n in nodes])
    each = -(-(prefill + decode) // gpus)
    assert config.pools.decode.num_gpus == (WHOLE // each) / WHOLE


@pytest.mark.parametrize(
    ("given", "nodes", "says"),
    [
        ({"device": "cuda"}, CPU, "engine.device is cuda, and the cluster has no GPU; set it to auto or cpu, or start"),
        (
            {"prefill": 2, "prefill_num_gpus": 1, "decode_num_gpus": 0.5},
            ONE,
            "more GPUs than there are: 2 prefill x 1 + 1 decode x 0.5 = 2.5, the cluster has 1; set fewer replicas or",
        ),
        (
            {"prefill": 0, "decode": 3, "decode_num_gpus": 0.6},
            TWO,
            "3 decode x 0.6 = 1.8, the cluster has 2; a replica's share lies whole on one GPU of its nodes, and so",
        ),
        (
            {"prefill": 2, "prefill_num_gpus": 1},
            TWO,
            "2 prefill x 1 = 2, the cluster has 2, and nothing is left for 1 decode; set fewer replicas",
        ),
        (
            {"prefill": 0, "decode": 5, "decode_num_gpus": 0.5, "decode_accelerator_type": "H200"},
            MIXED,
            "5 decode x 0.5 = 2.5, their nodes have 2; set fewer",
        ),
        (
            {"decode_accelerator_type": "H100"},
            MIXED,
            "pools.decode.accelerator_type is H100, and no node with a GPU has that; there are: H200, L4; set",
        ),
        ({"decode_accelerator_type": "H100"}, (Node(1),), "has that; there are: none; set it"),
        (
            {"prefill_labels": {"zone": "c"}},
            MIXED,
            "pools.prefill.labels asks for zone=c, and no node with a GPU has all of that; there are: zone=a, zone=b",
        ),
        (
            {"prefill_labels": {"zone": "b"}, "prefill_accelerator_type": "H200"},
            MIXED,
            "pools.prefill.labels asks for zone=b with accelerator_type H200, and no node with a GPU has all of that",
        ),
        ({"decode_labels": {"zone": "a"}}, CPU, "pools.decode.labels asks for zone=a, and no node has all of"),
        (
            {"decode_num_gpus": 0.5},
            CPU,
            "engine.device auto is cpu here (the cluster has no GPU): pools.decode.num_gpus is 0.5 with engine.device",
        ),
        (
            {"decode_accelerator_type": "H200", "exact": True},
            ONE,
            "auto is cpu here (engine.exact): pools.decode.accelerator_type is H200 with engine.device cpu; allowed",
        ),
        (
            {"kv_memory": 0.5},
            CPU,
            "auto is cpu here (the cluster has no GPU): engine: kv_memory is 0.5 with device cpu; allowed on CPUs: "
            "auto, bytes or tokens",
        ),
        (
            {"kv_memory": 0.5, "quantization": "int8"},
            ONE,
            "engine.device auto is cpu here (model.quantization int8): engine: kv_memory is 0.5 with device cpu",
        ),
        (
            {"max_batched_tokens": 256},
            ONE,
            "auto is cuda here (1 GPU): engine: max_batched_tokens is 256, but must be at least 320: a step holds a "
            "block (block_size 64) and one token of each sequence (max_sequences 256)",
        ),
        (
            {"max_sequences": 256},
            CPU,
            "auto is cpu here (the cluster has no GPU): engine: max_batched_tokens is 256, but must be at least 272",
        ),
    ],
)  # fmt: skip
def test_what_the_cluster_cannot_give_is_refused(given: dict[str, Any], nodes: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        on_devices(asked(**given), nodes)
    assert says in caught.value.message


def test_shares_that_fit_only_in_one_way_do() -> None:
    """0.4 + 0.3 + 0.3 on each: whoever begins with the largest has 0.4 + 0.4, and no room for the last."""
    config = asked(2, 4, prefill_num_gpus=0.4, decode_num_gpus=0.3)
    assert shares(on_devices(config, TWO)) == (0.4, 0.3)


def test_a_pool_without_replicas_asks_for_nothing() -> None:
    config = asked(0, prefill_accelerator_type="H100", prefill_num_gpus=1, prefill_labels={"zone": "c"})
    assert on_devices(config, CPU).engine.device == "cpu"
    assert on_devices(config, ONE).pools.decode.num_gpus == 1


def test_ray_is_told_what_a_pool_asks_for() -> None:
    given = {"prefill_accelerator_type": "H200", "prefill_labels": {"zone": "a"}}
    config = on_devices(asked(**given), (Node(1, H200, {"zone": "a"}),))
    environment = {"num_cpus": 0, "runtime_env": {"env_vars": replica_environment(config)}}
    options = actor_options(config, "prefill")
    assert options == {
        **environment, "num_gpus": 0.5, "accelerator_type": "H200", "label_selector": {"zone": "a"}
    }  # fmt: skip
    assert actor_options(config, "decode") == {**environment, "num_gpus": 0.5}
    assert "PYTORCH_CUDA_ALLOC_CONF" not in replica_environment(config)


def test_on_cpus_ray_is_told_nothing_of_gpus() -> None:
    config = on_devices(asked(decode_labels={"zone": "a"}, exact=True), (Node(0, labels={"zone": "a"}),))
    environment = {"num_cpus": 0, "runtime_env": {"env_vars": replica_environment(config)}}
    assert "MKL_CBWR" in replica_environment(config)
    assert actor_options(config, "prefill") == environment
    assert actor_options(config, "decode") == {**environment, "label_selector": {"zone": "a"}}
