"""A model as a replica loads it: with which kernels, under which name, and what is refused before it serves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import NATIVE

from bifolio.kernels import Backend, Quantization, library, using
from bifolio.kv_manager.config import KvConfig
from bifolio.protos.errors import ConfigError
from bifolio.protos.messages import ReplicaId
from bifolio.replicas.batch import Row
from bifolio.replicas.config import EngineConfig
from bifolio.replicas.core import Core, LoadedModel, ReplicaSpec, load_model


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Loading chooses kernels and threads for the process."""
    threads = torch.get_num_threads()
    with using("auto"):
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_FOLDER", tmp_path)


def spec(model: Path, dtype: str = "float32", quantization: Quantization | None = None, **engine: Any) -> ReplicaSpec:
    return ReplicaSpec(model, dtype, quantization, EngineConfig(device="cpu", **engine), KvConfig(), ("none", "none"))


def load(model: Path, *what: Any, **engine: Any) -> LoadedModel:
    return load_model(spec(model, *what, **engine))


def logits(model: Path, loaded: LoadedModel, **engine: Any) -> torch.Tensor:
    core = Core(spec(model, **engine), ReplicaId("one"), "decode", loaded)
    return core.runner.run([Row([2, 5, 7], 0, [1])])


@pytest.mark.parametrize("kernels", [*NATIVE, "torch"])
def test_the_kernels_that_were_asked_for_compute(
    glassllm_dir: Path, kernels: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "bifolio"):
        native = load(glassllm_dir, kernels=kernels).llama.linears[0].native
    assert (native[0].isa if native else "torch") == kernels
    assert f"{kernels} kernels" in caplog.messages[-1]


def test_in_exact_mode_float32_replicas_of_all_instruction_sets_share_a_name(glassllm_dir: Path) -> None:
    """So an answer may go on with another replica, whatever its CPU."""
    names = {load(glassllm_dir, kernels=isa, exact=True).name for isa in NATIVE}
    assert len(names) == 1
    assert load(glassllm_dir, kernels="torch", exact=True).name not in names


def test_blocks_are_offered_to_this_machine_alone_unless_it_is_said_otherwise(glassllm_dir: Path) -> None:
    assert spec(glassllm_dir).listen == "loopback"


def test_without_copies_nobody_is_told_of_the_memory(glassllm_dir: Path) -> None:
    told = []
    for copies in (True, False):
        made = replace(spec(glassllm_dir, kv_memory="512 tokens"), kv=KvConfig(copies=copies))
        told.append(bool(Core(made, ReplicaId("one"), "prefill").info("127.0.0.1:1").memory))
    assert told == [True, False]


def test_other_weights_and_dtypes_are_other_names(glassllm_dir: Path) -> None:
    whats = [("float32", None), ("float32", "int8"), ("bfloat16", None), ("bfloat16", "int8")]
    assert len({load(glassllm_dir, *what, exact=exact).name for what in whats for exact in (False, True)}) == 8


@pytest.mark.usefixtures("nothing_built")
def test_without_libraries_a_replica_serves_with_torch_after_one_warning(
    glassllm_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "bifolio"):
        loaded = load(glassllm_dir)
        got = logits(glassllm_dir, loaded)
    (record,) = caplog.records
    assert "install g++" in record.message
    with using("torch"):
        assert torch.equal(got, logits(glassllm_dir, load(glassllm_dir, kernels="torch"), kernels="torch"))


@pytest.mark.usefixtures("nothing_built")
def test_kernels_that_were_not_built_are_a_mistake_of_the_configuration(glassllm_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kernels: native kernels: 'avx2', with none built; install g\+\+"):
        load(glassllm_dir, kernels="avx2")


@pytest.mark.usefixtures("nothing_built")
@pytest.mark.parametrize("what", [("bfloat16", None), ("float32", "int8")])
def test_where_torch_computes_exactness_that_it_does_not_keep_is_refused(
    glassllm_dir: Path, what: tuple[str, Quantization | None]
) -> None:
    with pytest.raises(ConfigError, match=r"engine\.exact with torch kernels: .* use float32 without quantization"):
        load(glassllm_dir, *what, exact=True)
