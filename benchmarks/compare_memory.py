"""How fast memory is read from end to end, by one core and by several: no decode step is faster than its weights.

A script of its own, so that its threads and its array end with it: prints one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

BYTES = 1 << 30
ROUNDS = 5
WEIGHTS = 269.0  # MB of SmolLM2-135M in bfloat16, all of which a step reads


def bandwidth(threads: int) -> float:
    """GB/s, by a process of its own."""
    found = subprocess.run([sys.executable, "-P", __file__, str(threads)], capture_output=True, text=True, check=True)
    return float(json.loads(found.stdout)["gb_s"])


def main() -> int:
    import torch

    threads = int(sys.argv[1])
    torch.set_num_threads(threads)
    floats = torch.ones(BYTES // 4)
    ways: list[Callable[[], object]] = [lambda: torch.dot(floats, floats), lambda: torch.amax(floats)]
    best = []
    for read in ways:
        seconds = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            read()
            seconds.append(time.perf_counter() - began)
        best.append(BYTES / median(seconds[1:]) / 1e9)
    print(json.dumps({"gb_s": max(best)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
