"""The interpreter computes bfloat16 as a GPU does: if a new Triton breaks the repair, this is where it shows."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl

from bifolio.kernels import interpreter

BF16 = torch.bfloat16


@triton.jit
def _binary(a, b, out, OP: tl.constexpr):
    i = tl.arange(0, 256)
    x, y = tl.load(a + i), tl.load(b + i)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "div":
        z = (x / y).to(tl.bfloat16)
    elif OP == "maximum":
        z = tl.maximum(x, y)
    elif OP == "minimum":
        z = tl.minimum(x, y)
    elif OP == "neg":
        z = -x
    elif OP == "abs":
        z = tl.abs(x)
    elif OP == "less":
        z = tl.where((x < y) & (y < 0.5), x, y)
    elif OP == "equal":
        z = tl.where((x == y) & (y == x), -x, x)
    elif OP == "not equal":
        z = tl.where((x != y) & (y != x), x, -x)
    elif OP == "fma":
        z = tl.fma(x, y, x)
    elif OP == "where":
        z = tl.where(x > y, x, y)
    else:
        z = tl.where((x > y) & (y < 0), x, 0.0).to(tl.bfloat16)
    tl.store(out + i, z)


@triton.jit
def _dot(a, b, out, sums):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    x, y = tl.load(a + i * 16 + j), tl.load(b + i * 16 + j)
    z = tl.dot(x, y)
    tl.store(out + i * 16 + j, z)
    tl.store(sums + tl.arange(0, 16), tl.sum(x.to(tl.float32), 1).to(tl.bfloat16))


OPERATIONS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "less": lambda x, y: torch.where((x < y) & (y < 0.5), x, y),
    "equal": lambda x, y: torch.where(x == y, -x, x),
    "not equal": lambda x, y: torch.where(x != y, x, -x),
    "fma": lambda x, y: torch.addcmul(x.double(), x.double(), y.double()).to(BF16),
    "where": lambda x, y: torch.where(x > y, x, y),
    "and": lambda x, y: torch.where((x > y) & (y < 0), x, torch.zeros_like(x)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_have_the_bits_of_torch(name: str) -> None:
    a, b = torch.randn(2, 256, generator=torch.Generator().manual_seed(1)).to(BF16)
    a[:4] = b[:4]
    out = torch.empty(256, dtype=BF16)
    _binary[(1,)](a, b, out, name)
    assert torch.equal(out, OPERATIONS[name](a, b))


def test_dots_and_sums_are_those_of_float32() -> None:
    a, b = torch.randint(-2, 3, (2, 16, 16), generator=torch.Generator().manual_seed(2)).to(BF16)
    out, sums = torch.empty(16, 16), torch.empty(16, dtype=BF16)
    _dot[(1,)](a, b, out, sums)
    assert torch.equal(out, a.float() @ b.float())
    assert torch.equal(sums, a.float().sum(1).to(BF16))


def test_a_result_is_rounded_to_the_nearest_even() -> None:
    numbers = torch.tensor([1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -3.4e38, torch.nan, torch.inf, 1e-45, -0.0])
    bits = torch.from_numpy(interpreter.narrow(numbers.numpy()).view("int16"))
    assert torch.equal(bits.view(BF16).nan_to_num(7), numbers.to(BF16).nan_to_num(7))
    assert bits.view(BF16)[5].isnan()


def test_threads_wait_for_each_other() -> None:
    a = torch.randn(256).to(BF16)

    def launch(_: int) -> bool:
        out = torch.empty(256, dtype=BF16)
        _binary[(1,)](a, a, out, "add")
        return torch.equal(out, a + a)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(launch, range(40)))


def test_an_interpreter_that_computes_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_WRAPPERS", {})
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", interpreter.GridExecutor.__call__)
    monkeypatch.setattr(interpreter, "_up", lambda handle: handle)
    monkeypatch.setattr(interpreter, "_down", lambda handle: handle)
    with pytest.raises(RuntimeError, match="bfloat16 is wrong in the interpreter of triton"):
        interpreter.repair()


def test_a_nan_of_any_bits_stays_one() -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32)
    narrow = torch.from_numpy(interpreter.narrow(bits.view(torch.float32).numpy()).view("int16"))
    assert narrow.view(BF16).isnan().all()


def test_one_launch_ends_before_the_next_begins() -> None:
    inside, most = 0, 0

    def launch(_: object) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1

    alone = interpreter._one_at_a_time(launch)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(alone, range(8)))
    assert most == 1
