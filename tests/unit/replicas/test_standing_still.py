"""An engine that stands still in a process that lives: nobody waits for it, and what it has comes back when it goes on.

Real cores, streams and jobs; a step is held in the model's place."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from split import Pair, config, pair

from bifolio.kv_manager.wire import Kind, Working, pack, unpack
from bifolio.protos.messages import Delta, Request
from bifolio.replicas import jobs
from bifolio.replicas.core import Core

PROMPT = [5 + 37 * i % 700 for i in range(40)]
SMALL = {"block_size": 8, "max_batched_tokens": 32, "max_sequences": 8, "kv_memory": "2048 tokens"}


@contextlib.contextmanager
def held(core: Core) -> Iterator[None]:
    """No step of it ends."""
    go, compute = threading.Event(), core.runner.compute

    def stand(rows):
        go.wait(30)
        return compute(rows)

    core.runner.compute = stand  # type: ignore[method-assign]
    try:
        yield
    finally:
        core.runner.compute = compute  # type: ignore[method-assign]
        go.set()


async def _until(condition, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def _all(it: Pair, request: Request) -> list[Delta]:
    return [delta async for delta in it.deltas(request)]


def test_a_prompt_whose_engine_stands_still_is_given_up_and_its_blocks_come_back(glassllm_dir: Path) -> None:
    async def run() -> None:
        kv = config(True, stall_s=0.2)
        async with pair(glassllm_dir, kv=kv, stall_s=1, **SMALL) as it:
            assert it.prefill
            assert it.server
            request = it.request(PROMPT, max_tokens=4, temperature=0.0)
            expected = await it.tokens(request)
            with held(it.prefill):
                began = time.monotonic()
                (delta,) = await _all(it, it.request(PROMPT, salt="new", max_tokens=4, temperature=0.0))
                assert time.monotonic() - began >= 1, "as long as a step may take"
                assert delta.resumable is not None
                name, message, avoid = delta.resumable
                assert (name, avoid) == ("TransferFailed", "prefill#1")
                assert "nothing has come from the prefill replica for 1 s" in message
                await _until(it.prefill.stalled_s)
                with pytest.raises(RuntimeError, match="prefill#1 has ended no step for"):
                    it.prefill.check()
                assert it.server.active, "its stream is over, and its thread waits for the engine"
                assert it.server.stalled_s() == 0, "which is not the transfer's fault"
            await it.settled()
            await _until(lambda: not it.server.active)
            assert it.server.stalled_s() == it.prefill.stalled_s() == it.streams.stalled_s() == 0
            it.prefill.check()
            assert await it.tokens(it.request(PROMPT, salt="new", max_tokens=4, temperature=0.0)) == expected

    asyncio.run(run())


def test_answers_whose_engine_stands_still_end_as_resumable_and_their_leases_when_it_goes_on(
    glassllm_dir: Path,
) -> None:
    async def run() -> None:
        async with pair(glassllm_dir, split=False, stall_s=1, **SMALL) as it:
            request = it.request(PROMPT, max_tokens=4, temperature=0.0)
            expected = await it.tokens(request)
            with held(it.decode):
                both = [
                    asyncio.create_task(_all(it, it.request(PROMPT, n=n, max_tokens=4, temperature=0.0)))
                    for n in (1, 2)
                ]
                await _until(it.decode.stalled_s)
                it.streams.give_up("it has ended no step for 1.0 s")
                it.streams.give_up("it has ended no step for 1.3 s")
                for deltas in await asyncio.gather(*both):
                    for delta in deltas:
                        assert delta.resumable is not None
                        assert delta.resumable[0] == "EngineFailed"
                        assert "it has ended no step for 1." in delta.resumable[1]
                assert it.decode.tags.report(0.0).leases, "a step under way may write their blocks"
            await it.settled()
            assert it.decode.stalled_s() == 0
            assert await it.tokens(it.request(PROMPT, max_tokens=4, temperature=0.0)) == expected

    asyncio.run(run())


def test_a_prompt_that_waits_long_behind_others_is_not_given_up(
    glassllm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on, so each second its stream says so: here as often as can be."""
    monkeypatch.setattr(jobs, "WORD_S", 0.05)

    async def run() -> None:
        kv = config(True, stall_s=0.3)
        async with pair(glassllm_dir, kv=kv, stall_s=1, **SMALL) as it:
            assert it.prefill
            compute = it.prefill.runner.compute

            def slow(rows):
                time.sleep(0.04)
                return compute(rows)

            it.prefill.runner.compute = slow  # type: ignore[method-assign]
            requests = [it.request(PROMPT * 3, salt=str(i), max_tokens=2, temperature=0.0) for i in range(8)]
            answers = await asyncio.gather(*(it.tokens(request) for request in requests))
            assert len(set(map(tuple, answers))) == 1
            await it.settled()

    asyncio.run(run())


def test_the_word_that_it_works_is_nothing_but_that() -> None:
    message = pack(Working())
    assert message[0] == Kind.WORKING
    assert unpack(message) == Working()
    with pytest.raises(ValueError, match="damaged"):
        unpack(message + b"x")
