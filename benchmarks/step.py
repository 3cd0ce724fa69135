#!/usr/bin/env python3
"""Where does a decode step's time go? The engine's own steps, their parts one by one, and the floors below them.

    python -P benchmarks/step.py [--model smollm2-135m] [--batch 1 --batch 8 --batch 32] [--context 512]
                                 [--dtype bfloat16 --dtype int8] [--threads 1] [--repeats 15] [--json FILE]

A step is `Engine.step` with greedy sequences that each attend to `context` positions: schedule, build the batch, run
the model, sample, record. Not in it are the engine's thread, the delivery of events and all that follows. After each
step the sequences are set back by their one token, so that all steps do the same work, on the same blocks. K and V are
noise, at random places.

A round computes each once, for all dtypes in turns:

    step               as it is
    step, with timers  around its stages, and around every call into the native library
    linears            the model's own, one native call after the other, with as many rows; float32 logits last
    rival              the same by oneDNN, packed before (float32: by F.linear; int8 has none)
    attention          of all layers over the same blocks, one native call after the other
    small              norms, RoPE with the cache write, activations, likewise
    embedding, choice  not ours: the rows of the embedding, the largest of each row of logits

A part finds neither weights nor K and V in a cache when they are larger than it: the parts before have used it.

    floors  the faster of linears and rival, plus attention: a step cannot take less
    Python  the step with timers, less its native calls, less embedding and choice: all that is neither a kernel nor a
            torch operation over hidden states or logits. The small tensors of a batch, which torch makes, are Python's
    rest    what a step takes beyond the sum of linears, attention, small, choice and Python: what its parts lose by
            sharing the CPU's caches, and the embedding

Python's time is also shown stage by stage. `model` is what the forward pass spends outside native calls and the
embedding, `sample` what `sample_tokens` does beside the choice.

Our own demands, for bfloat16 at batch 8 and 32: a step within 1.15 of its floors; at batch 32 Python within 5 %; for
int8 at batch 1 a step within 0.75 of bfloat16's. One that is missed makes the exit status 1.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.append(os.path.dirname(__file__))
import measure
import onednn
from measure import Seconds, Way
from native_calls import Tape, begin, timed

from bifolio.cluster.models import resolve
from bifolio.kernels import kv_layout, linear, paged_attention, rms_norm, rope_and_write, silu_mul
from bifolio.kernels.bindings import Native
from bifolio.protos.messages import BlockId, Generation, Sampling
from bifolio.replicas import engine as engine_module
from bifolio.replicas import runner as runner_module
from bifolio.replicas.batch import Batch, Row, build_batch
from bifolio.replicas.block_stores import HostBlocks
from bifolio.replicas.engine import Engine
from bifolio.replicas.kv_cache import KvCache
from bifolio.replicas.llama import Llama
from bifolio.replicas.model_config import LlamaConfig
from bifolio.replicas.runner import Runner
from bifolio.replicas.scheduler import Scheduler
from bifolio.replicas.sequence import Add, Sampled
from bifolio.replicas.weights import load

BLOCK_SIZE = 16
DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.bfloat16, "float32": torch.float32}
STAGES = ("schedule", "batch", "model", "sample", "record")
MOST_OF_FLOORS, MOST_PYTHON, MOST_OF_BFLOAT16 = 1.15, 0.05, 0.75


def main() -> int:
    parser = measure.arguments(__doc__, repeats=15)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, action="append", help="may be given several times; default: 1, 8, 32")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument(
        "--dtype", action="append", choices=tuple(DTYPES), help="may be given several times; default: bfloat16, int8"
    )
    args = parser.parse_args()
    native = begin(parser, args)
    facts, source = measure.machine(native.isa), resolve(args.model)
    batches, dtypes = args.batch or [1, 8, 32], args.dtype or ["bfloat16", "int8"]
    models = {dtype: Model.load(source, dtype) for dtype in dtypes}
    blocks = max(batches) * blocks_for(args.context)
    config = next(iter(models.values())).llama.config
    caches = {dtype: noise(config, dtype, blocks) for dtype in {DTYPES[name] for name in dtypes}}
    results: dict[int, dict[str, dict[str, Seconds]]] = {}
    with torch.inference_mode():
        for batch in batches:
            measure.progress(f"batch {batch}")
            decodes = {n: Decode(native, models[n], caches[DTYPES[n]], batch, args.context) for n in dtypes}
            rounds = [{n: decode.round() for n, decode in decodes.items()} for _ in range(args.repeats + 1)]
            results[batch] = {n: measure.by_name([each[n] for each in rounds[1:]]) for n in dtypes}
    missed = report(results, measure.title(facts), f"{args.model}, context {args.context}")
    measure.write_json(args.json, {"machine": facts, "model": args.model, "context": args.context, "batches": results})
    return 1 if missed else 0


def report(results: dict[int, dict[str, dict[str, Seconds]]], title: str, what: str) -> int:
    """Print them. Returns how many demands were missed."""
    parts = ("linears", "attention", "small", "choice", "Python", "rest")
    steps = measure.table(
        f"decode steps in ms: {what}", ("batch", "dtype"), ("step", *parts, "floors", "step / floors", "Python share")
    )
    stages = measure.table("Python's part, in µs", ("batch", "dtype"), (*STAGES, "other"))
    lines, verdicts = [], []

    def judged(value: float, most: float, shown: str, demanded: bool) -> str:
        if demanded:
            verdicts.append(value <= most)
        return f"{shown}, {measure.verdict(value <= most, f'<= {most:g}')}" if demanded else shown

    for batch, by_dtype in results.items():
        for dtype, seconds in by_dtype.items():
            floor = measure.fastest({name: seconds[name] for name in ("linears", "rival") if name in seconds})
            floors = measure.total(seconds[floor], seconds["attention"])
            of_floors, share = (
                measure.ratio(seconds[x], y) for x, y in (("step", floors), ("Python", seconds["with timers"]))
            )
            bars = dtype == "bfloat16" and batch in (8, 32), dtype == "bfloat16" and batch == 32
            steps.add_row(
                str(batch),
                dtype,
                *(measure.milliseconds(seconds[name]) for name in ("step", *parts)),
                measure.milliseconds(floors) + (" (rival)" if floor == "rival" else ""),
                judged(of_floors, MOST_OF_FLOORS, f"{of_floors:.2f}", bars[0]),
                judged(share, MOST_PYTHON, f"{share:.1%}", bars[1]),
            )
            stages.add_row(
                str(batch), dtype, *(f"{median(seconds[f'Python, {name}']) * 1e6:.0f}" for name in (*STAGES, "other"))
            )
        if {"bfloat16", "int8"} <= set(by_dtype):
            of_other = measure.ratio(by_dtype["int8"]["step"], by_dtype["bfloat16"]["step"])
            shown = judged(of_other, MOST_OF_BFLOAT16, f"{of_other:.2f}", batch == 1)
            lines.append(f"batch {batch}: an int8 step by a bfloat16 step {shown}")
    measure.show(title, steps, stages, *lines)
    return verdicts.count(False)


class Model:
    """A model and, where torch has them, the rivals of its linears."""

    def __init__(self, llama: Llama, rival: Callable[[Tensor, Tensor], Tensor], rivals: list[Tensor]) -> None:
        self.llama, self.rival, self.rivals = llama, rival, rivals
        self.linears = [w for layer in llama._layers.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]

    @classmethod
    def load(cls, source: Path, dtype: str) -> Model:
        config, weights = load(source, DTYPES[dtype])
        rivals: list[Tensor] = [] if dtype == "int8" else list(plain_linears(config, weights))
        call: Callable[[Tensor, Tensor], Tensor] = F.linear
        if dtype == "bfloat16" and onednn.HINTS:
            rivals, call = [onednn.pack(w, onednn.HINTS[-1]) for w in rivals], onednn.linear
        return cls(Llama(config, weights, quantization="int8" if dtype == "int8" else None), call, rivals)


def plain_linears(config: LlamaConfig, weights: dict[str, Tensor]) -> Iterator[Tensor]:
    """In the order in which a step uses them, joined as in `Llama`, without biases."""
    attention, mlp = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    for i in range(config.layers):
        prefix = f"model.layers.{i}"
        yield torch.cat([weights[f"{prefix}.self_attn.{name}.weight"] for name in attention])
        yield weights[f"{prefix}.self_attn.o_proj.weight"]
        yield torch.cat([weights[f"{prefix}.mlp.{name}.weight"] for name in mlp])
        yield weights[f"{prefix}.mlp.down_proj.weight"]
    yield weights["model.embed_tokens.weight" if config.tied else "lm_head.weight"]


def blocks_for(context: int) -> int:
    return -(-context // BLOCK_SIZE) + 1  # no step draws one


def noise(config: LlamaConfig, dtype: torch.dtype, blocks: int) -> KvCache:
    """A cache that is full of it."""
    layout = kv_layout(dtype, config.head_dim, BLOCK_SIZE)
    cache = KvCache(blocks, config.layers, config.kv_heads, BLOCK_SIZE, config.head_dim, dtype, layout)
    for i in range(config.layers):
        cache.layer(i).normal_()
    return cache


class Decode:
    """An engine with so many decoding sequences, and the parts of its step."""

    def __init__(self, native: Native, model: Model, cache: KvCache, batch: int, context: int) -> None:
        self._native, self._batch = native, batch
        scheduler = Scheduler(
            max_batched_tokens=batch + BLOCK_SIZE,
            max_sequences=batch,
            block_size=BLOCK_SIZE,
            draw=lambda _, count: None,
        )
        self._engine = Engine(Runner(model.llama, cache, HostBlocks(cache)), scheduler)
        vocabulary = model.llama.config.vocab_size
        order = (torch.randperm(cache.blocks) + 1).tolist()
        for i in range(batch):
            tokens = tuple(torch.randint(vocabulary, (context - 1,)).tolist())
            blocks = tuple(map(BlockId, order[i * blocks_for(context) : (i + 1) * blocks_for(context)]))
            logits = torch.randn(vocabulary).numpy().tobytes()  # as if the prompt had been computed elsewhere
            sampling = Sampling(max_tokens=1 << 20, temperature=0.0)
            self._engine.submit(Add(Generation(1, i + 1), tokens, blocks, float(i), len(tokens), sampling, logits))
        self._step()  # samples the first tokens; from now on every step decodes
        rows = [Row(s.tokens[s.computed :], s.computed, s.blocks) for s in scheduler.sequences.values()]
        self._parts = parts(native, model, cache, build_batch(rows, BLOCK_SIZE))

    def round(self) -> dict[str, float]:
        seconds = {"step": measure.seconds_of(self._step)}
        self._set_back()
        stages: dict[str, float] = {}
        with self._timers(stages), timed(self._native) as inside:
            seconds["with timers"] = measure.seconds_of(self._step)
        self._set_back()
        seconds |= {name: measure.seconds_of(part) for name, part in self._parts.items()}
        native = sum(inside.values())
        seconds["Python"] = seconds["with timers"] - native - seconds["embedding"] - seconds["choice"]
        named = ("linears", "attention", "small", "choice", "Python")
        seconds["rest"] = seconds["step"] - sum(seconds[name] for name in named)
        stages["model"] -= native + seconds["embedding"] + stages["batch"]
        stages["sample"] -= seconds["choice"]
        stages["other"] = seconds["Python"] - sum(stages.values())
        return seconds | {f"Python, {name}": value for name, value in stages.items()}

    def _step(self) -> None:
        events = self._engine.step()
        assert [type(event) for event in events] == [Sampled] * self._batch, events

    def _set_back(self) -> None:
        for sequence in self._engine.scheduler.sequences.values():
            sequence.tokens.pop()
            sequence.computed -= 1

    @contextmanager
    def _timers(self, stages: dict[str, float]) -> Iterator[None]:
        def around(owner: Any, name: str, stage: str) -> Any:
            call = getattr(owner, name)

            def measured(*arguments: Any) -> Any:
                began = time.perf_counter()
                result = call(*arguments)
                stages[stage] = time.perf_counter() - began
                return result

            return patch.object(owner, name, measured)

        engine = self._engine
        with ExitStack() as stack:
            stack.enter_context(around(engine.scheduler, "schedule", "schedule"))
            stack.enter_context(around(runner_module, "host_batch", "batch"))
            stack.enter_context(around(engine.runner, "compute", "model"))
            stack.enter_context(around(engine_module, "sample_tokens", "sample"))
            stack.enter_context(around(engine.scheduler, "record", "record"))
            yield


def parts(native: Native, model: Model, cache: KvCache, batch: Batch) -> dict[str, Way]:
    """Of a step over this batch, in the order of a round. Inputs are noise."""
    llama, c, rows = model.llama, model.llama.config, batch.plan.tokens
    sizes = {w.inputs for w in model.linears} | {c.hidden}
    x = {size: torch.randn(rows, size, dtype=llama.dtype) for size in sizes}
    residual, gate_up = torch.randn_like(x[c.hidden]), torch.randn(rows, 2 * c.intermediate, dtype=llama.dtype)
    qkv = torch.randn(rows, c.heads + 2 * c.kv_heads, c.head_dim, dtype=llama.dtype)
    q, k, v = torch.split(qkv, [c.heads, c.kv_heads, c.kv_heads], dim=1)
    logits = torch.randn(rows, c.vocab_size)

    def linears() -> list[Tensor]:
        return [*(linear(x[w.inputs], w) for w in model.linears), llama.logits(x[c.hidden])]

    def rival() -> list[Tensor]:
        return [model.rival(x[inputs], w) for inputs, w in zip(inputs_of, model.rivals, strict=True)]

    def attention() -> list[Tensor]:
        return [
            paged_attention(q, cache.layer(i), batch.plan, window=c.window(i), layout=cache.layout)
            for i in range(c.layers)
        ]

    def small() -> list[Tensor]:
        made = [*rms_norm(x[c.hidden], residual, llama._norm, c.eps)]
        for i, layer in enumerate(llama._layers.layers):
            made += rms_norm(x[c.hidden], residual, layer.attention_norm, c.eps)
            made.append(
                rope_and_write(
                    q, k, v, *llama._turning, batch.positions, batch.slots, cache.layer(i), layout=cache.layout
                )
            )
            made += rms_norm(x[c.hidden], residual, layer.mlp_norm, c.eps)
            made.append(silu_mul(gate_up))
        return made

    def embedding() -> object:
        hidden = F.embedding(batch.tokens, llama._embedding)
        return torch.zeros_like(hidden), hidden[batch.logit_rows]

    def choice() -> object:
        return logits.amax(-1), logits.numpy().argmax(-1)  # as `kernels.sample` does

    inputs_of = [*(w.inputs for w in model.linears), c.hidden]
    ways: dict[str, Way] = {"linears": Tape(native, linears)}
    if model.rivals:
        ways["rival"] = rival
    return ways | {
        "attention": Tape(native, attention),
        "small": Tape(native, small),
        "embedding": embedding,
        "choice": choice,
    }


if __name__ == "__main__":
    sys.exit(main())
