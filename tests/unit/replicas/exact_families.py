"""A script for `test_families.py`: logits in exact arithmetic, the same bits for any shape, family and cut.

MKL_CBWR must be set before torch is loaded, so it runs in a process of its own. The arguments are how many models to
try, besides those written down, the threads, the backend, the dtype and perhaps "int8".
In torch matrices have 24 rows at least: with fewer, and two threads, MKL's order of sums depends on the batch, as
`self_check` says at a replica's start. The native kernels take any.
"""

from __future__ import annotations

import sys

import torch
from families import logits_in_steps, random_model, tokens
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bifolio.kernels import use
from bifolio.replicas.llama import LlamaConfig
from bifolio.replicas.rope_scaling import Divided, Linear, Llama3, RopeScaling, Yarn

MODELS, THREADS, BACKEND, DTYPE, *QUANTIZATION = sys.argv[1:]
LEAST = 24 if BACKEND == "torch" else 1  # rows of a matrix
LENGTH = 75  # more than a tile of keys in torch
SCALINGS: list[RopeScaling | None] = [None, Linear(2.0), Llama3(8.0, 1.0, 4.0, 32), Yarn(4.0, 32, 1.1)]


@st.composite
def configs(draw: st.DrawFn) -> LlamaConfig:
    layers = draw(st.integers(1, 2))
    kv_heads = draw(st.integers(1, 3))
    head_dim = 2 * draw(st.integers(16, 64))
    divided = Divided(tuple(1.0 + i for i in range(head_dim // 2)))
    window = st.none() | st.integers(1, 90)
    return LlamaConfig(
        vocab_size=draw(st.integers(max(2, LEAST), 300)),
        hidden=draw(st.integers(LEAST, 200)),
        intermediate=draw(st.integers((LEAST + 1) // 2, 300)),
        layers=layers,
        heads=kv_heads * draw(st.integers(1, 9)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=1e-5,
        rope_theta=1e4,
        max_positions=128,
        tied=draw(st.booleans()),
        rope_scaling=draw(st.sampled_from([*SCALINGS, divided])),
        unrotated=tuple(draw(st.sets(st.integers(0, layers - 1)))),
        windows=tuple(draw(st.lists(window, min_size=layers, max_size=layers))),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )


def pieces(size: int) -> list[list[tuple[int, int]]]:
    return [[(0, min(size, LENGTH - begin))] for begin in range(0, LENGTH, size)]


def shape(heads: int, kv_heads: int, head_dim: int, vocab_size: int, **features: object) -> LlamaConfig:
    sizes = {"hidden": 96, "intermediate": 250, "layers": 2, "eps": 1e-5, "rope_theta": 1e4, "max_positions": 128}
    return LlamaConfig(
        vocab_size=vocab_size, heads=heads, kv_heads=kv_heads, head_dim=head_dim, tied=True, **sizes, **features
    )  # type: ignore[arg-type]


@example(shape(9, 3, 64, 333), [32, 7])
@example(shape(14, 2, 64, 1001, qkv_bias=True, windows=(None, 40)), [16, 64])  # Qwen2
@example(shape(7, 1, 80, 99, qk_norm=True, rope_scaling=SCALINGS[3]), [1, 48])  # Qwen3
@example(shape(4, 4, 128, 250, windows=(24, 24)), [32, 64])  # Mistral
@example(shape(6, 2, 32, 77, unrotated=(1,), rope_scaling=SCALINGS[2]), [8, 33])  # SmolLM3
@settings(max_examples=int(MODELS), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(configs(), st.lists(st.integers(1, LENGTH - 1), min_size=2, max_size=2, unique=True))
def check(config: LlamaConfig, sizes: list[int]) -> None:
    model = random_model(config, sum(sizes), getattr(torch, DTYPE), *QUANTIZATION)  # type: ignore[arg-type]
    sequences = tokens(LENGTH, 41, 9, vocabulary=config.vocab_size)
    whole = logits_in_steps(model, sequences[:1], [[(0, LENGTH)]])[0]
    company = [[(1, 40), (0, sizes[0])], [(2, 9), (0, LENGTH - sizes[0]), (1, 1)]]
    for steps in (pieces(1), pieces(sizes[0]), pieces(sizes[1]), company):
        got = logits_in_steps(model, sequences[: 1 if len(steps[0]) == 1 else 3], steps)[0]
        assert torch.equal(got, whole), f"{int((got != whole).any(1).nonzero()[0])}: {config}, {steps[:3]}"


if __name__ == "__main__":
    torch.set_num_threads(int(THREADS))
    chosen = use(BACKEND)  # type: ignore[arg-type]
    check()
    print(f"{MODELS} models, {chosen}, torch.get_num_threads() = {torch.get_num_threads()}: equal to the bit")
