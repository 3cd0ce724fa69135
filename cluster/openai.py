"""The shape of OpenAI's /v1/completions: the request as JSON, the answer, its chunks, and errors.

Checks names and types; which values make sense is for `query.resolve`, for every door alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from bifolio.protos import inference_pb2 as pb
from bifolio.protos.errors import (
    BifolioError,
    DoesNotFit,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    status_of,
)
from bifolio.protos.messages import FinishReason, RequestId

from .convert import usage_to_json
from .mistakes import explain
from .query import Query

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"

# Fields of OpenAI's that are refused unless they ask for nothing
_NOTHING: dict[str, object] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": None,
    "suffix": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
}

_CODES: dict[type[BaseException], str] = {
    DoesNotFit: "context_length_exceeded",
    ModelNotFound: "model_not_found",
}


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None


class CompletionRequest(_Strict):
    """The body of POST /v1/completions. `top_k`, `stop_token_ids` and `ignore_eos` are extensions."""

    model: str | None = None
    prompt: str | list[int] | list[str] | list[list[int]] = Field(
        json_schema_extra={"x-allowed": "a text, a list of token ids, or a list with one of these"}
    )
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = Field(default=None, json_schema_extra={"x-allowed": "a text or a list of texts"})
    stop_token_ids: list[int] | None = Field(default=None, json_schema_extra={"x-allowed": "a list of token ids"})
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # who asks; changes no answer

    n: object = None
    best_of: object = None
    echo: object = None
    logprobs: object = None
    suffix: object = None
    presence_penalty: object = None
    frequency_penalty: object = None
    logit_bias: object = None

    @field_validator(*_NOTHING)
    @classmethod
    def _asks_for_nothing(cls, value: object, info: ValidationInfo) -> object:
        nothing = _NOTHING[str(info.field_name)]
        if value is not None and value != nothing:
            raise ValueError(f"got {value!r}; not supported yet, allowed: {json.dumps(nothing)}")
        return value

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            raise ValueError(f"got {len(prompt)} prompts; one prompt per request is allowed for now")
        return prompt

    @field_validator("stream_options")
    @classmethod
    def _only_with_stream(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise ValueError("allowed only with stream: true")
        return options

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def to_query(self, id: RequestId) -> Query:
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Query(
            id=id,
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            model=self.model or "",
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=tuple(stops),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


def parse(body: bytes) -> CompletionRequest:
    """InvalidRequest says what is wrong with the first field that is."""
    try:
        content = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    try:
        return CompletionRequest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])[:80] if first["loc"] else None
        raise InvalidRequest(explain(CompletionRequest, first), name) from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """Words one answer, whole or in chunks."""

    id: str
    model: str
    created: int
    include_usage: bool = False
    _head: Json = field(init=False, repr=False)

    def __post_init__(self) -> None:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        object.__setattr__(self, "_head", head)

    def whole(self, text: str, finish: FinishReason, usage: pb.Usage) -> Json:
        return {**self._head, "choices": [_choice(text, finish)], "usage": usage_to_json(usage)}

    def chunk(self, text: str, finish: FinishReason | None = None) -> Json:
        usage = {"usage": None} if self.include_usage else {}
        return {**self._head, "choices": [_choice(text, finish)], **usage}

    def usage_chunk(self, usage: pb.Usage) -> Json:
        """The last chunk of a stream whose client asked for the usage."""
        return {**self._head, "choices": [], "usage": usage_to_json(usage)}


def _choice(text: str, finish: FinishReason | None) -> Json:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


def event(content: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def not_served(path: str, method: str) -> Json:
    """The body of a 404 or 405."""
    message = f"{method} {path} is not served here; allowed: POST /v1/completions, GET /v1/models, /health, /status"
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def public_message(error: BaseException) -> str:
    """What a client is told. An error that is not ours is not shown: it may tell too much."""
    return error.message if isinstance(error, BifolioError) else "internal error; the server's log has it"


def error_response(error: BaseException) -> tuple[int, dict[str, str], Json]:
    """HTTP status, headers and body."""
    _, status, kind = status_of(error)
    code = _CODES.get(type(error))
    param = error.field if isinstance(error, InvalidRequest) else None
    headers = {"Retry-After": str(max(1, round(error.retry_after)))} if isinstance(error, Overloaded) else {}
    return status, headers, {"error": {"message": public_message(error), "type": kind, "param": param, "code": code}}
