"""One streamed request, against a server that answers as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from load_client import Answer, Client, Endpoint, Events, first_model
from load_kit import COUNTED, DONE, WHOLE, Reply, Server, event
from load_text import Prompt

PROMPT = Prompt("Once", (5, 6, 7))
T = TypeVar("T")


def within_reason(coroutine: Coroutine[Any, Any, T]) -> T:
    """A test that hangs fails instead."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def ask(server: Server, count: int = 1, **options: Any) -> list[Answer]:
    answers = [Answer() for _ in range(count)]
    async with Client(Endpoint(server.url, "m", **options), keep_text=True) as client:
        for answer in answers:
            await client.ask(PROMPT, 3, answer)
    return answers


def one(*pieces: bytes, **how: Any) -> Answer:
    async def test() -> Answer:
        async with Server([Reply(pieces, **how)]) as server:
            (answer,) = await ask(server)
            return answer

    return within_reason(test())


def text_of(answer: Answer) -> str:
    return "".join(chunk.text for chunk in answer.chunks)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_are_the_same_wherever_their_bytes_are_cut(end: bytes) -> None:
    lines = [b"data: one", b"", b": nothing", b"", b"event: x", b"data:two", b"id: 3", b"", b"data: a", b"data: b", b""]
    sent = end.join(lines) + end + b"data: last"
    for size in range(1, len(sent)):
        events = Events()
        found = [data for at in range(0, len(sent), size) for data in events.feed(sent[at : at + size])]
        assert found == [b"one", b"two", b"a\nb"]
        assert list(events.end()) == [b"last"]


def test_an_answer_has_its_text_usage_and_times() -> None:
    answer = one(*WHOLE)
    assert (answer.status, answer.error, answer.finish) == ("ok", "", "length")
    assert text_of(answer) == "abc"
    assert sum(chunk.events for chunk in answer.chunks) == 3
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (7, 3, 4)
    assert answer.headers is not None
    assert answer.ended is not None
    times = [answer.sent, answer.headers, *(chunk.at for chunk in answer.chunks), answer.ended]
    assert times == sorted(times)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_is_the_same_however_the_server_cuts_it(size: int) -> None:
    sent = b"".join(WHOLE)
    answer = one(*(sent[at : at + size] for at in range(0, len(sent), size)))
    assert (answer.status, text_of(answer), answer.output_tokens) == ("ok", "abc", 3)
    assert sum(chunk.events for chunk in answer.chunks) == 3


def test_a_text_that_is_empty_may_be_a_token_but_not_beside_the_finish_reason() -> None:
    answer = one(event("a"), event(""), event("", finish="stop"), DONE)
    assert sum(chunk.events for chunk in answer.chunks) == 2
    assert answer.bare_finish is not None


def test_of_a_chat_the_role_and_the_finish_are_no_tokens() -> None:
    deltas = [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": ""},
        {"reasoning_content": "b", "content": None},
        {},
    ]
    pieces = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    pieces[-1]["choices"][0]["finish_reason"] = "stop"
    answer = one(*(b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces), DONE)
    assert (answer.status, text_of(answer), answer.finish) == ("ok", "ab", "stop")
    assert sum(chunk.events for chunk in answer.chunks) == 3


@pytest.mark.parametrize(
    ("pieces", "how", "error", "message"),
    [
        ((b'{"error": "busy"}',), {"status": 429, "kind": "application/json"}, "HTTP 429", "busy"),
        ((b'{"choices": []}',), {"kind": "application/json"}, "no stream", "application/json"),
        ((event("a"), b'data: {"error": {"message": "lost"}}\n\n'), {}, "error in the stream", "lost"),
        ((event("a"), b"data: {broken\n\n"), {}, "not JSON", "broken"),
        ((event("a"), b"data: 3\n\n"), {}, "not an object", "3"),
        ((event("a"),), {}, "broken off", "without a finish reason"),
        ((event("a"),), {"then": "drop"}, "broken off", ""),
        ((), {"then": "drop"}, "broken off", ""),
    ],
)
def test_what_goes_wrong_is_the_answers_error(
    pieces: tuple[bytes, ...], how: dict[str, Any], error: str, message: str
) -> None:
    answer = one(*pieces, **how)
    assert (answer.status, answer.error) == ("failed", error)
    assert message in answer.message
    assert answer.ended is not None


def test_a_stream_without_done_is_whole_if_it_has_a_finish_reason() -> None:
    assert one(event("a"), event("b", finish="stop")).status == "ok"
    assert one(event("a"), DONE).status == "ok"
    assert one(event("a"), DONE.strip()).status == "ok"


def test_a_stream_that_never_ends_times_out() -> None:
    async def test() -> Answer:
        async with Server([Reply((event("a"),), then="hang")]) as server:
            (answer,) = await ask(server, timeout=0.1)
            return answer

    answer = within_reason(test())
    assert (answer.status, answer.error) == ("failed", "timeout")
    assert "--timeout" in answer.message


def test_a_connection_that_stays_open_after_done_does_not_matter() -> None:
    assert one(*WHOLE, then="hang").status == "ok"


def test_nobody_there_is_said() -> None:
    async def test() -> Answer:
        async with Server([Reply()]) as server:
            pass
        (answer,) = await ask(server)
        return answer

    assert within_reason(test()).error == "no connection"


def test_a_cancel_cuts_the_answer() -> None:
    async def test() -> Answer:
        async with (
            Server([Reply((event("a"),), then="hang")]) as server,
            Client(Endpoint(server.url, "m")) as client,
        ):
            answer = Answer()
            asking = asyncio.create_task(client.ask(PROMPT, 3, answer))
            while not client.events:
                await asyncio.sleep(0.001)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            return answer

    answer = within_reason(test())
    assert answer.status == "cut"
    assert len(answer.chunks) == 1
    assert answer.ended is not None


def test_a_connection_is_used_again() -> None:
    async def test() -> tuple[int, list[str]]:
        async with Server([Reply()]) as server:
            answers = await ask(server, 5)
            return server.connections, [answer.status for answer in answers]

    assert within_reason(test()) == (1, ["ok"] * 5)


@pytest.mark.parametrize(
    ("options", "has", "lacks"),
    [
        (
            {},
            {"model": "m", "prompt": "Once", "max_tokens": 3, "stream_options": {"include_usage": True}},
            ["ignore_eos", "min_tokens", "messages"],
        ),
        ({"token_ids": True}, {"prompt": [5, 6, 7]}, []),
        ({"chat": True}, {"messages": [{"role": "user", "content": "Once"}]}, ["prompt"]),
        ({"vllm": True}, {"ignore_eos": True, "min_tokens": 3}, []),
        ({"usage": False}, {"stream": True}, ["stream_options"]),
        (
            {"continuous_usage": True},
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            [],
        ),
    ],
)
def test_the_body_asks_for_what_was_chosen(options: dict[str, Any], has: dict[str, Any], lacks: list[str]) -> None:
    body = json.loads(Endpoint("http://x/v1", "m", **options).body(PROMPT, 3))
    assert body | has == body
    assert not set(lacks) & set(body)


def test_the_key_goes_with_each_request_and_chats_go_elsewhere() -> None:
    async def test() -> list[str]:
        async with Server([Reply()]) as server:
            await ask(server, chat=True, key="secret")
            return server.headers

    (head,) = within_reason(test())
    assert head.startswith("POST /v1/chat/completions")
    assert "Authorization: Bearer secret" in head


def test_the_first_model_is_the_one_that_is_listed() -> None:
    async def test() -> str:
        async with Server([Reply()]) as server:
            return await first_model(server.url, "")

    assert within_reason(test()) == "the-model"


def test_usage_in_every_chunk_is_kept() -> None:
    answer = one(
        event("ab", usage={"prompt_tokens": 7, "completion_tokens": 2}),
        event("c", finish="length", usage=COUNTED),
        DONE,
    )
    assert answer.chunks[-1].reported == 3
    assert answer.output_tokens == 3
