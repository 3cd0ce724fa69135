"""What the meter of a replica's transfers counts, whatever threads, exceptions and dropped generators do."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import get_args

import pytest

from bifolio.kv_manager import traffic
from bifolio.kv_manager.block_store import WhyNot
from bifolio.kv_manager.traffic import WHY_NOT_COPIED, TrafficMeter
from bifolio.protos.errors import StalePlacement
from bifolio.protos.measures import Traffic

# Far more than any test takes: a thread that is not done by then hangs
HANGS = 60.0


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(traffic, "time", clock)
    return clock


@pytest.fixture
def meter() -> TrafficMeter:
    return TrafficMeter()


def frames_of(meter: TrafficMeter) -> Iterator[int]:
    """As a stream's generator is written: under way, waiting, and with a frame in flight, while its reader has one."""
    with meter.stream():
        for frame in range(10):
            meter.flying(1)
            try:
                with meter.stalled("acks"):
                    yield frame
            finally:
                meter.flying(-1)


def test_a_new_meter_has_counted_nothing(meter: TrafficMeter) -> None:
    assert meter.read() == Traffic()


# -- streams


def test_a_stream_is_under_way_and_then_done(meter: TrafficMeter) -> None:
    with meter.stream(), meter.stream():
        assert meter.read() == Traffic(streams=2)
    assert meter.read() == Traffic(done=2)


def test_a_stream_fails_of_the_error_that_leaves_it(meter: TrafficMeter) -> None:
    for error in (StalePlacement("another generation"), OSError("gone"), StalePlacement("again")):
        with pytest.raises(type(error)) as raised, meter.stream():
            raise error
        assert raised.value is error
    assert meter.read() == Traffic(failed={"StalePlacement": 2, "OSError": 1})


def test_an_error_that_is_handled_inside_is_none(meter: TrafficMeter) -> None:
    with meter.stream():
        try:
            raise OSError
        except OSError:
            pass
    assert meter.read() == Traffic(done=1)


def test_a_stream_that_is_left_early_is_done(meter: TrafficMeter) -> None:
    def first() -> int:
        with meter.stream():
            return 1

    assert first() == 1
    assert meter.read() == Traffic(done=1)


def closed(frames: Iterator[int]) -> None:
    frames.close()  # type: ignore[attr-defined]


def forgotten(frames: Iterator[int]) -> None:
    """By the one who calls this too."""


@pytest.mark.parametrize("drop", [closed, forgotten])
def test_a_generator_that_is_dropped_is_cancelled(
    meter: TrafficMeter, clock: Clock, drop: Callable[[Iterator[int]], None]
) -> None:
    frames = frames_of(meter)
    assert (next(frames), next(frames)) == (0, 1)
    assert meter.read() == Traffic(streams=1, in_flight=1, stalled_s={"acks": 0})
    drop(frames)
    del frames
    assert meter.read() == Traffic(failed={"cancelled": 1}, stalled_s={"acks": 0})


def test_a_generator_that_never_began_is_no_stream(meter: TrafficMeter) -> None:
    frames_of(meter)
    assert meter.read() == Traffic()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_end_of_the_process_is_a_cancel(meter: TrafficMeter, error: type[BaseException]) -> None:
    with pytest.raises(error), meter.stream():
        raise error
    assert meter.read() == Traffic(failed={"cancelled": 1})


def test_the_collector_may_end_a_stream_while_the_meter_is_read(
    meter: TrafficMeter, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator in a cycle, as a traceback makes them, ends wherever the collector runs: here, under the lock."""
    frames = frames_of(meter)
    next(frames)
    cycle: list[object] = [frames]
    cycle.append(cycle)

    def collecting(*counts: object) -> Traffic:
        gc.collect()
        return Traffic(*counts)  # type: ignore[arg-type]

    monkeypatch.setattr(traffic, "Traffic", collecting)
    del frames, cycle
    reader = threading.Thread(target=meter.read, daemon=True)
    reader.start()
    reader.join(HANGS)
    assert not reader.is_alive()
    monkeypatch.undo()
    assert meter.read().failed == {"cancelled": 1}


# -- what moves


def test_what_moved_adds_up(meter: TrafficMeter) -> None:
    meter.moved(1, 1 << 20, 0.25)
    meter.moved(3, 17, 0.5)
    assert meter.read() == Traffic(frames=4, bytes=(1 << 20) + 17, moving_s=0.75)


def test_frames_in_flight_go_up_and_down(meter: TrafficMeter) -> None:
    meter.flying(8)
    meter.flying(-3)
    assert meter.read() == Traffic(in_flight=5)


def test_ways_are_counted_by_name(meter: TrafficMeter) -> None:
    for name in ("copied", "sent: hidden", "copied"):
        meter.way(name)
    assert meter.read() == Traffic(ways={"copied": 2, "sent: hidden": 1})


def test_every_reason_not_to_copy_has_its_words() -> None:
    assert set(WHY_NOT_COPIED) == set(get_args(WhyNot))


# -- waits


def test_waits_add_up_by_what_they_are_for(meter: TrafficMeter, clock: Clock) -> None:
    for seconds in (0.5, 0.25):
        with meter.stalled("acks"):
            clock.now += seconds
        clock.now += 10  # nobody waits
    with meter.stalled("frames"):
        clock.now += 2
    assert meter.read().stalled_s == {"acks": 0.75, "frames": 2}


def test_a_wait_that_fails_counts_too(meter: TrafficMeter, clock: Clock) -> None:
    def wait() -> None:
        with meter.stalled("start"):
            clock.now += 3
            raise OSError

    with pytest.raises(OSError):
        wait()
    clock.now += 10
    assert meter.read().stalled_s == {"start": 3}


def test_a_wait_shows_while_it_lasts(meter: TrafficMeter, clock: Clock) -> None:
    with meter.stalled("frames"):
        clock.now += 4
        assert meter.read().stalled_s == {"frames": 4}
        clock.now += 1
    assert meter.read().stalled_s == {"frames": 5}


def test_streams_that_wait_at_once_all_count(meter: TrafficMeter, clock: Clock) -> None:
    with meter.stalled("frames"):
        clock.now += 1
        with meter.stalled("frames"):
            clock.now += 2
        clock.now += 4
    assert meter.read().stalled_s == {"frames": 1 + 2 * 2 + 4}


# -- readers and threads


def test_what_was_read_does_not_change(meter: TrafficMeter, clock: Clock) -> None:
    def do_everything() -> None:
        with meter.stream(), meter.stalled("acks"):
            meter.way("copied")
            meter.moved(1, 2, 0.5)
            clock.now += 1
            raise OSError

    expected = Traffic(
        failed={"OSError": 1}, ways={"copied": 1}, frames=1, bytes=2, moving_s=0.5, stalled_s={"acks": 1}
    )
    with pytest.raises(OSError):
        do_everything()
    first = meter.read()
    with pytest.raises(OSError):
        do_everything()
    assert first == expected
    assert meter.read() != expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda meter, count: meter.moved(count, 0, 0), Traffic(frames=2)),
        (lambda meter, count: meter.moved(0, count, 0), Traffic(bytes=2)),
        (lambda meter, count: meter.moved(0, 0, count), Traffic(moving_s=2)),
        (lambda meter, count: meter.flying(count), Traffic(in_flight=2)),
    ],
)
def test_nothing_is_lost_if_threads_change_while_one_adds(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[TrafficMeter, float], None], expected: Traffic
) -> None:
    """The other comes to the lock, or is done because there is none: either can be seen, so nobody watches a clock."""
    came_or_done = threading.Event()

    class Lock:
        def __init__(self) -> None:
            self._lock = threading.RLock()

        def __enter__(self) -> None:
            came_or_done.set()
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    class Meeting(float):
        """While it is added, another thread adds 1."""

        def __radd__(self, other: float) -> float:
            came_or_done.clear()
            second.start()
            assert came_or_done.wait(HANGS)
            return other + float(self)

    def add_one() -> None:
        change(meter, 1)
        came_or_done.set()

    monkeypatch.setattr(traffic, "threading", SimpleNamespace(RLock=Lock))
    meter = TrafficMeter()
    second = threading.Thread(target=add_one, daemon=True)
    change(meter, Meeting(1))
    second.join(HANGS)
    assert meter.read() == expected


def test_many_threads_add_up(meter: TrafficMeter, clock: Clock) -> None:
    threads, rounds = 8, 300
    gate = threading.Barrier(threads)

    def work() -> None:
        gate.wait()
        for i in range(rounds):
            try:
                with meter.stream():
                    meter.way("copied" if i % 3 else "sent: gone")
                    meter.flying(2)
                    with meter.stalled("acks"):
                        meter.moved(2, 5, 0.5)
                    meter.flying(-2)
                    if i % 2:
                        raise OSError
            except OSError:
                pass

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change in the middle of lines
    try:
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(before)
    each = threads * rounds
    assert meter.read() == Traffic(
        streams=0,
        in_flight=0,
        done=each // 2,
        failed={"OSError": each // 2},
        ways={"copied": each * 2 // 3, "sent: gone": each // 3},
        frames=2 * each,
        bytes=5 * each,
        moving_s=0.5 * each,
        stalled_s={"acks": 0},
    )
