"""The `messages` of a request body, checked one by one. Knows nothing of templates, and of no role's meaning.

By hand, and not by a schema: a mistake is named with its place, as in `messages[2].content[0].type`.
"""

from __future__ import annotations

from typing import Any

from bifolio.protos.errors import InvalidRequest

from .mistakes import short
from .names import suggest

Message = dict[str, str]

# What OpenAI's clients send back with an assistant's message, although it says nothing
_NOTHING: dict[str, tuple[object, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}
_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning")  # handed to the template, if given
_CONTENT = 'a text, or a list of {"type": "text", "text": …}'


def read_messages(messages: Any) -> tuple[Message, ...]:
    """Each message with its role, its content as one text, and what else it says."""
    if not isinstance(messages, list):
        raise _refusal("messages", messages, "a list of messages")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def _message(place: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise _refusal(place, message, "an object with role and content")
    known = {"role", "content", *_TEXTS, *_NOTHING}
    _no_more_than(known, place, message)
    for name, nothing in _NOTHING.items():
        if (value := message.get(name)) is not None and value not in nothing:
            raise InvalidRequest(f"{place}.{name}: got {short(repr(value))}; not supported yet", f"{place}.{name}")
    role = message.get("role")
    if not isinstance(role, str):
        raise _missing(f"{place}.role", "role" in message, role, "a text, such as user")
    texts = {name: _text(f"{place}.{name}", message[name]) for name in _TEXTS if message.get(name) is not None}
    return {"role": role, "content": _content(place, role, message), **texts}


def _content(place: str, role: str, message: dict[str, Any]) -> str:
    """Parts are joined with nothing between them: they are one text."""
    content, place = message.get("content"), f"{place}.content"
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _missing(place, "content" in message, content, _CONTENT)
    if not content:
        raise InvalidRequest(f"{place} is an empty list; allowed: {_CONTENT}", place)
    return "".join(_part(f"{place}[{i}]", part) for i, part in enumerate(content))


def _part(place: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise _refusal(place, part, 'an object {"type": "text", "text": …}')
    if part.get("type") != "text":
        kind = short(repr(part.get("type")))
        raise InvalidRequest(f'{place} is a part of type {kind}; allowed: "text" alone for now', place)
    _no_more_than({"type", "text"}, place, part)
    return _text(f"{place}.text", part.get("text"))


def _no_more_than(known: set[str], place: str, given: dict[str, Any]) -> None:
    if unknown := sorted(given.keys() - known):
        name = short(unknown[0])
        raise InvalidRequest(f"{place}.{name}: unknown name; {suggest(name, known)}", f"{place}.{name}")


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refusal(place, value, "a text")
    return value


def _missing(place: str, there: bool, value: Any, allowed: str) -> InvalidRequest:
    return (
        _refusal(place, value, allowed) if there else InvalidRequest(f"{place} is missing; allowed: {allowed}", place)
    )


def _refusal(place: str, value: Any, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{place}: got {short(repr(value))}; allowed: {allowed}", place)
