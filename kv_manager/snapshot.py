"""What people and tools are shown of a ledger: plain values. Changes nothing."""

from __future__ import annotations

from typing import Any

from bifolio.protos.measures import Traffic

from .book import Book
from .ledger import Ledger


def snapshot(ledger: Ledger, now: float) -> dict[str, Any]:
    """`splits` counts requests by why they were split or not (`split.REASONS`); `models` tells what each group has."""
    models: dict[str, dict[str, int]] = {}
    for book in ledger.books():
        pools = models.setdefault(book.model, {"prefill": 0, "decode": 0})
        pools[book.info.role] += book.state == "alive"
    return {
        "epoch": ledger.epoch,
        "replicas": [_status(book, now) for book in ledger.books()],
        "lost": [
            {"id": replica, "role": loss.role, "why": loss.why, "ago_s": round(now - loss.at, 1)}
            for replica, loss in ledger.losses.all().items()
        ],
        "models": models,
        "splits": dict(ledger.splits),
        "resumes": dict(ledger.resumes),
        "cache": {
            "asked_tokens": ledger.asked_tokens,
            "hit_tokens": ledger.hit_tokens,
            "evicted_blocks": ledger.evicted,
        },
    }


def _status(book: Book, now: float) -> dict[str, Any]:
    counts = book.blocks.counts()
    return {
        "id": book.info.id,
        "role": book.info.role,
        "state": book.state,
        "stalled": {stage: round(seconds, 1) for stage, seconds in book.stalled.items()},
        "silent_s": round(now - book.heard, 1),
        "model": book.model,
        "address": book.info.address,
        "pid": book.info.pid,
        "free": counts.free,
        "cached": counts.cached,
        "leased": counts.leased,
        "reserve": counts.reserve,
        "total": counts.total,
        "shortage": book.blocks.shortage,
        "offered": sum(not lease.listed for lease in book.leases.values()),
        "active": sum(lease.listed for lease in book.leases.values()),
        "revoked": len(book.revoked()),
        "queued_tokens": book.queued,
        "prefill_tokens_per_s": round(book.speeds.prefill, 1),
        "transfer_ms": round(book.speeds.transfer * 1000, 2),
        "beat": book.beat,  # of the replica's newest report, which says:
        "reported": book.reported,
        "held": book.held,
        "max_sequences": book.info.max_sequences,
        "cache": list(book.info.cache),
        "transfer": _transfer(book.traffic),
    }


def _transfer(traffic: Traffic) -> dict[str, Any]:
    """What a replica has sent, if it prefills, or received, since its process began: the counts are its own."""
    return {
        "streams": traffic.streams,
        "in_flight": traffic.in_flight,
        "done": traffic.done,
        "failed": dict(traffic.failed),
        "ways": dict(traffic.ways),
        "frames": traffic.frames,
        "bytes": traffic.bytes,
        "moving_s": round(traffic.moving_s, 6),
        "bandwidth": round(traffic.bytes / traffic.moving_s) if traffic.moving_s else 0,  # of a stream, while it moves
        "stalled_s": {what_for: round(seconds, 6) for what_for, seconds in traffic.stalled_s.items()},
    }
