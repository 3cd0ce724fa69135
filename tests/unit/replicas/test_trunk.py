"""What streams say reaches an ingress by one trunk, whole and in order."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from loop_kit import in_a_loop

from bifolio.protos.messages import Delta
from bifolio.replicas.trunk import Trunks


async def stream(*tokens: int, error: Exception | None = None) -> AsyncGenerator[Delta, None]:
    for token in tokens:
        await asyncio.sleep(0)
        yield Delta((token,))
    if error is not None:
        raise error


async def heard(trunks: Trunks, name: str, ends: int) -> list[tuple[tuple[int, int | None], ...]]:
    """Batches, until so many streams have ended."""
    batches = []
    async with aclosing(trunks.said(name)) as said:
        async for batch in said:
            batches.append(tuple((number, delta and delta.tokens[0]) for number, delta in batch))
            ends -= sum(delta is None for _, delta in batch)
            if not ends:
                break
    return batches


@in_a_loop
async def test_what_streams_say_at_once_is_one_message():
    trunks = Trunks()
    async with asyncio.TaskGroup() as tasks:
        got = tasks.create_task(heard(trunks, "a", 2))
        for number in (1, 2):
            tasks.create_task(trunks.carry("a", number, stream(number)))
    assert {number for number, _ in got.result()[0]} == {1, 2}


@in_a_loop
async def test_a_stream_that_ends_before_its_trunk_is_asked_for_is_heard():
    trunks = Trunks()
    await trunks.carry("a", 7, stream(1, 2))
    assert await heard(trunks, "a", 1) == [((7, 1), (7, 2), (7, None))]


@in_a_loop
async def test_trunks_do_not_hear_each_other():
    trunks = Trunks()
    async with asyncio.TaskGroup() as tasks:
        got = {name: tasks.create_task(heard(trunks, name, 1)) for name in "ab"}
        tasks.create_task(trunks.carry("a", 1, stream(1)))
        tasks.create_task(trunks.carry("b", 1, stream(2)))
    assert {name: sum(task.result(), ()) for name, task in got.items()} == {
        "a": ((1, 1), (1, None)),
        "b": ((1, 2), (1, None)),
    }


@in_a_loop
async def test_a_stream_that_breaks_raises_in_its_own_call_and_has_no_end():
    trunks = Trunks()
    listening = asyncio.create_task(heard(trunks, "a", 1))
    with pytest.raises(RuntimeError, match="broken"):
        await trunks.carry("a", 1, stream(1, error=RuntimeError("broken")))
    await trunks.carry("a", 2, stream(5))
    assert sum(await listening, ()) == ((1, 1), (2, 5), (2, None))


@in_a_loop
async def test_streams_of_a_trunk_that_was_cut_end():
    trunks, closed = Trunks(), asyncio.Event()

    async def endless() -> AsyncGenerator[Delta, None]:
        try:
            while True:
                await asyncio.sleep(0)
                yield Delta((1,))
        finally:
            closed.set()

    carrying = asyncio.create_task(trunks.carry("a", 1, endless()))
    async with aclosing(trunks.said("a")) as said:
        await anext(said)
    await asyncio.wait_for(carrying, 5)
    assert closed.is_set()


@in_a_loop
async def test_nothing_is_kept_of_trunks_that_are_over():
    trunks = Trunks()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(heard(trunks, "a", 1))
        tasks.create_task(trunks.carry("a", 1, stream(1)))
    assert not trunks._trunks
