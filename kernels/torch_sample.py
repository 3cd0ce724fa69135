"""Choosing tokens in plain torch: row by row, so that no row can depend on another.

Only the border of the kept set is searched, among values; the draw then runs over token ids in ascending
order. So the vocabulary is never sorted, and ties have one answer on every machine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sample(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    peaks = logits.amax(dim=-1)
    if not bool(peaks.isfinite().all()):  # no token is the largest, and a search would end past the last id
        raise ValueError("logits: a row that holds NaN or +inf, or nothing but -inf; allowed is none of these")
    ids = _largest(logits)
    columns = (temperature, top_p, top_k, min_p, uniforms)
    for row, (t, p, k, m, u) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if t > 0:
            ids[row] = _draw(logits[row], peaks[row], t, p, k, m, u)
    return ids


def _largest(logits: Tensor) -> Tensor:
    """Of equal values the first. On the CPU."""
    if logits.device.type == "cpu":  # numpy takes a tenth of torch's time
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1).cpu()


def _draw(row: Tensor, peak: Tensor, temperature: float, top_p: float, top_k: int, min_p: float, uniform: float) -> int:
    # the maximum is taken off before the division: a tiny temperature must not overflow
    weights = row.double()
    weights.sub_(peak).div_(temperature).exp_()
    if 0 < top_k < len(weights):
        border = weights.topk(top_k).values[-1]
        weights = _keep(weights, border, top_k)
    if top_p < 1:
        weights = _keep(weights, *_nucleus(weights, top_p))
    if min_p > 0:
        weights = weights * (weights >= min_p)  # the most probable token weighs exactly 1
    cumulative = weights.cumsum(0)
    total = float(cumulative[-1])
    # uniform < 1, but its product may round up to the total: stay below it, so that some token exceeds it
    point = min(uniform * total, math.nextafter(total, 0.0))
    return int(torch.searchsorted(cumulative, point, right=True))


def _nucleus(weights: Tensor, top_p: float) -> tuple[Tensor, int]:
    """(smallest kept weight, how many are kept) of the smallest set whose share of all reaches top_p."""
    needed = top_p * weights.sum()
    count = 64  # usually enough, and finding the largest few costs far less than a sort
    while True:
        count = min(count, len(weights))
        largest = weights.topk(count).values
        sums = largest.cumsum(0)
        if sums[-1] >= needed or count == len(weights):
            kept = min(int(torch.searchsorted(sums, needed)) + 1, count)
            return largest[kept - 1], kept
        count *= 16


def _keep(weights: Tensor, border: Tensor, count: int) -> Tensor:
    """The `count` largest weights, `border` the smallest of them; of those equal to it, the lowest ids."""
    kept = weights >= border
    surplus = int(kept.count_nonzero()) - count
    if surplus:
        kept[(weights == border).nonzero().squeeze(1)[-surplus:]] = False
    return weights * kept
