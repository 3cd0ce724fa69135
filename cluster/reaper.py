"""The end of a local cluster, also when `bifolio serve` is killed: a process of its own that outlives it.

    python -m bifolio.cluster.reaper MARK DIRECTORY

Waits until its standard input ends, which it does however its parent ends. Then kills every process that carries the
mark and removes the directory, unless it was told b"keep". Knows nothing about Ray.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "BIFOLIO_CLUSTER"  # the variable by which a cluster's processes are known; they all inherit it
KEEP = b"keep"
LATE_S = 5.0  # threads of a process that has no environment any more may still make files for a moment


def marked(mark: str) -> list[int]:
    """Processes, this one excepted, that inherited the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) != os.getpid() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def reap(mark: str, directory: Path, *, keep: bool) -> None:
    while left := marked(mark):  # again: what is being killed may have started another one meanwhile
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    until = time.monotonic() + LATE_S
    while not keep and directory.exists() and time.monotonic() < until:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.05)


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    told = sys.stdin.buffer.read()
    reap(sys.argv[1], Path(sys.argv[2]), keep=told == KEEP)


if __name__ == "__main__":
    main()
