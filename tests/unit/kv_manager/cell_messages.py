"""What is on the wire of a simulated cell, besides reports and releases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recorded_replica import Tokens

from bifolio.protos.messages import Ask, Lease, Release, ReplicaId, ReplicaInfo, Reply, Report, RequestId


@dataclass(frozen=True)
class Asked:
    """An attempt at a request."""

    ask: Ask
    tokens: Tokens
    choice: int = 0


@dataclass(frozen=True)
class Opened:
    """A call that brings a placement to its decode replica, or a lease of it to its prefill replica."""

    lease: Lease
    asked: Asked
    forks: tuple[Lease, ...] = ()


@dataclass(frozen=True)
class Answered:
    replica: ReplicaId
    reply: Reply


@dataclass(frozen=True)
class Registered:
    info: ReplicaInfo
    report: Report


@dataclass(frozen=True)
class CalledDead:
    replica: ReplicaId


@dataclass(frozen=True)
class GivenUp:
    request: RequestId
    how: Literal["revoke", "cancel"]


@dataclass(frozen=True)
class Confirmed:
    requests: tuple[RequestId, ...]


Message = Opened | Release | Answered | Registered | CalledDead | GivenUp | Confirmed | Report
