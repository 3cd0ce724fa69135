"""Hosts that are network namespaces on a bridge: each has an address, a loopback and ports of its own, and a link.

    with netns_hosts({"head": {}, "p0": {"pool": "prefill"}, "d0": {"pool": "decode"}}, doors) as hosts:
        hosts.cut("d0"); hosts.heal("d0")              its link, both ways
        hosts.slow("d0", "1mbit"); hosts.unslow("d0")
        hosts.kill("d0"); hosts.revive("d0")           all of its processes; a new Ray node

The first one is the head. File system and process ids are those of the machine. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from hosts import QUICK_DEATH, STORE, Labels, NoHosts, kill_all, new_name, pids_of, remove_left_over, tool, undertaker

from bifolio.cluster.gcs import command_of
from bifolio.cluster.local import environment

START_S = 120.0  # until a Ray node that does not come up is given up
TRIES = 3  # a raylet dies when its agents need more than 15 s to come up: on a busy machine they do
LOOK_S = 0.1
NET = "10.77.0"  # of every run: each has a bridge of its own
GCS_PORT = 6379
CLONE_NEWNET = 0x40000000


def require_namespaces() -> None:
    """Raise NoHosts, in one sentence, unless this process may make hosts, and has what it makes them with."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NoHosts(f"hosts need the command {' and '.join(missing)} (Debian's iproute2)")
    if os.geteuid() != 0:
        raise NoHosts("hosts need root: they are network namespaces")
    probe = f"{new_name()}-try"
    try:
        tool("ip", "netns", "add", probe)
        try:
            tool("ip", "-n", probe, "link", "add", "br0", "type", "bridge")
            tool("ip", "-n", probe, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
            tool("tc", "-n", probe, "qdisc", "add", "dev", "v0", "root", *_tbf("1mbit"))
        finally:
            tool("ip", "netns", "del", probe)
    except subprocess.CalledProcessError as error:
        what = " ".join(error.cmd)
        raise NoHosts(f"this machine allows no network namespaces: `{what}` says {error.stderr.strip()}") from error


class NetnsHosts:
    """Made by `netns_hosts`."""

    def __init__(self, base: str, directory: Path, mark: str, hosts: Mapping[str, Labels], doors: Collection[int]):
        self.names = tuple(hosts)
        self.head = self.names[0]
        self.address = f"{NET}.10:{GCS_PORT}"
        self._base, self._directory, self._labels = base, directory, dict(hosts)
        self._common = environment(directory / "HOST", mark, doors) | QUICK_DEATH
        self._common |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(directory / "gcs")}
        self._lives = itertools.count()
        self._commands: dict[str, subprocess.Popen[bytes]] = {}

    # -- what a host is

    def ip(self, name: str) -> str:
        return f"{NET}.{10 + self.names.index(name)}"

    def namespace(self, name: str) -> str:
        return f"{self._base}-{name}"

    def environment(self, name: str) -> dict[str, str]:
        """For a process there: this one's, with what Ray and Serve must read. Each host has files of its own."""
        of_host = {key: value.replace("HOST", name) for key, value in self._common.items()}
        return {**os.environ, **of_host}

    def command(self, name: str, *arguments: str) -> list[str]:
        """`arguments`, run on that host."""
        return ["ip", "netns", "exec", self.namespace(name), *arguments]

    def pids(self, name: str) -> list[int]:
        """Its processes, without this one, which may be `inside`."""
        return [pid for pid in pids_of(self.namespace(name)) if pid != os.getpid()]

    def alive(self, name: str) -> bool:
        """Whether its Ray node runs."""
        return any(_name_of(pid) == "raylet" for pid in self.pids(name))

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """This thread, with all threads and processes that it starts, is on that host for the time of the context."""
        with open("/proc/thread-self/ns/net") as outside:
            _enter(f"/run/netns/{self.namespace(name)}")
            try:
                yield
            finally:
                _set_namespace(outside.fileno())

    # -- its link

    def cut(self, name: str) -> None:
        """Nothing comes in and nothing goes out, and nobody is told."""
        tool("ip", "-n", self.namespace("net"), "link", "set", self._port(name), "down")

    def heal(self, name: str) -> None:
        tool("ip", "-n", self.namespace("net"), "link", "set", self._port(name), "up")

    def slow(self, name: str, rate: str) -> None:
        """At most so much in each direction: 1mbit."""
        for where, device in self._ends(name):
            tool("tc", "-n", where, "qdisc", "replace", "dev", device, "root", *_tbf(rate))

    def unslow(self, name: str) -> None:
        for where, device in self._ends(name):
            tool("tc", "-n", where, "qdisc", "del", "dev", device, "root")

    def _port(self, name: str) -> str:
        return f"v{self.names.index(name)}"

    def _ends(self, name: str) -> tuple[tuple[str, str], ...]:
        """Of its cable: namespaces, and devices there."""
        return (self.namespace(name), "eth0"), (self.namespace("net"), self._port(name))

    # -- its processes

    def kill(self, name: str) -> Collection[int]:
        """All of them, at once and without a word; returns which. The head has what nobody can do without."""
        if name == self.head:
            raise ValueError(f"{name} is the head, with all that the others need; of it only the GCS can be killed")
        pids = self.pids(name)
        self._kill(name)
        return pids

    def revive(self, name: str) -> None:
        """A new Ray node there, unless the old one runs: one that was cut off for long ends when its link heals."""
        if self.alive(name):
            return
        self._kill(name)
        self.start(name)

    def start(self, name: str) -> None:
        for last in (False,) * (TRIES - 1) + (True,):
            self.begin(name)
            try:
                self.await_started(name)
                return
            except NoHosts:
                self._kill(name)
                if last:
                    raise

    def begin(self, name: str) -> None:
        life = self._directory / name / str(next(self._lives))  # Ray's sessions on one file system would clash
        life.mkdir(parents=True)
        head = name == self.head
        role = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"] if head else [f"--address={self.address}"]
        labels = ",".join(f"{key}={value}" for key, value in {"host": name, **self._labels[name]}.items())
        ray = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", *role]
        ray += [f"--node-ip-address={self.ip(name)}", f"--labels={labels}", "--num-cpus=1", "--disable-usage-stats"]
        ray += [f"--object-store-memory={STORE}", f"--temp-dir={life}"]
        with open(life / "ray-start.log", "wb") as log:
            self._commands[name] = subprocess.Popen(
                self.command(name, *ray),
                env=self.environment(name),
                cwd=life,  # Ray's workers look for modules where it was started
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def await_started(self, name: str) -> None:
        deadline = time.monotonic() + START_S
        log = max((self._directory / name).glob("[0-9]*"), key=lambda life: int(life.name)) / "ray-start.log"
        while b"Ray runtime started" not in log.read_bytes():
            if self._commands[name].poll() is not None or time.monotonic() > deadline:
                raise NoHosts(f"the Ray node of {name} did not start: {log.read_text()[-2000:]}")
            time.sleep(LOOK_S)

    def restart_gcs(self, away_s: float) -> None:
        """The head's GCS is killed, and comes back so much later with what it had stored."""
        (pid,) = (pid for pid in self.pids(self.head) if _name_of(pid) == "gcs_server")
        argv = command_of(pid)
        entries = Path(f"/proc/{pid}/environ").read_bytes().rstrip(b"\0").split(b"\0")
        variables = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
        where, head = os.readlink(f"/proc/{pid}/cwd"), self._commands[self.head]
        for each in (head.pid, *_children(head.pid)):
            if _name_of(each) not in ("gcs_server", "raylet") and b"--block" in command_of(each):
                os.kill(each, signal.SIGSTOP)  # `ray start --block` would end the node with its GCS
        os.kill(pid, signal.SIGKILL)
        time.sleep(away_s)
        with open(self._directory / "gcs.log", "ab") as log:
            program = self.command(self.head, *map(os.fsdecode, argv))
            self._gcs = subprocess.Popen(
                program, env=variables, cwd=where, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _kill(self, name: str) -> None:
        kill_all(self.namespace(name))
        if (command := self._commands.pop(name, None)) is not None:
            command.wait()


@contextlib.contextmanager
def netns_hosts(hosts: Mapping[str, Labels], doors: Collection[int] = ()) -> Iterator[NetnsHosts]:
    """A Ray cluster of these hosts, by name, each with labels of its node; `host` is a label of each, its name.

    `doors` are ports that will be listened on there. Raises NoHosts if this machine does not allow it.
    """
    require_namespaces()
    remove_left_over()
    base, mark = new_name(), uuid.uuid4().hex
    directory = Path(tempfile.mkdtemp(prefix="bfh-"))  # short, as unix sockets lie below it
    with undertaker(mark, directory, base):
        here = NetnsHosts(base, directory, mark, hosts, doors)
        _wire(here)
        for name in here.names:
            here.start(name)
        yield here


def _wire(hosts: NetnsHosts) -> None:
    """The bridge, in a namespace of its own, and a cable from there to each host."""
    net = hosts.namespace("net")
    tool("ip", "netns", "add", net)
    tool("ip", "-n", net, "link", "add", "br0", "type", "bridge")
    tool("ip", "-n", net, "link", "set", "br0", "up")
    for i, name in enumerate(hosts.names):
        there = hosts.namespace(name)
        tool("ip", "netns", "add", there)
        tool("ip", "-n", there, "link", "set", "lo", "up")
        tool("ip", "-n", net, "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", there)
        tool("ip", "-n", net, "link", "set", f"v{i}", "master", "br0", "up")
        tool("ip", "-n", there, "addr", "add", f"{hosts.ip(name)}/24", "dev", "eth0")
        tool("ip", "-n", there, "link", "set", "eth0", "up")


def _tbf(rate: str) -> tuple[str, ...]:
    return "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms"


def _name_of(pid: int) -> str:
    return os.path.basename(os.fsdecode(command_of(pid)[0]))


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _enter(namespace: str) -> None:
    with open(namespace) as file:
        _set_namespace(file.fileno())


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
