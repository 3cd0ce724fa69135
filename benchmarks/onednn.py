"""The strongest rival of our linears: oneDNN by way of torch, bfloat16 with weights packed before."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

_THERE = torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
HINTS = (1, 32) if _THERE else ()  # rows that weights may be packed for; none where this CPU has no such code


def pack(weight: Tensor, rows: int) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, rows))


def linear(x: Tensor, packed: Tensor) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
