"""Keys of blocks: equal wherever they are computed, and never equal for blocks that differ in anything."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from ledger_kit import GEOMETRY

from bifolio.kv_manager.keys import chain, root
from bifolio.protos.messages import Geometry, Key

SIZE = GEOMETRY.block_size
ANOTHER_PROCESS = """
from bifolio.kv_manager.keys import chain, root
from bifolio.protos.messages import Geometry
geometry = Geometry("m", layers=1, kv_heads=1, head_dim=8, block_size=4, dtype="float32")
print([key.hex() for key in chain(root(geometry, "salt", "adapter"), range(9), 4)])
"""

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def keys(tokens: list[int], geometry: Geometry = GEOMETRY, salt: str = "", adapter: str = "") -> tuple[Key, ...]:
    return chain(root(geometry, salt, adapter), tokens, geometry.block_size)


def test_every_process_has_the_same_keys() -> None:
    """These, so that a change of the format is seen: it would empty every cache, silently."""
    golden = [
        "b1eb84cd972fce32e4c68d60d03783a102e1d8e7e7d74dc443485add8b23d942",
        "0f0ff226aa478ec10df21f68504d1b2dcd9bac34d25cec871d2abca8b44ed313",
    ]
    assert [key.hex() for key in keys(list(range(9)), salt="salt", adapter="adapter")] == golden
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", ANOTHER_PROCESS]
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert printed.stdout.strip() == str(golden)


def test_a_key_is_what_the_file_says() -> None:
    texts = ("bifolio kv 2", "m", "float32", "4", "plain", "s", "é")
    parts = [len(text.encode()).to_bytes(8, "little") + text.encode() for text in texts]
    parent = sha256(b"".join(parts)).digest()
    assert root(GEOMETRY, "s", "é") == parent
    block = b"\x01\0\0\0\x00\x01\0\0\x02\0\0\0\x03\0\0\0"
    assert chain(parent, (1, 256, 2, 3), 4) == (sha256(parent + block).digest(),)


def test_salts_and_adapters_never_share() -> None:
    """Also where one's end reads like the other's beginning."""
    names = [
        ("", ""),
        ("x", ""),
        ("", "x"),
        ("ab", "c"),
        ("a", "bc"),
        ("abc", ""),
        ("", "abc"),
        ("a\0", "b"),
        ("a", "\0b"),
    ]
    every = [set(keys(list(range(40)), salt=salt, adapter=adapter)) for salt, adapter in names]
    assert all(len(one) == 10 for one in every)
    assert all(not one & other for one, other in combinations(every, 2))


def test_a_salt_may_be_any_text() -> None:
    assert len({root(GEOMETRY, salt) for salt in ("\ud800", "?", "é", "e\u0301")}) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "n"},
        {"dtype": "bfloat16"},
        {"block_size": 8},
        {"layout": "packed"},
        # so that no fields run into each other
        {"fingerprint": "mf", "dtype": "loat32"},
        {"block_size": 41, "layout": "plain", "dtype": "float3"},
    ],
    ids=str,
)
def test_every_geometry_has_keys_of_its_own(change: dict[str, object]) -> None:
    """Layers, heads and their size are the model's, so that its fingerprint stands for them."""
    other = replace(GEOMETRY, **change)  # type: ignore[arg-type]
    assert not set(keys(list(range(82)))) & set(keys(list(range(82)), other))


def test_a_block_has_the_same_key_however_its_heads_are_divided() -> None:
    assert root(replace(GEOMETRY, tensor_parallel=2)) == root(GEOMETRY)


@given(tokens)
def test_there_is_a_key_for_each_full_block(tokens: list[int]) -> None:
    assert len(keys(tokens)) == len(tokens) // SIZE
    assert all(len(key) == 32 for key in keys(tokens))


@given(tokens, tokens)
def test_a_chain_goes_on_from_any_of_its_keys(some: list[int], more: list[int]) -> None:
    some = some[: len(some) // SIZE * SIZE]
    first = keys(some)
    assert first + chain(first[-1] if first else root(GEOMETRY), more, SIZE) == keys(some + more)


few = st.lists(st.integers(0, 1), max_size=20)  # equal beginnings, and equal blocks after unequal ones, are common


@given(st.tuples(tokens, tokens) | st.tuples(few, few))
def test_keys_are_equal_exactly_where_all_tokens_up_to_there_are(pair: tuple[list[int], list[int]]) -> None:
    one, other = pair
    for i, a in enumerate(keys(one), 1):
        for j, b in enumerate(keys(other), 1):
            assert (a == b) == (one[: i * SIZE] == other[: j * SIZE])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_is_not_hashed(token: int) -> None:
    with pytest.raises(OverflowError):
        keys([token] * SIZE)
