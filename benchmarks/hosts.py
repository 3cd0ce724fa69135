"""Several hosts on one machine, each with a Ray node: what they have in common, and their end.

Two kinds: `hosts_netns` has links that can be cut, `hosts_ray` needs no rights. Both give a `Hosts`. Whatever a run
makes ends with its context, and is ended by a process that outlives the run if it is killed. Two runs on one machine
never meet. Knows nothing about models or requests.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from bifolio.cluster.reaper import reap

STORE = 80_000_000  # bytes of a host's object store: nothing large travels through it
# A host that is cut off is dead for Ray after some ten seconds; with Ray's own settings after half a minute. On a busy
# machine one that is not cut off takes a second to answer.
QUICK_DEATH = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
LOOK_S = 0.05
PREFIX = "bfh"  # of namespaces: bfh{pid of the run}n{number of the context}-{host}
_number = itertools.count()

Labels = Mapping[str, str]


class NoHosts(Exception):
    """This machine cannot have them; the message says why."""


class Hosts(Protocol):
    """What both kinds have."""

    names: tuple[str, ...]
    address: str  # of the cluster, for `ray.init`

    def kill(self, name: str) -> Collection[int]: ...
    def revive(self, name: str) -> None: ...
    def alive(self, name: str) -> bool: ...
    def environment(self, name: str) -> dict[str, str]: ...
    def ip(self, name: str) -> str: ...
    def inside(self, name: str) -> contextlib.AbstractContextManager[None]: ...


def new_name() -> str:
    """Of what this context makes: no other run has it."""
    return f"{PREFIX}{os.getpid()}n{next(_number)}"


@contextlib.contextmanager
def undertaker(mark: str, directory: Path, base: str) -> Iterator[None]:
    """A process that ends all of this run once this one leaves the context, or ends in any way."""
    command = [sys.executable, "-P", __file__, mark, str(directory), base]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        yield  # its standard input is closed when the context ends
    assert process.returncode == 0, "hosts of this run may be left"


def undertake(mark: str, directory: Path, base: str) -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    sys.stdin.buffer.read()
    if base:
        _remove(base)
    reap(mark, directory, keep="BIFOLIO_KEEP_HOSTS" in os.environ)


def remove_left_over() -> None:
    """Hosts of runs that are gone: those of a process id that nobody has."""
    for name in namespaces():
        if (found := re.fullmatch(rf"({PREFIX}(\d+)n\d+)-.*", name)) and not Path(f"/proc/{found[2]}").exists():
            _remove(found[1])


def _remove(base: str) -> None:
    for name in namespaces():
        if name.startswith(f"{base}-"):
            kill_all(name)
            tool("ip", "netns", "del", name)


def namespaces() -> list[str]:
    return [line.split()[0] for line in tool("ip", "netns", "list").splitlines() if line]


def pids_of(namespace: str) -> list[int]:
    return [int(pid) for pid in tool("ip", "netns", "pids", namespace).split()]


def kill_all(namespace: str) -> None:
    """Again until none is left: what is being killed may have started another one meanwhile."""
    while left := [pid for pid in pids_of(namespace) if pid != os.getpid()]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def tool(*command: str) -> str:
    """What it prints. Raises CalledProcessError, with what it said."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    undertake(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
