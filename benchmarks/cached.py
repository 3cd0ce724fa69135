"""The prefix cache on a real cluster: how much of a trace it serves, and whether answers from it have the same bits.

    python -P benchmarks/cached.py --trace shared/data/traces/mooncake_conversation.jsonl.gz

Starts split pools in exact mode with a bounded cache, so that blocks are evicted as well, and asks each prompt of the
trace twice: first all of them in the trace's order, several at a time, sharing what they can; then each under a salt of
its own, which shares nothing. Tokens and log-probabilities of the two must be equal, to the last bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # -P leaves it out

import measure
from load_plan import Request
from load_text import PROSE, ROOT, Book, read_text, read_tokenizer
from load_trace import trace
from rich.table import Table

from bifolio.cluster.client import Client
from bifolio.cluster.models import resolve
from bifolio.cluster.spawn import SpawnedCluster, spawned

DIVIDE = 32  # one id of Mooncake's traces is a block of 16 tokens then


@dataclass(frozen=True, slots=True)
class Reply:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="one of Mooncake's")
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=60, metavar="N", help="of the trace; default: %(default)s")
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="longer ones are left out; 1024")
    parser.add_argument("--kv-memory", default="16384 tokens", help="of each replica; default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    model = resolve(args.model)
    prose = next((path for path in (ROOT / PROSE, ROOT.parent / PROSE) if path.exists()), None)
    text = " ".join(map(str, range(200_000))) if prose is None else read_text(prose)
    book = Book(text, read_tokenizer(model))
    requests = trace(book, args.trace, divide=DIVIDE, limit=args.requests, context=args.context).timed
    options = ["--model", str(model), "--exact", "--kv-memory", args.kv_memory, "--threads", str(args.threads)]
    with spawned(options, sys.stderr.buffer) as cluster:
        cached = ask(cluster, requests, lambda request: "", args.concurrency)
        evicted = cluster.get("/status")[1]["cache"]["evicted_blocks"]
        cold = ask(cluster, requests, lambda request: f"alone {request.index}", args.concurrency)
    equal = sum(a.tokens == b.tokens and a.logprobs == b.logprobs for a, b in zip(cached, cold, strict=True))
    show(args.trace.name, cached, cold, evicted, equal)
    return 0 if equal == len(requests) else 1


def ask(
    cluster: SpawnedCluster, requests: Sequence[Request], salt_of: Callable[[Request], str], concurrency: int
) -> list[Reply]:
    done = 0

    def one(request: Request) -> Reply:
        nonlocal done
        with Client(cluster.grpc_address) as client:
            messages = list(
                client.generate(
                    request.prompt.ids,
                    max_tokens=request.output_tokens,
                    temperature=1.0,
                    seed=request.index,
                    ignore_eos=True,
                    logprobs=0,
                    cache_salt=salt_of(request),
                )
            )
        done += 1
        print(f"\r{done} of {len(requests)} ", end="", file=sys.stderr, flush=True)
        usage = messages[-1].usage
        return Reply(
            tuple(token for message in messages for token in message.token_ids),
            tuple(entry.logprob for message in messages for entry in message.logprobs),
            usage.prompt_tokens,
            usage.cached_tokens,
        )

    began = time.monotonic()
    with ThreadPoolExecutor(concurrency) as threads:
        replies = list(threads.map(one, requests))
    print(f"in {time.monotonic() - began:.1f} s", file=sys.stderr)
    return replies


def show(name: str, cached: Sequence[Reply], cold: Sequence[Reply], evicted: int, equal: int) -> None:
    table = Table("answers", "prompt tokens", "of them cached", "blocks evicted", "equal to cold, bit for bit")
    for way, replies in (("cached", cached), ("cold", cold)):
        asked, hit = (sum(r.prompt_tokens for r in replies), sum(r.cached_tokens for r in replies))
        compared = [str(evicted), f"{equal} of {len(cached)}"] if way == "cached" else []
        table.add_row(way, str(asked), f"{hit} ({hit / asked:.1%})", *compared)
    measure.show(f"{name} / {DIVIDE}: {len(cached)} requests in exact mode", table)


if __name__ == "__main__":
    sys.exit(main())
