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
SECTIONS = ["device", "parity", "ceilings", "engine", "split", "roofline", "graphs", "layouts", "small"]
CRASHING = """
import os, sys
from pathlib import Path

sys.path.append(sys.argv[1])
from gpu_rows import Book, Case

book = Book(Path(sys.argv[2]), float(sys.argv[3]), {}, lambda: True, resume="--resume" in sys.argv)
ways = {"first": lambda _: {"x": 1}, "ends": lambda _: os._exit(139), "last": lambda _: {"x": 2}}
book.run([Case("section", "case", lambda: None, ways)])
"""
UNBUILT = """
import sys
from pathlib import Path

sys.path.append(sys.argv[1])
from gpu_rows import Book, Case


def build():
    print("builds")
    raise ValueError("no")


book = Book(Path(sys.argv[2]), 60, {}, lambda: True, resume=False)
ways = {"first": lambda _: {}, "second": lambda _: {}}
book.run([
    Case("section", "unbuilt", build, ways, lambda _: print("never")),
    Case("section", "built", lambda: 1, {"first": ways["first"]}, lambda _: print("leaves")),
])
"""


def held(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def run(out: Path, interpreted: bool, *options: str) -> tuple[list[dict[str, Any]], str]:
    """The rows and what was printed."""
    command = [sys.executable, "-P", str(BENCHMARKS / "gpu.py"), "--cpu-interpreter", "--minutes", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(interpreted))}
    scratch = ["--out", str(out), "--scratch", str(out)]
    done = subprocess.run([*command, *scratch, *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return held(out / "gpu.json"), done.stdout


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """All of it, and not interpreted: that is what the other tests do, and it takes ten times as long."""
    return run(tmp_path_factory.mktemp("gpu"), False)


def test_every_section_has_rows_and_is_reported(tiny: tuple[list[dict[str, Any]], str]) -> None:
    rows, printed = tiny
    assert list(dict.fromkeys(row["section"] for row in rows)) == SECTIONS
    titles = [line.split(":")[0].split(",")[0] for line in printed.splitlines() if line and line[0] != " "]
    assert [title for title in titles if title in SECTIONS] == SECTIONS


def test_parity_is_right_or_says_why_it_was_not_tried(tiny: tuple[list[dict[str, Any]], str]) -> None:
    rows = [row for row in tiny[0] if row["section"] == "parity"]
    assert sum(row["status"] == "ok" for row in rows) >= 40
    assert all(row["status"] == "ok" or (row["status"] == "skipped" and row["said"]) for row in rows)


def test_nothing_fails_where_there_is_no_gpu(tiny: tuple[list[dict[str, Any]], str]) -> None:
    assert {row["status"] for row in tiny[0]} == {"ok", "skipped"}


def test_what_a_cpu_took_is_said_to_be_no_measurement(tiny: tuple[list[dict[str, Any]], str]) -> None:
    assert "no time or rate below is a measurement" in tiny[1]
    assert "engine, not measured:" in tiny[1]


def test_steps_are_replayed_and_prompts_moved_in_the_interpreter_too(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, True, "--only", "engine", "--only", "split", "--row", "bits B3", "--row", "ids")
    compared = {row["way"]: (row["status"], row["numbers"]) for row in rows}
    assert compared["bits B3"] == ("ok", {"rows": 3, "other bits": 0, "other tokens": 0, "apart": 0.0})
    assert compared["ids, split"] == ("ok", {"tokens": 4, "same": 4})


def test_a_case_that_cannot_begin_is_tried_once_and_left_only_when_it_has_begun(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", UNBUILT, str(BENCHMARKS), str(tmp_path / "gpu.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["builds", "leaves"]
    said = [(row["way"], row["status"], row["said"]) for row in held(tmp_path / "gpu.json")]
    assert said == [
        ("first", "failed", "ValueError: no"),
        ("second", "failed", "as the row before: ValueError: no"),
        ("first", "ok", ""),
    ]


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
