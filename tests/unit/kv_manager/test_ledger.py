"""The ledger: registration, admission, replicas that leave. One rule each; the fixture ends every test with
check_integrity."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ledger_kit import CONFIG, Side, ask, grown, info, placed
from pydantic import ValidationError

from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.secret import proves
from bifolio.kv_manager.snapshot import snapshot
from bifolio.protos.errors import DoesNotFit, Unavailable
from bifolio.protos.messages import (
    ReplicaId,
    Reply,
    Report,
)

# -- registration


def test_registration_adopts_the_leases_it_reports(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a", 8)).decode
    decode.tags.open(lease)
    decode.beat(0)
    restarted = Ledger(2, CONFIG)
    decode.ledger = restarted
    assert restarted.heartbeat(decode.tags.report(1), 1) == Reply(decode.tags.beat, known=False)
    decode.register(1)
    assert decode.status("active") == 1
    assert restarted.counts(decode.info.id) == ledger.counts(decode.info.id)
    assert decode.beat(2) == ()
    decode.release(lease.generation)
    decode.beat(3)
    assert restarted.counts(decode.info.id).free == 8
    restarted.check_integrity()


def test_registration_replaces_what_was_known(ledger: Ledger, decode: Side) -> None:
    decode.serve(ask("a", text=1))
    placed(ledger, ask("b"))
    decode.register(1)
    counts = ledger.counts(decode.info.id)
    assert (counts.free, counts.cached) == (7, 1)


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


def test_what_has_tokens_waits_for_a_block_more(ledger: Ledger) -> None:
    """Or it would starve again before all others."""
    decode = Side(ledger, info("d", blocks=3))
    assert len(placed(ledger, ask("a", tokens=6, most=12, model="m")).decode.blocks) == 3
    decode.beat(1)
    ledger.expire(10)
    assert len(placed(ledger, ask("b", tokens=6, most=7, model="m"), 10).decode.blocks) == 2  # never takes more
    assert ledger.admit(ask("c", tokens=2, most=12, model="m"), 10) is None
    assert placed(ledger, ask("c", tokens=2, most=12), 10)


def test_prefill_gets_room_for_the_history(ledger: Ledger, decode: Side) -> None:
    Side(ledger, replace(info("p", "prefill"), memory=b"memory of p"))
    placement = placed(ledger, ask("a", tokens=24))
    assert placement.prefill is not None
    assert (len(placement.prefill.blocks), len(placement.decode.blocks)) == (6, 7)
    assert (placement.prefill_address, placement.prefill_memory) == ("p:1", b"memory of p")
    assert placement.prefill.generation > placement.decode.generation


def test_a_placement_proves_its_lease_to_the_prefill_replica(ledger: Ledger, decode: Side) -> None:
    key = bytes(range(16))
    Side(ledger, replace(info("p", "prefill"), secret=key)).serve(ask("a", text=1, tokens=24))
    placement = placed(ledger, ask("b", text=1, tokens=24))
    assert placement.prefill is not None
    assert placement.prefill.cached > 0
    assert proves(placement.prefill_secret, key, placement.prefill)
    assert placement.prefill_secret.hex() not in repr(placement)
    assert key.hex() not in str(snapshot(ledger, 0)) + repr(ledger.replicas())


def test_what_decode_computes_itself_has_no_secret(ledger: Ledger, decode: Side) -> None:
    assert placed(ledger, ask("a")).prefill_secret == b""


def test_without_decode_replicas_it_is_not_now(ledger: Ledger) -> None:
    Side(ledger, info("p", "prefill"))
    assert ledger.admit(ask("a", 999), 0) is None


def test_what_never_fits_is_refused(ledger: Ledger, decode: Side) -> None:
    with pytest.raises(DoesNotFit, match=r"36 positions.*holds 32") as error:
        ledger.admit(ask("a", 4, 33), 0)
    assert error.value.field == "max_tokens"
    assert placed(ledger, ask("a", 4, 32))


def test_what_never_fits_is_known_before_it_waits(ledger: Ledger, decode: Side) -> None:
    placed(ledger, ask("x", 27))
    with pytest.raises(DoesNotFit):
        ledger.check(ask("a", 4, 33), 0)
    ledger.check(ask("a", 4, 32), 0)
    assert decode.status("offered") == 1


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


LONG = 4 * CONFIG.local_blocks + 1  # tokens: too many for a decode replica, if a prefill replica is there


def test_a_busy_prefill_pool_is_waited_for(ledger: Ledger) -> None:
    Side(ledger, info("d", blocks=32))
    Side(ledger, info("p", "prefill", blocks=5))
    assert placed(ledger, ask("a", LONG)).prefill is not None
    assert ledger.admit(ask("b", LONG), 0) is None
    assert placed(ledger, ask("short", LONG - 1)).prefill is None


def test_a_prefill_replica_is_given_two_seconds_of_tokens(ledger: Ledger) -> None:
    Side(ledger, info("d", blocks=400, max_sequences=16))
    prefill = Side(ledger, info("p", "prefill", blocks=400, max_sequences=16))
    prefill.speed(100, 1)
    placed(ledger, ask("a", 150))
    assert ledger.admit(ask("b", 60), 1) is None
    prefill.release(placed(ledger, ask("b", 50), 1).prefill.generation)  # type: ignore[union-attr]
    assert prefill.status("queued_tokens") == 150
    prefill.speed(1000, 2)
    assert placed(ledger, ask("c", 400), 2).prefill is not None


def test_what_takes_longer_than_that_goes_to_one_that_has_nothing_to_do(ledger: Ledger) -> None:
    Side(ledger, info("d", blocks=400))
    Side(ledger, info("p", "prefill", blocks=400)).speed(1, 1)
    first = placed(ledger, ask("a", 400), 1)
    assert first.prefill is not None
    assert ledger.admit(ask("b", LONG), 1) is None


def test_decode_prefills_when_no_prefill_replica_is_able(ledger: Ledger, decode: Side) -> None:
    prefill = Side(ledger, info("p", "prefill", blocks=LONG // 4))
    assert placed(ledger, ask("long", LONG)).reason == "no_prefill"
    decode.beat(1)
    ledger.expire(10)
    Side(ledger, info("q", "prefill"))
    placement = placed(ledger, ask("excluded", LONG, exclude=("p", "q")), 10)
    assert (placement.prefill, placement.reason) == (None, "no_prefill")
    ledger.expire(20)
    ledger.report_state(prefill.info.id, "draining", 20)
    ledger.report_state(ReplicaId("q"), "draining", 20)
    assert placed(ledger, ask("draining", LONG), 20).prefill is None


def test_split_always_raises_when_a_prefill_replica_has_been_missing_for_a_while(always: Ledger) -> None:
    Side(always, info("d"))
    assert always.admit(ask("a", 1), 0) is None  # it may be on its way back to a manager that was started again
    assert always.admit(ask("a", 1), CONFIG.silence_s - 1) is None
    with pytest.raises(Unavailable, match=r"kv\.split is always, and no prefill replica is alive"):
        always.admit(ask("a", 1), CONFIG.silence_s)
    prefill = Side(always, info("p", "prefill"))
    assert placed(always, ask("a", 1)).prefill is not None
    assert placed(always, ask("a", 1, exclude=("p",))).prefill is not None  # the only one: a preference
    always.report_state(prefill.info.id, "draining", 0)
    assert always.admit(ask("b", 1), 50) is None  # the time begins anew
    always.check_integrity()


def test_split_always_waits_for_a_busy_one(always: Ledger) -> None:
    Side(always, info("d"))
    Side(always, info("p", "prefill", max_sequences=1))
    placed(always, ask("a", 1))
    assert always.admit(ask("b", 1), 0) is None
    always.check_integrity()


def test_split_never_uses_none() -> None:
    ledger = Ledger(1, CONFIG.model_copy(update={"split": "never"}))
    Side(ledger, info("d"))
    Side(ledger, info("p", "prefill"))
    placement = placed(ledger, ask("a", LONG))
    assert (placement.prefill, placement.reason) == (None, "never")
    ledger.check_integrity()


def test_an_excluded_decode_replica_is_avoided_unless_it_is_the_only_one(ledger: Ledger, decode: Side) -> None:
    assert placed(ledger, ask("a", exclude=("d",))).decode.replica == "d"
    other = Side(ledger, info("e", max_sequences=1))
    assert placed(ledger, ask("b", exclude=("d",))).decode.replica == "e"
    assert ledger.admit(ask("c", exclude=("d",)), 0) is None  # busy, but alive
    ledger.report_state(other.info.id, "draining", 0)
    assert placed(ledger, ask("c", exclude=("d",))).decode.replica == "d"


def test_a_request_has_one_placement(ledger: Ledger, decode: Side) -> None:
    first = placed(ledger, ask("a"))
    second = placed(ledger, ask("a"))
    assert decode.status("revoked") == 1
    decode.tags.open(second.decode)
    assert decode.beat(1) == ()  # the first was never opened: it ends here
    assert (decode.status("offered"), decode.status("active")) == (0, 1)
    assert first.decode.generation < second.decode.generation


# -- replicas that leave


def test_old_repeated_and_unknown_reports_do_nothing(ledger: Ledger, decode: Side) -> None:
    old = decode.tags.report(0)
    lease = placed(ledger, ask("a")).decode
    decode.tags.open(lease)
    decode.beat(1)
    for report in (old, decode.tags.report(2), decode.tags.report(2)):
        ledger.heartbeat(report, 2)
    reply = ledger.heartbeat(old, 3)
    assert reply == Reply(old.beat)
    assert decode.status("active") == 1
    assert not ledger.heartbeat(Report(ReplicaId("nobody"), 1), 3).known


def test_a_silent_replica_is_removed(ledger: Ledger, decode: Side) -> None:
    placed(ledger, ask("a"))
    ledger.expire(29.9)
    assert len(ledger.replicas()) == 1
    ledger.expire(30)
    assert ledger.replicas() == ()


def test_a_false_dead_heals_itself(ledger: Ledger, decode: Side) -> None:
    lease = grown(ledger, decode)
    ledger.report_state(decode.info.id, "dead", 0)
    assert not ledger.heartbeat(decode.tags.report(2), 2).known
    decode.register(3)
    assert decode.beat(4) == ()
    decode.release(lease.generation)
    decode.beat(5)
    assert ledger.counts(decode.info.id).free == 8


def test_a_draining_replica_keeps_its_leases_and_gets_no_more(ledger: Ledger, decode: Side) -> None:
    lease = placed(ledger, ask("a")).decode
    ledger.report_state(decode.info.id, "draining", 0)
    decode.tags.open(lease)
    assert decode.beat(1) == ()
    assert ledger.admit(ask("b"), 1) is None
    ledger.report_state(ReplicaId("nobody"), "draining", 0)


def test_a_peers_word_that_a_replica_leaves_holds_for_a_while(ledger: Ledger, decode: Side) -> None:
    ledger.report_state(decode.info.id, "draining", 0)
    decode.beat(29)
    ledger.expire(29)
    assert decode.status("state") == "draining"
    ledger.expire(30)
    assert decode.status("state") == "alive"


def test_a_replicas_own_word_that_it_leaves_survives_a_restart_of_the_manager(decode: Side) -> None:
    leaving = replace(decode.tags.report(1), draining=True)
    restarted = Ledger(2, CONFIG)
    restarted.register(decode.info, leaving, 2)
    assert restarted.admit(ask("a"), 2) is None
    restarted.heartbeat(replace(decode.tags.report(3), draining=True), 3)
    restarted.expire(20)
    assert restarted.admit(ask("a"), 20) is None
    restarted.check_integrity()


def test_counts_add_up(ledger: Ledger, decode: Side) -> None:
    grown(ledger, decode)
    counts = ledger.counts(decode.info.id)
    assert counts.free + counts.cached + counts.leased == counts.total == 8


def test_config_refuses_unknown_keys_and_says_what_is_wrong() -> None:
    with pytest.raises(ValidationError, match="offer_ttl"):
        KvConfig.model_validate({"offer_ttl": 3})
    with pytest.raises(ValidationError, match=r"silence_s is 1.5, but must be at least three times heartbeat_s"):
        KvConfig(silence_s=1.5)
    with pytest.raises(ValidationError, match="offer_ttl_s is 2, but must be at least three times heartbeat_s"):
        KvConfig(offer_ttl_s=2)
