"""Reads a JSON object that a user sent, and refuses what JSON allows and no field means. Knows no field.

Refused, with the place named: what is not UTF-8 or not JSON or no object, a name that is there twice, numbers that are
not finite, half a surrogate pair in a text, and nesting that only an attack has.
"""

from __future__ import annotations

import json
import math
from typing import Any

from bifolio.protos.errors import InvalidRequest

from .mistakes import short

BODY = "body"  # what an error names when no field of the body can be named
MOST_NESTED = 32
MOST_DIGITS = 300  # of a whole number; Python's own parser takes quadratic time, and stops at 4300

_TWICE = object()


def read_object(content: bytes | str, name: str = BODY) -> dict[str, Any]:
    """The object in `content`; `name` is what it is called in errors."""
    subject = "the body" if name == BODY else name
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{subject} is not UTF-8 (byte {error.start}: {error.reason})", name) from error
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{subject} is not JSON: {error}", name) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{subject} is {short(repr(value))}; allowed: an object", name)
    for key, inner in value.items():
        _check(key, name, name, 1)
        place = key if name == BODY else f"{name}.{key}"
        _check(inner, short(place), short(key) if name == BODY else name, 1)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                content[key] = _TWICE
            seen.add(key)
    return content


def _whole_number(digits: str) -> int | float:
    return int(digits) if len(digits) <= MOST_DIGITS else math.inf


def _check(value: Any, place: str, field: str, depth: int) -> None:
    """`place` is said, and `field`, the outermost name, is what the error names."""
    if value is _TWICE:
        raise InvalidRequest(f"{place} is given twice in one object", field)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{place} is {value}; allowed: a finite number, of at most {MOST_DIGITS} digits", field)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{place} holds {value[error.start]!r} at character {error.start}, half a surrogate pair; "
                "allowed: Unicode text",
                field,
            ) from None
    elif isinstance(value, list | dict):
        if depth >= MOST_NESTED:
            raise InvalidRequest(f"{field} is nested more than {MOST_NESTED} deep", field)
        if isinstance(value, list):
            for index, inner in enumerate(value):
                if type(inner) is not int:  # prompts of token ids are long
                    _check(inner, f"{place}[{index}]", field, depth + 1)
        else:
            for key, inner in value.items():
                _check(key, place, field, depth + 1)
                _check(inner, f"{place}.{short(key)}", field, depth + 1)
