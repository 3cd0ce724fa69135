"""Where tensors lie, on a device without memory: what mixes it with the CPU fails there as on a GPU."""

from __future__ import annotations

import torch

from bifolio.kernels import linear, pack_linear
from bifolio.protos.messages import Sampling
from bifolio.replicas.batch import Row, build_batch, host_batch
from bifolio.replicas.penalties import SamplingState, adjust

META = torch.device("meta")


def test_a_batch_lies_on_its_device() -> None:
    rows = [Row([1, 2, 3], 6, [5, 9], targets=[2, 3]), Row([4], 8, [7, 2])]
    batch = build_batch(rows, 8, META)
    tensors = (batch.tokens, batch.positions, batch.slots, batch.logit_rows, batch.scored_rows)
    assert {x.device for x in (*tensors, batch.plan.cu_q, batch.plan.seq_lens, batch.plan.block_table)} == {META}
    assert [len(x) for x in tensors] == [4, 4, 4, 2, 2]
    assert (batch.targets, batch.plan.lengths) == ((2, 3), (9, 9))


def test_a_batch_that_is_moved_in_one_piece_is_cut_again_as_it_was() -> None:
    """As on a GPU, on a second CPU: the device `cpu:0` is not the one that shares the host's memory."""
    rows = [Row([1, 2, 3], 6, [5, 9], targets=[2, 3]), Row([4], 8, [7, 2], want_logits=False)]
    here, moved = build_batch(rows, 8), host_batch(rows, 8).on(torch.device("cpu", 0))
    for name in ("tokens", "positions", "slots", "logit_rows", "scored_rows"):
        assert torch.equal(getattr(here, name), getattr(moved, name)), name


def test_logits_are_adjusted_where_they_are() -> None:
    row = torch.empty(100, device=META)
    sampling = Sampling(9, 1.0, repetition_penalty=1.3, presence_penalty=0.5, logit_bias=((3, 1.0), (7, -2.0)))
    adjust(row, SamplingState(sampling, [1, 2, 3, 3, 4], 2))


def test_logits_keep_the_digits_of_their_sums() -> None:
    x, weight = (torch.empty(n, 64, dtype=torch.bfloat16, device=META) for n in (3, 50))
    for bias in (None, torch.empty(50, dtype=torch.bfloat16, device=META)):
        logits = linear(x, pack_linear(weight, bias), out_dtype=torch.float32)
        assert (logits.device, logits.dtype, logits.shape) == (META, torch.float32, (3, 50))
