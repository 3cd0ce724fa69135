#!/usr/bin/env python3
"""What one message of a stream costs in CPU time, part by part, without a cluster.

    python -P benchmarks/message.py [--messages 3000] [--repeats 3]

    delta   written and read again: by pickle, as between our replicas, and by cloudpickle, which is Serve's default
    event   the server-sent event of a token: as the ingress words it, and by `json.dumps` of all of it
    gRPC    a bare stream of such deltas between two processes, one at a time, where it is sent and where it is received

Microseconds, in turns, the least of the repeats. In a cluster messages of several streams share wake-ups, so gRPC costs
less there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import grpc
import uvloop
from ray import cloudpickle

sys.path.append(os.path.dirname(__file__))
import measure

from bifolio.cluster.answer import Piece
from bifolio.cluster.words import ChatWords
from bifolio.protos.messages import Delta

METHOD = "/bench/stream"
DELTA = Delta((512,))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=3000, metavar="N", help="of a repeat; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    words: Any = ChatWords("chatcmpl-0123456789abcdef", "smollm2-135m", 1, SimpleNamespace())  # type: ignore[arg-type]
    piece = Piece(" capital", (512,))
    words.events(piece)
    chunk = next(words.chunks(piece))
    plain = {"ensure_ascii": False, "separators": (",", ":")}
    ways: dict[str, Callable[[], object]] = {
        "delta, by pickle": lambda: pickle.loads(pickle.dumps(DELTA, pickle.HIGHEST_PROTOCOL)),
        "delta, by cloudpickle": lambda: pickle.loads(cloudpickle.dumps(DELTA)),
        "event, as it is worded": lambda: words.events(piece),
        "event, by json.dumps": lambda: b"data: " + json.dumps(chunk, **plain).encode() + b"\n\n",  # type: ignore[arg-type]
    }
    table = measure.table("CPU of a message in µs", ("",), ("least",))
    rounds = [{name: cpu_of(way, args.messages) for name, way in ways.items()} for _ in range(3 * args.repeats)]
    for name, seconds in measure.by_name(rounds).items():
        table.add_row(name, f"{min(seconds) * 1e6:.1f}")
    sent, received = zip(*(bare_grpc(args.messages) for _ in range(args.repeats)), strict=True)
    table.add_row("gRPC, sent", f"{min(sent) * 1e6:.0f}")
    table.add_row("gRPC, received", f"{min(received) * 1e6:.0f}")
    measure.show(table)
    return 0


def cpu_of(way: Callable[[], object], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        way()
    return (time.process_time() - began) / times


def bare_grpc(messages: int) -> tuple[float, float]:
    """CPU seconds of a message, at its sender and at its receiver."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(messages, theirs), daemon=True)
    process.start()
    try:
        received = uvloop.run(receive(ours.recv()))
        ours.send(None)
        return ours.recv() / messages, received / messages
    finally:
        process.terminate()
        process.join()


def serve(messages: int, pipe: Connection) -> None:
    uvloop.run(_serve(messages, pipe))


async def _serve(messages: int, pipe: Connection) -> None:
    content = pickle.dumps(DELTA)

    async def stream(_: bytes, __: Any) -> AsyncIterator[bytes]:
        for _i in range(messages):
            await asyncio.sleep(0)  # each is a message of its own
            yield content

    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"stream": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    began = time.process_time()
    pipe.send(port)
    await asyncio.to_thread(pipe.recv)
    pipe.send(time.process_time() - began)
    await server.stop(0)


async def receive(port: int) -> float:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        began = time.process_time()
        async for _ in channel.unary_stream(METHOD)(b""):
            pass
        return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
