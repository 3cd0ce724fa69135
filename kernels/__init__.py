"""Attention, linears and small ops: tensors in, tensors out. Imports nothing of ours.

`ops.py`, `linear.py` and `layer.py` hold the public functions: their contracts and their checks. `backend.py` says
what computes them: the native kernels (`bindings.py`, C++ in `native/`) or plain torch (`torch_*.py`), which is the
oracle of every other backend, and what runs where none does.
"""

from .backend import Backend, runs_triton, use, using
from .layer import DecoderLayers, LayerWeights, Step, decoder_layer, decoder_layers
from .layout import Layout, kv_layout
from .linear import LinearWeights, Quantization, linear, pack_linear
from .ops import paged_attention, rms_norm, rope_and_write, sample, silu_mul
from .plan import AttentionPlan, plan
from .rope_tables import rope_tables
from .self_check import self_check
from .static_plan import StaticPlan

__all__ = [
    "AttentionPlan",
    "Backend",
    "DecoderLayers",
    "LayerWeights",
    "Layout",
    "LinearWeights",
    "Quantization",
    "StaticPlan",
    "Step",
    "decoder_layer",
    "decoder_layers",
    "kv_layout",
    "linear",
    "pack_linear",
    "paged_attention",
    "plan",
    "rms_norm",
    "rope_and_write",
    "rope_tables",
    "runs_triton",
    "sample",
    "self_check",
    "silu_mul",
    "use",
    "using",
]
