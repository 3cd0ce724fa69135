"""One rule of the ledger each. The fixtures end every test with check_integrity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from pydantic import ValidationError

from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.tags import BlockTags
from bifolio.protos.errors import DoesNotFit, GeometryMismatch, Revoked, StalePlacement
from bifolio.protos.messages import (
    Answer,
    Ask,
    Generation,
    Geometry,
    Lease,
    Placement,
    ReplicaId,
    ReplicaInfo,
    Report,
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
    """A replica next to its ledger: messages arrive at once unless a test holds them back."""

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


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger(1, CONFIG)
    yield ledger
    ledger.check_integrity()


@pytest.fixture
def decode(ledger: Ledger) -> Side:
    return Side(ledger, info("d"))


def placed(ledger: Ledger, ask: Ask, now: float = 0.0) -> Placement:
    placement = ledger.admit(ask, now)
    assert placement is not None
    return placement


# -- registration


def test_same_model_of_another_geometry_is_refused(ledger: Ledger, decode: Side) -> None:
    other = replace(info("e"), geometry=replace(GEOMETRY, block_size=16))
    with pytest.raises(GeometryMismatch, match=r"e \(.*block_size=16.*d \(.*block_size=4"):
        Side(ledger, other)
    assert [r.id for r in ledger.replicas()] == ["d"]


def test_other_models_are_other_groups(ledger: Ledger, decode: Side) -> None:
    Side(ledger, replace(info("p", "prefill"), geometry=replace(GEOMETRY, fingerprint="other", block_size=16)))
    assert placed(ledger, ask("a")).prefill is None


def test_registration_adopts_the_leases_it_reports(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a", 8)).decode
    decode.tags.open(lease)
    decode.beat(0)
    restarted = Ledger(2, CONFIG)
    decode.ledger = restarted
    assert restarted.heartbeat(decode.tags.report(1), 1) == Answer(decode.tags.beat, known=False)
    decode.register(1)
    assert decode.status("active") == 1
    assert restarted.counts(decode.info.id) == ledger.counts(decode.info.id)
    assert decode.beat(2) == ()
    decode.release(lease.generation)
    decode.beat(3)
    assert restarted.counts(decode.info.id).free == 8
    restarted.check_integrity()


def test_registration_replaces_what_was_known(ledger: Ledger, decode: Side) -> None:
    placed(ledger, ask("a"))
    decode.register(1)
    assert ledger.counts(decode.info.id).free == 8


def test_a_late_registration_changes_nothing(ledger: Ledger, decode: Side) -> None:
    old = decode.tags.report(0)
    lease = placed(ledger, ask("a")).decode
    decode.tags.open(lease)
    decode.beat(1)
    ledger.register(decode.info, old, 2)
    assert decode.status("active") == 1


# -- admission


def test_a_placement_has_room_for_the_history_and_one_more(ledger: Ledger, decode: Side) -> None:
    assert len(placed(ledger, ask("a", tokens=4)).decode.blocks) == 2
    assert len(placed(ledger, ask("b", tokens=4, most=4)).decode.blocks) == 1  # its only token is never fed back


def test_prefill_gets_room_for_the_history(ledger: Ledger, decode: Side) -> None:
    Side(ledger, info("p", "prefill"))
    placement = placed(ledger, ask("a", tokens=4))
    assert placement.prefill is not None
    assert len(placement.prefill.blocks) == 1
    assert placement.prefill_address == "p:1"
    assert placement.prefill.generation > placement.decode.generation


def test_without_decode_replicas_it_is_not_now(ledger: Ledger) -> None:
    Side(ledger, info("p", "prefill"))
    assert ledger.admit(ask("a", 999), 0) is None


def test_what_never_fits_is_refused(ledger: Ledger, decode: Side) -> None:
    with pytest.raises(DoesNotFit, match=r"33 positions.*holds 32") as error:
        ledger.admit(ask("a", 4, 33), 0)
    assert error.value.field == "max_tokens"
    assert placed(ledger, ask("a", 4, 32))


def test_a_replica_that_is_too_small_is_not_chosen(ledger: Ledger, decode: Side) -> None:
    Side(ledger, info("big", blocks=100))
    placed(ledger, ask("x"))
    assert placed(ledger, ask("a", 4, 33)).decode.replica == "big"


def test_full_is_not_now(ledger: Ledger, decode: Side) -> None:
    first = placed(ledger, ask("a", 27))
    assert ledger.admit(ask("b", 4), 0) is None
    decode.release(first.decode.generation)
    assert ledger.admit(ask("b", 4), 0) is not None


def test_sequence_slots_are_bounded(ledger: Ledger) -> None:
    Side(ledger, info("d", max_sequences=1))
    placed(ledger, ask("a", 1))
    assert ledger.admit(ask("b", 1), 0) is None


def test_fewest_leases_then_most_free_blocks(ledger: Ledger, decode: Side) -> None:
    Side(ledger, info("e", blocks=16))
    assert [placed(ledger, ask(n)).decode.replica for n in "abcd"] == ["e", "d", "e", "d"]


def test_a_busy_prefill_pool_is_waited_for(ledger: Ledger, decode: Side) -> None:
    Side(ledger, info("p", "prefill", blocks=1))
    assert placed(ledger, ask("a", 4)).prefill is not None
    assert ledger.admit(ask("b", 4), 0) is None


def test_decode_prefills_when_no_prefill_replica_is_able(ledger: Ledger, decode: Side) -> None:
    prefill = Side(ledger, info("p", "prefill", blocks=1))
    assert placed(ledger, ask("long", 5)).prefill is None
    assert placed(ledger, ask("excluded", 4, exclude=("p",))).prefill is None
    ledger.report_state(prefill.info.id, "draining")
    assert placed(ledger, ask("draining", 4)).prefill is None


def test_an_excluded_decode_replica_is_avoided_unless_it_is_the_only_one(ledger: Ledger, decode: Side) -> None:
    assert placed(ledger, ask("a", exclude=("d",))).decode.replica == "d"
    other = Side(ledger, info("e", max_sequences=1))
    assert placed(ledger, ask("b", exclude=("d",))).decode.replica == "e"
    assert ledger.admit(ask("c", exclude=("d",)), 0) is None  # busy, but alive
    ledger.report_state(other.info.id, "draining")
    assert placed(ledger, ask("c", exclude=("d",))).decode.replica == "d"


def test_a_request_has_one_placement(ledger: Ledger, decode: Side) -> None:
    first = placed(ledger, ask("a"))
    second = placed(ledger, ask("a"))
    assert decode.status("revoked") == 1
    decode.tags.open(second.decode)
    assert decode.beat(1) == ()  # the first was never opened: it ends here
    assert (decode.status("offered"), decode.status("active")) == (0, 1)
    assert first.decode.generation < second.decode.generation


# -- leases


def test_an_offer_dies_by_time_alone(ledger: Ledger, decode: Side) -> None:
    placed(ledger, ask("a"), now=5)
    decode.beat(10)
    ledger.expire(14.9)
    assert decode.status("offered") == 1
    ledger.expire(15)
    assert ledger.counts(decode.info.id).free == 8


@pytest.mark.parametrize("by", ["activate", "beat"])
def test_an_active_lease_outlives_the_offer(ledger: Ledger, decode: Side, by: str) -> None:
    lease = placed(ledger, ask("a")).decode
    decode.tags.open(lease)
    if by == "activate":
        ledger.activate(lease.generation)
    else:
        decode.beat(1)
    ledger.expire(11)
    assert decode.status("active") == 1


def test_a_report_that_an_activation_overtook_does_not_close(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a")).decode
    before = decode.tags.report(0)
    decode.tags.open(lease)
    ledger.activate(lease.generation)
    ledger.heartbeat(before, 1)
    assert decode.status("active") == 1


def test_an_activated_lease_that_no_report_ever_lists_ends(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a")).decode
    decode.tags.open(lease)
    ledger.activate(lease.generation)
    decode.tags.close(lease.generation)  # the release is lost
    decode.beat(10)
    assert ledger.counts(decode.info.id).free == 8


def test_absence_from_a_newer_report_closes(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a")).decode
    decode.tags.open(lease)
    decode.beat(1)
    decode.tags.close(lease.generation)  # the release is lost
    decode.beat(2)
    assert ledger.counts(decode.info.id).free == 8


@pytest.mark.parametrize("opened", [False, True])
def test_release_closes_and_repeats_do_nothing(ledger: Ledger, decode: Side, opened: bool) -> None:
    lease = placed(ledger, ask("a")).decode
    if opened:
        decode.tags.open(lease)
        decode.beat(1)
    for _ in range(3):
        decode.release(lease.generation)
    decode.beat(2)
    ledger.release(ReplicaId("nobody"), lease.generation, 1)
    assert ledger.counts(decode.info.id).free == 8


def test_a_report_taken_before_the_release_does_not_resurrect(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a")).decode
    decode.tags.open(lease)
    late = decode.tags.report(1)
    decode.release(lease.generation)
    assert ledger.heartbeat(late, 2).revoked == ()
    counts = ledger.counts(decode.info.id)
    assert counts.free + counts.reserve == 8


def test_blocks_reused_under_an_old_placement_make_it_stale(ledger: Ledger, decode: Side) -> None:
    old = placed(ledger, ask("a", 28)).decode
    ledger.expire(10)
    new = placed(ledger, ask("b", 28), 10).decode
    decode.tags.open(new)
    with pytest.raises(StalePlacement) as error:
        decode.tags.open(old)
    assert error.value.replica == "d"
    decode.release(new.generation)
    with pytest.raises(StalePlacement):
        decode.tags.open(old)


def test_an_expired_offer_that_opens_late_is_revoked(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a", 8)).decode
    ledger.expire(10)
    decode.tags.open(lease)
    for now in (11, 12):  # until it is gone
        assert decode.beat(now) == (lease.generation,)
    assert ledger.counts(decode.info.id).leased - ledger.counts(decode.info.id).reserve == 3
    decode.release(lease.generation)
    assert decode.beat(13) == ()
    assert ledger.counts(decode.info.id).free == 8


def test_a_late_opening_leaves_a_newer_offer_alone(ledger: Ledger, decode: Side) -> None:
    old = placed(ledger, ask("a", 28)).decode
    ledger.expire(10)
    new = placed(ledger, ask("b", 28), 10).decode
    decode.tags.open(old)
    decode.beat(11)
    ledger.check_integrity()
    assert (decode.status("offered"), decode.status("revoked")) == (1, 1)
    with pytest.raises(StalePlacement):
        decode.tags.open(new)
    decode.release(new.generation)
    decode.release(old.generation)
    decode.beat(12)
    assert ledger.counts(decode.info.id).free == 8


# -- growth


def grown(ledger: Ledger, decode: Side) -> Lease:
    """A lease of 2 blocks that drew a third."""
    lease = placed(ledger, ask("a")).decode
    decode.tags.open(lease)
    decode.beat(1)
    assert decode.tags.draw(lease.generation, 1)
    return lease


def test_drawn_blocks_move_from_the_reserve_to_the_lease(ledger: Ledger, decode: Side) -> None:
    lease = grown(ledger, decode)
    decode.beat(2)
    counts = ledger.counts(decode.info.id)
    assert (counts.free, counts.leased, counts.reserve) == (4, 4, 1)
    decode.release(lease.generation)
    decode.beat(3)
    assert ledger.counts(decode.info.id).free == 8


def test_a_grant_whose_answer_was_lost_comes_back(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a")).decode
    decode.tags.open(lease)
    lost = ledger.heartbeat(decode.tags.report(1), 1)
    assert lost.granted is not None
    decode.beat(2)
    assert ledger.counts(decode.info.id).reserve == 1
    decode.tags.apply(lost)  # too late: its blocks are the ledger's again
    assert decode.tags.held == 3


def test_the_reserve_goes_back_when_nothing_is_open(ledger: Ledger, decode: Side) -> None:
    decode.release(grown(ledger, decode).generation)
    decode.beat(2)
    assert ledger.counts(decode.info.id).reserve == 0


def test_what_the_reserve_is_short_of_is_kept_back(ledger: Ledger) -> None:
    decode = Side(ledger, info("d", blocks=4))
    leases = [placed(ledger, ask(name)).decode for name in "ab"]
    for lease in leases:
        decode.tags.open(lease)
    decode.beat(1)
    assert decode.status("shortage") == 2
    decode.release(leases[0].generation)
    assert ledger.admit(ask("c"), 1) is None  # 2 free, all of them owed to growth
    decode.beat(2)
    assert ledger.counts(decode.info.id).reserve == 1
    assert ledger.admit(ask("c", 2), 2) is not None


# -- revoking


def test_revoke_closes_a_lease_when_the_replica_has_closed_it(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a")).decode
    decode.tags.open(lease)
    decode.beat(1)
    ledger.revoke(RequestId("a"), 1)
    assert decode.beat(2) == (lease.generation,)
    assert decode.status("active") == 1
    decode.tags.close(lease.generation)
    decode.beat(3)
    assert ledger.counts(decode.info.id).free == 8


def test_a_revoked_offer_ends_at_the_next_report_or_by_time(ledger: Ledger, decode: Side) -> None:
    placed(ledger, ask("a"))
    ledger.revoke(RequestId("a"), 1)
    assert decode.status("offered") == 1
    decode.beat(2)
    assert decode.status("offered") == 0
    placed(ledger, ask("b"), 2)
    ledger.revoke(RequestId("b"), 2)
    ledger.expire(12)
    assert ledger.counts(decode.info.id).free == 8


def test_revoke_refuses_an_admission_that_comes_later(ledger: Ledger, decode: Side) -> None:
    ledger.revoke(RequestId("a"), 0)
    with pytest.raises(Revoked):
        ledger.admit(ask("a"), 9.9)
    ledger.expire(10)
    assert placed(ledger, ask("a"), 10)


# -- replicas that leave


def test_old_repeated_and_unknown_reports_do_nothing(ledger: Ledger, decode: Side) -> None:
    old = decode.tags.report(0)
    lease = placed(ledger, ask("a")).decode
    decode.tags.open(lease)
    decode.beat(1)
    for report in (old, decode.tags.report(2), decode.tags.report(2)):
        ledger.heartbeat(report, 2)
    answer = ledger.heartbeat(old, 3)
    assert answer == Answer(old.beat)
    assert decode.status("active") == 1
    assert not ledger.heartbeat(Report(ReplicaId("nobody"), 1, 0), 3).known


def test_a_silent_replica_is_removed(ledger: Ledger, decode: Side) -> None:
    placed(ledger, ask("a"))
    ledger.expire(29.9)
    assert len(ledger.replicas()) == 1
    ledger.expire(30)
    assert ledger.replicas() == ()


def test_a_false_dead_heals_itself(ledger: Ledger, decode: Side) -> None:
    lease = grown(ledger, decode)
    ledger.report_state(decode.info.id, "dead")
    assert not ledger.heartbeat(decode.tags.report(2), 2).known
    decode.register(3)
    assert decode.beat(4) == ()
    decode.release(lease.generation)
    decode.beat(5)
    assert ledger.counts(decode.info.id).free == 8


def test_a_draining_replica_keeps_its_leases_and_gets_no_more(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a")).decode
    ledger.report_state(decode.info.id, "draining")
    decode.tags.open(lease)
    assert decode.beat(1) == ()
    assert ledger.admit(ask("b"), 1) is None
    ledger.report_state(ReplicaId("nobody"), "draining")


def test_counts_add_up(ledger: Ledger, decode: Side) -> None:
    grown(ledger, decode)
    counts = ledger.counts(decode.info.id)
    assert counts.free + counts.cached + counts.leased == counts.total == 8


def test_config_refuses_unknown_keys_and_says_what_is_wrong() -> None:
    with pytest.raises(ValidationError, match="offer_ttl"):
        KvConfig.model_validate({"offer_ttl": 3})
    with pytest.raises(ValidationError, match="at least twice heartbeat_s"):
        KvConfig(silence_s=1.5)
