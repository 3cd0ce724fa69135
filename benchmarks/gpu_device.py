"""The device that is measured: what it is, how a call is timed on it, and its two ceilings.

A time is the median over repeats of what passes on the device between two events. Before each repeat the L2 cache is
emptied by reading something larger, for data that was written would still have to leave it while the clock runs, and
the device is kept busy until the host has enqueued the call: what Python takes is in `host_us`, not in `us`. A call
that waits for the device itself is timed with its waits.

On the CPU (`tiny`) the same code runs with a plain clock and small sizes: that tries the code, not the machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_rows import Case, Numbers, Row, SkippedError

from bifolio.kernels import Backend, using

Call = Callable[[], object]
SECONDS = 0.4  # of repeats, for one time
FEWEST, MOST = 5, 100  # repeats
LONGEST_SLEEP = 20e-3  # that hides what the host takes
CYCLES_A_SECOND = 2e9  # about
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# What the replicas' own code needs, kernels apart
PACKAGES = ("numpy", "grpcio", "protobuf", "pydantic", "xxhash", "safetensors", "gguf")
SMI = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"


class Bench:
    """`ours` is the backend under test, `scratch` where models are written. `ceilings` are filled by the cases of
    `ceilings`."""

    def __init__(self, tiny: bool, scratch: Path) -> None:
        self.tiny, self.scratch = tiny, scratch
        self.device = torch.device("cpu" if tiny else "cuda")
        self.ours: Backend = "triton" if INTERPRETED or not tiny else "auto"
        self.ceilings: dict[str, float] = {}
        self._other: torch.Tensor | None = None

    def alive(self) -> bool:
        try:
            self.wait()
        except RuntimeError:
            return False
        return True

    def wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()

    def noise(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device).normal_()

    def captured(self, call: Call) -> Call:
        """The replay of a CUDA graph of the call."""
        if self.tiny:
            raise SkippedError("a CUDA graph needs a GPU")
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            call()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def timed(self, call: Call, *, moved: float = 0, flops: float = 0, calls: int = 1, wall: bool = False) -> Numbers:
        """`moved` bytes and `flops` of what `call` does, which is `calls` times what a row is about. With `wall`, also
        how long one call and a wait for it take on the host's clock, from an idle device."""
        call()  # compiles
        self.wait()
        seconds, host = self._repeated(call)
        numbers = {
            "us": round(median(seconds) / calls * 1e6, 3),
            "least_us": round(min(seconds) / calls * 1e6, 3),
            "host_us": round(host / calls * 1e6, 1),
            "repeats": len(seconds),
        }
        if wall:
            numbers["wall_us"] = round(median(self._walls(call, len(seconds))) / calls * 1e6, 1)
        return numbers | self._rate(median(seconds), moved, flops)

    def _rate(self, seconds: float, moved: float, flops: float) -> dict[str, float]:
        """By arithmetic where there is some, else by what was moved; `share` is that of the ceiling."""
        unit, ceiling, done = ("TFLOP/s", "matmul", flops / 1e12) if flops else ("GB/s", "copy", moved / 1e9)
        rate = done / seconds
        share = {"share": round(rate / self.ceilings[ceiling], 4)} if ceiling in self.ceilings else {}
        return {unit: round(rate, 3), **share} if done else {}

    def _repeated(self, call: Call) -> tuple[list[float], float]:
        """Seconds of each repeat, and what the host takes for one."""
        began = time.perf_counter()
        call()
        host = time.perf_counter() - began
        self.wait()
        whole = time.perf_counter() - began
        if self.tiny:
            return [whole], host
        sleep = min(2 * host + 50e-6, LONGEST_SLEEP)
        events = []
        for _ in range(max(FEWEST, min(MOST, int(SECONDS / (whole + sleep))))):
            self._empty_cache()
            torch.cuda._sleep(int(sleep * CYCLES_A_SECOND))
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events.append((start, end))
        self.wait()
        return [start.elapsed_time(end) / 1e3 for start, end in events], host

    def _walls(self, call: Call, repeats: int) -> list[float]:
        walls = []
        for _ in range(repeats):
            self._empty_cache()
            self.wait()
            began = time.perf_counter()
            call()
            self.wait()
            walls.append(time.perf_counter() - began)
        return walls

    def _empty_cache(self) -> None:
        if self.tiny:
            return
        if self._other is None:
            bytes_of_cache = torch.cuda.get_device_properties(self.device).L2_cache_size or 64 << 20
            self._other = torch.ones(bytes_of_cache, dtype=torch.float32, device=self.device)  # four times as large
        self._other.sum()


def lacking() -> list[str]:
    found = {each.name for each in importlib.metadata.distributions()}
    return [name for name in PACKAGES if name not in found]


def facts(bench: Bench) -> list[Case]:
    def versions(_: None) -> Numbers:
        with using(bench.ours) as kernels:
            found = {"kernels": kernels, "torch": torch.__version__, "cuda": torch.version.cuda}
        found["python"] = platform.python_version()
        try:
            import triton
        except ModuleNotFoundError:
            return found
        return found | {"triton": triton.__version__, "interpreted": INTERPRETED}

    def packages(_: None) -> Numbers:
        lack = lacking()
        held = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES if name not in lack]
        return {"packages": ", ".join(held), "lacking": ", ".join(lack) or "none"}

    def on_gpu() -> None:
        if bench.tiny:
            raise SkippedError("runs on the CPU")

    def device(_: None) -> Numbers:
        on_gpu()
        properties = torch.cuda.get_device_properties(bench.device)
        return {
            "gpu": properties.name,
            "processors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "cache": properties.L2_cache_size,
            "emptied": "L2, by reading four times as much before each repeat",
        }

    def clocks(_: None) -> Numbers:
        on_gpu()
        return {"sm_mhz": torch.cuda.clock_rate(bench.device)}

    def smi(_: None) -> Numbers:
        on_gpu()
        command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
        line = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.splitlines()[0]
        return dict(zip(SMI.split(","), line.split(", "), strict=True))

    ways: dict[str, Callable[[Any], Numbers]] = {
        "versions": versions,
        "packages": packages,
        "device": device,
        "nvidia-smi": smi,
        "clocks": clocks,
    }
    return [Case("device", "what it is", lambda: None, ways)]


def ceilings(bench: Bench) -> list[Case]:
    """What nothing is faster than: a copy, read and written bytes together, and a product of large matrices."""
    size, side = (1 << 16, 64) if bench.tiny else (2 << 30, 8192)

    def kept(name: str, unit: str, numbers: Numbers) -> Numbers:
        bench.ceilings[name] = numbers[unit]
        return numbers

    def copy(source: torch.Tensor) -> Numbers:
        target = torch.empty_like(source)
        return kept("copy", "GB/s", bench.timed(lambda: target.copy_(source), moved=2 * source.nbytes))

    def matmul(a: torch.Tensor) -> Numbers:
        b = bench.noise(side, side)
        return kept("matmul", "TFLOP/s", bench.timed(lambda: a @ b, flops=2 * side**3))

    return [
        Case("ceilings", f"copy of {size >> 20} MiB", lambda: bench.noise(size // 2), {"copy": copy}),
        Case("ceilings", f"product of {side} x {side} bfloat16", lambda: bench.noise(side, side), {"matmul": matmul}),
    ]


def held_ceilings(rows: Sequence[Row]) -> dict[str, float]:
    """Of an earlier run of the same book."""
    units = {"copy": "GB/s", "matmul": "TFLOP/s"}
    return {row.way: row.numbers[units[row.way]] for row in rows if row.section == "ceilings" and row.status == "ok"}
