"""A running cluster, seen from outside: where its doors are, what it says of itself, and which processes it has.

Knows nothing about faults, nor about what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from bifolio.cluster.gcs import command_of
from bifolio.cluster.reaper import MARK, marked

STATUS_S = 5.0  # for an answer to a question about its state
LOOK_S = 0.1
HELD = ("leased", "offered", "active", "revoked", "reported", "held")  # of a replica at rest all 0
TITLES = {
    "prefill": b"ray::ServeReplica:bifolio:Prefill",
    "decode": b"ray::ServeReplica:bifolio:Decode",
    "ingress": b"ray::ServeReplica:bifolio:Ingress",
    "manager": b"ray::KvManager",
    "redis": b"valkey-server",
    "gcs": b"gcs_server",
}


class Target:
    """Any cluster: two ports and how many of each role it should have. Without a door that answers it has no status."""

    def __init__(self, http_port: int, grpc_port: int, host: str = "127.0.0.1", *, prefill: int, decode: int) -> None:
        self.url = f"http://{host}:{http_port}"
        self.grpc_address = f"{host}:{grpc_port}"
        self.wanted = {"prefill": prefill, "decode": decode}

    async def status(self) -> dict[str, Any] | None:
        code, body = await self._asked("GET", "/status")
        return body if code == 200 else None

    async def post(self, path: str) -> int:
        """The status of the answer; 0 if nobody answers."""
        return (await self._asked("POST", path))[0]

    async def _asked(self, method: str, path: str) -> tuple[int, Any]:
        try:
            async with (
                asyncio.timeout(STATUS_S),
                aiohttp.ClientSession() as session,
                session.request(method, self.url + path) as response,
            ):
                return response.status, await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return 0, None

    async def replicas(self, role: str) -> list[dict[str, Any]]:
        """Those that are alive, by their processes; none where nobody answers."""
        status = await self.status() or {"replicas": ()}
        found = [each for each in status["replicas"] if each["role"] == role and each["state"] == "alive"]
        return sorted(found, key=lambda each: int(each["pid"]))

    async def whole(self, gone: Collection[int] = ()) -> bool:
        """As many replicas as wanted are alive, none is left that was to go, and what must be remembered is. `gone` are
        processes that have ended."""
        status = await self.status()
        if status is None or not status["store"]["answers"] or any(r["pid"] in gone for r in status["replicas"]):
            return False
        roles = [each["role"] for each in status["replicas"]]
        alive = all(each["state"] == "alive" for each in status["replicas"])
        return alive and all(roles.count(role) == count for role, count in self.wanted.items())


class Local(Target):
    """One whose processes are on this machine: `serve` is the id of its `bifolio serve`."""

    def __init__(
        self,
        http_port: int,
        grpc_port: int,
        serve: int,
        *,
        prefill: int,
        decode: int,
        ingress: int,
        drills: Path | None = None,
    ) -> None:
        super().__init__(http_port, grpc_port, prefill=prefill, decode=decode)
        self._each = {"ingress": ingress, "manager": 1, "redis": 1, "gcs": 1}
        self.drills = drills  # the directory that its BIFOLIO_DRILL names
        self.mark = next(filter(None, map(_mark_of, _children(serve))))

    def processes(self, what: str) -> list[int]:
        """Of one kind in TITLES, by their ids; also those that are only starting."""
        return sorted(pid for pid in marked(self.mark) if _command_of(pid).startswith(TITLES[what]))

    async def whole(self, gone: Collection[int] = ()) -> bool:
        commands = [_command_of(pid) for pid in marked(self.mark)]
        there = all(
            sum(command.startswith(TITLES[what]) for command in commands) == count for what, count in self._each.items()
        )
        return there and await super().whole(gone)


def is_there(pid: int) -> bool:
    """A process that has ended but is not yet waited for is not."""
    return bool(_command_of(pid))


def at_rest(status: Mapping[str, Any], wanted: Mapping[str, int]) -> bool:
    """Nobody waits, all are alive, and each block of each of them is free or cached by both sides' account."""
    roles = [each["role"] for each in status["replicas"] if each["state"] == "alive"]
    return not status["waiting"] and not leaked(status) and all(roles.count(r) == n for r, n in wanted.items())


def leaked(status: Mapping[str, Any]) -> list[str]:
    """What a cluster that has nothing to do still holds, in words."""
    found = [f"{status['waiting']} wait"] if status["waiting"] else []
    for each in status["replicas"]:
        found += [f"{each['id']}: {name} {each[name]}" for name in HELD if each[name]]
        if each["free"] + each["cached"] + each["leased"] != each["total"]:
            found.append(f"{each['id']}: free {each['free']}, cached {each['cached']}, of {each['total']} blocks")
    return found


async def settle(target: Target, seconds: float) -> list[str]:
    """Nothing, once the cluster is at rest for two reports of every replica; else what keeps it from that."""
    deadline = asyncio.get_running_loop().time() + seconds
    since: dict[str, int] = {}  # by replica: its report when we first saw all of them at rest
    status: dict[str, Any] | None = None
    while asyncio.get_running_loop().time() < deadline:
        status = await target.status()
        if status is None or not at_rest(status, target.wanted):
            since.clear()
        else:
            beats = {each["id"]: int(each["beat"]) for each in status["replicas"]}
            for id, beat in beats.items():
                since.setdefault(id, beat)
            # Two, so that one of them began after everything was free
            if all(beat >= since[id] + 2 for id, beat in beats.items()):
                return []
        await asyncio.sleep(LOOK_S)
    if status is None:
        return ["its status is not to be had"]
    return leaked(status) or [f"alive: {json.dumps([(r['id'], r['state']) for r in status['replicas']])}"]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def _mark_of(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(f"{MARK}=".encode()):
                return entry.decode().partition("=")[2]
    return None


def _command_of(pid: int) -> bytes:
    """What a process calls itself; a path is cut down to its last part. Empty once it has ended."""
    command = command_of(pid)[0]
    return command if command.startswith(b"ray::") else os.path.basename(command)
