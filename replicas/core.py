"""What computes in a replica of either role: the model in an engine, its KV cache, and the tags of its blocks.

Knows nothing about Ray, the KV manager's decisions, gRPC or text.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from bifolio.kernels import Layout, Quantization, kv_layout, runs_triton, self_check, use
from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.heads import Part, whole
from bifolio.kv_manager.secret import BYTES
from bifolio.kv_manager.tags import BlockTags
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.protos.errors import ConfigError
from bifolio.protos.measures import Speeds
from bifolio.protos.messages import Geometry, ReplicaId, ReplicaInfo, Role

from .config import EngineConfig
from .cores import Cores
from .device import Device, open_device
from .drafts import RowCost
from .engine import Engine, EngineThread
from .kv_memory import context_of
from .llama import Llama
from .model_files import fingerprint
from .rates import Average
from .scheduler import Scheduler
from .sequence import Command, Event
from .start_up import prepare
from .weights import load

logger = logging.getLogger(__name__)

GPU_ROW_SHARE = 0.005  # as `RowCost` has it, until it has seen some: weights take as long as 200 tokens' products
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Of this machine alone, or at the address of its Ray node: only who starts the cluster knows whether it has others. Ray
# does not tell: its nodes have an address in the network even where all of them are here, and others may join later
Listen = Literal["loopback", "node"]


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """All that a replica is told at its start."""

    model: Path
    dtype: str
    quantization: Quantization | None
    engine: EngineConfig
    kv: KvConfig
    manager: tuple[str, str]  # name and namespace of the KV manager actor
    num_gpus: float = 1.0  # its share of a GPU, where it computes on one
    listen: Listen = "loopback"  # where its Prefill stream is, if it prefills
    cores: int = 0  # of its host, that its engine computes on alone; 0: it shares all


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory; `name` says what it computes: weights, dtype, quantization, if exact the machine's bits."""

    llama: Llama
    name: str
    device: Device


def load_model(spec: ReplicaSpec) -> LoadedModel:
    """ConfigError for a model that cannot be computed here: kernels that are not, exactness that is not kept."""
    assert spec.engine.device != "auto", "the configuration is resolved"
    torch.set_num_threads(spec.engine.threads)
    device = open_device(spec.engine.device)
    began = time.monotonic()
    try:
        native = use(spec.engine.kernels)
    except ValueError as error:
        raise ConfigError(f"engine.kernels: {error}") from error
    kernels = "triton" if runs_triton(device.torch) else native if device.torch.type == "cpu" else "torch"
    config, weights = load(spec.model, DTYPES[spec.dtype], device.torch)
    context = context_of(config, spec.engine, DTYPES[spec.dtype].itemsize)
    config = replace(config, max_positions=context)  # what can ever be used
    try:
        llama = Llama(config, weights, quantization=spec.quantization, exact=spec.engine.exact)
    except ValueError as error:
        raise ConfigError(f"engine.exact with {kernels} kernels: {error}; use float32 without quantization") from error
    parts = [fingerprint(spec.model), spec.dtype, *([spec.quantization] if spec.quantization else [])]
    if spec.engine.exact:
        parts.append(f"exact-{_bits_of(llama)}")
    took, name = time.monotonic() - began, "/".join(parts)
    logger.info("model loaded on %s in %.1f s: %s, %s kernels", _described(device), took, name, kernels)
    return LoadedModel(llama, name, device)


def _described(device: Device) -> str:
    return torch.cuda.get_device_name(device.torch) if device.torch.type == "cuda" else device.torch.type


def _bits_of(model: Llama) -> str:
    c = model.config
    try:
        return self_check(model.linears, c.heads, c.kv_heads, c.head_dim, map(c.window, range(c.layers)))
    except ArithmeticError as error:
        raise ConfigError(
            f"engine.exact: {error}, on this machine with {torch.get_num_threads()} threads; turn engine.exact off, "
            "or serve on a CPU with MKL and AVX2"
        ) from error


class Core:
    """Loads the model when it is made, unless it is given; computes from `start` to `stop`."""

    def __init__(self, spec: ReplicaSpec, replica: ReplicaId, role: Role, model: LoadedModel | None = None) -> None:
        model = model or load_model(spec)
        config, engine, device = model.llama.config, spec.engine, model.device
        plain = runs_triton(device.torch)  # its kernels read no other
        layout: Layout = (
            "plain" if plain else kv_layout(DTYPES[spec.dtype], config.head_dim, engine.block_size, device.torch.type)
        )
        made = prepare(
            model.llama,
            engine,
            layout,
            device,
            share=spec.num_gpus,
            decodes=role == "decode",
            copies=spec.kv.copies,
        )
        self.cache, self.store, self.runner, self.eager = made.cache, made.store, made.runner, made.eager
        self._cache_lines, blocks = made.sizing.lines, self.cache.blocks
        self.geometry = Geometry(
            model.name, config.layers, config.kv_heads, config.head_dim, engine.block_size, spec.dtype, layout
        )
        self.vocabulary, self.positions = config.vocab_size, config.max_positions
        self.tags = BlockTags(replica, blocks, grows=role == "decode", growth_s=spec.kv.growth_s)
        scheduler = Scheduler(
            max_batched_tokens=engine.max_batched_tokens,
            max_sequences=engine.max_sequences,
            block_size=engine.block_size,
            draw=self.tags.draw,
            starve_s=spec.kv.starve_s,
            speculate=engine.speculate,
            prompt_stretch=engine.prompt_stretch or 0.0,
            row_share=GPU_ROW_SHARE if device.torch.type == "cuda" else RowCost.FIRST,
        )
        self._engine = Engine(self.runner, scheduler)
        self.transfer = Average()  # seconds that a hand-over to this replica added to its prefill
        self.meter = TrafficMeter()
        self.secret = secrets.token_bytes(BYTES)  # who can sign with it has the KV manager's word
        self.cores = Cores(role, spec.cores)
        if spec.cores:
            own = ", ".join(map(str, sorted(self.cores.own)))
            logger.info("%s computes on core %s", replica, own or "any: too few are free for it alone")
        self._thread: EngineThread | None = None
        self.replica, self.role, self.kv, self._spec = replica, role, spec.kv, spec
        self.flush_s = engine.flush_s
        self.patience_s = max(spec.kv.stall_s, engine.stall_s)  # with a peer that says nothing: it may be in a step

    def start(self, deliver: Callable[[list[Event]], None]) -> None:
        """Compute from now on. The events of every step go to `deliver`, which is called in the engine's thread."""
        self._thread = EngineThread(self._engine, deliver, self.cores)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        self.cores.release()

    def submit(self, command: Command) -> None:
        """From any thread."""
        assert self._thread is not None, "the core has not been started"
        self._thread.submit(command)

    def check(self) -> None:
        """Raise if the replica cannot do its work."""
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError(f"the engine thread of {self.replica} has ended")
        if stalled := self.stalled_s():
            raise RuntimeError(f"the engine of {self.replica} has ended no step for {stalled:.1f} s")

    def standing_s(self) -> float:
        """For how long the engine has ended no step, with work at hand."""
        return 0.0 if self._thread is None else self._thread.standing_s()

    def stalled_s(self) -> float:
        """The same, once that is longer than a step may take; until then 0."""
        standing = self.standing_s()
        return standing if standing >= self._spec.engine.stall_s else 0.0

    @property
    def parts(self) -> tuple[Part, ...]:
        """The caches that its blocks are in."""
        return whole(self.store, self.geometry)

    @property
    def speeds(self) -> Speeds:
        """As measured lately."""
        return Speeds(self._engine.prefill_speed.value, self.transfer.value)

    def info(self, address: str = "") -> ReplicaInfo:
        """How the replica introduces itself; `address` is that of its Prefill stream, if it has one."""
        return ReplicaInfo(
            self.replica,
            self.role,
            self.geometry,
            self.cache.blocks,
            address,
            os.getpid(),
            self._spec.engine.max_sequences,
            self.store.export() if address and self.kv.copies else b"",
            self._cache_lines,
            self.secret,
        )
