"""The plots of a comparison, as docs/performance.md shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from compare_memory import WEIGHTS
from compare_parts import BREAKS
from compare_show import COLUMNS, middle, names, of_part, steady_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "bifolio", "axes.spines.top": False}
LOOK = {
    "bifolio": ("#1b6ca8", "o"),
    "bifolio int8": ("#64a8d8", "o"),
    "bifolio auto": ("#0f3d5e", "D"),
    "bifolio split": ("#64a8d8", "D"),
    "vllm": ("#c1440e", "s"),
    "vllm bfloat16": ("#e29a76", "s"),
    "vllm installed": ("#8a8a8a", "s"),
    "llama.cpp": ("#4c8c4a", "^"),
    "transformers": ("#9467bd", "v"),
}
OTHER = ("#444444", "x")


def draw(results: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, drawn in (("steady", _steady), ("mixed", _mixed), ("goodput", _goodput)):
        if points := of_part(results, part):
            with mpl.rc_context(STYLE):  # type: ignore[arg-type]
                figure = Figure(figsize=(7.2 if part == "goodput" else 5.6, 3.2), layout="constrained")
                drawn(figure, points, results)
                figure.savefig(folder / f"compare-{part}.svg", metadata={"Date": None, "Creator": None})


def _steady(figure: Figure, points: list[dict[str, Any]], results: dict[str, Any]) -> None:
    axes = _plain(figure.add_subplot())
    counts = sorted({point["streams"] for point in points})
    for name in names(points):
        each = [middle(steady_of(points, name, count).values()) for count in counts]
        _line(axes, name, counts, each)
    if speeds := results["memory"].values():
        steps = max(speeds) * 1e3 / WEIGHTS
        axes.plot(counts, [steps * n for n in counts], color="#bbbbbb", linestyle=":", label="bfloat16 weights alone")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("streams")
    axes.set_ylabel("tokens a second, all streams")
    axes.set_title(f"Steady decode, {len(results['cores'])} cores", fontsize=9)
    axes.legend(frameon=False, fontsize=7)


def _mixed(figure: Figure, points: list[dict[str, Any]], results: dict[str, Any]) -> None:
    axes = _plain(figure.add_subplot())
    shown = names(points)
    for shift, column, colour in ((-0.2, "p99 without", "#1b6ca8"), (0.2, "p99 with", "#c1440e")):
        each = [middle(COLUMNS[column](point) for point in points if point["engine"] == name) or 0.0 for name in shown]
        bars = axes.bar(
            [i + shift for i in range(len(shown))], each, 0.38, color=colour, label=f"{column} long prompts"
        )
        axes.bar_label(bars, [f"{value:,.0f}" for value in each], fontsize=7)
    axes.set_yscale("log")
    axes.set_xticks(range(len(shown)), shown)
    axes.set_ylabel("milliseconds between chunks, p99")
    axes.set_title("8 streams, without and with prompts of 1,600 tokens", fontsize=9)
    axes.legend(frameon=False, fontsize=7)


def _goodput(figure: Figure, points: list[dict[str, Any]], results: dict[str, Any]) -> None:
    traces = list(dict.fromkeys(point["trace"] for point in points))
    for i, trace in enumerate(traces):
        axes = _plain(figure.add_subplot(1, len(traces), i + 1))
        here = [point for point in points if point["trace"] == trace]
        scales = sorted({point["scale"] for point in here}, reverse=True)
        offered = [middle(p["offered"] for p in here if p["scale"] == s) for s in scales]
        for name in names(here):
            shares = [middle(p["share"] for p in here if (p["engine"], p["scale"]) == (name, s)) for s in scales]
            _line(axes, name, offered, shares)
        axes.axhline(BREAKS, color="#bbbbbb", linestyle=":", linewidth=1)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("requests a second")
        axes.set_ylabel("share of good requests" if i == 0 else "")
        axes.set_title(trace, fontsize=9)
    axes.legend(frameon=False, fontsize=7)


def _plain(axes: Axes) -> Axes:
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines["right"].set_visible(False)
    return axes


def _line(axes: Axes, name: str, x: list[Any], y: list[float | None]) -> None:
    colour, marker = LOOK.get(name, OTHER)
    axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.4, label=name)  # type: ignore[arg-type]
