"""`inference.proto` to and from what the cluster computes with: the only file here that knows both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bifolio.protos import inference_pb2 as pb
from bifolio.protos.errors import InvalidRequest
from bifolio.protos.messages import RequestId, TokenLogprobs

from .chat import Chat
from .json_body import read_object
from .mistakes import short
from .query import OPTIONS, REQUEST_OPTIONS, Query

FIELD = "bifolio-field"  # trailing metadata of a refused call: the field of the request that is wrong

MOST_KWARGS = 1 << 16  # characters: variables of a template, not text

_OPEN = ("max_tokens", "logprobs", *OPTIONS)  # fields of Sampling that may be left open, under one name in both


def query_from_pb(request: pb.GenerateRequest, id: RequestId) -> Query:
    """A request without a prompt is one with an empty prompt: `resolve` refuses both alike."""
    sampling = request.sampling
    given: dict[str, Any] = {name: getattr(sampling, name) for name in _OPEN if sampling.HasField(name)}
    given |= {name: getattr(request, name) for name in REQUEST_OPTIONS if request.HasField(name)}
    return Query(
        id=id,
        prompt=_prompt_from_pb(request),
        model=request.model,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        **given,
    )


def _prompt_from_pb(request: pb.GenerateRequest) -> str | tuple[int, ...] | Chat:
    match request.WhichOneof("prompt"):
        case "token_ids":
            return tuple(request.token_ids.ids)
        case "chat":
            chat = request.chat
            if len(chat.template_kwargs) > MOST_KWARGS:
                raise InvalidRequest(
                    f"chat.template_kwargs has {len(chat.template_kwargs)} characters; allowed: at most {MOST_KWARGS}",
                    "chat.template_kwargs",
                )
            return Chat(
                tuple({"role": message.role, "content": message.content} for message in chat.messages),
                continue_final_message=chat.continue_final_message,
                template_kwargs=read_object(chat.template_kwargs or "{}", "chat.template_kwargs"),
            )
    return request.text


def query_to_pb(query: Query) -> pb.GenerateRequest:
    """What a client sends for a query. InvalidRequest names what cannot be sent."""
    request = pb.GenerateRequest(model=query.model)
    with _sent("request_id", query.id):
        request.request_id = query.id
    sampling = request.sampling
    for name in _OPEN:
        if (value := getattr(query, name)) is not None:
            with _sent(name, value):
                setattr(sampling, name, _unsigned(value) if name == "seed" else value)
    for name in ("stop", "stop_token_ids"):
        with _sent(name, getattr(query, name)):
            getattr(sampling, name).extend(getattr(query, name))
    for id, bias in query.logit_bias:
        with _sent("logit_bias", {id: bias}):
            sampling.logit_bias[id] = bias
    sampling.ignore_eos = query.ignore_eos
    for name in REQUEST_OPTIONS:
        if (value := getattr(query, name)) is not None:
            with _sent(name, value):
                setattr(request, name, value)
    with _sent("prompt", query.prompt):
        match query.prompt:
            case str():
                request.text = query.prompt
            case Chat():
                request.chat.CopyFrom(_chat_to_pb(query.prompt))
            case ids:
                request.token_ids.CopyFrom(pb.TokenIds(ids=ids))
    return request


@contextmanager
def _sent(name: str, value: object) -> Iterator[None]:
    """A number beyond its field, a value of another type, text that is not Unicode."""
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{name} is {short(repr(value))}, which cannot be sent: {error}", name) from error


def _chat_to_pb(chat: Chat) -> pb.Chat:
    kwargs = json.dumps(dict(chat.template_kwargs), allow_nan=False) if chat.template_kwargs else ""
    for message in chat.messages:
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            raise ValueError(f"{short(repr(message))} is no message; over gRPC each has a role and a content")
    messages = [pb.ChatMessage(**message) for message in chat.messages]
    return pb.Chat(messages=messages, continue_final_message=chat.continue_final_message, template_kwargs=kwargs)


def _unsigned(seed: int | None) -> int | None:
    """A negative seed, which HTTP takes as well, is the same 64 bits read with a sign."""
    return seed % 2**64 if seed is not None and -(2**63) <= seed < 0 else seed


def logprobs_to_pb(entries: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            token_id=entry.token,
            logprob=entry.logprob,
            top=[pb.TopLogprob(token_id=id, logprob=logprob) for id, logprob in entry.top],
        )
        for entry in entries
    ]


def usage_to_json(usage: pb.Usage) -> dict[str, object]:
    """OpenAI's counts, and beside them what only Bifolio tells."""
    timings, route = usage.timings, usage.route
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "seed": usage.seed,
        "timings": {field.name: getattr(timings, field.name) for field in timings.DESCRIPTOR.fields},
        "route": {field.name: getattr(route, field.name) for field in route.DESCRIPTOR.fields},
    }
