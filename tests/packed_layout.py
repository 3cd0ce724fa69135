"""The packed layout of a cache by its definition, number by number: the oracle of all that reads or writes one."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = {torch.float32: 1, torch.bfloat16: 2}  # numbers in a word, of the dtypes that can be packed


def packed(kv: Tensor) -> Tensor:
    """A packed copy of a plain layer [num_blocks, 2, HK, P, D], with a gap between its blocks as in a real cache."""
    p, d = torch.meshgrid(torch.arange(kv.shape[3]), torch.arange(kv.shape[4]), indexing="ij")
    w, block_size, head_dim = WORD[kv.dtype], kv.shape[3], kv.shape[4]
    places = (d // w * block_size * w + p * w + d % w, p // w * head_dim * w + d * w + p % w)  # of k[p, d], of v[p, d]
    cache = kv.new_full((kv.shape[0], 2, *kv.shape[1:]), torch.nan)
    for half, place in enumerate(places):
        cache[:, 1, half].flatten(-2)[..., place.flatten()] = kv[:, half].flatten(-2)
    return cache[:, 1]
