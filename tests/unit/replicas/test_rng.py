"""Philox against the known answers of Random123 1.14 (`kat_vectors`, philox4x32 10)."""

from __future__ import annotations

import pytest

from bifolio.replicas.rng import philox, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], want: str) -> None:
    assert " ".join(f"{word:08x}" for word in philox(counter, key)) == want


def test_a_uniform_is_the_first_53_bits() -> None:
    assert uniform(0, 0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53


def test_every_part_of_the_address_counts_and_so_does_its_high_half() -> None:
    parts = [
        (0, 0, 0),
        (1, 0, 0),
        (1 << 32, 0, 0),
        (0, 1, 0),
        (0, 1 << 32, 0),
        (0, 0, 1),
        (0, 0, 1 << 32),
        (-1, 0, 0),
    ]
    assert len({uniform(*address) for address in parts}) == len(parts)


def test_uniforms_are_uniform() -> None:
    values = [uniform(42, 0, i) for i in range(4000)]
    assert all(0 <= v < 1 for v in values)
    counts = [sum(i <= v * 10 < i + 1 for v in values) for i in range(10)]
    assert sum((c - 400) ** 2 / 400 for c in counts) < 27.9  # chi-squared, 9 degrees of freedom, p = 0.001
