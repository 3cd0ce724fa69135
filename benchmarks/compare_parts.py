"""How large a comparison is: which engines each part has, at which points, for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from load_figures import Slo

PARTS = ("memory", "steady", "mixed", "goodput")
STEADY = ("bifolio", "bifolio int8", "vllm", "vllm installed", "llama.cpp", "transformers")
MIXED = ("bifolio auto", "vllm", "vllm installed", "llama.cpp")
GOODPUT = ("bifolio split", "bifolio", "bifolio auto", "vllm")
SLO = Slo(ttft=3.0, itl=0.25)
MOST = 2000  # tokens of a trace's request, prompt and output; longer ones are left out
BREAKS = 0.9  # a load is kept while this share of the requests is good


@dataclass(frozen=True, slots=True)
class Size:
    rounds: Mapping[str, int]  # of each part
    streams: tuple[int, ...]
    output: int  # tokens of a steady stream
    phase: float  # seconds of the mixed load's phases
    phases: int
    trace_seconds: float
    scales: Mapping[str, tuple[float, ...]]  # of each trace: how many times its clock is slowed


def full() -> Size:
    """Some half an hour, most of it the traces; more where vLLM takes minutes to start."""
    scales = {"conversation": (8.0, 4.0, 2.0), "azure": (2.0, 1.0)}
    return Size({"steady": 3, "mixed": 2, "goodput": 1}, (1, 8, 16, 32), 64, 24.0, 2, 20.0, scales)


def quick() -> Size:
    """Some 6 minutes without them."""
    return Size(dict.fromkeys(PARTS, 1), (1, 8, 16, 32), 48, 9.0, 2, 24.0, {"conversation": (4.0,)})
