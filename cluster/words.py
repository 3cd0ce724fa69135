"""Words one answer in OpenAI's shapes, whole or in chunks. Knows nothing about where the pieces come from.

Log-probabilities go with the tokens of their piece; those of the prompt are said once, with what is said first.

Nearly all pieces of a stream are text alone, and nearly all of their event is as in the event before: it is worded
once, and then the text alone is put where it belongs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from json.encoder import encode_basestring

from .answer import Piece
from .convert import usage_to_json
from .logprob_shapes import CompletionShape, chat_shape, prompt_shape
from .openai import Json, event
from .tokenizer import Tokenizer

_TEXT = "\0"  # stands for a text; what follows in its event is nothing a user has written


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
        self._around: dict[int, tuple[bytes, bytes]] = {}  # the text of a choice's events

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """The last piece carries the usage."""
        usage = pieces[-1].usage
        assert usage is not None
        first, *others = (_joined(pieces, choice) for choice in sorted({piece.choice for piece in pieces}))
        first = replace(first, prompt_logprobs=pieces[0].prompt_logprobs)
        return {**self._whole([first, *others]), "usage": usage_to_json(usage)}

    def events(self, piece: Piece) -> list[bytes]:
        """What a stream says of the next piece, as server-sent events."""
        if piece.choice in self._around and piece.text and piece.finish is None and piece.usage is None:
            before, after = self._around[piece.choice]
            return [before + encode_basestring(piece.text).encode() + after]
        said = [event(chunk) for chunk in self.chunks(piece)]
        if said and not self._logprobs and piece.finish is None and piece.choice not in self._around:
            (chunk,) = self.chunks(Piece(_TEXT, choice=piece.choice))  # what must be said once has been said
            before, _, after = event(chunk).rpartition(encode_basestring(_TEXT).encode())
            self._around[piece.choice] = before, after
        return said

    def chunks(self, piece: Piece) -> Iterator[Json]:
        """What a stream says of the next piece: nothing, while its text is held back."""
        for chunk in self._chunks(piece):
            yield {**chunk, "usage": None} if self._include_usage else chunk
        if piece.usage is not None and self._include_usage:
            yield {**self._head(streamed=True), "choices": [], "usage": usage_to_json(piece.usage)}

    @abstractmethod
    def _whole(self, answers: Sequence[Piece]) -> Json:
        """Of one joined piece for each choice."""

    @abstractmethod
    def _chunks(self, piece: Piece) -> Iterator[Json]: ...

    @abstractmethod
    def _kind(self, streamed: bool) -> str: ...

    def _head(self, *, streamed: bool) -> Json:
        return {"id": self.id, "object": self._kind(streamed), "created": self._created, "model": self._model}

    def _of_prompt(self, piece: Piece) -> Json:
        if not self._prompt_logprobs:
            return {}
        self._prompt_logprobs = False
        return {"prompt_logprobs": prompt_shape(piece.prompt_logprobs, self._tokenizer)}


class CompletionWords(Words):
    """/v1/completions."""

    @cached_property
    def _shapes(self) -> defaultdict[int, CompletionShape]:
        """By choice."""
        return defaultdict(lambda: CompletionShape(self._tokenizer))

    def _kind(self, streamed: bool) -> str:
        return "text_completion"

    def _whole(self, answers: Sequence[Piece]) -> Json:
        return {**self._head(streamed=False), "choices": [self._choice(answer) for answer in answers]}

    def _chunks(self, piece: Piece) -> Iterator[Json]:
        if piece.text or piece.finish or (self._logprobs and piece.logprobs) or self._prompt_logprobs:
            yield {**self._head(streamed=True), "choices": [self._choice(piece)]}

    def _choice(self, piece: Piece) -> Json:
        logprobs = self._shapes[piece.choice].shape(piece.logprobs) if self._logprobs else None
        choice = {"index": piece.choice, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}
        return {**choice, **self._of_prompt(piece)}


class ChatWords(Words):
    """/v1/chat/completions. The first chunk of a choice carries the role alone, the last the finish reason alone."""

    _begun: frozenset[int] = frozenset()  # choices

    def _kind(self, streamed: bool) -> str:
        return "chat.completion.chunk" if streamed else "chat.completion"

    def _whole(self, answers: Sequence[Piece]) -> Json:
        choices = []
        for answer in answers:
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            choices.append({"index": answer.choice, "message": message, **self._ends(answer, answer.finish)})
        return {**self._head(streamed=False), "choices": choices, **self._of_prompt(answers[0])}

    def _chunks(self, piece: Piece) -> Iterator[Json]:
        if piece.choice not in self._begun:
            self._begun |= {piece.choice}
            yield {**self._chunk(piece, {"role": "assistant", "content": ""}), **self._of_prompt(piece)}
        if piece.text or (self._logprobs and piece.logprobs):
            yield self._chunk(piece, {"content": piece.text}, piece)
        if piece.finish:
            yield self._chunk(piece, {}, finish=piece.finish)

    def _chunk(self, piece: Piece, delta: Json, said: Piece | None = None, finish: str | None = None) -> Json:
        choice = {"index": piece.choice, "delta": delta, **self._ends(said, finish)}
        return {**self._head(streamed=True), "choices": [choice]}

    def _ends(self, piece: Piece | None, finish: str | None) -> Json:
        logprobs = chat_shape(piece.logprobs, self._tokenizer) if piece and self._logprobs else None
        return {"logprobs": logprobs, "finish_reason": finish}


def _joined(pieces: Iterable[Piece], choice: int) -> Piece:
    of_choice = [piece for piece in pieces if piece.choice == choice]
    return Piece(
        "".join(piece.text for piece in of_choice),
        finish=of_choice[-1].finish,
        logprobs=tuple(entry for piece in of_choice for entry in piece.logprobs),
        choice=choice,
    )
