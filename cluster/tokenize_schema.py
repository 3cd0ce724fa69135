"""The bodies of /tokenize and /detokenize, named as in vLLM. Which values make sense is for `query`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from bifolio.protos.errors import InvalidRequest

from . import ranges
from .chat import Chat
from .chat_schema import ChatFields
from .query import Served, check_model, prompt_ids
from .schema import Strict, TokenIds


class TokenizeRequest(ChatFields):
    """A text, or a conversation as the model's chat template words it."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = Field(default=None, json_schema_extra={"x-allowed": "a list of messages"})
    add_special_tokens: bool | None = None

    @property
    def asked(self) -> str | Chat:
        if self.messages is not None and self.prompt is not None:
            raise InvalidRequest("prompt and messages are both given; allowed: one of the two", "messages")
        return (self.prompt or "") if self.messages is None else self.to_chat()

    def answer(self, served: Served) -> dict[str, Any]:
        check_model(self.model or "", served.name)
        ids = prompt_ids(self.asked, served, special_tokens=self.add_special_tokens)
        return {"count": len(ids), "max_model_len": served.context_length, "tokens": ids}


class DetokenizeRequest(Strict):
    """Token ids, whose text is returned; special tokens have none."""

    model: str | None = None
    tokens: TokenIds

    @field_validator("tokens")
    @classmethod
    def _some(cls, tokens: list[int] | None) -> list[int]:
        if not tokens:
            raise ValueError(f"got {tokens}; allowed: a list of token ids, at least one")
        return tokens

    def answer(self, served: Served) -> dict[str, Any]:
        check_model(self.model or "", served.name)
        assert self.tokens is not None
        ranges.token_ids("tokens", self.tokens, served.vocab_size)
        return {"prompt": served.tokenizer.decode(self.tokens)}
