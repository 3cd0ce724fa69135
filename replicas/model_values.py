"""Single values that a model's files say, checked: a ConfigError names what was found and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bifolio.protos.errors import ConfigError


def number(what: str, got: object, least: float, most: float) -> float:
    """`got` where it is a number of this range, neither text nor true nor NaN; or a ConfigError."""
    if isinstance(got, bool) or not isinstance(got, int | float) or not least <= got <= most:
        raise ConfigError(f"model: {what} is {got!r}; allowed is a number from {least:g} to {most:g}")
    return float(got)


def whole(what: str, got: object, most: int, least: int = 1) -> int:
    """As `number`, for what is counted: 4.7 is no number of layers."""
    if isinstance(got, bool) or not isinstance(got, int) or not least <= got <= most:
        raise ConfigError(f"model: {what} is {got!r}; allowed is a whole number from {least} to {most}")
    return got


def only(what: str, got: object, *allowed: object) -> None:
    """A ConfigError unless `got` is one of those allowed."""
    if got not in allowed:
        raise ConfigError(f"model: {what} is {got!r}; allowed is {' or '.join(map(repr, allowed))}")


def reader(source: Mapping[str, Any], where: str, prefix: str = "") -> Callable[[str], Any]:
    """A function that gets what must be there, or raises a ConfigError."""

    def need(key: str) -> Any:
        if source.get(prefix + key) is None:
            raise ConfigError(f"model: {where} has no {prefix + key!r}, which is needed")
        return source[prefix + key]

    return need
