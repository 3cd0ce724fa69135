"""What is drawn, against the distribution each option asks for, written out here in numpy and plain words.

20,000 draws of one token, each with a seed of its own; the seeds are fixed, so no run differs from another.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bifolio.protos.messages import Sampling
from bifolio.replicas.penalties import SamplingState
from bifolio.replicas.sampler import sample_tokens

V, DRAWS = 40, 10_000
PROMPT, ANSWER = (3, 5, 5, 9), (9, 11, 11, 2, 11)
LOGITS = np.random.default_rng(1).normal(0, 1.5, V).astype(np.float32)
LOGITS[[2, 3, 5, 9, 11]] = (1.9, -1.0, 2.5, 1.5, 2.0)  # seen before: positive and negative
LOGITS[[20, 21]] = LOGITS[22]  # and some that are equal

Array = npt.NDArray[np.float64]

OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.8},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.6},
    "frequency below 0": {"frequency_penalty": -0.4},
    "logit_bias": {"logit_bias": ((5, -100.0), (7, 2.5), (30, -0.5))},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (5, 11)},
    "everything": {
        "temperature": 1.3,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.03,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": ((7, 1.5), (12, -2.0)),
        "min_tokens": 9,
        "stop_token_ids": (0, 5),
    },
}


def distribution(s: Sampling) -> Array:
    x = LOGITS.astype(np.float64)
    for id in {*PROMPT, *ANSWER}:
        x[id] = x[id] / s.repetition_penalty if x[id] > 0 else x[id] * s.repetition_penalty
    for id, count in Counter(ANSWER).items():
        x[id] -= s.presence_penalty + s.frequency_penalty * count
    for id, bias in s.logit_bias:
        x[id] += bias
    if len(ANSWER) < s.min_tokens:
        x[list(s.stop_token_ids)] = -np.inf
    p = np.exp(x / s.temperature)
    p /= p.sum()
    order = sorted(range(V), key=lambda id: (-p[id], id))
    kept = order[: s.top_k] if s.top_k else order
    nucleus, share = [], 0.0
    for id in kept:
        nucleus.append(id)
        share += p[id] / p[kept].sum()
        if share >= s.top_p:
            break
    chosen = [id for id in nucleus if p[id] >= s.min_p * p.max()]
    out = np.zeros(V)
    out[chosen] = p[chosen] / p[chosen].sum()
    return out


def chi_square(counts: Array, shares: Array) -> float:
    """The probability of counts at least as far off. Bins with less than 5 expected are taken together."""
    expected = shares * counts.sum()
    few = (expected < 5) & (expected > 0)
    wanted, got = expected[expected >= 5], counts[expected >= 5]
    if expected[few].sum() >= 5:
        wanted, got = np.append(wanted, expected[few].sum()), np.append(got, counts[few].sum())
    statistic = float(((got - wanted) ** 2 / wanted).sum())
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2.0), torch.tensor(statistic / 2)))


def draw(**options: Any) -> Array:
    turns = [SamplingState(Sampling(99, seed=seed, **options), PROMPT + ANSWER, len(PROMPT)) for seed in range(DRAWS)]
    ids = [id for id, _ in sample_tokens(torch.from_numpy(LOGITS).repeat(DRAWS, 1), turns)]
    return np.bincount(ids, minlength=V).astype(np.float64)


def test_no_option_draws_from_the_softmax() -> None:
    counts = draw()
    assert chi_square(counts, distribution(Sampling(99))) > 0.001


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_draws_follow_the_distribution_asked_for(options: dict[str, Any]) -> None:
    wanted, plain = distribution(Sampling(99, **options)), distribution(Sampling(99))
    counts = draw(**options)
    assert not counts[wanted == 0].any()
    assert chi_square(counts, wanted) > 0.001
    if not np.allclose(wanted, plain):
        assert chi_square(counts, plain) < 1e-9  # the test would notice an option that does nothing


def test_a_shift_of_three_percent_would_be_noticed() -> None:
    shares = distribution(Sampling(99))
    shifted = shares.copy()
    shifted[np.argsort(shares)[-2:]] += (-0.03, 0.03)
    assert chi_square(np.round(shifted * DRAWS), shares) < 0.001
