"""Replicas that were lost: whoever asks is told, for a while, until they are back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ledger_kit import CONFIG, Side, ask, info, placed

from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.losses import KEPT_S
from bifolio.kv_manager.snapshot import snapshot
from bifolio.protos.errors import InvalidRequest, Revoked
from bifolio.protos.messages import ReplicaId


def test_one_that_falls_silent_is_lost_and_when_it_registers_again_it_is_not(ledger: Ledger, decode: Side) -> None:
    assert ledger.confirm((), 1).lost == {}
    (said,) = ledger.expire(CONFIG.silence_s)
    assert said.startswith("decode replica")
    assert "has not reported for 30.0 s" in said
    assert ledger.confirm((), 31).lost == {decode.info.id: "it has not reported for 30.0 s"}
    assert [lost["role"] for lost in snapshot(ledger, 31)["lost"]] == ["decode"]
    decode.register(32)
    assert ledger.confirm((), 33).lost == {}


def test_one_that_a_peer_found_dead_is_lost_and_one_that_said_goodbye_is_not(ledger: Ledger, decode: Side) -> None:
    other = Side(ledger, info("e"))
    ledger.report_state(decode.info.id, "dead", 1)
    ledger.report_state(other.info.id, "gone", 1)
    ledger.report_state(ReplicaId("nobody"), "dead", 1)
    assert ledger.confirm((), 2).lost == {decode.info.id: "a peer found it dead"}
    assert ledger.replicas() == ()


def test_a_loss_is_forgotten_in_the_end(ledger: Ledger, decode: Side) -> None:
    ledger.report_state(decode.info.id, "dead", 1)
    ledger.expire(KEPT_S)
    assert ledger.losses.all()
    ledger.expire(1 + KEPT_S)
    assert not ledger.losses.all()


def test_what_was_placed_elsewhere_meanwhile_is_taken_back_when_a_lost_replica_returns(
    ledger: Ledger, decode: Side
) -> None:
    request = ask("a")
    lease = placed(ledger, request).decode
    decode.open(lease, request)
    ledger.expire(CONFIG.silence_s)
    other = Side(ledger, info("e"))
    assert placed(ledger, request, 31).decode.replica == other.info.id
    decode.register(32)
    assert decode.beat(33) == (lease.generation,)


def test_a_replica_is_asked_to_leave_and_gets_nothing_new(ledger: Ledger, decode: Side) -> None:
    assert not ledger.heartbeat(decode.tags.report(1), 1).leave
    ledger.drain(decode.info.id)
    assert decode.status("state") == "draining"
    assert ledger.admit(ask("a"), 2) is None
    assert ledger.heartbeat(decode.tags.report(3), 3).leave
    with pytest.raises(InvalidRequest, match=rf"no replica q; there are: {decode.info.id} \(decode\)"):
        ledger.drain(ReplicaId("q"))


def test_one_that_is_asked_to_leave_is_asked_again_when_it_registers_again(ledger: Ledger, decode: Side) -> None:
    ledger.drain(decode.info.id)
    ledger.report_state(decode.info.id, "dead", 1)
    decode.register(2)
    assert ledger.heartbeat(decode.tags.report(3), 3).leave


def test_of_one_that_a_peer_cannot_reach_nobody_else_hears(ledger: Ledger, decode: Side) -> None:
    assert ledger.confirm((), 0).known == {decode.info.id}
    ledger.report_state(decode.info.id, "unreachable", 1)
    confirmed = ledger.confirm((), 2)
    assert (confirmed.lost, confirmed.known) == ({}, frozenset())
    assert [lost["why"] for lost in snapshot(ledger, 2)["lost"]] == ["a peer could not reach it"]


def test_of_two_requests_with_one_id_the_later_one_has_it(ledger: Ledger, decode: Side) -> None:
    """They came to two ingresses, which do not know each other's; one must not take the other's blocks for ever."""
    earlier, later = replace(ask("a"), arrival=1.0), replace(ask("a"), arrival=2.0)
    placed(ledger, earlier)
    placed(ledger, later)
    with pytest.raises(Revoked, match="a later one, at another ingress, has the same id"):
        ledger.check(replace(earlier, cause="revoked"), 1)
    assert ledger.admit(replace(later, cause="stale"), 1)
    ledger.expire(1 + CONFIG.confirm_s)  # nobody has confirmed it since: it has ended
    ledger.check(replace(earlier, cause="revoked"), 1 + CONFIG.confirm_s)
