"""Tables of a comparison, on the screen and in docs/performance.md between its two marks. Pure but for the file.

A figure is the median of the rounds. A ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import measure
from compare_memory import WEIGHTS
from compare_parts import BREAKS, SLO
from rich.table import Table

Point = dict[str, Any]
Results = dict[str, Any]
BEGIN, END = "<!-- compare.sh: begin -->", "<!-- compare.sh: end -->"
TUNED, LLAMA = ("vllm", "vllm eager"), "llama.cpp"  # the first one that was measured stands for vLLM
COLUMNS: dict[str, Callable[[Point], float | None]] = {
    "p50 without, ms": lambda point: _ms(point["without"]["p50"]),
    "p99 without": lambda point: _ms(point["without"]["p99"]),
    "p50 with": lambda point: _ms(point["with"]["p50"]),
    "p99 with": lambda point: _ms(point["with"]["p99"]),
    "p99 with / without": lambda point: point["p99_ratio"],
    "tok/s without": lambda point: point["tok_s_without"],
    "tok/s with": lambda point: point["tok_s"],
    "long TTFT, ms": lambda point: _ms(point["long_ttft"]),
}


class Sheet:
    """One table, for a screen or for a page."""

    def __init__(self, heading: str, words: Sequence[str], numbers: Sequence[str]) -> None:
        self.heading, self.words, self.numbers = heading, list(words), list(numbers)
        self.rows: list[list[str]] = []

    def rich(self) -> Table:
        table = measure.table(self.heading, self.words, self.numbers)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        head = [f"| {' | '.join([*self.words, *self.numbers])} |"]
        head.append("|" + "---|" * len(self.words) + "---:|" * len(self.numbers))
        return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in self.rows)])


def line(point: Point) -> str:
    """What one measurement has brought."""
    name = f"  {point['engine']:<15}"
    if point["part"] == "steady":
        said = f"{point['streams']:>3} streams  {_number(point['tok_s'])} tok/s"
    elif point["part"] == "mixed":
        said = "  ".join(f"{column} {_number(value(point))}" for column, value in COLUMNS.items())
        said += f"  {point['long_answered']} of {point['long_sent']} long ones"
    else:
        said = f"{point['trace']} / {point['scale']:g}: {point['good']} of {point['requests']} good, "
        said += f"TTFT p99 {_number(point['ttft_p99'])} s, gap p99 {_number(_ms(point['gap_p99']))} ms"
    failed = f"  {point['failed']} FAILED {point.get('errors', '')}" if point["failed"] else ""
    return f"{name} {said}  ({point['seconds']:.0f} s, {point['cpu_share']:.2f} cores){failed}"


def of_part(results: Results, part: str) -> list[Point]:
    return [point for point in results["points"] if point["part"] == part]


def names(points: Iterable[Point]) -> list[str]:
    return list(dict.fromkeys(point["engine"] for point in points))


def middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def steady_of(points: Iterable[Point], engine: str, streams: int) -> dict[int, float | None]:
    """Tokens a second by round."""
    return {p["round"]: p["tok_s"] for p in points if (p["engine"], p["streams"]) == (engine, streams)}


def ratio(ours: dict[int, float | None], theirs: dict[int, float | None]) -> float | None:
    """Of the rounds that both have."""
    pairs = [(a, theirs.get(turn)) for turn, a in ours.items()]
    return middle(a / b for a, b in pairs if a is not None and b)


def memory_sheet(results: Results) -> Sheet:
    sheet = Sheet(
        "memory, read from end to end", ("threads",), ("GB/s", f"ms for {WEIGHTS:.0f} MB of weights", "steps a second")
    )
    for threads, speed in results["memory"].items():
        sheet.rows.append([threads, f"{speed:.1f}", f"{WEIGHTS / speed:.1f}", f"{speed * 1e3 / WEIGHTS:.1f}"])
    return sheet


def steady_sheets(results: Results) -> list[Sheet]:
    points = of_part(results, "steady")
    counts = sorted({point["streams"] for point in points})
    columns = [str(count) for count in counts]
    speeds = Sheet("tokens a second by streams", ("engine",), columns)
    for name in names(points):
        speeds.rows.append([name, *(_number(middle(steady_of(points, name, n).values())) for n in counts)])
    ratios = Sheet("ratios by streams", ("",), columns)
    for ours in [name for name in names(points) if name.startswith("bifolio")]:
        for theirs in [name for name in names(points) if not name.startswith("bifolio")]:
            each = [ratio(steady_of(points, ours, n), steady_of(points, theirs, n)) for n in counts]
            ratios.rows.append([f"{ours} / {theirs}", *(_number(value, 2) for value in each)])
    return [speeds, ratios]


def mixed_sheets(results: Results) -> list[Sheet]:
    points = of_part(results, "mixed")
    every = ", ".join(f"{seconds:g}" for seconds in sorted({point["long_every"] for point in points}))
    heading = f"8 streams, and in every second phase a prompt of 1,600 tokens each {every} s"
    sheet = Sheet(heading, ("engine",), (*COLUMNS, "long answered"))
    for name in names(points):
        mine = [point for point in points if point["engine"] == name]
        row = [
            _number(middle(value(point) for point in mine), 2 if " / " in c else None) for c, value in COLUMNS.items()
        ]
        long = f"{sum(p['long_answered'] for p in mine)} of {sum(p['long_sent'] for p in mine)}"
        sheet.rows.append([name, *row, long])
    columns = ("p50 with", "p99 with", "tok/s with", "long TTFT, ms")
    ratios = Sheet("ratios", ("",), columns)
    for ours in [name for name in names(points) if name.startswith("bifolio")]:
        for theirs in [name for name in names(points) if not name.startswith("bifolio")]:
            each = [ratio(_rounds(points, ours, column), _rounds(points, theirs, column)) for column in columns]
            ratios.rows.append([f"{ours} / {theirs}", *(_number(value, 2) for value in each)])
    return [sheet, ratios]


def bars(results: Results) -> list[str]:
    """What we want of ourselves, and whether it was so."""
    points, said = of_part(results, "steady"), []
    for ours, other, wanted in (("bifolio", TUNED, 1.2), ("bifolio int8", TUNED, 1.5), ("bifolio", (LLAMA,), 1.0)):
        theirs = next((name for name in other if name in names(points)), "")
        for n in sorted({point["streams"] for point in points}):
            value = ratio(steady_of(points, ours, n), steady_of(points, theirs, n))
            said += _verdict(f"{n} streams, {ours} / {theirs}", value, wanted, at_least=True)
    points, ours = of_part(results, "mixed"), "bifolio auto"
    theirs = next((name for name in TUNED if name in names(points)), "")
    mine = [point["p99_ratio"] for point in points if point["engine"] == ours]
    said += _verdict(f"{ours}: p99 with / without long prompts", middle(mine), 1.25)
    for column, wanted, at_least in (
        ("p99 with", 0.55, False),
        ("tok/s with", 1.0, True),
        ("long TTFT, ms", 1.6, False),
    ):
        value = ratio(_rounds(points, ours, column), _rounds(points, theirs, column))
        said += _verdict(f"{column.removesuffix(', ms')}, {ours} / {theirs}", value, wanted, at_least=at_least)
    return said


def _verdict(what: str, value: float | None, wanted: float, *, at_least: bool = False) -> list[str]:
    if value is None:
        return []
    met = value >= wanted if at_least else value <= wanted
    bar = f"bar {'>=' if at_least else '<='} {wanted:g}"
    return [f"{what}: {value:.2f}, {measure.verdict(met, bar)}"]


def _rounds(points: Iterable[Point], engine: str, column: str) -> dict[int, float | None]:
    return {point["round"]: COLUMNS[column](point) for point in points if point["engine"] == engine}


def goodput_sheets(results: Results) -> list[Sheet]:
    points, sheets = of_part(results, "goodput"), []
    for trace in dict.fromkeys(point["trace"] for point in points):
        here = [point for point in points if point["trace"] == trace]
        scales = sorted({point["scale"] for point in here}, reverse=True)
        offered = {scale: middle(p["offered"] for p in here if p["scale"] == scale) for scale in scales}
        heading = f"{trace}: share of good requests by requests a second (clock slowed)"
        columns = [f"{_number(offered[scale], 2)} ({scale:g} x)" for scale in scales]
        sheet = Sheet(heading, ("engine",), (*columns, f"below {BREAKS:.0%} from", "good a second, best"))
        for name in names(here):
            mine = [point for point in here if point["engine"] == name]
            shares = {s: middle(p["share"] for p in mine if p["scale"] == s) for s in scales}
            best = max((middle(p["good_s"] for p in mine if p["scale"] == s) or 0.0 for s in scales), default=0.0)
            sheet.rows.append([name, *(_percent(shares[s]) for s in scales), broken(shares, offered), f"{best:.2f}"])
        sheets.append(sheet)
    return sheets


def broken(shares: dict[float, float | None], offered: dict[float, float | None]) -> str:
    """The lowest load at which too few requests are good."""
    for scale, share in shares.items():
        if share is not None and share < BREAKS:
            return f"{_number(offered[scale], 2)} a second"
    return "-"


def engines_sheet(results: Results) -> Sheet:
    sheet = Sheet("engines", ("engine", "what", "version", "binding", "idle", "resident MB"), ())
    for name, of in results["engines"].items():
        if "skipped" in of:
            sheet.rows.append([name, of["what"], f"SKIPPED: {of['skipped'][:120]}", of["binding"], "", ""])
        else:
            idle, resident = f"{of.get('idle_share', 0.0):.1%} of a core", f"{of.get('resident_mb', 0.0):,.0f}"
            sheet.rows.append([name, of["what"], of.get("version", "?"), of["binding"], idle, resident])
    return sheet


def show(results: Results) -> None:
    measure.show(measure.title(results["machine"]), *(sheet.rich() for sheet in _sheets(results)), *bars(results))


def _sheets(results: Results) -> list[Sheet]:
    made = [engines_sheet(results)]
    made += [memory_sheet(results)] if results["memory"] else []
    made += steady_sheets(results) if of_part(results, "steady") else []
    made += mixed_sheets(results) if of_part(results, "mixed") else []
    return made + goodput_sheets(results)


def section(results: Results, images: str) -> str:
    """The page's section, without its marks."""
    machine = results["machine"]
    cores = len(results["cores"])
    parts = [
        "## Against other engines",
        "    benchmarks/compare.sh",
        f"{machine['cpu']}, {cores} cores, {machine['kernels']} kernels, printed on {results['time']}. Everyone has "
        "the same weights (SmolLM2-135M in bfloat16, int8 where it says so), prompts and cores, and one computes at a "
        "time, in turns, round by round. Medians of the rounds; ratios are medians of the rounds' own.",
        engines_sheet(results).markdown(),
        _flags(results),
        _TUNED,
    ]
    if results["memory"]:
        parts += ["### Memory", memory_sheet(results).markdown()]
    for part, heading, said, sheets in (
        ("steady", "Steady decode", _STEADY, steady_sheets(results)),
        ("mixed", "While long prompts arrive", _MIXED, mixed_sheets(results)),
        ("goodput", "Goodput on two traces", _GOODPUT, goodput_sheets(results)),
    ):
        if points := of_part(results, part):
            rounds = len({point["round"] for point in points})
            parts += [f"### {heading}", said + f" Rounds: {rounds}."]
            for sheet in sheets:
                parts += [f"{sheet.heading[0].upper()}{sheet.heading[1:]}:", sheet.markdown()]
            parts.append(f"![{heading}]({images}/compare-{part}.svg)")
    if verdicts := bars(results):
        parts += ["### What we want of ourselves", "\n".join(f"- {each}" for each in verdicts)]
    return "\n\n".join(parts)


_TUNED = (
    "vLLM is tuned to the dtype that the CPU has instructions for: float32 without AVX512-BF16, where oneDNN has no "
    "bfloat16 linears and vLLM falls back on torch's own (not measured to the end); a step then reads 538 MB of "
    "weights. Chunks of 256 tokens, a thread for each core, no prefix cache. `--engines 'vllm,vllm eager,vllm not "
    "bound,vllm one core less'` compares other settings; AMD's zentorch is taken by vLLM where an AMD CPU has AVX512. "
    "Engines other than ours are stopped while it is not their turn, ours has ended."
)
_STEADY = (
    "Streams of 64 tokens in that begin together; the rate is that of all streams from when the last one has its first "
    "token until the first one ends. Both cores, one replica."
)
_MIXED = (
    "8 streams of 32 tokens in and 256 out; by turns without and with long prompts, 16 tokens out. Times "
    "are those between chunks at the client, which shares the cores."
)
_GOODPUT = (
    "The first part of Mooncake's conversation trace with lengths / 32, and of Azure's conversation trace of 2023 with "
    f"lengths / 4, their clocks slowed. Good: the first token within {SLO.ttft:g} s and p99 of the request's own gaps "
    f"within {SLO.itl:g} s. Loads are what is sent, not what is answered."
)


def _flags(results: Results) -> str:
    """How each was started, as a block of a shell's lines."""
    lines = []
    for name, of in results["engines"].items():
        variables = "".join(f"{key}={value} " for key, value in of["environment"].items() if key.startswith("VLLM_CPU"))
        command = of["command"].replace("{config}", f"<(echo '{json.dumps(of['config'])}')")
        for port in (" --http-port {port}", " --grpc-port {port2}", " --port {port}", " --host 127.0.0.1"):
            command = command.replace(port, "")
        lines += [f"    # {name}", f"    {variables}{command}"]
    return "\n".join(lines)


def write_section(page: Path, results: Results, images: Path) -> None:
    """Between the marks; at the end of a page that has none."""
    text = page.read_text(encoding="utf-8")
    made = f"{BEGIN}\n{section(results, images.name)}\n{END}"
    if BEGIN in text and END in text:
        before, _, rest = text.partition(BEGIN)
        text = before + made + rest.partition(END)[2]
    else:
        text = f"{text.rstrip()}\n\n{made}\n"
    page.write_text(text, encoding="utf-8")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _number(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return "-"
    if digits is not None:
        return f"{value:.{digits}f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
