"""How large a replica's KV cache is: what `engine.kv_memory` asks for, what there is, and the arithmetic between.

Pure, and without torch: bytes come in measured, blocks go out with the formula that a person can check.

    |<------------------------------- total x share ------------------------------>|
    | overhead | weights | activations | graphs | spare | blocks, the null block first |
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Literal

from bifolio.protos.errors import ConfigError

if TYPE_CHECKING:  # not to be needed by those that read a configuration
    from .config import EngineConfig
    from .device import Memory
    from .model_config import LlamaConfig

FORMS = "auto, a fraction above 0 to 1 of the memory that is left, bytes such as 12 GiB, or tokens such as 16384 tokens"
CPU_FORMS = "auto, bytes or tokens"  # the memory left on a CPU belongs to everybody
AUTO_TOKENS = 16384  # on CPUs
LEAST_TOKENS, MOST_TOKENS = 256, 2**31

# The context of a process, cuBLAS and loaded kernels: no allocator of ours counts them. 0.4 to 0.6 GiB are usual for
# torch on A100 and H100; what a replica has measured of them by its start is only a part, the rest is loaded on use.
CUDA_OVERHEAD = 640 << 20
SPARE = 0.03  # of the replica's share, kept free by `auto`: for fragments, and steps that take a little more

_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KvMemory:
    """What was asked for. At most one is set; none is `auto`. As text it reads as `parse` takes it."""

    fraction: float | None = None
    bytes: int | None = None
    tokens: int | None = None

    def __str__(self) -> str:
        if self.fraction is not None:
            return str(self.fraction)
        if self.tokens is not None:
            return f"{self.tokens} tokens"
        if self.bytes is not None:
            unit = max((unit for unit in _UNITS if self.bytes % _UNITS[unit] == 0), key=_UNITS.__getitem__)
            return f"{self.bytes // _UNITS[unit]} {unit}"
        return "auto"


def parse(given: object) -> KvMemory:
    """From a text or a number; ValueError names the forms that are allowed."""
    wrong = ValueError(f"got {reprlib.repr(given)}; allowed: {FORMS}")
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise wrong
    text = str(given).strip()
    if text.lower() == "auto":
        return KvMemory()
    if found := re.fullmatch(r"([0-9]{1,15}) *tokens?", text, re.IGNORECASE):
        tokens = int(found[1])
        if not LEAST_TOKENS <= tokens <= MOST_TOKENS:
            raise ValueError(f"got {tokens} tokens; allowed: {LEAST_TOKENS} to {MOST_TOKENS} tokens")
        return KvMemory(tokens=tokens)
    if found := re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,15})?) *([KMGT]?i?B)", text, re.IGNORECASE):
        unit = next((size for name, size in _UNITS.items() if name.lower() == found[2].lower()), None)
        if unit is not None and (size := int(Decimal(found[1]) * unit)) > 0:
            return KvMemory(bytes=size)
        raise wrong
    try:
        fraction = float(text)
    except ValueError:
        raise wrong from None
    if not 0 < fraction <= 1:
        raise wrong
    return KvMemory(fraction=fraction)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """One KV block: keys and values of all layers."""

    layers: int
    kv_heads: int
    block_size: int
    head_dim: int
    itemsize: int

    @classmethod
    def of(cls, model: LlamaConfig, block_size: int, itemsize: int) -> BlockShape:
        return cls(model.layers, model.kv_heads, block_size, model.head_dim, itemsize)

    @property
    def bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.block_size * self.head_dim * self.itemsize

    def __str__(self) -> str:
        return (
            f"{self.layers} layers x 2 x {self.kv_heads} KV heads x {self.block_size} positions x {self.head_dim} dims "
            f"x {self.itemsize} bytes = {self.bytes} bytes, {size(self.bytes)}"
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """What a replica has measured before it makes its cache: bytes, but for the share."""

    total: int  # of the device
    free: int  # to all processes, now
    ours: int = 0  # this process has it for tensors, now: it is not free
    share: float = 1.0  # of the device that is this replica's: `num_gpus`
    weights: int = 0
    activations: int = 0  # the most that a step takes
    graphs: int = 0  # what recorded decode steps keep
    overhead: int = CUDA_OVERHEAD
    device: Literal["cpu", "cuda"] = "cuda"

    @classmethod
    def of_host(cls, memory: Memory) -> Budget:
        """Of a CPU: what is available counts, whoever has taken the rest."""
        return cls(memory.total, memory.free, overhead=0, device="cpu")


@dataclass(frozen=True, slots=True)
class Sizing:
    """The usable blocks, without the null block, and how they came about in lines for the log."""

    blocks: int
    lines: tuple[str, ...]


def size_cache(kv_memory: str, shape: BlockShape, budget: Budget, context: int) -> Sizing:
    """As many blocks as `kv_memory` asks for and memory holds. `context`: the positions that one sequence may have.

    ConfigError, in one line with the arithmetic, where what is asked for is not there, or not one such sequence fits.
    """
    asked = parse(kv_memory)
    _refuse_fraction(asked, budget.device)
    room, formula = _room(budget, spare=asked == KvMemory())
    if known := _known_blocks(asked, budget.device, shape):
        blocks, counted = known
        need = asked.bytes or (blocks + 1) * shape.bytes
        if need > room:
            most = max(0, room // shape.bytes - 1)
            raise ConfigError(
                f"engine.kv_memory {asked} takes {size(need)} ({counted}), and {size(room)} are left: {formula}; "
                f"allowed: {most * shape.block_size} tokens at most here{_more(budget)}"
            )
    else:
        fraction = 1.0 if asked.fraction is None else asked.fraction
        blocks = max(0, math.floor(max(0, room) * fraction) // shape.bytes - 1)
        times = "" if asked.fraction is None else f" x {asked.fraction}"
        counted = f"{max(0, room)} bytes{times} / {shape.bytes} - 1 (the null block) = {blocks}, rounded down"
    positions = blocks * shape.block_size
    if positions < context:
        advice = f"set engine.context to {positions} or less" if positions else "nothing is left for the cache"
        raise ConfigError(
            f"engine.kv_memory {asked} holds {positions} positions, and one sequence may have {context}: {formula}; "
            f"a block is {shape}; blocks: {counted}; {advice}{_more(budget, asked)}"
        )
    return Sizing(
        blocks,
        (
            f"a block: {shape}",
            *([formula] if budget.device == "cuda" else []),  # a CPU's cache is as large as it is told to be
            f"blocks: {counted}; {positions} positions, {positions / context:.1f} sequences of {context}",
        ),
    )


def context_of(model: LlamaConfig, engine: EngineConfig, itemsize: int) -> int:
    """What a request may have in all: positions of the model, of `engine.context`, and of the cache where its size is
    known before it is made: a whole sequence lies in one decode replica. Elsewhere the replica starts only if it holds.

    Here and in the replicas it comes out the same, so the ingress promises nothing that they cannot keep.
    """
    context, shape = engine.context, BlockShape.of(model, engine.block_size, itemsize)
    max_positions = model.max_positions
    if context is not None and context > max_positions:
        raise ConfigError(f"engine.context is {context}; allowed for this model: {max_positions}, its positions")
    asked = parse(engine.kv_memory)
    _refuse_fraction(asked, engine.device)
    known = _known_blocks(asked, engine.device, shape)
    if known is None:
        return context or max_positions
    positions = known[0] * shape.block_size
    if positions < LEAST_TOKENS:
        least = (-(-LEAST_TOKENS // shape.block_size) + 1) * shape.bytes
        raise ConfigError(
            f"engine.kv_memory {asked} holds {positions} positions; allowed: at least {LEAST_TOKENS}, for this model "
            f"{least} bytes; a block is {shape}"
        )
    if context is not None and context > positions:
        raise ConfigError(
            f"engine.context is {context}, and engine.kv_memory {asked} holds {positions} positions; lower the one or "
            "raise the other"
        )
    return min(context or max_positions, positions)


def check_host(model: LlamaConfig, engine: EngineConfig, itemsize: int, replicas: int, there: tuple[int, int]) -> None:
    """That the caches of all replicas fit into the memory of the host where they compute together. `there`: its bytes,
    and those that can be had. ConfigError before anything is loaded; weights and what else there is come on top."""
    shape = BlockShape.of(model, engine.block_size, itemsize)
    asked = parse(engine.kv_memory)
    known = _known_blocks(asked, "cpu", shape)
    assert known is not None, "a fraction was refused"
    each, (total, free) = (known[0] + 1) * shape.bytes, there
    if each * replicas > free:
        most = max(0, free // replicas // shape.bytes - 1) * shape.block_size
        raise ConfigError(
            f"engine.kv_memory {asked} takes {size(each)} in each of {replicas} replicas, {size(each * replicas)} in "
            f"all, and {size(free)} of {size(total)} are available; allowed here: less than {most} tokens, or fewer "
            "replicas"
        )


def size(count: int) -> str:
    """Bytes for people, in units of 1024."""
    if abs(count) >= 1 << 30:
        return f"{count / (1 << 30):.3f} GiB"
    if abs(count) >= 1 << 20:
        return f"{count / (1 << 20):.2f} MiB"
    return f"{count / 1024:.2f} KiB"


def _refuse_fraction(asked: KvMemory, device: str) -> None:
    if asked.fraction is not None and device != "cuda":
        raise ConfigError(f"engine.kv_memory is {asked} and engine.device cpu; allowed on CPUs: {CPU_FORMS}")


def _known_blocks(asked: KvMemory, device: str, shape: BlockShape) -> tuple[int, str] | None:
    """How many and why, where that does not depend on the memory a replica finds."""
    if asked.bytes is not None:
        blocks = max(0, asked.bytes // shape.bytes - 1)
        return blocks, f"{asked.bytes} bytes / {shape.bytes} - 1 (the null block) = {blocks}, rounded down"
    tokens = AUTO_TOKENS if asked == KvMemory() and device != "cuda" else asked.tokens
    if tokens is None:
        return None
    blocks = tokens // shape.block_size
    takes = size((blocks + 1) * shape.bytes)
    return blocks, f"{tokens} tokens / {shape.block_size} = {blocks}, rounded down; with the null block {takes}"


def _room(budget: Budget, *, spare: bool) -> tuple[int, str]:
    """Bytes that the cache may take, and how they come about. What is free is free of our overhead already."""
    if budget.device == "cpu":
        return budget.free, f"room: {size(budget.free)} of {size(budget.total)} are available"
    allowed = math.floor(budget.total * budget.share) - budget.overhead
    there = budget.free + budget.ours
    takes = {"weights": budget.weights, "activations": budget.activations, "graphs": budget.graphs}
    if spare:
        takes["spare"] = math.floor(budget.total * budget.share * SPARE)
    room = min(allowed, there) - sum(takes.values())

    def terms() -> Iterator[str]:
        yield (
            f"room: min({size(budget.total)} x {budget.share:g} - {size(budget.overhead)} overhead, "
            f"{size(budget.free)} free + {size(budget.ours)} ours)"
        )
        yield from (f"{size(count)} {name}" for name, count in takes.items() if count)

    return room, f"{' - '.join(terms())} = {size(room)}"


def _more(budget: Budget, asked: KvMemory | None = None) -> str:
    """What else would help, to end a sentence."""
    ways = []
    if asked is not None and asked != KvMemory():
        ways.append("raise engine.kv_memory")
    if budget.share < 1:
        ways.append(f"give a replica more of its GPU than {budget.share:g} (num_gpus of its pool)")
    return "".join(f", or {way}" for way in ways)
