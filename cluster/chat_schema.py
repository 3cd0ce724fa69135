"""The body of OpenAI's /v1/chat/completions.

Checks names and types; which values make sense is for `query.resolve`, for every door alike. What a conversation looks
like to the model is for the chat template.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from bifolio.protos.messages import RequestId

from .chat import Chat
from .chat_messages import read_messages
from .query import Query
from .schema import SamplingFields, Strict, asks_for_nothing


class ChatFields(Strict):
    """A conversation, as every endpoint takes it that takes one. All but `messages` are extensions, as in vLLM."""

    messages: Any = Field(json_schema_extra={"x-allowed": "a list of messages"})
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, json_schema_extra={"x-allowed": "an object"})

    @field_validator("messages")
    @classmethod
    def _read(cls, messages: Any) -> Any:
        return read_messages(messages)

    @field_validator("add_generation_prompt")
    @classmethod
    def _one_or_the_other(cls, adds: bool | None, info: ValidationInfo) -> bool | None:
        """The model either begins a message or goes on within one, so each of the two says it all."""
        if adds is not None and adds == bool(info.data.get("continue_final_message")):
            raise ValueError(f"got {adds}; allowed: true, or false with continue_final_message: true")
        return adds

    def to_chat(self) -> Chat:
        return Chat(
            self.messages,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=self.chat_template_kwargs or {},
        )


class ChatRequest(SamplingFields, ChatFields):
    """The body of POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: object = None
    functions: object = None
    function_call: object = None
    response_format: object = None
    modalities: object = None
    audio: object = None
    prediction: object = None
    reasoning_effort: object = None
    store: object = None
    metadata: object = None
    service_tier: object = None

    _nothing = asks_for_nothing(
        {
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "parallel_tool_calls": (True, False),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "response_format": ({"type": "text"},),
            "modalities": (["text"],),
            "audio": (),
            "prediction": (),
            "reasoning_effort": (),
            "store": (False,),
            "metadata": ({},),
            "service_tier": ("auto", "default"),
        }
    )

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_length(cls, most: int | None, info: ValidationInfo) -> int | None:
        older = info.data.get("max_tokens")
        if most is not None and older not in (None, most):
            raise ValueError(f"got {most}, and max_tokens is {older}; allowed: one of the two")
        return most

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, top: int | None, info: ValidationInfo) -> int | None:
        if top is not None and not info.data.get("logprobs"):
            raise ValueError("allowed only with logprobs: true")
        return top

    def to_query(self, id: RequestId) -> Query:
        newer = self.max_completion_tokens is not None
        return Query(
            id=id,
            prompt=self.to_chat(),
            max_tokens=self.max_completion_tokens if newer else self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            door_names={"logprobs": "top_logprobs", **({"max_tokens": "max_completion_tokens"} if newer else {})},
            **self.query_fields(),
        )
