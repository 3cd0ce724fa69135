"""What do a prefill and a decode replica on ONE device give, against a replica that does both? Both cells are there at
once and are asked in turns; nothing is said of two devices, for which split pools are made.

    same ids      the greedy ids of a prompt, by both
    first token   of a prompt of 8k, on an idle cell, at who asked; with the seconds that its K and V were under way
    8 streams     decode while prompts of 8k come, one every second: the times between a stream's tokens as the engine
                  gives them away, before the first prompt (quiet) and from then on, and the prompts' first tokens
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, TypeVar

import torch
from gpu_cell import Cell
from gpu_core import spec
from gpu_device import Bench
from gpu_models import find
from gpu_rows import Case, Numbers, SkippedError, WrongError

from bifolio.protos.messages import Delta, Generation
from bifolio.replicas.core import load_model

T = TypeVar("T")
KINDS = ("unified", "split")
STREAMS = 8


class Sizes:
    def __init__(self, tiny: bool) -> None:
        self.prompt, self.repeats = (48, 1) if tiny else (8192, 5)
        self.asked, self.answer = (20, 4) if tiny else (700, 64)  # for the ids
        self.streams, self.begun, self.most = (2, 16, 30) if tiny else (STREAMS, 64, 12000)
        self.prompts, self.every, self.quiet = (1, 0.1, 0.5) if tiny else (5, 1.0, 1.0)
        self.sequences = 4 if tiny else 2 * STREAMS
        self.kv_memory = "1024 tokens" if tiny else "180000 tokens"


class Cells:
    """One of each kind, on an event loop that runs while one of them is asked."""

    def __init__(self, bench: Bench, name: str) -> None:
        path, _ = find(bench, name)
        self.sizes = Sizes(bench.tiny)
        of = spec(bench, path, kv_memory=self.sizes.kv_memory, max_sequences=self.sizes.sequences)
        self._runner = asyncio.Runner()
        model = load_model(of)
        self.vocabulary, self.positions = model.llama.config.vocab_size, model.llama.config.max_positions
        self.ids: dict[str, list[int]] = {}
        self._cells: dict[str, Cell] = {}

        async def made(split: bool) -> Cell:
            return Cell(of, model, split)

        for kind in KINDS:
            self._cells[kind] = self._runner.run(made(kind == "split"))

    def __getitem__(self, kind: str) -> Cell:
        return self._cells[kind]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def prompt(self, tokens: int) -> list[int]:
        numbers: list[int] = torch.randint(self.vocabulary, (tokens,)).tolist()
        return numbers

    def close(self) -> None:
        for cell in self._cells.values():
            self._runner.run(cell.close())
        self._runner.close()


def cases(bench: Bench) -> list[Case]:
    names = ("tiny Llama",) if bench.tiny else ("Llama 1B", "SmolLM2")
    works = {"ids": ids, "first token": first_token, f"{Sizes(bench.tiny).streams} streams": streams}
    ways: dict[str, Callable[[Cells], Numbers]] = {
        f"{work}, {kind}": partial(call, kind) for work, call in works.items() for kind in KINDS
    }
    return [
        Case("split", f"{name}, one device", partial(Cells, bench, name), ways, Cells.close, patience=120)
        for name in names
    ]


def ids(kind: str, cells: Cells) -> Numbers:
    """The first of the kinds is what the other is compared with."""
    sizes, cell = cells.sizes, cells[kind]
    torch.manual_seed(0)
    prompt = cells.prompt(sizes.asked)

    async def answer() -> list[int]:
        request = cell.request(prompt, sizes.answer)
        return [token async for delta in cell.deltas(await cell.place(request), request) for token in delta.tokens]

    found = cells.ids[kind] = cells.run(answer())
    if kind == KINDS[0]:
        return {"tokens": len(found), "different": len(set(found))}
    if KINDS[0] not in cells.ids:
        raise SkippedError(f"there is no {KINDS[0]} answer")
    same = sum(a == b for a, b in zip(found, cells.ids[KINDS[0]], strict=True))
    if same != len(found):
        raise WrongError(f"{same} of {len(found)} ids are those of the {KINDS[0]} replica", same=same)
    return {"tokens": len(found), "same": same}


def first_token(kind: str, cells: Cells) -> Numbers:
    async def first() -> tuple[float, Delta]:
        taken = await _first(cells[kind], cells.prompt(cells.sizes.prompt))
        await cells[kind].settled()
        return taken

    taken = [cells.run(first()) for _ in range(cells.sizes.repeats + 1)][1:]  # the first warms
    seconds = [each for each, _ in taken]
    numbers: dict[str, float] = {
        "ms": median(seconds) * 1e3,
        "least": min(seconds) * 1e3,
        "most": max(seconds) * 1e3,
    }
    timings = [delta.timings for _, delta in taken if delta.timings is not None]
    if timings:
        numbers["prefill ms"] = median(t.prefill for t in timings) * 1e3
        numbers["transfer ms"] = median(t.transfer for t in timings) * 1e3
    return numbers | {"moved MB": taken[-1][1].moved.bytes / 1e6}


async def _first(cell: Cell, prompt: list[int]) -> tuple[float, Delta]:
    """Seconds to the first token of a prompt, and what came with it."""
    request, began = cell.request(prompt, 1), time.perf_counter()
    placement = await cell.place(request)
    deltas = [(time.perf_counter() - began, delta) async for delta in cell.deltas(placement, request)]
    return deltas[0]


def streams(kind: str, cells: Cells) -> Numbers:
    return cells.run(_streams(cells, cells[kind]))


async def _streams(cells: Cells, cell: Cell) -> Numbers:
    sizes = cells.sizes
    cell.sampled.clear()
    most = min(sizes.most, cells.positions - sizes.begun)
    followed: list[Generation] = []
    begun = [asyncio.Event() for _ in range(sizes.streams)]

    async def follow(i: int) -> None:
        while True:  # an answer may end before the last prompt has come
            request = cell.request(cells.prompt(sizes.begun), most)
            placement = await cell.place(request)
            followed.append(placement.decode.generation)
            async with aclosing(cell.deltas(placement, request)) as deltas:
                async for _ in deltas:
                    begun[i].set()

    tasks = [asyncio.create_task(follow(i)) for i in range(sizes.streams)]
    try:
        await _all(begun, tasks)
        quiet = time.perf_counter()
        await asyncio.sleep(sizes.quiet)
        arrived = time.perf_counter()
        asked = []
        for _ in range(sizes.prompts):
            asked.append(asyncio.create_task(_first(cell, cells.prompt(sizes.prompt))))
            await asyncio.sleep(sizes.every)
        firsts = [seconds for seconds, _ in await asyncio.gather(*asked)]
        ended = time.perf_counter()
    finally:
        for task in tasks:
            task.cancel()
        failures = [r for r in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(r, Exception)]
        await cell.settled()
    if failures:
        raise failures[0]
    before, after = (
        [ms for generation in followed for ms in _gaps(cell.sampled[generation], *window)]
        for window in ((quiet, arrived), (arrived, ended))
    )
    return {
        **_spread("", after),
        **_spread("quiet ", before),
        "prompts' first token ms": median(firsts) * 1e3,
        "tokens/s": len(after) / (ended - arrived),
    }


def _spread(of: str, gaps: list[float]) -> dict[str, float]:
    if len(gaps) < 2:
        return {}
    last = quantiles(gaps, n=100, method="inclusive")[-1]
    return {f"{of}gap ms p50": median(gaps), f"{of}p99": last, f"{of}most": max(gaps)}


async def _all(begun: list[asyncio.Event], tasks: list[asyncio.Task[None]]) -> None:
    """Every stream has its first token; what one raised is raised here."""
    waits = asyncio.gather(*(event.wait() for event in begun))
    await asyncio.wait([waits, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            waits.cancel()
            task.result()
    await waits


def _gaps(times: list[float], begin: float, end: float) -> list[float]:
    """Milliseconds between a stream's tokens, of those that came in that time."""
    return [(b - a) * 1e3 for a, b in pairwise(times) if begin < b <= end]
