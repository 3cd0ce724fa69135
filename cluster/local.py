"""A private place on this machine, with a Ray cluster in it: ports, directory, environment, and an orderly end.

Knows nothing about models or requests. Two clusters on one machine never meet: each has its own temporary directory and
free ports, and marks its processes with an environment variable that they all inherit, by which `reaper.py` finds them.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from bifolio.protos.errors import ConfigError, Unavailable

from . import gcs
from .reaper import KEEP, MARK, marked

SHUTDOWN_S = 10.0  # after this every process is killed
LOWEST_PORT, HIGHEST_PORT = 20_000, 32_000  # the system's own begin at 32768
PORTS_PER_RANGE = 48  # replicas of the ingress: old ones that drain, new ones, and those whose ports rest


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
        **gcs.storage(directory / "gcs"),
        MARK: mark,
        "RAY_AUTH_MODE": "token",  # Ray's own ports are not on loopback alone
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # inherited, never written to a file
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",  # with the next: less CPU per token, and no lost gRPC cancels
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Each pass of its controller costs it and Ray's GCS 6 ms, ten times a second. A start waits for some ten passes
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.2",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "86400",  # above the longest stream: a reload cuts what is older
        "RAY_SERVE_PORT_QUARANTINE_S": "10",  # of an ingress that is gone; by default above the last, and ports run out
        # A check's interval is also its timeout: an ingress that stands still gets no more requests after 2.5 s
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": "2",  # then the next one is tried
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",  # a HAProxy that has died is started again after three
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 << 20),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "4",  # HAProxy has heard of an ingress' leaving by then
        # Also what an ingress was given and has not begun to answer when it died or closed: asking twice is safe
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        "RAY_SERVE_HAPROXY_RETRIES": "1",  # once: it may be what the ingress died of
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
    with contextlib.ExitStack() as stack:
        with _held_back():  # a signal between these lines would leave the directory behind
            directory = Path(tempfile.mkdtemp(prefix="bifolio-"))  # short, as unix sockets lie below it
            mark = uuid.uuid4().hex
            # Started first, so it does not carry the mark itself, and apart from our session: it sees no Ctrl-C
            command = [sys.executable, "-P", "-m", "bifolio.cluster.reaper", mark, str(directory)]
            reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            stack.push(lambda *exception: _reaped(reaper, keep=isinstance(exception[1], Unavailable)))
        os.environ.update(environment(directory, mark, doors))
        yield directory


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Signals that would stop us wait until the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reaped(reaper: subprocess.Popen[bytes], *, keep: bool) -> None:
    assert reaper.stdin is not None
    with reaper.stdin:
        if keep:
            reaper.stdin.write(KEEP)
    reaper.wait()


@dataclass(frozen=True, slots=True)
class LocalRay:
    logs: Path
    gcs: gcs.Gcs


@contextlib.contextmanager
def local_ray(directory: Path) -> Iterator[LocalRay]:
    """A Ray cluster in a private place, for the time of the context. It ends at once, whatever it does."""
    with contextlib.ExitStack() as stack:
        import ray

        stack.callback(_shut_down)
        try:
            _init(directory)
        except Exception as error:  # of no class of its own where the machine is too busy
            raise Unavailable(f"Ray did not start: {error}") from error
        address = ray.get_runtime_context().gcs_address
        record = stack.enter_context(gcs.kept_alive(marked(os.environ[MARK]), address))
        yield LocalRay(directory / "ray" / "session_latest" / "logs", record)


def _init(directory: Path) -> None:
    import ray

    with _groups_of_their_own():
        ray.init(
            address="local",  # also where RAY_ADDRESS names another cluster
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=100_000_000,  # neither KV bytes nor tokens travel through it
            _temp_dir=str(directory / "ray"),  # Ray opens this one to all users
        )


_apart = threading.Event()  # whether processes forked now lead process groups
os.register_at_fork(after_in_child=lambda: os.setpgid(0, 0) if _apart.is_set() else None)


@contextlib.contextmanager
def _groups_of_their_own() -> Iterator[None]:
    """What a terminal or supervisor sends to our group does not reach the processes that Ray starts meanwhile: when
    they end is for us to say. Ray runs Python in each before it becomes what it is, or this would not be called."""
    _apart.set()
    try:
        yield
    finally:
        _apart.clear()


def _shut_down() -> None:
    """Let Ray end in order, as long as it does not take too long. Serve is not asked: it would wait for streams, and
    those that may end have."""

    def orderly() -> None:
        with contextlib.suppress(Exception):
            import ray

            ray.shutdown()

    worker = threading.Thread(target=orderly, daemon=True)
    worker.start()
    worker.join(SHUTDOWN_S)
