"""How a replica on a GPU starts, on a device that is none: what is tried, what is measured, how large the cache is. And
in which memory a host's cache lies.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from split import pair

from bifolio.kernels import using
from bifolio.kv_manager.block_store import Unreached
from bifolio.kv_manager.config import KvConfig
from bifolio.protos.errors import ConfigError
from bifolio.protos.messages import BlockId, Generation, ReplicaId
from bifolio.replicas import host_share, start_up
from bifolio.replicas.config import EngineConfig
from bifolio.replicas.core import Core, ReplicaSpec, load_model
from bifolio.replicas.delayed_device import DelayedDevice
from bifolio.replicas.device import Memory
from bifolio.replicas.kv_memory import CUDA_OVERHEAD
from bifolio.replicas.runner import Runner
from bifolio.replicas.warm_up import largest_steps

GIB = 1 << 30
SMALL = {"block_size": 8, "max_batched_tokens": 32, "max_sequences": 8}


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with using("auto"):
        yield


class Measured(DelayedDevice):
    """A device of 8 GiB on which weights take 2, the largest step 1 more, and others have one of what is left."""

    def __init__(self) -> None:
        super().__init__(0)
        self.asked = [
            Memory(8 * GIB, 5 * GIB, 2 * GIB, 2 * GIB),
            Memory(8 * GIB, 4 * GIB, 3 * GIB, 3 * GIB),
            Memory(8 * GIB, 5 * GIB, 2 * GIB, 2 * GIB),
        ]

    def memory(self) -> Memory:
        return self.asked.pop(0)


def core(model: Path, device: DelayedDevice, role: Any = "decode", num_gpus: float = 1.0, **engine: Any) -> Core:
    """As `Core` does on a GPU, where the model is loaded on one."""
    spec = ReplicaSpec(model, "float32", None, EngineConfig(device="cpu"), KvConfig(), ("none", "none"))
    loaded = replace(load_model(spec), device=device)
    spec = replace(spec, engine=EngineConfig(device="cuda", **SMALL, **engine), num_gpus=num_gpus)
    return Core(spec, ReplicaId("one"), role, loaded)


def test_the_largest_steps_are_large_in_every_way() -> None:
    prompts, end, decoding = largest_steps(max_batched_tokens=256, max_sequences=32, max_positions=1000, block_size=16)
    assert (len(prompts), sum(len(row.tokens) for row in prompts)) == (32, 256)
    assert [(row.start, len(row.tokens), len(row.targets)) for row in end] == [(744, 256, 64)]
    assert {(row.start, len(row.tokens), len(row.blocks)) for row in decoding} == {(999, 1, 63)}
    assert len(decoding) == 32
    assert {block for rows in (prompts, end, decoding) for row in rows for block in row.blocks} == {0}


def test_a_context_smaller_than_a_step_is_no_obstacle() -> None:
    for rows in largest_steps(max_batched_tokens=4096, max_sequences=2, max_positions=100, block_size=16):
        assert all(row.start + len(row.tokens) <= 100 for row in rows)


def test_the_cache_takes_what_weights_and_the_largest_step_leave(
    glassllm_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By hand: min(8 - 0.625, 5 + 2) - 2 - 1 = 4 GiB, of which a thousandth is asked for."""
    device = Measured()
    with caplog.at_level(logging.INFO, "bifolio"):
        made = core(glassllm_dir, device, kv_memory="0.001")
    c = made.runner.model.config
    block = c.layers * 2 * c.kv_heads * 8 * c.head_dim * 4
    assert made.cache.blocks == int(4 * GIB * 0.001) // block - 1
    assert device.asked == []
    assert [line for line in caplog.messages if "8.000 GiB" in line], caplog.messages
    assert not made.cache.bytes[0].any(), "the null block is zeros again"


def test_too_little_memory_is_refused_with_the_arithmetic(glassllm_dir: Path) -> None:
    device = Measured()
    device.asked[1] = Memory(8 * GIB, GIB, 7 * GIB, 7 * GIB)
    with pytest.raises(ConfigError, match=r"2\.000 GiB weights.*5\.000 GiB activations"):
        core(glassllm_dir, device)


def test_memory_that_ends_while_the_replica_starts_is_refused_with_the_arithmetic(
    glassllm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time: beside the cache, on which the largest steps are tried once more."""
    tried = []

    def rehearse(runner: Runner, steps: object) -> None:
        tried.append(runner.cache.blocks)
        if len(tried) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it.")

    monkeypatch.setattr(start_up, "warm_up", rehearse)
    with pytest.raises(
        ConfigError, match=r"^[^\n]*room: .*2\.000 GiB weights[^\n]*num_gpus.*Tried to allocate 2\.00 GiB\.$"
    ):
        core(glassllm_dir, Measured(), kv_memory="0.001")
    assert tried[0] == 0
    assert tried[1] > 0


def test_a_replica_that_has_a_part_of_a_gpu_leaves_the_rest_alone(glassllm_dir: Path) -> None:
    whole, half = DelayedDevice(1), DelayedDevice(1)
    core(glassllm_dir, whole, kv_memory="2048 tokens")
    half.says = Memory(4 * GIB, 4 * GIB)
    core(glassllm_dir, half, num_gpus=0.5, kv_memory="2048 tokens")
    assert (whole.most, half.most) == (None, 2 * GIB - CUDA_OVERHEAD)


def host_core(model: Path, role: Any) -> Core:
    engine = EngineConfig(device="cpu", kv_memory="2048 tokens", **SMALL)
    return Core(ReplicaSpec(model, "float32", None, engine, KvConfig(), ("none", "none")), ReplicaId("one"), role)


def test_on_a_host_the_cache_of_who_prefills_can_be_reached_by_others(glassllm_dir: Path) -> None:
    prefill, decode = (host_core(glassllm_dir, role) for role in ("prefill", "decode"))
    assert decode.store.export() == b""
    copy = decode.store.reach(prefill.store.export())
    assert not isinstance(copy, Unreached), copy
    prefill.cache.layer(1)[3] = 1
    copy(BlockId(3), Generation(0, 0), BlockId(5))
    assert decode.cache.layer(1)[5].eq(1).all()
    assert not decode.cache.layer(0).any()


def test_a_host_without_such_memory_prefills_in_its_own(
    glassllm_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(host_share, "_memfd_create", refuse)
    core = host_core(glassllm_dir, "prefill")
    assert core.store.export() == b""
    assert not core.cache.bytes.any()
    assert [record.levelname for record in caplog.records if "memory of this process alone" in record.message] == [
        "WARNING"
    ]


def test_a_host_with_too_little_memory_is_refused_with_the_arithmetic(
    glassllm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(ConfigError, match=r"cpu.*2048 tokens.*engine\.kv_memory.*no memory for .* \d+ bytes"):
        host_core(glassllm_dir, "prefill")


@pytest.mark.parametrize("seed", range(4))
def test_whole_replicas_on_a_device_that_is_late_give_the_ids_of_the_cpu(glassllm_dir: Path, seed: int) -> None:
    prompts = [[5, 300, 41, 77, 512, 9, 23, 640, 88, 31, 7, 450, 61, 19, 200, 33, 4, 18, 95] * 2, [702, 11, 66]]

    async def answers(on: DelayedDevice | None) -> list[list[int]]:
        async with pair(glassllm_dir, on=on, kv_memory="2048 tokens", **SMALL) as it:
            requests = [it.request(prompt, max_tokens=8, temperature=0.0) for prompt in prompts]
            found = await asyncio.gather(*(it.tokens(request) for request in requests))
            await it.settled()
            return found

    def run(on: DelayedDevice | None) -> list[list[int]]:
        return asyncio.run(asyncio.wait_for(answers(on), 60))

    assert run(DelayedDevice(seed)) == run(None)
