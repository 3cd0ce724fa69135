"""A lease's secret proves that lease, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bifolio.kv_manager.secret import BYTES, proves, sign
from bifolio.protos.messages import BlockId, Generation, Lease, ReplicaId, RequestId

KEY = bytes(range(16))
LEASE = Lease(ReplicaId("p"), Generation(3, 2**40), (BlockId(5), BlockId(1), BlockId(7)), RequestId("r"), cached=1)


def test_it_proves_its_lease() -> None:
    assert proves(sign(KEY, LEASE), KEY, LEASE)
    assert len(sign(KEY, LEASE)) == BYTES == 16


@pytest.mark.parametrize(
    "other",
    [
        {"blocks": (BlockId(5), BlockId(1), BlockId(8))},
        {"blocks": (BlockId(1), BlockId(5), BlockId(7))},
        {"blocks": LEASE.blocks[:2]},
        {"blocks": (*LEASE.blocks, BlockId(9))},
        {"blocks": ()},
        {"generation": Generation(3, 2**40 + 1)},
        {"generation": Generation(4, 2**40)},
        {"generation": Generation(2**40, 3)},
        {"cached": 0},
        {"cached": 2},
    ],
    ids=str,
)
def test_it_proves_no_other_lease(other: dict[str, object]) -> None:
    assert not proves(sign(KEY, LEASE), KEY, replace(LEASE, **other))  # type: ignore[arg-type]


def test_a_number_of_cached_blocks_is_no_block() -> None:
    """Nothing that is signed reads like something else."""
    moved = replace(LEASE, cached=LEASE.blocks[0], blocks=(BlockId(LEASE.cached), *LEASE.blocks[1:]))
    assert not proves(sign(KEY, LEASE), KEY, moved)


def test_another_replicas_key_proves_nothing() -> None:
    assert not proves(sign(KEY[::-1], LEASE), KEY, LEASE)
    assert not proves(sign(b"", LEASE), KEY, LEASE)


def test_a_part_of_a_secret_proves_nothing() -> None:
    assert not any(proves(sign(KEY, LEASE)[:length], KEY, LEASE) for length in range(BYTES))


def test_every_bit_counts() -> None:
    for bit in range(8 * BYTES):
        secret = bytearray(sign(KEY, LEASE))
        secret[bit // 8] ^= 1 << bit % 8
        assert not proves(bytes(secret), KEY, LEASE)


def test_more_than_a_secret_proves_nothing() -> None:
    assert not proves(sign(KEY, LEASE) + b"\0", KEY, LEASE)
