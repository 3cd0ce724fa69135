"""The GPU's benchmark where there is no GPU: its code on the CPU, and how it outlives a row that ends the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECTIONS = ["device", "parity", "ceilings", "roofline", "layouts", "graphs", "small"]
CRASHING = """
import os, sys
from pathlib import Path

sys.path.append(sys.argv[1])
from gpu_rows import Book, Case

book = Book(Path(sys.argv[2]), float(sys.argv[3]), {}, lambda: True, resume="--resume" in sys.argv)
ways = {"first": lambda _: {"x": 1}, "ends": lambda _: os._exit(139), "last": lambda _: {"x": 2}}
book.run([Case("section", "case", lambda: None, ways)])
"""


def held(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """The rows and what was printed."""
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-P", str(BENCHMARKS / "gpu.py"), "--tiny", "--minutes", "3", "--out", str(out)]
    # Not interpreted: that is what the other tests do, and it takes three times as long
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return held(out / "gpu.json"), done.stdout


def test_every_section_has_rows_and_is_reported(tiny: tuple[list[dict[str, Any]], str]) -> None:
    rows, printed = tiny
    assert list(dict.fromkeys(row["section"] for row in rows)) == SECTIONS
    assert [line.split(":")[0] for line in printed.splitlines() if line.split(":")[0] in SECTIONS] == SECTIONS


def test_parity_is_right_or_says_why_it_was_not_tried(tiny: tuple[list[dict[str, Any]], str]) -> None:
    rows = [row for row in tiny[0] if row["section"] == "parity"]
    assert sum(row["status"] == "ok" for row in rows) >= 40
    assert all(row["status"] == "ok" or (row["status"] == "skipped" and row["said"]) for row in rows)


def test_nothing_fails_but_for_want_of_a_gpu(tiny: tuple[list[dict[str, Any]], str]) -> None:
    failed = {row["way"] for row in tiny[0] if row["status"] not in ("ok", "skipped")}
    assert failed <= {"nvidia-smi", "clocks", "SDPA cuDNN"}


def test_a_row_that_ends_the_process_is_passed_over_when_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", CRASHING, str(BENCHMARKS), str(tmp_path / "gpu.json"), "60"]
    assert subprocess.run(command, capture_output=True).returncode == 139
    assert subprocess.run([*command, "--resume"], capture_output=True).returncode == 0
    rows = held(tmp_path / "gpu.json")
    assert [(row["way"], row["status"]) for row in rows] == [("first", "ok"), ("ends", "failed"), ("last", "ok")]


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", CRASHING, str(BENCHMARKS), str(tmp_path / "gpu.json"), "0"]
    subprocess.run(command, capture_output=True, check=True)
    assert {(row["status"], row["said"]) for row in held(tmp_path / "gpu.json")} == {
        ("not run", "the 0 minutes are over")
    }


def test_the_shell_script_parses() -> None:
    subprocess.run(["bash", "-n", str(BENCHMARKS / "gpu.sh")], check=True)
