"""One request to an OpenAI-compatible endpoint, streamed, and when each piece of its answer came.

A chunk is what one read from the socket brought, with one or several events: the gap before it is waited for once.
Whatever goes wrong becomes the answer's error; nothing is raised but a cancel, which the answer keeps too. Knows
nothing of plans, nor of what figures are made of answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple

import aiohttp
from load_text import Prompt

Status = Literal["waiting", "ok", "failed", "cut"]
MOST_TEXT = 300  # characters of an error that are kept
LAST_BYTES = 1.0  # seconds that a stream may take to end once it has said [DONE]; else its connection is closed


class Chunk(NamedTuple):
    at: float  # by time.perf_counter
    events: int  # that brought tokens
    text: str  # kept only where somebody wants to count its tokens
    reported: int | None = None  # tokens of the whole answer up to here, by the server


@dataclass(slots=True)
class Answer:
    due: float = 0.0  # all times by time.perf_counter
    sent: float = 0.0
    headers: float | None = None
    chunks: list[Chunk] = field(default_factory=list)
    finish: str | None = None
    bare_finish: float | None = None  # when an event brought the finish reason and no text: it may stand for a token
    ended: float | None = None
    status: Status = "waiting"
    error: str = ""  # its kind, in a word or two
    message: str = ""
    prompt_tokens: int | None = None  # these three by the server
    output_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str  # with its /v1
    model: str
    chat: bool = False
    token_ids: bool = False
    vllm: bool = False  # it knows ignore_eos and min_tokens
    continuous_usage: bool = False
    usage: bool = True  # it knows stream_options
    temperature: float = 0.0
    timeout: float = 600.0  # seconds of a whole request
    key: str = ""

    def path(self) -> str:
        return self.url.rstrip("/") + ("/chat/completions" if self.chat else "/completions")

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def body(self, prompt: Prompt, output_tokens: int) -> bytes:
        content: dict[str, Any] = {"model": self.model, "max_tokens": output_tokens, "temperature": self.temperature}
        if self.chat:
            content["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            content["prompt"] = list(prompt.ids) if self.token_ids else prompt.text
        content["stream"] = True
        if self.usage:
            content["stream_options"] = {"include_usage": True}
            if self.continuous_usage:
                content["stream_options"]["continuous_usage_stats"] = True
        if self.vllm:
            content |= {"ignore_eos": True, "min_tokens": output_tokens}
        return json.dumps(content).encode()


class Events:
    """Server-sent events out of bytes that are cut anywhere: the `data` of each. Lines end with LF or CRLF."""

    def __init__(self) -> None:
        self._left = b""  # of a line that has not ended
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._left = (self._left + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()

    def end(self) -> Iterator[bytes]:
        """What stands without an empty line after it: some servers end so."""
        return self.feed(b"\n\n")


class Refused(Exception):
    """The endpoint answered, but not with what was asked for."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Client:
    """Connections are kept and used again, as many as there are requests under way."""

    def __init__(self, endpoint: Endpoint, *, keep_text: bool = False) -> None:
        self._endpoint = endpoint
        self._keep_text = keep_text
        self.events = 0  # that brought tokens, of all answers so far

    async def __aenter__(self) -> Client:
        # Servers close idle connections after some 5 s: one that is used at that moment would fail for no reason
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), headers=self._endpoint.headers()
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ask(self, prompt: Prompt, output_tokens: int, answer: Answer) -> None:
        """Fills `answer`."""
        body = self._endpoint.body(prompt, output_tokens)
        answer.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._endpoint.timeout):
                await self._stream(body, answer)
            answer.status = "ok"
        except asyncio.CancelledError:
            answer.status = "cut"
            raise
        except Exception as error:
            answer.status, answer.error, answer.message = "failed", *_told(error, self._endpoint)
        finally:
            answer.ended = answer.ended or time.perf_counter()

    async def _stream(self, body: bytes, answer: Answer) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._endpoint.path(), data=body, headers=headers) as response:
            answer.headers = time.perf_counter()
            if response.status != 200:
                raise Refused(f"HTTP {response.status}", await response.text(errors="replace"))
            if response.content_type != "text/event-stream":
                raise Refused(
                    "no stream", f"its Content-Type is {response.content_type}: {await response.text(errors='replace')}"
                )
            events = Events()
            async for data in response.content.iter_any():
                if self._take(events.feed(data), answer):
                    try:
                        async with asyncio.timeout(LAST_BYTES):
                            await response.content.read()  # so that the connection can be used again
                    except (TimeoutError, aiohttp.ClientError):
                        pass
                    return
            if not self._take(events.end(), answer) and answer.finish is None:
                raise Refused("broken off", "the stream ended without a finish reason and without [DONE]")

    def _take(self, events: Iterator[bytes], answer: Answer) -> bool:
        """Adds the chunk that these events are; whether [DONE] was among them."""
        now = time.perf_counter()
        count, texts, reported, done = 0, [], None, False
        for data in events:
            if data.strip() == b"[DONE]":
                answer.ended, done = now, True
                break
            content = _parse(data)
            if usage := content.get("usage"):
                reported = _read_usage(usage, answer)
            for choice in content.get("choices") or ():
                text, only_role = _text_of(choice)
                if finish := choice.get("finish_reason"):
                    answer.finish = finish
                if text or (text is not None and not finish and not only_role):
                    count += 1
                    texts.append(text)
                elif finish:
                    answer.bare_finish = now
        if count:
            answer.chunks.append(Chunk(now, count, "".join(texts) if self._keep_text else "", reported))
            self.events += count
        return done


def _parse(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError as error:
        raise Refused("not JSON", f"an event is {data[:MOST_TEXT]!r}") from error
    if not isinstance(content, dict):
        raise Refused("not an object", f"an event is {data[:MOST_TEXT]!r}")
    if content.get("error"):
        raise Refused("error in the stream", json.dumps(content["error"]))
    return content


def _text_of(choice: dict[str, Any]) -> tuple[str | None, bool]:
    """The text of a completion's or of a chat's choice, and whether it only says who speaks. A text may be empty and
    still stand for a token, one that has no character yet."""
    if "delta" not in choice:
        return choice.get("text"), False
    delta = choice["delta"]
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return (delta.get("content") if text is None else text), "role" in delta and not text


def _read_usage(usage: dict[str, Any], answer: Answer) -> int | None:
    answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
    answer.output_tokens = usage.get("completion_tokens", answer.output_tokens)
    details = usage.get("prompt_tokens_details") or {}
    answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)
    return answer.output_tokens


def _told(error: Exception, endpoint: Endpoint) -> tuple[str, str]:
    """Kind and message."""
    message = " ".join(str(error).split())[:MOST_TEXT]
    match error:
        case Refused():
            return error.kind, message
        case TimeoutError():
            return "timeout", f"no end within {endpoint.timeout:g} s (--timeout)"
        case aiohttp.ClientConnectorError() | ConnectionRefusedError():
            return "no connection", message
        case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError() | ConnectionError():
            return "broken off", message or type(error).__name__
        case aiohttp.ClientError():
            return type(error).__name__, message
    return "client", f"{type(error).__name__}: {message}"  # a mistake of ours: not to be taken for the server's


async def first_model(url: str, key: str) -> str:
    """The first model that the endpoint lists."""
    endpoint = Endpoint(url, "", key=key)
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=endpoint.headers()) as session,
        session.get(url.rstrip("/") + "/models") as response,
    ):
        response.raise_for_status()
        content = await response.json()
    return str(content["data"][0]["id"])
