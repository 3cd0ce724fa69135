"""Twelve faults of twelve kinds on a real cluster under load: what `make chaos` does with two hundred.

Which faults come is fixed, what they meet is not. Claimed is only what holds whatever they meet: every answer is the
undisturbed one, streams break with their ingress alone, none hangs, and nothing is left behind.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # not first: some are called as packages are
import chaos
from chaos_check import judge
from chaos_plan import plan
from chaos_show import totals

pytestmark = pytest.mark.cluster

SEED = 9
KINDS = (
    "kill prefill",
    "kill decode",
    "kill ingress",
    "kill manager",
    "kill redis",
    "term decode",
    "drain prefill",
    "pause decode",
    "stall decode engine",
    "leave waiting",
    "leave decode",
    "burst",
)


def test_twelve_faults_of_twelve_kinds(glassllm_dir: Path, tmp_path: Path) -> None:
    faults = plan(SEED, len(KINDS), chaos.TIMES, KINDS, pace=2.0)
    assert {planned.fault.kind for planned in faults} == set(KINDS)
    with chaos.cluster(glassllm_dir, tmp_path / "output.txt") as target:
        result = chaos.strike(target, glassllm_dir, faults, SEED, lanes=12, at_once=len(KINDS))
    verdict = judge(result)
    assert verdict.met, "\n".join([*totals(result, verdict), *verdict.complaints])
    assert verdict.ok, "nothing was answered"
