"""Words one answer in OpenAI's shapes, whole or in chunks. Knows nothing about where the pieces come from.

Log-probabilities go with the tokens of their piece; those of the prompt are said once, with what is said first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from .answer import Piece
from .convert import usage_to_json
from .logprob_shapes import CompletionShape, chat_shape, prompt_shape
from .openai import Json
from .tokenizer import Tokenizer


class Words(ABC):
    """`logprobs`, `prompt_logprobs`: whether they were asked for."""

    def __init__(
        self,
        id: str,
        model: str,
        created: int,
        tokenizer: Tokenizer,
        *,
        include_usage: bool = False,
        logprobs: bool = False,
        prompt_logprobs: bool = False,
    ) -> None:
        self.id = id
        self._model, self._created, self._tokenizer = model, created, tokenizer
        self._include_usage, self._logprobs, self._prompt_logprobs = include_usage, logprobs, prompt_logprobs
        self._begun = False

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """The last piece carries the finish reason and the usage."""
        last = pieces[-1]
        assert last.usage is not None
        joined = Piece(
            "".join(piece.text for piece in pieces),
            finish=last.finish,
            logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
            prompt_logprobs=pieces[0].prompt_logprobs,
        )
        return {**self._whole(joined), "usage": usage_to_json(last.usage)}

    def chunks(self, piece: Piece) -> Iterator[Json]:
        """What a stream says of the next piece: nothing, while its text is held back."""
        for chunk in self._chunks(piece):
            yield {**chunk, "usage": None} if self._include_usage else chunk
            self._begun = True
        if piece.usage is not None and self._include_usage:
            yield {**self._head(streamed=True), "choices": [], "usage": usage_to_json(piece.usage)}

    @abstractmethod
    def _whole(self, answer: Piece) -> Json: ...

    @abstractmethod
    def _chunks(self, piece: Piece) -> Iterator[Json]: ...

    @abstractmethod
    def _kind(self, streamed: bool) -> str: ...

    def _head(self, *, streamed: bool) -> Json:
        return {"id": self.id, "object": self._kind(streamed), "created": self._created, "model": self._model}

    def _of_prompt(self, piece: Piece) -> Json:
        if self._begun or not self._prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_shape(piece.prompt_logprobs, self._tokenizer)}


class CompletionWords(Words):
    """/v1/completions."""

    _shape: CompletionShape | None = None

    def _kind(self, streamed: bool) -> str:
        return "text_completion"

    def _whole(self, answer: Piece) -> Json:
        return {**self._head(streamed=False), "choices": [self._choice(answer)]}

    def _chunks(self, piece: Piece) -> Iterator[Json]:
        if (
            piece.text
            or piece.finish
            or (self._logprobs and piece.logprobs)
            or (self._prompt_logprobs and not self._begun)
        ):
            yield {**self._head(streamed=True), "choices": [self._choice(piece)]}

    def _choice(self, piece: Piece) -> Json:
        self._shape = self._shape or CompletionShape(self._tokenizer)
        logprobs = self._shape.shape(piece.logprobs) if self._logprobs else None
        choice = {"index": 0, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}
        return {**choice, **self._of_prompt(piece)}


class ChatWords(Words):
    """/v1/chat/completions. The first chunk of a stream carries the role alone, the last the finish reason alone."""

    def _kind(self, streamed: bool) -> str:
        return "chat.completion.chunk" if streamed else "chat.completion"

    def _whole(self, answer: Piece) -> Json:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": 0, "message": message, **self._ends(answer, answer.finish)}
        return {**self._head(streamed=False), "choices": [choice], **self._of_prompt(answer)}

    def _chunks(self, piece: Piece) -> Iterator[Json]:
        if not self._begun:
            yield {**self._chunk({"role": "assistant", "content": ""}), **self._of_prompt(piece)}
        if piece.text or (self._logprobs and piece.logprobs):
            yield self._chunk({"content": piece.text}, piece)
        if piece.finish:
            yield self._chunk({}, finish=piece.finish)

    def _chunk(self, delta: Json, piece: Piece | None = None, finish: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, **self._ends(piece, finish)}
        return {**self._head(streamed=True), "choices": [choice]}

    def _ends(self, piece: Piece | None, finish: str | None) -> Json:
        logprobs = chat_shape(piece.logprobs, self._tokenizer) if piece and self._logprobs else None
        return {"logprobs": logprobs, "finish_reason": finish}
