"""What the window and the size of frames do to the bandwidth of our stream, beside raw gRPC with messages of that size;
all points in the same rounds. Table and plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import matplotlib as mpl
import measure
from matplotlib.figure import Figure
from rich.table import Table
from transfer_rates import GB, GRPC, Sample, pair, sampled
from transfer_source import SMALL, Serving

WINDOWS = (1, 2, 4, 8, 16, 32)
FRAMES = tuple(1 << n for n in range(16, 21))
COLOURS = ("#c1440e", "#d98324", "#8a8d3c", "#4c8c4a", "#1b6ca8", "#5b3f8c")
STYLE = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "bifolio", "axes.spines.top": False}

Curves = Mapping[str, list[float]]  # GB/s at each of FRAMES, by window, and those of raw gRPC


def sweep(mib: int, rounds: int) -> tuple[Curves, Curves]:
    """GB/s, and seconds of CPU for a GB, of both sides together."""
    points = [(window, frame) for window in WINDOWS for frame in FRAMES]
    with pair((SMALL,), mib, [Serving(*point) for point in points]) as (sender, (receiver,)):
        ways: dict[str, measure.Way] = {}
        for number, (window, frame) in enumerate(points):
            ways[f"{window} {frame}"] = partial(receiver.frames, number)
        for frame in FRAMES:
            ways[f"{GRPC} {frame}"] = partial(receiver.raw, frame)
        found, gb = sampled(ways, sender, rounds), receiver.size / GB
    names = [*map(str, WINDOWS), GRPC]
    speed = {name: [gb / _seconds(found[f"{name} {frame}"]) for frame in FRAMES] for name in names}
    cpu = {name: [_cpu(found[f"{name} {frame}"]) / gb for frame in FRAMES] for name in names}
    return speed, cpu


def _seconds(samples: Sequence[Sample]) -> float:
    return median(sample.seconds for sample in samples)


def _cpu(samples: Sequence[Sample]) -> float:
    return median(sample.sender + sample.receiver for sample in samples)


def shown(heading: str, curves: Curves) -> Table:
    table = measure.table(heading, ["window"], [f"{frame >> 10} KiB" for frame in FRAMES])
    for name, values in curves.items():
        table.add_row(name, *(f"{value:.2f}" for value in values))
    return table


def draw(curves: Curves, path: Path) -> None:
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(5.6, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for name, values in curves.items():
            if name == GRPC:
                axes.plot(FRAMES, values, color="#888888", linestyle="--", linewidth=1.2, label="raw gRPC, no frames")
            else:
                colour = COLOURS[WINDOWS.index(int(name))]
                axes.plot(FRAMES, values, color=colour, marker="o", markersize=4, linewidth=1.4, label=f"window {name}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(FRAMES, [f"{frame >> 10} KiB" for frame in FRAMES])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines["right"].set_visible(False)
        axes.set_xlabel("bytes in a frame, at most")
        axes.set_ylabel("GB/s")
        axes.set_title(f"Frames over loopback, blocks of {SMALL.block_bytes:,} bytes", fontsize=9)
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
        figure.savefig(path, metadata={"Date": None, "Creator": None})
