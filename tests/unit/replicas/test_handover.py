"""Prefill on one engine, decode on another, over a real Prefill stream with a real model: no Ray."""

import asyncio
import contextlib
import json
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from split import Pair, config, pair

from bifolio.kv_manager.block_store import Unreached
from bifolio.kv_manager.secret import sign
from bifolio.protos.errors import InvalidRequest, StalePlacement
from bifolio.protos.messages import BlockId, Lease, RequestId, Start
from bifolio.replicas.delayed_device import DelayedDevice
from bifolio.replicas.device import Device

PROMPT = [
    5,
    300,
    41,
    77,
    512,
    9,
    23,
    640,
    88,
    31,
    7,
    450,
    61,
    19,
    200,
    33,
    4,
    18,
    95,
    702,
    11,
    66,
    130,
    42,
    8,
    55,
    91,
]
GREEDY = {"max_tokens": 30, "temperature": 0.0}
SMALL = {"block_size": 8, "max_batched_tokens": 32, "max_sequences": 8, "kv_memory": "2048 tokens"}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def answer(
    model: Path, split: bool, *prompts: list[int], on: Device | None = None, **sampling
) -> list[list[int]]:
    async with pair(model, split=split, on=on, **SMALL) as it:
        out = await asyncio.gather(*(it.tokens(it.request(p, **sampling)) for p in prompts))
        await it.settled()
        return out


@pytest.mark.parametrize("copies", [True, False], ids=["copied", "sent"])
def test_split_and_whole_give_the_same_ids(glassllm_dir, copies):
    prompts = [PROMPT, PROMPT[3:12], PROMPT * 3, [7]]

    async def split() -> list[list[int]]:
        async with pair(glassllm_dir, kv=config(True, copies=copies), **SMALL) as it:
            out = await asyncio.gather(*(it.tokens(it.request(p, **GREEDY)) for p in prompts))
            await it.settled()
            assert it.decode.meter.read().ways == {"copied" if copies else "sent: off": 4}
            return out

    ids = run(split())
    assert ids == run(answer(glassllm_dir, False, *prompts, **GREEDY))
    assert [len(each) for each in ids] == [30] * 4


class Apart(DelayedDevice):
    """As if each replica had a GPU of its own."""

    def reach(self, handle):
        return Unreached("elsewhere", "it is on another GPU")


def forbidden(*_):
    raise AssertionError("a payload was asked for")


@pytest.mark.parametrize("on", [DelayedDevice(1), DelayedDevice(2), Apart(1)], ids=["one", "one too", "apart"])
def test_blocks_that_move_late_and_out_of_order_give_the_same_ids(glassllm_dir, on, caplog):
    """On one device they are copied, between two they are sent; on the host, where the ids come from, copied too."""
    prompts = [PROMPT, PROMPT[3:12], PROMPT * 3, [7]]

    async def late() -> list[list[int]]:
        async with pair(glassllm_dir, on=on, **SMALL) as it:
            if not isinstance(on, Apart):
                it.decode.store.writing = it.prefill.store.read = forbidden
            out = await asyncio.gather(*(it.tokens(it.request(p, **GREEDY)) for p in prompts))
            await it.settled()
            return out

    caplog.set_level(logging.INFO, "bifolio.kv_manager")
    assert run(late()) == run(answer(glassllm_dir, True, *prompts, **GREEDY))
    way = "sent: it is on another GPU" if isinstance(on, Apart) else "copied out of its memory"
    told = [line for line in caplog.messages if line.startswith("blocks of the prefill replica")]
    assert [line.partition(" are ")[2] for line in told] == [way, "copied out of its memory"]


def test_handles_that_lead_nowhere_take_the_way_through_the_host(glassllm_dir):
    async def nowhere() -> None:
        async with pair(glassllm_dir, on=DelayedDevice(3), **SMALL) as it:
            request = it.request(PROMPT, **GREEDY)
            expected = await it.tokens(request)
            for memory in (b"", b"\0garbage", json.dumps([1, "key", "host", 0, 9, 9, []]).encode()):
                request = it.request(PROMPT, salt=str(memory), **GREEDY)  # nothing of it is cached
                placement = replace(await it.place(request), prefill_memory=memory)
                deltas = []
                async for delta in it.deltas(request, placement):
                    deltas.append(delta)
                assert [token for delta in deltas for token in delta.tokens] == expected
                assert deltas[0].moved.bytes == 4 * it.decode.cache.block_bytes
            await it.settled()

    run(nowhere())


def test_memory_of_a_replica_that_is_not_there_any_more_ends_the_attempt_as_resumable(glassllm_dir):
    """Its address has another one. What was mapped still holds blocks: of the right size, with the wrong content."""

    async def gone() -> None:
        async with pair(glassllm_dir, on=DelayedDevice(4), **SMALL) as it:
            request = it.request(PROMPT, **GREEDY)
            placement = replace(await it.place(request), prefill_memory=it.decode.store.export())
            (delta,) = [d async for d in it.streams.generate(placement, request)]
            assert delta.resumable[::2] == ("StalePlacement", None)
            it.ledger.revoke(request.id, time.monotonic())
            assert await it.tokens(it.request(PROMPT, **GREEDY))
            await it.settled()

    run(gone())


def test_a_seed_gives_the_same_ids_split_and_whole_alone_and_in_company(glassllm_dir):
    sampling = {"max_tokens": 25, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 1234}
    (alone,) = run(answer(glassllm_dir, True, PROMPT, **sampling))
    together = run(answer(glassllm_dir, False, PROMPT, PROMPT[::-1], PROMPT[5:], **sampling))
    assert together[0] == alone


def test_a_resumed_request_goes_on_as_if_nothing_had_happened(glassllm_dir):
    async def resumed() -> tuple[list[int], list[int]]:
        async with pair(glassllm_dir, **SMALL) as it:
            request = it.request(PROMPT, max_tokens=30, temperature=0.8, seed=7)
            whole = await it.tokens(request)
            rest = await it.tokens(replace(request, generated=tuple(whole[:11])))
            await it.settled()
            return whole, rest

    whole, rest = run(resumed())
    assert whole[11:] == rest


def test_a_block_that_went_to_another_lease_makes_an_old_placement_stale(glassllm_dir):
    async def reuse() -> None:
        async with pair(glassllm_dir, **{**SMALL, "kv_memory": "256 tokens"}) as it:
            request = it.request(PROMPT, **GREEDY)
            expected = await it.tokens(request)
            late = await it.place(it.request(PROMPT, **GREEDY))
            it.ledger.expire(time.monotonic() + 11)  # nobody opened it: its blocks are free again
            it.beat()
            for _ in range(4):  # each takes a third of the cache
                await it.tokens(it.request(PROMPT * 3, **GREEDY))
            (delta,) = [d async for d in it.streams.generate(late, request)]
            assert delta.resumable is not None
            assert delta.resumable[0] == "StalePlacement"
            assert await it.tokens(request) == expected
            await it.settled()

    run(reuse())


def test_a_stale_prefill_lease_ends_the_attempt_as_resumable(glassllm_dir):
    async def steal() -> None:
        async with pair(glassllm_dir, **SMALL) as it:
            assert it.prefill is not None
            request = it.request(PROMPT, **GREEDY)
            placement = await it.place(request)
            assert placement.prefill is not None
            thief = placement.prefill.generation._replace(counter=placement.prefill.generation.counter + 100)
            it.prefill.tags.open(Lease(it.prefill.replica, thief, placement.prefill.blocks))
            (delta,) = [d async for d in it.streams.generate(placement, request)]
            assert delta.resumable is not None
            assert delta.resumable[::2] == ("StalePlacement", None)  # no replica is to blame
            it.prefill.tags.close(thief)

    run(steal())


def test_a_start_that_makes_no_sense_is_refused_and_leaves_no_trace(glassllm_dir):
    """The stream's port takes messages from anyone on this machine."""

    async def nonsense() -> None:
        async with pair(glassllm_dir, **SMALL) as it:
            assert it.prefill is not None
            assert it.jobs is not None
            placement = await it.place(it.request(PROMPT, **GREEDY))
            assert placement.prefill is not None
            good = Start(
                RequestId("x"),
                placement.prefill.generation,
                placement.prefill.blocks,
                tuple(PROMPT),
                it.prefill.geometry,
                0.0,
                secret=placement.prefill_secret,
            )
            last = BlockId(it.prefill.cache.blocks)
            more = it.prefill.positions + 1
            assert more <= last * 8
            for wrong in (
                {"blocks": ()},
                {"blocks": good.blocks[:-1]},
                {"blocks": (*good.blocks, BlockId(99))},
                {"blocks": (good.blocks[0],) * len(good.blocks)},
                {"blocks": (BlockId(0), *good.blocks[1:])},
                {"blocks": (BlockId(last + 1), *good.blocks[1:])},
                {"tokens": ()},
                {"tokens": (5,) * more, "blocks": tuple(map(BlockId, range(1, -(-more // 8) + 1)))},
                {"tokens": (-1, *good.tokens[1:])},
                {"tokens": (10**6, *good.tokens[1:])},
                {"prompt_logprobs": 21},
                {"prompt_logprobs": 2**32 - 1},
                {"prompt_logprobs": -1},
            ):
                asked = replace(good, **wrong)
                lease = replace(placement.prefill, blocks=asked.blocks)
                with pytest.raises(InvalidRequest):
                    it.jobs.begin(replace(asked, secret=sign(it.prefill.secret, lease)))
            lease = replace(placement.prefill, blocks=tuple(BlockId(b + 50) for b in good.blocks))
            again = replace(good, blocks=lease.blocks, secret=sign(it.prefill.secret, lease))
            with it.jobs.begin(good), pytest.raises(StalePlacement, match="open already"):
                it.jobs.begin(again)
            assert it.prefill.tags.held == 0

    run(nonsense())


def test_parts_of_the_time_to_the_first_token_add_up(glassllm_dir):
    async def parts() -> None:
        async with pair(glassllm_dir, **SMALL) as it:
            async for delta in it.deltas(it.request(PROMPT * 3, **GREEDY)):
                if delta.timings is not None:
                    t = delta.timings
                    assert min(t.queue, t.prefill, t.transfer, t.first_decode) >= 0
                    assert t.prefill > 0
                    assert t.elapsed == pytest.approx(t.queue + t.prefill + t.transfer + t.first_decode)
                    assert delta.moved is not None
                    assert delta.moved.blocks == -(-len(PROMPT * 3) // 8)
                    return

    run(parts())


def test_the_first_block_arrives_before_the_last_chunk_is_computed(glassllm_dir):
    """The last chunk waits for a block to arrive: were blocks sent only at the end, neither would ever come."""

    async def overlap() -> None:
        async with pair(glassllm_dir, kv=config(True, copies=False), **SMALL) as it:
            assert it.prefill is not None
            arrived = threading.Event()
            writing, compute = it.decode.store.writing, it.prefill.runner.compute

            @contextlib.contextmanager
            def watched():
                with writing() as write:

                    def written(*args):
                        write(*args)
                        arrived.set()

                    yield written

            def computed(rows):
                if any(row.want_logits for row in rows):
                    assert arrived.wait(20), "no block came while the prompt was being computed"
                return compute(rows)

            it.decode.store.writing, it.prefill.runner.compute = watched, computed
            assert len(await it.tokens(it.request(PROMPT * 3, **GREEDY))) == 30

    run(overlap())


async def leave_during_prefill(it: Pair) -> None:
    request = it.request(PROMPT * 3, **GREEDY)
    task = asyncio.create_task(it.tokens(request))
    await asyncio.sleep(0.001)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    it.ledger.revoke(request.id, time.monotonic())  # as the ingress does: a lease may not have been opened yet


async def leave_during_decode(it: Pair) -> None:
    async with contextlib.aclosing(it.deltas(it.request(PROMPT, max_tokens=90, temperature=0.0))) as deltas:
        async for _ in deltas:
            return


@pytest.mark.parametrize("leave", [leave_during_prefill, leave_during_decode])
def test_leaving_returns_every_block_on_both_sides(glassllm_dir, leave):
    async def many() -> None:
        async with pair(glassllm_dir, **SMALL) as it:
            for _ in range(3):
                await asyncio.gather(*(leave(it) for _ in range(6)))
                await it.settled()

    run(many())


def test_out_of_blocks_the_latest_arrival_is_preempted_and_resumes(glassllm_dir):
    async def crowd() -> None:
        few = {**SMALL, "kv_memory": "256 tokens", "max_sequences": 3}
        prompts = [PROMPT[i : i + 20] for i in range(3)]
        async with pair(glassllm_dir, **SMALL) as roomy:
            expected = [await roomy.tokens(roomy.request(p, max_tokens=90, temperature=0.0)) for p in prompts]
        async with pair(glassllm_dir, **few) as it:
            assert [await resume(it, p) for p in prompts] == expected
            assert await asyncio.gather(*(resume(it, p) for p in prompts)) == expected
            await it.settled()

    async def resume(it: Pair, prompt: list[int]) -> list[int]:
        """What the ingress does: place the request again with the tokens it has."""
        request = it.request(prompt, max_tokens=90, temperature=0.0)
        while True:
            async with contextlib.aclosing(it.deltas(request)) as deltas:
                async for delta in deltas:
                    request = replace(request, generated=request.generated + delta.tokens)
                    if delta.finish:
                        return list(request.generated)

    run(crowd())


def test_block_zero_is_never_leased(glassllm_dir):
    async def lease() -> None:
        async with pair(glassllm_dir, **SMALL) as it:
            placement = await it.place(it.request(PROMPT, **GREEDY))
            assert all(block > BlockId(0) for lease in placement.leases for block in lease.blocks)

    run(lease())
