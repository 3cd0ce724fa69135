"""The first token of a prompt that nobody has seen, on an idle machine: of a cell with split pools, by copies and by
frames, and of one with a single pool. What the hand-over adds to the time that the prompt's computing takes.

The three cells are there at once and are asked in turns, one request at a time. Knows them only as clients do.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import measure
import yaml
from rich.table import Table

from bifolio.cluster.client import Client
from bifolio.cluster.spawn import spawned

SINGLE, COPIES, FRAMES = "single pool", "split, copies", "split, frames"
CELLS: dict[str, dict[str, object]] = {
    SINGLE: {"pools": {"prefill": {"replicas": 0}}},
    COPIES: {"kv": {"split": "always"}},
    FRAMES: {"kv": {"split": "always", "copies": False}},
}
PARTS = ("ttft", "queue", "prefill", "transfer", "first_decode", "overhead")  # of usage.timings
BAR = 0.05  # of the prefill's time
ANSWER = 2  # tokens
VOCABULARY = 40_000  # ids below are plain tokens in the models that are served here
WARM_UP = 2

Seconds = dict[str, float]  # by part; "seen" is the time to the first token at the client


def ttft(model: str, tokens: int, rounds: int, threads: int) -> dict[str, list[Seconds]]:
    """By cell, round by round."""
    found: dict[str, list[Seconds]] = {name: [] for name in CELLS}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients = {}
        for number, (name, config) in enumerate(CELLS.items()):
            measure.progress(f"starting a cell: {name}")
            file = directory / f"{number}.yaml"
            file.write_text(yaml.safe_dump(config), encoding="utf-8")
            cluster = stack.enter_context(
                spawned([str(file), "--model", model, "--threads", str(threads)], sys.stderr.buffer)
            )
            clients[name] = stack.enter_context(Client(cluster.grpc_address))
        noise = random.Random(0)
        for number in range(WARM_UP + rounds):
            for name, client in clients.items():
                taken = _ask(client, [noise.randrange(VOCABULARY) for _ in range(tokens)])
                found[name] += [taken] if number >= WARM_UP else []
    return found


def _ask(client: Client, prompt: Sequence[int]) -> Seconds:
    began, seen = time.perf_counter(), 0.0
    for message in client.generate(list(prompt), max_tokens=ANSWER, temperature=0.0, ignore_eos=True):
        if message.token_ids and not seen:
            seen = time.perf_counter() - began
        usage = message.usage
    if usage.cached_tokens:
        raise RuntimeError(f"{usage.cached_tokens} tokens of a prompt that nobody had seen were cached")
    return {"seen": seen} | {part: getattr(usage.timings, part) for part in PARTS}


def added(split: Sequence[Seconds], single: Sequence[Seconds]) -> float:
    """What splitting adds to the time to the first token, as a share of the prefill's: the median over rounds."""
    return median((a["seen"] - b["seen"]) / a["prefill"] for a, b in zip(split, single, strict=True))


def beyond(split: Sequence[Seconds], single: Sequence[Seconds]) -> float:
    """The same without the prefills themselves, which are of one work and differ by chance."""
    rest = ((a["seen"] - a["prefill"]) - (b["seen"] - b["prefill"]) for a, b in zip(split, single, strict=True))
    return median(more / a["prefill"] for more, a in zip(rest, split, strict=True))


def shown(tokens: int, found: Mapping[str, Sequence[Seconds]]) -> list[Table | str]:
    heading = f"first token of a fresh prompt of {tokens} tokens: milliseconds, medians of {len(found[SINGLE])} rounds"
    columns = ("seen", *PARTS)
    table = measure.table(heading, ["cell"], [name.replace("_", " ") for name in columns])
    for name, rounds in found.items():
        table.add_row(name, *(measure.milliseconds([each[part] for each in rounds]) for part in columns))
    verdicts = []
    for name in (COPIES, FRAMES):
        share, rest = added(found[name], found[SINGLE]), beyond(found[name], found[SINGLE])
        verdicts.append(
            f"({name} - {SINGLE}) / prefill: {share:+.1%}; "
            + measure.verdict(share <= BAR, f"bar {BAR:.0%}")
            + f"; of what is not prefill: {rest:+.1%}"
        )
    return [table, *verdicts]
