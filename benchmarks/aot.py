#!/usr/bin/env python3
"""What compilers make of the Triton kernels we ship, for GPUs that need not be there: `make aot`.

    python -P benchmarks/aot.py [--remeasure]

Each row is a kernel as its own wrapper launches it, compiled for one architecture. What must hold of it: no spills,
as many programs a processor as `tiles.py` says, tensor cores, K and V copied asynchronously, 16 bytes at a time, the
next tiles while one is computed. Registers and instructions may not grow far past aot.json, where --remeasure writes
what it found for this Triton. The exit status is 1 if anything does not hold.

Knows numbers; `aot_inspect.py` knows Triton. That a row holds says nothing of how fast it is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from bifolio.kernels.tiles import Phase, tiles

sys.path.append(os.path.dirname(__file__))
from aot_inspect import Reading, Row, read, version

GOLDENS = Path(__file__).with_suffix(".json")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
JOBS = 2
KB = 1024
# bytes of shared memory of a processor, and what each program loses of it beside its own
SHARED = {"sm_80": (164 * KB, KB), "sm_90": (228 * KB, KB), "sm_100": (228 * KB, KB), "gfx942": (64 * KB, 0)}
WARPS = {"sm_80": 64, "sm_90": 64, "sm_100": 64, "gfx942": 32}  # that a processor holds at most
REGISTERS = 2048  # of one lane, which a processor's warps share: 65536 / 32 on NVIDIA, 4 SIMDs of 512 on gfx942
GRANULE = 8  # a warp takes its registers by so many
MORE_INSTRUCTIONS, MORE_REGISTERS = 1.25, 8  # than the golden's


def fitting(row: Row, reading: Reading) -> int:
    """Programs that share a processor."""
    shared, lost = SHARED[row.architecture]
    warps = min(WARPS[row.architecture], REGISTERS // (-(-reading.registers // GRANULE) * GRANULE))
    return min(shared // max(reading.shared + lost, 1), warps // reading.warps)


def attention(architecture: str, phase: Phase, head_dim: int, heads: tuple[int, int], float8: bool = False) -> Row:
    tile = tiles(architecture, phase, head_dim, heads[0] // heads[1], 2)
    return Row("attend", architecture, tile.programs, phase, head_dim, heads, float8, tile=tile)


ROWS = (
    *(
        attention(architecture, phase, head_dim, heads)
        for head_dim, heads in ((128, (32, 8)), (64, (9, 3)))  # what takes longest first
        for phase in ("prefill", "decode")
        for architecture in reversed(ARCHITECTURES)
    ),
    attention("sm_90", "prefill", 96, (32, 8)),
    attention("sm_90", "decode", 96, (32, 8)),
    attention("sm_90", "decode", 128, (32, 8), float8=True),
    Row("_sample", "sm_90", 1, size=128256),  # a program is a row: most batches have fewer than there are processors
    # What follows waits for memory: enough programs to have much on its way
    Row("combine", "sm_90", 8, head_dim=64),
    Row("_rope_and_write", "sm_90", 8, head_dim=64),
    Row("_rms_norm", "sm_90", 8, size=4096),
    Row("_silu_mul", "sm_90", 8, size=14336),
)


@dataclass(frozen=True, slots=True)
class Bound:
    what: str
    got: int
    least: int = 0
    most: int | None = None

    def __str__(self) -> str:
        above = " and more" if self.most is None else f" to {self.most}" if self.most > self.least else ""
        return f"{self.what} {self.got}, allowed {self.least}{above}"

    @property
    def holds(self) -> bool:
        return self.got >= self.least and (self.most is None or self.got <= self.most)


def broken(row: Row, reading: Reading, golden: Mapping[str, int] | None) -> list[str]:
    """What does not hold, in words. Without a golden only what holds for every compiler is looked at."""
    bounds = [*_room(row, reading), *_instructions(row, reading), *_growth(reading, golden)]
    return [str(bound) for bound in bounds if not bound.holds]


def _room(row: Row, reading: Reading) -> Iterator[Bound]:
    shared, lost = SHARED[row.architecture]
    each = REGISTERS // (row.programs * reading.warps) // GRANULE * GRANULE
    yield Bound("spills", reading.spills, most=0)
    yield Bound(f"registers of {row.programs} programs", reading.registers, most=each)
    yield Bound(f"bytes shared of {row.programs} programs", reading.shared, most=shared // row.programs - lost)
    yield Bound("programs that fit", fitting(row, reading), least=row.programs)


def _instructions(row: Row, reading: Reading) -> Iterator[Bound]:
    if row.tile is None:
        yield Bound("128-bit loads", reading.loads, least=1)
        return
    kind = multiply(row)
    yield Bound(kind, reading.multiplies.get(kind, 0), least=1)
    if row.architecture.startswith("gfx"):
        yield Bound("128-bit loads", reading.loads, least=1)
        return
    for other in reading.multiplies.keys() - {kind}:
        yield Bound(other, reading.multiplies[other], most=0)
    padded, threads = 1 << (row.head_dim - 1).bit_length(), reading.warps * 32
    key = padded * (1 if row.float8 else 2)  # bytes of one K
    yield Bound("bytes shared of two tiles of K and V", reading.shared, least=2 * 2 * row.tile.keys * key)
    yield Bound("128-bit copies", reading.copies, least=1)
    # those of Q; K and V go by copies alone
    yield Bound("128-bit loads", reading.loads, most=-(-row.tile.rows * padded * 2 // 16 // threads))
    yield Bound("128-bit stores", reading.stores, least=1)


def _growth(reading: Reading, golden: Mapping[str, int] | None) -> Iterator[Bound]:
    if golden is not None:
        most = int(golden["instructions"] * MORE_INSTRUCTIONS)
        yield Bound("instructions, by the golden,", reading.instructions, most=most)
        yield Bound("registers, by the golden,", reading.registers, most=golden["registers"] + MORE_REGISTERS)


def multiply(row: Row) -> str:
    """The tensor cores' instruction that attention must come to: warps' own for few rows, else the newest there is."""
    if row.architecture.startswith("gfx"):
        return "MFMA"
    newest = {"sm_90": "HGMMA", "sm_100": "UTCMMA"}
    return "HMMA" if row.phase == "decode" else newest.get(row.architecture, "HMMA")


def table(readings: Mapping[Row, Reading]) -> str:
    head = "kernel|architecture|tile|regs|smem KB|spills|MMA|128-bit async copies|instructions|programs/processor"
    lines = [head.split("|"), ["---"] * 3 + ["---:"] * 7]
    for row, got in readings.items():
        tile, multiplies = row.tile, ", ".join(f"{kind} {count}" for kind, count in got.multiplies.items())
        cells = (
            row.name.removesuffix(f" {row.architecture}"),
            row.architecture,
            f"{tile.rows}x{tile.keys}, {tile.warps}w, {tile.stages}s" if tile else f"{got.warps}w",
            got.registers,
            f"{got.shared / KB:.1f}",
            got.spills,
            multiplies or "-",
            got.copies,
            got.instructions,
            f"{row.programs} ({fitting(row, got)} fit)",
        )
        lines.append([str(cell) for cell in cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def compile_all(rows: Sequence[Row]) -> tuple[str, dict[Row, Reading], dict[Row, str]]:
    """(Triton's version, what was read, why a row was not compiled), in the order of `rows`."""
    # Triton reads them when it is imported, in processes of our own: with the first it would compile nothing
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    with tempfile.TemporaryDirectory(prefix="bifolio-aot-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(JOBS, multiprocessing.get_context("spawn")) as pool:
            found, began = {}, time.monotonic()
            triton = pool.submit(version)
            started = {pool.submit(read, row): row for row in rows}
            for done in as_completed(started):
                found[row := started[done]] = done.result()
                print(f"{time.monotonic() - began:5.1f} s  {len(found)} of {len(rows)}: {row.name}", flush=True)
            why = {row: got for row in rows if isinstance(got := found[row], str)}
            return triton.result(), {row: got for row in rows if not isinstance(got := found[row], str)}, why


def main() -> int:
    parser = argparse.ArgumentParser(description="What compilers make of the Triton kernels.")
    parser.add_argument("--remeasure", action="store_true", help="write this Triton's registers and instructions")
    remeasure: bool = parser.parse_args().remeasure
    triton, readings, why = compile_all(ROWS)
    goldens = json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}
    if remeasure:
        goldens[triton] = {
            row.name: {"registers": got.registers, "instructions": got.instructions} for row, got in readings.items()
        }
        GOLDENS.write_text(json.dumps(goldens, indent=1) + "\n")
    print(f"\n{table(readings)}\n\ntriton {triton}, {time.strftime('%Y-%m-%d')}")
    known = goldens.get(triton)
    if known is None:
        print(f"no goldens for triton {triton}, only for {', '.join(goldens) or 'none'}: sizes are not compared")
    for row, got in readings.items():
        missing = known is not None and row.name not in known
        wrong = broken(row, got, None if known is None else known.get(row.name))
        if wrong or missing:
            why[row] = "; ".join(wrong + ["no golden: --remeasure"] * missing)
    for row, said in why.items():
        print(f"{row.name}: {said}")
    held = sum(row not in why for row in readings)
    print(f"{held} of {len(ROWS)} hold")
    return int(held < len(ROWS))


if __name__ == "__main__":
    sys.exit(main())
