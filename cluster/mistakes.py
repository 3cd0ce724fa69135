"""Words what is wrong with a configuration or a request: the path, what was given, what is allowed.

Translates pydantic's errors; knows only the class that was to be filled in.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from .names import nearest, suggest

_KINDS = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "minLength": "of length at least",
    "maxLength": "of length at most",
}


def explain(root: type[BaseModel], details: Any) -> str:
    """One of `ValidationError.errors()`, as a sentence without a full stop."""
    path = _named(root, details["loc"])
    dotted = ".".join(path) or "it"
    given = short(repr(details["input"]))
    match details["type"]:
        case "value_error":  # from our own validators, which say what is allowed
            return f"{dotted}: {details['ctx']['error']}" if path else str(details["ctx"]["error"])
        case "extra_forbidden":
            return f"{dotted}: unknown name; {_meant(root, path)}"
        case "missing":
            return f"{dotted}: is missing; allowed: {allowed(root, path)}"
    return f"{dotted}: got {given}; allowed: {allowed(root, path)}"


def _named(root: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The names of a mistake's place, without union members and list positions below a field."""
    path: list[str] = []
    cls: type[BaseModel] | None = root
    for step in map(str, location):
        if cls is None:
            break
        path.append(short(step if step.isprintable() else repr(step)))
        cls = _class_at(root, path)
    return path


def _meant(root: type[BaseModel], path: list[str]) -> str:
    """What an unknown name may have been meant to be: one beside it, else one of another section."""
    *parents, name = path
    owner = _class_at(root, parents)
    here = [".".join([*parents, field]) for field in owner.model_fields] if owner else []
    elsewhere = {known.rpartition(".")[2]: known for known in _paths(root)}
    if nearest(".".join(path), here) is None and (near := nearest(name, elsewhere)):
        return f"did you mean {elsewhere[near]}? allowed here: {', '.join(sorted(here))}"
    return suggest(".".join(path), here)


def allowed(root: type[BaseModel], path: Sequence[str]) -> str:
    """What a field takes, from its JSON schema."""
    owner = _class_at(root, path[:-1])
    if owner is None or not path or path[-1] not in owner.model_fields:
        return "an object"
    if (section := _class_at(root, path)) is not None:
        optional = type(None) in typing.get_args(owner.model_fields[path[-1]].annotation)
        return f"an object with any of {', '.join(section.model_fields)}{', or null' if optional else ''}"
    field = owner.model_json_schema()["properties"][path[-1]]
    kinds = [field] if "x-allowed" in field else field.get("anyOf", [field])
    return " or ".join(map(_describe, kinds))


def _describe(kind: dict[str, Any]) -> str:
    if "x-allowed" in kind:  # where the schema would say it worse
        return str(kind["x-allowed"])
    if "enum" in kind:
        return "one of " + ", ".join(map(str, kind["enum"]))
    if "const" in kind:
        return str(kind["const"])
    if kind.get("type") == "null":
        return "null"
    limits = [f"{words} {kind[bound]}" for bound, words in _BOUNDS.items() if bound in kind]
    return ", ".join([_KINDS.get(kind.get("type", ""), "another value"), *limits])


def _class_at(root: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The class of the section at `path`; None where there is a plain value or nothing."""
    cls: type[BaseModel] | None = root
    for name in path:
        if cls is None or name not in cls.model_fields:
            return None
        cls = _section(cls.model_fields[name].annotation)
    return cls


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, types.UnionType):  # X | None
        return next(filter(None, map(_section, typing.get_args(annotation))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _paths(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted path of a plain value."""
    for name, field in cls.model_fields.items():
        if section := _section(field.annotation):
            yield from _paths(section, f"{prefix}{name}.")
        else:
            yield prefix + name


def short(text: str) -> str:
    """What a message quotes of what was given."""
    return text if len(text) <= 80 else text[:77] + "..."
