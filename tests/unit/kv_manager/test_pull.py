"""The client against servers that lie, break, freeze or die: always TransferFailed or ReplicaGone, never a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import transfer_kit
from transfer_kit import (
    DONE,
    GEOMETRY,
    WAIT,
    GatedStore,
    ReachingStore,
    ScriptedSource,
    client_of,
    content,
    filled_store,
    ids,
    in_thread,
    no_threads_left,
    raw_serving,
    serving,
    start,
)

from bifolio.kv_manager.memory_store import MemoryStore
from bifolio.kv_manager.wire import ENVELOPE, FRAME, Ack, Complete, Frame, pack, pack_frame
from bifolio.protos.errors import ReplicaGone, TransferFailed
from bifolio.protos.messages import Commit, Generation, Heads

SIZE = 64
START = start()
ALL = Heads(0, 1)
FRAMES = [Frame(START.generation, i, ALL, i, 0, memoryview(bytes([i]) * SIZE)) for i in range(3)]
COMMIT = Commit(START.generation, GEOMETRY, GEOMETRY.layer_names, (ALL,), 10, 0, 3, 3, 3 * SIZE, b"\0" * 4)
PAYLOAD = ENVELOPE.size + FRAME.size  # where it begins


def packed(frame: Frame) -> bytes:
    return pack_frame(frame.generation, frame.index, frame.heads, frame.position, frame.offset, [frame.payload])


GOOD = [*map(packed, FRAMES), pack(COMMIT)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_threads_left():
        yield


def pull_from(messages: list[bytes]) -> Commit:
    with raw_serving(lambda _: messages) as address, client_of(MemoryStore(3, SIZE)) as client:
        return in_thread(client.pull(address, START), ids(1, 2, 3)).result(WAIT)


COPIED = start(memory=b"theirs")
WORDS = [Complete(START.generation, i, i, 1, Generation(1, i)) for i in range(3)]
GOOD_COPY = [*map(pack, WORDS), pack(COMMIT)]


def copy_from(messages: list[bytes]) -> Commit:
    store = ReachingStore(3, SIZE, theirs=filled_store(SIZE))
    with raw_serving(lambda _: messages) as address, client_of(store) as client:
        return in_thread(client.pull(address, COPIED), ids(1, 2, 3)).result(WAIT)


def flipped(message: bytes, at: int) -> bytes:
    return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]


def test_a_good_stream_is_committed():
    assert pull_from(GOOD) == COMMIT


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([GOOD[0], flipped(GOOD[1], PAYLOAD + 5), *GOOD[2:]], "checksum"),
        ([GOOD[0], flipped(GOOD[1], PAYLOAD - 1), *GOOD[2:]], "checksum"),
        ([GOOD[0], *GOOD[2:]], "frame 2 arrived where frame 1 was due"),
        ([GOOD[0], *GOOD], "frame 0 arrived where frame 1 was due"),
        ([GOOD[1], GOOD[0], *GOOD[2:]], "frame 1 arrived where frame 0 was due"),
        ([GOOD[0][:-1], *GOOD[1:]], "checksum"),
        ([GOOD[0][:8], *GOOD[1:]], "shorter than what each begins with"),
        ([packed(replace(FRAMES[0], generation=Generation(7, 8))), *GOOD[1:]], "lease 7.8"),
        ([packed(replace(FRAMES[0], position=3)), *GOOD[1:]], "block 3"),
        ([GOOD[0], packed(replace(FRAMES[1], position=0)), *GOOD[2:]], "of block 0"),
        ([packed(replace(FRAMES[0], offset=8)), *GOOD[1:]], "due were at most 192 from 0 of block 0"),
        ([packed(replace(FRAMES[0], heads=Heads(1, 1))), *GOOD[1:]], r"frame 0 is of heads 1\.\.1"),
        (GOOD[:3], "without a commit"),
        ([], "without a commit"),
        ([*GOOD[:2], GOOD[3]], "the commit says frames 3"),
        ([*GOOD[:2], pack(replace(COMMIT, frames=2, payload_bytes=2 * SIZE))], "128 of 192 bytes"),
        ([*GOOD[:3], pack(replace(COMMIT, layers=()))], "of layers none, due layers.0.self_attn"),
        ([*GOOD[:3], pack(replace(COMMIT, geometry=replace(GEOMETRY, dtype="int8")))], "dtype=int8"),
        ([*GOOD[:3], pack(replace(COMMIT, tokens=8))], "the commit says tokens 8"),
        ([*GOOD[:3], pack(replace(COMMIT, logits=b""))], "logits"),
        ([*GOOD[:3], pack(replace(COMMIT, generation=Generation(8, 9)))], "lease 8.9"),
        ([*GOOD, GOOD[3]], "Commit is out of place"),
        ([*GOOD, GOOD[0]], "Frame is out of place"),
        ([GOOD[0], b"\x7fgarbage and more"], "checksum"),
        ([b""], "a message of 0 bytes"),
        ([pack(START), *GOOD], "Start is out of place"),
        ([pack(Ack(0)), *GOOD], "Ack is out of place"),
    ],
)
def test_a_stream_that_is_not_the_prefill_asked_for_fails(messages, says):
    with pytest.raises(TransferFailed, match=says):
        pull_from(messages)


def test_a_good_stream_of_copies_is_committed():
    assert copy_from(GOOD_COPY) == COMMIT


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (GOOD, "a Frame came where blocks are copied"),
        ([GOOD_COPY[0], GOOD[1], *GOOD_COPY[2:]], "a Frame came where blocks are copied"),
        ([GOOD_COPY[0][:-1], *GOOD_COPY[1:]], "checksum"),
        ([GOOD_COPY[0], *GOOD_COPY[2:]], "frame 2 arrived where frame 1 was due"),
        ([GOOD_COPY[0], *GOOD_COPY], "frame 0 arrived where frame 1 was due"),
        ([pack(replace(WORDS[0], generation=Generation(7, 8))), *GOOD_COPY[1:]], "lease 7.8"),
        ([pack(replace(WORDS[0], position=3)), *GOOD_COPY[1:]], "block 3"),
        ([GOOD_COPY[0], pack(replace(WORDS[1], position=0)), *GOOD_COPY[2:]], "of block 0"),
        (GOOD_COPY[:3], "without a commit"),
        ([*GOOD_COPY[:2], pack(replace(COMMIT, frames=2, payload_bytes=2 * SIZE))], "128 of 192 bytes"),
        ([*GOOD_COPY[:3], pack(replace(COMMIT, payload_bytes=0))], "the commit says payload_bytes 0"),
        ([*GOOD_COPY, GOOD_COPY[0]], "Complete is out of place"),
    ],
)
def test_a_stream_of_copies_that_is_not_the_prefill_asked_for_fails(messages, says):
    with pytest.raises(TransferFailed, match=says):
        copy_from(messages)


def test_the_word_that_a_block_is_complete_is_no_use_to_who_cannot_copy_it():
    with pytest.raises(TransferFailed, match="a Complete came where blocks are sent"):
        pull_from(GOOD_COPY)


def test_an_error_after_the_commit_is_an_error():
    def answer(_):
        yield from GOOD
        raise RuntimeError("at the very end")

    with raw_serving(answer) as address, client_of(MemoryStore(3, SIZE)) as client:
        pull = client.pull(address, START)
        with pytest.raises(TransferFailed, match="at the very end"):
            pull.run(ids(1, 2, 3))


def test_a_misfit_cancels_the_prefill_side():
    """A block larger than ours. `begin` should have refused it, but nothing relies on that."""
    source = ScriptedSource(filled_store(2 * SIZE), 5, 8)
    with serving(source) as address, client_of(MemoryStore(3, SIZE)) as client:
        with pytest.raises(TransferFailed):
            client.pull(address, START).run(ids(1, 2, 3))
        assert source.next_job().closed.wait(WAIT)


def test_a_store_that_fails_cancels_the_prefill_side():
    class Broken(MemoryStore):
        def _write(self, block, offset, data):
            raise OSError("no memory")

    source = ScriptedSource(filled_store(SIZE), 5)
    with serving(source) as address, client_of(Broken(3, SIZE)) as client:
        with pytest.raises(OSError, match="no memory"):
            client.pull(address, START).run(ids(1, 2, 3))
        assert source.next_job().closed.wait(WAIT)


def test_closing_the_client_ends_its_pulls():
    source = ScriptedSource(filled_store(SIZE))
    with serving(source) as address, client_of(MemoryStore(3, SIZE)) as client:
        result = in_thread(client.pull(address, START), ids(1, 2, 3))
        source.next_job()
        client.close()
        with pytest.raises(TransferFailed, match="CANCELLED"):
            result.result(WAIT)


def test_nobody_there_is_noticed_and_a_later_server_is_found():
    source = ScriptedSource(filled_store(SIZE), DONE)
    with serving(source) as address, client_of(MemoryStore(3, SIZE)) as client:
        with pytest.raises(ReplicaGone, match=r"127\.0\.0\.1:1 broke: UNAVAILABLE"):
            client.pull("127.0.0.1:1", START).run(ids(1, 2, 3))
        assert client.pull(address, START).run(ids(1, 2, 3))


SERVER = """
from transfer_kit import *
source = ScriptedSource(filled_store(64), 5)  # one block, then compute that never ends
print(PrefillServer(source, 4).start(), flush=True)
threading.Event().wait()
"""
CLIENT = """
import sys
from transfer_kit import *
PrefillClient(whole(MemoryStore(3, 64), GEOMETRY), TrafficMeter()).pull(sys.argv[1], start()).run(ids(1, 2, 3))
"""


@contextmanager
def child(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs another process, and kills it."""
    path = os.pathsep.join([os.path.dirname(transfer_kit.__file__), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


dies_or_freezes = pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "freezes"])


@dies_or_freezes
def test_a_prefill_replica_lost_in_mid_stream_is_noticed(fate):
    store = GatedStore(3, SIZE)
    store.gate.set()
    with child(SERVER) as process, client_of(store, keepalive_s=0.2) as client:
        assert process.stdout is not None
        pull = client.pull(f"127.0.0.1:{int(process.stdout.readline())}", START)
        result = in_thread(pull, ids(1, 2, 3))
        assert store.begun.wait(WAIT)
        process.send_signal(fate)
        with pytest.raises(ReplicaGone, match="UNAVAILABLE"):
            result.result(WAIT)


@dies_or_freezes
def test_a_decode_replica_lost_in_mid_stream_is_noticed(fate):
    source = ScriptedSource(filled_store(SIZE), 5)
    with serving(source, keepalive_s=0.2) as address, child(CLIENT, address) as process:
        job = source.next_job()
        process.send_signal(fate)
        assert job.closed.wait(WAIT)


def test_a_replica_that_only_computes_for_long_is_not_lost():
    """More pings go into the silence than grpc allows by default: they are no offence."""
    source = ScriptedSource(filled_store(SIZE), 5)
    with serving(source) as address, client_of(MemoryStore(3, SIZE), keepalive_s=0.2) as client:
        result = in_thread(client.pull(address, START), ids(1, 2, 3))
        job = source.next_job()
        # grpc pings once a second at most, and the fourth would be one too many.
        assert not job.closed.wait(4.5)
        job.feed(DONE)
        assert result.result(WAIT).frames == 2  # a chunk of one block, and one of two


def test_concurrent_pulls_share_a_connection_and_do_not_mix():
    source = ScriptedSource(filled_store(SIZE, blocks=16), 5, DONE)
    target = MemoryStore(24, SIZE)
    with serving(source, max_streams=8) as address, client_of(target) as client:
        results = []
        for i in range(8):
            own = replace(start(blocks=(i + 1, i + 2, i + 3)), generation=Generation(1, i))
            results.append(in_thread(client.pull(address, own), ids(3 * i + 1, 3 * i + 2, 3 * i + 3)))
        assert [result.result(WAIT).generation.counter for result in results] == list(range(8))
    for i in range(8):
        for n in range(3):
            assert content(target, 3 * i + 1 + n) == content(source.store, i + 1 + n)
