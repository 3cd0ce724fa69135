"""What the processes of a local cluster use: CPU time thread by thread, and memory.

A part is what a row of a table shows: the ingress, HAProxy, Ray's own. The busiest thread of a decode replica under
load is its engine's, and the busiest one after it the event loop's: whoever asks has to see to it that the engine is
busy. Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from bifolio.cluster.gcs import command_of
from bifolio.cluster.reaper import marked

# By how its command begins; the last part of a path alone counts
PARTS = {
    b"ray::ServeReplica:bifolio:Decode": "decode",
    b"ray::ServeReplica:bifolio:Prefill": "prefill",
    b"ray::ServeReplica:bifolio:Ingress": "ingress",
    b"haproxy": "HAProxy",
    b"ray::HAProxy": "HAProxy's keeper",
    b"ray::ProxyActor": "Serve's proxy",
    b"ray::ServeController": "Serve's controller",
    b"ray::KvManager": "KV manager",
    b"valkey-server": "Valkey",
    b"raylet": "raylet",
    b"gcs_server": "GCS",
}
OTHERS = "other processes"

Thread = tuple[int, int]  # process, thread
Cpu = dict[Thread, float]  # seconds


def part_of(pid: int) -> str:
    command = command_of(pid)[0]
    name = command if command.startswith(b"ray::") else os.path.basename(command)
    return next((part for begin, part in PARTS.items() if name.startswith(begin)), OTHERS)


def parts(mark: str, serve: int) -> dict[int, str]:
    """Of each process of the cluster that carries the mark, and of `bifolio serve` itself."""
    return {pid: part_of(pid) for pid in marked(mark)} | {serve: "bifolio serve"}


def cpu(pids: Iterable[int]) -> Cpu:
    """Used so far. Threads that have ended are not there any more."""
    used: Cpu = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError, ValueError):
                    used[pid, int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return used


def spent(before: Cpu, after: Cpu) -> Cpu:
    return {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}


def by_part(spent: Cpu, of: Mapping[int, str], roles: Mapping[Thread, str]) -> dict[str, float]:
    """Seconds; a part's threads that have a role are a line of their own, others are "rest" where there are such."""
    split = {pid for pid, _ in roles}
    found: defaultdict[str, float] = defaultdict(float)
    for thread, seconds in spent.items():
        part = of.get(thread[0], OTHERS)
        found[f"{part}: {roles.get(thread, 'other threads')}" if thread[0] in split else part] += seconds
    return dict(found)


def roles(spent: Cpu, of: Mapping[int, str]) -> dict[Thread, str]:
    """Which thread is the engine's, which the event loop's, by what they did under load."""
    found: dict[Thread, str] = {}
    names = {"decode": ("engine", "event loop"), "ingress": ("event loop",)}
    for pid, part in of.items():
        threads = sorted((t for t in spent if t[0] == pid), key=spent.__getitem__, reverse=True)
        found |= dict(zip(threads, names.get(part, ()), strict=False))
    return found


def memory(pid: int) -> tuple[int, int]:
    """PSS, in which a page that n processes share counts one n-th, and RSS; bytes. Zeros once it has ended."""
    found = {"Pss": 0, "Rss": 0}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) * 1024
    return found["Pss"], found["Rss"]
