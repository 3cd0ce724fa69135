"""What a step asks of the model, and how much of it at once."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from bifolio.replicas.batch import Batch, Row
from bifolio.replicas.logprobs import token_logprobs
from bifolio.replicas.runner import SCORED_AT_ONCE, Runner

TABLE = torch.randn(50, 50, generator=torch.Generator().manual_seed(6))


class Model:
    """The logits of a token are its row of TABLE."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def forward(self, batch: Batch, cache: object) -> torch.Tensor:
        return batch.tokens[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(hidden))
        return TABLE[hidden.squeeze(1)]


class Cache:
    block_size = 8
    device = torch.device("cpu")

    def copy(self, source: int, block: int) -> None:
        pass


class Store:
    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.waited: list[int] = []

    def computed(self, blocks: Iterable[int]) -> Mark:
        self.steps.append(list(blocks))
        return Mark(self.waited, len(self.steps))


class Mark:
    def __init__(self, waited: list[int], step: int) -> None:
        self._waited, self._step = waited, step

    def wait(self) -> None:
        self._waited.append(self._step)


def runner(model: object, store: Store | None = None) -> Runner:
    return Runner(model, Cache(), store or Store())  # type: ignore[arg-type]


def test_rows_are_scored_a_few_at_a_time() -> None:
    model: Any = Model()
    prompt = [i * 7 % 50 for i in range(200)]
    rows = [
        Row(prompt, 0, list(range(1, 26)), False, prompt[1:], 3),
        Row([4], 0, [30]),
        Row([5, 6], 0, [31], True, [6]),
    ]
    output = runner(model).compute(rows)
    assert max(model.asked) <= SCORED_AT_ONCE
    assert torch.equal(output.logits, TABLE[[4, 6]])
    assert output.scores == [
        *token_logprobs(TABLE[prompt[:-1]], prompt[1:], [3] * 199),
        *token_logprobs(TABLE[[5]], [6], [0]),
    ]


def test_nothing_is_scored_unless_asked_for() -> None:
    model: Any = Model()
    assert torch.equal(runner(model).run([Row([1, 2, 3], 0, [1])]), TABLE[[3]])
    assert model.asked == [1]


def test_the_store_hears_which_blocks_a_step_writes() -> None:
    store, model = Store(), Model()
    runner(model, store).run([Row([1, 2, 3], 6, [5, 9]), Row([4], 8, [7, 2])])
    assert store.steps == [[2, 5, 9]]


def test_it_hears_so_of_a_step_that_fails_too() -> None:
    """Part of it may be under way."""
    store, model = Store(), Model()
    model.logits = lambda hidden: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        runner(model, store).run([Row([1], 0, [3])])
    assert store.steps == [[3]]


@pytest.mark.parametrize("fails", [False, True])
def test_it_hears_of_both_blocks_of_a_copy(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The source too: what is read there is kept, so its next owner must not write before."""
    store = Store()
    if fails:
        monkeypatch.setattr(Cache, "copy", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        runner(Model(), store).copy(3, 7)
    assert store.steps == [[3, 7]]


def test_the_host_is_never_more_than_two_steps_ahead() -> None:
    store = Store()
    it = runner(Model(), store)
    waited = []
    for position in range(5):
        it.run([Row([1], position, [3])])
        waited.append(list(store.waited))
    assert waited == [[], [], [1], [1, 2], [1, 2, 3]]
