"""A ledger with replicas at its side, for tests: messages arrive at once unless a test holds them back."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from bifolio.kv_manager import keys
from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.snapshot import snapshot
from bifolio.kv_manager.tags import BlockTags
from bifolio.protos.measures import Speeds
from bifolio.protos.messages import (
    Ask,
    BlockId,
    Generation,
    Geometry,
    Key,
    Lease,
    Placement,
    Release,
    ReplicaId,
    ReplicaInfo,
    RequestId,
    Role,
)

GEOMETRY = Geometry("m", layers=1, kv_heads=1, head_dim=8, block_size=4, dtype="float32")
CONFIG = KvConfig(offer_ttl_s=10, silence_s=30)


def info(name: str, role: Role = "decode", blocks: int = 8, max_sequences: int = 4) -> ReplicaInfo:
    return ReplicaInfo(ReplicaId(name), role, GEOMETRY, blocks, f"{name}:1", max_sequences=max_sequences)


@lru_cache(100_000)
def keys_of(tokens: tuple[int, ...]) -> tuple[Key, ...]:
    return keys.chain(keys.root(GEOMETRY), tokens, GEOMETRY.block_size)


def ask(
    name: str,
    tokens: int = 4,
    most: int | None = None,
    exclude: tuple[str, ...] = (),
    *,
    n: int = 1,
    text: int | tuple[int, ...] = 0,
    model: str | None = None,
) -> Ask:
    """`text`: its tokens, or the one it repeats; 0 is not looked up in any cache."""
    history = text if isinstance(text, tuple) else (text,) * tokens
    known = {GEOMETRY.fingerprint: keys_of(history)} if text else {}
    return Ask(RequestId(name), tokens, most or tokens + 1, 0.0, tuple(map(ReplicaId, exclude)), n, known, model)


class Side:
    """A replica and the ledger it reports to."""

    def __init__(self, ledger: Ledger, info: ReplicaInfo) -> None:
        self.ledger, self.info = ledger, info
        self.tags = BlockTags(info.id, info.blocks, grows=info.role == "decode")
        self.register(0.0)

    def register(self, now: float) -> None:
        self.ledger.register(self.info, self.tags.report(now, complete=True), now)

    def beat(self, now: float) -> tuple[Generation, ...]:
        return self.tags.apply(self.ledger.heartbeat(self.tags.report(now), now))

    def speed(self, prefill: float, now: float, transfer: float = 0.0) -> None:
        """Reports what it has measured."""
        self.ledger.heartbeat(replace(self.tags.report(now), speeds=Speeds(prefill, transfer)), now)

    def release(self, generation: Generation) -> None:
        """As a replica does it, whether or not it could open the lease."""
        release = self.tags.close(generation) or Release(self.info.id, generation, self.tags.beat)
        self.ledger.release(release)

    def open(self, lease: Lease, ask: Ask) -> None:
        self.tags.open(lease, ask.keys.get(GEOMETRY.fingerprint, ()))

    def serve(self, ask: Ask, now: float = 0.0) -> Lease:
        """From its placement to its release here, all of it computed: so it is cached afterwards."""
        placement = placed(self.ledger, ask, now)
        lease = next(lease for lease in placement.leases if lease.replica == self.info.id)
        self.open(lease, ask)
        self.tags.fill(lease.generation, ask.keys.get(GEOMETRY.fingerprint, ()))
        for each in placement.leases:
            if each is not lease:
                self.ledger.release(Release(each.replica, each.generation, 0))
        self.release(lease.generation)
        return lease

    @property
    def known(self) -> dict[BlockId, Key]:
        return known(self.ledger, self.info.id)

    def status(self, field: str, now: float = 0.0) -> object:
        return next(r[field] for r in snapshot(self.ledger, now)["replicas"] if r["id"] == self.info.id)


def known(ledger: Ledger, replica: ReplicaId) -> dict[BlockId, Key]:
    """What the ledger believes to be whole there."""
    (book,) = (book for book in ledger.books() if book.info.id == replica)
    return {BlockId(block): key for block, key in enumerate(book.blocks._keys) if key is not None}


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
