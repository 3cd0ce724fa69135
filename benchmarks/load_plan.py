"""What is sent and when, before anything is sent: deterministic, and no answer changes it.

`timed` requests go at their time, whatever else is under way; those of one session in their order, each after the one
before it has ended. `closed` requests go one after another on each of several lanes. Knows nothing of servers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from load_percentiles import spread
from load_text import Book, InputError, Prompt

BLOCK = 16  # tokens of a KV block, for the share of blocks seen before
KNOWN = 256  # of an endless loop, the requests that statistics look at


@dataclass(frozen=True, slots=True)
class Request:
    index: int
    prompt: Prompt
    output_tokens: int
    at: float | None = None  # seconds after the start; None in a closed loop
    session: str = ""
    kind: str = ""  # "stream" or "long" in a mixed plan


@dataclass(frozen=True, slots=True)
class Closed:
    """`lanes` requests are under way at any time; the next one is `make(i)`, until `count` have been."""

    lanes: int
    make: Callable[[int], Request]
    count: int | None = None

    def requests(self) -> Iterator[Request]:
        indices = itertools.count() if self.count is None else range(self.count)
        return (self.make(i) for i in indices)


@dataclass(frozen=True, slots=True)
class Phases:
    """Phases of equal length by turns without and with long prompts, from `start` to `end`."""

    start: float
    seconds: float
    count: int

    @property
    def end(self) -> float:
        return self.start + self.seconds * self.count

    def index(self, at: float) -> int | None:
        """Of the phase at that time; those with long prompts are odd. None outside of all phases."""
        return int((at - self.start) // self.seconds) if self.start <= at < self.end else None


@dataclass(frozen=True, slots=True)
class Plan:
    what: str  # in words
    timed: tuple[Request, ...] = ()  # by time
    closed: Closed | None = None
    until: float | None = None  # nothing is sent in a closed loop after these seconds
    phases: Phases | None = None
    left_out: int = 0  # requests that do not fit the context
    clock_scale: float = 1.0

    def known(self) -> list[Request]:
        """All requests; of an endless loop the first ones."""
        loop = () if self.closed is None else itertools.islice(self.closed.requests(), self.closed.count or KNOWN)
        return [*self.timed, *loop]


@dataclass(frozen=True, slots=True)
class Lengths:
    """From `low` to `high`, each as likely."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """N or LOW-HIGH."""
        low, _, high = text.partition("-")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(text)
        return lengths

    def draw(self, name: str) -> int:
        """Equal names, equal lengths."""
        return random.Random(name).randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def steady(
    book: Book,
    *,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    concurrency: int | None = None,
    rate: float | None = None,
    uniform: bool = False,
    requests: int | None = None,
    duration: float | None = None,
    seed: int = 0,
) -> Plan:
    """Requests of one kind, each with a prompt of its own: `concurrency` at a time, or `rate` a second."""
    if (concurrency is None) == (rate is None):
        raise InputError("steady needs one of --concurrency N (closed loop) and --rate R (open loop)")
    if requests is None and duration is None:
        raise InputError("steady needs --requests N or --duration SECONDS, or both")

    def make(i: int, at: float | None = None) -> Request:
        prompt = book.prompt(f"steady {seed} {i}", prompt_tokens.draw(f"in {seed} {i}"))
        return Request(i, prompt, output_tokens.draw(f"out {seed} {i}"), at)

    each = f"{prompt_tokens} tokens in, {output_tokens} out"
    if concurrency is not None:
        return Plan(f"steady, {concurrency} at a time, {each}", (), Closed(concurrency, make, requests), duration)
    assert rate is not None
    times: Iterator[float] = itertools.islice(_arrivals(rate, uniform, seed), requests)
    if duration is not None:
        times = itertools.takewhile(lambda at: at < duration, times)
    how = "evenly" if uniform else "Poisson"
    return Plan(f"steady, {rate:g} a second ({how}), {each}", tuple(make(i, at) for i, at in enumerate(times)))


def _arrivals(rate: float, uniform: bool, seed: int) -> Iterator[float]:
    if uniform:
        return (i / rate for i in itertools.count())
    rng = random.Random(seed)
    return itertools.accumulate(iter(lambda: rng.expovariate(rate), None))


def mixed(
    book: Book,
    *,
    streams: int,
    stream_prompt: int,
    stream_output: int,
    long_prompt: int,
    long_output: int,
    long_every: float,
    phase_seconds: float,
    phases: int,
    settle: float,
    seed: int = 0,
) -> Plan:
    """Streams that decode all the time, and in every second phase long prompts besides."""
    if phases < 2 or phases % 2:
        raise InputError(f"--phases is {phases}; allowed: an even number, as half of them have long prompts")
    when = Phases(settle, phase_seconds, phases)
    starts = [settle + phase_seconds * k for k in range(1, phases, 2)]
    in_phase = [k * long_every for k in range(int(-(-phase_seconds // long_every)))]
    times = [start + each for start in starts for each in in_phase if each < phase_seconds]
    long = [
        Request(k, book.prompt(f"long {seed} {k}", long_prompt), long_output, at, kind="long")
        for k, at in enumerate(times)
    ]

    def make(i: int) -> Request:
        # The first ones are of different lengths, or all streams would begin anew at the same time
        tokens = stream_output if i >= streams else max(1, stream_output * (i + 1) // streams)
        prompt = book.prompt(f"stream {seed} {i}", stream_prompt)
        return Request(len(long) + i, prompt, tokens, kind="stream")

    what = (
        f"mixed, {streams} streams of {stream_prompt} tokens in and {stream_output} out; every second phase of "
        f"{phase_seconds:g} s a prompt of {long_prompt} tokens each {long_every:g} s, {long_output} out"
    )
    return Plan(what, tuple(long), Closed(streams, make), when.end, when)


def statistics(plan: Plan) -> dict[str, Any]:
    known = plan.known()
    seen, blocks, tokens = seen_before(request.prompt.ids for request in known)
    times = [request.at for request in plan.timed if request.at is not None]
    return {
        "requests": len(known),
        "endless": plan.closed is not None and plan.closed.count is None,
        "left_out": plan.left_out,
        "sessions": len({request.session for request in known if request.session}),
        "tokens_in": spread([len(request.prompt.ids) for request in known]) | {"sum": tokens},
        "tokens_out": spread([request.output_tokens for request in known])
        | {"sum": sum(request.output_tokens for request in known)},
        "span_s": max(times) - min(times) if times else None,
        "busiest_10_s": _busiest(times, 10.0),
        "blocks": blocks,
        "blocks_seen_before": seen,
        "tokens_in_seen_blocks": seen * BLOCK,
    }


def seen_before(prompts: Iterable[Sequence[int]]) -> tuple[int, int, int]:
    """Full blocks that an earlier prompt begins with too, all full blocks, and all tokens: as a cache that forgets
    nothing would have it if each prompt were done before the next one comes."""
    known: set[int] = set()
    seen = blocks = tokens = 0
    for ids in prompts:
        tokens += len(ids)
        chain, hits = 0, True
        for at in range(0, len(ids) - BLOCK + 1, BLOCK):
            chain = hash((chain, tuple(ids[at : at + BLOCK])))
            hits = hits and chain in known
            seen += hits
            blocks += 1
            known.add(chain)
    return seen, blocks, tokens


def _busiest(times: Sequence[float], window: float) -> int:
    """Most of them in one of the windows from 0 on."""
    counts: dict[int, int] = {}
    for at in times:
        counts[int(at // window)] = counts.get(int(at // window), 0) + 1
    return max(counts.values(), default=0)
