#!/usr/bin/env python3
"""Are the ids right? Split pools against a single pool, and both against transformers, in exact mode and greedy.

    python -P benchmarks/parity.py [--model smollm2-135m] [--dtype bfloat16] [--quantization int8] [--kernels auto]
                                   [--prompts FILE.jsonl.gz] [--count 20] [--tokens 64] [--oracle DIR]

Starts two clusters, one after the other (one prefill and one decode replica; a decode replica alone), asks both for the
same prompts, and compares: their answers must be equal. The oracle is transformers on the same weights, in float32: it
reads a llama GGUF or a Hugging Face directory by itself; `--oracle` names another directory with the model in fp32.

Against transformers ids are compared teacher-forced. A position where they differ is a tie when the oracle's own logits
of the two ids are closer than 2e-4, else a mismatch. In float32, the default, there may be none; in bfloat16 and with
int8 weights, which the oracle does not round to, they are only counted. The exit status is 1 for what may not be.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from pathlib import Path

from bifolio.cluster.client import Client
from bifolio.cluster.models import resolve
from bifolio.cluster.oracle import Oracle, Verdict
from bifolio.cluster.spawn import spawned
from bifolio.cluster.tokenizer import Tokenizer


def read_prompts(path: Path, count: int) -> list[str]:
    """First turns, taken evenly from the file, in the chat format of SmolLM2."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        turns = [json.loads(line)["turns"][0] for line in lines]
    chosen = [turns[i * len(turns) // count] for i in range(count)]
    return [f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n" for turn in chosen]


def generate(options: list[str], prefill: int, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], int]:
    """Ids of each prompt, and how many KV blocks moved for all of them. `options` are those of `bifolio serve`."""
    answers, blocks = [], 0
    began = time.monotonic()
    with (
        spawned([*options, "--exact", "--prefill", str(prefill), "--decode", "1"]) as cluster,
        Client(cluster.grpc_address) as client,
    ):
        for number, prompt in enumerate(prompts, 1):
            ids: list[int] = []
            for message in client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True):
                ids += message.token_ids
            blocks += message.usage.route.blocks
            answers.append(ids)
            print(
                f"\r{prefill} prefill replicas: {number}/{len(prompts)} prompts, {time.monotonic() - began:.0f} s",
                end="",
            )
    print()
    return answers, blocks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--quantization", choices=("int8",))
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parents[1] / "tests/data/mt_bench.jsonl.gz")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--oracle", type=Path)
    args = parser.parse_args()

    source = resolve(args.model)
    tokenizer = Tokenizer.load(source)
    prompts = [tokenizer.encode(prompt) for prompt in read_prompts(args.prompts, args.count)]
    options = ["--model", args.model, "--dtype", args.dtype, "--kernels", args.kernels]
    options += ["--quantization", args.quantization] if args.quantization else []
    split, blocks = generate(options, 1, prompts, args.tokens)
    single, none = generate(options, 0, prompts, args.tokens)
    assert blocks > 0, "the split cluster moved no block"
    assert none == 0, "the single pool moved blocks"

    differing = [i for i, (a, b) in enumerate(zip(split, single, strict=True)) if a != b]
    print(
        f"split against single pool: {args.count - len(differing)} of {args.count} answers equal; {blocks} blocks moved"
    )
    oracle = Oracle.load(args.oracle or source)
    verdicts = {"split": Verdict(), "single": Verdict()}
    for name, answers in (("split", split), ("single", single)):
        for prompt, answer in zip(prompts, answers, strict=True):
            oracle.judge(prompt, answer, verdicts[name], lambda line: print(f"  {line}"))
    for name, v in verdicts.items():
        print(f"{name:6} against transformers: {v.equal} ids equal, {v.ties} ties, {v.mismatches} mismatches")
    rounds_alike = args.dtype == "float32" and args.quantization is None
    wrong = rounds_alike and any(v.mismatches for v in verdicts.values())
    return 1 if wrong or differing else 0


if __name__ == "__main__":
    sys.exit(main())
