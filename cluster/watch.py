"""What `bifolio serve` says of a cluster that serves: who is there, who was lost and why, and what is waited for at the
end. Pure: from one snapshot of the KV manager to the next. Knows nothing about where they come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Snapshot = Mapping[str, Any]

STATES = {"draining": "leaving", "stalled": "stalled"}  # those a replica may be in beside alive, in words


class Watch:
    """`wanted`: how many replicas of each role."""

    def __init__(self, wanted: Mapping[str, int]) -> None:
        self._wanted = dict(wanted)
        self._said = counted(wanted, wanted)
        self._lost: set[str] | None = None  # who was lost before the first look is no news
        self._answers = True

    def news(self, snapshot: Snapshot) -> Iterator[str]:
        """What is new, in lines."""
        lost = {each["id"]: each for each in snapshot.get("lost", ())}
        for each in lost.values():
            if self._lost is not None and each["id"] not in self._lost:
                yield f"lost: {each['role']} replica {each['id']}: {each['why']}"
        self._lost = set(lost)
        now = standing(self._wanted, snapshot)
        if now != self._said:
            yield f"alive: {now}"
        self._said = now
        answers, where = snapshot["store"]["answers"], snapshot["store"]["where"]
        if answers != self._answers:
            yield f"Redis answers again: {where}" if answers else f"Redis is away, serving goes on without it: {where}"
        self._answers = answers


def standing(wanted: Mapping[str, int], snapshot: Snapshot) -> str:
    """Who is there, of those who are wanted, and in what state the others are."""
    there = [(replica["role"], replica["state"]) for replica in snapshot["replicas"]]
    text = counted(wanted, {role: there.count((role, "alive")) for role in wanted})
    others = [
        f"{n} {role} {word}" for state, word in STATES.items() for role in wanted if (n := there.count((role, state)))
    ]
    return f"{text} ({', '.join(others)})" if others else text


def streams(snapshot: Snapshot) -> int:
    """How many answers are under way or waited for."""
    decode = (replica for replica in snapshot["replicas"] if replica["role"] == "decode")
    count: int = snapshot["waiting"] + sum(replica["active"] + replica["offered"] for replica in decode)
    return count


class Open:
    """How many streams are open, by one snapshot after the other. A manager that has just begun knows of none, until
    its replicas have registered; and one that is placed again is nowhere for a moment."""

    def __init__(self) -> None:
        self.count = -1  # not known
        self._epoch = self._replicas = self._quiet = 0

    def look(self, snapshot: Snapshot) -> None:
        epoch, replicas = snapshot["epoch"], len(snapshot["replicas"])
        if self._epoch not in (0, epoch) and replicas < self._replicas:
            return
        self._epoch, self._replicas = epoch, replicas
        count = streams(snapshot)
        self._quiet = 0 if count else self._quiet + 1
        if count or self._quiet > 1:
            self.count = count


def counted(wanted: Mapping[str, int], alive: Mapping[str, int] | None = None) -> str:
    """Replicas of each role, in words."""
    return ", ".join(f"{n} {role}" if alive is None else f"{alive[role]} of {n} {role}" for role, n in wanted.items())
