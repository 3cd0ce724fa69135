"""Streams that stand still at every frame, while one of their two processes is killed.

Stream `number` has its blocks at 10 * number + 1, on both sides, and its prefill halts after so many blocks as it is
told. For the process that dies too: so it takes no torch.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from leased_kit import TWO_HEADS, HaltingSource, a_start
from transfer_kit import WAIT

from bifolio.kv_manager.block_store import BlockStore
from bifolio.kv_manager.heads import whole
from bifolio.kv_manager.pull import PrefillClient
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.protos.messages import BlockId, Lease, Start

BLOCKS = 4  # of a stream
PLACES = BLOCKS + 2  # after so many frames it halts; the last but one: before the prefill's end; the last: after it
SIZE = 512  # bytes of a block
MOST = 200  # blocks of a store


def blocks_of(number: int) -> list[BlockId]:
    return [BlockId(10 * number + 1 + i) for i in range(BLOCKS)]


def halting(number: int, after: int, memory: bytes = b"") -> Start:
    start = a_start(10 * number + 1, blocks_of(number), BLOCKS * TWO_HEADS.block_size, memory=memory)
    return replace(start, arrival=float(after))


def halts_at(number: int, block: int) -> bool:
    """Whether the decode side of stream `number` halts at this block of it: each at another."""
    return number < BLOCKS and (block - 1) % 10 == number


class Staying(HaltingSource):
    """Its leases never close: what a stream waits for that has had its commit."""

    def _close(self, lease: Lease) -> None:
        threading.Event().wait()


def pull_at_every_frame(store: BlockStore, address: str, memory: bytes = b"") -> None:
    """BLOCKS streams that halt in the decode side's store, and as many and one that the prefill side halts."""
    client = PrefillClient(whole(store, TWO_HEADS), TrafficMeter())
    for number in range(2 * BLOCKS + 1):
        start = halting(number, PLACES if number < BLOCKS else number - BLOCKS, memory)
        threading.Thread(target=client.pull(address, start).run, args=(blocks_of(number),), daemon=True).start()


@contextlib.contextmanager
def child(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Another process, killed in the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    """Its next one."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def eventually(true: Callable[[], bool]) -> bool:
    """grpc closes what it has a little later, in threads of its own."""
    tick = threading.Event()
    return any(true() or tick.wait(0.01) for _ in range(int(WAIT / 0.01)))


def files() -> set[str]:
    """Open, by what they are; without what grpc waits with: it keeps as much of that as it ever used at once."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return {name for name in found if "anon_inode:" not in name}
