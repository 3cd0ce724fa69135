"""The ledger: what is cached where, who is given it, what is forgotten for whom. The fixture ends every test with
check_integrity."""

from __future__ import annotations

import pytest
from ledger_kit import CONFIG, Side, ask, info, keys_of, placed

from bifolio.kv_manager.ledger import Ledger
from bifolio.protos.errors import StalePlacement
from bifolio.protos.messages import Reply, RequestId

LOCAL = CONFIG.model_copy(update={"split": "never"})
SPLIT = CONFIG.model_copy(update={"split": "always"})


def texts(decode: Side) -> set[int]:
    """Of which texts the ledger knows the first block here."""
    return {text for text in range(1, 10) if keys_of((text,) * 4)[0] in decode.known.values()}


# -- hits


def test_what_was_served_is_a_hit_from_its_release_on(ledger: Ledger, decode: Side) -> None:
    first = decode.serve(ask("a", 12, text=1))
    assert set(decode.known) == set(first.blocks[:3])
    again = placed(ledger, ask("b", 13, text=1)).decode
    assert (again.cached, again.blocks[:3]) == (3, first.blocks[:3])
    decode.open(again, ask("b", 13, text=1))
    counts = ledger.counts(decode.info.id)
    assert (counts.cached, counts.leased, counts.total) == (0, 4, 8)


def test_a_hit_from_a_report_while_the_first_still_runs(ledger: Ledger) -> None:
    decode = Side(ledger, info("d", blocks=16))
    first = placed(ledger, ask("a", 8, text=1)).decode
    decode.open(first, ask("a", 8, text=1))
    decode.tags.fill(first.generation, keys_of((1,) * 4))
    assert placed(ledger, ask("b", 8, text=1)).decode.cached == 0
    decode.beat(1)
    second = placed(ledger, ask("c", 8, text=1), 1).decode
    assert (second.cached, second.blocks[0]) == (1, first.blocks[0])
    decode.open(second, ask("c", 8, text=1))
    decode.release(first.generation)
    decode.beat(2)
    assert decode.tags.users(second.blocks[0]) == (second.generation,)


def test_the_last_token_is_computed_even_if_its_block_is_cached(ledger: Ledger, decode: Side) -> None:
    """What is shared is never written, and its logits are needed."""
    decode.serve(ask("a", 12, text=1))
    assert placed(ledger, ask("b", 12, text=1)).decode.cached == 2
    assert placed(ledger, ask("c", 4, text=1)).decode.cached == 0


def test_hits_are_of_equal_beginnings_alone(ledger: Ledger, decode: Side) -> None:
    decode.serve(ask("a", 12, text=1))
    for name, text, hit in (("b", (2,) * 9, 0), ("c", (1,) * 4 + (2,) * 5, 1), ("d", (2,) * 4 + (1,) * 5, 0)):
        assert placed(ledger, ask(name, 9, text=text)).decode.cached == hit
        ledger.revoke(RequestId(name), 0)
        decode.beat(1)
    assert placed(ledger, ask("e", 9)).decode.cached == 0  # no keys, as with prompt_logprobs


def test_each_side_has_its_own_hit() -> None:
    ledger = Ledger(1, SPLIT)
    decode, prefill = Side(ledger, info("d")), Side(ledger, info("p", "prefill"))
    prefill.serve(ask("a", 12, text=1))
    placement = placed(ledger, ask("b", 13, text=1))
    assert placement.prefill is not None
    assert (placement.decode.cached, placement.prefill.cached) == (0, 3)
    assert (ledger.asked_tokens, ledger.hit_tokens) == (25, 12)
    assert prefill.status("queued_tokens") == 1
    decode.beat(1)
    prefill.beat(1)
    ledger.expire(10)
    decode.serve(ask("c", 8, text=1), 10)
    placement = placed(ledger, ask("d", 12, text=1), 10)
    assert placement.prefill is not None
    assert (placement.decode.cached, placement.prefill.cached) == (2, 2)
    ledger.check_integrity()


def test_a_short_remainder_is_computed_where_it_is_cached(ledger: Ledger) -> None:
    decode = Side(ledger, info("d", blocks=32))
    Side(ledger, info("p", "prefill", blocks=32))
    decode.speed(1000, 0, transfer=0.005)
    assert placed(ledger, ask("a", 60, text=1)).reason == "long"
    ledger.revoke(RequestId("a"), 0)
    decode.beat(1)
    decode.serve(ask("b", 60, text=1), 1)
    decode.speed(1000, 1, transfer=0.005)
    placement = placed(ledger, ask("c", 61, text=1), 1)
    assert (placement.prefill, placement.decode.cached, placement.reason) == (None, 15, "short")


def test_the_replica_that_has_it_is_chosen(ledger: Ledger, decode: Side) -> None:
    Side(ledger, info("e", blocks=32))
    decode.serve(ask("a", 20, text=1, exclude=("e",)))
    assert placed(ledger, ask("b", 20, text=2)).decode.replica == "e"
    ledger.revoke(RequestId("b"), 0)
    assert placed(ledger, ask("c", 20, text=1)).decode.replica == "d"


def test_choices_share_a_hit_too(ledger: Ledger, decode: Side) -> None:
    first = decode.serve(ask("a", 8, text=1))
    again = ask("b", 9, text=1, n=3)
    placement = placed(ledger, again)
    assert (placement.decode.cached, [fork.cached for fork in placement.forks]) == (2, [2, 2])
    assert {lease.blocks[:2] for lease in placement.leases} == {first.blocks[:2]}
    decode.open(placement.decode, again)
    for fork in placement.forks:
        decode.tags.fork(fork, placement.decode.generation)
    assert decode.tags.held == ledger.counts(decode.info.id).leased == 5
    for lease in placement.leases:
        decode.release(lease.generation)
    assert ledger.counts(decode.info.id).cached == 2


def test_a_fork_that_is_released_first_tells_what_its_siblings_share(ledger: Ledger, decode: Side) -> None:
    both = ask("a", 4, 4, text=1, n=2)
    placement = placed(ledger, both)
    decode.open(placement.decode, both)
    decode.tags.fork(placement.forks[0], placement.decode.generation)
    decode.tags.fill(placement.decode.generation, keys_of((1,) * 4))
    decode.release(placement.forks[0].generation)  # before any report
    ledger.check_integrity()
    hit = placed(ledger, ask("b", 5, text=1)).decode
    assert (hit.cached, hit.blocks[0]) == (1, placement.decode.blocks[0])
    decode.open(hit, ask("b", 5, text=1))


# -- what is forgotten


def test_free_blocks_are_taken_before_cached_ones(ledger: Ledger, decode: Side) -> None:
    decode.serve(ask("a", 12, text=1))
    free = placed(ledger, ask("b", 19)).decode
    assert not set(free.blocks) & set(decode.known)
    assert (texts(decode), ledger.evicted) == ({1}, 0)


def test_the_least_recently_used_goes_first(ledger: Ledger, decode: Side) -> None:
    """Of each text one block is full and two are taken: the eighth leaves no free one."""
    for text in (1, 2, 3, 4, 1, 5, 6, 7, 8):
        decode.serve(ask("r", 7, text=text))
    assert (texts(decode), ledger.evicted) == ({1, 3, 4, 5, 6, 7, 8}, 1)
    decode.serve(ask("r", 7, text=9))
    assert (texts(decode), ledger.evicted) == ({1, 4, 5, 6, 7, 8, 9}, 2)


def test_the_end_of_a_prefix_goes_before_its_beginning(ledger: Ledger, decode: Side) -> None:
    lease = decode.serve(ask("a", 24, 24, text=1))
    for gone, name in enumerate("bcd", 1):
        decode.beat(1)
        placed(ledger, ask(name, 12 + 4 * (gone - 1), 12 + 4 * (gone - 1)))
        assert set(decode.known) == set(lease.blocks[: 6 - gone])
        ledger.revoke(RequestId(name), 1)
        decode.beat(1)  # never opened: it ends


def test_what_is_used_is_never_forgotten(ledger: Ledger, decode: Side) -> None:
    decode.serve(ask("a", 16, 16, text=1))
    reader = placed(ledger, ask("b", 9, text=1)).decode
    decode.open(reader, ask("b", 9, text=1))
    decode.beat(1)  # 2 blocks read, 1 written, 1 in the reserve, 2 cached, 2 free
    counts = ledger.counts(decode.info.id)
    assert (counts.free, counts.cached, counts.leased) == (2, 2, 4)
    assert ledger.admit(ask("c", 17), 1) is None
    placed(ledger, ask("c", 15), 1)
    assert set(decode.known) == set(reader.blocks[:2])


def test_a_hit_is_not_forgotten_for_the_rest_of_the_same_prompt(ledger: Ledger, decode: Side) -> None:
    decode.serve(ask("a", 16, 16, text=1))
    assert ledger.admit(ask("b", 32, 32, text=1), 0) is not None
    decode.beat(1)
    ledger.expire(10)
    decode.serve(ask("c", 16, 16, text=1), 10)
    assert ledger.counts(decode.info.id).total == 8


def test_growth_takes_cached_blocks_too(ledger: Ledger) -> None:
    decode = Side(ledger, info("d", blocks=4))
    decode.serve(ask("a", 12, 12, text=1))
    lease = placed(ledger, ask("b", 3)).decode
    decode.tags.open(lease)
    assert ledger.counts(decode.info.id).cached == 3
    decode.beat(1)
    assert (ledger.counts(decode.info.id).cached, ledger.evicted) == (2, 1)
    drawn = decode.tags.draw(lease.generation, 1)
    assert drawn is not None
    assert decode.tags.key(drawn[0]) is None
    decode.beat(2)
    assert not set(drawn) & set(decode.known)


def test_what_is_cached_leaves_room_for_what_the_reserve_lacks(ledger: Ledger) -> None:
    decode = Side(ledger, info("d", blocks=4))
    leases = [placed(ledger, ask(name, 4, text=i)).decode for i, name in enumerate("ab", 1)]
    for i, lease in enumerate(leases, 1):
        decode.open(lease, ask("", 4, text=i))
        decode.tags.fill(lease.generation, keys_of((i,) * 4))
    decode.beat(1)
    assert decode.status("shortage") == 2
    decode.release(leases[0].generation)
    assert ledger.counts(decode.info.id).cached == 1
    assert ledger.admit(ask("c"), 1) is None


# -- duplicates


def test_of_equal_blocks_one_is_known_and_the_other_is_free(ledger: Ledger, decode: Side) -> None:
    """Two that came before the first was whole computed the same."""
    asks = [ask(name, 8, 8, text=1) for name in "ab"]
    leases = [placed(ledger, each).decode for each in asks]
    for each, lease in zip(asks, leases, strict=True):
        decode.open(lease, each)
        decode.tags.fill(lease.generation, keys_of((1,) * 8))
    for lease in leases:
        decode.release(lease.generation)
    assert set(decode.known) == set(leases[0].blocks)
    counts = ledger.counts(decode.info.id)
    assert (counts.free, counts.cached) == (6, 2)
    assert placed(ledger, ask("c", 9, text=1)).decode.blocks[:2] == leases[0].blocks


# -- what the ledger believes, and what is there


def test_a_restarted_manager_learns_what_is_cached(ledger: Ledger, decode: Side) -> None:
    decode.serve(ask("a", 12, text=1))
    decode.beat(1)
    before = decode.known
    decode.ledger = restarted = Ledger(2, LOCAL)
    assert decode.beat(2) == ()
    decode.register(2)
    assert decode.known == before
    assert restarted.counts(decode.info.id) == ledger.counts(decode.info.id)
    assert placed(restarted, ask("b", 13, text=1), 3).decode.cached == 3
    restarted.check_integrity()


def test_a_report_about_changes_the_ledger_has_missed_makes_the_replica_register(ledger: Ledger, decode: Side) -> None:
    """A registration that was long on its way comes after the replica was called dead."""
    late = decode.tags.report(0, complete=True)
    decode.serve(ask("a", 12, text=1))
    decode.beat(1)
    ledger.report_state(decode.info.id, "dead", 2)
    ledger.register(decode.info, late, 2)
    report = decode.tags.report(3)
    assert report.since > late.version
    reply = ledger.heartbeat(report, 3)
    assert reply == Reply(report.beat, known=False)
    decode.tags.apply(reply)
    decode.register(4)
    assert len(decode.known) == 3


def test_a_release_that_a_report_overtook_still_tells_what_is_cached(ledger: Ledger, decode: Side) -> None:
    """Opened and closed between two reports: the second takes the lease's blocks for not written yet."""
    first = ask("a", 4, 4, text=1)
    lease = placed(ledger, first).decode
    decode.open(lease, first)
    decode.tags.fill(lease.generation, keys_of((1,) * 4))
    release = decode.tags.close(lease.generation)
    assert release is not None
    decode.beat(1)
    assert (decode.known, decode.status("offered")) == ({}, 1)
    ledger.release(release)
    assert set(decode.known) == set(lease.blocks)
    assert ledger.counts(decode.info.id).cached == 1


def test_the_release_of_a_lease_that_has_ended_tells_nothing(ledger: Ledger, decode: Side) -> None:
    first = ask("a", 4, 4, text=1)
    lease = placed(ledger, first).decode
    decode.open(lease, first)
    decode.tags.fill(lease.generation, keys_of((1,) * 4))
    release = decode.tags.close(lease.generation)
    assert release is not None
    ledger.expire(10)
    for _ in range(8):  # every block is written by others, and nothing of them is whole
        other = placed(ledger, ask("b", 4, 4), 10).decode
        decode.tags.open(other)
        decode.release(other.generation)
    ledger.release(release)
    assert decode.known == {}


def test_an_expired_offer_that_opens_late_wins_over_the_hit(ledger: Ledger, decode: Side) -> None:
    """What the ledger gave to read meanwhile is refused, and the next report puts it right."""
    late = placed(ledger, ask("late", 4, 4)).decode
    ledger.expire(10)
    for name in "abcdefgh":
        decode.serve(ask(name, 4, 4, text=1 + "abcdefgh".index(name)), 10)
    wanted = next(text for text in range(1, 9) if keys_of((text,) * 4)[0] == decode.known.get(late.blocks[0]))
    with pytest.raises(StalePlacement):
        decode.tags.open(late)
    hit = placed(ledger, ask("hit", 5, text=wanted), 11).decode
    assert hit.cached == 1
    decode.open(hit, ask("hit", 5, text=wanted))
