"""A client of the gRPC door, for programs and for `bifolio generate`. Raises the cluster's own errors."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import grpc

from bifolio.protos import inference_pb2 as pb
from bifolio.protos.errors import (
    BifolioError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PeerRefused,
    Revoked,
    Unavailable,
)
from bifolio.protos.inference_pb2_grpc import InferenceStub
from bifolio.protos.messages import RequestId

from .chat import Chat
from .convert import FIELD, query_to_pb
from .query import Query

# Serve's gRPC port serves several applications, and is told which by this
_METADATA = (("application", "bifolio"),)

MOST_BYTES = 64 << 20  # of one message: a prompt's logprobs come in one, and gRPC's own limit is 4 MiB

_ERRORS: dict[str, type[BifolioError]] = {
    "NOT_FOUND": ModelNotFound,
    "INVALID_ARGUMENT": InvalidRequest,
    "PERMISSION_DENIED": PeerRefused,
    "RESOURCE_EXHAUSTED": Overloaded,
    "UNAVAILABLE": Unavailable,
    "ABORTED": Unavailable,
    "DEADLINE_EXCEEDED": Unavailable,
    "CANCELLED": Revoked,
}


class Client:
    """
    with Client("127.0.0.1:9000") as client:
        for response in client.generate("Once upon a time", max_tokens=64):
            print(response.text, end="", flush=True)
    """

    def __init__(self, address: str = "127.0.0.1:9000") -> None:
        self.address = address
        # Not through $http_proxy: a cluster is asked directly
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", MOST_BYTES)]
        self._channel = grpc.insecure_channel(address, options)
        self._stub: Any = InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def models(self) -> list[pb.Model]:
        try:
            response = self._stub.ListModels(pb.ListModelsRequest(), metadata=_METADATA)
        except grpc.RpcError as error:
            raise self._translate(error) from error
        return list(response.models)

    def cancel(self, request_id: str) -> None:
        """Gives a request up, wherever it is; also one that comes only within the next minute."""
        try:
            self._stub.Cancel(pb.CancelRequest(request_id=request_id), metadata=_METADATA)
        except grpc.RpcError as error:
            raise self._translate(error) from error

    def generate(
        self,
        prompt: str | Sequence[int] | Chat,
        *,
        model: str = "",
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        min_tokens: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        n: int | None = None,
        request_id: str = "",
        cache_salt: str | None = None,
        priority: int | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> Generator[pb.GenerateResponse, None, None]:
        """The answer as it is produced; the last message carries `finish_reason` and `usage`.

        With `n` above 1 several answers, mixed: each message tells its `choice`, and each choice its `finish_reason`.
        `request_id` is what `cancel` takes; without, the cluster draws one, and each message tells it.

        Closing the iterator, or leaving a loop over it, cancels the request.
        """
        query = Query(
            id=RequestId(request_id),
            prompt=prompt if isinstance(prompt, str | Chat) else _token_ids(prompt),
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=tuple((logit_bias or {}).items()),
            min_tokens=min_tokens,
            seed=seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=n,
            cache_salt=cache_salt,
            priority=priority,
            user=user,
        )
        request = query_to_pb(query)
        call = self._stub.Generate(request, metadata=_METADATA, timeout=timeout)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._translate(error) from error
        finally:
            call.cancel()

    def _translate(self, error: Any) -> BifolioError:
        name, message = error.code().name, error.details() or "no reason given"
        if name == "DEADLINE_EXCEEDED":
            return Unavailable(f"{self.address} has not answered in the time that was given ({message})")
        if "http2 header with status" in message.lower():
            return Unavailable(f"{self.address} speaks HTTP but not gRPC; is it the HTTP port? ({message})")
        if name == "UNAVAILABLE" and "failed to connect" in message.lower():
            return Unavailable(f"nothing answers at {self.address}; is `bifolio serve` running there?")
        if name == "UNAVAILABLE" and ("socket closed" in message.lower() or "connection reset" in message.lower()):
            return Unavailable(f"the connection to {self.address} broke: the cluster stopped, or lost its ingress")
        if name == "UNAVAILABLE" and "resol" in message.lower():
            return Unavailable(f"{self.address} is no address: give HOST:PORT, as in 127.0.0.1:9000")
        kind = _ERRORS.get(name, BifolioError)
        if issubclass(kind, InvalidRequest):
            return kind(message, dict(error.trailing_metadata() or ()).get(FIELD))
        return kind(message)


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    ids = tuple(prompt)
    if any(isinstance(each, Mapping) for each in ids):
        raise InvalidRequest("prompt is a list of messages; a conversation is given as Chat((message, ...))", "prompt")
    return ids
