"""What `bifolio verify` says of what it counted, and when that is a failure. Nothing is computed here."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bifolio.cluster.config import ClusterConfig, load, resolved
from bifolio.cluster.oracle import Verdict
from bifolio.cluster.verify import _computing, _concluded, _table
from bifolio.replicas.differences import Way

GPU = {"engine.device": "cuda", "model.dtype": "bfloat16"}
SAME = Verdict(equal=10)


def way(name: str, against: str = "alone", *, other_bits: int = 0, flips: int = 0) -> Way:
    return Way(name, against, 10, 10 - other_bits, flips, 0.25 * bool(other_bits), 1e-3 * other_bits, other_bits)  # type: ignore[arg-type]


def concluded(given: dict[str, object], results: list[Way], verdict: Verdict = SAME) -> tuple[int, str]:
    out = io.StringIO()
    status = _concluded(resolved(load(None, given)), results, verdict, Console(file=out, width=200))
    return status, out.getvalue()


def printed(results: list[Way], verdict: Verdict = SAME, reason: str = "", missing: str = "") -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(_table(results, verdict, reason, missing))
    return out.getvalue()


def test_flips_between_ways_on_a_gpu_are_no_failure() -> None:
    results = [
        way("split", other_bits=3, flips=2),
        way("graph", "eager"),
        way("float32 on the CPU", "float32", flips=5),
    ]
    status, said = concluded(GPU, results)
    assert (status, said) == (0, "3 rows of logits with other bits in 20 token comparisons\n")  # float32 is apart


def test_a_replayed_step_may_have_other_bits_but_no_other_token() -> None:
    assert concluded(GPU, [way("graph", "eager", other_bits=3)])[0] == 0
    status, said = concluded(GPU, [way("graph", "eager", other_bits=3, flips=1)])
    assert status == 1
    assert "1 replayed decode steps choose another token" in said
    assert "engine.cuda_graphs: false" in said


@pytest.mark.parametrize(("given", "failed"), [({"engine.exact": True}, 1), ({"engine.exact": False}, 0)])
def test_other_bits_are_a_failure_where_exactness_is_promised(given: dict[str, object], failed: int) -> None:
    assert concluded(given | {"model.dtype": "bfloat16"}, [way("split", other_bits=1)])[0] == failed


@pytest.mark.parametrize(("dtype", "failed"), [("float32", 1), ("bfloat16", 0)])
def test_another_token_than_transformers_is_a_failure_in_float32(dtype: str, failed: int) -> None:
    assert concluded({"model.dtype": dtype}, [way("split")], Verdict(9, 0, 1))[0] == failed
    assert concluded({"model.dtype": dtype}, [way("split")], Verdict(9, 1, 0))[0] == 0  # a tie


def test_the_table_shows_how_far_ways_are_apart() -> None:
    table = printed([way("split"), way("graph", "eager", other_bits=4)])
    rows = [line.split() for line in table.splitlines() if "│" in line]
    assert [cell for cell in rows[0] if cell != "│"] == ["split", "10", "10", "0", "0.00%", "0", "0"]
    assert [cell for cell in rows[1] if cell != "│"] == ["graph", "10", "6", "0", "0.00%", "2.5e-01", "1.0e-03"]
    assert "graph: replayed decode steps against the same ones launched kernel by kernel" in table


def test_what_could_not_be_asked_is_said_with_the_reason() -> None:
    table = printed([way("split")], Verdict(), "no module", "takes 40 GB of memory, 9 GB are free")
    assert "not compared with transformers: no module" in table
    assert "not compared with float32 on the CPU: it takes 40 GB of memory, 9 GB are free" in table


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"engine.exact": True}, "float32"),
        ({"model.quantization": "int8"}, "bfloat16 with int8 weights"),
        (GPU, "bfloat16 on cuda"),
        ({"engine.device": "cpu", "engine.kernels": "triton"}, "bfloat16, triton kernels"),
    ],
)
def test_what_computes_is_named_where_it_is_not_usual(given: dict[str, object], says: str) -> None:
    config: ClusterConfig = resolved(load(None, {"engine.device": "cpu"} | given))
    assert _computing(config) == says
