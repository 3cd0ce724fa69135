"""Rows of results: each is tried on its own, in the time there is, and kept as soon as it is known.

A row that raises says why and the next one begins. A row that does not answer, that ends the process or leaves the
device unusable ends the process alone: started again with `resume`, the book goes on behind that row.

    cases of a section:  build the inputs -> way, way, way -> leave and forget the inputs -> the next case

Knows nothing of what is measured, nor of torch.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Numbers = Mapping[str, Any]  # of one row; whatever JSON can hold
Status = Literal["ok", "wrong", "failed", "skipped", "not run"]

RESUME = 75  # exit status: start again with --resume
PATIENCE = 60.0  # seconds that one row may take
RESERVE = 10.0  # seconds at the end in which no row begins

AGAIN = "as the row before: "  # said of what needs the same inputs, which could not be made


class SkippedError(Exception):
    """What a row needs is not here."""


class WrongError(Exception):
    """There is a result, and it is not the right one."""

    def __init__(self, said: str, **numbers: Any) -> None:
        super().__init__(said)
        self.numbers = numbers


@dataclass(frozen=True)
class Case:
    """Ways to do the same work on the same inputs, which are made when the first way begins. `leave` is what they need
    before they are forgotten; `patience` are the seconds that a way may take, with what it has to make."""

    section: str
    name: str
    build: Callable[[], Any]
    ways: Mapping[str, Callable[[Any], Numbers]]
    leave: Callable[[Any], None] = lambda _: None
    patience: float = PATIENCE


@dataclass(frozen=True)
class Row:
    section: str
    case: str
    way: str
    status: Status
    said: str = ""  # why it is not ok
    spent: float = 0.0  # seconds, compilation included
    numbers: Numbers = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.section, self.case, self.way


class Book:
    """All rows and the time that is left for more.

    shares  of all the time, what a section may take at most, so that a slow one leaves something to those behind it
    alive   whether the device still answers; asked after a failure
    """

    def __init__(
        self, path: Path, seconds: float, shares: Mapping[str, float], alive: Callable[[], bool], resume: bool
    ) -> None:
        self._path, self._seconds, self._shares, self._alive = path, seconds, shares, alive
        self._started = time.time()
        self._running: tuple[str, str, str] | None = None
        self.rows: list[Row] = []
        if resume and path.exists():
            held = json.loads(path.read_text(encoding="utf-8"))
            self._started = held["started"]
            self.rows = [Row(**row) for row in held["rows"]]
            if held["running"]:
                section, case, way = held["running"]
                self._add(Row(section, case, way, "failed", "the process ended here"))
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def spent(self) -> float:
        return time.time() - self._started

    def run(self, cases: Iterable[Case]) -> None:
        known = {row.key for row in self.rows}
        gc.freeze()  # modules and all else that stays: or each collection would take as long as a row
        for case in cases:
            inputs: list[Any] = []  # none or one: made late, kept for all ways; an `_Unbuilt` where that failed
            for way in case.ways:
                if (case.section, case.name, way) in known:
                    continue
                if late := self._late(case.section):
                    self._add(Row(case.section, case.name, way, "not run", late))
                else:
                    self._attempt(case, way, inputs)
            self._leave(case, inputs)
            inputs.clear()
            gc.collect()  # what an exception held

    def _leave(self, case: Case, inputs: list[Any]) -> None:
        """Within the case's patience too: it may wait for a device that does not answer."""
        if not inputs or isinstance(inputs[0], _Unbuilt):
            return
        self._running = (case.section, case.name, "left")
        with _watched(case.patience, self._give_up):
            try:
                case.leave(inputs[0])
            except Exception as error:
                self._add(Row(case.section, case.name, "left", "failed", f"{type(error).__name__}: {error}"))
        self._running = None

    def _late(self, section: str) -> str:
        if self.spent > self._seconds - RESERVE:
            return f"the {self._seconds / 60:g} minutes are over"
        share = self._shares.get(section, 1.0)
        if sum(row.spent for row in self.rows if row.section == section) > share * self._seconds:
            return f"{share:.0%} of the time are over, and no more is for this section"
        return ""

    def _attempt(self, case: Case, way: str, inputs: list[Any]) -> None:
        self._running = (case.section, case.name, way)
        self._write()
        began = time.monotonic()
        with _watched(min(case.patience, self._seconds - self.spent), self._give_up):
            status, said, numbers = _tried(case, way, inputs)
        spent = round(time.monotonic() - began, 3)
        self._add(Row(case.section, case.name, way, status, said, spent, numbers))
        if status == "failed" and not self._alive():
            self._end("the device does not answer any more")

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self._running = None
        self._write()
        print(f"{self.spent:6.1f} s  {' | '.join(row.key)}  {row.status} {row.said}", file=sys.stderr, flush=True)

    def _give_up(self, patience: float) -> None:
        """In the watchdog's thread: the row's own may never come back."""
        if self._running is None:  # it has just ended
            return
        section, case, way = self._running
        self._add(Row(section, case, way, "failed", f"no answer in {patience:.0f} s", patience))
        self._end("a row does not end")

    def _end(self, why: str) -> None:
        print(f"{why}: to be resumed", file=sys.stderr, flush=True)
        os._exit(RESUME)  # an orderly end would wait for the device

    def _write(self) -> None:
        held = {"started": self._started, "running": self._running, "rows": [asdict(row) for row in self.rows]}
        written = self._path.with_suffix(".tmp")
        written.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
        written.replace(self._path)


@dataclass(frozen=True)
class _Unbuilt:
    """Why there are no inputs: the other ways of the case need not try."""

    status: Status
    said: str


@contextmanager
def _watched(patience: float, give_up: Callable[[float], None]) -> Iterator[None]:
    watchdog = threading.Timer(patience, give_up, [patience])
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def _tried(case: Case, way: str, inputs: list[Any]) -> tuple[Status, str, Numbers]:
    building = False
    with warnings.catch_warnings(record=True) as heard:  # torch warns of a reason, then raises without it
        try:
            if not inputs:
                building = True
                inputs.append(case.build())
                building = False
            if isinstance(built := inputs[0], _Unbuilt):
                return built.status, f"{AGAIN}{built.said}", {}
            return "ok", "", dict(case.ways[way](built))
        except WrongError as error:
            return "wrong", str(error), error.numbers
        except Exception as error:
            status, said = _reason(error, heard)
        if building:
            inputs.append(_Unbuilt(status, said))
        return status, said, {}


def _reason(error: Exception, heard: Sequence[warnings.WarningMessage]) -> tuple[Status, str]:
    if isinstance(error, SkippedError | ModuleNotFoundError):
        return "skipped", _first_line(error)
    reasons = [_first_line(warning.message) for warning in heard[-1:]]
    return "failed", "; ".join([f"{type(error).__name__}: {_first_line(error)}", *reasons])


def _first_line(error: object) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]
