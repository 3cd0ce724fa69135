"""Attention and small ops: tensors in, tensors out. Imports nothing of ours.

`ops.py` holds the public functions: their contracts, their checks, and the one place where a backend is
chosen. `torch_*.py` are the plain torch versions: oracle for every other backend, and what runs where none
does.
"""

from .ops import linear, paged_attention, rms_norm, rope_and_write, sample, silu_mul
from .plan import AttentionPlan, plan
from .rope_tables import rope_tables
from .self_check import self_check

__all__ = [
    "AttentionPlan",
    "linear",
    "paged_attention",
    "plan",
    "rms_norm",
    "rope_and_write",
    "rope_tables",
    "sample",
    "self_check",
    "silu_mul",
]
