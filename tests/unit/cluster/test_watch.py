"""What `bifolio serve` says from one look at the cluster to the next."""

from __future__ import annotations

from typing import Any

from bifolio.cluster.watch import Open, Watch, streams

WANTED = {"prefill": 1, "decode": 2}


def snapshot(*replicas: str, lost: tuple[dict[str, Any], ...] = (), answers: bool = True, **more: Any) -> Any:
    """`replicas`: role and state of each."""
    named = [dict(zip(("role", "state"), each.split(), strict=True), active=0, offered=0) for each in replicas]
    return {"replicas": named, "lost": lost, "store": {"answers": answers, "where": "unix://r"}, "waiting": 0, **more}


ALL = ("prefill alive", "decode alive", "decode alive")


def test_it_says_who_is_lost_and_why_and_when_all_are_back() -> None:
    watch = Watch(WANTED)
    old = {"id": "a", "role": "decode", "why": "long ago"}
    assert list(watch.news(snapshot(*ALL, lost=(old,)))) == []
    lost = (old, {"id": "b", "role": "decode", "why": "silent for 10 s"})
    said = ["lost: decode replica b: silent for 10 s", "alive: 1 of 1 prefill, 1 of 2 decode"]
    assert list(watch.news(snapshot(*ALL[:2], lost=lost))) == said
    assert list(watch.news(snapshot(*ALL[:2], lost=lost))) == []
    assert list(watch.news(snapshot(*ALL, lost=lost))) == ["alive: 1 of 1 prefill, 2 of 2 decode"]


def test_it_says_who_leaves_and_who_stands_still() -> None:
    watch = Watch(WANTED)
    replicas = ("prefill stalled", "decode draining", "decode alive", "decode draining")
    assert list(watch.news(snapshot(*replicas))) == [
        "alive: 0 of 1 prefill, 1 of 2 decode (2 decode leaving, 1 prefill stalled)"
    ]


def test_it_says_when_redis_is_away_and_back() -> None:
    watch = Watch(WANTED)
    said = [list(watch.news(snapshot(*ALL, answers=answers))) for answers in (True, False, False, True)]
    away, back = "Redis is away, serving goes on without it: unix://r", "Redis answers again: unix://r"
    assert said == [[], [away], [], [back]]


def test_streams_are_those_under_way_and_those_that_wait() -> None:
    here = snapshot(*ALL, waiting=5)
    here["replicas"][0]["active"] = 7  # prefills of the same requests
    here["replicas"][1].update(active=2, offered=1)
    assert streams(here) == 8


def test_a_manager_that_has_just_begun_is_not_believed_that_no_stream_is_open() -> None:
    busy = snapshot(*ALL, waiting=3, epoch=1)
    opened = Open()
    for look, count in (
        (busy, 3),
        (snapshot(epoch=2), 3),  # nobody has registered yet
        (snapshot(*ALL, waiting=1, epoch=2), 1),
        (snapshot(*ALL, epoch=2), 1),  # it may be between two attempts
        (snapshot(*ALL, epoch=2), 0),
    ):
        opened.look(look)
        assert opened.count == count


def test_with_no_stream_open_two_looks_are_enough() -> None:
    opened = Open()
    opened.look(snapshot(*ALL, epoch=1))
    assert opened.count == -1
    opened.look(snapshot(*ALL[:1], epoch=1))  # replicas that leave meanwhile are no new manager
    assert opened.count == 0
