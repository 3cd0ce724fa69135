"""Counting how far rows of logits are apart."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio.replicas.differences import Way

ROW = np.array([0.0, 2.0, 1.0, -3.0], np.float32)


def changed(index: int, value: float) -> np.ndarray:
    row = ROW.copy()
    row[index] = value
    return row


def test_equal_rows_have_no_difference() -> None:
    way = Way("again")
    way.count([ROW, ROW.copy()], [ROW, ROW])
    assert (way.compared, way.equal, way.flips, way.largest, way.mean, way.flip_rate) == (2, 2, 0, 0.0, 0.0, 0.0)


def test_the_mean_is_of_rows_with_other_bits() -> None:
    way = Way("again")
    way.count([ROW, changed(0, 0.5), changed(3, -2.0)], [ROW, ROW, ROW])
    assert (way.compared, way.equal, way.flips) == (3, 1, 0)
    assert (way.largest, way.mean) == (1.0, 1.5 / 8)


def test_another_choice_is_a_flip() -> None:
    way = Way("again")
    way.count([changed(2, 2.25), changed(1, 1.5)], [ROW, ROW])
    assert (way.flips, way.flip_rate, way.largest) == (1, 0.5, 1.25)


def test_bits_are_compared_not_numbers() -> None:
    way = Way("again")
    way.count([changed(0, -0.0)], [ROW])
    assert (way.equal, way.largest, way.mean) == (0, 0.0, 0.0)


def test_a_difference_beyond_float32_is_seen() -> None:
    way = Way("again")
    way.count([changed(0, 3e38)], [changed(0, -3e38)])
    assert way.largest == pytest.approx(6e38)


def test_as_many_rows_are_compared_as_there_are() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        Way("again").count([ROW], [ROW, ROW])


def test_parts_add_up_to_the_whole() -> None:
    ours, theirs = [ROW, changed(0, 0.5), changed(2, 9.0)], [changed(1, 1.0), ROW, ROW]
    whole, parts = Way("again", "eager"), Way("again", "eager")
    whole.count(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        part = parts.fresh()
        part.count([a], [b])
        parts.add(part)
    assert parts == whole
    with pytest.raises(AssertionError):
        whole.add(Way("again"))
