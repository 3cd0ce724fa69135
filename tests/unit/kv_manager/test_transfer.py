"""Server and client together, over loopback; and the server against clients that misbehave."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace

import grpc
import pytest
from transfer_kit import (
    DONE,
    WAIT,
    GatedStore,
    RawClient,
    ScriptedSource,
    client_of,
    committed,
    content,
    filled_store,
    ids,
    in_thread,
    no_threads_left,
    outbox_of,
    serving,
    start,
)

from bifolio.kv_manager.memory_store import MemoryStore
from bifolio.kv_manager.transfer import PrefillServer
from bifolio.kv_manager.wire import Ack, Frame, pack, unpack
from bifolio.protos.errors import (
    BifolioError,
    DoesNotFit,
    Draining,
    GeometryMismatch,
    Overloaded,
    ReplicaGone,
    Revoked,
    StalePlacement,
    TransferFailed,
)
from bifolio.protos.messages import Commit, Start, TokenLogprobs

SMALL = 96
LARGE = (2 << 20) + 96  # three frames a block


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_threads_left():
        yield


@pytest.mark.parametrize("block_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_what_arrives_is_what_was_computed(block_bytes, skip):
    source, target = ScriptedSource(filled_store(block_bytes), 4, 8, DONE), MemoryStore(4, block_bytes)
    with serving(source) as address, client_of(target) as client:
        pull = client.pull(address, start(skip=skip))
        commit = pull.run(ids(2, 4, 1))
    frames = (3 - skip) * (1 if block_bytes == SMALL else 3)
    assert commit == committed(skip, frames, (3 - skip) * block_bytes)
    for here, there in list(zip((2, 4, 1), (3, 1, 2), strict=True))[skip:]:
        assert content(target, here) == content(source.store, there)
    for untouched in (3, *(2, 4, 1)[:skip]):
        assert content(target, untouched) == bytes(block_bytes)


def test_the_prompts_logprobs_come_with_the_commit():
    asked = replace(start(), prompt_logprobs=1)
    logprobs = tuple(TokenLogprobs(token, -float(token), ((5, -0.5),)) for token in asked.tokens[1:])
    source = ScriptedSource(filled_store(SMALL), 4, replace(DONE, prompt_logprobs=logprobs))
    with serving(source) as address, client_of(MemoryStore(4, SMALL)) as client:
        assert client.pull(address, asked).run(ids(1, 2, 3)).prompt_logprobs == logprobs


def test_logprobs_that_were_asked_for_and_did_not_come_fail_the_transfer():
    source = ScriptedSource(filled_store(SMALL), 4, DONE)
    with serving(source) as address, client_of(MemoryStore(4, SMALL)) as client:
        pull = client.pull(address, replace(start(), prompt_logprobs=1))
        with pytest.raises(TransferFailed, match="logprobs of 0 tokens"):
            pull.run(ids(1, 2, 3))


def test_a_full_last_block_needs_no_special_end():
    source, target = ScriptedSource(filled_store(SMALL), 4, 12, DONE), MemoryStore(4, SMALL)
    with serving(source) as address, client_of(target) as client:
        assert client.pull(address, start(tokens=12)).run(ids(1, 2, 3)).block_count == 3
    assert content(target, 3) == content(source.store, 2)


def test_blocks_arrive_before_the_last_chunk_is_computed():
    source, target = ScriptedSource(filled_store(SMALL), 5), GatedStore(4, SMALL)
    target.gate.set()
    with serving(source) as address, client_of(target) as client:
        result = in_thread(client.pull(address, start()), ids(1, 2, 3))
        assert target.begun.wait(WAIT)  # of block position 0, while the job waits to be fed
        source.next_job().feed(DONE)
        assert result.result(WAIT).frames == 2  # a chunk of one block, and one of two
    assert target.writes == 3


@pytest.mark.parametrize(
    ("cached", "skip", "at_once"), [(0, 0, []), (2, 0, [0, 1]), (2, 1, [1]), (1, 1, []), (1, 2, []), (2, 3, [])]
)
def test_what_is_cached_is_sent_at_once_unless_the_other_side_has_it(cached, skip, at_once):
    outbox = outbox_of(start(skip=skip), filled_store(SMALL))
    assert positions(outbox.send(4 * cached)) == at_once
    assert positions(outbox.send(computed=10)) == list(range(max(cached, skip), 3))
    commit = unpack(next(outbox.commit(DONE)))
    assert (commit.first_block, commit.block_count) == (skip, 3 - skip)


def positions(frames: Iterable[bytes]) -> list[int]:
    """Of the blocks whose bytes are in these frames."""
    return [position for frame in map(unpack, frames) for position, _, _ in frame.pieces(SMALL)]


def test_no_more_than_a_window_is_ever_unacknowledged():
    sent, acked = 0, 0

    def requests():  # read only when the window is full
        nonlocal acked
        for frame in range(9):
            assert sent - acked == 2
            acked = frame + 1
            yield Ack(frame)

    outbox = outbox_of(start(), filled_store(LARGE), requests(), window=2)
    for _ in outbox.send(computed=10):
        sent += 1
    assert (sent, acked) == (7, 5)


@pytest.mark.parametrize(
    ("window", "asked"), [(1, [0, 1, 2, 3, 4, 5, 6]), (4, [1, 3, 5, 6]), (6, [2, 5, 6]), (99, [6])]
)
def test_an_ack_is_asked_for_twice_in_a_window_and_with_the_last_frame(window, asked):
    outbox = outbox_of(start(), filled_store(LARGE), map(Ack, range(7)), window)
    assert [frame.index for frame in map(unpack, outbox.send(computed=10)) if frame.due] == asked


def test_a_window_of_one_is_enough():
    source, target = ScriptedSource(filled_store(LARGE), DONE), MemoryStore(4, LARGE)
    with serving(source, window=1) as address, client_of(target) as client:
        assert client.pull(address, start()).run(ids(1, 2, 3)).frames == 7


def test_the_job_is_left_only_after_the_last_ack():
    source = ScriptedSource(filled_store(SMALL), 4, 8, DONE)
    with serving(source) as address, RawClient(address) as client:
        client.send(pack(start()))
        frames = [client.receive() for _ in range(3)]
        assert all(isinstance(frame, Frame) for frame in frames)
        assert isinstance(client.receive(), Commit)
        client.send(pack(Ack(1)))
        job = source.next_job()
        assert not job.closed.is_set()
        client.send(pack(Ack(2)))
        assert job.closed.wait(WAIT)
        assert client.end() is grpc.StatusCode.OK


@pytest.mark.parametrize("error", [StalePlacement, GeometryMismatch, Draining, Overloaded, DoesNotFit, Revoked])
def test_a_refusal_arrives_as_the_same_error(error):
    source = ScriptedSource(filled_store(SMALL))
    source.refusal = error("block 3 belongs to lease 7.10 — später")
    with serving(source) as address, client_of(MemoryStore(4, SMALL)) as client:
        with pytest.raises(BifolioError) as caught:
            client.pull(address, start()).run(ids(1, 2, 3))
        assert type(caught.value) is error
        assert caught.value.message == "block 3 belongs to lease 7.10 — später"


def test_our_error_in_mid_stream_arrives_as_the_same_error():
    source = ScriptedSource(filled_store(SMALL), 5, Draining("leaving"))
    with serving(source) as address, client_of(MemoryStore(4, SMALL)) as client:
        pull = client.pull(address, start())
        with pytest.raises(Draining, match="leaving"):
            pull.run(ids(1, 2, 3))


def test_any_other_error_is_logged_there_and_named_here(caplog):
    source = ScriptedSource(filled_store(SMALL), 5, ZeroDivisionError("x" * 100_000))
    with serving(source) as address, client_of(MemoryStore(4, SMALL)) as client:
        pull = client.pull(address, start())
        with pytest.raises(TransferFailed, match="INTERNAL: ZeroDivisionError: xxx"):
            pull.run(ids(1, 2, 3))
    [record] = caplog.records
    assert record.exc_info is not None


def test_a_cancel_during_compute_ends_both_sides():
    source = ScriptedSource(filled_store(SMALL), 5)
    with serving(source) as address, client_of(MemoryStore(4, SMALL)) as client:
        pull = client.pull(address, start())
        result = in_thread(pull, ids(1, 2, 3))
        job = source.next_job()
        pull.cancel()
        pull.cancel()
        with pytest.raises(Revoked):
            result.result(WAIT)
        assert job.closed.wait(WAIT)
        assert job.cancelled.is_set()


def test_a_cancel_while_the_window_is_full_ends_both_sides():
    source = ScriptedSource(filled_store(SMALL), DONE)
    with serving(source, window=1) as address, RawClient(address) as client:
        client.send(pack(start()))
        client.receive()  # and no ack
        client.call.cancel()
        assert source.next_job().closed.wait(WAIT)


def test_a_cancel_while_a_frame_is_being_sent_ends_both_sides():
    source, target = ScriptedSource(filled_store(LARGE), DONE), GatedStore(4, LARGE)
    with serving(source, window=100) as address, client_of(target) as client:
        pull = client.pull(address, start())
        result = in_thread(pull, ids(1, 2, 3))
        assert target.begun.wait(WAIT)  # the client reads no more, so flow control holds the server
        pull.cancel()
        assert source.next_job().closed.wait(WAIT)
        assert not result.done()  # it is still copying: its blocks are not free
        target.gate.set()
        with pytest.raises(Revoked):
            result.result(WAIT)
        assert target.writes == 1


def test_a_cancel_before_run_opens_no_stream():
    source = ScriptedSource(filled_store(SMALL), DONE)
    with serving(source) as address, client_of(MemoryStore(4, SMALL)) as client:
        pull = client.pull(address, start())
        pull.cancel()
        with pytest.raises(Revoked):
            pull.run(ids(1, 2, 3))
    assert not source.jobs


def test_a_client_that_leaves_while_the_lease_is_opened_leaves_no_job_behind():
    opening, gone = threading.Event(), threading.Event()

    class Slow(ScriptedSource):
        def begin(self, start: Start):
            opening.set()
            assert gone.wait(WAIT)
            return super().begin(start)

    source = Slow(filled_store(SMALL))
    with serving(source) as address, RawClient(address) as client:
        client.send(pack(start()))
        assert opening.wait(WAIT)
        client.call.cancel()
        gone.set()
        assert source.next_job().closed.wait(WAIT)


def test_a_stream_too_many_is_refused_at_once():
    source = ScriptedSource(filled_store(SMALL))
    with serving(source, max_streams=1) as address, client_of(MemoryStore(4, SMALL)) as client:
        streams = [in_thread(client.pull(address, start()), ids(1, 2, 3)) for _ in range(3)]  # two may be just ending
        jobs = [source.next_job() for _ in streams]
        with pytest.raises(TransferFailed, match="as many Prefill streams as it takes"):
            client.pull(address, start()).run(ids(1, 2, 3))
        for job in jobs:
            job.feed(DONE)
        assert all(stream.result(WAIT) for stream in streams)


def test_stopping_lets_streams_finish_and_counts_them():
    source = ScriptedSource(filled_store(SMALL))
    server = PrefillServer(source, max_streams=4)
    address = f"127.0.0.1:{server.start()}"
    with client_of(MemoryStore(4, SMALL)) as client:
        result = in_thread(client.pull(address, start()), ids(1, 2, 3))
        job = source.next_job()
        assert server.active == 1
        stopping = threading.Thread(target=server.stop, args=(WAIT,))
        stopping.start()
        job.feed(DONE)
        assert result.result(WAIT)
        stopping.join(WAIT)
    assert not stopping.is_alive()
    assert server.active == 0


def test_stopping_without_grace_cancels_the_streams():
    source = ScriptedSource(filled_store(SMALL))
    server = PrefillServer(source, max_streams=4)
    address = f"127.0.0.1:{server.start()}"
    with client_of(MemoryStore(4, SMALL)) as client:
        result = in_thread(client.pull(address, start()), ids(1, 2, 3))
        job = source.next_job()
        server.stop(grace=0)
        assert job.closed.is_set()
        with pytest.raises(ReplicaGone):
            result.result(WAIT)


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [b""],
        [b"\x7fgarbage"],
        [pack(Ack(0))],
        [pack(start(skip=4))],
        [pack(start()), pack(start())],
        [pack(start()), b"\x7fgarbage"],
        [pack(start()), pack(Ack(3))],
        [pack(start()), pack(Ack(1)), pack(Ack(1))],
        [pack(start()), pack(Ack(0))],  # and then nothing: the last frames stay unacknowledged
    ],
)
def test_a_client_that_breaks_the_protocol_is_told_so(requests, caplog):
    source = ScriptedSource(filled_store(SMALL), 4, 8, DONE)
    with serving(source) as address, RawClient(address) as client:
        for request in requests:
            client.send(request)
        client.send(None)
        assert client.end() is grpc.StatusCode.INVALID_ARGUMENT
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_no_other_method_is_served():
    with serving(ScriptedSource(filled_store(SMALL))) as address, RawClient(address, "Other") as client:
        assert client.end() is grpc.StatusCode.UNIMPLEMENTED
