"""Which faults come, in which order and how far apart: all of it from a seed, before anything begins."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, get_args

from chaos_clients import STAGES, WAYS, Burst, Leave, Stage
from chaos_faults import Drain, Fault, Freeze, Kill, Planned, Pool, Role, Stall, Together

from bifolio.kv_manager.drill import Loop

Make = Callable[[random.Random], Fault]
REPLACED_S = 20.0  # Serve finds a replica unhealthy after three checks, two seconds apart
RANKS = 1000  # a rank is taken modulo how many there are


@dataclass(frozen=True)
class Times:
    """Of the cluster's configuration: what is short and what is long follows from it."""

    stall_s: float  # engine.stall_s
    silence_s: float  # kv.silence_s
    transfer_s: float  # kv.stall_s


def catalogue(times: Times) -> dict[str, Make]:
    """Every kind of fault, by its name in tables."""

    def kill(role: Role, by: signal.Signals = signal.SIGKILL) -> Make:
        return lambda rng: Kill(role, rng.randrange(RANKS), by)

    def freeze(role: Role, seconds: float, long: bool = False) -> Make:
        return lambda rng: Freeze(role, rng.randrange(RANKS), seconds, long)

    def drain(role: Pool) -> Make:
        return lambda rng: Drain(role, rng.randrange(RANKS))

    def stall(role: Pool | Literal["manager"], loop: Loop, seconds: float, replaced: bool = False) -> Make:
        return lambda rng: Stall(role, rng.randrange(RANKS), loop, seconds, replaced)

    def leave(stage: Stage) -> Make:
        return lambda rng: Leave(stage, rng.choice(WAYS), 10 if stage == "waiting" else 5)

    makes: list[Make] = []
    for role in get_args(Role):
        makes.append(kill(role))
        if role != "gcs":
            makes += [freeze(role, 1.0), freeze(role, times.silence_s + 3.0, long=True)]
    makes += [kill("prefill", signal.SIGTERM), kill("decode", signal.SIGTERM), kill("ingress", signal.SIGTERM)]
    for pool in get_args(Pool):
        makes += [
            drain(pool),
            stall(pool, "engine", times.stall_s + REPLACED_S, replaced=True),
            stall(pool, "transfer", times.transfer_s + 3.0),
            stall(pool, "loop", times.silence_s + 2.0),
        ]
    makes.append(stall("manager", "manager", times.silence_s + 3.0))
    makes += map(leave, STAGES)
    makes.append(lambda rng: Burst(24))
    alone = {make(random.Random(0)).kind: make for make in makes}
    grave = [name for name in alone if name.startswith(("kill", "freeze", "stall"))]

    def several(rng: random.Random) -> Fault:
        return Together([alone[name](rng) for name in rng.sample(grave, 2)])

    return alone | {"several at once": several}


def plan(seed: int, count: int, times: Times, only: Collection[str] = (), pace: float = 7.0) -> list[Planned]:
    """Every kind as often as any other, one more at most, in an order by chance; `pace` seconds apart on average."""
    kinds = catalogue(times)
    if unknown := set(only) - kinds.keys():
        raise ValueError(f"no such faults: {', '.join(sorted(unknown))}; allowed: {', '.join(kinds)}")
    rng, names = random.Random(seed), [name for name in kinds if not only or name in only]
    order: list[str] = []
    while len(order) < count:
        order += rng.sample(names, len(names))
    made = [kinds[name](rng) for name in order[:count]]
    return [
        Planned(fault, round(rng.uniform(0.4, 1.6) * pace, 2) if number else 1.0) for number, fault in enumerate(made)
    ]


def shown(planned: Planned, number: int) -> str:
    return f"{number:4}  after {planned.after:5.2f} s  {planned.fault}"
