"""A private place on this machine, with a Ray cluster in it: ports, directory, environment, and an orderly end.

Knows nothing about models or requests. Two clusters on one machine never meet: each has its own temporary directory and
free ports, and marks its processes with an environment variable that they all inherit, by which `reaper.py` finds them.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

from bifolio.protos.errors import ConfigError, Unavailable

from .reaper import KEEP, MARK

SHUTDOWN_S = 20.0  # after this every process is killed
LOWEST_PORT, HIGHEST_PORT = 20_000, 32_000  # the system's own begin at 32768
PORTS_PER_RANGE = 16  # replicas of the ingress, old and new, during a roll-over


def free_ports(count: int, spoken_for: Collection[int] = ()) -> list[int]:
    """Neighbouring ports that were free a moment ago, below those the system hands out by itself.

    The start is random, so that clusters that start together seldom try the same ones. `spoken_for` are left out,
    though nobody listens there yet.
    """
    for _ in range(200):
        first = random.randrange(LOWEST_PORT, HIGHEST_PORT - count + 1)
        if any(first <= port < first + count for port in spoken_for):
            continue
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("", port))
            return list(range(first, first + count))
    raise ConfigError(
        f"no {count} neighbouring free ports from {LOWEST_PORT} to {HIGHEST_PORT}: stop what listens there"
    )


def require_free(host: str, port: int, field: str) -> None:
    """Raise ConfigError when somebody listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{field}: cannot listen on {host}:{port} ({error.strerror}): choose another port"
            ) from error


def environment(directory: Path, mark: str, doors: Collection[int]) -> dict[str, str]:
    """Variables that Ray and Serve read when they are imported; children inherit them."""
    fallback_http, fallback_grpc, stats, metrics, http, *_ = free_ports(4 + 2 * PORTS_PER_RANGE, doors)
    grpc = http + PORTS_PER_RANGE
    proxy = directory / "ha"
    return {
        MARK: mark,
        "RAY_AUTH_MODE": "token",  # Ray's own ports are not on loopback alone
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # inherited, never written to a file
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",  # with the next: less CPU per token, and no lost gRPC cancels
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",  # above the longest stream: a reload cuts what is older
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 << 20),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(http),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(http + PORTS_PER_RANGE - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc + PORTS_PER_RANGE - 1),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(proxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(proxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(proxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(proxy / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(proxy / "metrics.sock"),
    }


@contextlib.contextmanager
def private_place(doors: Collection[int]) -> Iterator[Path]:
    """A directory for this user alone, and an environment for processes that keep off each other's ports and off those
    in `doors`: its user will listen there. Afterwards no process that inherited it, and no file there, is left.

    Must be entered before anything imports ray: its constants are read from the environment at import. When the
    context ends as Unavailable the files are kept, because logs say more.
    """
    directory = Path(tempfile.mkdtemp(prefix="bifolio-"))  # short, as unix sockets lie below it
    mark = uuid.uuid4().hex
    # Started first, so it does not carry the mark itself, and apart from our session, so Ctrl-C does not reach it
    command = [sys.executable, "-P", "-m", "bifolio.cluster.reaper", mark, str(directory)]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert reaper.stdin is not None
    os.environ.update(environment(directory, mark, doors))
    try:
        yield directory
    except Unavailable:
        reaper.stdin.write(KEEP)
        raise
    finally:
        reaper.stdin.close()
        reaper.wait()


@contextlib.contextmanager
def local_ray(directory: Path) -> Iterator[Path]:
    """A Ray cluster in a private place, for the time of the context. Yields the folder of its logs."""
    try:
        import ray

        ray.init(
            address="local",  # also where RAY_ADDRESS names another cluster
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=100_000_000,  # neither KV bytes nor tokens travel through it
            _temp_dir=str(directory / "ray"),  # Ray opens this one to all users
        )
        yield directory / "ray" / "session_latest" / "logs"
    finally:
        _shut_down()


def _shut_down() -> None:
    """Let Serve and Ray end in order, as long as they do not take too long."""

    def orderly() -> None:
        with contextlib.suppress(Exception):
            import ray
            from ray import serve

            if ray.is_initialized():  # or the next line would start another Ray, to look whether Serve runs there
                serve.shutdown()
            ray.shutdown()

    worker = threading.Thread(target=orderly, daemon=True)
    worker.start()
    worker.join(SHUTDOWN_S)
