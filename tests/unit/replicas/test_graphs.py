"""Which steps are recorded, and which are replayed: the parts of `graphs.py` that compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from bifolio.kernels import using
from bifolio.replicas.batch import HostBatch, Row, host_batch
from bifolio.replicas.graphs import DecodeGraphs, RepeatingRecorder, graph_sizes
from bifolio.replicas.kv_cache import KvCache
from bifolio.replicas.llama import Llama
from bifolio.replicas.weights import load


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (5, (1, 2, 4, 5)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (128, (*graph_sizes(64), 80, 96, 112, 128)),
        (300, (*graph_sizes(128), 160, 192, 224, 256, 300)),
    ],
)
def test_sizes(most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(most) == sizes


@pytest.mark.parametrize("most", range(1, 1025, 17))
def test_padding_is_at_most_seven_rows_or_a_fifth(most: int) -> None:
    sizes = graph_sizes(most)
    assert (sizes[0], sizes[-1]) == (1, most)
    assert all(b - a - 1 <= max(7, b / 5) for a, b in pairwise(sizes))


def test_a_repeated_result_stays_in_the_first_ones_tensor() -> None:
    results = iter([torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])])
    replay = RepeatingRecorder().record(lambda: next(results))
    first = replay()
    assert first.tolist() == [2.0]
    assert replay() is first
    assert first.tolist() == [3.0]


class Counting:
    """A recorder that computes nothing: which size was recorded, and which is replayed."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replayed: list[int] = []

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        mine = len(self.recorded)
        self.recorded.append(mine)

        def replay() -> torch.Tensor:
            self.replayed.append(mine)
            return torch.zeros(99, 5)

        return replay


@pytest.fixture(scope="module")
def llama(glassllm_dir: Path) -> Llama:
    config, weights = load(glassllm_dir, torch.float32)
    with using("torch"):
        return Llama(replace(config, max_positions=100), weights)


@pytest.fixture
def triton() -> Iterator[None]:
    with using("triton"):
        yield


def cache_of(llama: Llama) -> KvCache:
    c = llama.config
    return KvCache(40, c.layers, c.kv_heads, 8, c.head_dim, llama.dtype)


def step(n: int, **options: object) -> HostBatch:
    return host_batch([Row([3], 9 + i, [2 * i + 1, 2 * i + 2, 39], **options) for i in range(n)], 8)  # type: ignore[arg-type]


@pytest.mark.usefixtures("triton")
def test_the_largest_is_recorded_first_and_progress_is_told(llama: Llama) -> None:
    told: list[tuple[int, int, int]] = []
    DecodeGraphs(llama, cache_of(llama), (1, 4, 2), Counting(), lambda *it: told.append(it))
    assert told == [(1, 3, 4), (2, 3, 2), (3, 3, 1)]


@pytest.mark.usefixtures("triton")
def test_a_step_is_padded_to_the_next_size(llama: Llama) -> None:
    recorder = Counting()
    graphs = DecodeGraphs(llama, cache_of(llama), (1, 2, 4, 7), recorder)
    for n in range(1, 8):
        logits = graphs.logits(step(n))
        assert logits is not None
        assert len(logits) == n
    sizes = (7, 4, 2, 1)  # as they were recorded
    assert [sizes[i] for i in recorder.replayed] == [1, 2, 4, 4, 7, 7, 7]


CHUNK, TOKEN = Row([1, 2], 0, [1]), Row([3], 5, [2])


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    "rows",
    [
        [],
        [TOKEN] * 5,
        [TOKEN, CHUNK],
        [TOKEN, replace(TOKEN, want_logits=False)],
        [TOKEN, replace(TOKEN, targets=[4])],
        [replace(CHUNK, drafted=1), replace(CHUNK, want_logits=False)],
    ],
    ids=["nothing", "too many", "a chunk", "no logits", "scores", "a draft"],
)
def test_other_steps_are_left_to_who_computes_them_eagerly(llama: Llama, rows: list[Row]) -> None:
    recorder = Counting()
    graphs = DecodeGraphs(llama, cache_of(llama), (1, 4), recorder)
    assert graphs.logits(host_batch(rows, 8)) is None
    assert not recorder.replayed


@pytest.mark.usefixtures("triton")
def test_logits_in_another_order_are_no_decode_step(llama: Llama) -> None:
    graphs = DecodeGraphs(llama, cache_of(llama), (4,), Counting())
    assert graphs.logits(replace(step(2), logit_rows=np.array([1, 0]))) is None


@pytest.mark.usefixtures("triton")
def test_a_table_wider_than_the_context_is_refused(llama: Llama) -> None:
    graphs = DecodeGraphs(llama, cache_of(llama), (4,), Counting())
    with pytest.raises(ValueError, match=r"table: shape \[1, 14\]; allowed is up to \[4, 13\]"):
        graphs.logits(host_batch([Row([3], 104, list(range(1, 15)))], 8))


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("sizes", [(), (0, 2)])
def test_sizes_that_are_none_are_refused(llama: Llama, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="allowed is at least one"):
        DecodeGraphs(llama, cache_of(llama), sizes, Counting())


def test_kernels_other_than_tritons_are_refused(llama: Llama) -> None:
    with using("torch"), pytest.raises(ValueError, match="other kernels than Triton's"):
        DecodeGraphs(llama, cache_of(llama), (1,), Counting())
