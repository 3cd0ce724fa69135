"""Figures out of answers: latencies, throughput, goodput, and what the client itself was late with. All in seconds.

The gap before a chunk counts once, however many tokens the chunk has; per token it counts as often as there are
tokens, each with its part. Pure: no clock and no sockets, so each figure can be checked by hand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from load_client import Answer
from load_percentiles import percentile, spread
from load_plan import Phases, Plan, Request
from load_run import Run
from load_text import Book

EXAMPLES = 5  # errors that are shown
SLOWEST = 99  # the percentile of a request's gaps that --slo-itl is for; of fewer than 100 gaps it is the longest one

IN_EVERY_CHUNK = "usage in every chunk"
ONE_EACH = "usage: one token an event"
BY_TOKENIZER = "tokenizer"
EVENTS = "events, each taken for one token"


@dataclass(frozen=True, slots=True)
class Timeline:
    """When an answer's chunks came, and how many tokens each had."""

    at: tuple[float, ...]
    tokens: tuple[int, ...]
    total: int  # of the answer; by usage, if there is any
    source: str  # how the tokens of chunks are known

    def gaps(self) -> Iterator[tuple[float, float, int]]:
        """From, to, tokens."""
        return zip(self.at, self.at[1:], self.tokens[1:], strict=False)

    def lengths(self) -> list[float]:
        return [to - since for since, to, _ in self.gaps()]

    def per_token(self) -> list[float]:
        return [part for since, to, tokens in self.gaps() for part in [(to - since) / max(1, tokens)] * tokens]

    def mean_per_token(self) -> float | None:
        """TPOT: of all tokens after the first chunk."""
        after = self.total - self.tokens[0] if self.tokens else 0
        return (self.at[-1] - self.at[0]) / after if after > 0 and len(self.at) > 1 else None


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to be good; None does not matter."""

    ttft: float | None = None
    itl: float | None = None

    def kept(self, answer: Answer, timeline: Timeline) -> bool:
        if answer.status != "ok" or not timeline.at:
            return False
        gaps = sorted(timeline.lengths())
        on_time = self.ttft is None or timeline.at[0] - answer.sent <= self.ttft
        return on_time and (self.itl is None or not gaps or percentile(gaps, SLOWEST) <= self.itl)


def timeline(answer: Answer, book: Book | None = None) -> Timeline:
    """`book` counts the tokens of texts, where the server does not say enough and the texts were kept."""
    at = [chunk.at for chunk in answer.chunks]
    tokens, source = _tokens(answer, book)
    said = answer.output_tokens
    known = sum(tokens)
    if answer.bare_finish is not None and said == known + 1 and source in (ONE_EACH, IN_EVERY_CHUNK):
        at.append(answer.bare_finish)  # the token that ends the answer has no text
        tokens.append(1)
    return Timeline(tuple(at), tuple(tokens), sum(tokens) if said is None else said, source)


def _tokens(answer: Answer, book: Book | None) -> tuple[list[int], str]:
    chunks, events = answer.chunks, [chunk.events for chunk in answer.chunks]
    reported = [chunk.reported for chunk in chunks if chunk.reported is not None]
    if len(reported) == len(chunks) and all(a <= b for a, b in pairwise(reported)):
        return [b - a for a, b in pairwise([0, *reported])], IN_EVERY_CHUNK
    missing = None if answer.output_tokens is None else answer.output_tokens - sum(events)
    if missing == 0 or (missing == 1 and answer.bare_finish is not None):
        return events, ONE_EACH
    text = "".join(chunk.text for chunk in chunks)
    if book is not None and text:
        ends, tokens, before, length = book.ends(text), [], 0, 0
        for chunk in chunks:
            length += len(chunk.text)
            upto = bisect_left(ends, length + 1)
            tokens.append(upto - before)
            before = upto
        return tokens, BY_TOKENIZER
    return events, EVENTS


def figures(plan: Plan, run: Run, slo: Slo, book: Book | None = None) -> dict[str, Any]:
    each = [(request, answer, timeline(answer, book)) for request, answer in run.asked]
    ok = [(request, answer, line) for request, answer, line in each if answer.status == "ok"]
    received = [(request, answer, line) for request, answer, line in each if answer.status in ("ok", "cut")]
    seconds = max(run.seconds, 1e-9)
    tokens_in = sum(len(request.prompt.ids) if (n := answer.prompt_tokens) is None else n for request, answer, _ in ok)
    tokens_out = sum(line.total for _, _, line in received)
    good = sum(slo.kept(answer, line) for _, answer, line in each)
    told = [answer for _, answer, _ in ok if answer.cached_tokens is not None]
    kinds = sorted({request.kind for request, _, _ in each})
    return {
        "requests": run.counts() | {"no_tokens": sum(not line.at for _, _, line in ok)},
        "errors": _errors(run.asked),
        "seconds": run.seconds,
        "interrupted": run.interrupted,
        "tokens": {
            "in": tokens_in,
            "in_planned": sum(len(request.prompt.ids) for request, _, _ in ok),
            "in_by_usage": sum(answer.prompt_tokens is not None for _, answer, _ in ok),
            "out": tokens_out,
            "out_planned": sum(request.output_tokens for request, _, _ in ok),
            "in_per_s": tokens_in / seconds,
            "out_per_s": tokens_out / seconds,
            "sources": dict(Counter(line.source for _, _, line in received if line.at)),
        },
        "latency": {kind: latencies([(a, line) for r, a, line in ok if r.kind == kind]) for kind in kinds},
        "goodput": {
            "slo_ttft": slo.ttft,
            "slo_itl": slo.itl,
            "itl_is": f"p{SLOWEST} of the gaps of a request",
            "good": good,
            "per_s": good / seconds,
        },
        "cached": {
            "requests_told": len(told),
            "prompt_tokens": sum(answer.prompt_tokens or 0 for answer in told),
            "cached_tokens": sum(answer.cached_tokens or 0 for answer in told),
        },
        "client": {
            "late": spread([max(0.0, answer.sent - answer.due) for _, answer, _ in each]),
            "loop": spread(run.ticks),
            "cpu_seconds": run.cpu_seconds,
            "cpu_share": run.cpu_seconds / seconds,
        },
        "phases": None if plan.phases is None else phase_figures(plan.phases, run.began, each),
    }


def latencies(each: Sequence[tuple[Answer, Timeline]]) -> dict[str, dict[str, float]]:
    means = (line.mean_per_token() for _, line in each)
    return {
        "ttft": spread([line.at[0] - answer.sent for answer, line in each if line.at]),
        "gap": spread([gap for _, line in each for gap in line.lengths()]),
        "gap_per_token": spread([part for _, line in each for part in line.per_token()]),
        "tpot": spread([mean for mean in means if mean is not None]),
        "whole": spread([answer.ended - answer.sent for answer, _ in each if answer.ended is not None]),
    }


def phase_figures(phases: Phases, began: float, each: Sequence[tuple[Request, Answer, Timeline]]) -> dict[str, Any]:
    """Gaps of the streams by the phase in which their chunk came.

    A long prompt of one phase may last into the next one. What the streams waited for meanwhile belongs to neither.
    """
    long = [(a.sent, float("inf") if a.ended is None else a.ended) for r, a, _ in each if r.kind == "long"]
    gaps: list[list[float]] = [[] for _ in range(phases.count)]
    set_apart = 0
    for request, _, line in each:
        if request.kind != "stream":
            continue
        for since, to, _ in line.gaps():
            if (phase := phases.index(to - began)) is None:
                continue
            if phase % 2 == 0 and any(sent < to and since < ended for sent, ended in long):
                set_apart += 1
                continue
            gaps[phase].append(to - since)
    without, with_long = (spread([gap for phase in gaps[odd::2] for gap in phase]) for odd in (0, 1))
    return {
        "without": without,
        "with": with_long,
        "p99_ratio": _ratio(with_long, without),
        "p99_ratios": [_ratio(spread(b), spread(a)) for a, b in zip(gaps[::2], gaps[1::2], strict=True)],
        "by_phase": [spread(phase) for phase in gaps],
        "set_apart": set_apart,
        "long_prompts": len(long),
    }


def _ratio(of: dict[str, float], by: dict[str, float]) -> float | None:
    """Of their p99s."""
    return of["p99"] / by["p99"] if of["count"] and by["count"] and by["p99"] > 0 else None


def _errors(asked: Iterable[tuple[Request, Answer]]) -> dict[str, Any]:
    failed = [(request, answer) for request, answer in asked if answer.status == "failed"]
    firsts = {answer.error: i for i, (_, answer) in reversed(list(enumerate(failed)))}
    shown = sorted(range(len(failed)), key=lambda i: (firsts[failed[i][1].error] != i, i))[:EXAMPLES]
    return {
        "kinds": dict(Counter(answer.error for _, answer in failed).most_common()),
        "first": [  # of each kind one before another of the same
            {"request": request.index, "kind": answer.error, "message": answer.message}
            for request, answer in (failed[i] for i in shown)
        ],
    }


def records(run: Run, book: Book | None = None) -> list[dict[str, Any]]:
    """Each request with its times, in seconds since the run began, to the microsecond."""

    def since(at: float | None) -> float | None:
        return None if at is None else round(at - run.began, 6)

    made = []
    for request, answer in run.asked:
        line = timeline(answer, book)
        made.append(
            {
                "index": request.index,
                "kind": request.kind,
                "session": request.session,
                "status": answer.status,
                "error": answer.error,
                "message": answer.message,
                "finish": answer.finish,
                "planned": request.at,
                "due": since(answer.due),
                "sent": since(answer.sent or None),
                "headers": since(answer.headers),
                "ended": since(answer.ended),
                "tokens_in": {"planned": len(request.prompt.ids), "reported": answer.prompt_tokens},
                "tokens_out": {"planned": request.output_tokens, "reported": answer.output_tokens},
                "cached_tokens": answer.cached_tokens,
                "chunks": [[since(at), tokens] for at, tokens in zip(line.at, line.tokens, strict=True)],
            }
        )
    return made
