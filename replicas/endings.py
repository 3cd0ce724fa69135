"""Why an attempt on a decode replica ended early, in the words the ingress acts on: the error, and whom to avoid.

Knows nothing about streams in progress, engines or transport.
"""

from __future__ import annotations

from bifolio.protos.errors import (
    BifolioError,
    EngineFailed,
    Preempted,
    Resumable,
    Revoked,
    StalePlacement,
    TransferFailed,
)
from bifolio.protos.messages import Delta, ReplicaId

from .sequence import Closed


def blamed(error: BifolioError, source: ReplicaId) -> BifolioError:
    """An error of the Prefill stream, naming the replica to keep the next attempt away from, if it is to blame."""
    if isinstance(error, Revoked | StalePlacement):
        return error
    if isinstance(error, Resumable):
        return type(error)(error.message, source)
    return TransferFailed(f"{source} refused the prefill: {error.message}", source)


def resumable(error: Resumable, choice: int | None = 0) -> Delta:
    """None: all choices that have not ended."""
    avoid = None if isinstance(error, StalePlacement) else error.replica  # the ledger was wrong, not the replica
    return Delta(resumable=(type(error).__name__, error.message, avoid), choice=choice)


def cause(closed: Closed, replica: ReplicaId) -> Resumable:
    if closed.reason == "preempted":
        return Preempted(closed.message)
    if closed.reason == "failed":
        return EngineFailed(f"the engine of {replica} failed: {closed.message}", replica)
    return Resumable(f"the sequence was {closed.reason} at {replica}")
