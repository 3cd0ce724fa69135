#!/usr/bin/env python3
"""What drafts bring: tokens a second with `engine.speculate` and without, on text that repeats itself and on text that
does not.

    python -P benchmarks/speculate.py [--model smollm2-135m] [--only edit --only chat ...] [--tokens 96] [--most 8]
                                      [--batch 1 --batch 4 --batch 8] [--threads 1] [--kernels auto] [--json FILE]

An engine without drafts and one with them answer the same requests, as many at a time as the batch has. They take
turns: the next step is of the one that has said fewer tokens, so both meet the same moments of a busy machine. Prompts
are computed before and not timed. A group's steps are timed until its last answer ends, so it has fewer sequences
towards the end. Answers must be equal, or the exit status is 1.

    edit    HumanEval's functions: give the code back with one name changed. Greedy.
    agent   steps of a software agent, recorded from a large model. The engine computes and samples as ever, and then
            says what was recorded: a small model would not write such text.
    chat    first turns of MT-Bench. Greedy; a small model soon repeats itself.
    warm    the same, temperature 0.8.
    people  answers that people wrote (OpenAssistant), said again like those of `agent`.

"CPU" is the same ratio by the process's CPU time, which leaves out what others take of the machine. `right` is the
share of guesses that were. Rows are what a step computes, tokens what it brings, both for each sequence. `row` is what
the engine has learned that a row costs more, in steps of one row.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.append(os.path.dirname(__file__))
import measure
from native_calls import begin

from bifolio.cluster.models import resolve
from bifolio.cluster.tokenizer import Tokenizer
from bifolio.kernels import kv_layout
from bifolio.protos.messages import BlockId, Generation, Sampling
from bifolio.replicas import engine as engine_module
from bifolio.replicas.batch import Row
from bifolio.replicas.block_stores import HostBlocks
from bifolio.replicas.engine import Engine
from bifolio.replicas.kv_cache import KvCache
from bifolio.replicas.llama import Llama
from bifolio.replicas.penalties import SamplingState
from bifolio.replicas.runner import Output, Runner
from bifolio.replicas.sampler import Choice, sample_tokens
from bifolio.replicas.scheduler import Scheduler
from bifolio.replicas.sequence import Add, Prefilled, Sampled
from bifolio.replicas.weights import load

BLOCK_SIZE, CONTEXT = 16, 768
GROUPS = {1: 3, 4: 2, 8: 1}  # of requests, by batch
DATA = Path("shared/data") if Path("shared/data").exists() else Path(__file__).parents[2] / "shared/data"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@dataclass(frozen=True)
class Task:
    prompt: tuple[int, ...]
    temperature: float = 0.0
    recorded: tuple[int, ...] = ()  # what is said, if it is not what the model says


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", action="append", choices=tuple(TASKS), help="may be given several times")
    parser.add_argument("--batch", type=int, action="append", choices=tuple(GROUPS), help="may be given several times")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most; default: %(default)s")
    parser.add_argument("--most", type=int, default=8, help="engine.speculate; default: %(default)s")
    args = parser.parse_args()
    native = begin(parser, args)
    facts, source = measure.machine(native.isa), resolve(args.model)
    tokenizer, batches = Tokenizer.load(source), args.batch or list(GROUPS)
    most = max(GROUPS[batch] * batch for batch in batches)
    bench = Bench(source, most, args.tokens, args.most, tokenizer.eos_ids)
    table = measure.table(
        f"drafts of at most {args.most}: {args.model}, bfloat16, answers of {args.tokens} tokens at most",
        ("text", "batch"),
        ("tok/s without", "with", "ratio", "CPU", "right", "rows", "tokens", "row"),
    )
    results, equal = [], True
    for name in args.only or TASKS:
        tasks = list(islice(fitting(TASKS[name](tokenizer), args.tokens), most))
        bench.prefill(tasks)
        for batch in batches:
            measure.progress(f"{name}, batch {batch}")
            without, with_drafts = bench.compare(tasks, batch)
            equal = equal and without.answers == with_drafts.answers
            row = name, str(batch), *shown(without, with_drafts)
            measure.progress("  ".join(row))
            table.add_row(*row)
            results.append({"text": name, "batch": batch, "without": vars(without), "with": vars(with_drafts)})
            measure.write_json(args.json, {"machine": facts, "model": args.model, "results": results})
    measure.show(measure.title(facts), table, "answers are equal" if equal else "ANSWERS DIFFER")
    return 0 if equal else 1


class Sums:
    """Of the timed steps of one engine."""

    def __init__(self) -> None:
        self.seconds = self.cpu = self.row = 0.0
        self.tokens = self.drafted = self.right = self.sequences = 0  # sequences: summed over the steps
        self.answers: list[list[int]] = []


def shown(without: Sums, with_drafts: Sums) -> list[str]:
    it = with_drafts
    return [
        f"{without.tokens / without.seconds:.1f}",
        f"{it.tokens / it.seconds:.1f}",
        f"{without.seconds / it.seconds:.2f}",
        f"{without.cpu / it.cpu:.2f}",
        f"{it.right / it.drafted:.0%} of {it.drafted}" if it.drafted else "-",
        f"{1 + it.drafted / it.sequences:.2f}",
        f"{it.tokens / it.sequences:.2f}",
        f"{it.row:.3f}",
    ]


class Counted(Runner):
    """Knows how many rows the last step had."""

    rows = 0

    def compute(self, rows: Sequence[Row]) -> Output:
        self.rows = sum(len(row.tokens) for row in rows)
        return super().compute(rows)


class Bench:
    def __init__(self, source: Path, requests: int, tokens: int, most: int, eos: Sequence[int]) -> None:
        config, weights = load(source, torch.bfloat16)
        each = -(-(CONTEXT + 1) // BLOCK_SIZE)
        layout = kv_layout(torch.bfloat16, config.head_dim, BLOCK_SIZE)
        heads = config.kv_heads, BLOCK_SIZE, config.head_dim
        cache = KvCache(2 * each * requests, config.layers, *heads, torch.bfloat16, layout)
        self._runner = Counted(Llama(config, weights), cache, HostBlocks(cache))
        places = [tuple(BlockId(1 + each * i + j) for j in range(each)) for i in range(2 * requests)]
        self._blocks = places[:requests], places[requests:]  # of each engine
        self._tokens, self._eos = tokens, tuple(eos)
        self._engines = [self._engine(0), self._engine(most)]
        self._logits: list[bytes] = []
        self._count = 0

    def _engine(self, most: int) -> Engine:
        scheduler = Scheduler(
            max_batched_tokens=256,
            max_sequences=32,
            block_size=BLOCK_SIZE,
            draw=lambda _, count: None,
            speculate=most,
        )
        return Engine(self._runner, scheduler)

    def prefill(self, tasks: Sequence[Task]) -> None:
        """What follows each prompt, whose K and V both engines get, and keep."""
        self._logits = []
        engine = self._engines[0]
        for task, *both in zip(tasks, *self._blocks, strict=False):
            engine.submit(Add(self._generation(), task.prompt, both[0], 0.0, len(task.prompt)))
            while not engine.idle:
                self._logits += [event.logits for event in engine.step() if isinstance(event, Prefilled)]
            for source, block in zip(*both, strict=True):
                self._runner.copy(source, block)

    def compare(self, tasks: Sequence[Task], batch: int) -> tuple[Sums, Sums]:
        sums = Sums(), Sums()
        with says_what_was_recorded([task.recorded for task in tasks]):
            for group in range(GROUPS[batch]):
                self._race(tasks, range(group * batch, (group + 1) * batch), sums)
        return sums

    def _race(self, tasks: Sequence[Task], chosen: range, sums: tuple[Sums, Sums]) -> None:
        answers: list[dict[Generation, list[int]]] = []
        for engine, blocks in zip(self._engines, self._blocks, strict=True):
            generations = [self._submit(engine, tasks[i], blocks[i], i) for i in chosen]
            answers.append({generation: [] for generation in generations})
            for event in engine.step():  # the first token of each: no step of the model
                if isinstance(event, Sampled):
                    answers[-1][event.generation].append(event.token)
        while busy := [i for i in (0, 1) if not self._engines[i].idle]:
            turn = min(busy, key=lambda i: sum(map(len, answers[i].values())))
            for event in self._timed(self._engines[turn], sums[turn]):
                answers[turn][event.generation].append(event.token)
        for each, engine, said in zip(sums, self._engines, answers, strict=True):
            each.row = engine.scheduler.row_cost.share
            each.answers += said.values()

    def _submit(self, engine: Engine, task: Task, blocks: tuple[BlockId, ...], number: int) -> Generation:
        generation, length = self._generation(), len(task.prompt)
        most, stops = (len(task.recorded), ()) if task.recorded else (self._tokens, self._eos)
        sampling = Sampling(most, task.temperature, seed=number, stop_token_ids=stops)
        engine.submit(Add(generation, task.prompt, blocks, float(number), length, sampling, self._logits[number]))
        return generation

    def _timed(self, engine: Engine, sums: Sums) -> list[Sampled]:
        running = len(engine.scheduler.sequences)
        began, cpu = time.perf_counter(), time.process_time()
        events = engine.step()
        sums.seconds += time.perf_counter() - began
        sums.cpu += time.process_time() - cpu
        said = [event for event in events if isinstance(event, Sampled)]
        sums.tokens += len(said)
        sums.right += len(said) - running
        sums.sequences += running
        sums.drafted += self._runner.rows - running
        return said

    def _generation(self) -> Generation:
        self._count += 1
        return Generation(1, self._count)


@contextmanager
def says_what_was_recorded(recorded: Sequence[Sequence[int]]) -> Iterator[None]:
    """Requests are told apart by their seed."""

    def say(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Choice]:
        choices = sample_tokens(logits, states)
        told = [(recorded[state.sampling.seed], state.position) for state in states]
        return [(text[at], None) if text else choice for choice, (text, at) in zip(choices, told, strict=True)]

    with patch.object(engine_module, "sample_tokens", say):
        yield


def fitting(tasks: Iterator[Task], tokens: int) -> Iterator[Task]:
    for task in tasks:
        if len(task.prompt) + tokens <= CONTEXT:
            yield replace(task, recorded=task.recorded[:tokens])


def lines(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def asked(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    turns = [f"<|im_start|>{who}\n{said}<|im_end|>\n" for who, said in (("system", SYSTEM), ("user", text))]
    return tuple(tokenizer.encode("".join(turns) + "<|im_start|>assistant\n", special_tokens=False))


def edit(tokenizer: Tokenizer) -> Iterator[Task]:
    for each in lines("prompts/humaneval.jsonl.gz"):
        name, code = each["entry_point"], each["prompt"] + each["canonical_solution"]
        wish = f"Rename the function `{name}` to `solve` and give back the whole code.\n\n```python\n{code}```"
        yield Task(asked(tokenizer, wish))


def agent(tokenizer: Tokenizer) -> Iterator[Task]:
    for each in islice(lines("traces/agent_miniswe.jsonl.gz"), 3, None, 7):
        before, said = (tokenizer.encode(each[name], special_tokens=False) for name in ("input", "output"))
        if len(said) > 40:
            yield Task(tuple(before[-600:]), recorded=tuple(said))


def chat(tokenizer: Tokenizer, temperature: float = 0.0) -> Iterator[Task]:
    for each in islice(lines("prompts/mt_bench.jsonl.gz"), 0, None, 3):
        yield Task(asked(tokenizer, each["turns"][0]), temperature)


def warm(tokenizer: Tokenizer) -> Iterator[Task]:
    return chat(tokenizer, 0.8)


def people(tokenizer: Tokenizer) -> Iterator[Task]:
    for each in lines("prompts/oasst_en_100_trees.jsonl.gz"):
        replies = each["prompt"]["replies"]
        said = tokenizer.encode(replies[0]["text"], special_tokens=False) if replies else []
        if len(said) > 40:
            yield Task(asked(tokenizer, each["prompt"]["text"]), recorded=tuple(said))


TASKS: dict[str, Callable[[Tokenizer], Iterator[Task]]] = {
    "edit": edit,
    "agent": agent,
    "chat": chat,
    "warm": warm,
    "people": people,
}

if __name__ == "__main__":
    sys.exit(main())
