"""What the benchmarks of recovery do with a cluster of their own beside asking it: wait for what it says of itself,
find and stop its processes, make them stand still. Knows nothing of what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chaos_target
import yaml
from chaos_target import Local

from bifolio.cluster.spawn import SpawnedCluster
from bifolio.kv_manager import drill

LOOK_S = 0.03
PATIENCE_S = 120.0

Status = Mapping[str, Any]


class NotReached(RuntimeError):
    """A state of the cluster that must come has not come."""


def target_of(cluster: SpawnedCluster, *, prefill: int, decode: int, ingress: int = 1) -> Local:
    ports = (cluster.http_port, cluster.grpc_port)
    return Local(*ports, cluster.process.pid, prefill=prefill, decode=decode, ingress=ingress)


async def wait_until(target: Local, what: str, true: Callable[[Status], Any], seconds: float = PATIENCE_S) -> Status:
    """The first status for which something is true."""
    deadline = time.monotonic() + seconds
    while True:
        found = await target.status()
        if found is not None and true(found):
            return found
        if time.monotonic() > deadline:
            raise NotReached(f"after {seconds:g} s not yet: {what}; {json.dumps(found)}")
        await asyncio.sleep(LOOK_S)


async def settled(target: Local, seconds: float = PATIENCE_S) -> None:
    """All replicas are there and hold nothing, and nobody waits. Raises NotReached."""
    if left := await chaos_target.settle(target, seconds):
        raise NotReached(f"after {seconds:g} s not at rest: {'; '.join(left)}")


def leases(status: Status, role: str) -> int:
    return sum(r["offered"] + r["active"] for r in status["replicas"] if r["role"] == role)


def of_role(status: Status, role: str) -> list[dict[str, Any]]:
    """Its replicas that take work."""
    return [r for r in status["replicas"] if r["role"] == role and r["state"] == "alive"]


def environment_of(pid: int) -> dict[str, str]:
    """What a process was started with; empty once it is gone."""
    with contextlib.suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return dict(entry.decode().split("=", 1) for entry in entries if b"=" in entry)
    return {}


def cpu_seconds(pid: int) -> float:
    """Of all its threads, since it began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> float:
    """When that was; nothing if it has ended."""
    now = time.perf_counter()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return now


@contextmanager
def written(config: Mapping[str, Any]) -> Iterator[str]:
    """A cluster's file."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(dict(config), file)
        file.flush()
        yield file.name


@contextmanager
def drills() -> Iterator[Path]:
    """Clusters that start in this context can be made to stand still: the directory that tells them."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ[drill.DIRECTORY] = directory
        try:
            yield Path(directory)
        finally:
            del os.environ[drill.DIRECTORY]


@contextmanager
def standing_still(directory: Path, pid: int, loop: drill.Loop) -> Iterator[Callable[[], None]]:
    """For as long as the context lasts, or until what it yields is called."""
    file = directory / f"{pid}-{loop}"
    file.touch()

    def go_on() -> None:
        file.unlink(missing_ok=True)

    try:
        yield go_on
    finally:
        go_on()
