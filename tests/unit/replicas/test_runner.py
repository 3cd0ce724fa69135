"""What a step asks of the model, and how much of it at once."""

from __future__ import annotations

from typing import Any

import torch

from bifolio.replicas.batch import Batch, Row, build_batch
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


def test_rows_are_scored_a_few_at_a_time() -> None:
    model: Any = Model()
    prompt = [i * 7 % 50 for i in range(200)]
    rows = [
        Row(prompt, 0, list(range(1, 26)), False, prompt[1:], 3),
        Row([4], 0, [30]),
        Row([5, 6], 0, [31], True, [6]),
    ]
    output = Runner(model, Cache()).compute(build_batch(rows, 8))  # type: ignore[arg-type]
    assert max(model.asked) <= SCORED_AT_ONCE
    assert torch.equal(output.logits, TABLE[[4, 6]])
    assert output.scores == [
        *token_logprobs(TABLE[prompt[:-1]], prompt[1:], [3] * 199),
        *token_logprobs(TABLE[[5]], [6], [0]),
    ]


def test_nothing_is_scored_unless_asked_for() -> None:
    model: Any = Model()
    runner = Runner(model, Cache())  # type: ignore[arg-type]
    assert torch.equal(runner.run(build_batch([Row([1, 2, 3], 0, [1])], 8)), TABLE[[3]])
    assert model.asked == [1]
