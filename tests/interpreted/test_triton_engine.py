"""Whole engines on Triton's kernels: a real model, a prefill and a decode replica, blocks moved between them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from split import pair

PROMPTS = [[5, 300, 41, 77, 512, 9, 23, 640, 88, 31, 7, 450, 61, 19, 200, 33, 4, 18, 95], [702, 11, 66]]
SIZES = {"block_size": 8, "max_batched_tokens": 16, "max_sequences": 8, "kv_memory": "512 tokens"}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 11}


async def _answers(model: Path, kernels: str, **sampling: object) -> list[list[int]]:
    async with pair(model, split=True, kernels=kernels, **SIZES) as it:
        requests = [it.request(prompt, max_tokens=16, **sampling) for prompt in PROMPTS]
        answers = await asyncio.gather(*(it.tokens(request) for request in requests))
        await it.settled()
        return answers


def answers(model: Path, kernels: str, **sampling: object) -> list[list[int]]:
    return asyncio.run(asyncio.wait_for(_answers(model, kernels, **sampling), 300))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLED])
def test_split_pools_on_triton_give_the_ids_of_the_cpu(glassllm_dir: Path, sampling: dict[str, object]) -> None:
    assert answers(glassllm_dir, "triton", **sampling) == answers(glassllm_dir, "auto", **sampling)
