"""Decode steps that were recorded, on a real model: each replay computes what the step computes eagerly.

`RepeatingRecorder` runs the recorded step again, so what a graph would have frozen is looked at by itself: everything
that is launched must be the same whatever the lengths.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_case import Case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bifolio.kernels import StaticPlan, paged_attention, plan, triton_attention, triton_small, using
from bifolio.replicas.batch import Batch, HostBatch, Row, host_batch
from bifolio.replicas.graphs import DecodeGraphs, RepeatingRecorder
from bifolio.replicas.kv_cache import KvCache
from bifolio.replicas.llama import Llama
from bifolio.replicas.weights import load

BLOCK = 16
CONTEXT = 300
BLOCKS = 100


def model(path: Path, layers: int = 1, **changes: Any) -> Llama:
    """A layer or two of glassllm are enough, and it may look further than it was trained to."""
    config, weights = load(path, torch.float32)
    return Llama(replace(config, layers=layers, max_positions=CONTEXT, **changes), weights)


@pytest.fixture(autouse=True)
def few_short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are cut into parts from two tiles on, and into few: so it takes little time to compute some."""
    monkeypatch.setattr("bifolio.kernels.schedule.DECODE_PART", 64)
    monkeypatch.setattr(triton_attention, "processors", lambda device: 6)


@pytest.fixture(scope="module")
def llama(glassllm_dir: Path) -> Llama:
    with using("triton"):
        return model(glassllm_dir)


def cache_of(llama: Llama, seed: int = 3) -> KvCache:
    """Filled with what sequences might have left there, the null block with NaN."""
    c = llama.config
    cache = KvCache(BLOCKS, c.layers, c.kv_heads, BLOCK, c.head_dim, llama.dtype)
    generator = torch.Generator().manual_seed(seed)
    for i in range(c.layers):
        cache.layer(i).copy_(torch.randn(cache.layer(i).shape, generator=generator))
        cache.layer(i)[0] = torch.nan
    return cache


def step(lengths: Sequence[int], salt: int = 0) -> HostBatch:
    """A token each of sequences that have so many positions with it, in blocks of their own, not in order."""
    order, at, rows = np.random.default_rng(len(lengths)).permutation(BLOCKS) + 1, 0, []
    for b, keys in enumerate(lengths):
        count = -(-keys // BLOCK)
        rows.append(Row([(31 * b + 7 * keys + salt) % 1000], keys - 1, order[at : at + count].tolist()))
        at += count
    return host_batch(rows, BLOCK)


def padded(host: HostBatch, size: int) -> Batch:
    """The same step with rows that are no sequence, planned as any step is."""
    more, n = size - len(host.lengths), len(host.lengths)
    pads = [(host.tokens, 0), (host.positions, 0), (host.slots, -1), (host.lengths, 0)]
    tokens, positions, slots, lengths = (torch.from_numpy(np.pad(x, (0, more), constant_values=v)) for x, v in pads)
    table = torch.from_numpy(np.pad(host.table, ((0, more), (0, 0))))
    planned = plan(torch.arange(size + 1, dtype=torch.int32), lengths, table)
    return Batch(tokens, positions, slots, planned, torch.arange(n), torch.empty(0, dtype=torch.int64), (), ())


def eager(llama: Llama, batch: Batch, cache: KvCache) -> Tensor:
    return llama.logits(llama.forward(batch, cache))[batch.logit_rows]


def check(llama: Llama, graphs: DecodeGraphs, cache: KvCache, host: HostBatch, size: int) -> None:
    """The bits of the padded step, in the cache too, and the ids of the step without padding."""
    before = cache.bytes.clone()
    got = graphs.logits(host)
    assert got is not None
    got, after = got.clone(), cache.bytes.clone()
    cache.bytes.copy_(before)
    assert torch.equal(got, eager(llama, padded(host, size), cache))
    assert torch.equal(after, cache.bytes)
    if size > len(host.lengths):
        cache.bytes.copy_(before)
        alone = eager(llama, host.on(torch.device("cpu")), cache)
        torch.testing.assert_close(got, alone, rtol=0, atol=1e-4)
        assert torch.equal(got.argmax(1), alone.argmax(1))


def merges_of(graphs: DecodeGraphs, size: int) -> int:
    """Rows whose keys are in parts, in the step that was filled last."""
    (mirror, _), *_ = graphs._static._tables[size]._made
    return int((mirror.arrays[1][:, 0] >= 0).sum())


def test_steps_of_sequences_that_grow_come_and_go(llama: Llama) -> None:
    cache = cache_of(llama)
    graphs = DecodeGraphs(llama, cache, (1, 4), RepeatingRecorder())
    lengths, parts = [64, 16, 1, 31], []
    for i in range(5):
        if i == 2:
            del lengths[1]
        if i == 3:
            lengths.append(129)
        check(llama, graphs, cache, step(lengths, i), 4)
        parts.append(merges_of(graphs, 4))
        lengths = [keys + 1 for keys in lengths]
    assert parts == [0, 1, 1, 1, 1]  # more than 64 keys are in parts, where there is time for it


@pytest.mark.parametrize("lengths", [[1], [5, CONTEXT], [180, 65, 64]])
def test_steps_of_every_size(llama: Llama, lengths: list[int]) -> None:
    cache = cache_of(llama)
    graphs = DecodeGraphs(llama, cache, (1, 2, 7), RepeatingRecorder())
    check(llama, graphs, cache, step(lengths), {1: 1, 2: 2, 3: 7}[len(lengths)])


def test_a_small_step_after_a_large_one_sees_nothing_of_it(llama: Llama) -> None:
    cache = cache_of(llama)
    graphs = DecodeGraphs(llama, cache, (8,), RepeatingRecorder())
    graphs.logits(step([230, 200, 180, 150, 120, 100, 30, 20]))
    check(llama, graphs, cache, step([3, 2]), 8)


def test_layers_with_different_windows_and_without_positions(glassllm_dir: Path) -> None:
    llama = model(glassllm_dir, 2, windows=(None, 125), unrotated=(1,))
    cache = cache_of(llama)
    graphs = DecodeGraphs(llama, cache, (1, 3), RepeatingRecorder())
    for lengths in ([230], [128, 20, 250]):
        check(llama, graphs, cache, step(lengths), len(lengths))
    assert len(graphs._static._tables[3]._made) == 2


def test_results_of_all_sizes_share_their_memory(llama: Llama) -> None:
    graphs = DecodeGraphs(llama, cache_of(llama), (1, 2), RepeatingRecorder())
    small, large = graphs.logits(step([3])), graphs.logits(step([3, 4]))
    assert small is not None
    assert large is not None
    assert small.data_ptr() == large.data_ptr()


def test_nothing_is_written_but_the_slots_of_the_step(llama: Llama) -> None:
    cache = cache_of(llama)
    graphs = DecodeGraphs(llama, cache, (8,), RepeatingRecorder())
    before, host = cache.bytes.clone(), step([20, 33])
    graphs.logits(host)
    changed = (cache.bytes != before).view(BLOCKS + 1, -1).any(1).nonzero().flatten().tolist()
    assert changed == sorted((host.slots // BLOCK).tolist())
    for i in range(llama.config.layers):
        old = before.view(llama.dtype).view(BLOCKS + 1, llama.config.layers, *cache.layer(0).shape[1:])[:, i]
        places = (cache.layer(i) != old).any(-1).transpose(1, 3)[1:]  # [blocks, position, KV heads, K or V]
        at = places.flatten(2).all(-1).flatten().nonzero().flatten() + BLOCK
        assert at.tolist() == sorted(host.slots.tolist())
        assert places.sum() == places.flatten(2).all(-1).sum() * places[0, 0].numel()


STAY = {"attend": (1, 4, 5, 7, 8, 9, 10), "combine": (2, 3, 5)}  # arguments that are tensors which never move


class _Launches(TorchDispatchMode):
    """What is launched, with all that a graph freezes: grids, numbers, shapes, and where tensors are that stay."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: list[tuple[object, ...]] = []
        self.in_kernel = False
        kernels = [(triton_small, name) for name in ("_rope_and_write", "_rms_norm", "_silu_mul")]
        for module, name in (*kernels, *((triton_attention, name) for name in STAY)):
            patch.setattr(module, name, _Kernel(self, name, getattr(module, name)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.in_kernel:
            options = {name: _frozen(x) for name, x in (kwargs or {}).items()}
            self.seen.append((str(func), [_frozen(x) for x in args], options))
        return func(*args, **(kwargs or {}))


class _Kernel:
    def __init__(self, mode: _Launches, name: str, kernel: Any) -> None:
        self.mode, self.name, self.kernel = mode, name, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            places = [args[i].data_ptr() for i in STAY.get(self.name, ())]
            self.mode.seen.append((self.name, grid, [_frozen(x) for x in args], options, places))
            self.mode.in_kernel = True
            self.kernel[grid](*args, **options)
            self.mode.in_kernel = False

        return launch


def _frozen(x: Any) -> object:
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x


class Watching:
    """A recorder that asserts at each replay that the launches are those it recorded, when there were no lengths."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.replays = patch, 0

    def record(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        compute()
        recorded, result = self.launches(compute)
        assert {"attend", "combine"} <= {it[0] for it in recorded}

        def replay() -> Tensor:
            again, now = self.launches(compute)
            assert again == recorded
            assert now.data_ptr() == result.data_ptr()
            self.replays += 1
            return now

        return replay

    def launches(self, compute: Callable[[], Tensor]) -> tuple[list[tuple[object, ...]], Tensor]:
        with self.patch.context() as patch, _Launches(patch) as mode:
            result = compute()
        return mode.seen, result


def test_what_is_launched_does_not_depend_on_the_lengths(glassllm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = model(glassllm_dir, 2, windows=(None, 150))
    recorder = Watching(monkeypatch)
    graphs = DecodeGraphs(llama, cache_of(llama), (4,), recorder)
    for lengths in ([280, 230, 200, 65], [64, 1, 1], [CONTEXT]):
        assert graphs.logits(step(lengths)) is not None
    assert recorder.replays == 3


@pytest.mark.parametrize(("first", "window"), [([1], None), ([250, 180, 150], 125)])
def test_attention_is_right_whatever_the_lengths_were_at_first(first: list[int], window: int | None) -> None:
    """Parts would be lost, or would have no room, if the first lengths decided anything."""
    case, static = Case([(1, 256)] * 4, hq=2, hk=1, d=32), StaticPlan(4, 16, torch.device("cpu"))
    for lengths in (first, [230, 20, 129, 0], [3], [256, 256]):
        n, keys, table = len(lengths), torch.tensor(lengths, dtype=torch.int32), case.table[: len(lengths)]
        numbers = np.zeros(n, np.int64)
        static.fill(4, numbers, numbers, numbers, keys.numpy(), table.numpy())
        got = paged_attention(case.q, case.kv, static.plan(4), window=window)
        planned = plan(torch.arange(n + 1, dtype=torch.int32), keys, table)
        assert torch.equal(got[:n], paged_attention(case.q[:n], case.kv, planned, window=window))
        assert (got[n:] == 0).all()


def test_graphs_that_are_let_go_give_their_memory_back_at_once(llama: Llama) -> None:
    graphs = DecodeGraphs(llama, cache_of(llama), (2,), RepeatingRecorder())
    graphs.logits(step([150, 5]))
    made = next(iter(graphs._static.plan(2)._made.values()))
    gone = [weakref.ref(x) for x in (graphs._logits, graphs._static.tokens, made.parts, made.merges)]
    gc.disable()  # a cycle of references would keep them until it ran
    try:
        del graphs, made
        assert [ref() for ref in gone] == [None] * 4
    finally:
        gc.enable()
