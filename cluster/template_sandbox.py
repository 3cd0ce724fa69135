"""Where chat templates run: Jinja's immutable sandbox as transformers sets it up, with an end to what one render costs.

Every loop step, call, filter, test, slice and operator by which something grows asks the render's `Budget`: what would
be too large is refused before it is made, and a template ends itself in time. What cannot ask is one operation inside
Python, such as a comparison of lists that hold one another many times over: a template is trusted as far as that.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import filters, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter, safe_range
from jinja2.utils import Namespace, pass_environment, pass_eval_context
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from .template_budget import (
    BUDGET,
    ITEM,
    WIDEST,
    TooMuch,
    before_method,
    before_operator,
    before_percent,
    check_numbers,
)

_WITHHELD = {"encode", "expandtabs", "from_bytes", "maketrans", "to_bytes", "translate"}  # no template has a use for


class _Bounded(SandboxedFormatter):
    """Of str.format."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        BUDGET.get().unfold(value)
        return value, first

    def format_field(self, value: Any, format_spec: str) -> str:
        check_numbers(map(int, re.findall(r"\d+", format_spec)))
        return BUDGET.get().made(str(super().format_field(value, format_spec)))


class _BoundedEscape(_Bounded, SandboxedEscapeFormatter):
    pass


# Filters

_DROPPED = {"pprint", "urlize", "wordwrap", "xmlattr"}
_LISTING = {"batch", "groupby", "list", "slice", "sort"}
_COUNTING = {"batch", "center", "indent", "replace", "round", "slice", "truncate"}


@pass_eval_context
def _join(context: nodes.EvalContext, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(context.environment, attribute), value)
    spent, items = BUDGET.get(), list(value)
    length = len(str(d)) * len(items)
    for item in items:
        length += spent.unfold(item)
        spent.fits(length)
    return filters.sync_do_join(context, items, d)


@pass_eval_context
def _replace(context: nodes.EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    BUDGET.get().unfold(s)
    text = str(s)
    BUDGET.get().fits(len(text) + text.count(str(old)) * len(str(new)))
    return filters.do_replace(context, s, old, new, count)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    before_method(BUDGET.get(), s, "splitlines", [])
    each = len(width) if isinstance(width, str) else width
    BUDGET.get().fits(len(s) + (len(s.splitlines()) + 1) * each)
    return filters.do_indent(s, width, first, blank)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    before_percent(BUDGET.get(), str(value), kwargs or args)
    return filters.do_format(value, *args, **kwargs)


@pass_environment
def _sum(environment: jinja2.Environment, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise TooMuch("it sums up what is no number; join texts, and add lists with +")
    return filters.sync_do_sum(environment, iterable, attribute, start)


def _string(value: Any) -> str:
    BUDGET.get().unfold(value)
    return filters.FILTERS["string"](value)  # type: ignore[no-any-return]


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without HTML escapes, unlike Jinja's own."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    longest = max(map(len, separators or ("",)))
    if max(width, longest) > WIDEST:
        raise TooMuch(f"it writes JSON with an indentation or separators of more than {WIDEST} characters")
    BUDGET.get().unfold(value, each=8 + longest, indent=max(0, width))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _steps(value: Iterable[Any]) -> Iterator[Any]:
    """What a loop goes over."""
    for item in value:
        BUDGET.get().tick()
        yield item


_OWN: dict[str, Callable[..., Any]] = {
    "join": _join,
    "replace": _replace,
    "indent": _indent,
    "format": _format,
    "sum": _sum,
    "string": _string,
    "tojson": _to_json,
    "in steps": _steps,  # no template can write these two names
    "made": lambda value: value,
}


def _bounded(name: str, function: Any) -> Callable[..., Any]:
    """A filter or a test that asks the budget."""
    value = 1 if hasattr(function, "jinja_pass_arg") else 0  # its place among the arguments

    @functools.wraps(function)  # and what Jinja notes on it
    def asking(*args: Any, **kwargs: Any) -> Any:
        spent = BUDGET.get()
        spent.tick()
        if name in _COUNTING:
            check_numbers((*args[value + 1 :], *kwargs.values()))
        if name in _LISTING and isinstance(args[value], str):
            spent.fits(ITEM * len(args[value]))
        return spent.made(function(*args, **kwargs))

    return asking


class _Ask(NodeTransformer):
    """Sends through filters what Jinja compiles to bare Python: loops, ~ and slices."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through("in steps", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("join", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through("made", node) if isinstance(node.arg, nodes.Slice) else node


def _through(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """Templates of it run only within `budget()`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_finalize
        )
        kept = {name: filter for name, filter in self.filters.items() if name not in _DROPPED}
        self.filters = {name: _bounded(name, filter) for name, filter in {**kept, **_OWN}.items()}
        self.tests = {name: _bounded(name, test) for name, test in self.tests.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "range": _range,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        spent = BUDGET.get()
        spent.tick()
        before_operator(spent, operator, left, right)
        return spent.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # a keyword may be `self`
        spent, given = BUDGET.get(), list(args)
        spent.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | int):
            check_numbers((*args, *kwargs.values()))
        if isinstance(owner, str):
            before_method(spent, owner, getattr(__obj, "__name__", ""), given)
        if isinstance(__obj, LoopContext):
            given[:1] = map(_steps, given[:1])
        result = super().call(__context, __obj, *given, **kwargs)
        return result if isinstance(__obj, Macro) else spent.made(result)  # a macro's text has been joined by `concat`

    def concat(self, parts: Iterable[str]) -> str:
        """The text of a block or a macro."""
        texts, spent = list(parts), BUDGET.get()
        spent.fits(sum(map(len, texts)))
        return spent.made("".join(texts))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        withheld = attr in _WITHHELD and isinstance(obj, str | int | type)
        return not withheld and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text, takes_mapping = value.__self__, value.__name__ == "format_map"
        escape = text.escape if isinstance(text, Markup) else None
        formatter = _Bounded(self) if escape is None else _BoundedEscape(self, escape=escape)

        def fill(*args: Any, **kwargs: Any) -> str:
            if takes_mapping:
                (kwargs,), args = args, ()
            filled: str = type(text)(formatter.vformat(text, args, kwargs))
            return filled

        return fill

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Ask().visit(source), *args, **kwargs)


def _finalize(value: Any) -> Any:
    """Before it is written out."""
    BUDGET.get().unfold(value)
    return value


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks what a model said, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Refuses names with an underscore first, by which templates have left the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that namespace(self=...) is possible
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _range(*args: int) -> range:
    steps = safe_range(*args)
    BUDGET.get().step(len(steps))
    return steps


def _strftime_now(format: str) -> str:
    if len(format) > WIDEST:  # what widths add ends at 256 times its length
        raise TooMuch(f"it writes the time in a format of more than {WIDEST} characters")
    return datetime.now().strftime(format)
