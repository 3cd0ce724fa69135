#!/usr/bin/env python3
"""Are the Triton kernels right on this GPU, how fast are they, and what do engines make of them? One run of a few
minutes that leaves a JSON file.

    benchmarks/gpu.sh [--only parity]                   where Bifolio is not installed
    benchmarks/gpu.sh --cpu-interpreter                 on a CPU, kernels in Triton's interpreter, with sizes that try
                                                        the code alone: none of its times is a measurement
    python -P benchmarks/gpu.py --out DIR [--minutes 8] [--only SECTION] [--row TEXT] [--resume]

device    what it is: versions, packages, clocks, driver
parity    each public kernel against its torch twin in float32, and bits that shall be equal
ceilings  a device copy, a product of matrices
engine    a replica's core: start-up, tokens a second, steps replayed and launched, what a step takes beside kernels
split     a prefill and a decode replica on this one device against one that does both
roofline  attention and small kernels at the sizes of served models, beside others
graphs    the attention of a step of 30 layers: eager, planned anew, replayed
layouts   a block-major cache against a layer-major one, decoding
small     norm, activation, RoPE with the cache write and sampling, against their twins

Each row is tried on its own, one that fails says why, and DIR/gpu.json has all of them after each. The exit status is 0
when nothing is wrong and no row of parity has failed, 1 when not, and 75 when the process has to be started again with
--resume, because a row took the device with it: `gpu.sh` does so.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

if "--cpu-interpreter" in sys.argv:  # Triton reads it when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

sys.path.append(os.path.dirname(__file__))
import gpu_attention
import gpu_device
import gpu_parity
import gpu_small
from gpu_device import Bench
from gpu_report import report
from gpu_rows import Book, Case, Numbers, SkippedError


def engines(section: str, module: str) -> Callable[[Bench], list[Case]]:
    """The cases of a module that imports replicas: one row without them where that cannot be done."""

    def cases(bench: Bench) -> list[Case]:
        def imported(_: None) -> Numbers:
            if lack := gpu_device.lacking():
                raise SkippedError(f"lacking {', '.join(lack)}: see WHEELS in benchmarks/gpu.sh")
            importlib.import_module(module)
            return {}

        try:
            made: list[Case] = importlib.import_module(module).cases(bench)
        except Exception:
            return [Case(section, "its packages", lambda: None, {"imported": imported})]
        return made

    return cases


SECTIONS: dict[str, Callable[[Bench], list[Case]]] = {
    "device": gpu_device.facts,
    "parity": gpu_parity.cases,
    "ceilings": gpu_device.ceilings,
    "engine": engines("engine", "gpu_engine"),
    "split": engines("split", "gpu_split"),
    "roofline": lambda bench: [*gpu_attention.roofline(bench), *gpu_small.roofline(bench)],
    "graphs": gpu_attention.graphs,
    "layouts": gpu_attention.layouts,
    "small": gpu_small.cases,
}
# Of all the time, at most; what a section does not use is for those behind it
SHARES = {"parity": 0.25, "engine": 0.35, "split": 0.2, "roofline": 0.3, "graphs": 0.1, "layouts": 0.1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=8, help="for everything; default: %(default)s")
    parser.add_argument("--only", action="append", choices=tuple(SECTIONS), help="may be given several times")
    parser.add_argument("--row", action="append", metavar="TEXT", help="only rows with this text; several times too")
    parser.add_argument("--resume", action="store_true", help="go on with what DIR holds")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="for models of random weights: 3 GB")
    parser.add_argument("--cpu-interpreter", action="store_true", help="try the code on a CPU; measures nothing")
    args = parser.parse_args()
    if not (args.cpu_interpreter or torch.cuda.is_available()):
        parser.error("there is no GPU; --cpu-interpreter tries the code on a CPU")
    scratch = args.scratch or Path(tempfile.gettempdir()) / "bifolio-gpu"
    bench = Bench(args.cpu_interpreter, scratch / "models")
    book = Book(args.out / "gpu.json", args.minutes * 60, SHARES, bench.alive, args.resume)
    bench.ceilings |= gpu_device.held_ceilings(book.rows)
    if args.cpu_interpreter:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        for section in args.only or SECTIONS:
            book.run(_chosen(SECTIONS[section](bench), args.row))
    text = report(book.rows, book.spent / 60, args.cpu_interpreter)
    (args.out / "gpu.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    failed = [row for row in book.rows if row.section == "parity" and row.status not in ("ok", "skipped")]
    return int(bool(failed) or any(row.status == "wrong" for row in book.rows))


def _chosen(cases: list[Case], texts: list[str] | None) -> list[Case]:
    def wanted(case: Case, way: str) -> bool:
        return texts is None or any(text in f"{case.name} | {way}" for text in texts)

    return [replace(case, ways={w: call for w, call in case.ways.items() if wanted(case, w)}) for case in cases]


if __name__ == "__main__":
    sys.exit(main())
