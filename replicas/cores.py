"""Which of a host's cores an engine computes on alone, and where everything else of ours stays meanwhile.

A claim is a socket in Linux's abstract namespace: only one process can have the name, everybody can list it, and it
ends with its process, however that ends. On other systems nothing is claimed, and the operating system places all.
Knows nothing of engines.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping, Set
from pathlib import Path

from bifolio.protos.messages import Role

SOCKETS = Path("/proc/net/unix")
THREADS = Path("/proc/self/task")
_ENGINE = "engine"  # the name of its thread, which those that it starts have after it
_NAME = "bifolio-core"  # of a claim, before the core's number and the role


def claimed(listing: str) -> dict[int, str]:
    """The cores that are claimed on this host, each with the role that computes there, by /proc/net/unix."""
    found = re.findall(rf"@{_NAME}-(\d+)-(\w+)$", listing, re.MULTILINE)
    return {int(core): role for core, role in found}


def for_loops(allowed: Set[int], claims: Mapping[int, str]) -> Set[int]:
    """The cores for whatever waits and answers: those that nobody computes on, else those of prompts, else all. A core
    that decodes is shared last: what runs there in between makes all its streams late."""
    decoding = {core for core, role in claims.items() if role == "decode"}
    return allowed - claims.keys() or allowed - decoding or allowed


class Cores:
    """What one process has of its host's cores."""

    def __init__(self, role: Role | None = None, count: int = 0) -> None:
        """Claim so many for an engine of that role, or none if there are not as many: for decoding from the last one
        down, for prompts from the first one up, so that each finds its own again after a restart."""
        self._role = role
        self._allowed: Set[int] = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset()
        self._loops: Set[int] = self._allowed
        self._claims: list[socket.socket] = []
        self.own: frozenset[int] = frozenset()
        with contextlib.ExitStack() as undo:
            own: list[int] = []
            for core in sorted(self._allowed, reverse=role == "decode"):
                if len(own) < count and (claim := _bind(f"{_NAME}-{core}")):
                    own.append(core)
                    named = _bind(f"{_NAME}-{core}-{role}")
                    self._claims += [undo.enter_context(each) for each in (claim, named) if each]
            if len(own) == count:
                undo.pop_all()
                self.own = frozenset(own)

    def release(self) -> None:
        """Give the cores back; the engine has ended."""
        for claim in self._claims:
            claim.close()

    def bind_engine(self) -> None:
        """The calling thread, and those that it starts, compute on the claimed cores. Prompts make way at once for
        whatever else is due there, and Linux takes their core for an idle one when it looks where to run a thread that
        wakes up: not where tokens are decoded."""
        if self.own:
            Path("/proc/thread-self/comm").write_text(_ENGINE)
            os.sched_setaffinity(0, self.own)
            if self._role == "prefill":
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    def place_loops(self) -> None:
        """Move this process' other threads to where they disturb least, as claims come and go. From any thread."""
        if not self._allowed:
            return
        loops = for_loops(self._allowed, claimed(listing()))
        if loops == self._loops:
            return
        self._loops = loops
        for thread in THREADS.iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if (thread / "comm").read_text().strip() != _ENGINE:
                    os.sched_setaffinity(int(thread.name), loops)


def _bind(name: str) -> socket.socket | None:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.bind(f"\0{name}")
    except OSError:
        made.close()
        return None
    return made


def listing() -> str:
    """The sockets of this host that have names."""
    try:
        return SOCKETS.read_text()
    except OSError:
        return ""
