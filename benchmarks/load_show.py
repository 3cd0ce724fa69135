"""What the load driver prints: the plan's statistics, a line while it runs, and the tables of its figures."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import measure
from load_client import Client
from load_figures import SLOWEST
from load_plan import BLOCK, Plan
from load_run import Run
from rich.markup import escape
from rich.table import Table

COLUMNS = ("p50", "p90", "p99", "max")
ROWS = {
    "ttft": "time to first token",
    "gap": "gap between chunks",
    "gap_per_token": "gap, per token",
    "tpot": "time per token of a request (TPOT)",
    "whole": "whole request",
}


def plan_shown(plan: Plan, counts: dict[str, Any], source: str) -> list[Table | str]:
    table = measure.table(escape(plan.what), ("plan",), ("", *COLUMNS))
    endless = " (the first of a loop without end)" if counts["endless"] else ""
    table.add_row("requests" + endless, str(counts["requests"]))
    if counts["sessions"]:
        table.add_row("sessions", str(counts["sessions"]))
    if counts["left_out"]:
        table.add_row("left out: do not fit --context", str(counts["left_out"]))
    for side, name in (("tokens_in", "prompt tokens"), ("tokens_out", "output tokens")):
        of = counts[side]
        table.add_row(name, f"{of['sum']:,}", *(f"{of[column]:,.0f}" for column in COLUMNS if column in of))
    if counts["span_s"] is not None:
        table.add_row("seconds from first to last", f"{counts['span_s']:.1f}")
        table.add_row("requests in the busiest 10 s", str(counts["busiest_10_s"]))
    table.add_row(
        f"full blocks of {BLOCK} tokens seen before",
        f"{_share(counts['blocks_seen_before'], counts['blocks'])} of {counts['blocks']:,}",
    )
    table.add_row("prompt tokens in such blocks", _share(counts["tokens_in_seen_blocks"], counts["tokens_in"]["sum"]))
    shown: list[Table | str] = [escape(source), table]
    if plan.clock_scale != 1:
        how = f"slowed {plan.clock_scale:g} times" if plan.clock_scale > 1 else f"{1 / plan.clock_scale:g} times faster"
        shown.append(f"[bold yellow]THE TRACE'S CLOCK IS {how.upper()}: its 60 s take {60 * plan.clock_scale:g} s[/]")
    return shown


def figures_shown(of: dict[str, Any]) -> list[Table | str]:
    shown: list[Table | str] = []
    for kind, rows in of["latency"].items():
        table = measure.table(
            f"milliseconds, {kind + ' ' if kind else ''}requests that are ok", ("",), ("count", *COLUMNS)
        )
        for name, row in rows.items():
            table.add_row(ROWS[name], str(row["count"]), *_ms(row))
        shown.append(table)
    if (phases := of["phases"]) is not None:
        shown += _phases_shown(phases)
    return [*shown, _totals(of), *_errors(of["errors"])]


def _phases_shown(phases: dict[str, Any]) -> list[Table | str]:
    table = measure.table("milliseconds between chunks of the streams", ("phases",), ("count", *COLUMNS))
    for name in ("without", "with"):
        table.add_row(f"{name} long prompts", str(phases[name]["count"]), *_ms(phases[name]))
    counts = [phase["count"] for phase in phases["by_phase"]]
    each = zip(phases["p99_ratios"], counts[::2], counts[1::2], strict=True)
    by_phase = ", ".join(f"{_ratio(ratio)} ({with_long} / {without} gaps)" for ratio, without, with_long in each)
    return [
        table,
        f"p99 with long prompts / without: {_ratio(phases['p99_ratio'])}; phase by phase: {by_phase}",
        f"{phases['set_apart']} gaps are in neither: a long prompt lasted into a phase without",
    ]


def _ratio(ratio: float | None) -> str:
    return "not known" if ratio is None else f"{ratio:.2f}"


def _totals(of: dict[str, Any]) -> Table:
    requests, tokens, client, cached, goodput = (of[k] for k in ("requests", "tokens", "client", "cached", "goodput"))
    table = measure.table("totals", ("", " "), ())
    cut = f", {requests['cut']} cut off" if requests["cut"] else ""
    empty = f", {requests['no_tokens']} of the ok ones without a token" if requests["no_tokens"] else ""
    table.add_row("requests", f"{requests['ok']} ok, {requests['failed']} failed{cut}{empty}, in {of['seconds']:.1f} s")
    table.add_row("requests a second", f"{requests['ok'] / max(of['seconds'], 1e-9):.2f}")
    known = "by usage" if tokens["in_by_usage"] == requests["ok"] else f"usage of {tokens['in_by_usage']}, else planned"
    table.add_row(
        "tokens in",
        f"{tokens['in']:,} ({known}; planned {tokens['in_planned']:,}), {tokens['in_per_s']:,.1f} a second",
    )
    table.add_row(
        "tokens out", f"{tokens['out']:,} (planned {tokens['out_planned']:,}), {tokens['out_per_s']:,.1f} a second"
    )
    sources = ", ".join(f"{name} ({count})" for name, count in tokens["sources"].items())
    table.add_row("tokens of a chunk by", sources or "no chunks")
    slos = [f"first token within {goodput['slo_ttft']:g} s"] if goodput["slo_ttft"] is not None else []
    if goodput["slo_itl"] is not None:
        slos.append(f"p{SLOWEST} of its gaps within {goodput['slo_itl']:g} s")
    if slos:
        table.add_row("goodput", f"{goodput['per_s']:.2f} requests a second ({goodput['good']}) with {', '.join(slos)}")
    if cached["requests_told"]:
        share = _share(cached["cached_tokens"], cached["prompt_tokens"])
        table.add_row("cached prompt tokens", f"{share}, as {cached['requests_told']} answers say")
    else:
        table.add_row("cached prompt tokens", "no answer says")
    late, loop = client["late"], client["loop"]
    table.add_row("sent later than due, ms", ", ".join(f"{name} {_one_ms(late, name)}" for name in COLUMNS))
    table.add_row("client's own delays, ms", ", ".join(f"{name} {_one_ms(loop, name)}" for name in COLUMNS))
    table.add_row("client's CPU", f"{client['cpu_seconds']:.2f} s, {client['cpu_share']:.1%} of a core")
    return table


def _errors(errors: dict[str, Any]) -> list[Table | str]:
    if not errors["kinds"]:
        return []
    counts = ", ".join(f"{kind} {count}" for kind, count in errors["kinds"].items())
    first = [f"  request {each['request']}: {each['kind']}: {each['message']}" for each in errors["first"]]
    return [escape("\n".join([f"errors: {counts}", *first]))]


def _ms(row: dict[str, Any]) -> list[str]:
    return [_one_ms(row, column) for column in COLUMNS]


def _one_ms(row: dict[str, Any], column: str) -> str:
    return "-" if column not in row else measure.milliseconds([row[column]])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


async def report(run: Run, client: Client) -> None:
    """A line on stderr every second, or every two where it cannot be written over."""
    tty = sys.stderr.isatty()
    every, events, at = (1.0 if tty else 2.0), 0, time.perf_counter()
    try:
        while True:
            await asyncio.sleep(every)
            counts, now = run.counts(), time.perf_counter()
            rate, events, at = (client.events - events) / (now - at), client.events, now
            line = (
                f"{now - run.began:6.0f} s  {counts['ok']} done  {counts['failed']} failed  "
                f"{counts['waiting']} in flight  {rate:.0f} tok/s"
            )
            print(f"\r\x1b[K{line}" if tty else line, end="" if tty else "\n", file=sys.stderr, flush=True)
    finally:
        if tty:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
