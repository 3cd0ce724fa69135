"""One prompt, computed in a process of its own and handed over to this one: when each chunk was computed, each piece
left and landed, and the answer began. Real cores, without Ray: what is hidden behind computing can be seen.

All times are of the machine's monotonic clock, which both processes read.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import measure
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table
from transfer_partner import Partner

from bifolio.cluster.app import replica_spec
from bifolio.cluster.config import load, resolved
from bifolio.cluster.models import resolve
from bifolio.kv_manager.secret import sign
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.kv_manager.transfer import PrefillServer
from bifolio.protos.messages import (
    BlockId,
    Generation,
    Lease,
    Placement,
    ReplicaId,
    ReplicaInfo,
    Request,
    RequestId,
    Sampling,
)
from bifolio.replicas.core import Core, ReplicaSpec
from bifolio.replicas.jobs import Jobs
from bifolio.replicas.sequence import Computed, Event, Prefilled
from bifolio.replicas.streams import Streams

ANSWER = 2  # tokens
STYLE = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "bifolio", "axes.spines.top": False}
COLOURS = ("#1b6ca8", "#d98324", "#4c8c4a")
LANES = {
    "frames": ("chunks computed", "frames sent", "frames landed"),
    "copies": ("chunks computed", "words sent", "blocks copied"),
}
numbers = count(1)  # of requests, whoever asks: the prefill side's leases have them

Bar = tuple[float, float, int]  # began, ended, tokens or bytes


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds since the first chunk's beginning."""

    computed: tuple[Bar, ...]  # chunks, with their tokens
    sent: tuple[Bar, ...]  # pieces, with their bytes
    landed: tuple[Bar, ...]
    committed: float  # the pull has returned
    token: float  # the first one

    @property
    def last_chunk(self) -> float:
        return self.computed[-1][1]

    @property
    def lag(self) -> float:
        """Seconds from the last chunk to the commit."""
        return self.committed - self.last_chunk

    @property
    def hidden(self) -> float:
        """Share of the bytes that had landed when the last chunk was computed."""
        return sum(size for _, end, size in self.landed if end <= self.last_chunk) / sum(
            size for *_, size in self.landed
        )


class Recorder(TrafficMeter):
    """A replica's meter that keeps when what happened."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[Bar] = []
        self.ended = 0.0

    def moved(self, frames: int, size: int, seconds: float) -> None:
        super().moved(frames, size, seconds)
        now = time.monotonic()
        self.moves.append((now - seconds, now, size))

    @contextmanager
    def stream(self) -> Iterator[None]:
        with super().stream():
            yield
        self.ended = time.monotonic()


class PrefillSide:
    """A prefill replica without a manager: nobody asks for its leases back."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._core = Core(spec, ReplicaId("prefill#1"), "prefill")
        self._meter = self._core.meter = Recorder()
        self._jobs = Jobs(self._core, self._close)
        self._core.start(self._deliver)
        self._server = PrefillServer(self._jobs, spec.engine.max_sequences)
        self._info = self._core.info(f"127.0.0.1:{self._server.start()}")
        self._computed: list[tuple[float, int]] = []
        self._seconds = 0.0

    def info(self) -> ReplicaInfo:
        return self._info

    def take(self) -> tuple[list[tuple[float, int]], float, list[Bar]]:
        """Since the last time: when how many tokens were computed, how many seconds that took, and what left when."""
        while self._server.active:
            time.sleep(0.001)
        found = self._computed, self._seconds, self._meter.moves
        self._computed, self._meter.moves = [], []
        return found

    def _close(self, generation: Generation) -> None:
        self._core.tags.close(generation)

    def _deliver(self, events: list[Event]) -> None:
        """In the engine's thread."""
        now = time.monotonic()
        for event in events:
            if isinstance(event, Computed):
                self._computed.append((now, event.tokens))
            elif isinstance(event, Prefilled):
                self._seconds = event.prefill_seconds
        self._jobs.deliver(events)


class DecodeSide:
    """A decode replica, on the loop that it is made on, with placements by hand: the caches hold all that is asked."""

    def __init__(self, spec: ReplicaSpec, prefill: ReplicaInfo) -> None:
        self._prefill = prefill
        self._core = Core(spec, ReplicaId("decode#1"), "decode")
        self.meter = self._core.meter = Recorder()
        self._streams = Streams(self._core, spec.engine.max_sequences, self._close, lambda: None)
        self._core.start(self._streams.deliver)

    async def close(self) -> None:
        await self._streams.stop()
        await asyncio.to_thread(self._core.stop)

    async def first_token(self, tokens: int) -> float:
        """When the first token of an answer to a prompt of so many came."""
        number = next(numbers)
        noise = random.Random(number)
        prompt = tuple(noise.randrange(self._core.vocabulary) for _ in range(tokens))
        request = Request(RequestId(f"r{number}"), prompt, Sampling(ANSWER, temperature=0.0), time.time())
        placement, first = self._place(request, number, noise), 0.0
        async with aclosing(self._streams.generate(placement, request)) as deltas:
            async for delta in deltas:
                if delta.resumable is not None:
                    raise RuntimeError(f"the attempt ended early: {delta.resumable}")
                first = first or time.monotonic()
        while self._core.tags.report(time.monotonic()).leases:
            await asyncio.sleep(0.005)
        return first

    def _close(self, generation: Generation) -> None:
        self._core.tags.close(generation)

    def _place(self, request: Request, number: int, noise: random.Random) -> Placement:
        size = self._core.geometry.block_size
        most, there = -(-request.most_tokens // size), -(-len(request.prompt) // size)

        def lease(replica: ReplicaId, counter: int, of: int, wanted: int) -> Lease:
            blocks = tuple(BlockId(block) for block in noise.sample(range(1, of + 1), wanted))
            return Lease(replica, Generation(1, counter), blocks, request.id)

        prefill, decode = self._prefill, self._core
        source = lease(prefill.id, 2 * number, prefill.blocks, there)
        return Placement(
            request.id,
            lease(decode.replica, 2 * number + 1, decode.cache.blocks, most),
            source,
            prefill.address,
            prefill.memory,
            prefill_secret=sign(prefill.secret, source),
        )


def timelines(model: str, tokens: int, threads: int, repeats: int) -> dict[str, list[Timeline]]:
    """Some of each way, in turns, of prompts that differ."""
    return asyncio.run(_timelines(model, tokens, threads, repeats))


async def _timelines(model: str, tokens: int, threads: int, repeats: int) -> dict[str, list[Timeline]]:
    path, specs = resolve(model), {}
    for way in LANES:
        wanted: dict[str, Any] = {"engine.device": "cpu", "engine.threads": threads, "kv.copies": way == "copies"}
        specs[way] = replica_spec(resolved(load(None, wanted)), path, ("none", "none"))
    found: dict[str, list[Timeline]] = {way: [] for way in LANES}
    with Partner(PrefillSide, specs["copies"]) as prefill:  # whether it copies is the decode side's choice
        sides = {way: DecodeSide(spec, prefill.call("info")) for way, spec in specs.items()}
        for number in range(repeats + 1):
            for way, side in sides.items():
                measure.progress(f"{way}, {number} of {repeats}")
                prefill.call("take")
                side.meter.moves.clear()
                token = await side.first_token(tokens)
                computed, seconds, sent = prefill.call("take")
                made = timeline(computed, seconds, sent, list(side.meter.moves), side.meter.ended, token)
                found[way] += [made] if number else []  # the first warms up
        for side in sides.values():
            await side.close()
    return found


def timeline(
    computed: list[tuple[float, int]],
    seconds: float,
    sent: list[Bar],
    landed: list[Bar],
    committed: float,
    token: float,
) -> Timeline:
    """Of moments on one clock. `computed` says how many tokens there were in all; `seconds` is what they took."""
    zero = computed[-1][0] - seconds
    edges = [(zero, 0), *computed]
    chunks = tuple((a - zero, b - zero, n - m) for (a, m), (b, n) in pairwise(edges))
    left, came = (tuple((a - zero, b - zero, size) for a, b, size in bars) for bars in (sent, landed))
    return Timeline(chunks, left, came, committed - zero, token - zero)


def typical(of: list[Timeline]) -> Timeline:
    """The one whose lag is the median."""
    return sorted(of, key=lambda each: each.lag)[len(of) // 2]


def shown(tokens: int, found: dict[str, list[Timeline]]) -> list[Table | str]:
    heading = f"a prompt of {tokens} tokens, two processes: medians of {len(found['frames'])}"
    columns = [
        "chunks",
        "pieces",
        "MB",
        "prefill ms",
        "landed by the last chunk",
        "commit after it, ms",
        "token after it, ms",
    ]
    table = measure.table(heading, ["way"], columns)
    for way, of in found.items():
        one = of[0]
        table.add_row(
            way,
            str(len(one.computed)),
            str(len(one.landed)),
            f"{sum(size for *_, size in one.landed) / 1e6:.1f}",
            measure.milliseconds([each.last_chunk for each in of]),
            f"{median(each.hidden for each in of):.1%}",
            measure.milliseconds([each.lag for each in of]),
            measure.milliseconds([each.token - each.last_chunk for each in of]),
        )
    return [table]


def draw(tokens: int, found: dict[str, list[Timeline]], path: Path) -> None:
    """Left all of it, right the end."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(7.6, 3.8), layout="constrained")
        grid = figure.subplots(len(found), 2, sharey="row", width_ratios=(3, 1), squeeze=False)
        for row, (way, of) in zip(grid, found.items(), strict=True):
            one = typical(of)
            _bars(row[0], one, 0.0, one.token * 1.01)
            margin = max(one.token - one.last_chunk, 1e-3) / 4
            _bars(row[1], one, one.last_chunk - 2 * margin, one.token + margin)
            row[0].set_yticks([0, -1, -2], LANES[way])
            row[0].set_title(f"{way}: the commit {one.lag * 1e3:.1f} ms after the last chunk", fontsize=9, loc="left")
        grid[-1][0].set_xlabel(f"ms since the first of {tokens} tokens began to be computed")
        grid[-1][1].set_xlabel("the end of it")
        lines, names = grid[0][1].get_legend_handles_labels()
        figure.legend(lines, names, frameon=False, fontsize=8, ncols=2, loc="outside upper right")
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def _bars(axes: Axes, one: Timeline, begin: float, end: float) -> None:
    """What is short is drawn as wide as can be seen."""
    seen = (end - begin) / 250
    for lane, (bars, colour) in enumerate(zip((one.computed, one.sent, one.landed), COLOURS, strict=True)):
        spans = [(since * 1e3, max(until - since, seen) * 1e3) for since, until, _ in bars]
        axes.broken_barh(spans, (-lane - 0.35, 0.7), facecolor=colour, edgecolor="white", linewidth=0.8 * (not lane))
    axes.axvline(one.committed * 1e3, color="#444444", linewidth=0.9, linestyle="--", label="commit")
    axes.axvline(one.token * 1e3, color="#c1440e", linewidth=0.9, linestyle="-", label="first token")
    axes.set_xlim(begin * 1e3, end * 1e3)
    axes.set_ylim(-2.6, 0.6)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines["right"].set_visible(False)
