"""Many transfers at once, one of which stalls because its prompt's computing does: whether the others wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from typing import Any

import measure
import torch
from rich.table import Table
from transfer_client import Client, place_of
from transfer_partner import Partner
from transfer_source import SMALL, STALLED, WAIT, Sender, Serving

from bifolio.protos.messages import Generation

AT_ONCE = 64
BLOCKS = 16  # of each
WITHOUT, WITH = "without", "beside a stalled one"
BAR = 1.25  # times as long as without
generations = (Generation(1, n) for n in count(1))


def stall(rounds: int) -> dict[str, Any]:
    """Seconds that all but one take, by way and case, and what is left in the end."""
    torch.set_num_threads(1)
    seconds: dict[str, dict[str, list[float]]] = {way: {WITHOUT: [], WITH: []} for way in ("frames", "copies")}
    with Partner(Sender, (SMALL,), (AT_ONCE * place_of(BLOCKS),), (Serving(streams=AT_ONCE),)) as sender:
        [offer] = sender.call("offers")
        with closing(Client(SMALL, offer, AT_ONCE, BLOCKS)) as client, ThreadPoolExecutor(AT_ONCE) as threads:
            for number in range(rounds + 1):
                measure.progress(f"round {number} of {rounds}")
                for way, cases in seconds.items():
                    copies = way == "copies"
                    took = {WITHOUT: others(client, threads, copies), WITH: beside(client, threads, sender, copies)}
                    for case, each in took.items():
                        cases[case] += [each] if number else []  # the first warms up
            _, jobs, streams = sender.call("settled")
            left = {"jobs": jobs, "streams": streams, "pulls": client.meter.read().streams}
    return {"seconds": seconds, "left": left}


def others(client: Client, threads: ThreadPoolExecutor, copies: bool) -> float:
    """Seconds of all but one, from their beginning to the end of the last."""
    began = time.perf_counter()
    work = [threads.submit(client.pull, place, next(generations), copies=copies) for place in range(1, AT_ONCE)]
    assert all(each.result(WAIT) for each in work)
    return time.perf_counter() - began


def beside(client: Client, threads: ThreadPoolExecutor, sender: Partner, copies: bool) -> float:
    """The same, once the first half of the stalled one has come."""
    stuck = threading.Event()
    stalled = threads.submit(
        client.pull, 0, next(generations), copies=copies, name=STALLED, cancel_at=BLOCKS // 2, then=stuck.set
    )
    assert stuck.wait(WAIT)
    seconds = others(client, threads, copies)
    assert not stalled.done(), "it was not stalled"
    sender.call("go_on")
    assert stalled.result(WAIT)
    return seconds


def ratios(seconds: Mapping[str, Mapping[str, list[float]]]) -> dict[str, float]:
    """How many times as long the others take beside a stalled one, by way."""
    return {way: measure.ratio(cases[WITH], cases[WITHOUT]) for way, cases in seconds.items()}


def shown(found: Mapping[str, Any]) -> list[Table | str]:
    heading = f"{AT_ONCE - 1} transfers of {BLOCKS} blocks of {SMALL.block_bytes:,} bytes at once: milliseconds for all"
    table = measure.table(heading, ["way"], [WITHOUT, WITH, "ratio"])
    by_way = ratios(found["seconds"])
    for way, cases in found["seconds"].items():
        table.add_row(way, *(measure.milliseconds(cases[case]) for case in (WITHOUT, WITH)), f"{by_way[way]:.2f}")
    left = ", ".join(f"{name} {count}" for name, count in found["left"].items())
    return [
        table,
        "the others do not wait: " + measure.verdict(all(r <= BAR for r in by_way.values()), f"bar {BAR} x"),
        f"left: {left}; " + measure.verdict(not any(found["left"].values()), "bar nothing"),
    ]
