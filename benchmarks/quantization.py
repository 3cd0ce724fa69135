#!/usr/bin/env python3
"""What rounding costs: float32, bfloat16, and int8 weights with bfloat16, compared on texts and on greedy answers.

    python -P benchmarks/quantization.py [--model smollm2-135m] [--tokens 4096] [--count 48] [--answer 64]
                                         [--text FILE ...] [--threads 1] [--json FILE]

Texts are real English prose that every checkout has: the questions in tests/data, this project's own documents, and the
language reference that comes with Python (pydoc's topics); or the files given. Each is cut into windows of 512 tokens,
every one of which is computed by itself, and each token but the first of a window is scored.

    perplexity   exp of the mean negative log-probability of the text's next token
    KL           mean over positions of the sum of p_a (log p_a - log p_b): what is lost by taking b for a
    same         positions at which a and b hold the same token for the most probable

Answers are bfloat16's own greedy ones to the chat prompts of parity.py, up to their end. Another model is given every
prefix of them and asked for the next token (teacher-forced: one early difference is counted once), and also answers
freely: how long does it say the same? The gap is what bfloat16's log-probability of its own token exceeds that of the
other by, where they differ.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

sys.path.append(os.path.dirname(__file__))
import measure
from parity import read_prompts

from bifolio.cluster.models import resolve
from bifolio.cluster.tokenizer import Tokenizer
from bifolio.kernels import kv_layout, use
from bifolio.replicas.batch import Row, build_batch
from bifolio.replicas.block_stores import HostBlocks
from bifolio.replicas.kv_cache import KvCache
from bifolio.replicas.llama import Llama
from bifolio.replicas.runner import Runner
from bifolio.replicas.weights import load

ROOT = Path(__file__).parents[1]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}
PAIRS = (("float32", "bfloat16"), ("float32", "int8"), ("bfloat16", "int8"))
WINDOW, BLOCK_SIZE = 512, 16
AT_ONCE = 64  # rows of logits


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text, at most; default: %(default)s")
    parser.add_argument("--text", type=Path, action="append", help="a UTF-8 file; may be given several times")
    parser.add_argument("--count", type=int, default=48, help="of the prompts; default: %(default)s")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer, at most; default: %(default)s")
    args = parser.parse_args()
    measure.become_a_replica(args.threads)
    torch.set_num_threads(args.threads)
    facts, source = measure.machine(use(args.kernels)), resolve(args.model)
    tokenizer = Tokenizer.load(source)
    texts = {name: tokenizer.encode(text)[: args.tokens] for name, text in read_texts(args.text)}
    prompts = [tokenizer.encode(text) for text in read_prompts(ROOT / "tests/data/mt_bench.jsonl.gz", args.count)]
    longest = max(WINDOW, max(map(len, prompts)) + args.answer)
    runners = {name: make_runner(source, name, args.count, longest) for name in DTYPES}
    with torch.inference_mode():
        scores = {name: score(runners, tokens) for name, tokens in texts.items()}
        answers = {name: answer(r, prompts, args.answer, tokenizer.eos_ids) for name, r in runners.items()}
        agreements = agree(runners, prompts, answers)
    report(scores, agreements, measure.title(facts), args)
    results = {
        "texts": {n: s.results() for n, s in scores.items()},
        "answers": {n: vars(a) for n, a in agreements.items()},
    }
    measure.write_json(args.json, {"machine": facts, "model": args.model, **results})
    return 0


def report(scores: dict[str, Score], agreements: dict[str, Agreement], title: str, args: argparse.Namespace) -> None:
    texts = measure.table("perplexity", ("text",), ("tokens", *DTYPES))
    pairs = measure.table(
        "divergence in millinats, and the same most probable token", ("text", "a", "b"), ("KL", "same")
    )
    for name, each in {**scores, "all": sum(scores.values(), Score())}.items():
        n = each.tokens
        texts.add_row(name, f"{n:,}", *(f"{each.perplexity(dtype):.3f}" for dtype in DTYPES))
        for a, b in PAIRS:
            pairs.add_row(name, a, b, f"{each.divergence[a, b] / n * 1e3:.2f}", f"{each.same[a, b] / n:.2%}")
            name = ""
        pairs.add_section()
    columns = ("next tokens", "equal", "share", "median gap", "mean answer", "mean same start", "wholly the same")
    answers = measure.table(f"against bfloat16's {args.count} greedy answers", ("model",), columns)
    for name, found in agreements.items():
        answers.add_row(
            name,
            f"{found.positions:,}",
            f"{found.equal:,}",
            f"{found.equal / found.positions:.2%}",
            f"{median(found.gaps):.3f}" if found.gaps else "",
            f"{mean(found.lengths):.1f}",
            f"{mean(found.starts):.1f}",
            f"{sum(a == b for a, b in zip(found.starts, found.lengths, strict=True))} of {args.count}",
        )
    measure.show(f"{args.model}; {title}", texts, pairs, answers)


def read_texts(files: Sequence[Path] | None) -> Iterator[tuple[str, str]]:
    if files:
        yield from ((path.name, path.read_text(encoding="utf-8")) for path in files)
        return
    questions = []
    for path in sorted((ROOT / "tests/data").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            questions += [turn for line in lines for turn in json.loads(line)["turns"]]
    yield "questions", "\n\n".join(questions)
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    yield "documents", "\n\n".join(path.read_text(encoding="utf-8") for path in documents)
    yield "Python's reference", "\n\n".join(topics[name] for name in sorted(topics))


def make_runner(source: Path, name: str, sequences: int, longest: int) -> Runner:
    dtype = DTYPES[name]
    config, weights = load(source, dtype)
    layout = kv_layout(dtype, config.head_dim, BLOCK_SIZE)
    blocks = sequences * -(-longest // BLOCK_SIZE)
    cache = KvCache(blocks, config.layers, config.kv_heads, BLOCK_SIZE, config.head_dim, dtype, layout)
    llama = Llama(config, weights, quantization="int8" if name == "int8" else None)
    return Runner(llama, cache, HostBlocks(cache))


@dataclass
class Score:
    """Sums over the scored tokens of a text."""

    tokens: int = 0
    loss: dict[str, float] = field(default_factory=lambda: dict.fromkeys(DTYPES, 0.0))
    divergence: dict[tuple[str, str], float] = field(default_factory=lambda: dict.fromkeys(PAIRS, 0.0))
    same: dict[tuple[str, str], int] = field(default_factory=lambda: dict.fromkeys(PAIRS, 0))

    def __add__(self, other: Score) -> Score:
        return Score(
            self.tokens + other.tokens,
            {name: self.loss[name] + other.loss[name] for name in DTYPES},
            {pair: self.divergence[pair] + other.divergence[pair] for pair in PAIRS},
            {pair: self.same[pair] + other.same[pair] for pair in PAIRS},
        )

    def perplexity(self, dtype: str) -> float:
        return math.exp(self.loss[dtype] / self.tokens)

    def results(self) -> dict[str, Any]:
        pairs = {f"{a}, {b}": {"kl": self.divergence[a, b] / self.tokens, "same": self.same[a, b]} for a, b in PAIRS}
        return {"tokens": self.tokens, "perplexity": {name: self.perplexity(name) for name in DTYPES}, **pairs}


def score(runners: dict[str, Runner], tokens: list[int]) -> Score:
    total = Score()
    for begin in range(0, len(tokens) - 1, WINDOW):
        window = tokens[begin : begin + WINDOW]
        hidden = {name: hidden_states(runner, window)[:-1] for name, runner in runners.items()}
        for first in range(0, len(window) - 1, AT_ONCE):
            part = slice(first, first + AT_ONCE)
            logs = {name: log_probabilities(runner, hidden[name][part]) for name, runner in runners.items()}
            following = torch.tensor(window[1:][part])[:, None]
            total.tokens += len(following)
            for name, log in logs.items():
                total.loss[name] -= float(log.gather(1, following).sum())
            for a, b in PAIRS:
                total.divergence[a, b] += float((logs[a].exp() * (logs[a] - logs[b])).sum())
                total.same[a, b] += int((logs[a].argmax(1) == logs[b].argmax(1)).sum())
    return total


def hidden_states(runner: Runner, tokens: Sequence[int]) -> Tensor:
    """[T, hidden] of a sequence by itself, from its first token on."""
    blocks = range(1, 1 + -(-len(tokens) // BLOCK_SIZE))
    return runner.model.forward(build_batch([Row(tokens, 0, blocks)], BLOCK_SIZE), runner.cache)


def log_probabilities(runner: Runner, hidden: Tensor) -> Tensor:
    return runner.model.logits(hidden).double().log_softmax(-1)


def answer(runner: Runner, prompts: list[list[int]], most: int, ends: Sequence[int]) -> list[list[int]]:
    """The greedy answers, all in one batch, each up to its end or so many tokens."""
    width = runner.cache.blocks // len(prompts)
    blocks = [range(1 + i * width, 1 + (i + 1) * width) for i in range(len(prompts))]
    answers = []
    for prompt, own in zip(prompts, blocks, strict=True):
        answers.append([int(runner.run([Row(prompt, 0, own)]).argmax())])
    while going := [i for i, a in enumerate(answers) if len(a) < most and a[-1] not in ends]:
        rows = [Row(answers[i][-1:], len(prompts[i]) + len(answers[i]) - 1, blocks[i]) for i in going]
        for i, token in zip(going, runner.run(rows).argmax(-1).tolist(), strict=True):
            answers[i].append(token)
    return answers


@dataclass
class Agreement:
    """Of a model with bfloat16's answers: teacher-forced, and how much of each stands at the start of its own."""

    lengths: list[int]
    starts: list[int]
    positions: int = 0
    equal: int = 0
    gaps: list[float] = field(default_factory=list)


def agree(
    runners: dict[str, Runner], prompts: list[list[int]], answers: dict[str, list[list[int]]]
) -> dict[str, Agreement]:
    reference = answers["bfloat16"]
    found = {
        name: Agreement([len(a) for a in reference], [same_start(*pair) for pair in zip(reference, own, strict=True)])
        for name, own in answers.items()
        if name != "bfloat16"
    }
    for prompt, tokens in zip(prompts, reference, strict=True):
        rows = {name: hidden_states(r, [*prompt, *tokens[:-1]])[len(prompt) - 1 :] for name, r in runners.items()}
        log = log_probabilities(runners["bfloat16"], rows["bfloat16"])
        for name, each in found.items():
            chosen = runners[name].model.logits(rows[name]).argmax(-1).tolist()
            differing = [(i, a, b) for i, (a, b) in enumerate(zip(tokens, chosen, strict=True)) if a != b]
            each.positions += len(tokens)
            each.equal += len(tokens) - len(differing)
            each.gaps += [float(log[i, a] - log[i, b]) for i, a, b in differing]
    return found


def same_start(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


if __name__ == "__main__":
    sys.exit(main())
