"""The ledger: leases, growth, revoking. One rule each; the fixture ends every test with check_integrity."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ledger_kit import CONFIG, Side, ask, grown, info, placed

from bifolio.kv_manager.ledger import Ledger
from bifolio.protos.errors import Revoked, StalePlacement
from bifolio.protos.messages import Release, ReplicaId, RequestId

# -- leases


def test_an_offer_dies_by_time_alone(ledger: Ledger, decode: Side) -> None:
    placed(ledger, ask("a"), now=5)
    decode.beat(10)
    ledger.expire(14.9)
    assert decode.status("offered") == 1
    ledger.expire(15)
    assert ledger.counts(decode.info.id).free == 8


def test_a_lease_that_a_report_lists_outlives_the_offer(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a")).decode
    decode.tags.open(lease)
    assert decode.status("offered") == 1
    decode.beat(1)
    ledger.expire(9.9)
    assert (decode.status("offered"), decode.status("active"), decode.status("revoked")) == (0, 1, 0)
    ledger.confirm([RequestId("a")], 9.9)
    ledger.expire(11)
    assert (decode.status("active"), decode.status("revoked")) == (1, 0)


def test_a_report_from_before_the_opening_does_not_close(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a")).decode
    before = decode.tags.report(0)
    decode.tags.open(lease)
    ledger.heartbeat(before, 1)
    assert decode.status("offered") == 1


def test_a_lease_that_no_report_ever_lists_ends_like_an_offer(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a")).decode
    decode.tags.open(lease)
    decode.tags.close(lease.generation)  # the release is lost
    decode.beat(9)
    assert decode.status("offered") == 1
    ledger.expire(10)
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
    ledger.release(Release(ReplicaId("nobody"), lease.generation, 1))
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


@pytest.mark.parametrize(("by", "seconds"), [(Ledger.revoke, CONFIG.offer_ttl_s), (Ledger.cancel, CONFIG.tombstone_s)])
def test_an_admission_that_comes_after_the_end_is_refused_for_a_while(
    ledger: Ledger, decode: Side, by: Callable[[Ledger, RequestId, float], None], seconds: float
) -> None:
    by(ledger, RequestId("a"), 0)
    decode.beat(seconds - 0.1)
    for name in ("a", "a#0", "a#1"):
        with pytest.raises(Revoked):
            ledger.check(ask(name), seconds - 0.1)
        with pytest.raises(Revoked):
            ledger.admit(ask(name), seconds - 0.1)
    assert placed(ledger, ask("ab"), seconds - 0.1)
    ledger.expire(seconds)
    assert placed(ledger, ask("a"), seconds)


@pytest.mark.parametrize("waited", [False, True])
def test_what_was_there_when_it_was_revoked_may_come_again(ledger: Ledger, decode: Side, waited: bool) -> None:
    """Only a cancel is for good, as long as a late admission may be on its way."""
    if not waited:
        placed(ledger, ask("a"))
    ledger.revoke(RequestId("a"), 0, known=waited)
    again = placed(ledger, ask("a"), 1)
    ledger.cancel(RequestId("a"), 2)
    assert decode.beat(2) == ()
    assert decode.status("offered") == 0, again
    with pytest.raises(Revoked):
        ledger.check(ask("a"), 3)


def test_a_tombstone_is_not_shortened(ledger: Ledger, decode: Side) -> None:
    """An ingress that leaves a request both cancels and revokes it."""
    ledger.cancel(RequestId("a"), 0)
    ledger.revoke(RequestId("a"), 0)
    decode.beat(59)
    with pytest.raises(Revoked):
        ledger.admit(ask("a"), 59)
