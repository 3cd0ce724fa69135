#!/usr/bin/env python3
"""Are the Triton kernels right on this GPU, and how fast are they? One run of a few minutes that leaves a JSON file.

    benchmarks/gpu.sh [--only parity]                   on a machine with PyTorch and Triton alone: nothing is installed
    python -P benchmarks/gpu.py --out DIR [--minutes 8] [--only SECTION] [--resume]
    python -P benchmarks/gpu.py --out DIR --tiny        the same code on a CPU, with sizes that try the code alone

device    what it is: versions, clocks, driver
parity    each public kernel against its torch twin in float32, and bits that shall be equal
ceilings  a device copy, a product of matrices
roofline  attention and small kernels at the sizes of served models, beside others
layouts   a block-major cache against a layer-major one, decoding
graphs    the attention of a step of 30 layers: eager, planned anew, replayed
small     norm, activation, RoPE with the cache write and sampling, against their twins

Each row is tried on its own, one that fails says why, and DIR/gpu.json has all of them after each. The exit status is 0
when every row of parity is right or was skipped, 1 when not, and 75 when the process has to be started again with
--resume, because a row took the device with it: `gpu.sh` does so.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.append(os.path.dirname(__file__))
import gpu_attention
import gpu_device
import gpu_parity
import gpu_small
from gpu_device import Bench
from gpu_report import report
from gpu_rows import Book, Case

SECTIONS: dict[str, Callable[[Bench], list[Case]]] = {
    "device": gpu_device.facts,
    "parity": gpu_parity.cases,
    "ceilings": gpu_device.ceilings,
    "roofline": lambda bench: [*gpu_attention.roofline(bench), *gpu_small.roofline(bench)],
    "layouts": gpu_attention.layouts,
    "graphs": gpu_attention.graphs,
    "small": gpu_small.cases,
}
SHARES = {"parity": 0.45, "roofline": 0.4, "layouts": 0.15, "graphs": 0.15}  # of all the time, at most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=8, help="for everything; default: %(default)s")
    parser.add_argument("--only", action="append", choices=tuple(SECTIONS), help="may be given several times")
    parser.add_argument("--resume", action="store_true", help="go on with what DIR holds")
    parser.add_argument("--tiny", action="store_true", help="on the CPU")
    args = parser.parse_args()
    if not (args.tiny or torch.cuda.is_available()):
        parser.error("there is no GPU; --tiny runs on the CPU")
    bench = Bench(args.tiny)
    book = Book(args.out / "gpu.json", args.minutes * 60, SHARES, bench.alive, args.resume)
    bench.ceilings |= gpu_device.held_ceilings(book.rows)
    if args.tiny:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        for section in args.only or SECTIONS:
            book.run(SECTIONS[section](bench))
    print(report(book.rows, book.spent / 60))
    return int(any(row.section == "parity" and row.status not in ("ok", "skipped") for row in book.rows))


if __name__ == "__main__":
    sys.exit(main())
