"""The ways of computing on a device of its own, which is late with everything: also blocks that never leave it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bifolio.kernels import using
from bifolio.kv_manager.config import KvConfig
from bifolio.replicas.config import EngineConfig
from bifolio.replicas.core import ReplicaSpec, load_model
from bifolio.replicas.delayed_device import DelayedDevice
from bifolio.replicas.verify import Verifier


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with using("auto"):
        yield


def test_split_is_tried_as_messages_and_on_the_device(glassllm_dir: Path) -> None:
    engine = EngineConfig(device="cpu", block_size=8, max_batched_tokens=32, max_sequences=8)
    spec = ReplicaSpec(glassllm_dir, "float32", None, engine, KvConfig(), ("none", "none"))
    model = replace(load_model(spec), device=DelayedDevice(5))
    with Verifier(spec, model) as verifier:
        answers = [verifier.answer(prompt, 3) for prompt in ([5, 300, 41, 77, 512, 9, 23, 640, 88, 31], [702, 11])]
        ways = {way.name: way for way in verifier.ways(answers, lambda: None)}
        assert len(ways) == verifier.ways_there
    assert {"split", "split, copied"} <= ways.keys()
    assert {(way.compared, way.equal) for name, way in ways.items() if "split" in name} == {(6, 6)}
