"""A ledger with replicas at its side, for tests: messages arrive at once unless a test holds them back."""

from __future__ import annotations

from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.tags import BlockTags
from bifolio.protos.messages import (
    Ask,
    Generation,
    Geometry,
    Lease,
    Placement,
    ReplicaId,
    ReplicaInfo,
    RequestId,
    Role,
)

GEOMETRY = Geometry("m", layers=1, kv_heads=1, head_dim=8, block_size=4, dtype="float32")
CONFIG = KvConfig(offer_ttl_s=10, silence_s=30)


def info(name: str, role: Role = "decode", blocks: int = 8, max_sequences: int = 4) -> ReplicaInfo:
    return ReplicaInfo(ReplicaId(name), role, GEOMETRY, blocks, f"{name}:1", max_sequences=max_sequences)


def ask(name: str, tokens: int = 4, most: int | None = None, exclude: tuple[str, ...] = ()) -> Ask:
    return Ask(RequestId(name), tokens, most or tokens + 1, 0.0, tuple(map(ReplicaId, exclude)))


class Side:
    """A replica and the ledger it reports to."""

    def __init__(self, ledger: Ledger, info: ReplicaInfo) -> None:
        self.ledger, self.info = ledger, info
        self.tags = BlockTags(info.id, info.blocks, grows=info.role == "decode")
        self.register(0.0)

    def register(self, now: float) -> None:
        self.ledger.register(self.info, self.tags.report(now), now)

    def beat(self, now: float) -> tuple[Generation, ...]:
        return self.tags.apply(self.ledger.heartbeat(self.tags.report(now), now))

    def release(self, generation: Generation) -> None:
        beat = self.tags.close(generation)
        self.ledger.release(self.info.id, generation, self.tags.beat if beat is None else beat)

    def status(self, field: str) -> object:
        return next(r[field] for r in self.ledger.snapshot()["replicas"] if r["id"] == self.info.id)


def placed(ledger: Ledger, ask: Ask, now: float = 0.0) -> Placement:
    placement = ledger.admit(ask, now)
    assert placement is not None
    return placement


def grown(ledger: Ledger, decode: Side) -> Lease:
    """A lease of 2 blocks that drew a third."""
    lease = placed(ledger, ask("a")).decode
    decode.tags.open(lease)
    decode.beat(1)
    assert decode.tags.draw(lease.generation, 1)
    return lease
