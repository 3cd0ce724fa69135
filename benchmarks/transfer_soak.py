"""Thousands of transfers, of which some are cancelled and some lose their process, and whether anything is left behind:
memory, descriptors or threads of the sender's process and of the receiver's, which is this one.

Knows nothing of speed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import measure
import torch
from rich.table import Table
from transfer_client import Client, place_of
from transfer_partner import GoneError, Partner, Taken, taken
from transfer_source import SMALL, Offer, Sender, Serving

from bifolio.protos.messages import Generation

AT_ONCE = 4
PLACES = AT_ONCE + 1  # the last one is of those who die
BLOCKS = 64  # of a transfer: 24 MB
CANCELLED = 0.2  # of all, each at a random piece
STAGES = {"first": 0.1, "quarter": 0.25, "half": 0.5, "end": 1.0}  # after which share of the transfers we look
FLAT_RSS = 32 << 20  # what a process may have more in the end than after a quarter: bytes of memory,
FLAT_THREADS = 2  # and threads of a pool that is not full yet
MIB = 1 << 20
generations = (Generation(1, n) for n in count(1))


@dataclass(frozen=True, slots=True)
class Look:
    """How it is when nothing is under way."""

    done: int
    cancelled: int
    killed: int
    sender: Taken
    receiver: Taken


def soak(transfers: int, kills: int) -> tuple[list[Look], dict[str, Any]]:
    """What was seen after each of STAGES, and what is left in the end."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    looks = []
    with Partner(Sender, (SMALL,), (PLACES * place_of(BLOCKS),), (Serving(streams=2 * PLACES),)) as sender:
        [offer] = sender.call("offers")
        with closing(Client(SMALL, offer, PLACES, BLOCKS)) as client, ThreadPoolExecutor(PLACES) as threads:
            for before, now in pairwise((0.0, *STAGES.values())):
                numbers = range(int(before * transfers), int(now * transfers))
                work = [threads.submit(_pull, client, at, len(numbers[at::AT_ONCE])) for at in range(AT_ONCE)]
                work.append(threads.submit(_kill, offer, round(now * kills) - round(before * kills)))
                for each in work:
                    counts.update(each.result())
                sender.call("settled")
                seen = taken(sender.pid), taken(os.getpid())
                looks.append(Look(counts["done"], counts["cancelled"], counts["killed"], *seen))
                measure.progress(f"{sum(counts.values())} transfers")
            begun, jobs, streams = sender.call("settled")
            [sent], ours = sender.call("traffic"), client.meter.read()
    left = {"jobs": jobs, "streams": streams, "in flight": sent.in_flight, "pulls": ours.streams}
    return looks, {"begun": begun, "left": left, "failed": dict(sent.failed), "ways": dict(ours.ways)}


def _pull(client: Client, place: int, transfers: int) -> Counter[str]:
    """Frames and copies in turn."""
    counts: Counter[str] = Counter()
    for number in range(transfers):
        generation = next(generations)
        chance = random.Random(generation.counter)
        at = chance.randrange(1, BLOCKS + 1) if chance.random() < CANCELLED else 0  # there are more pieces than that
        came = client.pull(place, generation, copies=number % 2 == 0, cancel_at=at)
        if came and at:
            raise RuntimeError(f"transfer {generation} was cancelled at piece {at}, and came to its end")
        counts["done" if came else "cancelled"] += 1
    return counts


def _kill(offer: Offer, kills: int) -> Counter[str]:
    """One process after the other, each of which is killed in its second transfer."""
    for number in range(kills):
        with Partner(Client, SMALL, offer, PLACES, BLOCKS) as dying:
            copies, at = number % 2 == 0, random.Random(number).randrange(1, BLOCKS + 1)
            dying.call("whole", PLACES - 1, next(generations), copies)
            try:
                dying.call("die", PLACES - 1, next(generations), copies, at)
            except GoneError:
                continue
            raise RuntimeError("a process outlived its death")
    return Counter({"killed": kills, "done": kills})


def flat(looks: Sequence[Look]) -> bool:
    """Whether neither process has more in the end than after a quarter."""
    _, quarter, *_, end = looks
    return all(
        getattr(end, side).files <= getattr(quarter, side).files
        and getattr(end, side).threads <= getattr(quarter, side).threads + FLAT_THREADS
        and getattr(end, side).rss <= getattr(quarter, side).rss + FLAT_RSS
        for side in ("sender", "receiver")
    )


def shown(looks: Sequence[Look], found: Mapping[str, Any]) -> list[Table | str]:
    columns = ["done", "cancelled", "killed"]
    columns += [name for side in ("sender", "receiver") for name in (f"{side} MiB", "files", "threads")]
    heading = f"transfers of {BLOCKS} blocks of {SMALL.block_bytes:,} bytes, {AT_ONCE} at once"
    table = measure.table(heading, ["look"], columns)
    for name, look in zip(STAGES, looks, strict=True):
        sides = (f"{t.rss / MIB:.0f} {t.files} {t.threads}".split() for t in (look.sender, look.receiver))
        table.add_row(
            name, *map(str, (look.done, look.cancelled, look.killed)), *(word for side in sides for word in side)
        )
    left = ", ".join(f"{name} {count}" for name, count in found["left"].items())
    ways = ", ".join(f"{name} {count}" for name, count in sorted(found["ways"].items()))
    nothing = not any(found["left"].values())
    return [
        table,
        f"the receiver's streams by way: {ways}; {found['begun']} jobs begun at the sender",
        f"left: {left}; " + measure.verdict(nothing, "bar nothing"),
        "from a quarter to the end: "
        + measure.verdict(
            flat(looks),
            f"bar no descriptor more, RSS within {FLAT_RSS // MIB} MiB, at most {FLAT_THREADS} threads more of a pool",
        ),
    ]
