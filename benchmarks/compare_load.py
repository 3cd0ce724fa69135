"""One measurement of one server: a plan of load.py's kinds is sent, and its figures are cut down to what is compared.

Times are in seconds. Knows servers by their address alone.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load_client import Client, Endpoint
from load_figures import Slo, Timeline, figures, timeline
from load_percentiles import percentile
from load_plan import Lengths, Plan, mixed, steady
from load_run import Run, drive
from load_text import Book
from load_trace import trace

PROMPT = 64  # tokens of a steady stream's prompt
LONG_PROMPT, STREAMS = 1600, 8  # of the mixed load
OVERTIME = 8.0  # seconds after a plan's last arrival in which what is under way may end


@dataclass(frozen=True, slots=True)
class Door:
    """Where to ask, and whether the server knows vLLM's options and stream_options."""

    url: str
    model: str
    vllm: bool = True

    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.model, vllm=self.vllm, usage=self.vllm, timeout=120.0)


async def sent(plan: Plan, door: Door, limit: float | None = None) -> Run:
    """`limit` seconds after the start, what is under way is cut."""
    run, stop = Run(), asyncio.Event()
    if limit is not None:
        asyncio.get_running_loop().call_later(limit, stop.set)
    gc.collect()
    async with Client(door.endpoint()) as client:
        await drive(plan, client.ask, run, stop)
    return run


async def steady_point(book: Book, door: Door, streams: int, output: int, seed: int) -> dict[str, Any]:
    """So many streams that begin together. Their rate is measured while all of them decode."""
    plan = steady(
        book,
        prompt_tokens=Lengths(PROMPT, PROMPT),
        output_tokens=Lengths(output, output),
        concurrency=streams,
        requests=streams,
        seed=seed,
    )
    run = await sent(plan, door)
    counts = run.counts()
    lines = [timeline(answer) for _, answer in run.asked if answer.status == "ok"]
    tokens = sum(line.total for line in lines)
    return {
        "tok_s": decode_rate(lines) if len(lines) == streams else None,
        "whole_tok_s": tokens / run.seconds,
        "failed": counts["failed"],
        "short": sum(line.total < output for line in lines),
        "errors": sorted({answer.message for _, answer in run.asked if answer.message})[:2],
    }


def decode_rate(lines: Sequence[Timeline]) -> float | None:
    """Tokens a second from when the last stream has its first token until the first one ends; None if no such time."""
    if not lines or not all(line.at for line in lines):
        return None
    since, until = max(line.at[0] for line in lines), min(line.at[-1] for line in lines)
    tokens = sum(count for line in lines for _, to, count in line.gaps() if since < to <= until)
    return tokens / (until - since) if until > since else None


async def mixed_point(
    book: Book, door: Door, *, long_every: float, seconds: float, phases: int, seed: int
) -> dict[str, Any]:
    """Streams that decode all the time, by turns without and with long prompts."""
    plan = mixed(
        book,
        streams=STREAMS,
        stream_prompt=32,
        stream_output=256,
        long_prompt=LONG_PROMPT,
        long_output=16,
        long_every=long_every,
        phase_seconds=seconds,
        phases=phases,
        settle=3.0,
        seed=seed,
    )
    assert plan.phases is not None
    run = await sent(plan, door, plan.phases.end + OVERTIME)
    found = figures(plan, run, Slo())
    told, long = found["phases"], [answer for request, answer in run.asked if request.kind == "long"]
    firsts = [answer.chunks[0].at - answer.sent for answer in long if answer.chunks]
    return {
        "without": _shares(told["without"]),
        "with": _shares(told["with"]),
        "p99_ratio": told["p99_ratio"],
        "tok_s": phase_rate(plan, run, 1),
        "tok_s_without": phase_rate(plan, run, 0),
        "long_ttft": percentile(sorted(firsts), 50) if firsts else None,
        "long_sent": len(long),
        "long_answered": len(firsts),
        "failed": run.counts()["failed"],
        "errors": [each["message"] for each in found["errors"]["first"]][:2],
    }


def phase_rate(plan: Plan, run: Run, odd: int) -> float:
    """Tokens of streams a second, in the phases with (1) or without (0) long prompts."""
    assert plan.phases is not None
    tokens = 0
    for request, answer in run.asked:
        line = timeline(answer)
        if request.kind == "stream":
            for at, count in zip(line.at, line.tokens, strict=True):
                index = plan.phases.index(at - run.began)
                tokens += count if index is not None and index % 2 == odd else 0
    return tokens / (plan.phases.seconds * plan.phases.count / 2)


def _shares(spread: dict[str, float]) -> dict[str, float | None]:
    return {name: spread.get(name) for name in ("count", "p50", "p99", "max")}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trace and how much of it is sent."""

    name: str
    path: Path
    divide: int
    spread: bool  # requests that have one time in the file evenly over the time to the next


async def trace_point(
    book: Book, door: Door, of: Recorded, *, scale: float, seconds: float, context: int, slo: Slo, seed: int
) -> dict[str, Any]:
    """The trace's first requests, its clock `scale` times slower, for so many seconds of ours."""
    plan = trace(
        book,
        of.path,
        divide=of.divide,
        window=seconds / scale,
        context=context,
        clock_scale=scale,
        spread_batches=of.spread,
        seed=seed,
    )
    run = await sent(plan, door, seconds + OVERTIME)
    found = figures(plan, run, slo)
    count = len(plan.timed)
    latency = found["latency"].get("", {})
    return {
        "requests": count,
        "offered": count / seconds,
        "good": found["goodput"]["good"],
        "good_s": found["goodput"]["good"] / seconds,
        "share": found["goodput"]["good"] / count if count else None,
        "ttft_p50": latency.get("ttft", {}).get("p50"),
        "ttft_p99": latency.get("ttft", {}).get("p99"),
        "gap_p99": latency.get("gap", {}).get("p99"),
        "tokens_in": sum(len(request.prompt.ids) for request in plan.timed),
        "tokens_out": sum(request.output_tokens for request in plan.timed),
        "failed": found["requests"]["failed"],
        "cut": found["requests"]["cut"],
    }
