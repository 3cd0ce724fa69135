"""What a user asked, in one form for every door, and its check: token ids and a Sampling with nothing open.

Pure. Refuses what can never be answered before any replica is touched. Knows nothing of HTTP or gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bifolio.protos.errors import DoesNotFit, InvalidRequest, ModelNotFound
from bifolio.protos.messages import MOST_LOGPROBS, RequestId, Sampling

from . import ranges
from .chat import Chat, ChatTemplate
from .mistakes import short
from .tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # as in /v1/completions; a chat takes what the context has left
MOST_STOPS = 4
LONGEST_STOP = 1000  # characters
MOST_BIASES = 1024
MOST_CHOICES = 16  # answers to one request: each takes a sequence of one decode replica as long as it lasts
MOST_PRIORITY = 100
LONGEST_NAME = 256  # characters of `cache_salt` and `user`
MOST_PROMPT_LOGPROBS = 1 << 16  # tokens reported on in all: they are worded at once, and every stream waits as long
ROLES = ("system", "developer", "user", "assistant", "tool")
# Options that every door carries as they are, under one name, and leaves open as None
OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "seed"),
)
# The same of options that are not about sampling
REQUEST_OPTIONS = ("n", "prompt_logprobs", "cache_salt", "priority", "user")
COLDEST = 1e-6  # below, logits / temperature would overflow; what it tends to is greedy


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind the doors. `context_length` is what can ever fit, of prompt and answer together; `most_choices`
    how many answers to one request."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_length: int
    vocab_size: int
    created: int = 0
    most_choices: int = MOST_CHOICES


@dataclass(frozen=True, slots=True)
class Query:
    """A request as it came in; None is a field the user left open."""

    id: RequestId
    prompt: str | tuple[int, ...] | Chat
    model: str = ""  # empty: the one that is served
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None
    door_names: Mapping[str, str] = field(default_factory=dict)  # of fields that the user's door calls otherwise

    def called(self, name: str) -> str:
        """What the user calls a field."""
        if name == "prompt" and isinstance(self.prompt, Chat):
            return "messages"
        return self.door_names.get(name, name)


class Resolved(NamedTuple):
    prompt: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...]
    prompt_logprobs: int | None
    n: int
    salt: str
    tenant: str
    priority: int


def template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    """None where the model has no chat template; ConfigError where it has one that cannot be used."""
    source = tokenizer.chat_template
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens)


def most_bytes(context_length: int) -> int:
    """What a request may take in all. Text beyond this has more tokens than the context, and would take seconds to
    parse and to tokenize before that is known."""
    return max(1 << 20, 64 * context_length)


def check_model(asked: str, served: str) -> None:
    if asked not in ("", served):
        raise ModelNotFound(f"model {short(repr(asked))} is not served here; this cluster serves {served}", "model")


def resolve(query: Query, served: Served, draw_seed: Callable[[], int]) -> Resolved:
    """Token ids, sampling and stop strings; InvalidRequest names the field that is wrong."""
    check_model(query.model, served.name)
    _check_stops(query.stop)
    context = served.context_length
    most = _within(query, "max_tokens", 1, context)
    prompt_logprobs = _within(query, "prompt_logprobs", 0, MOST_LOGPROBS)
    n = _within(query, "n", 1, served.most_choices)
    salt, tenant = _name("cache_salt", query.cache_salt), _name("user", query.user)
    priority = _within(query, "priority", -MOST_PRIORITY, MOST_PRIORITY)
    sampling = _sampling(query, served, draw_seed)

    prompt = prompt_ids(query.prompt, served)  # last: it takes longest
    room = context - len(prompt)
    if room < 1:
        raise DoesNotFit(
            f"the prompt has {len(prompt)} tokens, and an answer takes one at least; the context holds {context}",
            query.called("prompt"),
        )
    if most is not None and room < most:
        raise DoesNotFit(
            f"the prompt has {len(prompt)} tokens and {query.called('max_tokens')} is {most}: {len(prompt) + most} "
            f"together; the context holds {context}",
            query.called("max_tokens"),
        )
    entries = 0 if prompt_logprobs is None else len(prompt) * (prompt_logprobs + 1)
    if entries > MOST_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs is {prompt_logprobs} for a prompt of {len(prompt)} tokens, {entries} logprobs in all; "
            f"allowed: at most {MOST_PROMPT_LOGPROBS}",
            "prompt_logprobs",
        )
    if most is None:
        most = room if isinstance(query.prompt, Chat) else min(DEFAULT_MAX_TOKENS, room)
    least = query.min_tokens or 0
    if not 0 <= least <= most:
        raise InvalidRequest(
            f"min_tokens is {short(str(least))}; allowed: 0 to {query.called('max_tokens')}, which is {most}",
            "min_tokens",
        )
    sampling = replace(sampling, max_tokens=most, min_tokens=least)
    return Resolved(prompt, sampling, query.stop, prompt_logprobs, n or 1, salt, tenant, priority or 0)


def prompt_ids(
    prompt: str | tuple[int, ...] | Chat, served: Served, *, special_tokens: bool | None = None
) -> tuple[int, ...]:
    """At least one token. `special_tokens`: whether the tokenizer adds its own, which a chat template does itself."""
    if isinstance(prompt, tuple):
        ranges.token_ids("prompt", prompt, served.vocab_size)
        ids = prompt
    else:
        chat = isinstance(prompt, Chat)
        text = _render(prompt, served) if isinstance(prompt, Chat) else prompt
        name = "messages" if chat else "prompt"
        most = most_bytes(served.context_length)
        if len(text) > most:
            raise DoesNotFit(
                f"{name} is {len(text)} characters long; allowed: at most {most} characters, and "
                f"{served.context_length} tokens",
                name,
            )
        added = not chat if special_tokens is None else special_tokens
        ids = tuple(served.tokenizer.encode(text, special_tokens=added)) if text else ()
        if ids and (largest := max(ids)) >= served.vocab_size:
            raise InvalidRequest(
                f"{name} holds token {largest}, which the tokenizer knows and the model does not; token ids are 0 to "
                f"{served.vocab_size - 1}",
                name,
            )
    if not ids:
        raise InvalidRequest("prompt is empty; at least one token is needed", "prompt")
    return ids


def _render(chat: Chat, served: Served) -> str:
    for place, message in enumerate(chat.messages):
        name = f"messages[{place}].role"
        if message.get("role") not in ROLES:
            given = short(repr(message.get("role")))
            raise InvalidRequest(f"{name} is {given}; allowed: {', '.join(ROLES)}", name)
    if served.template is None:
        raise InvalidRequest(
            f"{served.name} has no chat template: put the words of its format into a prompt, as /v1/completions takes",
            "messages",
        )
    return served.template.render(chat)


def _sampling(query: Query, served: Served, draw_seed: Callable[[], int]) -> Sampling:
    """All but `max_tokens` and `min_tokens`, which depend on the prompt."""
    vocab_size = served.vocab_size
    ranges.token_ids("stop_token_ids", query.stop_token_ids, vocab_size)
    ends = () if query.ignore_eos else [id for id in served.tokenizer.eos_ids if id < vocab_size]
    temperature = ranges.real("temperature", query.temperature, 0, 2, default=1)
    # Seeds are 64 bits; a negative one, which OpenAI's API allows, is the same bits read with a sign
    seed = _within(query, "seed", -(2**63), 2**64 - 1)
    return Sampling(
        max_tokens=0,
        temperature=temperature if temperature >= COLDEST else 0.0,
        top_p=ranges.real("top_p", query.top_p, 0, 1, default=1, above=True),
        top_k=max(0, _within(query, "top_k", -1, 2**31 - 1) or 0),  # -1 keeps all too, as in vLLM
        min_p=ranges.real("min_p", query.min_p, 0, 1, default=0),
        # Nearer to 0, a logit divided by it would overflow
        repetition_penalty=ranges.real("repetition_penalty", query.repetition_penalty, 0.01, 10, default=1),
        presence_penalty=ranges.real("presence_penalty", query.presence_penalty, -2, 2, default=0),
        frequency_penalty=ranges.real("frequency_penalty", query.frequency_penalty, -2, 2, default=0),
        logit_bias=_biases(query.logit_bias, vocab_size),
        seed=(draw_seed() if seed is None else seed) % 2**64,
        stop_token_ids=tuple(sorted({*query.stop_token_ids, *ends})),
        logprobs=_within(query, "logprobs", 0, MOST_LOGPROBS),
    )


def _within(query: Query, name: str, low: int, high: int) -> int | None:
    value: int | None = getattr(query, name)
    return None if value is None else ranges.whole(query.called(name), value, low, high)


def _name(field: str, text: str | None) -> str:
    if text is not None and len(text) > LONGEST_NAME:
        raise InvalidRequest(f"{field} has {len(text)} characters; allowed: at most {LONGEST_NAME}", field)
    return text or ""


def _biases(biases: tuple[tuple[int, float], ...], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(biases) > MOST_BIASES:
        raise InvalidRequest(f"logit_bias has {len(biases)} entries; allowed: at most {MOST_BIASES}", "logit_bias")
    for id, bias in biases:
        if not 0 <= id < vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {short(str(id))}; token ids are 0 to {vocab_size - 1}", "logit_bias"
            )
        if not -100 <= bias <= 100:
            raise InvalidRequest(f"logit_bias of token {id} is {bias}; allowed: -100 to 100", "logit_bias")
    return tuple(sorted((id, ranges.float32(bias)) for id, bias in biases))


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MOST_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} texts; allowed: at most {MOST_STOPS}", "stop")
    for text in stops:
        if not 0 < len(text) <= LONGEST_STOP:
            raise InvalidRequest(f"stop has a text of {len(text)} characters; allowed: 1 to {LONGEST_STOP}", "stop")
