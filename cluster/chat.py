"""A conversation put into words by the model's own chat template, as transformers does it.

The template comes with the model and is run in a sandbox that bounds what one render takes, of time and of memory;
what a user says is data to it and is never evaluated. Knows nothing of tokens, nor of the doors a chat comes in by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2

from bifolio.protos.errors import ConfigError, InvalidRequest

from .template_budget import MOST_CHARACTERS, TooMuch, budget
from .template_sandbox import Sandbox

_SANDBOX = Sandbox()
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
            self._template = _SANDBOX.from_string(source)
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
            with budget():
                for part in self._template.generate(variables):
                    parts.append(part)
                    length += len(part)
                    if length > MOST_CHARACTERS:
                        raise TooMuch(f"the text is longer than {MOST_CHARACTERS} characters")
            return "".join(parts)
        except Exception as error:  # a template may fail in any way a program can: it is what was asked that it minds
            complaint = str(error) or type(error).__name__
            raise InvalidRequest(
                f"the model's chat template does not take these messages: {complaint[:_LONGEST_COMPLAINT]}", "messages"
            ) from None


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
