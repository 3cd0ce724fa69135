"""Log-probabilities as JSON: in OpenAI's two shapes for the answer's tokens, and in vLLM's for the prompt's.

Knows token ids and their bytes; nothing of requests. A special token has no text, and is shown as it is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.protos.messages import TokenLogprobs

from .detokenizer import Detokenizer
from .openai import Json
from .tokenizer import Tokenizer

LEAST = -9999.0  # what OpenAI shows for a probability of 0, for which JSON has no number


def chat_shape(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> Json:
    def named(id: int, logprob: float) -> Json:
        piece = tokenizer.piece(id)
        return {"token": _text(tokenizer, id), "logprob": _finite(logprob), "bytes": list(piece)}

    content = [
        {**named(entry.token, entry.logprob), "top_logprobs": [named(*top) for top in entry.top]} for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionShape:
    """The shape of /v1/completions: parallel lists. Goes through an answer token by token, since each `text_offset`
    counts the characters of the answer before it; what is cut off at the end by a stop string counts as well."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer)
        self._offset = 0

    def shape(self, entries: Sequence[TokenLogprobs]) -> Json:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._text.push([entry.token]))
        return {
            "tokens": [self._name(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            # The chosen token is always there, beside the most probable ones if it is none of them
            "top_logprobs": [self._named({**dict(entry.top), entry.token: entry.logprob}) for entry in entries],
            "text_offset": offsets,
        }

    def _named(self, logprobs: dict[int, float]) -> Json:
        """Two tokens may be written alike; then the later one goes by its id."""
        named: Json = {}
        for id, logprob in logprobs.items():
            name = self._name(id)
            named[f"token_id:{id}" if name in named else name] = _finite(logprob)
        return named

    def _name(self, id: int) -> str:
        """Names must differ within an object: part of a character is spelled as its bytes, as OpenAI does, and a token
        without text as its id."""
        piece = self._tokenizer.piece(id)
        if not piece:
            return self._tokenizer.special_name(id) or f"token_id:{id}"
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def prompt_shape(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[Json | None]:
    """One object for each token of the prompt, by token id; null for the first, which nothing predicts.

    `rank` is known of the most probable tokens alone.
    """

    def listed(entry: TokenLogprobs) -> Json:
        ranks = {id: rank for rank, (id, _) in enumerate(entry.top, start=1)}
        logprobs = {entry.token: entry.logprob, **dict(entry.top)}
        return {
            str(id): {"logprob": _finite(logprob), "rank": ranks.get(id), "decoded_token": _text(tokenizer, id)}
            for id, logprob in logprobs.items()
        }

    return [None, *map(listed, entries)]


def _text(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.special_name(id) or tokenizer.piece(id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
