"""Cuts the attention of one step into work for the programs of a GPU: lengths in, tables of integers out.

An item is a tile of query rows with a range of keys. Few rows over many keys would leave most of a GPU idle, so a
tile's keys are cut into parts, each an item of its own, and a merge joins what they found (split-KV, "flash decoding").

    sequence of 3 parts    | item: keys 0..   | item: keys ..   | item: keys .. m |  ->  merge  ->  rows of the output
    sequence of 1 part     | item: keys 0 .. m |                                     ->  rows of the output

Pure: knows neither devices nor tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .tiles import Tiles

Table = NDArray[np.int32]
ITEM = ("sequence", "first row", "first key", "end key", "first part row")  # sequence -1: no work; part -1: none
MERGE = ("row", "first part row", "part rows between two parts", "parts")  # row -1: no work

# Keys below which a part is not cut smaller: it would cost more to merge than it saves
DECODE_PART, PREFILL_PART = 256, 1024
INVARIANT_PART, INVARIANT_PARTS = 512, 64  # keys of a part, until there are so many of a sequence: they take memory


@dataclass(frozen=True, slots=True)
class Schedule:
    """decode, prefill  int32 [items, 5], as ITEM; the longest first, so that no processor begins it last
    merges     int32 [rows, 4], as MERGE
    part_rows  how many rows of partial results there are
    """

    decode: Table
    prefill: Table
    merges: Table
    part_rows: int


def schedule(
    starts: Sequence[int],
    lengths: Sequence[int] | Table,
    *,
    group: int,
    kv_heads: int,
    decode: Tiles,
    prefill: Tiles,
    processors: int,
    causal: bool = True,
    window: int | None = None,
    batch_invariant: bool = False,
) -> Schedule:
    """The work of sequences with rows starts[b] .. starts[b + 1] - 1 over lengths[b] keys.

    group       query heads of one KV head
    processors  of the device; with `Tiles.programs` they say how many items run at once

    A sequence whose rows fit into one decode tile is decoded: single tokens, or drafts to verify. Any other is prefill.
    A part is as long as the work divided by what runs at once, so that one long sequence among many short ones is cut
    and they are not. A sequence that grows, with no window, never gets fewer parts.

    batch_invariant  parts depend on the sequence's own length alone: the same bits in any batch
    """
    first = np.asarray(starts, np.int64)
    rows, keys = np.diff(first), np.asarray(lengths, np.int64)
    decoded = rows * group <= decode.rows
    items, merges, part_rows = [], [], 0
    phases = ((decode, decoded, DECODE_PART, INVARIANT_PARTS), (prefill, ~decoded, PREFILL_PART, 1))
    for tiles, chosen, shortest, most in phases:
        if not chosen.any():  # a decode step's prefill: half of the time that this takes
            items.append(np.empty((0, len(ITEM)), np.int32))
            merges.append(np.empty((0, len(MERGE)), np.int32))
            continue
        work = _cut_rows(rows, keys, chosen, tiles.rows // group, tiles.keys, causal, window)
        if batch_invariant:
            parts = np.minimum(work.tiles * tiles.keys // INVARIANT_PART, most)
        else:
            parts = _even_parts(work.tiles, shortest // tiles.keys, processors * tiles.programs, kv_heads)
        parts = np.maximum(parts, 1)
        cut = np.where(parts > 1, parts * work.held, 0)  # rows of partial results
        part_row = np.where(parts > 1, part_rows + np.cumsum(cut) - cut, -1)
        part_rows += int(cut.sum())
        items.append(_items(work, parts, part_row, tiles.keys))
        merges.append(_merges(work, parts, part_row, first))
    return Schedule(items[0], items[1], np.concatenate(merges), part_rows)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of tables that hold any of some schedules: lines of `Schedule.decode` and `Schedule.merges`, and part rows."""

    items: int
    merges: int
    part_rows: int


def decode_capacity(
    sequences: int, longest: int, *, kv_heads: int, decode: Tiles, processors: int, window: int | None = None
) -> Capacity:
    """The most that `schedule` makes of `sequences` sequences with one row each over any number of keys up to
    `longest`; 0 keys, which stand for no sequence, are an item as well. Not for batch_invariant.

    With P = at_once // kv_heads, `_even_parts` gives a sequence x = tiles * at_once // (all tiles * kv_heads) parts at
    most, so all x together are at most P. Each sequence is an item at least, so items <= sequences + P. Only those with
    x >= 2 have partial results and a merge: part rows <= P, merges <= P // 2. And x <= tiles of the longest // tiles of
    the shortest part: so short contexts are never cut.
    """
    seen = longest if window is None else min(longest, window + decode.keys - 1)  # its first tile begins at an edge
    most = -(-seen // decode.keys) // max(1, DECODE_PART // decode.keys)
    parts = min(processors * decode.programs // kv_heads, sequences * most) if most > 1 else 0
    return Capacity(sequences + parts, min(sequences, parts // 2), parts)


@dataclass(frozen=True, slots=True)
class _Work:
    """Arrays with an entry for each tile of query rows: which rows, and which keys they see."""

    sequence: NDArray[np.int64]
    row: NDArray[np.int64]  # of the sequence, the tile's first
    held: NDArray[np.int64]  # rows
    begin: NDArray[np.int64]  # keys, from an edge of a key tile on
    end: NDArray[np.int64]
    tiles: NDArray[np.int64]  # of keys


def _cut_rows(
    rows: NDArray[np.int64],
    keys: NDArray[np.int64],
    chosen: NDArray[np.bool_],
    height: int,
    width: int,
    causal: bool,
    window: int | None,
) -> _Work:
    count = np.where(chosen, -(-rows // height), 0)
    sequence, tile = _spread(count)
    row = tile * height
    held = np.minimum(rows[sequence] - row, height)
    position = keys[sequence] - rows[sequence] + row
    end = np.clip(position + held, 0, keys[sequence]) if causal else keys[sequence]
    begin = np.zeros_like(end)
    if window is not None:
        begin = np.minimum(np.maximum(position - window + 1, 0), end) // width * width
    return _Work(sequence, row, held, begin, end, -(-(end - begin) // width))


def _spread(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of counts 2, 0, 3: whose each is (0, 0, 2, 2, 2), and which of its owner's (0, 1, 0, 1, 2)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _even_parts(tiles: NDArray[np.int64], shortest: int, at_once: int, kv_heads: int) -> NDArray[np.int64]:
    """tiles / (the tiles that each of `at_once` programs gets), but no part shorter than `shortest`."""
    total = max(1, int(tiles.sum()) * kv_heads)
    return np.minimum(tiles // max(1, shortest), tiles * at_once // total)


def _items(work: _Work, parts: NDArray[np.int64], part_row: NDArray[np.int64], width: int) -> Table:
    which, part = _spread(parts)
    tiles, count = work.tiles[which], parts[which]
    begin = work.begin[which] + part * tiles // count * width
    end = np.minimum(work.begin[which] + (part + 1) * tiles // count * width, work.end[which])
    place = np.where(count > 1, part_row[which] + part * work.held[which], -1)
    table = np.stack((work.sequence[which], work.row[which], begin, end, place), axis=1)
    return table[np.argsort(begin - end, kind="stable")].astype(np.int32)


def _merges(work: _Work, parts: NDArray[np.int64], part_row: NDArray[np.int64], first: NDArray[np.int64]) -> Table:
    which, row = _spread(np.where(parts > 1, work.held, 0))
    output = first[work.sequence[which]] + work.row[which] + row
    return np.stack((output, part_row[which] + row, work.held[which], parts[which]), axis=1).astype(np.int32)
