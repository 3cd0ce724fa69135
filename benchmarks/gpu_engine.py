"""How fast is an engine on this device, and what does a step take beside its kernels? The engine of a decode replica,
in a core as a replica has it, by its defaults: decode steps replayed, and launched one by one; prompts; its start.

    decode     greedy sequences whose context is about 512; the times between the steps that have all of them
    bits       the logits of a step that is replayed against those of the same one launched; a step of as many
               sequences as were recorded has its bits, one that is padded has products of another height
    step       `Engine.step` in this thread: all of it, its kernels by the profiler, and where the host is meanwhile.
               `launch` ends when all is launched; `sample` has the wait for it
    prompt     one of 8k, from its submission to its first token
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import torch
from gpu_core import Served, spec
from gpu_device import Bench
from gpu_models import find, writes
from gpu_rows import Case, Numbers, SkippedError, WrongError

from bifolio.protos.messages import BlockId
from bifolio.replicas import engine as engine_module
from bifolio.replicas.batch import Row
from bifolio.replicas.engine import Engine
from bifolio.replicas.runner import Runner
from bifolio.replicas.scheduler import Scheduler
from bifolio.replicas.sequence import Add

APART = 1.6e-2  # of the norm: bfloat16, products of another height
Call = Callable[[], object]


class Sizes:
    def __init__(self, tiny: bool) -> None:
        self.batches = (1, 3) if tiny else (1, 32, 256)
        self.compared = (1, 3) if tiny else (1, 5, 32, 250, 256)  # 1, 32 and 256 are recorded, the others are padded
        self.context, self.prompt = (24, 48) if tiny else (512, 8192)
        self.windows, self.window, self.warm = (2, 1, 1) if tiny else (5, 40, 10)  # steps
        self.prompts, self.profiled = (1, 1) if tiny else (5, 20)


def cases(bench: Bench) -> list[Case]:
    """The larger model first: of the smaller, whose steps are shorter, the host has the larger share."""
    names = ("tiny Llama",) if bench.tiny else ("Llama 1B", "SmolLM2")
    made = []
    for name in names:
        made.append(Case("engine", f"{name}: its files", lambda: None, {"written": writes(bench, name)}, patience=120))
        for graphs in (True, False):
            title = f"{name}, steps {'replayed' if graphs else 'launched'}"
            made.append(_case(bench, title, name, _ways(bench, graphs), cuda_graphs=graphs, kv_memory="0.5"))
    return [*made, _case(bench, f"{names[0]}, all memory", names[0], {"start": start}, kv_memory="auto")]


def _case(bench: Bench, title: str, name: str, ways: dict[str, Callable[[Served], Numbers]], **engine: Any) -> Case:
    if bench.tiny:
        del engine["kv_memory"]

    def served() -> Served:
        path, _ = find(bench, name)
        return Served(bench, spec(bench, path, **engine))

    return Case("engine", title, served, ways, Served.close, patience=150)


def _ways(bench: Bench, graphs: bool) -> dict[str, Callable[[Served], Numbers]]:
    sizes = Sizes(bench.tiny)
    ways: dict[str, Callable[[Served], Numbers]] = {"start": start}
    if graphs:
        ways |= {f"bits B{b}": partial(bits, sizes, b) for b in sizes.compared}
    ways |= {f"decode B{b}": partial(decode, sizes, b) for b in sizes.batches}
    ways |= {f"step B{b}": partial(step, bench, sizes, b) for b in sizes.batches}
    return ways if not graphs else ways | {f"prompt of {sizes.prompt}": partial(prompt, sizes)}


def start(served: Served) -> Numbers:
    """And what tensors held before: more than a little, and a core before has left something behind."""
    return {"s": served.seconds, "held before GB": served.held / 1e9, "log": served.lines}


def decode(sizes: Sizes, batch: int, served: Served) -> Numbers:
    steps = sizes.warm + sizes.windows * sizes.window + batch // 8 + 4  # all of them begin within the first few
    taken = served.finish(served.decoding(batch, sizes.context, steps))
    full = [at for at, sampled in taken if sampled == batch][sizes.warm :]
    if len(full) <= sizes.window:
        raise RuntimeError(f"{len(full)} of {len(taken)} steps had all {batch} sequences")
    ends = full[:: sizes.window]
    rates = [batch * sizes.window / (b - a) for a, b in pairwise(ends)]
    gaps = [(b - a) * 1e3 for a, b in pairwise(full)]
    return {
        "tokens/s": median(rates),
        "least": min(rates),
        "most": max(rates),
        "step ms p50": median(gaps),
        "p99": quantiles(gaps, n=100, method="inclusive")[-1],
        "steps": len(full),
    }


def prompt(sizes: Sizes, served: Served) -> Numbers:
    seconds = []
    for _ in range(sizes.prompts + 1):  # the first warms
        add, began = served.prompt(sizes.prompt), time.perf_counter()
        steps = served.finish([add])
        seconds.append(next(at for at, sampled in steps if sampled) - began)
    seconds = seconds[1:]
    return {
        "first token ms": median(seconds) * 1e3,
        "least": min(seconds) * 1e3,
        "most": max(seconds) * 1e3,
        "tokens/s": sizes.prompt / median(seconds),
    }


def bits(sizes: Sizes, batch: int, served: Served) -> Numbers:
    """Both write the same K and V to the same places."""
    core = served.core
    if core.runner is core.eager:
        raise SkippedError("no step is recorded with these kernels")
    rows = [_row(add, sizes.context - 7 * (i % 3)) for i, add in enumerate(served.decoding(batch, sizes.context, 1))]
    replayed = core.runner.run(rows).clone()
    launched = core.eager.run(rows)
    apart = ((replayed.double() - launched.double()).norm() / launched.double().norm()).item()
    numbers = {
        "rows": batch,
        "other bits": int((replayed != launched).any(1).sum()),
        "other tokens": int((replayed.argmax(1) != launched.argmax(1)).sum()),
        "apart": apart,
    }
    if not apart <= APART:
        raise WrongError(f"{apart:.2g} from the launched step's; allowed {APART:g}", **numbers)
    recorded = batch & (batch - 1) == 0
    if recorded and numbers["other bits"]:
        raise WrongError(f"{numbers['other bits']} of {batch} rows have other bits than the launched step's", **numbers)
    return numbers


def _row(add: Add, length: int) -> Row:
    return Row(add.tokens[length - 1 : length], length - 1, [BlockId(block) for block in add.blocks])


def step(bench: Bench, sizes: Sizes, batch: int, served: Served) -> Numbers:
    """Another engine over the same runner: that of the core waits meanwhile."""
    runner, size = served.core.runner, served.engine.block_size
    scheduler = Scheduler(
        max_batched_tokens=max(served.engine.max_batched_tokens, batch + size),
        max_sequences=batch,
        block_size=size,
        draw=lambda _, count: None,
    )
    engine = Engine(runner, scheduler)
    count = 2 * sizes.profiled
    for add in served.decoding(batch, sizes.context, sizes.warm + 3 * count + 2):
        engine.submit(add)
    for _ in range(sizes.warm + 1):
        engine.step()
    walls = [_seconds(engine.step) for _ in range(count)]
    with _timers(engine, runner) as stages:
        for _ in range(count):
            engine.step()
    wall = median(walls) * 1e3
    numbers = {"wall ms": wall}
    if not bench.tiny:
        kernels = _kernels(engine.step, sizes.profiled)
        numbers |= {"kernels ms": kernels, "outside ms": wall - kernels, "outside %": (wall - kernels) / wall * 100}
    return numbers | {f"{name} ms": median(each) * 1e3 for name, each in stages.items()}


def _seconds(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _kernels(call: Call, calls: int) -> float:
    """Milliseconds of one call that the device works, copies included, by the profiler."""
    from torch.autograd import DeviceType

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    micros = sum(e.time_range.elapsed_us() for e in profiled.events() if e.device_type == DeviceType.CUDA)
    if not micros:
        raise RuntimeError("the profiler saw no kernel")
    return float(micros) / calls / 1e3


@contextmanager
def _timers(engine: Engine, runner: Runner) -> Iterator[dict[str, list[float]]]:
    """Around the stages of a step, each of which is called once."""
    places: dict[str, tuple[Any, str]] = {
        "schedule": (engine.scheduler, "schedule"),
        "launch": (runner, "compute"),
        "sample": (engine_module, "sample_tokens"),
        "record": (engine.scheduler, "record"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in places}

    def around(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            seconds[stage].append(time.perf_counter() - began)
            return result

        return measured

    before = {stage: getattr(owner, name) for stage, (owner, name) in places.items()}
    for stage, (owner, name) in places.items():
        setattr(owner, name, around(stage, before[stage]))
    try:
        yield seconds
    finally:
        for stage, (owner, name) in places.items():
            setattr(owner, name, before[stage])
