"""A process beside this one that holds one object and answers calls of its methods, and what a process takes of the
machine. Knows nothing of blocks or streams.

It is started anew, not forked: so it has a malloc, threads and descriptors of its own, and this process's environment.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

STOP_S = 20.0


class GoneError(Exception):
    """The partner has ended without an answer."""


class Partner:
    """`make(*arguments)` is called there; both travel as pickles. Returns before that is done: calls wait for it."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Partner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()  # it ends when it reads that
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def call(self, method: str, *arguments: Any) -> Any:
        """What the method returns. RuntimeError with what it raised; GoneError when the process ends meanwhile."""
        try:
            self._pipe.send((method, arguments))
            fine, result = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise GoneError(f"process {self.pid} has ended") from error
        if not fine:
            raise RuntimeError(result)
        return result

    def cpu(self) -> float:
        """Seconds of all its threads so far."""
        seconds: float = self.call(CPU)
        return seconds


CPU = "cpu seconds"


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends, and so this one
    try:
        served = make(*arguments)
    except Exception:
        served = None
        with suppress(EOFError, OSError):
            pipe.recv()
            pipe.send((False, traceback.format_exc()))
    while served is not None:
        try:
            method, given = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = True, time.process_time() if method == CPU else getattr(served, method)(*given)
        except Exception:
            answer = False, traceback.format_exc()
        pipe.send(answer)
    os._exit(0)  # threads of servers may wait for streams that nobody ends


@dataclass(frozen=True, slots=True)
class Taken:
    """What a process takes of the machine now."""

    rss: int  # bytes
    files: int  # descriptors
    threads: int


def taken(pid: int) -> Taken:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines())
    rss, unit = fields["VmRSS"].split()
    assert unit == "kB"
    return Taken(int(rss) * 1024, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))
