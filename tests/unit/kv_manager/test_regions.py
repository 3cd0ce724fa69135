"""Memory of others: opened once, shared, let go of; and said in the log once."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator

import pytest
from transfer_kit import WAIT, ReachingStore, filled_store, no_threads_left

from bifolio.kv_manager import regions
from bifolio.kv_manager.block_store import Unreached
from bifolio.kv_manager.regions import Regions

LONG = 10 * WAIT  # a timer that is left running is noticed


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_threads_left():
        yield


@pytest.fixture
def store() -> ReachingStore:
    return ReachingStore(3, 64, a=filled_store(64), b=filled_store(64))


def test_it_is_opened_once_for_all_who_use_it(store: ReachingStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bifolio")
    them = Regions(store)
    with them.use("p:1", b"a") as first, them.use("p:1", b"a") as second, them.use("p:2", b"b") as other:
        assert first is second is not None
        assert other is not first
    with them.use("p:1", b"a") as again:
        assert again is first
    them.close()
    assert store.tried == [b"a", b"b"]
    assert caplog.messages == [f"blocks of the prefill replica at p:{i} are copied out of its memory" for i in (1, 2)]


def test_what_cannot_be_reached_is_tried_once(store: ReachingStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bifolio")
    them = Regions(store, idle_s=0)
    for _ in range(3):
        for address, memory, reason in (("p:1", b"c", "hidden"), ("p:2", b"", "none")):
            with them.use(address, memory) as found:
                assert isinstance(found, Unreached)
                assert found.reason == reason
    them.close()
    assert store.tried == [b"c"]
    assert caplog.messages == [
        "blocks of the prefill replica at p:1 are sent: no such store",
        "blocks of the prefill replica at p:2 are sent: it shares no memory",
    ]


def test_another_replica_at_the_address_is_another_memory(store: ReachingStore) -> None:
    them = Regions(store, LONG)
    with them.use("p:1", b"a") as old, them.use("p:1", b"b") as new, them.use("p:1", b"b") as same:
        assert old is not new is same
    with them.use("p:1", b"") as none:
        assert isinstance(none, Unreached)
    them.close()
    assert store.tried == [b"a", b"b"]


def test_it_is_let_go_of_when_nobody_uses_it_and_opened_again(
    store: ReachingStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bifolio")
    them, gone = Regions(store, idle_s=0), threading.Event()
    with them.use("p:1", b"a") as copy:
        weakref.finalize(copy, gone.set)
        with them.use("p:1", b"a"):
            pass
        del copy
        assert not gone.wait(0.05), "it is still used"
    assert gone.wait(WAIT)
    with them.use("p:1", b"a") as copy:
        assert not isinstance(copy, Unreached)
    them.close()
    assert store.tried == [b"a", b"a"]
    assert len(caplog.messages) == 1


def test_what_is_forgotten_goes_at_once_or_with_its_last_user(store: ReachingStore) -> None:
    them, gone = Regions(store, LONG), threading.Event()
    with them.use("p:1", b"a") as copy:
        weakref.finalize(copy, gone.set)
        them.forget("p:1")
        with them.use("p:1", b"a") as again:
            assert again is not copy
        assert not gone.is_set(), "it is still used"
        del copy
    assert gone.is_set()
    gone.clear()
    weakref.finalize(again, gone.set)
    del again
    them.forget("p:1")
    them.forget("p:2")  # which is unknown
    assert gone.is_set()
    them.close()
    assert store.tried == [b"a", b"a"]


def test_what_was_not_reached_is_tried_again_when_it_was_forgotten(store: ReachingStore) -> None:
    them = Regions(store, LONG)
    for _ in range(2):
        with them.use("p:1", b"c"):
            pass
        them.forget("p:1")
    them.close()
    assert store.tried == [b"c", b"c"]


@pytest.mark.parametrize("way", ["idle", "replaced", "pushed out", "forgotten", "closed"])
def test_the_lock_is_free_while_it_is_closed(store: ReachingStore, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing may wait for the device: pulls from others go on meanwhile."""
    monkeypatch.setattr(regions, "MOST", 1)
    them, used, closed = Regions(store, idle_s=0 if way == "idle" else LONG), threading.Event(), threading.Event()

    def use_another() -> None:
        with them.use("p:3", b""):
            used.set()

    def closing() -> None:
        other = threading.Thread(target=use_another, daemon=True)
        other.start()
        used.wait(WAIT)
        closed.set()

    with them.use("p:1", b"a") as copy:
        weakref.finalize(copy, closing)
        del copy
    if way == "replaced":
        with them.use("p:1", b"b"):
            pass
    elif way == "pushed out":
        with them.use("p:2", b"b"):
            pass
    elif way == "forgotten":
        them.forget("p:1")
    elif way == "closed":
        them.close()
    assert closed.wait(2 * WAIT)
    assert used.is_set()
    them.close()


def test_it_is_held_for_a_while(store: ReachingStore) -> None:
    them = Regions(store, idle_s=LONG)
    for _ in range(3):
        with them.use("p:1", b"a"):
            pass
    assert store.tried == [b"a"]
    them.close()


def test_a_pull_may_end_after_the_close(store: ReachingStore) -> None:
    them = Regions(store, LONG)
    with them.use("p:1", b"a"):
        them.close()


def test_only_so_many_are_remembered(store: ReachingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "MOST", 3)
    them = Regions(store)
    for i in (1, 2, 3, 4, 4, 3, 2, 1):
        with them.use(f"p:{i}", b"a"):
            pass
    them.close()
    assert len(store.tried) == 5


def test_a_shortage_is_not_remembered(store: ReachingStore) -> None:
    them, reach, short = Regions(store, LONG), store.reach, Unreached("short", "too many open files")
    store.reach = lambda memory: short  # type: ignore[method-assign]
    with them.use("p:1", b"a") as found:
        assert found is short
    store.reach = reach  # type: ignore[method-assign]
    with them.use("p:1", b"a") as found:
        assert not isinstance(found, Unreached)
    them.close()
