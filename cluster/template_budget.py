"""What one render of a chat template may cost: time, steps through ranges, and text made on the way.

Operations on texts and numbers are refused by what they would make, before it is made. Knows nothing of chats, and of
Jinja only its errors and its namespaces, which have no end when they are written out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jinja2
from jinja2.utils import Namespace

MOST_CHARACTERS = 1 << 26  # of one text
MOST_MADE = 1 << 28  # characters of all texts on the way; an item of a list counts as `ITEM` of them
MOST_STEPS = 1_000_000  # of all ranges together
LARGEST = 100_000  # a width, a count, a number of bits
WIDEST = 100  # an indentation of JSON, a separator, the format of a time
DEADLINE = 5.0  # seconds
ITEM = 32

T = TypeVar("T")


class TooMuch(jinja2.TemplateError):
    pass


class Budget:
    """What one render may still spend."""

    def __init__(self) -> None:
        self._ends = time.monotonic() + DEADLINE
        self._steps = MOST_STEPS
        self._left = MOST_MADE

    def tick(self) -> None:
        if time.monotonic() > self._ends:
            raise TooMuch(f"it takes longer than {DEADLINE:g} s")

    def step(self, count: int) -> None:
        self._steps -= count
        if self._steps < 0:
            raise TooMuch(f"its ranges have more than {MOST_STEPS} steps in all")

    def fits(self, characters: int) -> None:
        """Before they are made."""
        if characters > min(MOST_CHARACTERS, self._left):
            raise TooMuch(
                f"it makes a text longer than {MOST_CHARACTERS} characters, or {MOST_MADE} in all; a list's item "
                f"counts as {ITEM}"
            )

    def made(self, value: T) -> T:
        match value:
            case str():
                size = len(value)
            case int():
                size = value.bit_length() // 8
                _check_bits(value.bit_length())
            case list() | tuple() | dict() | set() | frozenset():
                size = ITEM * len(value)
            case _:
                return value
        self.fits(size)
        self._left -= size
        return value

    def unfold(self, value: Any, each: int = 8, indent: int = 0) -> int:
        """About how long the value is in words, where what it holds twice is said twice; refused if too long."""
        if isinstance(value, str):
            return len(value)
        size, open = 0, [(value, 1)]
        while open:
            self.tick()
            item, depth = open.pop()
            size += each + indent * depth
            match item:
                case str():
                    size += len(item)
                case Mapping():
                    open += ((part, depth + 1) for pair in item.items() for part in pair)
                case Collection() if not isinstance(item, range):
                    open += ((part, depth + 1) for part in item)
                case Namespace():
                    raise TooMuch("it writes a namespace")
            self.fits(size)
        return size


BUDGET: ContextVar[Budget] = ContextVar("budget")  # none while constants are computed: that waits for a render


@contextmanager
def budget() -> Iterator[None]:
    """What is rendered within shares it."""
    token = BUDGET.set(Budget())
    try:
        yield
    finally:
        BUDGET.reset(token)


def check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > LARGEST:
            raise TooMuch(f"it asks for a width or a count above {LARGEST}")


def _check_bits(bits: int) -> None:
    if bits > LARGEST:
        raise TooMuch(f"it computes with a number of more than {LARGEST} bits")


# What something would cost, before it is done


def before_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    match operator, left, right:
        case "+", (str() | list() | tuple()), (str() | list() | tuple()):
            budget.fits(_length(left) + _length(right))
        case "*", (str() | list() | tuple()), int():
            budget.fits(_length(left) * right)
        case "*", int(), (str() | list() | tuple()):
            budget.fits(left * _length(right))
        case "*", int(), int():
            _check_bits(left.bit_length() + right.bit_length() - 1)
        case "**", int(), int():
            _check_bits(left.bit_length() * right if abs(left) > 1 else 1)
        case "%", str(), _:
            before_percent(budget, left, right)


def _length(value: str | list[Any] | tuple[Any, ...]) -> int:
    return len(value) * (1 if isinstance(value, str) else ITEM)


_CONVERSION = re.compile(r"%(?:%|(?:\([^()]*\))?[-+ #0]*(\d*)(?:\.(\d*))?(?=[a-zA-Z]))")


def before_percent(budget: Budget, text: str, values: Any) -> None:
    found = _CONVERSION.findall(text)
    if "%" in _CONVERSION.sub("", text):
        raise TooMuch("it formats a text with % in a way that is not allowed; allowed: a width in digits")
    widths = [int(digits or 0) for pair in found for digits in pair]
    check_numbers(widths)
    each = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple) else (values,)
    longest = max((budget.unfold(value) for value in each), default=0)
    budget.fits(len(text) + sum(widths) + len(found) * longest)


def before_method(budget: Budget, text: str, name: str, args: list[Any]) -> None:
    match name, args:
        case "join", [items]:
            args[0] = items = list(items)  # might be an iterator
            lengths = (len(item) for item in items if isinstance(item, str))
            budget.fits(sum(lengths) + len(text) * len(items))
        case "replace", [str() as old, str() as new, *_]:
            budget.fits(len(text) + text.count(old) * len(new))
        case (("split" | "rsplit"), [str() as separator, *_]) if separator:
            budget.fits(ITEM * text.count(separator))
        case (("split" | "rsplit" | "splitlines"), _):
            budget.fits(ITEM * len(text) // 2)
