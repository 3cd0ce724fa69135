"""Attempts at a request that ended early: why, whom to keep the next one away from, and when it is enough.

Pure: time is an argument. Knows nothing about streams, managers or text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bifolio.protos.errors import Unavailable
from bifolio.protos.messages import Cause, Placement, ReplicaId

PAUSE_S = 0.05  # before the next attempt, for each that brought no token

_CAUSES: Mapping[str, Cause] = {
    "StalePlacement": "stale",
    "Preempted": "preempted",
    "Draining": "drained",
    "EngineFailed": "engine failed",
    "TransferFailed": "transfer failed",
    "Resumable": "revoked",
}


class Ended(Exception):
    """An attempt is over, the request is not. `name` is the class of the error that ended it."""

    def __init__(self, name: str, message: str, replica: str | None) -> None:
        super().__init__(message)
        self.name = name
        self.message = message if name == "Resumable" else f"{name}: {message}"
        self.replica = replica  # to keep the next attempt away from, if any

    def cause(self, placement: Placement | None) -> Cause:
        """In the words of metrics, if it was an attempt with this placement."""
        if self.name == "ReplicaGone":
            prefill = placement.prefill if placement else None
            return "prefill lost" if prefill and prefill.replica == self.replica else "decode lost"
        return _CAUSES.get(self.name, "other")


@dataclass(slots=True)
class Tries:
    """Those of one stream. `most` in a row may bring no token."""

    most: int
    count: int = 0
    avoid: tuple[ReplicaId, ...] = ()
    cause: Cause | None = None  # of the last
    since: float | None = None  # when that ended, until a token has come
    _used: tuple[ReplicaId, ...] = ()  # prefill replicas of attempts that did not end by decode's fault

    @property
    def last(self) -> bool:
        """Whether the next one is the last, if it brings nothing."""
        return self.most > 1 and self.count == self.most - 1

    @property
    def pause_s(self) -> float:
        """Before the next one."""
        return PAUSE_S * self.count

    def failed(self, ended: Ended, placement: Placement | None, now: float) -> None:
        """Raises Unavailable if that was the last one."""
        self.cause = ended.cause(placement)
        self.since = now if self.since is None else self.since
        self.count += self.cause != "preempted"  # it waits for its turn again, nothing has failed
        if self.count >= self.most:
            raise Unavailable(
                f"{self.count} attempts in a row brought no token; the last ended with {ended.message}; ask again, or "
                "see `bifolio status`"
            )
        if placement is not None and placement.prefill is not None and ended.replica != placement.decode.replica:
            self._used = (*self._used, placement.prefill.replica)
        if ended.replica is not None:
            self.avoid = (*self.avoid, ReplicaId(ended.replica))
        if self.last:  # decode can prefill itself
            self.avoid = (*self.avoid, *self._used)

    def brought(self, now: float) -> float:
        """A token has come. Returns for how long none did, if an attempt had ended before."""
        paused = 0.0 if self.since is None else now - self.since
        self.count, self.since = 0, None
        return paused
