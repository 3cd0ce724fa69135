"""The C interface of kernels/native, by ctypes: tensors become pointers, sizes and strides. `ops.py` has checked them.

A call gives the GIL back while it computes, in as many threads as torch has.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, byref, c_float, c_int32, c_int64, c_void_p, pointer
from typing import Any

import torch
from torch import Tensor

from . import library
from .layout import Layout
from .plan import AttentionPlan

_FLOAT32, _BFLOAT16, _INT8 = range(3)
_TYPES = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16, torch.uint8: _INT8}


class LinearStruct(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scale", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("type", c_int32),
    )


class LayerStruct(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", LinearStruct),
        ("o", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("window", c_int64),
        ("eps", c_float),
    )


class StepStruct(Structure):
    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("first_rows", c_void_p),
        ("lengths", c_void_p),
        ("table", c_void_p),
        ("rows", c_int64),
        ("sequences", c_int64),
        ("table_stride", c_int64),
    )


class _Rows(Structure):
    _fields_ = (("data", c_void_p), ("stride", c_int64), ("heads", c_int64))


class _Cache(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("kv_stride", c_int64),
        ("head_stride", c_int64),
        ("kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("packed", c_int32),
    )


class _Attention(Structure):
    _fields_ = (
        ("q", _Rows),
        ("out", _Rows),
        ("cache", _Cache),
        ("first_rows", c_void_p),
        ("lengths", c_void_p),
        ("table", c_void_p),
        ("sequences", c_int64),
        ("table_stride", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("causal", c_int32),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "set_parallel": (None, (c_void_p,)),
    "packed_bytes": (c_int64, (c_int64, c_int64, c_int32)),
    "pack": (None, (c_void_p, c_int64, c_int64, c_int32, c_void_p)),
    "linear": (
        None,
        (POINTER(LinearStruct), c_int32, c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int32),
    ),
    "rms_norm": (None, (c_int32, c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p, c_int32)),
    "silu_mul": (None, (c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int32)),
    "rope_and_write": (
        None,
        (c_int32, *[POINTER(_Rows)] * 3, *[c_void_p] * 4, c_int64, POINTER(_Cache), POINTER(_Rows), c_int32),
    ),
    "paged_attention": (None, (c_int32, POINTER(_Attention), c_int32)),
    "layers": (
        None,
        (
            *(c_int32, c_int64, POINTER(LayerStruct), POINTER(POINTER(StepStruct)), POINTER(_Cache), c_int64),
            *(c_void_p, c_void_p, c_int32),
        ),
    ),
}


class Native:
    """One library. Tensors are on the CPU, float32 or bfloat16."""

    def __init__(self, isa: str) -> None:
        """Raises ValueError where there is no such library, or this CPU cannot run it."""
        self.isa = isa
        loaded = library.load(isa)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"bifolio_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, f"_{name}", function)
        self._call("set_parallel", library.parallel())

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(self, f"_{name}")(*arguments)

    def pack(self, weight: Tensor) -> Tensor:
        """uint8 [bytes]: weight [N, K] as `linear` reads it. Contiguous; float32, bfloat16, or uint8: int8 + 128."""
        outputs, inputs = weight.shape
        kind = _TYPES[weight.dtype]
        packed = torch.empty(self._call("packed_bytes", inputs, outputs, kind) + 63, dtype=torch.uint8)
        packed = packed[-packed.data_ptr() % 64 :]  # vectors of one cache line each
        self._call("pack", weight.data_ptr(), inputs, outputs, kind, packed.data_ptr())
        return packed

    def linear(self, x: Tensor, weights: LinearStruct, y: Tensor) -> None:
        self._call(
            "linear",
            byref(weights),
            _bf(x),
            y.dtype == torch.float32,
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
            len(x),
            torch.get_num_threads(),
        )

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
        """`residual` is MUTATED: x is added to it."""
        self._call(
            "rms_norm",
            _bf(x),
            x.data_ptr(),
            _pointer(residual),
            weight.data_ptr(),
            eps,
            len(x),
            x.shape[1],
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        rows, width = out.shape
        self._call("silu_mul", _bf(out), gate_up.data_ptr(), rows, width, out.data_ptr(), torch.get_num_threads())

    def rope_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: Tensor,
        layout: Layout,
        out: Tensor,
    ) -> None:
        self._call(
            "rope_and_write",
            _bf(q),
            *(byref(_rows(x)) for x in (q, k, v)),
            *(x.data_ptr() for x in (cos, sin, positions, slots)),
            len(q),
            byref(_cache(kv, layout)),
            byref(_rows(out)),
            torch.get_num_threads(),
        )

    def paged_attention(
        self,
        q: Tensor,
        kv: Tensor,
        plan: AttentionPlan,
        *,
        causal: bool,
        window: int | None,
        scale: float,
        layout: Layout,
        out: Tensor,
    ) -> None:
        table = plan.block_table
        attention = _Attention(
            _rows(q),
            _rows(out),
            _cache(kv, layout),
            plan.cu_q.data_ptr(),
            plan.seq_lens.data_ptr(),
            table.data_ptr(),
            len(table),
            table.stride(0),
            window or 0,
            scale,
            causal,
        )
        self._call("paged_attention", _bf(q), byref(attention), torch.get_num_threads())

    def layers(
        self,
        x: Tensor,
        residual: Tensor,
        weights: Array[LayerStruct],
        steps: Sequence[StepStruct],
        kv: Tensor,
        layout: Layout,
    ) -> None:
        """kv is [num_blocks, layers, 2, HK, P, D]. x and residual are MUTATED."""
        self._call(
            "layers",
            _bf(x),
            len(weights),
            weights,
            (POINTER(StepStruct) * len(steps))(*(pointer(step) for step in steps)),
            byref(_cache(kv[:, 0], layout)),
            kv.stride(1),
            x.data_ptr(),
            residual.data_ptr(),
            torch.get_num_threads(),
        )


def linear_struct(packed: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> LinearStruct:
    """Of tensors that outlive it: `packed` is `weight` packed."""
    outputs, inputs = weight.shape
    return LinearStruct(packed.data_ptr(), _pointer(bias), _pointer(scale), inputs, outputs, _TYPES[weight.dtype])


def step_struct(cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, plan: AttentionPlan) -> StepStruct:
    """Of tensors that outlive it."""
    tensors = (cos, sin, positions, slots, plan.cu_q, plan.seq_lens, plan.block_table)
    table = plan.block_table
    return StepStruct(*(x.data_ptr() for x in tensors), len(positions), len(table), table.stride(0))


def _bf(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _rows(x: Tensor) -> _Rows:
    return _Rows(x.data_ptr(), x.stride(0), x.shape[1])


def _cache(kv: Tensor, layout: Layout) -> _Cache:
    _, _, kv_heads, block_size, head_dim = kv.shape
    return _Cache(kv.data_ptr(), *kv.stride()[:3], kv_heads, block_size, head_dim, layout == "packed")
