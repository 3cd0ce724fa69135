"""What a user asked, in one form for every door, and its check: token ids and a Sampling with nothing open.

Pure. Refuses what can never be answered before any replica is touched. Knows nothing of HTTP or gRPC.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from bifolio.protos.errors import DoesNotFit, InvalidRequest, ModelNotFound
from bifolio.protos.messages import RequestId, Sampling

from .tokenizer import Tokenizer

N = TypeVar("N", int, float)

DEFAULT_MAX_TOKENS = 16  # as in /v1/completions
MOST_STOPS = 4
LONGEST_STOP = 1000  # characters
COLDEST = 1e-6  # below, logits / temperature would overflow; what it tends to is greedy


@dataclass(frozen=True, slots=True)
class Query:
    """A request as it came in; None is a field the user left open."""

    id: RequestId
    prompt: str | tuple[int, ...]
    model: str = ""  # empty: the one that is served
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Resolved(NamedTuple):
    prompt: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...]


def most_bytes(context_length: int) -> int:
    """What a request may take in all. Text beyond this has more tokens than the context, and would take seconds to
    parse and to tokenize before that is known."""
    return max(1 << 20, 64 * context_length)


def check_model(asked: str, served: str) -> None:
    if asked not in ("", served):
        raise ModelNotFound(f"model {asked!r} is not served here; this cluster serves {served}", "model")


def resolve(
    query: Query,
    tokenizer: Tokenizer,
    context_length: int,
    vocab_size: int,
    draw_seed: Callable[[], int],
) -> Resolved:
    """Token ids, sampling and stop strings; InvalidRequest names the field that is wrong."""
    if len(query.prompt) > most_bytes(context_length):
        raise DoesNotFit(
            f"the prompt is {len(query.prompt)} long; allowed: at most {most_bytes(context_length)} characters, "
            f"and {context_length} tokens",
            "prompt",
        )
    for text in query.stop:
        _check_text("stop", text)
        if not 0 < len(text) <= LONGEST_STOP:
            raise InvalidRequest(f"stop has a text of {len(text)} characters; allowed: 1 to {LONGEST_STOP}", "stop")
    if len(query.stop) > MOST_STOPS:
        raise InvalidRequest(f"stop has {len(query.stop)} texts; allowed: at most {MOST_STOPS}", "stop")
    _check_ids("stop_token_ids", query.stop_token_ids, vocab_size)
    most = None if query.max_tokens is None else _within("max_tokens", query.max_tokens, 1, context_length)

    prompt = _prompt_ids(query.prompt, tokenizer, vocab_size)
    room = context_length - len(prompt)
    if room < (most or 1):
        raise DoesNotFit(
            f"the prompt has {len(prompt)} tokens and max_tokens is {most or 1}: {len(prompt) + (most or 1)} "
            f"together; the model's context holds {context_length}",
            "prompt" if room < 1 else "max_tokens",
        )
    ends = () if query.ignore_eos else tokenizer.eos_ids
    temperature = _float32(_within("temperature", query.temperature, 0, 2, default=1.0))
    sampling = Sampling(
        max_tokens=most or min(DEFAULT_MAX_TOKENS, room),
        temperature=temperature if temperature >= COLDEST else 0.0,
        top_p=_float32(_within("top_p", query.top_p, 0, 1, default=1.0, above=True)),
        top_k=_within("top_k", query.top_k, 0, 2**31 - 1, default=0),
        # Seeds are 64 bits; a negative one, which OpenAI's API allows, is the same bits read with a sign
        seed=(draw_seed() if query.seed is None else _within("seed", query.seed, -(2**63), 2**64 - 1)) % 2**64,
        stop_token_ids=tuple(sorted({*query.stop_token_ids, *ends})),
    )
    return Resolved(prompt, sampling, query.stop)


def _prompt_ids(prompt: str | tuple[int, ...], tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    if isinstance(prompt, str):
        _check_text("prompt", prompt)
        ids = tuple(tokenizer.encode(prompt)) if prompt else ()
    else:
        _check_ids("prompt", prompt, vocab_size)
        ids = prompt
    if not ids:
        raise InvalidRequest("prompt is empty; at least one token is needed", "prompt")
    return ids


def _check_text(field: str, text: str) -> None:
    """JSON can name half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field} holds {text[error.start]!r} at character {error.start}, half a surrogate pair; "
            "allowed: Unicode text",
            field,
        ) from None


def _check_ids(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        place, id = next((place, id) for place, id in enumerate(ids) if not 0 <= id < vocab_size)
        raise InvalidRequest(f"{field}[{place}] is {id}; token ids are 0 to {vocab_size - 1}", field)


def _within(field: str, value: N | None, low: int, high: int, *, default: N | None = None, above: bool = False) -> N:
    """`value`, or `default` when it is open; NaN is in no range."""
    if value is None:
        assert default is not None
        return default
    if not low <= value <= high or (above and value == low):
        raise InvalidRequest(f"{field} is {value}; allowed: {'above ' * above}{low} to {high}", field)
    return value


def _float32(value: float) -> float:
    """gRPC carries 32 bits; so does every door, or one seed would give two answers."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
