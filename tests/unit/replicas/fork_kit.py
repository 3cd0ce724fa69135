"""What the tests of several answers from one prefill share: a model's prompt, and what separate requests get for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from split import Pair, pair

from bifolio.protos.messages import Delta, Request
from bifolio.replicas.core import Core

P = 8
TOKENS: list[int] = torch.randint(4, 1000, (60,), generator=torch.Generator().manual_seed(5)).tolist()
SMALL = {"block_size": P, "max_batched_tokens": 32, "max_sequences": 8, "kv_memory": "2048 tokens"}
GREEDY: dict[str, Any] = {"max_tokens": 14, "temperature": 0.0}
SAMPLED: dict[str, Any] = {"max_tokens": 14, "temperature": 1.2, "seed": 9, "logprobs": 2}
LONG: dict[str, Any] = {**SAMPLED, "max_tokens": 60, "logprobs": None}
SPLIT_OR_LOCAL = pytest.mark.parametrize("split", [True, False], ids=["split", "local"])


def run(model: Path, work: Callable[[Pair], Awaitable[Any]], **how: Any) -> Any:
    async def go() -> Any:
        async with pair(model, **{"exact": True, **SMALL, **how}) as it:
            out = await work(it)
            await it.settled()
            return out

    return asyncio.run(asyncio.wait_for(go(), 60))


def used(core: Core) -> int:
    """Blocks under leases, each once."""
    return len({block for lease in core.tags.report(0.0).leases for block in lease.blocks})


def told(deltas: list[Delta]) -> list[tuple[Any, ...]]:
    return [(d.tokens, d.logprobs, d.finish) for d in deltas]


async def apart(it: Pair, request: Request, n: int) -> list[Delta]:
    """What n separate requests get, with the same seed and one choice each."""
    return [
        await it.answer(
            it.request(
                request.prompt,
                **{f: getattr(request.sampling, f) for f in request.sampling.__slots__} | {"choice": k},
            )
        )
        for k in range(n)
    ]


WANTED: dict[tuple[int, float], list[Delta]] = {}


def wanted(model: Path, length: int, sampling: dict[str, Any]) -> list[Delta]:
    key = (length, sampling["temperature"])
    if key not in WANTED:
        WANTED[key] = run(model, lambda it: apart(it, it.request(TOKENS[:length], **sampling), 4), split=False)
    return WANTED[key]
