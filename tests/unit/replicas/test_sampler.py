from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bifolio.protos.messages import Sampling
from bifolio.replicas.penalties import SamplingState
from bifolio.replicas.sampler import sample_tokens

LOGITS = torch.randn(6, 500, generator=torch.Generator().manual_seed(1)) * 2
EVERYTHING: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 200,
    "min_p": 0.001,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": ((3, 2.0), (90, -100.0)),
    "min_tokens": 9,
    "stop_token_ids": (7, 8),
    "logprobs": 5,
}


def turn(position: int = 0, **sampling: Any) -> SamplingState:
    """A prompt of three tokens and an answer of `position`."""
    return SamplingState(Sampling(max_tokens=99, **sampling), [1, 2, 3, *range(100, 100 + position)], 3)


def ids(logits: torch.Tensor, turns: list[SamplingState]) -> list[int]:
    return [id for id, _ in sample_tokens(logits.clone(), turns)]


def test_greedy_rows_take_the_largest_logit() -> None:
    assert ids(LOGITS, [turn(i, temperature=0.0, seed=3) for i in range(6)]) == LOGITS.argmax(1).tolist()


def test_greedy_rows_take_the_largest_logit_of_what_penalties_leave() -> None:
    row = torch.zeros(1, 500)
    row[0, [200, 300]] = 5.0
    assert ids(row, [turn(temperature=0.0)]) == [200]  # of equal ones the lowest
    assert ids(row, [turn(temperature=0.0, logit_bias=((200, -0.1),))]) == [300]
    assert ids(row, [turn(temperature=0.0, logit_bias=((450, 5.5),))]) == [450]


def test_a_row_is_a_function_of_its_logits_parameters_and_history_alone() -> None:
    greedy, odd = {**EVERYTHING, "temperature": 0.0}, {**EVERYTHING, "repetition_penalty": 0.8, "top_k": 3}
    turns = [
        turn(10 + i, seed=i, **options) for i, options in enumerate((EVERYTHING, {}, greedy, odd, {"logprobs": 0}, odd))
    ]
    together = sample_tokens(LOGITS.clone(), turns)
    alone = [sample_tokens(LOGITS[i][None].clone(), [one])[0] for i, one in enumerate(turns)]
    backwards = sample_tokens(LOGITS.flip(0), turns[::-1])[::-1]
    assert together == alone == backwards


def test_only_rows_that_are_penalised_biased_or_masked_change() -> None:
    logits = LOGITS.clone()
    plain = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 2}
    changing: list[dict[str, Any]] = [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1, "logprobs": 3},
        {"frequency_penalty": -0.1},
        {"logit_bias": ((5, 1.0),)},
        {"min_tokens": 5, "stop_token_ids": (9,)},
    ]
    sample_tokens(logits, [turn(4, **plain), *(turn(4, **options) for options in changing)])
    assert [torch.equal(*pair) for pair in zip(logits, LOGITS, strict=True)] == [True] + [False] * 5
    untouched = LOGITS.clone()
    early = turn(0, presence_penalty=1.0, frequency_penalty=1.0, min_tokens=5)  # no answer yet, no stop ids
    late = turn(5, min_tokens=5, stop_token_ids=(9,))
    sample_tokens(untouched[:2], [early, late])
    assert torch.equal(untouched, LOGITS)


def test_logprobs_are_those_of_the_model_whatever_the_request_changes() -> None:
    plain = turn(4, temperature=0.0, logprobs=20)
    ((_, wanted),) = sample_tokens(LOGITS[:1].clone(), [plain])
    ((id, got),) = sample_tokens(LOGITS[:1].clone(), [turn(4, seed=5, **EVERYTHING)])
    assert wanted is not None
    assert got is not None
    assert got.token == id
    assert got.top == wanted.top[:5]
    reference = LOGITS[0].double().log_softmax(0)
    assert got.logprob == pytest.approx(float(reference[id]), abs=1e-12)


def test_no_logprobs_unless_asked_for() -> None:
    (_, none), (_, chosen) = sample_tokens(LOGITS[:2].clone(), [turn(), turn(logprobs=0)])
    assert none is None
    assert chosen is not None
    assert chosen.top == ()


def test_stop_ids_are_not_chosen_before_min_tokens() -> None:
    row = torch.zeros(1, 500)
    row[0, [7, 8]] = 9.0
    impatient = {"temperature": 0.0, "stop_token_ids": (7, 8), "min_tokens": 4, "logit_bias": ((7, 100.0),)}
    assert [ids(row, [turn(position, **impatient)])[0] for position in (0, 3, 4, 5)] == [0, 0, 7, 7]


def test_stop_ids_keep_their_logits_where_nothing_else_is_left() -> None:
    row = torch.full((1, 4), -torch.inf)
    row[0, 1:3] = torch.tensor([1.0, 2.0])
    turns = [turn(temperature=t, stop_token_ids=(1, 2), min_tokens=4) for t in (0.0, 1.0)]
    assert ids(row, turns[:1]) == [2]
    assert ids(row, turns[1:])[0] in (1, 2)


def test_an_id_that_is_biased_twice_gets_both() -> None:
    row = torch.zeros(1, 10)
    sample_tokens(row, [SamplingState(Sampling(1, logit_bias=((4, 1.0), (4, 2.0), (5, -1.0))), [1], 1)])
    assert row.tolist() == [[0, 0, 0, 0, 3, -1, 0, 0, 0, 0]]


def test_seed_and_position_choose_the_number_drawn() -> None:
    flat = torch.zeros(1, 10000)
    drawn = {ids(flat, [turn(p, seed=s)])[0] for s in range(8) for p in range(8)}
    assert len(drawn) > 60


def test_where_the_prompt_ends_is_all_that_tells_a_resumed_request() -> None:
    """The position, and with it number drawn, penalties and min_tokens, is counted from the original prompt."""
    whole = turn(6, seed=1, **EVERYTHING)
    other = whole._replace(prompt_length=whole.prompt_length + 6)
    assert sample_tokens(LOGITS[:1].clone(), [whole]) != sample_tokens(LOGITS[:1].clone(), [other])
    assert (whole.position, other.position) == (6, 0)


def test_a_row_without_a_finite_logit_is_refused() -> None:
    for broken in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(ValueError, match="logits: a row"):
            sample_tokens(torch.full((1, 5), broken), [turn()])


def test_no_rows() -> None:
    assert sample_tokens(LOGITS[:0], []) == []


def test_logits_for_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="logits: 6 rows"):
        sample_tokens(LOGITS, [])


def test_a_seed_of_64_bits_counts_in_all_its_bits() -> None:
    flat = torch.zeros(1, 1 << 16)
    base = turn(seed=0)
    seeds = [1 << bit for bit in range(0, 64, 7)]
    drawn = [ids(flat, [base._replace(sampling=replace(base.sampling, seed=seed))])[0] for seed in seeds]
    assert len(set(drawn)) == len(seeds)
