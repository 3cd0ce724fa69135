"""The public functions: what each takes, returns and mutates, its checks, and where a backend is chosen.

A backend is the native kernels (`bindings.py`, for float32 and bfloat16 on CPUs), Triton's (`triton_*.py`, on GPUs) or
torch (`torch_*.py`); `backend.py` says which. What differs between them is speed and rounding, never a contract.

`exact` promises more, on CPUs: a row's result has the same bits whatever stands beside it and however its sequence was
cut into steps. The native kernels always keep that; torch does for float32, once `self_check` has passed in this
process. Triton does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks, torch_exact, torch_twins
from .backend import native_for, twins_for
from .layout import Layout
from .plan import AttentionPlan


def paged_attention(
    q: Tensor,
    kv: Tensor,
    plan: AttentionPlan,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    exact: bool = False,
    layout: Layout = "plain",
) -> Tensor:
    """Attention of B sequences, prompt chunks and single tokens alike, over their blocks of one layer's
    cache.

    q            [T, HQ, D]  float32, bfloat16 or float16; rows of a sequence are its last positions, in order
    kv           [num_blocks, 2, HK, P, D]  K is kv[:, 0], V kv[:, 1]; a view; q's dtype, or float8_e4m3fn
    plan         of these sequences, from `plan`, on q's device
    causal       row i of a sequence with n rows and m keys sees keys 0 .. m - n + i; otherwise it sees all m
    window       a row sees only the last `window` of those keys, itself included; needs causal
    softcap      scores become softcap * tanh(score / softcap)
    sinks        [HQ]  float; a score per head that takes weight in the softmax and adds no value
    k_scale, v_scale  what a float8 cache's K and V are multiplied by; ignored with any other cache
    scale        of the scores; None is D ** -0.5
    out          [T, HQ, D] of q's dtype, filled and returned; None allocates it
    lse          float32 [T, HQ], filled with the natural logarithm of each row's softmax denominator
    exact        without softcap, sinks, lse and float8; in torch float32 alone
    layout       of kv: packed for bfloat16 and float32 caches alone, see `layout.py`

    The softmax is float32. A row that sees no key gives 0 and lse -inf (with a sink: the sink). Slots at or
    past a sequence's length, and before every row's window, have no influence whatever they hold. A
    sequence's result is the same alone and in any batch; in Triton but for rounding, unless the plan is
    batch_invariant. HQ is any multiple of HK, D 32 to 256, P 8 to 256,
    powers of two or not. Raises ValueError for a wrong shape, dtype, layout or combination, and for blocks that
    are none of kv's or do not cover the keys.

    Native: all but softcap, sinks, lse and float8. Triton: plain layouts alone.
    """
    checks.shape("q", q, (plan.tokens, None, None), "T, HQ, D")
    checks.dtype("q", q, checks.FLOATS)
    checks.rows_contiguous("q", q)
    checks.kv_layer(kv, q.shape[2])
    checks.dtype("kv", kv, (q.dtype, *checks.FLOAT8))
    checks.layout(layout, kv)
    checks.heads(q.shape[1], kv.shape[2])
    plan.check_blocks(kv.shape[0], kv.shape[3])
    checks.same_device(q, kv=kv, block_table=plan.block_table, sinks=sinks, out=out, lse=lse)
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window: {window} with causal={causal}; allowed is at least 1, with causal=True")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap: {softcap}; allowed is more than 0, or None")
    if sinks is not None:
        checks.shape("sinks", sinks, (q.shape[1],), "HQ")
        checks.dtype("sinks", sinks, checks.FLOATS)
    if lse is not None:
        checks.shape("lse", lse, q.shape[:2], "T, HQ")
        checks.dtype("lse", lse, (torch.float32,))
    if out is None:
        out = q.new_empty(q.shape)
    else:
        checks.shape("out", out, q.shape, "T, HQ, D")
        checks.dtype("out", out, (q.dtype,))
    scale = q.shape[2] ** -0.5 if scale is None else scale
    common = softcap is None and sinks is None and lse is None and kv.dtype == q.dtype
    if exact and not common:
        raise ValueError("exact: with softcap, sinks, lse or a float8 cache; allowed is none of them")
    if common and (native := native_for(q)):
        heads = q if _side_by_side(q) else q.contiguous()
        into = out if _side_by_side(out) else torch.empty_like(heads)
        native.paged_attention(heads, kv, plan, causal=causal, window=window, scale=scale, layout=layout, out=into)
        return out if into is out else out.copy_(into)
    twins = twins_for(q)
    if exact:
        checks.exact("q", q, twins is torch_twins)
        torch_exact.paged_attention(q, kv, plan, causal=causal, window=window, scale=scale, out=out, layout=layout)
        return out
    # a scale left over from a float8 configuration must not bend another cache
    scaled = kv.dtype in checks.FLOAT8
    twins.paged_attention(
        q,
        kv,
        plan,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale if scaled and k_scale is not None else 1.0,
        v_scale=v_scale if scaled and v_scale is not None else 1.0,
        scale=scale,
        out=out,
        lse=lse,
        layout=layout,
    )
    return out


def rope_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: Tensor,
    *,
    layout: Layout = "plain",
) -> Tensor:
    """Rotate q and k to their positions, write k and v into the cache, return the rotated q.

    q [T, HQ, D], k and v [T, HK, D]  slices of one fused projection will do; left as they are
    cos, sin   float32 [max_positions, D], from `rope_tables`
    positions  int64 [T], below max_positions
    slots      int64 [T]  block * P + offset where the token's K and V go; -1 writes nothing; no slot twice
    kv         [num_blocks, 2, HK, P, D] of k's dtype, a strided view; MUTATED at the slots
    layout     of kv: packed for bfloat16 and float32 alone, see `layout.py`

    Pairs are (i, i + D/2): x cos + rotate_half(x) sin, in float32, rounded once. Returns [T, HQ, D] of q's
    dtype. Raises ValueError for a wrong shape, dtype or layout, and on CPUs for positions and slots out of range.
    """
    tokens, head_dim = q.shape[0], q.shape[-1]
    checks.kv_layer(kv, head_dim)
    checks.shape("q", q, (tokens, None, head_dim), "T, HQ, D")
    checks.shape("k", k, (tokens, kv.shape[2], head_dim), "T, HK, D")
    checks.shape("v", v, (tokens, kv.shape[2], head_dim), "T, HK, D")
    for name, x in (("q", q), ("k", k), ("v", v), ("kv", kv)):
        checks.dtype(name, x, checks.FLOATS if x is q else (q.dtype,))
    checks.layout(layout, kv)
    if head_dim % 2:
        raise ValueError(f"q: head_dim {head_dim}; allowed is an even one, dims turn in pairs")
    for name, x in (("cos", cos), ("sin", sin)):
        checks.shape(name, x, (None, head_dim), "max_positions, D")
        checks.dtype(name, x, (torch.float32,))
    for name, x in (("positions", positions), ("slots", slots)):
        checks.shape(name, x, (tokens,), "T")
        checks.dtype(name, x, (torch.int64,))
    checks.same_device(q, k=k, v=v, cos=cos, sin=sin, positions=positions, slots=slots, kv=kv)
    checks.places(positions, len(cos), slots, len(kv) * kv.shape[3])
    if native := native_for(q):
        out = torch.empty(q.shape, dtype=q.dtype)
        q, k, v = (x if _side_by_side(x) else x.contiguous() for x in (q, k, v))
        cos, sin, positions, slots = (x.contiguous() for x in (cos, sin, positions, slots))
        native.rope_and_write(q, k, v, cos, sin, positions, slots, kv, layout, out)
        return out
    rotated: Tensor = twins_for(q).rope_and_write(q, k, v, cos, sin, positions, slots, kv, layout=layout)
    return rotated


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, new residual): the new residual is residual + x, or x itself where residual is None.

    x, residual [T, H]; weight [H]; one float dtype. normed = r / sqrt(mean(r^2) + eps) * weight (Zhang and
    Sennrich 2019), with the mean in float32. Mutates nothing. Raises ValueError for a wrong shape or dtype.
    """
    checks.shape("x", x, (None, None), "T, H")
    checks.shape("weight", weight, x.shape[-1:], "H")
    checks.dtype("x", x, checks.FLOATS)
    checks.dtype("weight", weight, (x.dtype,))
    if residual is not None:
        checks.shape("residual", residual, x.shape, "T, H")
        checks.dtype("residual", residual, (x.dtype,))
    checks.same_device(x, weight=weight, residual=residual)
    if native := native_for(x):
        out = torch.empty(x.shape, dtype=x.dtype)
        total = x if residual is None else residual.clone(memory_format=torch.contiguous_format)
        native.rms_norm(x.contiguous(), None if residual is None else total, weight.contiguous(), eps, out)
        return out, total
    normed, grown = twins_for(x).rms_norm(x, residual, weight, eps)
    return normed, grown


def silu_mul(gate_up: Tensor, *, exact: bool = False) -> Tensor:
    """silu(gate) * up (SwiGLU, Shazeer 2020) of gate_up [T, 2I], gate in the first half: [T, I], same dtype.

    The sigmoid is float32. Mutates nothing. Raises ValueError for an odd last axis.
    """
    checks.shape("gate_up", gate_up, (None, None), "T, 2I")
    checks.dtype("gate_up", gate_up, checks.FLOATS)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: shape {list(gate_up.shape)}; allowed is an even last axis, gate and up")
    if native := native_for(gate_up):
        out = torch.empty(len(gate_up), gate_up.shape[-1] // 2, dtype=gate_up.dtype)
        native.silu_mul(gate_up.contiguous(), out)
        return out
    twins = twins_for(gate_up)
    if exact:
        checks.exact("gate_up", gate_up, twins is torch_twins)
        return torch_exact.silu_mul(gate_up)
    activated: Tensor = twins.silu_mul(gate_up)
    return activated


def sample(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """Choose one token per row: int64 [B], on the CPU wherever the logits are.

    logits float32 [B, V]; temperature, top_p, min_p float [B]; top_k integer [B]; uniforms float64 [B] in [0, 1)

    temperature 0 takes the largest logit. Otherwise, of softmax(logits / temperature): the top_k most
    probable tokens (0 keeps all), then of those, by their share, the smallest set that reaches top_p, then
    of those the tokens at least min_p times as probable as the most probable one, then the kept token at
    which the cumulative probability in ascending token id first exceeds the row's uniform. The order is that
    of Hugging Face's warpers. min_p comes last because it looks at no sum: before top_p it would change the
    shares, and with them the nucleus.

    Of equal probabilities the lower id is kept. Probabilities are float64. A row's answer depends on that row
    alone. A logit of -inf is never drawn. Mutates nothing. Raises ValueError for a wrong shape or dtype, and
    for a row that holds NaN or +inf, or only -inf.
    """
    checks.shape("logits", logits, (None, None), "B, V")
    checks.dtype("logits", logits, (torch.float32,))
    if logits.shape[1] == 0:
        raise ValueError(f"logits: shape {list(logits.shape)}; allowed is a vocabulary of at least 1")
    columns = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "uniforms": uniforms}
    for name, x in columns.items():
        checks.shape(name, x, logits.shape[:1], "B")
    checks.dtype("uniforms", uniforms, (torch.float64,))
    ids: Tensor = twins_for(logits).sample(logits, temperature, top_p, top_k, min_p, uniforms)
    return ids


def _side_by_side(x: Tensor) -> bool:
    """Whether the heads of a row of x [T, n, D] follow each other, as the native kernels read them."""
    return x.stride(1) == x.shape[2] and x.stride(2) == 1
