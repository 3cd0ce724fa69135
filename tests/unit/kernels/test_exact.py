"""Exact arithmetic is right, its bits do not depend on a row's company, and where they do, the self-check says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from bifolio.kernels import linear, silu_mul

PROBE = """
import sys, torch
from bifolio.kernels import self_check
torch.set_num_threads(int(sys.argv[1]))
random = torch.Generator().manual_seed(1)
shapes = [(577, 96), (96, 333), (1000, 96), (33, 240)]
weights = [torch.randn(shape, generator=random) for shape in shapes]
cases = [(9, 3, 64, [None]), (7, 1, 80, [40])]
print(*(self_check(weights, *case) for case in cases))
"""


# Each operation in turn gets other last bits when it has seven rows
CROOKED = """
import sys, torch
from bifolio.kernels import self_check
module = sys.modules["bifolio.kernels.self_check"]
for name in ("linear", "rms_norm", "silu_mul", "paged_attention"):
    true = getattr(module, name)
    def crooked(x, *args, **options):
        result = true(x, *args, **options)
        bent = result[0] if isinstance(result, tuple) else result
        bent += 1e-6 * (len(x) == 7)
        return result
    setattr(module, name, crooked)
    try:
        self_check([torch.randn(6, 8)], 3, 1, 32)
    except ArithmeticError as error:
        print(error)
    setattr(module, name, true)
"""


def _in_an_exact_replica(script: str, *arguments: str) -> str:
    from bifolio.cluster.app import replica_environment
    from bifolio.cluster.config import load

    environment = {**os.environ, **replica_environment(load(None, {"engine.exact": True}))}
    environment.pop("OMP_NUM_THREADS")
    environment["OMP_WAIT_POLICY"] = "passive"  # threads that spin would starve each other beside other tests
    command = [sys.executable, "-P", "-W", "error", "-c", script, *arguments]
    return subprocess.check_output(command, env=environment, text=True).strip()


@pytest.fixture(scope="module")
def probe() -> dict[str, str]:
    """What the self-check says, by number of threads."""
    return {threads: _in_an_exact_replica(PROBE, threads) for threads in ("1", "2")}


def test_the_self_check_passes_for_odd_shapes(probe: dict[str, str]) -> None:
    assert [len(bits) for bits in probe["1"].split()] == [8, 8]


def test_other_threads_are_other_replicas_only_if_their_bits_differ(probe: dict[str, str]) -> None:
    assert probe["1"] == probe["2"]


@pytest.mark.parametrize("rows", [1, 3, 4, 63, 64, 65, 130])
def test_linear_is_that_of_torch(rows: int) -> None:
    random = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 80, generator=random), torch.randn(33, 80, generator=random)
    bias = torch.randn(33, generator=random)
    for b in (None, bias):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
        torch.testing.assert_close(linear(x, weight, b, exact=True).double(), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(linear(x, weight, b).double(), expected, rtol=0, atol=1e-4)


def test_the_activation_is_that_of_torch() -> None:
    x = torch.randn(70, 2 * 1001, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(silu_mul(x, exact=True), silu_mul(x), rtol=0, atol=1e-6)


def test_exact_is_for_float32() -> None:
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x: dtype"):
        linear(x, x, exact=True)


def test_the_self_check_finds_an_operation_whose_rows_depend_on_their_number() -> None:
    found = _in_an_exact_replica(CROOKED).splitlines()
    assert [line.split()[0] for line in found] == ["linear", "norm", "activation", "attention"]
    assert all(line.endswith(" with 7 rows") for line in found)
