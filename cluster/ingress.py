"""The doors: HTTP (FastAPI) and gRPC, in one Serve deployment. They translate to a query and back and decide nothing.

Only loopback peers are let in: Serve binds the replica's own ports wider than asked, and there are no API keys yet.

`serve.ingress` pickles the routes by value when the class is made. So annotations are evaluated here (there is no
import from `__future__`), and what the methods use is imported, never defined further down.
"""

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from ray import serve
from ray.exceptions import RayActorError, RayError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

from bifolio.kv_manager.actor import connect
from bifolio.kv_manager.logs import log_to_stderr
from bifolio.protos import inference_pb2 as pb
from bifolio.protos.errors import BifolioError, Unavailable
from bifolio.protos.messages import ReplicaId
from bifolio.replicas.kv_memory import ITEMSIZES, context_of
from bifolio.replicas.leaving import Leaving, on_sigterm
from bifolio.replicas.model_files import model_config

from .answer import Piece, answer, in_thread
from .bodies import events, whole
from .chat_schema import ChatRequest
from .completion_schema import CompletionRequest
from .config import ClusterConfig
from .convert import logprobs_to_pb, query_from_pb
from .frontend import Frontend, own_error
from .health import Health, alive_of, health
from .last_seen import LastSeen
from .metrics import render
from .openai import not_served
from .peers import OnlyLoopback
from .query import MOST_CHOICES, Served, check_model, most_bytes, template_of
from .request_ids import HEADER, checked, named
from .responses import StreamedResponse, body_of, refusal
from .rpc import call
from .schema import parse
from .tokenize_schema import DetokenizeRequest, TokenizeRequest
from .tokenizer import Tokenizer
from .trunks import Trunks
from .words import ChatWords, CompletionWords

METRICS = "text/plain; version=0.0.4"  # Prometheus' format
HEALTH_S = 1.0  # how long /health waits for the KV manager, and then goes by what it last said
MANAGER_S = 2.0  # and others that ask for its state

api = FastAPI(title="Bifolio", docs_url=None, redoc_url=None, redirect_slashes=False)
api.add_middleware(OnlyLoopback)


@api.exception_handler(BifolioError)
async def _refused(request: Request, error: BifolioError) -> Response:
    return refusal(error)


@api.exception_handler(ClientDisconnect)
async def _left(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # nobody reads it


@api.exception_handler(HTTPException)
async def _not_served(request: Request, error: HTTPException) -> Response:
    return JSONResponse(not_served(request.url.path, request.method), error.status_code, error.headers)


@serve.ingress(api)
class Ingress:
    """`decode` is the decode pool's handle; the prefill pool's is taken only to make it part of the application."""

    def __init__(
        self, config: ClusterConfig, model: Path, manager: tuple[str, str], decode: Any, *prefill: Any
    ) -> None:
        log_to_stderr()
        shape = model_config(model)
        assert config.model.served_name is not None, "the configuration is resolved"
        assert config.model.dtype is not None, "the configuration is resolved"
        tokenizer = Tokenizer.load(model)
        self._served = Served(
            config.model.served_name,
            tokenizer,
            template_of(tokenizer),
            context_of(shape, config.engine, ITEMSIZES[config.model.dtype]),
            shape.vocab_size,
            int(time.time()),
            min(MOST_CHOICES, config.engine.max_sequences),
        )
        self._wanted = config.pools.wanted
        self._kv = config.kv
        self._manager = connect(*manager)
        self._seen = LastSeen(self._manager, config.kv.silence_s)
        self._frontend = Frontend(
            self._manager, Trunks(decode), attempts=config.ingress.attempts, silence_s=config.kv.silence_s
        )
        self._leaving = Leaving()
        on_sigterm(self._leaving.leave)
        gc.freeze()  # what is loaded stays: looking through it again holds up streams for 200 ms

    async def check_health(self) -> None:
        """Serve asks every few seconds: it replaces this process when it raises, which it does when it shall leave."""
        self._frontend.requests.watch()
        self._leaving.check()

    def _answer(self, query: Any) -> AsyncGenerator[Piece, None]:
        return answer(query, self._served, self._frontend)

    # HTTP

    @api.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        return self._respond(request, await self._read(request, CompletionRequest), "cmpl", CompletionWords)

    @api.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        return self._respond(request, await self._read(request, ChatRequest), "chatcmpl", ChatWords)

    @api.post("/v1/requests/{id:path}/cancel")
    async def cancel(self, id: str) -> Any:
        await self._frontend.cancel(checked(id, "id"))
        return {"id": id, "cancelled": True}

    @api.post("/tokenize")
    async def tokenize(self, request: Request) -> Any:
        asked = await self._read(request, TokenizeRequest)
        return await in_thread(asked.messages is not None, lambda: asked.answer(self._served))

    @api.post("/detokenize")
    async def detokenize(self, request: Request) -> Any:
        asked = await self._read(request, DetokenizeRequest)
        return await asyncio.to_thread(asked.answer, self._served)

    async def _read(self, request: Request, schema: Any) -> Any:
        body = await body_of(request, most_bytes(self._served.context_length))
        return await asyncio.to_thread(parse, body, schema)

    def _respond(self, request: Request, asked: Any, prefix: str, words_of: Any) -> Response:
        query = asked.to_query(named(request.headers.get(HEADER), HEADER, prefix))
        words = words_of(
            query.id,
            self._served.name,
            int(time.time()),
            self._served.tokenizer,
            include_usage=asked.include_usage,
            logprobs=query.logprobs is not None,
            prompt_logprobs=query.prompt_logprobs is not None,
        )
        pieces = self._answer(query)
        if asked.stream:
            return StreamedResponse(events(pieces, words), "text/event-stream")
        return StreamedResponse(whole(pieces, words), "application/json")

    @api.get("/v1/models")
    async def models(self) -> Any:
        model = {
            "id": self._served.name,
            "object": "model",
            "created": self._served.created,
            "owned_by": "bifolio",
        }
        return {"object": "list", "data": [{**model, "max_model_len": self._served.context_length}]}

    @api.get("/v1/models/{name:path}")
    async def model(self, name: str) -> Any:
        check_model(name, self._served.name)
        return (await self.models())["data"][0]

    @api.post("/v1/replicas/{id:path}/drain")
    async def drain(self, id: str) -> Any:
        """Asks a replica to leave: it takes no new work, ends what it has, and another one comes."""
        try:
            await asyncio.wait_for(self._manager.drain.remote(ReplicaId(id)), MANAGER_S)
        except (TimeoutError, RayActorError) as error:
            raise self._no_manager(error) from error
        except RayError as error:
            raise own_error(error) or error from error
        return {"id": id, "leaving": True}

    @api.get("/health")
    async def health(self) -> Response:
        """200 when a request would be served now, 503 when not; what stands still or is missing, stage by stage."""
        await self._seen.refresh(HEALTH_S)
        seen, judged = self._seen.settled, self._health()
        alive = alive_of(seen["replicas"] if seen else (), self._kv.silence_s)
        pools = {role: {"alive": alive.get(role, 0), "wanted": wanted} for role, wanted in self._wanted.items()}
        content = {"status": judged.status, "stages": judged.stages, "pools": pools}
        return JSONResponse(content, 200 if judged.ready else 503)

    @api.get("/status")
    async def status(self) -> Any:
        return await self._status()

    @api.get("/metrics")
    async def metrics(self) -> Response:
        snapshot = await self._status()
        return PlainTextResponse(render(snapshot, self._health().stages), media_type=METRICS)

    async def _status(self) -> dict[str, Any]:
        try:
            snapshot = await self._seen.ask(MANAGER_S)
        except (TimeoutError, RayActorError) as error:
            raise self._no_manager(error) from error
        return {"model": self._served.name, **snapshot}

    def _health(self) -> Health:
        return health(self._seen.settled, self._wanted, self._kv.split, self._kv.silence_s, self._silent_s())

    def _silent_s(self) -> float:
        """Since the KV manager last answered anything: it is asked each second."""
        return min(self._seen.heard_s, self._frontend.requests.silent_s)

    def _no_manager(self, error: BaseException) -> Unavailable:
        why = f"it is being started again: {error}" if isinstance(error, RayActorError) else "try again in some seconds"
        silent = f"its last answer was {self._silent_s():.1f} s ago"
        return Unavailable(f"the KV manager did not answer within {MANAGER_S:g} s, {silent}; {why}")

    # gRPC: Serve calls the methods of bifolio.v1.Inference by name

    async def Generate(self, request: pb.GenerateRequest, grpc_context: Any) -> AsyncIterator[pb.GenerateResponse]:
        with call(grpc_context):
            id = named(request.request_id or None, "request_id", "gen")
            query = await asyncio.to_thread(query_from_pb, request, id)
            async with aclosing(self._answer(query)) as pieces:
                async for piece in pieces:
                    if piece.tokens or piece.finish:
                        prompt = piece.prompt_logprobs
                        of_prompt = await asyncio.to_thread(logprobs_to_pb, prompt) if prompt else []
                        yield pb.GenerateResponse(
                            text=piece.text,
                            token_ids=piece.tokens,
                            finish_reason=piece.finish or "",
                            usage=piece.usage,
                            request_id=id,
                            logprobs=logprobs_to_pb(piece.logprobs),
                            prompt_logprobs=of_prompt,
                            choice=piece.choice,
                        )

    async def Cancel(self, request: pb.CancelRequest, grpc_context: Any) -> pb.CancelResponse:
        with call(grpc_context):
            await self._frontend.cancel(checked(request.request_id, "request_id"))
        return pb.CancelResponse()

    async def ListModels(self, request: pb.ListModelsRequest, grpc_context: Any) -> pb.ListModelsResponse:
        with call(grpc_context):
            served = self._served
            model = pb.Model(id=served.name, created=served.created, context_length=served.context_length)
            return pb.ListModelsResponse(models=[model])
