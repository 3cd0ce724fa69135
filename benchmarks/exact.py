#!/usr/bin/env python3
"""What exactness costs: a prompt and decode steps in exact mode, against the same in plain float32.

    python -P benchmarks/exact.py [--model smollm2-135m] [--threads 1] [--repeats 7]

Both are computed in one process, in turns; medians and their ratio. A plain replica has no MKL_CBWR; MKL reads it
once, so here both have it: the ratio is of the padded rows and of the attention alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

from bifolio.cluster.app import replica_environment
from bifolio.cluster.config import load
from bifolio.cluster.models import resolve


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    os.environ.update(replica_environment(load(None, {"engine.exact": True, "engine.threads": args.threads})))

    import torch

    from bifolio.replicas.batch import Row, build_batch
    from bifolio.replicas.kv_cache import KvCache
    from bifolio.replicas.llama import Llama
    from bifolio.replicas.runner import Runner
    from bifolio.replicas.weights import load as load_weights

    torch.set_num_threads(args.threads)
    runners = {}
    for name in ("plain", "exact"):
        config, weights = load_weights(resolve(args.model), torch.float32)
        cache = KvCache(8 * 34, config.layers, config.kv_heads, 16, config.head_dim, torch.float32)
        runners[name] = Runner(Llama(config, weights, exact=name == "exact"), cache)

    def rows(count: int, tokens: int, start: int) -> list[Row]:
        return [
            Row([(i * 7 + j) % config.vocab_size for j in range(tokens)], start, range(1 + 34 * i, 35 + 34 * i))
            for i in range(count)
        ]

    steps = {
        "a prompt's chunk of 256 tokens": rows(1, 256, 256),
        "decode, batch 1, context 512": rows(1, 1, 512),
        "decode, batch 8, context 512": rows(8, 1, 512),
    }
    for what, step in steps.items():
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(args.repeats + 1):
            for name, runner in runners.items():
                began = time.perf_counter()
                runner.run(build_batch(step, 16))
                seconds[name].append(time.perf_counter() - began)
        plain, exact = (statistics.median(seconds[name][1:]) for name in ("plain", "exact"))
        print(f"{what:32} plain {plain * 1e3:7.1f} ms   exact {exact * 1e3:7.1f} ms   ratio {exact / plain:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
