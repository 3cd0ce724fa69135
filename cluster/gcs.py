"""Ray's own record of what runs where, kept on disk, and the process that keeps it started again when it has died.

Ray gives a cluster up whose `gcs_server` is gone for a minute, but takes one up that comes back at the same port and
reads what the old one wrote. Meanwhile streams and requests go on, and nothing new is started. Knows nothing of ours.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

PROCESS = b"gcs_server"
PORT = b"--gcs_server_port="


def storage(directory: Path) -> dict[str, str]:
    """What Ray needs in its environment to keep its record in this directory, not in memory."""
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(directory)}


class Gcs:
    """The one among these processes. `address` is where it listens: Ray let it choose its port itself."""

    def __init__(self, processes: Iterable[int], address: str) -> None:
        self._pid = next(pid for pid in processes if command_of(pid)[0].endswith(b"/" + PROCESS))
        port = PORT + address.rpartition(":")[2].encode()
        self._command = [port if part.startswith(PORT) else part for part in command_of(self._pid)]
        entries = Path(f"/proc/{self._pid}/environ").read_bytes().split(b"\0")
        self._environment = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
        self._again: subprocess.Popen[bytes] | None = None

    def revive(self) -> bool:
        """Starts it again if it has died. Whether it had."""
        gone = command_of(self._pid) == [b""] if self._again is None else self._again.poll() is not None
        if gone:
            # It writes its logs itself, as its command tells it
            quiet = subprocess.DEVNULL
            self._again = subprocess.Popen(
                self._command, env=self._environment, stdin=quiet, stdout=quiet, stderr=quiet, process_group=0
            )
        return gone

    def stop(self) -> None:
        """The one that was started here: Ray does not know it, and ends the other by itself."""
        if self._again is not None:
            self._again.kill()
            self._again.wait()


@contextlib.contextmanager
def kept_alive(processes: Iterable[int], address: str) -> Iterator[Gcs]:
    gcs = Gcs(processes, address)
    try:
        yield gcs
    finally:
        gcs.stop()


def command_of(pid: int) -> list[bytes]:
    """Its command line: one empty word once it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    return [b""]
