"""The script itself: what it prints and writes, what it refuses, and Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import load
import pytest
from load_kit import PROSE, Reply, Server, event

SCRIPT = Path(load.__file__)
STEADY = ("steady", "--requests", "6", "--concurrency", "2", "--prompt-tokens", "30", "--output-tokens", "3")


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    (tmp_path / "prose.txt").write_text(PROSE, encoding="utf-8")
    return tmp_path / "prose.txt"


def main(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["load.py", *map(str, words)])
    return load.main()


def run(
    replies: list[Reply], *words: object, then: Callable[[Any, Server], Any] | None = None
) -> tuple[int, str, str, Server]:
    async def test() -> tuple[int, str, str, Server]:
        async with Server(replies) as server:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(SCRIPT), "--url", server.url, *map(str, words)),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            if then is not None:
                await then(process, server)
            out, err = await process.communicate()
            assert process.returncode is not None
            return process.returncode, out.decode(), err.decode(), server

    return asyncio.run(asyncio.wait_for(test(), 120))


def test_a_run_prints_its_figures_and_writes_each_request(prose: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = (*STEADY, "--text", prose, "--json", file, "--warmup", 2, "--slo-ttft", 60, "--slo-itl", 60)
    status, out, err, server = run([Reply()], *words)
    assert status == 0, err
    assert "6 ok, 0 failed" in out
    assert "57.1%, as 6 answers say" in out
    assert "with first token within 60 s, p99 of its gaps within 60 s" in out
    assert len(server.bodies) == 8
    assert server.connections <= 3  # one for each lane, and one to ask for the model
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["model"] == "the-model"
    assert [each["status"] for each in written["requests"]] == ["ok"] * 6
    assert written["figures"]["tokens"]["out"] == 18
    assert written["figures"]["goodput"]["good"] == 6
    prompts = {body["prompt"] for body in server.bodies}
    assert len(prompts) == 8  # those of the warm-up are others


def test_a_mixed_run_prints_its_phases(prose: Path) -> None:
    lengths = ("--streams", 2, "--stream-prompt", 10, "--stream-output", 3, "--long-prompt", 60, "--long-output", 3)
    times = ("--phases", 2, "--phase-seconds", 0.3, "--settle", 0.1, "--long-every", 0.1)
    status, out, err, server = run([Reply()], "mixed", "--text", prose, *lengths, *times)
    assert status == 0, err
    assert "p99 with long prompts / without" in out
    assert "stream requests" in out
    assert len({body["prompt"] for body in server.bodies}) >= 5  # three long ones and both streams


def test_failures_are_shown_and_are_the_status(prose: Path) -> None:
    replies = [Reply(), Reply((b"too much",), status=429), Reply()]
    status, out, _, _ = run(replies, "--text", prose, "--model", "m", *STEADY)
    assert status == 1
    assert "5 ok, 1 failed" in out
    assert "HTTP 429: too much" in out


def test_ctrl_c_prints_what_there_is(prose: Path, tmp_path: Path) -> None:
    async def interrupt(process: Any, server: Server) -> None:
        await server.wait_for(3)
        process.send_signal(signal.SIGINT)

    replies = [Reply(), Reply((event("a"),), then="hang")]
    words = (*STEADY, "--text", prose, "--json", tmp_path / "out.json")
    status, out, err, _ = run(replies, *words, then=interrupt)
    assert status == 130, err
    assert "interrupted" in out
    assert "1 ok, 0 failed, 2 cut off" in out
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["figures"]["interrupted"]


def test_a_failed_warm_up_ends_it(prose: Path) -> None:
    status, _, err, server = run([Reply((b"no",), status=500)], "--text", prose, "--warmup", 1, *STEADY)
    assert status == 2
    assert "a warm-up request failed: HTTP 500: no" in err
    assert len(server.bodies) == 1


def test_a_dry_run_sends_nothing(
    prose: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--url", "http://127.0.0.1:1/v1", *STEADY, "--dry-run", "--text", prose)
    assert main(monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    assert "180" in printed
    assert "its tokens estimated" in printed


def test_a_slowed_clock_is_said_loudly(
    prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}
    (tmp_path / "trace").write_text(json.dumps(row), encoding="utf-8")
    words = ("trace", tmp_path / "trace", "--clock-scale", 2.5, "--dry-run", "--text", prose)
    assert main(monkeypatch, *words) == 0
    assert "CLOCK IS SLOWED 2.5 TIMES" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("steady", "--requests", "3"), "one of --concurrency"),
        ((*STEADY, "--token-ids"), "--token-ids needs --tokenizer"),
        (("trace", "/no/such/file"), "/no/such/file cannot be read"),
        (("steady", "--rate", "1", "--duration", "0.000001"), "the plan has no requests"),
        ((*STEADY, "--url", "http://127.0.0.1:1/v1"), "is --url right?"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    words: tuple[str, ...],
    said: str,
    prose: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(monkeypatch, "--text", prose, *words) == 2
    assert said in capsys.readouterr().err


def test_options_may_stand_before_the_workload_or_after_it() -> None:
    parsed = load.parser().parse_args(["--seed", "3", "--model", "a", *STEADY, "--model", "b"])
    assert (parsed.seed, parsed.model, parsed.temperature) == (3, "b", 0.0)
