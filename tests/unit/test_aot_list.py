"""The list of compiled kernels and what must hold of each: with readings that were made up, and no compiler."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def aot() -> Iterator[Any]:
    sys.path.append(str(BENCHMARKS))  # not first: some are called as packages are
    yield importlib.import_module("aot")
    sys.path.remove(str(BENCHMARKS))


def holding(aot: Any, row: Any) -> Any:
    """A reading of which everything holds."""
    kind = aot.multiply(row) if row.tile else ""
    nvidia = not row.architecture.startswith("gfx")
    shared = 4 * row.tile.keys * (128 if row.head_dim <= 64 else 256) if row.tile and nvidia else 0
    return aot.Reading(
        warps=row.tile.warps if row.tile else 4,
        registers=32,
        shared=shared,
        spills=0,
        instructions=1000,
        loads=1,
        copies=int(nvidia),
        stores=1,
        multiplies={kind: 8} if kind else {},
    )


def attention(aot: Any, architecture: str, phase: str, head_dim: int = 128) -> Any:
    wanted = (architecture, phase, head_dim, False)
    return next(row for row in aot.ROWS if (row.architecture, row.phase, row.head_dim, row.float8) == wanted)


def test_the_list_is_short_and_names_each_row_once(aot: Any) -> None:
    assert len(aot.ROWS) <= 24
    assert len({row.name for row in aot.ROWS}) == len(aot.ROWS)


def test_all_architectures_decode_and_prefill(aot: Any) -> None:
    compiled = {(row.architecture, row.phase, row.head_dim) for row in aot.ROWS}
    assert {row.architecture for row in aot.ROWS} == set(aot.ARCHITECTURES) == {"sm_80", "sm_90", "sm_100", "gfx942"}
    for architecture in aot.ARCHITECTURES:
        for phase in ("decode", "prefill"):
            assert {(architecture, phase, 64), (architecture, phase, 128)} <= compiled


def test_what_holds_is_not_reported(aot: Any) -> None:
    assert {row.name: said for row in aot.ROWS if (said := aot.broken(row, holding(aot, row), None))} == {}


@pytest.mark.parametrize(
    ("architecture", "phase", "change", "said"),
    [
        ("sm_90", "decode", {"spills": 8}, "spills 8, allowed 0"),
        ("gfx942", "prefill", {"spills": 1}, "spills 1, allowed 0"),
        ("sm_90", "decode", {"registers": 169}, "registers of 4 programs 169, allowed 0 to 128"),
        ("sm_90", "decode", {"shared": 80_000}, "bytes shared of 4 programs 80000, allowed 0 to 57344"),
        ("sm_90", "decode", {"shared": 30_000}, "bytes shared of two tiles of K and V 30000, allowed 32768 and more"),
        ("sm_90", "decode", {"loads": 3}, "128-bit loads 3, allowed 0 to 2"),
        ("sm_90", "decode", {"copies": 0}, "128-bit copies 0, allowed 1 and more"),
        ("sm_90", "decode", {"stores": 0}, "128-bit stores 0, allowed 1 and more"),
        ("sm_80", "prefill", {"multiplies": {}}, "HMMA 0, allowed 1 and more"),
        ("sm_90", "prefill", {"multiplies": {"HGMMA": 8, "HMMA": 1}}, "HMMA 1, allowed 0"),
        ("sm_100", "prefill", {"multiplies": {"HMMA": 8}}, "UTCMMA 0, allowed 1 and more"),
        ("gfx942", "decode", {"multiplies": {}}, "MFMA 0, allowed 1 and more"),
        ("gfx942", "decode", {"loads": 0}, "128-bit loads 0, allowed 1 and more"),
    ],
)
def test_what_does_not_hold_is_reported(
    aot: Any, architecture: str, phase: str, change: dict[str, Any], said: str
) -> None:
    row = attention(aot, architecture, phase)
    assert said in aot.broken(row, replace(holding(aot, row), **change), None)


def test_growth_past_the_golden_is_reported(aot: Any) -> None:
    row, golden = attention(aot, "sm_90", "decode"), {"registers": 32, "instructions": 800}
    reading = holding(aot, row)
    assert aot.broken(row, reading, golden) == []
    grown = replace(reading, registers=41, instructions=1001)
    assert aot.broken(row, grown, golden) == [
        "instructions, by the golden, 1001, allowed 0 to 1000",
        "registers, by the golden, 41, allowed 0 to 40",
    ]


@pytest.mark.parametrize(("spills", "status", "end"), [(0, 0, "24 of 24 hold"), (8, 1, "23 of 24 hold")])
def test_the_status_says_whether_all_hold(
    aot: Any,
    spills: int,
    status: int,
    end: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    readings = {row: holding(aot, row) for row in aot.ROWS}
    readings[aot.ROWS[0]] = replace(readings[aot.ROWS[0]], spills=spills)
    monkeypatch.setattr(aot, "compile_all", lambda rows: ("0.0", readings, {}))
    monkeypatch.setattr(sys, "argv", ["aot.py"])
    assert aot.main() == status
    printed = capsys.readouterr().out
    assert "no goldens for triton 0.0" in printed
    assert printed.splitlines()[-1] == end


def test_a_row_that_was_not_compiled_does_not_hold(
    aot: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot, "compile_all", lambda rows: ("0.0", {}, {rows[0]: "not compiled: a reason"}))
    monkeypatch.setattr(sys, "argv", ["aot.py"])
    assert aot.main() == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"{aot.ROWS[0].name}: not compiled: a reason",
        "0 of 24 hold",
    ]
