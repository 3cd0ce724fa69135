"""The ledger: requests with several answers, and whether an ingress still waits for them. The fixture ends every test
with check_integrity."""

from __future__ import annotations

import pytest
from ledger_kit import CONFIG, Side, ask, info, placed

from bifolio.kv_manager.ledger import Ledger
from bifolio.protos.errors import DoesNotFit, Revoked
from bifolio.protos.messages import Generation, RequestId, choice_id


def forked(ledger: Ledger, decode: Side, tokens: int = 6) -> list[Generation]:
    """Three choices, opened: of two blocks each, the first of them shared."""
    placement = placed(ledger, ask("a", tokens, tokens + 1, n=3))
    decode.tags.open(placement.decode)
    for fork in placement.forks:
        decode.tags.fork(fork, placement.decode.generation)
    return [lease.generation for lease in placement.leases]


def test_choices_share_the_blocks_that_the_prompt_fills(ledger: Ledger, decode: Side) -> None:
    placement = placed(ledger, ask("a", 6, 8, n=3))
    every = (placement.decode, *placement.forks)
    assert [lease.request for lease in every] == ["a#0", "a#1", "a#2"]
    assert [(len(lease.blocks), lease.cached) for lease in every] == [(2, 0), (2, 1), (2, 1)]
    assert len({lease.blocks[0] for lease in every}) == 1
    assert len({lease.blocks[1] for lease in every}) == 3
    assert len({lease.generation for lease in every}) == 3
    assert (ledger.counts(decode.info.id).free, decode.status("offered")) == (4, 3)


def test_the_prefill_lease_of_several_choices_is_one(ledger: Ledger, decode: Side) -> None:
    Side(ledger, info("p", "prefill"))
    placement = placed(ledger, ask("a", 24, 25, n=2))
    assert placement.prefill is not None
    assert (placement.prefill.request, len(placement.prefill.blocks)) == ("a", 6)
    assert [lease.request for lease in placement.leases] == ["a#0", "a#1", "a"]


def test_a_shared_block_comes_back_with_the_last_who_has_it(ledger: Ledger, decode: Side) -> None:
    first, *others = forked(ledger, decode)
    decode.beat(1)
    assert decode.tags.held == ledger.counts(decode.info.id).leased == 7  # 1 shared, 3 of their own, 3 in the reserve
    for left, generation in enumerate((others[0], first), 1):
        decode.release(generation)
        decode.beat(1)
        assert decode.tags.held == ledger.counts(decode.info.id).leased == 7 - 2 * left
    decode.release(others[1])
    decode.beat(2)
    assert ledger.counts(decode.info.id).free == 8


def test_so_many_choices_need_so_many_slots(ledger: Ledger, decode: Side) -> None:
    placed(ledger, ask("x", 1, n=2))
    assert ledger.admit(ask("a", 1, n=3), 0) is None
    assert placed(ledger, ask("a", 1, n=2))
    with pytest.raises(DoesNotFit, match="n is 5; a decode replica computes at most 4 answers at once") as error:
        ledger.admit(ask("b", 1, n=5), 0)
    assert error.value.field == "n"


def test_what_choices_share_counts_once_where_it_must_fit(ledger: Ledger, decode: Side) -> None:
    assert placed(ledger, ask("a", 16, 20, n=4))  # 4 shared, and one each
    with pytest.raises(DoesNotFit, match=r"36 positions in 4 answers.*holds 32"):
        ledger.admit(ask("b", 20, 21, n=4), 0)


# -- given up, one or all


def test_a_choice_is_revoked_alone_and_a_request_with_all_of_its_choices(ledger: Ledger, decode: Side) -> None:
    first, second, third = forked(ledger, decode)
    ledger.revoke(choice_id(RequestId("a"), 1), 1)
    assert decode.beat(1) == (second,)
    ledger.revoke(RequestId("a"), 1)
    assert set(decode.beat(2)) == {first, second, third}


def test_a_choice_that_is_placed_again_leaves_the_others_alone(ledger: Ledger, decode: Side) -> None:
    _, second, _ = forked(ledger, decode)
    decode.release(second)
    again = placed(ledger, ask("a#1", 7, model="m"), 1).decode
    assert again.request == "a#1"
    assert decode.beat(2) == ()
    ledger.revoke(RequestId("a"), 2)  # all of the family, also who was placed again
    assert decode.status("revoked") == 3
    decode.beat(3)
    assert decode.status("offered") == 0


def test_a_choice_that_was_given_up_does_not_stand_for_its_request(ledger: Ledger, decode: Side) -> None:
    ledger.cancel(choice_id(RequestId("a"), 1), 0)
    with pytest.raises(Revoked):
        ledger.admit(ask("a#1"), 1)
    assert placed(ledger, ask("a#0"), 1)
    assert placed(ledger, ask("a"), 1)


# -- confirming


def test_what_nobody_confirms_is_revoked(ledger: Ledger, decode: Side) -> None:
    generations = set(forked(ledger, decode))
    decode.beat(1)
    ledger.confirm([RequestId("a"), RequestId("b")], 5)  # its choices by their request's name
    ledger.expire(14.9)
    assert decode.beat(14.9) == ()
    ledger.expire(15)
    assert set(decode.beat(15)) == generations


def test_being_placed_confirms_as_well(ledger: Ledger, decode: Side) -> None:
    _, second, _ = forked(ledger, decode)
    decode.release(second)
    placed(ledger, ask("a#1", 7, model="m"), 6)
    decode.beat(7)
    ledger.expire(15)
    assert decode.beat(15) == ()


def test_a_restarted_manager_waits_to_hear_who_is_open(ledger: Ledger, decode: Side) -> None:
    generations = set(forked(ledger, decode))
    decode.ledger = Ledger(2, CONFIG)
    decode.register(100)
    decode.ledger.expire(109.9)
    assert decode.beat(109.9) == ()
    decode.ledger.expire(110)
    assert set(decode.beat(110)) == generations
    decode.ledger.check_integrity()


def test_what_a_restarted_manager_adopts_is_known_by_its_request(ledger: Ledger, decode: Side) -> None:
    first, second, _ = forked(ledger, decode)
    decode.ledger = Ledger(2, CONFIG)
    decode.register(100)
    decode.ledger.revoke(choice_id(RequestId("a"), 1), 101)
    assert decode.beat(101) == (second,)
    decode.release(second)
    placed(decode.ledger, ask("a#0", 7, model="m"), 102)
    assert decode.beat(103) == (first,)
    decode.ledger.check_integrity()
