"""The doors: HTTP (FastAPI) and gRPC, in one Serve deployment. They translate to a query and back and decide nothing.

Only loopback peers are let in: Serve binds the replica's own ports wider than asked, and there are no API keys yet.
"""

from __future__ import annotations

import ipaddress
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import grpc
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from ray import serve
from starlette.responses import Response

from bifolio.kv_manager.actor import connect
from bifolio.protos import inference_pb2 as pb
from bifolio.protos.errors import BifolioError, PeerRefused, status_of
from bifolio.protos.messages import RequestId
from bifolio.replicas.weights import model_config

from .answer import Piece, Served, answer
from .config import ClusterConfig
from .convert import query_from_pb
from .frontend import Frontend
from .openai import DONE, CompletionFormat, CompletionRequest, error_response, event, parse
from .responses import StreamedResponse
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)
api = FastAPI(title="Bifolio", docs_url=None, redoc_url=None)


def require_loopback(peer: str | None) -> None:
    """`peer` is an IP address, or None or empty when the connection has none (a unix socket)."""
    if peer and not ipaddress.ip_address(peer).is_loopback:
        raise PeerRefused(f"connections from {peer} are refused: only this machine may ask, until API keys are set")


@api.middleware("http")
async def _only_loopback(request: Request, call_next: Any) -> Any:
    try:
        require_loopback(request.client.host if request.client else None)
    except PeerRefused as error:
        return _error(error)
    return await call_next(request)


@api.exception_handler(BifolioError)
async def _refused(request: Request, error: BifolioError) -> Response:
    return _error(error)


def _error(error: BaseException) -> Response:
    status, headers, content = error_response(error)
    return JSONResponse(content, status, headers)


@serve.ingress(api)
class Ingress:
    """`decode` is the decode pool's handle; the prefill pool's is taken only to make it part of the application."""

    def __init__(
        self, config: ClusterConfig, model: Path, manager: tuple[str, str], decode: Any, *prefill: Any
    ) -> None:
        shape = model_config(model)
        assert config.model.served_name is not None, "the configuration is resolved"
        self._served = Served(
            config.model.served_name,
            Tokenizer.load(model),
            shape.max_positions,
            shape.vocab_size,
            int(time.time()),
        )
        self._manager = connect(*manager)
        self._frontend = Frontend(self._manager, decode)

    def _answer(self, query: Any) -> AsyncGenerator[Piece, None]:
        return answer(query, self._served, self._frontend)

    # HTTP

    @api.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        asked = parse(await request.body())
        id = RequestId(f"cmpl-{uuid.uuid4().hex}")
        words = CompletionFormat(id, self._served.name, int(time.time()), asked.include_usage)
        pieces = self._answer(asked.to_query(id))
        if asked.stream:
            return StreamedResponse(_events(pieces, words, asked), "text/event-stream")
        return StreamedResponse(_whole(pieces, words), "application/json")

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
        from .query import check_model

        check_model(name, self._served.name)
        return (await self.models())["data"][0]

    @api.get("/health")
    async def health(self) -> Response:
        """200 when a request would be placed: at least one decode replica is up."""
        replicas = (await self._status())["replicas"]
        ready = any(r["role"] == "decode" and r["state"] == "up" for r in replicas)
        return JSONResponse({"status": "ok" if ready else "no decode replica is up"}, 200 if ready else 503)

    @api.get("/status")
    async def status(self) -> Any:
        return await self._status()

    async def _status(self) -> dict[str, Any]:
        snapshot: dict[str, Any] = await self._manager.snapshot.remote()
        return {"model": self._served.name, **snapshot}

    # gRPC: Serve calls the methods of bifolio.v1.Inference by name

    async def Generate(self, request: pb.GenerateRequest, grpc_context: Any) -> AsyncIterator[pb.GenerateResponse]:
        with _status_for(grpc_context):
            id = RequestId(f"gen-{uuid.uuid4().hex}")
            async with aclosing(self._answer(query_from_pb(request, id))) as pieces:
                async for piece in pieces:
                    if piece.tokens or piece.finish:
                        yield pb.GenerateResponse(
                            text=piece.text,
                            token_ids=piece.tokens,
                            finish_reason=piece.finish or "",
                            usage=piece.usage,
                            request_id=id,
                        )

    async def ListModels(self, request: pb.ListModelsRequest, grpc_context: Any) -> pb.ListModelsResponse:
        with _status_for(grpc_context):
            served = self._served
            model = pb.Model(id=served.name, created=served.created, context_length=served.context_length)
            return pb.ListModelsResponse(models=[model])


async def _events(
    pieces: AsyncGenerator[Piece, None], words: CompletionFormat, asked: CompletionRequest
) -> AsyncGenerator[bytes, None]:
    """Server-sent events. An error before the first one is the caller's; later ones are an event of their own."""
    begun = False
    async with aclosing(pieces):
        try:
            async for piece in pieces:
                if piece.text or piece.finish:
                    yield event(words.chunk(piece.text, piece.finish))
                    begun = True
                if piece.usage is not None and asked.include_usage:
                    yield event(words.usage_chunk(piece.usage))
        except BifolioError as error:
            if not begun:
                raise
            logger.warning("request %s failed while it was streamed: %s", words.id, error.message)
            yield event(error_response(error)[2])
            return
        yield DONE


async def _whole(pieces: AsyncGenerator[Piece, None], words: CompletionFormat) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        taken = [piece async for piece in pieces]
    last = taken[-1]
    assert last.finish is not None
    assert last.usage is not None
    body = words.whole("".join(piece.text for piece in taken), last.finish, last.usage)
    yield JSONResponse(body).body  # type: ignore[misc]


@contextmanager
def _status_for(context: Any) -> Any:
    """Refuses strangers, and gives a call the status of the error it ends with."""
    try:
        require_loopback(_address(context.peer()))
        yield
    except BifolioError as error:
        context.set_code(grpc.StatusCode[status_of(error)[0]])
        context.set_details(error.message)
        raise


def _address(peer: str) -> str | None:
    """The IP address in gRPC's peer name: ipv4:127.0.0.1:123, ipv6:[::1]:123 or unix:…"""
    kind, _, rest = peer.partition(":")
    return (
        rest.rpartition(":")[0].strip("[]").replace("%5B", "").replace("%5D", "") if kind in ("ipv4", "ipv6") else None
    )
