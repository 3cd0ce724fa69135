"""Load that knows what it asks: a fixed set of questions, again and again over both doors, each answer kept as it came.

The questions are those of `load_plan.mixed`: streams that decode all the time, and long prompts besides. Several
answers, seeds, greedy ones; some share the beginnings of their prompts, some are new to every cache. Nothing is judged
here: `chaos_check` does that.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import struct
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import grpc
from chaos_target import Target
from load_client import Events
from load_plan import mixed
from load_text import Book

from bifolio.protos import inference_pb2 as pb
from bifolio.protos.inference_pb2_grpc import InferenceStub

Door = Literal["http", "http reset", "grpc"]  # "reset": it leaves with a RST, not a FIN
DOORS: tuple[Door, ...] = ("http", "grpc")
Kind = Literal["stream", "long"]
How = Literal["close", "cancel"]  # of leaving: the connection goes, or the request is cancelled by its id
Status = Literal["open", "ok", "refused", "broken", "hung", "left", "cancelled", "failed"]

SILENCE_S = 90.0  # without a byte: it hangs. Above kv.admission_wait_s, after which a waiting request is refused
AGAIN_S = 0.5  # before a lane asks again after anything but an answer
_METADATA = (("application", "bifolio"),)
_OURS = ("rate_limit_error", "service_unavailable")  # the types of a refusal for now


@dataclass(frozen=True)
class Question:
    number: int
    kind: Kind
    prompt: tuple[int, ...]
    sampling: dict[str, Any]  # as /v1/completions names it, max_tokens and n too
    fresh: bool = False  # each time under a salt of its own: no cache has it

    @property
    def n(self) -> int:
        return int(self.sampling.get("n", 1))


@dataclass
class Said:
    """One choice of an answer."""

    ids: list[int] = field(default_factory=list)  # over gRPC alone
    text: str = ""
    finish: str | None = None


@dataclass
class Outcome:
    """What came of one question, asked once. Times are by time.monotonic."""

    question: int
    door: Door
    id: str
    sent: float
    said: list[Said]
    status: Status = "open"
    ended: float | None = None
    tokens: int = 0  # that came; over HTTP as many as there were events
    resumes: int = 0
    error: str = ""

    @property
    def characters(self) -> int:
        return sum(len(said.text) for said in self.said)

    def was_open(self, at: float) -> bool:
        return self.sent <= at and (self.ended is None or self.ended >= at)


@dataclass(frozen=True)
class Asked:
    outcome: Outcome
    task: asyncio.Task[None]
    reached: asyncio.Event  # as much has come as was to be waited for


@dataclass
class _Reading:
    """One answer while it is read."""

    outcome: Outcome
    characters: int
    reached: asyncio.Event
    patience: asyncio.Timeout | None = None

    def heard(self) -> None:
        assert self.patience is not None
        self.patience.reschedule(asyncio.get_running_loop().time() + SILENCE_S)
        if self.outcome.characters >= self.characters:
            self.reached.set()


def questions(book: Book, seed: int, streams: int = 32, long: int = 12, context: int = 128) -> list[Question]:
    """Distinct ones: no two have one prompt and one sampling."""
    shape = {"stream_prompt": 24, "stream_output": 88, "long_prompt": 96, "long_output": context - 98}
    plan = mixed(
        book, streams=streams, long_every=1.0, phase_seconds=float(long), phases=2, settle=0.0, seed=seed, **shape
    )
    loop = () if plan.closed is None else itertools.islice(plan.closed.requests(), streams)
    rng = random.Random(seed)
    shared = book.prompt(f"shared {seed}", 16).ids  # two blocks
    made = []
    for number, request in enumerate((*loop, *plan.timed[:long])):
        ids = request.prompt.ids
        kind: Kind = "long" if request.kind == "long" else "stream"
        if number % 3 == 0:
            ids = (*shared, *ids[len(shared) :])
        tokens = max(12, request.output_tokens)
        sampling: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": number % 5 != 4}
        if number % 2:
            sampling |= {"temperature": 0.9, "top_p": 0.95, "seed": rng.randrange(1 << 32)}
        if number % 8 == 3:
            sampling |= {"n": 3, "max_tokens": max(12, tokens // 3)}
        made.append(Question(number, kind, ids, sampling, fresh=number % 4 == 1))
    return made


class Load:
    """Lanes that ask one question after the other, and a long prompt now and then. For one event loop."""

    def __init__(
        self, target: Target, questions: Sequence[Question], lanes: int = 12, long_every: float = 1.0, seed: int = 0
    ) -> None:
        self.questions = tuple(questions)
        self.outcomes: list[Outcome] = []
        self.expected: dict[int, Outcome] = {}  # what each question gets undisturbed, once that is known
        self._target = target
        self._lanes, self._long_every = lanes, long_every
        self._asked: set[asyncio.Task[None]] = set()
        self._running: list[asyncio.Task[None]] = []
        rng = random.Random(seed)
        self._streams = _shuffled([q for q in questions if q.kind == "stream"], rng)
        self._long = _shuffled([q for q in questions if q.kind == "long"], rng)
        self._doors = itertools.cycle(DOORS)

    def begin(self) -> None:
        self._running = [asyncio.create_task(self._lane()) for _ in range(self._lanes)]
        self._running.append(asyncio.create_task(self._now_and_then()))

    async def end(self) -> None:
        """Ask nothing more, and wait for what is under way: each of it ends, or hangs, within a bound."""
        for each in self._running:
            each.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        while self._asked:
            await asyncio.wait(self._asked)

    def open(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.status == "open"]

    def next(self, kind: Kind) -> Question:
        return next(self._long if kind == "long" else self._streams)

    def ask(self, question: Question, door: Door, characters: int = 1) -> Asked:
        """Begins at once. Its task ends when the answer has, whatever it is; cancelling it is to leave. So much text of
        all choices sets its `reached`."""
        id = f"chaos-{uuid.uuid4().hex}"
        outcome = Outcome(question.number, door, id, time.monotonic(), [Said() for _ in range(question.n)])
        self.outcomes.append(outcome)
        reading = _Reading(outcome, characters, asyncio.Event())
        task = asyncio.create_task(self._ask(question, reading))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        return Asked(outcome, task, reading.reached)

    async def leave(self, asked: Asked, how: How) -> None:
        path = f"/v1/requests/{asked.outcome.id}/cancel"
        if how == "cancel" and not asked.task.done() and await self._target.post(path) == 200:
            return  # the cluster ends it now, or it hangs
        asked.task.cancel()
        await asyncio.gather(asked.task, return_exceptions=True)

    async def _lane(self) -> None:
        while True:
            asked = self.ask(next(self._streams), next(self._doors))
            await asyncio.wait({asked.task})
            if asked.outcome.status != "ok":
                await asyncio.sleep(AGAIN_S)

    async def _now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._long_every)
            self.ask(next(self._long), next(self._doors))

    async def _ask(self, question: Question, reading: _Reading) -> None:
        outcome = reading.outcome
        try:
            async with asyncio.timeout(SILENCE_S) as reading.patience:
                await (self._over_grpc if outcome.door == "grpc" else self._over_http)(question, reading)
        except asyncio.CancelledError:
            outcome.status = "left"
            raise
        except TimeoutError:
            outcome.status, outcome.error = "hung", f"no byte for {SILENCE_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            outcome.status, outcome.error = "broken", f"{type(error).__name__}: {error}"
        except grpc.aio.AioRpcError as error:
            outcome.status, outcome.error = grpc_status(error), f"{error.code().name}: {error.details()}"
        except Exception as error:  # a mistake of ours must not look like an answer
            outcome.status, outcome.error = "failed", f"{type(error).__name__}: {error}"
        finally:
            outcome.ended = time.monotonic()

    async def _over_http(self, question: Question, reading: _Reading) -> None:
        outcome = reading.outcome
        body = {"prompt": list(question.prompt), "stream": True, "stream_options": {"include_usage": True}}
        body |= question.sampling | ({"cache_salt": outcome.id} if question.fresh else {})
        factory = _resetting if outcome.door == "http reset" else None
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, socket_factory=factory),
                timeout=aiohttp.ClientTimeout(total=None),
            ) as session,
            session.post(
                self._target.url + "/v1/completions", json=body, headers={"X-Request-Id": outcome.id}
            ) as response,
        ):
            if response.status != 200:
                text = await response.text(errors="replace")
                outcome.status, outcome.error = http_status(response.status, text), f"{response.status}: {text[:300]}"
                return
            events = Events()
            async for data in response.content.iter_any():
                if any(_take_event(event, outcome) for event in events.feed(data)):
                    return
                reading.heard()
            outcome.status, outcome.error = "broken", "the stream ended without [DONE]"

    async def _over_grpc(self, question: Question, reading: _Reading) -> None:
        outcome = reading.outcome
        sampling = dict(question.sampling)
        n = sampling.pop("n", None)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=question.prompt), sampling=pb.Sampling(**sampling), request_id=outcome.id, n=n
        )
        if question.fresh:
            request.cache_salt = outcome.id
        # A connection of its own: a broken one would take others with it, and hide whose fault it was
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(self._target.grpc_address, options) as channel:
            generate: Any = InferenceStub(channel).Generate  # type: ignore[no-untyped-call]
            async for message in generate(request, metadata=_METADATA):
                said = outcome.said[message.choice]
                said.ids += message.token_ids
                said.text += message.text
                said.finish = message.finish_reason or said.finish
                outcome.tokens += len(message.token_ids)
                if message.HasField("usage"):
                    outcome.resumes = message.usage.route.resumes
                reading.heard()
        outcome.status = "ok"


def _take_event(data: bytes, outcome: Outcome) -> bool:
    """Whether it was the last one."""
    if data.strip() == b"[DONE]":
        outcome.status = "ok"
        return True
    content = json.loads(data)
    if error := content.get("error"):
        cancelled = error["type"] == "request_cancelled"
        outcome.status, outcome.error = "cancelled" if cancelled else "broken", f"in the stream: {error['message']}"
        return True
    for choice in content["choices"]:
        said = outcome.said[choice["index"]]
        said.text += choice["text"]
        said.finish = choice["finish_reason"] or said.finish
        outcome.tokens += 1
    if usage := content.get("usage"):
        outcome.resumes = usage["route"]["resumes"]
    return False


def http_status(status: int, body: str) -> Status:
    """Of an answer that is none. Only our own words make a refusal: HAProxy's page says that an ingress has died."""
    try:
        kind = json.loads(body)["error"]["type"]
    except (ValueError, LookupError, TypeError):
        return "broken"
    if status == 499:
        return "cancelled"
    return "refused" if status in (429, 503) and kind in _OURS else "failed"


def grpc_status(error: grpc.aio.AioRpcError) -> Status:
    """By its words: what gRPC itself says names its transport, and nothing of ours does."""
    code, details = error.code().name, (error.details() or "").lower()
    of_transport = ("socket closed", "connection re", "http2", "rst_stream", "goaway", "failed to connect", "stream re")
    if any(each in details for each in of_transport) or not details:
        return "broken"
    if code == "CANCELLED":
        return "cancelled"
    return "refused" if code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE") else "failed"


def _resetting(info: Any) -> socket.socket:
    """Its close sends a RST."""
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return made


def _shuffled(questions: Sequence[Question], rng: random.Random) -> Iterator[Question]:
    """All of them in some order, then in another, without end."""
    while True:
        yield from rng.sample(questions, len(questions))
