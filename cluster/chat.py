"""A conversation put into words by the model's own chat template, as transformers does it.

The template comes with the model and is run in Jinja's immutable sandbox; what a user says is data to it and is
never evaluated. Ranges are limited by the sandbox (100,000 each), and a text by `MOST_CHARACTERS` while it grows,
so what a template adds to a request has a bound. One expression or empty loops within loops have none: a template
is trusted as far as that. Knows nothing of tokens, nor of the doors a chat comes in by.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from bifolio.protos.errors import ConfigError, InvalidRequest

MOST_CHARACTERS = 1 << 26
_LONGEST_COMPLAINT = 500
_OURS = {"messages", "add_generation_prompt", "continue_final_message"}
_CUT = "CONTINUE_FINAL_MESSAGE_TAG "  # the last space tells whether the template trims a message's end
_REASONING = ("reasoning_content", "thinking", "reasoning")  # the first is what templates read


@dataclass(frozen=True, slots=True)
class Chat:
    messages: tuple[Mapping[str, Any], ...]  # each with role and content, perhaps more that the template knows
    continue_final_message: bool = False  # go on within the last message instead of answering it
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # more variables for the template


class ChatTemplate:
    """Renders from any thread. `special_tokens` are `Tokenizer.special_tokens`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._knows_content = "content" in source
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the model's chat template has a mistake in line {error.lineno}: {error.message}; mend it or remove it"
            ) from error
        except Exception as error:  # constants are computed while it is compiled
            raise ConfigError(f"the model's chat template cannot be used: {error}; mend it or remove it") from error

    def render(self, chat: Chat) -> str:
        """The text to encode without further special tokens. InvalidRequest if the template does not take the chat."""
        if not chat.messages:
            raise InvalidRequest("messages is empty; at least one message is needed", "messages")
        if reserved := _OURS & chat.template_kwargs.keys():
            raise InvalidRequest(
                f"chat_template_kwargs names {', '.join(sorted(reserved))}, which the request itself says; "
                "allowed: other variables of the chat template",
                "chat_template_kwargs",
            )
        try:
            messages, further = [_message(message) for message in chat.messages], _plain(chat.template_kwargs)
        except RecursionError:
            raise InvalidRequest("messages or chat_template_kwargs are nested too deep", "messages") from None
        last = _mark_end(messages[-1], self._knows_content) if chat.continue_final_message else ""
        # As in transformers a user's variables come over the special tokens, which the user may write anyway
        text = self._run(
            {
                **self._special_tokens,
                "tools": None,
                "documents": None,
                **further,
                "messages": messages,
                "add_generation_prompt": not chat.continue_final_message,
            }
        )
        return _cut(text, last) if chat.continue_final_message else text

    def _run(self, variables: dict[str, Any]) -> str:
        parts, length = [], 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                length += len(part)
                if length > MOST_CHARACTERS:
                    raise jinja2.TemplateError(f"the text is longer than {MOST_CHARACTERS} characters")
        except Exception as error:  # a template may fail in any way a program can: it is what was asked that it minds
            complaint = str(error) or type(error).__name__
            raise InvalidRequest(
                f"the model's chat template does not take these messages: {complaint[:_LONGEST_COMPLAINT]}", "messages"
            ) from None
        return "".join(parts)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None, which templates would write out; and reasoning under the names templates read."""
    plain = {key: _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy in JSON's own types: a template could call the methods of anything else."""
    match value:
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
    raise AssertionError(f"a chat holds a {type(value).__name__}, which is no JSON")


def _mark_end(message: dict[str, Any], template_knows: bool) -> str:
    """Appends the mark to the message's text, in place; the text as it was."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [message]
    key = "text" if isinstance(content, list) else "content"
    part = next((part for part in reversed(parts) if isinstance(part, dict) and isinstance(part.get(key), str)), None)
    if part is None or not template_knows:
        raise InvalidRequest(
            "continue_final_message is set, but the last message has no content to continue; give it some text",
            "messages",
        )
    text: str = part[key]
    part[key] = text + _CUT
    return text


def _cut(text: str, last: str) -> str:
    at = text.rfind(_CUT.strip())
    if at < 0 or last.strip() not in text:
        raise InvalidRequest(
            "continue_final_message is set, but the model's chat template leaves out or changes the last message's "
            "text; let the model answer it instead",
            "messages",
        )
    return text[:at] if text.startswith(_CUT, at) else text[:at].rstrip()


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks what a model said, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return caller()


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


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without HTML escapes, unlike Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


_ENVIRONMENT = _environment()
