"""The ledger: who holds which block of which replica in one cell. The only place where blocks are given out.

Pure and synchronous: no torch, Ray, sockets or clock; `now` is an argument. It may be wrong about a replica
for a while (messages are lost, late, repeated, out of order), never for ever, and never dangerously: the
replica refuses a placement whose blocks are not free there (`tags.py`), and its next report puts the ledger
right. So every call here is idempotent, and what is late or unknown changes nothing.

    register ─▶ one Book per replica, grouped by fingerprint ◀─ heartbeat: reconcile, revoke, refill
                      │ admit: a lease here and there, one new generation each
                      ▼
                  Placement         expire: offers over their time, replicas that fell silent

The lease automaton is drawn in `book.py`. A replica's id belongs to one process for ever: what starts again
has a new id, so a report's `beat` orders all that one replica ever said.
"""

from __future__ import annotations

from typing import Any, Literal

from bifolio.protos.errors import DoesNotFit, GeometryMismatch, Revoked
from bifolio.protos.messages import (
    Ask,
    Generation,
    Lease,
    Placement,
    ReplicaId,
    ReplicaInfo,
    Reply,
    Report,
    RequestId,
    Role,
)

from . import policy
from .book import Book, Counts
from .config import KvConfig


class Ledger:
    """`epoch` must be greater than that of every ledger this cell had before."""

    def __init__(self, epoch: int, config: KvConfig | None = None) -> None:
        self.epoch = epoch
        self._config = config or KvConfig()
        self._counter = 0
        self._books: dict[ReplicaId, Book] = {}
        self._revoked: dict[RequestId, float] = {}  # given up: not admitted before this time

    # -- requests

    def admit(self, ask: Ask, now: float) -> Placement | None:
        """Offers blocks for a request; None is "not now". Its earlier leases, if any, are revoked.

        Without a prefill lease the decode replica prefills itself: no prefill replica is able, not just busy.
        """
        if now < self._revoked.get(ask.request, now):
            raise Revoked(f"request {ask.request} was cancelled before it was admitted")
        self._give_up(ask.request)
        decodes = self._pool("decode")
        if not decodes:
            return None
        most = max(b.info.blocks * b.info.geometry.block_size for b in decodes)
        if ask.most_tokens > most:
            raise DoesNotFit(
                f"prompt and max_tokens can take {ask.most_tokens} positions, the largest decode replica "
                f"holds {most}: shorten the prompt or lower max_tokens",
                "max_tokens",
            )
        tokens = policy.decode_tokens(ask)
        decode = policy.best(policy.able_decodes(ask, decodes), tokens)
        if decode is None:
            return None
        able = policy.able_prefills(ask, self._pool("prefill", decode.info.geometry.fingerprint))
        prefill = policy.best(able, ask.tokens)
        if able and prefill is None:  # worth waiting for: a prompt prefilled at decode slows its sequences
            return None
        if prefill is None:
            return Placement(ask.request, self._offer(decode, ask, tokens, now))
        return Placement(
            ask.request,
            self._offer(decode, ask, tokens, now),
            self._offer(prefill, ask, ask.tokens, now),
            prefill.info.address,
            prefill.info.memory,
        )

    def revoke(self, request: RequestId, now: float) -> None:
        """Gives up all of a request, also an admission that is still on its way."""
        self._revoked[request] = now + self._config.offer_ttl_s
        self._give_up(request)

    def activate(self, generation: Generation) -> None:
        for book in self._books.values():
            book.activate(generation)

    def release(self, replica: ReplicaId, generation: Generation, beat: int) -> None:
        """Closes a lease, offered or active. `beat` counts the replica's reports at that moment: none up to
        it counts."""
        if book := self._books.get(replica):
            book.release(generation, beat)

    # -- replicas

    def register(self, info: ReplicaInfo, report: Report, now: float) -> None:
        """Takes a replica in, with the leases and the reserve it reports: so a restarted manager gets its
        state back.

        All that was known of it before is replaced, unless the report is older than that.
        """
        assert info.id == report.replica
        known = self._books.get(info.id)
        if known is not None and report.beat <= known.beat:
            return
        for other in self._books.values():
            mine, theirs = info.geometry, other.info.geometry
            if other is not known and mine.fingerprint == theirs.fingerprint and mine != theirs:
                raise GeometryMismatch(
                    f"replica {info.id} ({mine}) cannot exchange blocks with {other.info.id} ({theirs}), "
                    "although both serve the same model: start them with the same configuration"
                )
        book = Book(info)
        book.reconcile(report, now, epoch=None)
        self._books[info.id] = book

    def heartbeat(self, report: Report, now: float) -> Reply:
        book = self._books.get(report.replica)
        if book is None:
            return Reply(report.beat, known=False)
        if report.beat <= book.beat:  # overtaken; the replica ignores the reply as well
            return Reply(report.beat)
        book.reconcile(report, now, self.epoch)
        granted = book.refill(report.reserve_wanted, self._next_generation())
        return Reply(report.beat, revoked=book.revoked(), granted=granted)

    def report_state(self, replica: ReplicaId, state: Literal["dead", "draining"], now: float) -> None:
        """What a peer says of a replica. A false word heals: after "dead" the next heartbeat makes the replica register
        again, and "draining" holds for `silence_s`, unless the replica says so itself."""
        if state == "dead":
            self._books.pop(replica, None)
        elif book := self._books.get(replica):
            book.shunned_until = now + self._config.silence_s

    def expire(self, now: float) -> None:
        for book in list(self._books.values()):
            if now - book.heard >= self._config.silence_s:
                del self._books[book.info.id]
            else:
                book.expire(now)
        for request in [r for r, until in self._revoked.items() if now >= until]:
            del self._revoked[request]

    # -- what others see

    def counts(self, replica: ReplicaId) -> Counts:
        return self._books[replica].counts()

    def has_decode(self) -> bool:
        """Whether any decode replica takes new work."""
        return any(book.state == "alive" for book in self._pool("decode"))

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        return tuple(book.info for book in self._books.values())

    def snapshot(self) -> dict[str, Any]:
        """For the status page: plain values."""
        return {"epoch": self.epoch, "replicas": [_status(book) for book in self._books.values()]}

    def check_integrity(self) -> None:
        for book in self._books.values():
            book.check_integrity()

    # -- inside

    def _pool(self, role: Role, fingerprint: str | None = None) -> list[Book]:
        return [
            b
            for b in self._books.values()
            if b.info.role == role and fingerprint in (None, b.info.geometry.fingerprint)
        ]

    def _offer(self, book: Book, ask: Ask, tokens: int, now: float) -> Lease:
        until = now + self._config.offer_ttl_s
        return book.offer(ask.request, self._next_generation(), book.blocks_for(tokens), until)

    def _give_up(self, request: RequestId) -> None:
        for book in self._books.values():
            book.revoke(request)

    def _next_generation(self) -> Generation:
        self._counter += 1
        return Generation(self.epoch, self._counter)


def _status(book: Book) -> dict[str, Any]:
    counts = book.counts()
    return {
        "id": book.info.id,
        "role": book.info.role,
        "state": book.state,
        "model": book.info.geometry.fingerprint,
        "address": book.info.address,
        "pid": book.info.pid,
        "free": counts.free,
        "cached": counts.cached,
        "leased": counts.leased,
        "reserve": counts.reserve,
        "total": counts.total,
        "shortage": book.shortage,
        "offered": sum(not lease.active for lease in book.leases.values()),
        "active": sum(lease.active for lease in book.leases.values()),
        "revoked": len(book.revoked()),
        "beat": book.beat,  # of the replica's newest report, which says:
        "reported": book.reported,
        "held": book.held,
        "max_sequences": book.info.max_sequences,
        "cache": list(book.info.cache),
    }
