"""Requests with one mistake each, drawn from a seed: what is sent where, and the field that the refusal must name.

Each begins as a good request and breaks one thing of it. Knows the endpoints only from outside.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
PATHS = (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE)

HUGE = "@1e400@"  # written as a number that no float holds
MISSING = object()
HALF = "half \ud83d"  # of a surrogate pair
NO_NUMBERS: list[Any] = ["1", True, False, [], [1], {}, HUGE, float("nan"), float("inf"), float("-inf"), HALF]
NO_WHOLE_NUMBERS = [*NO_NUMBERS, 1.5, 1e300, 10**40, -(10**40), 10**400]


class BadInput(NamedTuple):
    path: str
    body: bytes
    param: str

    def __str__(self) -> str:
        return f"POST {self.path} {self.body[:200]!r}"


@dataclass(frozen=True)
class Model:
    """What is served, as far as a mistake depends on it."""

    context: int
    vocab_size: int
    chat: bool = True  # it has a chat template


def good(path: str, draw: random.Random) -> dict[str, Any]:
    """A request in which nothing is wrong."""
    texts = ("Hello", "Once upon a time", "1 2 3", "日本")
    if path == DETOKENIZE:
        return {"tokens": [draw.randrange(3, 500) for _ in range(draw.randrange(1, 6))]}
    if path == TOKENIZE:
        return {"prompt": draw.choice(texts)}
    body: dict[str, Any] = {"max_tokens": draw.randrange(1, 8)}
    if path == COMPLETIONS:
        body["prompt"] = draw.choice([*texts, ["Hello"], [19, 20], [[19]]])
    else:
        body["messages"] = [{"role": "user", "content": draw.choice([*texts, [{"type": "text", "text": "Hi"}]])}]
    more = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -3, "stop": ["\n"], "stream": True,
            "logit_bias": {"7": -1.5}, "presence_penalty": -1, "min_tokens": 1, "user": "me", "cache_salt": "x",
            "priority": -1}  # fmt: skip
    return body | {name: more[name] for name in draw.sample(sorted(more), draw.randrange(4))}


def bad_inputs(model: Model, count: int, seed: int = 20240229) -> list[BadInput]:
    """At least one of every kind of mistake, then at random."""
    draw = random.Random(seed)
    kinds: list[tuple[str, str, Callable[[dict[str, Any]], bytes]]] = []
    for path in PATHS:
        if path != CHAT or model.chat:
            kinds += [(path, param, spoil) for param, spoil in _mistakes(path, model, draw)]
    made = [BadInput(path, spoil(good(path, draw)), param) for path, param, spoil in kinds]
    while len(made) < count:
        path, param, spoil = draw.choice(kinds)
        made.append(BadInput(path, spoil(good(path, draw)), param))
    draw.shuffle(made)
    return made


def encode(body: Any) -> bytes:
    return json.dumps(body).replace(f'"{HUGE}"', "1e400").encode()


def _mistakes(path: str, model: Model, draw: random.Random) -> Iterator[tuple[str, Callable[[dict[str, Any]], bytes]]]:
    """(the field that is wrong, what makes the mistake)."""
    for field, values in _wrong_values(path, model).items():
        for value in values:
            yield field.partition("@")[0], _with(field.partition("@")[2] or field, value)
    if path in (COMPLETIONS, CHAT):
        yield from _beyond_the_context(path, model)
        yield "stream_options", lambda body: encode({**body, "stream": False, "stream_options": {}})
    if path == CHAT:
        for param, messages in _wrong_messages():
            yield param, _with("messages", messages)
    for field in sorted(good(path, draw)):
        for wrong in {field[:-1], field + "s", field.upper(), field[1:], field + "_"}:
            yield wrong, _with(wrong, 1)
        yield field, lambda body, field=field: encode({field: "", **body})[:-1] + f', "{field}": "again"}}'.encode()
        for depth in (40, 300):
            yield field, _with(field, _nested(depth))
    yield "body", _with(HALF, 1)
    yield from (("body", lambda body, raw=raw: raw) for raw in _no_objects())
    yield "body", lambda body: encode(body)[:-1]
    yield "body", lambda body: encode(body) + b"}"
    yield "body", lambda body: encode(body).decode().encode("utf-16")
    yield "body", lambda body: b'{"a": "\xff", ' + encode(body)[1:]


def _with(field: str, value: Any) -> Callable[[dict[str, Any]], bytes]:
    def spoil(body: dict[str, Any]) -> bytes:
        if value is MISSING:
            return encode({name: each for name, each in body.items() if name != field})
        # Wrong fields come first or last: what else is in the body changes nothing
        return encode({**body, field: value} if field in body else {field: value, **body})

    return spoil


def _wrong_values(path: str, model: Model) -> dict[str, list[Any]]:
    """Field -> values that are wrong for every request. `a@b`: the error names a when b has the value."""
    outside = [model.vocab_size, -1, 2**31, 10**40]
    wrong_ids: list[Any] = [*[[id] for id in outside], [5, "5"], [True], [1.0], [[5]], [None], "5", 5, {}, [HALF]]
    model_name: list[Any] = ["gpt-4", " ", "x" * 300, 5, [], {}, True, HALF]
    if path == DETOKENIZE:
        return {"tokens": [MISSING, None, [], *wrong_ids], "model": model_name}
    empty = ["", None, MISSING]
    if path == TOKENIZE:
        no_texts = [5, True, [], [5], {}, HALF]
        return {"prompt": [*empty, *no_texts], "model": model_name, "add_special_tokens": ["true", 1, [], {}]}
    numbers = {
        "temperature": [-0.001, 2.001, -1, 1e300, 10**40],
        "top_p": [0, -0.5, 1.001, 1e-60, 5],
        "min_p": [-0.001, 1.001, 5],
        "repetition_penalty": [0, -1, 1e-60, 10.001, 1e39],
        "presence_penalty": [-2.001, 2.001, 50],
        "frequency_penalty": [-2.001, 2.001, 50],
    }
    wholes = {
        "max_tokens": [0, -1, model.context + 1, 2**31, 2**63],
        "top_k": [-2, 2**31],
        "min_tokens": [-1, model.context + 1],
        "seed": [2**64, -(2**63) - 1],
        "prompt_logprobs": [-1, 21],
        "n": [0, -1, 17, 2**31],
        "priority": [-101, 101],
    }
    fields: dict[str, list[Any]] = {
        **{field: values + NO_NUMBERS for field, values in numbers.items()},
        **{field: values + NO_WHOLE_NUMBERS for field, values in wholes.items()},
        "stop": ["", [""], ["a", ""], list("abcde"), "x" * 1001, 5, [5], [None], [["a"]], {}, HALF, ["a", HALF]],
        "stop_token_ids": wrong_ids,
        "logit_bias": [
            *[{str(id): 1} for id in outside],
            *({"a": 1}, {"": 1}, {"07": 1}, {"1.5": 1}, {"7": "1"}, {"7": None}, {"7": True}, {"7": 100.5}),
            *({"7": -101}, {"7": HUGE}, {"7": float("nan")}, {HALF: 1}, {str(id): 1 for id in range(1025)}, [], [7], 7),
        ],
        "ignore_eos": ["true", 1, 0, [], {}],
        "stream": ["true", 1, 0, [], {}],
        "stream_options": [True, [], "x", 5],
        "user": [5, True, [], {}, HALF, "x" * 257],
        "cache_salt": [5, True, [], {}, HALF, "日" * 257],
        "model": model_name,
    }
    if path == COMPLETIONS:
        prompts: list[Any] = [
            *empty,
            *([], [""], [[]], ["a", "b"], [[5], [6]], [5, "a"], ["a", 5], [[5], 6], [True], [[True]], [None], [{}]),
            *(5, True, {}, HALF, [HALF], [1.5], [[["a"]]], [HUGE], [[HUGE]]),
            *([id] for id in outside),
            *([[5, id]] for id in outside),
        ]
        nothing = {"best_of": [2, 0, -1, *NO_WHOLE_NUMBERS], "echo": [True, 1], "suffix": ["x"]}
        return {**fields, **nothing, "prompt": prompts, "logprobs": [-1, 21, *NO_WHOLE_NUMBERS]}
    return {
        **fields,
        "max_completion_tokens": [0, -1, model.context + 1, *NO_WHOLE_NUMBERS, "1"],
        "logprobs": [1, 0, "true", [], {}],
        "top_logprobs": [0, 5, -1, 21, *NO_WHOLE_NUMBERS],  # without logprobs: true
        "messages": [MISSING, None, [], {}, "Hello", 5, True],
        "continue_final_message": ["true", 1, [], {}],
        "add_generation_prompt": [False, "true", 1],
        "chat_template_kwargs": [[], "x", 5, {"messages": []}, {"x": HALF}, {"x": HUGE}],
        "tools": [[{"type": "function"}], {}, 5],
        "tool_choice": ["required", {}],
        "functions": [[{}]],
        "response_format": [{"type": "json_object"}, "text"],
        "modalities": [["text", "audio"]],
        "reasoning_effort": ["low"],
    }


def _beyond_the_context(path: str, model: Model) -> Iterator[tuple[str, Callable[[dict[str, Any]], bytes]]]:
    context = model.context
    if path == CHAT:
        long = [{"role": "user", "content": "word " * (2 * context)}]
        yield "messages", _with("messages", long)
        yield (
            "max_completion_tokens",
            lambda body: encode({"messages": body["messages"], "max_completion_tokens": context}),
        )
        return
    for length in (context, context + 1, 2 * context):
        yield "prompt", lambda body, length=length: encode({"prompt": [5] * length})
    yield "prompt", lambda body: encode({"prompt": "word " * (2 * context)})
    for length, most in ((context - 1, 2), (context - 8, 9), (1, context)):
        yield "max_tokens", lambda body, length=length, most=most: encode({"prompt": [5] * length, "max_tokens": most})
    yield "min_tokens", lambda body: encode({"prompt": "a", "max_tokens": 3, "min_tokens": 4})


def _wrong_messages() -> Iterator[tuple[str, list[Any]]]:
    """(the place that is wrong, messages)."""
    user = {"role": "user", "content": "Hello"}
    for message in ("Hello", 5, None, [], True):
        yield "messages[0]", [message]
        yield "messages[1]", [user, message]
    for role in (MISSING, None, 5, [], {}, "", "king", "User", " user"):
        yield "messages[0].role", [{"content": "a"} if role is MISSING else {"role": role, "content": "a"}]
    for content in (MISSING, None, 5, True, {}, []):
        yield "messages[1].content", [user, {"role": "user"} if content is MISSING else {**user, "content": content}]
    for part in ("a", 5, None, [], {"type": "image_url", "image_url": {"url": "x"}}, {"text": "a"}, {"type": 5}):
        yield "messages[0].content[1]", [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    for text in (MISSING, None, 5, []):
        part = {"type": "text"} if text is MISSING else {"type": "text", "text": text}
        yield "messages[0].content[0].text", [{"role": "user", "content": [part]}]
    yield "messages[0].content[0].txt", [{"role": "user", "content": [{"type": "text", "text": "a", "txt": 1}]}]
    yield "messages[0].contents", [{**user, "contents": 1}]
    yield "messages[0].name", [{**user, "name": 5}]
    yield "messages[0].tool_calls", [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    for field in ("role", "content"):
        yield "messages", [{**user, field: HALF}]
    yield "messages", [{**user, "name": HALF}]


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _no_objects() -> Iterator[bytes]:
    yield from (b"", b" ", b"nope", b"null", b"true", b"5", b'"prompt"', b"[]", b"[1]", b'[{"prompt": "a"}]', b"{")
    yield from (b"NaN", b"1e400", b"{'prompt': 'a'}", b'{"prompt": "a",}', b'{prompt: "a"}', b"\xff\xfe", b"\x00")
    yield from (
        b"\xef\xbb\xbf{}",
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a\nb"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
    )
    yield b'{"prompt": "' + b"x" * 1000
