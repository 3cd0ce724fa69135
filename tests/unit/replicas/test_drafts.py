"""What a history foretells, and how much of it is worth computing: no model, no clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.replicas import drafts
from bifolio.replicas.drafts import FIRST_RATES, Lookup, RowCost, worth


def followed(tokens: list[int], grown: int = 0) -> Lookup:
    """The last `grown` tokens come one by one."""
    lookup = Lookup()
    for end in range(len(tokens) - grown, len(tokens) + 1):
        lookup.follow(tokens[:end])
    return lookup


def test_what_followed_the_last_three_tokens_is_guessed():
    tokens = [1, 2, 3, 4, 5, 6, 9, 3, 4, 9, 1, 2, 3]
    assert followed(tokens).guess(tokens, 3) == (4, 5, 6)


def test_two_tokens_are_looked_for_where_three_were_never_here():
    tokens = [1, 2, 3, 4, 5, 9, 2, 3]
    lookup = followed(tokens)
    assert lookup.guess(tokens, 2) == (4, 5)
    assert lookup.odds(1) == [FIRST_RATES[0]]


def test_of_several_places_the_latest_counts():
    tokens = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]
    assert followed(tokens).guess(tokens, 1) == (5,)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4, 5]])
def test_nothing_is_foretold_by_what_was_never_here(tokens: list[int]) -> None:
    assert not followed(tokens).odds(8)


def test_a_text_that_repeats_up_to_its_end_is_taken_to_go_on_so():
    tokens = [7, 1, 2, 1, 2, 1]
    assert followed(tokens).guess(tokens, 5) == (2, 1, 2, 1, 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=60), st.integers(0, 60))
def test_a_history_taken_in_at_once_is_that_taken_in_one_by_one(tokens: list[int], grown: int) -> None:
    """But for the guesses that were judged on the way, and the place that is followed as long as it is right."""
    some, each = followed(tokens), followed(tokens, min(grown, len(tokens)))
    for n, places in some._places.items():
        assert (places == each._places[n]).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(0, 80))
def test_a_guess_follows_what_is_the_same_before_it(tokens: list[int], grown: int) -> None:
    lookup = followed(tokens, min(grown, len(tokens) - 1))
    if lookup._next:
        same = lookup._same
        assert same >= 2
        assert tokens[-same:] == tokens[lookup._next - same : lookup._next]


def test_places_that_collide_are_forgotten_and_nothing_is_taken_for_another(monkeypatch):
    monkeypatch.setattr(drafts, "SLOTS", 4)
    rng = random.Random(5)
    tokens = [rng.randrange(50) for _ in range(400)]
    lookup = Lookup()
    for end in range(1, len(tokens) + 1):
        lookup.follow(tokens[:end])
        if lookup._next:
            assert tokens[lookup._next - 2 : lookup._next] == tokens[end - 2 : end]
    assert all(len(places) == 4 for places in lookup._places.values())


def test_guesses_that_are_right_become_likelier_and_wrong_ones_less():
    """None of them was computed."""
    good = followed([1, 2, 3, 4, 5, 6] * 20, grown=80)
    bad = [token for i in range(40) for token in (1, 2, 100 + i)]
    assert good.odds(1)[0] > 0.95
    assert followed([*bad, 1, 2], grown=80).odds(1)[0] < 0.1


def test_odds_fall_with_every_guess():
    odds = followed([1, 2, 3, 4, 5, 1, 2, 3]).odds(8)
    assert odds == sorted(odds, reverse=True)
    assert 0 < odds[-1] < odds[0] < 1


SURE, LIKELY, NO = [0.99] * 8, [0.5, 0.25, 0.1], [0.01]


def test_a_guess_is_computed_where_it_brings_more_than_its_row_costs():
    assert worth([LIKELY], 1, 64, share=0.05) == [3]
    assert worth([LIKELY], 1, 64, share=0.2) == [1]
    assert worth([LIKELY], 1, 64, share=0.5) == [0]
    assert worth([NO, []], 2, 64, share=0.05) == [0, 0]


def test_the_more_sequences_share_a_step_the_surer_a_guess_must_be():
    assert worth([LIKELY] * 8, 8, 64, share=0.15) == [0] * 8
    assert worth([SURE] + [LIKELY] * 7, 8, 64, share=0.15) == [8] + [0] * 7


def test_a_step_has_no_more_rows_than_it_may():
    assert sum(worth([SURE] * 4, 4, 10, share=0.01)) == 6
    assert worth([SURE] * 4, 4, 3, share=0.01) == [0] * 4


def test_rows_that_cost_nothing_are_all_taken():
    assert worth([LIKELY, SURE], 2, 64, share=0.0) == [3, 8]


def test_what_a_row_costs_is_learned_from_steps_that_follow_each_other():
    cost = RowCost()
    for step in range(60):
        rows = 1 + 4 * (step % 2)
        cost.add(rows, 0.02 * (1 + 0.06 * (rows - 1)))
    assert cost.share == pytest.approx(0.06)


def test_rows_beside_others_make_a_step_no_longer_than_asked():
    assert RowCost(0.1).rows_within(1.5, 1) == 5
    assert RowCost(0.1).rows_within(1.5, 11) == 10  # a step of eleven rows takes twice as long as one of one
    assert RowCost(0.1).rows_within(1.0, 8) == 1
    assert RowCost(0.0).rows_within(1.5, 8) > 100_000


def test_one_step_that_was_held_up_changes_little():
    cost = RowCost()
    for step in range(60):
        rows = 1 + 4 * (step % 2)
        cost.add(rows, 5.0 if step in (40, 47) else 0.02 * (1 + 0.06 * (rows - 1)))
    assert cost.share == pytest.approx(0.06)


def test_steps_of_equal_rows_tell_nothing():
    cost = RowCost()
    for seconds in (1.0, 2.0, 3.0) * 20:
        cost.add(4, seconds)
    assert cost.share == RowCost.FIRST
