"""What the benchmarks of this directory share: a replica's environment, rounds of timing, and how results are shown.

Everything that is compared is timed in rounds: each round runs every way once, so a machine that is slower for a while
is slower for all of them. A time is the median over the rounds, a ratio the median of the rounds' own ratios.

Scripts are run with `python -P`, because one of them is named like a package it imports; hence each appends this
directory to the path before it imports this file. Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bifolio.cluster.app import replica_environment
from bifolio.cluster.config import load

Way = Callable[[], object]  # something that is timed
Seconds = list[float]  # of one way, round by round
PUBLIC = "public function"  # of a kernel: the call with its checks


@dataclass
class Case:
    """The native way and others in the same rounds. `notes` say which of several ways an other is."""

    name: str
    seconds: dict[str, Seconds]
    notes: dict[str, str] = field(default_factory=dict)


def arguments(doc: str | None, *, repeats: int | None = None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks share; `doc` is the script's docstring, and what takes no time has
    no `repeats`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, metavar="N", help="rounds; default: %(default)s")
    parser.add_argument("--kernels", default="auto", help="auto (default), avx512, avx2 or generic")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was measured")
    return parser


def become_a_replica(threads: int, *, exact: bool = False) -> None:
    """Run this script again from its start, once, in a replica's environment: malloc and OpenMP read theirs before a
    line of Python runs, and fresh memory for each large tensor would cost more than some of what is measured."""
    wanted = replica_environment(load(None, {"engine.threads": threads, "engine.exact": exact}))
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | wanted)


def seconds_of(way: Way) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began


def in_rounds(ways: Mapping[str, Way], rounds: int) -> dict[str, Seconds]:
    """The seconds of each way in each round. A first round, which warms up, is not counted."""
    each_round = [{name: seconds_of(way) for name, way in ways.items()} for _ in range(rounds + 1)]
    return by_name(each_round[1:])


def by_name(each_round: Sequence[Mapping[str, float]]) -> dict[str, Seconds]:
    return {name: [seconds[name] for seconds in each_round] for name in each_round[0]}


def fastest(seconds: Mapping[str, Seconds]) -> str:
    return min(seconds, key=lambda name: statistics.median(seconds[name]))


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """How many times b is in a, round by round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def total(*parts: Sequence[float]) -> Seconds:
    """The sum of several ways, round by round."""
    return [sum(each) for each in zip(*parts, strict=True)]


def milliseconds(seconds: Sequence[float]) -> str:
    median = statistics.median(seconds) * 1e3
    return f"{median:.1f}" if median >= 10 else f"{median:.2f}"


def rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def verdict(met: bool, bar: str) -> str:
    return f"{bar} {'met' if met else 'MISSED'}"


def machine(kernels: str) -> dict[str, Any]:
    """What figures depend on besides the code; `kernels` is what `use` has chosen."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "kernels": kernels,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def title(facts: Mapping[str, Any]) -> str:
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads, {facts['kernels']} kernels, "
        f"torch {facts['torch']}, load {facts['load']:.1f}"
    )


def table(heading: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table: columns of words, then columns of numbers."""
    made = Table(title=heading, title_justify="left")
    for name in words:
        made.add_column(name, no_wrap=True)
    for name in numbers:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def progress(what: str) -> None:
    if sys.stderr.isatty():
        print(what, file=sys.stderr)


def show(*shown: Table | str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)  # in a pipe nothing is cut off
    for each in shown:
        console.print(each, soft_wrap=isinstance(each, str))


def write_json(path: Path | None, results: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
