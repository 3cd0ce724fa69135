"""From logits to log-probabilities: of given tokens, and of the most probable ones at the same place.

Knows nothing about sampling, the model or requests. A row's figures have the same bits alone and in any company: what
is summed is summed row by row, by numpy, whose order of sums depends on the length alone, and in one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bifolio.protos.messages import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """For each row: the natural log-probability of tokens[row], and those of the tops[row] most probable tokens.

    logits  float32 [n, vocabulary], on the CPU, of the model itself: nothing added, divided or masked

    Computed in float64. Of equal logits the lower id comes first.
    """
    assert len(logits) == len(tokens) == len(tops)
    if not tokens:
        return []
    most = max(tops)
    # one more than asked for: it tells whether the last one has an equal that topk, which knows no ids, left out
    values, ids = logits.topk(min(most + 1, logits.shape[1])) if most else (logits[:, :0], logits[:, :0].long())
    chosen = logits.gather(1, torch.tensor(tokens, dtype=torch.int64)[:, None]).squeeze(1)
    out = []
    columns = (tokens, chosen.tolist(), tops, values.tolist(), ids.tolist())
    for row, token, logit, top, row_values, row_ids in zip(logits, *columns, strict=True):
        x = row.numpy().astype(np.float64)
        peak = float(x.max())
        x -= peak
        total = math.log(np.exp(x, out=x).sum())
        best = tuple((id, value - peak - total) for value, id in _largest(row, top, row_values, row_ids))
        out.append(TokenLogprobs(token, logit - peak - total, best))
    return out


def _largest(row: Tensor, count: int, values: list[float], ids: list[int]) -> list[tuple[float, int]]:
    """(logit, id) of the `count` largest, falling. values[i] is the logit of ids[i], more of them than `count` unless
    the vocabulary ends."""
    if 0 < count < len(values) and values[count] == values[count - 1]:
        border = values[count - 1]
        pairs = [(value, id) for value, id in zip(values, ids, strict=True) if value > border]
        equal = (row == border).nonzero().squeeze(1)[: count - len(pairs)].tolist()
        pairs += [(border, id) for id in equal]
    else:
        pairs = list(zip(values[:count], ids[:count], strict=True))
    return sorted(pairs, key=lambda pair: (-pair[0], pair[1]))
