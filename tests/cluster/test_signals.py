"""`bifolio serve` on its own: it ends on SIGINT and SIGTERM, whenever they come, and leaves nothing behind. What it may
not lose, and nobody else starts again, it does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_kit import command_of, descendants, mark_of, open_stream, over_grpc, read_events, snapshot, wait_until

from bifolio.cluster.local import free_ports
from bifolio.cluster.reaper import MARK, marked
from bifolio.cluster.serve import LOOK_S, TOGETHER_S
from bifolio.cluster.spawn import SpawnedCluster, end

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

    def process_of(self, name: bytes) -> int:
        """Its id, as soon as there is one; `name` is that of the program."""

        def found() -> list[int]:
            ours = descendants(self.cluster.process.pid)
            return [pid for pid in ours if command_of(pid).split(b"\0")[0].endswith(b"/" + name)]

        (pid,) = wait_until(found, f"there is no {name!r}")
        return int(pid)

    def stop(self, number: signal.Signals, status: int = 0, *, send: Callable[[int, int], None] = os.kill) -> None:
        """Send the signal; nothing of the cluster may be left half a minute later."""
        environment = wait_until(lambda: mark_of(self.cluster.process.pid), "Ray started no process")
        mark, directory = environment[MARK], Path(environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parents[1]
        assert marked(mark)
        assert directory.stat().st_mode & 0o777 == 0o700
        send(self.cluster.process.pid, number)
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
                start_new_session=True,  # a process group of its own, as a shell gives it
                preexec_fn=lambda: [signal.signal(each, signal.SIG_IGN) for each in ignoring],
            )
        try:
            yield Serving(SpawnedCluster(http_port, grpc_port, process), output)
        finally:
            end(process)

    return run


def rest_of(stream: socket.socket) -> bytes:
    """What was sent, to the end."""
    parts = []
    while part := stream.recv(65536):
        parts.append(part)
    return b"".join(parts)


def _command(model: Path, http_port: int, grpc_port: int) -> list[str]:
    bifolio = Path(sys.executable).with_name("bifolio")
    flags = ["--dtype", "float32", "--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    return [str(bifolio), "serve", "--model", str(model), *flags]


def test_the_logs_say_which_kernels_compute_and_a_second_signal_does_not_wait_for_them(serve: Serve) -> None:
    """Here Triton's, interpreted: a real cluster on the kernels of GPUs, and slow. It is stopped as a terminal does it,
    though a background shell has made it ignore that."""
    with serve("--kernels", "triton", ignoring=(signal.SIGINT,)) as serving:
        serving.until("bifolio: ready")
        logs = re.search(r"bifolio: logs: (\S+)", serving.output.read_text())
        assert logs
        said = [path.read_text().count("kernels: triton, interpreted") for path in Path(logs[1]).glob("worker-*.err")]
        assert sum(said) == 2  # a prefill and a decode replica
        answer = over_grpc(serving.cluster, [5 + 31 * i % 900 for i in range(40)], max_tokens=4, ignore_eos=True)
        assert len(answer.ids) == 4
        assert answer.route["blocks"] > 0
        with open_stream(serving.cluster, prompt=[5] * 8, max_tokens=110, ignore_eos=True, stream=True) as stream:
            read_events(stream, 1)
            serving.cluster.process.send_signal(signal.SIGINT)
            serving.until("stopping: 1 stream may end, up to 60 s; again to stop at once")
            time.sleep(TOGETHER_S + LOOK_S)  # what comes earlier is taken for the first
            serving.stop(signal.SIGINT)
            with contextlib.suppress(ConnectionError):
                assert b"[DONE]" not in rest_of(stream)


@pytest.mark.parametrize("stage", ["starting Ray", "loading"])
def test_sigterm_stops_it_while_it_starts(serve: Serve, stage: str) -> None:
    with serve() as serving:
        serving.until(f"bifolio: {stage}")
        serving.stop(signal.SIGTERM, 128 + signal.SIGTERM)
        assert "bifolio: ready" not in serving.output.read_text()


def test_gcs_and_valkey_are_started_again_and_killed_outright_it_leaves_nothing_behind(serve: Serve) -> None:
    with serve() as serving:
        serving.until("bifolio: ready")
        for name, said in (
            (b"gcs_server", "Ray's GCS has died"),
            (b"valkey-server", "the cluster's own Valkey has died"),
        ):
            os.kill(serving.process_of(name), signal.SIGKILL)
            assert len(over_grpc(serving.cluster, [5] * 8, max_tokens=4, ignore_eos=True).ids) == 4
            serving.until(f"{said}: started again")
            assert serving.process_of(name)
        assert len(over_grpc(serving.cluster, [5] * 8, max_tokens=4, ignore_eos=True).ids) == 4
        serving.stop(signal.SIGKILL, -signal.SIGKILL)


def test_sigterm_stops_it_with_a_stream_running(serve: Serve) -> None:
    """Sent to all of the group, as a terminal or supervisor may. What is open ends whole, and nothing new is begun."""
    with serve() as serving:
        serving.until("bifolio: ready")
        with contextlib.ExitStack() as stack:
            body = {"prompt": [5] * 8, "max_tokens": 120, "ignore_eos": True, "stream": True}
            streams = [stack.enter_context(open_stream(serving.cluster, **body)) for _ in range(100)]
            read_events(streams[0], 1)  # 32 run and the others wait for one of them to end
            wait_until(lambda: snapshot(serving.cluster)["waiting"] > 40, "nobody waits")
            serving.stop(signal.SIGTERM, send=os.killpg)
            for stream in streams:
                assert b"data: [DONE]" in rest_of(stream)
        assert "streams may end" in serving.output.read_text()


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
