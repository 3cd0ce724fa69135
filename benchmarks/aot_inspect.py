"""Compiles a row of `aot.py` and reads what became of it. Runs in a process of its own, without a GPU.

A kernel's wrapper is called with tensors that have no memory, and its launch is caught: so what is compiled has the
constants, dtypes and alignments of a real launch, as Triton's own JIT derives them. Knows the inside of that JIT, and
the text of two disassemblers.
"""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bifolio.kernels.tiles import Phase, Tiles

BLOCK = 64
TOKENS = 333  # neither 1 nor a multiple of 16, for which Triton compiles code of its own
KEYS = 100_000
PROCESSORS = 132
CACHE = 3 * 2**30  # bytes, about: what passes 2 GiB is addressed otherwise on AMD's GPUs


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel by the name of its function, what it is launched with, and how many are to share a processor."""

    kernel: str
    architecture: str
    programs: int
    phase: Phase | None = None
    head_dim: int = 0
    heads: tuple[int, int] = (9, 3)  # query heads, KV heads
    float8: bool = False  # the cache
    size: int = 0  # of a row
    tile: Tiles | None = None

    @property
    def name(self) -> str:
        parts = [self.kernel, self.phase, f"D{self.head_dim}" if self.head_dim else str(self.size)]
        return " ".join(part for part in [*parts, "float8" if self.float8 else None, self.architecture] if part)


@dataclass(frozen=True, slots=True)
class Reading:
    """What was compiled. Loads, copies (asynchronous ones) and stores are instructions that move 128 bits."""

    warps: int
    registers: int  # of a lane
    shared: int  # bytes
    spills: int  # bytes of stack, registers spilled, and instructions that touch local memory
    instructions: int
    loads: int
    copies: int
    stores: int
    multiplies: Mapping[str, int] = field(default_factory=dict)  # by kind: HMMA, HGMMA, UTCMMA, MFMA


class _Launched(Exception):
    """Not an error: how a launch is caught."""

    def __init__(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kernel, self.arguments, self.options = kernel, arguments, options


def version() -> str:
    import triton

    return str(triton.__version__)


def read(row: Row) -> Reading | str:
    """The words are why there is no reading. Whatever is wrong, other rows go on."""
    try:
        compiled = _compile(row)
        return _amd(compiled) if row.architecture.startswith("gfx") else _nvidia(compiled)
    except Exception as error:
        return f"not compiled: {type(error).__name__}: {str(error).strip() or '(no words)'}"[:400]


def _compile(row: Row) -> Any:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    number = row.architecture.removeprefix("sm_")
    target = GPUTarget("cuda", int(number), 32) if number.isdigit() else GPUTarget("hip", row.architecture, 64)
    backend, launched = make_backend(target), _launch(row)
    kernel = launched.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, special, options = bind(*launched.arguments, **launched.options)
    options, signature, constants, attributes = kernel._pack_args(backend, launched.options, bound, special, options)
    source = ASTSource(kernel, signature, constants, attributes)
    return compile(source, target=target, options=options.__dict__)


def _launch(row: Row) -> _Launched:
    from triton.runtime.jit import JITFunction

    from bifolio.kernels import triton_attention

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: Any, **options: Any) -> None:
        if kernel.__name__ == row.kernel:
            raise _Launched(kernel, arguments, options)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(triton_attention, "architecture", return_value=row.architecture),
        mock.patch.object(triton_attention, "processors", return_value=PROCESSORS),
    ):
        try:
            _call(row)
        except _Launched as launched:
            return launched
    raise LookupError(f"{row.kernel} is not launched")


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _call(row: Row) -> None:
    """The wrapper of the row's kernel, with a step of a server."""
    from bifolio.kernels import triton_attention, triton_sample, triton_small

    if row.kernel == "_rms_norm":
        x = _tensor(TOKENS, row.size)
        triton_small.rms_norm(x, x, _tensor(row.size), 1e-6)
    elif row.kernel == "_silu_mul":
        triton_small.silu_mul(_tensor(TOKENS, 2 * row.size))
    elif row.kernel == "_sample":
        column = _tensor(TOKENS, dtype=torch.float64)
        logits = _tensor(TOKENS, row.size, dtype=torch.float32)
        triton_sample.sample(logits, column, column, column.long(), column, column)
    elif row.kernel == "_rope_and_write":
        heads, kv_heads = row.heads
        q, k, v = _tensor(TOKENS, heads + 2 * kv_heads, row.head_dim).split([heads, kv_heads, kv_heads], 1)
        table = _tensor(KEYS, row.head_dim, dtype=torch.float32)
        places = _tensor(TOKENS, dtype=torch.int64)
        triton_small.rope_and_write(q, k, v, table, table, places, places, _cache(row), layout="plain")
    else:
        _attention(row, triton_attention.paged_attention)


def _cache(row: Row) -> torch.Tensor:
    dtype = torch.float8_e4m3fn if row.float8 else torch.bfloat16
    block = (2, row.heads[1], BLOCK, row.head_dim)
    return _tensor(CACHE // (torch.Size(block).numel() * dtype.itemsize), *block, dtype=dtype)


def _attention(row: Row, paged_attention: Any) -> None:
    """Of one long sequence: the parts of its decode are merged by `combine`."""
    from bifolio.kernels import plan

    tokens = TOKENS if row.phase == "prefill" else 1
    cu_q, seq_lens = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([KEYS], dtype=torch.int32)
    block_table = torch.zeros(1, -(-KEYS // BLOCK), dtype=torch.int32)
    # queries as they lie in the result of one linear for Q, K and V
    q = _tensor(tokens, row.heads[0] + 2 * row.heads[1], row.head_dim)[:, : row.heads[0]]
    paged_attention(
        q,
        _cache(row),
        plan(cu_q, seq_lens, block_table, device=torch.device("meta")),
        causal=True,
        window=None,
        softcap=None,
        sinks=None,
        k_scale=1.0,
        v_scale=1.0,
        scale=row.head_dim**-0.5,
        out=torch.empty_like(q, memory_format=torch.contiguous_format),
        lse=None,
        layout="plain",
    )


def _nvidia(compiled: Any) -> Reading:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        used = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        sass = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    resources = re.search(r"REG:(\d+) STACK:(\d+)", used.stdout + used.stderr)
    # an opcode stands behind its address and perhaps its predicate: /*0110*/  @!P0 LDG.E.128 R4, ...
    opcode = r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+(?:\.[A-Za-z0-9_]+)*)"
    opcodes = collections.Counter(re.findall(opcode, sass, re.M))

    def count(pattern: str) -> int:
        return sum(times for name, times in opcodes.items() if re.match(pattern, name))

    assert resources, "cuobjdump names no registers"
    assert opcodes["EXIT"], "nvdisasm's text is not what it was"
    multiplies = {
        "HMMA": count("HMMA"),
        "HGMMA": count("HGMMA"),
        "UTCMMA": count(r"UTC\w*MMA"),
        "QGMMA": count("QGMMA"),
    }
    return Reading(
        warps=compiled.metadata.num_warps,
        registers=int(resources[1]),
        shared=compiled.metadata.shared,
        spills=int(resources[2]) + count("LDL|STL"),
        instructions=opcodes.total() - opcodes["NOP"],
        loads=count(r"LDG\..*128"),
        copies=count(r"LDGSTS\..*128"),
        stores=count(r"STG\..*128"),
        multiplies={kind: times for kind, times in multiplies.items() if times},
    )


def _amd(compiled: Any) -> Reading:
    text = compiled.asm["amdgcn"]
    opcodes = collections.Counter(re.findall(r"^\s+([vs]_\w+|(?:buffer|global|flat|ds|scratch)_\w+)", text, re.M))

    def count(pattern: str) -> int:
        return sum(times for name, times in opcodes.items() if re.match(pattern, name))

    def stated(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        assert found, f"{name} is not in the assembly"
        return int(found[1])

    multiplies = count("v_mfma")
    return Reading(
        warps=compiled.metadata.num_warps,
        registers=stated("vgpr_count"),
        shared=compiled.metadata.shared,
        spills=stated("vgpr_spill_count") + stated("private_segment_fixed_size"),
        instructions=opcodes.total(),
        loads=count("(buffer|global)_load_dwordx4"),
        copies=len(re.findall(r"_load_(?:lds_)?dwordx4 .*\blds\b|global_load_lds_dwordx4", text)),
        stores=count("(buffer|global)_store_dwordx4"),
        multiplies={"MFMA": multiplies} if multiplies else {},
    )
