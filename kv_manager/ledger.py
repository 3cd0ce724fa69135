"""The ledger: who holds which block of which replica in one cell, and what is cached where. The only place where blocks
are given out.

Pure and synchronous: no torch, Ray, sockets or clock; `now` is an argument. It may be wrong about a replica
for a while (messages are lost, late, repeated, out of order), never for ever, and never dangerously: the
replica refuses a placement whose blocks are not what the ledger believes (`tags.py`), and its next report puts the
ledger right. So every call here is idempotent, and what is late or unknown changes nothing.

    register ─▶ one Book per replica, grouped by fingerprint ◀─ heartbeat: reconcile, revoke, refill
                      │ admit: the longest prefixes (prefix_index.py), the replicas (policy.py), split or not
                      ▼        (split.py), a lease here and there, one new generation each
                  Placement         expire: offers over their time, replicas that fell silent, requests nobody confirms

The lease automaton is drawn in `book.py`. A replica's id belongs to one process for ever: what starts again
has a new id, so a report's `beat` orders all that one replica ever said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Literal

from bifolio.protos.errors import GeometryMismatch, InvalidRequest, Revoked, Unavailable
from bifolio.protos.messages import (
    Ask,
    BlockId,
    Cause,
    Confirmed,
    Generation,
    Geometry,
    Lease,
    Placement,
    Release,
    ReplicaId,
    ReplicaInfo,
    Reply,
    Report,
    RequestId,
    Role,
    choice_id,
    family,
)

from . import policy, split
from .blocks import Counts
from .book import Book
from .config import KvConfig
from .losses import Losses
from .policy import Need
from .prefix_index import PrefixIndex
from .secret import sign

ReportedState = Literal["dead", "unreachable", "draining", "gone"]


class Ledger:
    """`epoch` must be greater than that of every ledger this cell had before."""

    def __init__(self, epoch: int, config: KvConfig | None = None) -> None:
        self.epoch = epoch
        self.splits: Counter[split.Reason] = Counter()  # requests admitted, by why they were split or not
        self.resumes: Counter[Cause] = Counter()  # those of them that were placed again, by why
        self.losses = Losses()
        self.asked_tokens = 0  # of the histories admitted, and those of them that were cached where they are computed
        self.hit_tokens = 0
        self._config = config or KvConfig()
        self._counter = 0
        self._books: dict[ReplicaId, Book] = {}
        self._index = PrefixIndex()
        self._evicted = 0  # blocks, of replicas that have gone
        self._without_prefill: float | None = None  # since when, where split is always
        self._given_up: dict[RequestId, float] = {}  # not admitted before this time
        self._confirmed: dict[RequestId, float] = {}  # families, when an ingress last said that they are open
        self._arrivals: dict[RequestId, float] = {}  # of families: who has an id, of two that were given the same
        self._leaving: set[ReplicaId] = set()  # those that are asked to, also while they are not known

    # -- requests

    def admit(self, ask: Ask, now: float, kept: Collection[ReplicaId] = ()) -> Placement | None:
        """Offers blocks for a request; None is "not now". Its earlier leases, if any, are revoked. `kept` are replicas
        that others wait for: it gets none of them.

        Raises what `check` does, and Unavailable if prompts must be split and no prefill replica has been there for
        `silence_s`.
        """
        self.check(ask, now)
        if ask.cause is None:
            self._arrivals[family(ask.request)] = ask.arrival
        self._revoke(ask.request)
        decodes = [b for b in self._able_decodes(ask) if b.info.id not in kept and b.has_room(ask.n)]
        if not decodes:
            return None
        depths = self._depths(ask)
        decode = policy.best_decode(ask, policy.decode_needs(ask, decodes, depths))
        if decode is None:
            return None
        able = self._able_prefills(ask, decode.book.model)
        prefills = policy.prefill_needs(ask, [b for b in able if b.info.id not in kept], depths)
        speed = policy.speed_of([*able, decode.book])
        prefill = policy.best_prefill(ask, prefills, self._config, speed)
        choice = split.choose(self._config, decode, prefill, able=bool(able), speed=speed)
        self._check_prefill(ask, bool(able) or choice.local, now)
        if not choice.local and prefill is None:
            return None  # worth waiting for: a prompt prefilled at decode slows its sequences
        return self._place(ask, decode, None if choice.local else prefill, choice.reason, now)

    def waits_for(self, ask: Ask) -> ReplicaId | None:
        """The replica that a request needs next, if it is not placed now; None if there is none to wait for."""
        depths = self._depths(ask)
        decodes = policy.decode_needs(ask, self._able_decodes(ask), depths)
        if not decodes:
            return None
        decode = policy.best_decode(ask, decodes)
        if decode is None:
            return policy.by_decode_score(decodes)[0].book.info.id
        able = self._able_prefills(ask, decode.book.model)
        prefills = policy.by_prefill_score(policy.prefill_needs(ask, able, depths), policy.speed_of(able))
        return prefills[0].book.info.id if prefills else None

    def check(self, ask: Ask, now: float) -> None:
        """Raises Revoked for what was cancelled, and DoesNotFit for what can never be served."""
        if any(now < self._given_up.get(id, now) for id in (ask.request, family(ask.request))):
            raise Revoked(f"request {ask.request} was cancelled")
        arrival = self._arrivals.get(family(ask.request), ask.arrival)
        if ask.cause is not None and arrival != ask.arrival:
            raise Revoked(f"request {ask.request} is given up: a later one, at another ingress, has the same id")
        if decodes := self._pool("decode", ask.model):
            policy.refuse_what_never_fits(ask, decodes)

    def revoke(self, request: RequestId, now: float, *, known: bool = False) -> None:
        """Gives up all of a request, or one of its choices. Where nothing of it is known its admission may be on its
        way: that is refused for a while. Where something is, or its caller knows that it waited, it ends here, and
        its name may be used again."""
        if not known and not any(family(request) in book.families for book in self._books.values()):
            self._bury(request, now + self._config.offer_ttl_s)
        self._revoke(request)

    def cancel(self, request: RequestId, now: float) -> None:
        """The same, in its user's words, who may be well ahead of the request: it is refused for a while anyway."""
        self._bury(request, now + self._config.tombstone_s)
        self._revoke(request)

    def confirm(self, requests: Iterable[RequestId], now: float) -> Confirmed:
        """These are open at an ingress; the names of their choices are not needed."""
        self._confirmed.update((family(request), now) for request in requests)
        lost = {replica: loss.why for replica, loss in self.losses.all().items() if loss.told}
        return Confirmed(self.geometries(), lost, frozenset(self._books))

    def release(self, release: Release) -> None:
        """Closes a lease, offered or active. None of the replica's reports up to its beat counts."""
        if book := self._books.get(release.replica):
            book.release(release)

    # -- replicas

    def register(self, info: ReplicaInfo, report: Report, now: float) -> None:
        """Takes a replica in, with the leases, the reserve and the cache it reports: so a restarted manager gets its
        state back.

        All that was known of it before is replaced, unless the report is older than that.
        """
        assert info.id == report.replica
        assert report.since == 0, "a registration tells of all keys"
        known = self._books.get(info.id)
        if known is not None and report.beat <= known.beat:
            return
        for other in self._books.values():
            mine, theirs = info.geometry, other.info.geometry
            if other is not known and mine.fingerprint == theirs.fingerprint and not mine.fits(theirs):
                raise GeometryMismatch(
                    f"replica {info.id} ({mine}) cannot exchange blocks with {other.info.id} ({theirs}), "
                    "although both serve the same model: start them with the same configuration"
                )
        self._forget(info.id)
        self.losses.is_back(info.id)
        book = self._books[info.id] = Book(info, self._index.add())
        book.leaving = info.id in self._leaving
        book.reconcile(report, now, epoch=None)
        others = [b for b in self._books.values() if b is not book and b.info.role == info.role]
        book.revoke_overtaken({held.request: g for other in others for g, held in other.leases.items()})

    def heartbeat(self, report: Report, now: float) -> Reply:
        book = self._books.get(report.replica)
        if book is None or report.since > book.version:
            return Reply(report.beat, known=False)
        if report.beat <= book.beat:  # overtaken; the replica ignores the reply as well
            return Reply(report.beat)
        book.reconcile(report, now, self.epoch)
        granted = book.refill(report.reserve_wanted, self._next_generation())
        return Reply(report.beat, revoked=book.revoked(), granted=granted, leave=book.leaving)

    def drain(self, replica: ReplicaId) -> None:
        """Asks a replica to leave, from its next report on. It is given no new work. InvalidRequest if there is none of
        this name."""
        if (book := self._books.get(replica)) is None:
            names = ", ".join(f"{b.info.id} ({b.info.role})" for b in self._books.values()) or "none"
            raise InvalidRequest(f"there is no replica {replica}; there are: {names}", "replica")
        book.leaving = True
        self._leaving.add(replica)

    def report_state(self, replica: ReplicaId, state: ReportedState, now: float) -> None:
        """What a peer says of a replica, or it of itself: "gone" is its own goodbye. A false word heals: after "dead"
        or "unreachable" the next heartbeat makes the replica register again, and "draining" holds for `silence_s`,
        unless the replica says so itself. Who cannot reach a replica speaks for itself; of a dead one others hear."""
        if (book := self._books.get(replica)) is None:
            return
        if state == "draining":
            book.shunned_until = now + self._config.silence_s
            return
        if state == "dead":
            self.losses.add(replica, book.info.role, "a peer found it dead", now)
        elif state == "unreachable":
            self.losses.add(replica, book.info.role, "a peer could not reach it", now, told=False)
        self._forget(replica)

    def expire(self, now: float) -> list[str]:
        """What time ends. Returns what should be known of it, in sentences."""
        since, said = now - self._config.confirm_s, []
        for book in list(self._books.values()):
            if (silent := now - book.heard) >= self._config.silence_s:
                why = f"it has not reported for {silent:.1f} s"
                self.losses.add(book.info.id, book.info.role, why, now)
                self._forget(book.info.id)
                said.append(f"{book.info.role} replica {book.info.id} is removed with its leases: {why}")
                continue
            book.expire(now)
            if revoked := book.revoke_unconfirmed(self._confirmed, since):
                said.append(
                    f"{len(revoked)} leases at {book.info.id} are taken back: no ingress has confirmed their requests "
                    f"for {self._config.confirm_s:g} s: {', '.join(revoked[:5])}{', …' if revoked[5:] else ''}"
                )
        self.losses.expire(now)
        self._confirmed = {request: at for request, at in self._confirmed.items() if at > since}
        self._arrivals = {request: at for request, at in self._arrivals.items() if request in self._confirmed}
        self._given_up = {request: until for request, until in self._given_up.items() if now < until}
        return said

    # -- what others see

    def counts(self, replica: ReplicaId) -> Counts:
        return self._books[replica].blocks.counts()

    def books(self) -> tuple[Book, ...]:
        """To look at."""
        return tuple(self._books.values())

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        return tuple(book.info for book in self._books.values())

    def geometries(self) -> tuple[Geometry, ...]:
        """Of the models that are served, each once: those of a group differ in nothing that keys depend on."""
        return tuple({book.model: book.info.geometry for book in self._books.values()}.values())

    @property
    def evicted(self) -> int:
        """Cached blocks that were given to someone to write."""
        return self._evicted + sum(book.blocks.evicted for book in self._books.values())

    def check_integrity(self) -> None:
        for book in self._books.values():
            book.check_integrity()
        self._index.check_integrity([book.shelf for book in self._books.values()])

    # -- inside

    def _pool(self, role: Role, fingerprint: str | None = None) -> list[Book]:
        return [b for b in self._books.values() if b.info.role == role and fingerprint in (None, b.model)]

    def _depths(self, ask: Ask) -> dict[str, policy.Depths]:
        return {model: self._index.match(keys) for model, keys in ask.keys.items()}

    def _able_decodes(self, ask: Ask) -> list[Book]:
        return policy.able_decodes(ask, self._pool("decode", ask.model))

    def _check_prefill(self, ask: Ask, possible: bool, now: float) -> None:
        """Raises Unavailable if a prompt must be split and has not been possible to split for a while: a replica that
        was lost, or has not come back to a manager that was started again, has its time."""
        if possible:
            self._without_prefill = None
        elif self._without_prefill is None:
            self._without_prefill = now
        elif now - self._without_prefill >= self._config.silence_s:
            raise Unavailable(
                f"kv.split is always, and no prefill replica is alive that can hold {ask.tokens} tokens; start one, or "
                "set kv.split to auto"
            )

    def _able_prefills(self, ask: Ask, model: str) -> list[Book]:
        """None, if none is to be used."""
        if self._config.split == "never":
            return []
        may_exclude = self._config.split != "always"
        return policy.able_prefills(ask, self._pool("prefill", model), may_exclude=may_exclude)

    def _place(self, ask: Ask, decode: Need, prefill: Need | None, reason: split.Reason, now: float) -> Placement:
        self._confirmed[family(ask.request)] = now
        self.splits[reason] += 1
        if ask.cause is not None:
            self.resumes[ask.cause] += 1
        size = decode.book.block_size
        self.asked_tokens += ask.tokens
        self.hit_tokens += (prefill or decode).cached * size
        wanted = policy.sizes_of(ask, size)
        full = ask.tokens // size
        first, *rest = (choice_id(ask.request, k) for k in range(ask.n)) if ask.n > 1 else (ask.request,)
        lease = self._offer(decode, first, decode.shared(ask), wanted.decode - decode.cached, now)
        local = Placement(ask.request, lease, model=decode.book.model, reason=reason)
        placement = local if prefill is None else self._split(local, prefill, ask, now)
        forks = tuple(self._offer(decode, each, lease.blocks[:full], wanted.each, now) for each in rest)
        return replace(placement, forks=forks)

    def _split(self, placement: Placement, prefill: Need, ask: Ask, now: float) -> Placement:
        """With a lease of a prefill replica, and what its holder needs there."""
        lease, info = self._offer(prefill, ask.request, prefill.shared(ask), prefill.fresh, now), prefill.book.info
        return replace(
            placement,
            prefill=lease,
            prefill_address=info.address,
            prefill_memory=info.memory,
            prefill_secret=sign(info.secret, lease),
        )

    def _offer(self, need: Need, request: RequestId, shared: tuple[BlockId, ...], fresh: int, now: float) -> Lease:
        until = now + self._config.offer_ttl_s
        tokens = need.tokens if need.book.info.role == "prefill" else 0
        return need.book.offer(request, self._next_generation(), shared, fresh, now, until, tokens)

    def _bury(self, request: RequestId, until: float) -> None:
        self._given_up[request] = max(until, self._given_up.get(request, until))

    def _revoke(self, request: RequestId) -> None:
        name = family(request)
        for book in self._books.values():
            if name in book.families:
                book.revoke(request)

    def _forget(self, replica: ReplicaId) -> None:
        if book := self._books.pop(replica, None):
            self._evicted += book.blocks.evicted
            self._index.remove(book.shelf)

    def _next_generation(self) -> Generation:
        self._counter += 1
        return Generation(self.epoch, self._counter)
