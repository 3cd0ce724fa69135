"""A cluster as a child process: `bifolio serve` on free ports, for the demo, the tests and the benchmarks.

Knows the cluster only from outside, as any client does.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from bifolio.protos.errors import Unavailable

from .local import free_ports

READY = "bifolio: ready"  # how the line begins that `serve` prints
START_S = 180.0
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class SpawnedCluster:
    """Where a running cluster listens."""

    http_port: int
    grpc_port: int
    process: subprocess.Popen[bytes]
    said: list[tuple[float, str]] = field(default_factory=list)  # its lines, and when by time.monotonic

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def connect(self, timeout: float = 120.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=timeout)

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON body of a GET."""
        connection = self.connect(10.0)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        finally:
            connection.close()


@contextmanager
def spawned(arguments: Sequence[str], output: IO[bytes] | None = None) -> Iterator[SpawnedCluster]:
    """Run `bifolio serve` with these arguments until the context ends; it begins when the cluster is ready.

    What the cluster prints goes to `output`, or to our own standard output. Raises Unavailable if it does not become
    ready.
    """
    http_port, grpc_port = free_ports(2)
    ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    # -P: the current directory may hold folders named like our dependencies
    command = [sys.executable, "-P", "-m", "bifolio.cluster.cli", "serve", *arguments, *ports]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    ready, cluster = threading.Event(), SpawnedCluster(http_port, grpc_port, process)
    reader = threading.Thread(target=_copy, args=(cluster, output or sys.stdout.buffer, ready), daemon=True)
    reader.start()
    try:
        if not ready.wait(START_S):
            raise Unavailable(f"the cluster was not ready within {START_S:.0f} s; its output says more")
        if (status := process.poll()) is not None:
            raise Unavailable(f"the cluster ended with status {status} before it was ready; its output says why")
        yield cluster
    finally:
        end(process)
        reader.join(STOP_S)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and kill it if it does not."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _copy(cluster: SpawnedCluster, output: IO[bytes], ready: threading.Event) -> None:
    """Copy what the cluster prints, line by line; it is ready when it says so, or has ended."""
    assert cluster.process.stdout is not None
    with cluster.process.stdout as lines:
        for line in lines:
            cluster.said.append((time.monotonic(), line.decode(errors="replace")))
            output.write(line)
            output.flush()
            if line.startswith(READY.encode()):
                ready.set()
    cluster.process.wait()
    ready.set()
