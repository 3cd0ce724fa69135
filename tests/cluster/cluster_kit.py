"""What the tests of real clusters share: asking over both doors, watching the replicas, waiting for a state.

Knows a cluster only from outside: its ports, and its processes by their ids.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bifolio.cluster.client import Client
from bifolio.cluster.convert import usage_to_json
from bifolio.cluster.reaper import MARK
from bifolio.cluster.spawn import SpawnedCluster

PATIENCE_S = 60.0  # until a state that must come is given up


@dataclass
class Answer:
    """One answer, however it was asked for; `pieces` is its text as it came."""

    pieces: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def cached(self) -> int:
        """Tokens of the prompt."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def route(self) -> dict[str, Any]:
        return self.usage["route"]


def fresh() -> str:
    """A cache salt that nobody had before: nothing of the prompt is in a cache."""
    return uuid.uuid4().hex


def post(
    cluster: SpawnedCluster, body: dict[str, Any] | bytes, path: str = "/v1/completions", **headers: str
) -> tuple[int, Any]:
    """Status and JSON body of a POST."""
    connection = cluster.connect()
    try:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, content, {"Content-Type": "application/json", **headers})
        with connection.getresponse() as response:
            return response.status, json.loads(response.read())
    finally:
        connection.close()


def whole(cluster: SpawnedCluster, prompt: str | Sequence[int], **fields: Any) -> Answer:
    """Over HTTP, in one piece."""
    (answer,) = all_whole(cluster, prompt, **fields)
    return answer


def all_whole(cluster: SpawnedCluster, prompt: str | Sequence[int], **fields: Any) -> list[Answer]:
    status, body = post(cluster, {"prompt": prompt, **fields})
    assert status == 200, body
    assert [choice["index"] for choice in body["choices"]] == list(range(fields.get("n", 1)))
    return [Answer([choice["text"]], [], choice["finish_reason"], body["usage"]) for choice in body["choices"]]


def streamed(cluster: SpawnedCluster, prompt: str | Sequence[int], **fields: Any) -> Answer:
    """Over HTTP, as server-sent events."""
    (answer,) = all_streamed(cluster, prompt, **fields)
    return answer


def all_streamed(cluster: SpawnedCluster, prompt: str | Sequence[int], **fields: Any) -> list[Answer]:
    answers, last = [Answer() for _ in range(fields.get("n", 1))], b""
    connection = cluster.connect()
    try:
        body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **fields}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            assert response.status == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in filter(None, map(bytes.strip, response)):
                last = line.removeprefix(b"data: ")
                if last == b"[DONE]":
                    continue
                event = json.loads(last)
                for choice in event["choices"]:
                    answer = answers[choice["index"]]
                    assert answer.finish is None, "nothing follows the finish reason"
                    answer.pieces.append(choice["text"])
                    answer.finish = choice["finish_reason"]
                for answer in answers if event["usage"] else ():
                    answer.usage = event["usage"]
    finally:
        connection.close()
    assert last == b"[DONE]"
    return answers


def over_grpc(cluster: SpawnedCluster, prompt: str | Sequence[int], **fields: Any) -> Answer:
    with Client(cluster.grpc_address) as client:
        return collected(client, prompt, **fields)


def all_over_grpc(cluster: SpawnedCluster, prompt: str | Sequence[int], **fields: Any) -> list[Answer]:
    with Client(cluster.grpc_address) as client:
        return all_collected(client, prompt, **fields)


def collected(client: Client, prompt: str | Sequence[int], **fields: Any) -> Answer:
    (answer,) = all_collected(client, prompt, **fields)
    return answer


def all_collected(client: Client, prompt: str | Sequence[int], **fields: Any) -> list[Answer]:
    answers = [Answer() for _ in range(fields.get("n", 1))]
    for message in client.generate(prompt, timeout=120.0, **fields):
        answer = answers[message.choice]
        assert answer.finish is None, "nothing follows the finish reason"
        answer.pieces.append(message.text)
        answer.ids += message.token_ids
        answer.finish = message.finish_reason or None
        for each in answers if message.HasField("usage") else ():
            each.usage = usage_to_json(message.usage)
    return answers


def wait_until(condition: Callable[[], Any], what: Callable[[], object] | str, seconds: float = PATIENCE_S) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(0.02)
    return value


def snapshot(cluster: SpawnedCluster) -> dict[str, Any]:
    status, body = cluster.get("/status")
    assert status == 200, body
    return dict(body)


def replicas(cluster: SpawnedCluster, role: str | None = None) -> list[dict[str, Any]]:
    return [replica for replica in snapshot(cluster)["replicas"] if role in (None, replica["role"])]


def at_rest(replica: dict[str, Any]) -> bool:
    """No block is leased, in the ledger's view and by the replica's own newest report: each is free or cached."""
    assert replica["free"] + replica["cached"] + replica["leased"] == replica["total"]
    return not any(replica[name] for name in ("leased", "offered", "active", "revoked", "reported", "held"))


def settle(cluster: SpawnedCluster, prefill: int, decode: int, seconds: float = PATIENCE_S) -> None:
    """Wait until nobody waits, so many replicas are alive and hold nothing, and two reports later still do not.

    Two, so that one of them began after everything here was free.
    """
    since: dict[str, int] = {}

    def settled() -> bool:
        status = snapshot(cluster)
        now = status["replicas"]
        roles = sorted(r["role"] for r in now if r["state"] == "alive")
        if roles != ["decode"] * decode + ["prefill"] * prefill or status["waiting"] or not all(map(at_rest, now)):
            since.clear()
            return False
        for replica in now:
            since.setdefault(replica["id"], replica["beat"])
        return all(replica["beat"] >= since[replica["id"]] + 2 for replica in now)

    wait_until(settled, lambda: f"not at rest: {json.dumps(snapshot(cluster), indent=1)}", seconds)


def open_stream(cluster: SpawnedCluster, **body: Any) -> socket.socket:
    """A socket on which a completion has been asked for; nothing of the answer has been read."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", cluster.http_port), timeout=PATIENCE_S)
    connection.sendall(head.encode() + content)
    return connection


def read_events(connection: socket.socket, count: int) -> None:
    """Read until so many events have come."""
    taken = b""
    while taken.count(b"data: {") < count:
        part = connection.recv(65536)
        assert part, f"the stream ended after {taken!r}"
        taken += part


@contextlib.contextmanager
def frozen(pids: Sequence[int]) -> Iterator[None]:
    """Processes that do not run for the time of the context, unless they are killed meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def environment_of(pid: int) -> dict[str, str]:
    """What a process was started with; empty once it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return dict(entry.decode().split("=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    return {}


def command_of(pid: int) -> bytes:
    """What a process calls itself; empty once it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""


def descendants(pid: int) -> list[int]:
    found, left = [], [pid]
    while left:
        parent = left.pop()
        with contextlib.suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{task}/children") as file:
                    left += map(int, file.read().split())
            found.append(parent)
    return found[1:]


def mark_of(pid: int) -> dict[str, str] | None:
    """The environment a cluster gives its processes, as soon as there is one; `pid` is that of `bifolio serve`."""
    for child in descendants(pid):
        if MARK in (environment := environment_of(child)):
            return environment
    return None
