"""`bifolio serve` on its own: it ends on SIGINT and SIGTERM, whenever they come, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_kit import mark_of, open_stream, over_grpc, read_events, wait_until

from bifolio.cluster.local import free_ports
from bifolio.cluster.reaper import MARK, marked
from bifolio.cluster.spawn import SpawnedCluster

pytestmark = pytest.mark.cluster

LEAVE_S = 30.0


@dataclass
class Serving:
    cluster: SpawnedCluster
    output: Path

    def until(self, text: str) -> None:
        def printed() -> bool:
            assert self.cluster.process.poll() is None, self.output.read_text()
            return text in self.output.read_text()

        wait_until(printed, lambda: f"no {text!r} in {self.output.read_text()}", 120)

    def stop(self, number: signal.Signals, status: int = 0) -> None:
        """Send the signal; nothing of the cluster may be left half a minute later."""
        environment = wait_until(lambda: mark_of(self.cluster.process.pid), "Ray started no process")
        mark, directory = environment[MARK], Path(environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parents[1]
        assert marked(mark)
        assert directory.stat().st_mode & 0o777 == 0o700
        self.cluster.process.send_signal(number)
        assert self.cluster.process.wait(LEAVE_S) == status, self.output.read_text()
        wait_until(lambda: not marked(mark) and not directory.exists(), "something of it is left", LEAVE_S)
        if number == signal.SIGKILL:
            return
        assert "bifolio: stopped" in self.output.read_text()
        assert "Traceback" not in self.output.read_text()
        assert not list(Path("/tmp/ray").glob(f"session_*_{self.cluster.process.pid}")), "it started another Ray"


Serve = Callable[..., "contextlib.AbstractContextManager[Serving]"]


@pytest.fixture
def serve(glassllm_dir: Path, tmp_path: Path) -> Serve:
    @contextlib.contextmanager
    def run(*flags: str, ignoring: tuple[signal.Signals, ...] = ()) -> Iterator[Serving]:
        http_port, grpc_port = free_ports(2)
        output = tmp_path / "output.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*_command(glassllm_dir, http_port, grpc_port), *flags],
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: [signal.signal(each, signal.SIG_IGN) for each in ignoring],
            )
        try:
            yield Serving(SpawnedCluster(http_port, grpc_port, process), output)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(LEAVE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    return run


def _command(model: Path, http_port: int, grpc_port: int) -> list[str]:
    bifolio = Path(sys.executable).with_name("bifolio")
    flags = ["--dtype", "float32", "--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    return [str(bifolio), "serve", "--model", str(model), *flags]


def test_the_logs_say_which_kernels_compute(serve: Serve) -> None:
    """Here Triton's, interpreted: a real cluster on the kernels of GPUs."""
    with serve("--kernels", "triton") as serving:
        serving.until("bifolio: ready")
        logs = re.search(r"bifolio: logs: (\S+)", serving.output.read_text())
        assert logs
        said = [path.read_text().count("kernels: triton, interpreted") for path in Path(logs[1]).glob("worker-*.err")]
        assert sum(said) == 2  # a prefill and a decode replica
        answer = over_grpc(serving.cluster, [5 + 31 * i % 900 for i in range(40)], max_tokens=4, ignore_eos=True)
        assert len(answer.ids) == 4
        assert answer.route["blocks"] > 0
        serving.stop(signal.SIGTERM)


def test_sigint_stops_it_even_when_a_background_shell_made_it_ignore_that(serve: Serve) -> None:
    with serve(ignoring=(signal.SIGINT,)) as serving:
        serving.until("bifolio: ready")
        serving.stop(signal.SIGINT)


@pytest.mark.parametrize("stage", ["starting Ray", "loading"])
def test_sigterm_stops_it_while_it_starts(serve: Serve, stage: str) -> None:
    with serve() as serving:
        serving.until(f"bifolio: {stage}")
        serving.stop(signal.SIGTERM, 128 + signal.SIGTERM)
        assert "bifolio: ready" not in serving.output.read_text()


def test_killed_outright_it_leaves_nothing_behind_either(serve: Serve) -> None:
    with serve() as serving:
        serving.until("bifolio: ready")
        serving.stop(signal.SIGKILL, -signal.SIGKILL)


def test_sigterm_stops_it_with_a_stream_running(serve: Serve) -> None:
    with serve() as serving:
        serving.until("bifolio: ready")
        with contextlib.ExitStack() as stack:
            body = {"prompt": [5] * 8, "max_tokens": 120, "ignore_eos": True, "stream": True}
            streams = [stack.enter_context(open_stream(serving.cluster, **body)) for _ in range(40)]
            read_events(streams[0], 1)  # of 40, 32 run and the others wait for one of them to end
            serving.stop(signal.SIGTERM)


@pytest.mark.parametrize("taken", ["http.port", "grpc.port"])
def test_a_port_in_use_is_one_clear_line_before_anything_starts(glassllm_dir: Path, taken: str) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        ports = (port, *free_ports(1)) if taken == "http.port" else (*free_ports(1), port)
        done = subprocess.run(_command(glassllm_dir, *ports), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"bifolio: {taken}: cannot listen on 127.0.0.1:{port}")
    assert "choose another port" in line


def test_what_the_cluster_does_not_have_is_one_clear_line_and_nothing_is_left(
    glassllm_dir: Path, tmp_path: Path
) -> None:
    """Known only when Ray runs."""
    file = tmp_path / "cluster.yaml"
    file.write_text("pools: {decode: {labels: {zone: nowhere}}}")
    with tempfile.TemporaryDirectory(prefix="b-") as place:  # a short name: unix sockets are made below it
        command = [*_command(glassllm_dir, *free_ports(2)), str(file)]
        environment = {**os.environ, "TMPDIR": place}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert not list(Path(place).glob("bifolio-*"))
    assert done.returncode == 1
    assert "bifolio: stopped" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("bifolio: pools.decode.labels asks for zone=nowhere, and no node")
