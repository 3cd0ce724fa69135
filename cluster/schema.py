"""What the bodies of OpenAI's endpoints have in common: names and types of their fields, and how a body is read.

Which values make sense is for `query.resolve`, for every door alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, field_validator

from bifolio.protos.errors import InvalidRequest

from .json_body import BODY, read_object
from .mistakes import explain, short
from .query import OPTIONS, REQUEST_OPTIONS

Schema = TypeVar("Schema", bound="Strict")

MOST_ID_DIGITS = 20


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def parse(body: bytes, schema: type[Schema]) -> Schema:
    """InvalidRequest says what is wrong with the first field that is."""
    content = read_object(body)
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = short(str(first["loc"][0])) if first["loc"] else BODY
        raise InvalidRequest(explain(schema, first), name) from error


def is_list_of(kind: type, value: Any) -> bool:
    """Exactly of this type: JSON's true is no number, although Python's is."""
    return isinstance(value, list) and all(type(each) is kind for each in value)


def refuse(value: Any, allowed: str) -> ValueError:
    return ValueError(f"got {short(repr(value))}; allowed: {allowed}")


def _list_of(kind: type, allowed: str) -> Callable[[Any], Any]:
    """Pydantic alone would report every wrong item of a list, and a body may hold half a million."""

    def check(value: Any) -> Any:
        if value is not None and not is_list_of(kind, value):
            raise refuse(value, allowed)
        return value

    return check


def _stops(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    return _list_of(str, "a text or a list of texts")(value)


def _biases(value: Any) -> Any:
    """JSON's names are texts: {"123": -5}."""
    if value is None:
        return None
    allowed = "an object of token ids and numbers"
    if not isinstance(value, dict):
        raise refuse(value, allowed)
    for key, bias in value.items():
        if not (key.removeprefix("-").isdecimal() and len(key) <= MOST_ID_DIGITS and str(int(key)) == key):
            raise ValueError(f"{short(repr(key))} is no token id; allowed: {allowed}")
        if type(bias) not in (int, float):
            raise ValueError(f"token {key} has {short(repr(bias))}; allowed: {allowed}")
    return {int(key): bias for key, bias in value.items()}


TokenIds = Annotated[list[int] | None, BeforeValidator(_list_of(int, "a list of token ids"))]
Stops = Annotated[list[str] | None, BeforeValidator(_stops)]
Biases = Annotated[dict[int, float] | None, BeforeValidator(_biases)]


def asks_for_nothing(allowed: dict[str, tuple[object, ...]]) -> Any:
    """A validator of fields that are refused, unless with a value that changes no answer."""

    def check(value: object, info: ValidationInfo) -> object:
        nothing = allowed[str(info.field_name)]
        if value is not None and not any(type(value) is type(each) and value == each for each in nothing):
            known = " or ".join(json.dumps(each) for each in (*nothing, None))
            raise ValueError(f"got {short(repr(value))}; not supported yet, allowed: {known}")
        return value

    return field_validator(*allowed)(check)


class StreamOptions(Strict):
    include_usage: bool | None = None


class SamplingFields(Strict):
    """Fields of every endpoint that generates. Extensions are `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
    `stop_token_ids`, `ignore_eos`, `prompt_logprobs`, `cache_salt` and `priority`, named as in vLLM."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: Stops = None
    stop_token_ids: TokenIds = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Change no answer: who asks, and whose turn it is; who may find a prompt's blocks in the cache
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None

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

    def query_fields(self) -> dict[str, Any]:
        """What a Query takes as it is."""
        return {
            **{name: getattr(self, name) for name in (*OPTIONS, *REQUEST_OPTIONS)},
            "model": self.model or "",
            "logit_bias": tuple(sorted((self.logit_bias or {}).items())),
            "stop": tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": bool(self.ignore_eos),
        }
