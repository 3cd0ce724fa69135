"""Replicas that were lost lately: those that serve others have to be told of, because a broken connection may not tell.

A loss is remembered for a while, and not beyond the replica's return. Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.protos.messages import ReplicaId, Role

KEPT_S = 60.0


@dataclass(frozen=True, slots=True)
class Loss:
    role: Role
    why: str
    at: float
    told: bool  # to those whom it serves: it answers nobody


class Losses:
    def __init__(self) -> None:
        self._losses: dict[ReplicaId, Loss] = {}

    def add(self, replica: ReplicaId, role: Role, why: str, now: float, *, told: bool = True) -> None:
        self._losses[replica] = Loss(role, why, now, told)

    def is_back(self, replica: ReplicaId) -> None:
        self._losses.pop(replica, None)

    def expire(self, now: float) -> None:
        self._losses = {replica: loss for replica, loss in self._losses.items() if now - loss.at < KEPT_S}

    def all(self) -> dict[ReplicaId, Loss]:
        return dict(self._losses)
