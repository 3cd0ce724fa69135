"""The body of OpenAI's /v1/completions.

Checks names and types; which values make sense is for `query.resolve`, for every door alike.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from bifolio.protos.messages import RequestId

from .query import Query
from .schema import SamplingFields, asks_for_nothing, is_list_of, refuse

PROMPTS = "a text, a list of token ids, or a list with one of these"


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: Any = Field(json_schema_extra={"x-allowed": PROMPTS})
    logprobs: int | None = None

    best_of: int | None = None
    echo: object = None
    suffix: object = None

    _nothing = asks_for_nothing({"echo": (False,), "suffix": ("",)})

    @field_validator("best_of")
    @classmethod
    def _all_that_are_made(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        """To choose the best of more is not supported yet."""
        n = info.data.get("n") or 1
        if best_of not in (None, n):
            raise ValueError(f"got {best_of}; not supported yet, allowed: {n}, which is n, or null")
        return best_of

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        """A text or a tuple of ids. By hand: see `schema`."""
        if isinstance(prompt, list) and prompt and not is_list_of(int, prompt):
            if len(prompt) > 1 and (is_list_of(str, prompt) or all(is_list_of(int, each) for each in prompt)):
                raise ValueError(f"got {len(prompt)} prompts; one prompt per request is allowed for now")
            if len(prompt) > 1 or isinstance(prompt[0], int):
                raise refuse(prompt, PROMPTS)
            prompt = prompt[0]
        if not isinstance(prompt, str) and not is_list_of(int, prompt):
            raise refuse(prompt, PROMPTS)
        return prompt if isinstance(prompt, str) else tuple(prompt)

    def to_query(self, id: RequestId) -> Query:
        return Query(
            id=id, prompt=self.prompt, max_tokens=self.max_tokens, logprobs=self.logprobs, **self.query_fields()
        )
