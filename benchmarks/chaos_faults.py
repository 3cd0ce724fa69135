"""What can go wrong with a cluster's processes, each as a small object that is made before anything begins.

A fault strikes one scene: a cluster and the load on it. All of its choices (which of several, for how long) were made
when it was made: no answer of the cluster changes them. `Fault` is all that a runner asks for, so others can be added;
those of clients are in `chaos_clients`, and which come when is `chaos_plan`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import quote

from chaos_load import Load
from chaos_target import Local, Target, is_there

from bifolio.kv_manager.drill import Loop

TARGET_S = 60.0  # how long a fault waits for somebody to strike
BROKEN_S = 5.0  # the sockets of a process that is killed are closed at once; HAProxy may send it more for a moment
LOOK_S = 0.1

Role = Literal["prefill", "decode", "ingress", "manager", "redis", "gcs"]
Pool = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Scene:
    """Where a fault strikes."""

    target: Target
    load: Load


@dataclass(frozen=True)
class Hit:
    """What a fault did. The cluster is whole again only after the processes in `gone` have ended."""

    whom: str
    gone: tuple[int, ...] = ()
    breaks: bool = False  # an ingress has died of it: the streams that it carried may break,
    broken_by: float | None = None  # until then, by time.monotonic; None: until the cluster is whole again


class Fault(Protocol):
    @property
    def kind(self) -> str:
        """One word for the table."""
        ...

    async def strike(self, scene: Scene) -> Hit:
        """Returns when it is over: a fault that lasts, lasts until then. Raises nothing but mistakes of ours."""
        ...


@dataclass(frozen=True)
class Planned:
    """`after`: seconds since the one before it began."""

    fault: Fault
    after: float = 0.0


@dataclass(frozen=True)
class Kill:
    """SIGKILL, or SIGTERM: then the process is given time to end what it has."""

    role: Role
    rank: int
    signal: signal.Signals = signal.SIGKILL

    @property
    def kind(self) -> str:
        return f"{'kill' if self.signal == signal.SIGKILL else 'term'} {self.role}"

    async def strike(self, scene: Scene) -> Hit:
        pid = await victim(scene.target, self.role, self.rank)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, self.signal)
        breaks = self.role == "ingress" and self.signal == signal.SIGKILL
        return Hit(f"process {pid}", (pid,), breaks, time.monotonic() + BROKEN_S)


@dataclass(frozen=True)
class Freeze:
    """SIGSTOP, and SIGCONT some seconds later, unless it was killed meanwhile."""

    role: Role
    rank: int
    seconds: float
    long: bool = False  # longer than anybody waits for it

    @property
    def kind(self) -> str:
        return f"{'freeze' if self.long else 'pause'} {self.role}"

    async def strike(self, scene: Scene) -> Hit:
        pid = await victim(scene.target, self.role, self.rank)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(self.seconds)
            finally:
                os.kill(pid, signal.SIGCONT)
        return Hit(f"process {pid}, {self.seconds:g} s", breaks=self.role == "ingress" and not is_there(pid))


@dataclass(frozen=True)
class Drain:
    """What `bifolio drain` asks for: a replica leaves when it has ended what it has."""

    role: Pool
    rank: int

    @property
    def kind(self) -> str:
        return f"drain {self.role}"

    async def strike(self, scene: Scene) -> Hit:
        answer = 0
        for _ in range(round(TARGET_S / LOOK_S)):
            if found := await scene.target.replicas(self.role):
                replica = found[self.rank % len(found)]
                answer = await scene.target.post(f"/v1/replicas/{quote(replica['id'], safe='')}/drain")
                if answer == 200:
                    return Hit(replica["id"], (replica["pid"],))
            await asyncio.sleep(LOOK_S)
        raise RuntimeError(f"no {self.role} replica could be asked to leave; the last answer was {answer}")


@dataclass(frozen=True)
class Stall:
    """A loop of a process stands still, by a drill of `kv_manager/drill.py`, though the process lives."""

    role: Pool | Literal["manager"]
    rank: int
    loop: Loop
    seconds: float
    replaced: bool = False  # it lasts until the process is gone, `seconds` at most

    @property
    def kind(self) -> str:
        return f"stall {self.role}" + (f" {self.loop}" if self.loop != self.role else "")

    async def strike(self, scene: Scene) -> Hit:
        assert isinstance(scene.target, Local)
        assert scene.target.drills is not None
        pid = await victim(scene.target, self.role, self.rank)
        file = scene.target.drills / f"{pid}-{self.loop}"
        file.touch()
        began = time.monotonic()
        try:
            while time.monotonic() < began + self.seconds and not (self.replaced and not is_there(pid)):
                await asyncio.sleep(LOOK_S)
        finally:
            file.unlink()
        return Hit(f"process {pid}, {time.monotonic() - began:.0f} s", (pid,) if self.replaced else ())


@dataclass(frozen=True)
class Together:
    """Several at once."""

    faults: Sequence[Fault]

    @property
    def kind(self) -> str:
        return "several at once"

    async def strike(self, scene: Scene) -> Hit:
        hits = await asyncio.gather(*(fault.strike(scene) for fault in self.faults))
        whom = " + ".join(fault.kind for fault in self.faults)
        ends = [hit.broken_by for hit in hits if hit.breaks]
        latest = None if None in ends else max(filter(None, ends), default=None)
        return Hit(whom, tuple(pid for hit in hits for pid in hit.gone), bool(ends), latest)


async def victim(target: Target, role: Role, rank: int) -> int:
    """The process of that rank among those of a role that serve; if none does, among those that are there at all."""
    assert isinstance(target, Local)
    for _ in range(round(TARGET_S / LOOK_S)):
        found = target.processes(role)
        if role in ("prefill", "decode"):
            alive = [int(each["pid"]) for each in await target.replicas(role)]
            found = [pid for pid in found if pid in alive] or found
        if found:
            return found[rank % len(found)]
        await asyncio.sleep(LOOK_S)
    raise RuntimeError(f"there is no {role} process to strike")
