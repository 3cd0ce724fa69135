"""What a prefill replica asks of a start before it computes: that blocks fit, and that the lease was granted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from split import Pair, pair

from bifolio.kv_manager.secret import sign
from bifolio.protos.errors import BifolioError, GeometryMismatch, StalePlacement
from bifolio.protos.messages import BlockId, Lease, Start
from bifolio.replicas.core import Core

TOKENS = list(range(5, 38))


def jobs_of(model: Path, work: Callable[[Pair, Start, list[bool]], None]) -> None:
    """`work` gets a start that is right, and a list that has an entry for each placement that was refused as stale."""

    async def go() -> None:
        async with pair(model, block_size=8, max_batched_tokens=32, kv_memory="512 tokens", max_sequences=4) as it:
            assert it.jobs is not None
            assert it.prefill is not None
            refused: list[bool] = []
            it.jobs._refused = lambda: refused.append(True)
            request = it.request(TOKENS, max_tokens=1)
            placement = await it.place(request)
            lease = placement.prefill
            assert lease is not None
            start = Start(
                request.id,
                lease.generation,
                lease.blocks,
                request.history,
                it.decode.geometry,
                0.0,
                secret=placement.prefill_secret,
            )
            await asyncio.to_thread(work, it, start, refused)

    asyncio.run(go())


def refusal(it: Pair, start: Start, kind: type[BifolioError]) -> str:
    """What is said; nothing is held then."""
    assert it.jobs is not None
    assert it.prefill is not None
    with pytest.raises(kind) as caught:
        it.jobs.begin(start)
    assert it.prefill.tags.report(0.0).leases == ()
    assert it.prefill.tags.held == 0
    return caught.value.message


def test_a_start_whose_secret_proves_nothing_is_a_stale_placement(glassllm_dir: Path) -> None:
    def work(it: Pair, start: Start, refused: list[bool]) -> None:
        core = it.prefill
        assert core is not None
        moved = tuple(BlockId(block + 20) for block in start.blocks)
        wrong: list[dict[str, Any]] = [
            {"secret": b""},
            {"secret": start.secret[:-1]},
            {"secret": bytes(16)},
            {"blocks": moved},
            {"generation": start.generation._replace(counter=start.generation.counter + 1)},
            {"cached_blocks": 1},
        ]
        for each in wrong:
            message = refusal(it, replace(start, **each), StalePlacement)
            assert "does not prove that lease" in message
            assert start.secret.hex() not in message
            assert core.secret.hex() not in message
        assert len(refused) == len(wrong)
        with it.jobs.begin(start) as job:  # type: ignore[union-attr]
            assert list(job.progress())

    jobs_of(glassllm_dir, work)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("block_size", 16),
        ("dtype", "bfloat16"),
        ("layout", "another"),
        ("layers", 99),
        ("kv_heads", 99),
        ("head_dim", 99),
        ("fingerprint", "another"),
    ],
)
def test_a_start_of_other_blocks_is_refused_and_both_sides_are_named(
    glassllm_dir: Path, name: str, theirs: object
) -> None:
    shown = "model" if name == "fingerprint" else name

    def work(it: Pair, start: Start, refused: list[bool]) -> None:
        other = replace(start, geometry=replace(start.geometry, **{name: theirs}))  # type: ignore[arg-type]
        message = refusal(it, other, GeometryMismatch)
        asked, has = message.split("prefill replica prefill#1")
        assert f"{shown}={theirs} " in asked
        assert f"{shown}={getattr(start.geometry, name)} " in has
        assert not refused

    jobs_of(glassllm_dir, work)


def test_who_divides_the_heads_otherwise_is_served(glassllm_dir: Path) -> None:
    def work(it: Pair, start: Start, refused: list[bool]) -> None:
        with it.jobs.begin(replace(start, geometry=replace(start.geometry, tensor_parallel=2))) as job:  # type: ignore[union-attr]
            assert list(job.progress())

    jobs_of(glassllm_dir, work)


def test_blocks_to_be_written_are_the_new_owners_before_anything_is_computed(glassllm_dir: Path) -> None:
    def work(it: Pair, start: Start, refused: list[bool]) -> None:
        core = it.prefill
        assert core is not None
        owners: list[object] = []
        submit = core.submit

        def submitted(command: Any) -> None:
            owners.extend(core.store.owner(block) for block in start.blocks)
            submit(command)

        core.submit = submitted  # type: ignore[method-assign]
        with it.jobs.begin(start) as job:  # type: ignore[union-attr]
            assert owners == [start.generation] * len(start.blocks)
            assert list(job.progress())

    jobs_of(glassllm_dir, work)


def test_cached_blocks_stay_their_writers(glassllm_dir: Path) -> None:
    def work(it: Pair, start: Start, refused: list[bool]) -> None:
        core = it.prefill
        assert core is not None
        with it.jobs.begin(start) as job:  # type: ignore[union-attr]
            assert list(job.progress())
        again = replace(start, generation=start.generation._replace(counter=10**6), cached_blocks=2)
        with it.jobs.begin(signed(again, core)) as job:  # type: ignore[union-attr]
            owners = [core.store.owner(block) for block in start.blocks]
            assert owners == [start.generation] * 2 + [again.generation] * (len(start.blocks) - 2)
            assert list(job.progress())

    jobs_of(glassllm_dir, work)


def signed(start: Start, core: Core) -> Start:
    """As the KV manager would grant it."""
    lease = Lease(core.replica, start.generation, start.blocks, cached=start.cached_blocks)
    return replace(start, secret=sign(core.secret, lease))


def test_replicas_have_keys_of_their_own_which_only_the_manager_is_told(glassllm_dir: Path) -> None:
    def work(it: Pair, start: Start, refused: list[bool]) -> None:
        assert it.prefill is not None
        assert len(it.prefill.secret) == 16
        assert it.prefill.secret != it.decode.secret
        assert it.prefill.info().secret == it.prefill.secret
        assert it.prefill.secret.hex() not in repr(it.prefill.info())
        assert repr(it.prefill.secret) not in repr(it.prefill.info())
        assert repr(start.secret) not in repr(start)

    jobs_of(glassllm_dir, work)
