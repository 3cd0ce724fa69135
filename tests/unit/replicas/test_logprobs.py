"""Log-probabilities against torch's log_softmax, and to the bit against themselves in other company."""

from __future__ import annotations

import pytest
import torch

from bifolio.replicas.logprobs import token_logprobs

V = 1003  # odd: rows of a batch begin at every alignment
LOGITS = torch.randn(33, V, generator=torch.Generator().manual_seed(2)) * 4
TOKENS = torch.randint(0, V, (33,), generator=torch.Generator().manual_seed(3)).tolist()
TOPS = [i % 21 for i in range(33)]


def test_they_are_the_log_softmax() -> None:
    reference = LOGITS.double().log_softmax(1)
    for row, token, top, got in zip(reference, TOKENS, TOPS, token_logprobs(LOGITS, TOKENS, TOPS), strict=True):
        assert got.token == token
        assert got.logprob == pytest.approx(float(row[token]), abs=1e-12)
        values, ids = row.sort(descending=True, stable=True)
        assert [id for id, _ in got.top] == ids[:top].tolist()
        assert [value for _, value in got.top] == pytest.approx(values[:top].tolist(), abs=1e-12)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(threads: int) -> None:
    """Also with more logits than torch adds up in one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for logits in (LOGITS, torch.randn(5, 50_001, generator=torch.Generator().manual_seed(4))):
            n = len(logits)
            tokens, tops = TOKENS[:n], TOPS[:n]
            together = token_logprobs(logits, tokens, tops)
            alone = [token_logprobs(logits[i][None], [tokens[i]], [tops[i]])[0] for i in range(n)]
            strided = token_logprobs(torch.cat([logits, logits], 1)[:, : logits.shape[1]], tokens, tops)
            backwards = token_logprobs(logits.flip(0), tokens[::-1], tops[::-1])[::-1]
            assert together == alone == strided == backwards
    finally:
        torch.set_num_threads(before)


def test_equal_logits_come_by_id_at_the_border_and_within() -> None:
    row = torch.zeros(1, 300)
    row[0, [250, 40, 120]] = torch.tensor([2.0, 2.0, 3.0])
    for count, ids in ((1, [120]), (2, [120, 40]), (3, [120, 40, 250]), (6, [120, 40, 250, 0, 1, 2])):
        (got,) = token_logprobs(row, [299], [count])
        assert [id for id, _ in got.top] == ids
        assert token_logprobs(row.repeat(2, 1), [299, 0], [count, 20])[0] == got


def test_a_token_among_the_most_probable_has_one_figure() -> None:
    token = int(LOGITS[0].argmax())
    (got,) = token_logprobs(LOGITS[:1], [token], [3])
    assert got.top[0] == (token, got.logprob)


def test_a_vocabulary_smaller_than_what_is_asked_for() -> None:
    (got,) = token_logprobs(torch.tensor([[1.0, 1.0, 2.0]]), [0], [20])
    assert [id for id, _ in got.top] == [2, 0, 1]


def test_large_logits_do_not_overflow() -> None:
    (got,) = token_logprobs(torch.tensor([[3e37, -3e37, 3e37]]), [0], [1])
    assert got.logprob == pytest.approx(-0.6931471805599453)


def test_no_rows() -> None:
    assert token_logprobs(LOGITS[:0], [], []) == []
