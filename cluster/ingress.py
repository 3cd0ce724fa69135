"""The doors: HTTP (FastAPI) and gRPC, in one Serve deployment. They translate to a query and back and decide nothing.

Only loopback peers are let in: Serve binds the replica's own ports wider than asked, and there are no API keys yet.

`serve.ingress` pickles the routes by value when the class is made. So annotations are evaluated here (there is no
import from `__future__`), and what the methods use is imported, never defined further down.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from ray import serve
from ray.exceptions import RayActorError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

from bifolio.kv_manager.actor import connect
from bifolio.protos import inference_pb2 as pb
from bifolio.protos.errors import BifolioError, Unavailable
from bifolio.replicas.kv_memory import ITEMSIZES, context_of
from bifolio.replicas.logs import log_to_stderr
from bifolio.replicas.model_files import model_config

from .answer import Piece, answer, in_thread
from .bodies import events, whole
from .chat_schema import ChatRequest
from .completion_schema import CompletionRequest
from .config import ClusterConfig
from .convert import logprobs_to_pb, query_from_pb
from .frontend import Frontend
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
from .words import ChatWords, CompletionWords

METRICS = "text/plain; version=0.0.4"  # Prometheus' format

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
        self._manager = connect(*manager)
        self._frontend = Frontend(self._manager, decode)

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

    @api.get("/health")
    async def health(self) -> Response:
        """200 when a request would be placed: a decode replica is alive. Also how many are, of those wanted."""
        alive = [r["role"] for r in (await self._status())["replicas"] if r["state"] == "alive"]
        pools = {role: {"alive": alive.count(role), "wanted": wanted} for role, wanted in self._wanted.items()}
        ready = "decode" in alive
        status = "ok" if ready else "no decode replica is alive"
        return JSONResponse({"status": status, "pools": pools}, 200 if ready else 503)

    @api.get("/status")
    async def status(self) -> Any:
        return await self._status()

    @api.get("/metrics")
    async def metrics(self) -> Response:
        return PlainTextResponse(render(await self._status()), media_type=METRICS)

    async def _status(self) -> dict[str, Any]:
        try:
            snapshot: dict[str, Any] = await self._manager.snapshot.remote()
        except RayActorError as error:
            raise Unavailable(f"the KV manager does not answer; it is being restarted: {error}") from error
        return {"model": self._served.name, **snapshot}

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
