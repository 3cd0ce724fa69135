"""Exact arithmetic in torch is right, its bits do not depend on a row's company, and where they do, the self-check
says so. `test_native.py` says it of the native kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from bifolio.kernels import linear, pack_linear, silu_mul, using

PROBE = """
import sys, torch
from bifolio.kernels import pack_linear, self_check, use
use("torch")
torch.set_num_threads(int(sys.argv[1]))
random = torch.Generator().manual_seed(1)
shapes = [(577, 96), (96, 333), (1000, 96), (33, 240)]
weights = [pack_linear(torch.randn(shape, generator=random), exact=True) for shape in shapes]
cases = [(9, 3, 64, [None]), (7, 1, 80, [40])]
print(*(self_check(weights, *case) for case in cases))
"""


# Each operation in turn gets other last bits when it has seven rows
CROOKED = """
import sys, torch
from bifolio.kernels import pack_linear, self_check, use
use("torch")
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
        self_check([pack_linear(torch.randn(6, 8), exact=True)], 3, 1, 32)
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
        for exact in (True, False):
            with using("torch"):
                got = linear(x, pack_linear(weight, b, exact=exact))
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-4)


def test_the_activation_is_that_of_torch() -> None:
    x = torch.randn(70, 2 * 1001, generator=torch.Generator().manual_seed(0))
    with using("torch"):
        torch.testing.assert_close(silu_mul(x, exact=True), silu_mul(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "int8"), [(torch.bfloat16, False), (torch.float32, True)])
def test_exact_is_for_float32(dtype: torch.dtype, int8: bool) -> None:
    with using("torch"), pytest.raises(ValueError, match=r"^(weight: dtype .* allowed|exact: with int8 .* allowed)"):
        pack_linear(torch.zeros(2, 8, dtype=dtype), quantization="int8" if int8 else None, exact=True)


def test_the_self_check_finds_an_operation_whose_rows_depend_on_their_number() -> None:
    found = _in_an_exact_replica(CROOKED).splitlines()
    assert [line.split()[0] for line in found] == ["linear", "norm", "activation", "attention"]
    assert all(line.endswith(" with 7 rows") for line in found)
