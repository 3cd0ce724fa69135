"""The vocabulary of a Hugging Face model directory: tokenizer.json and the files beside it.

Knows their names and precedence, as transformers has them, and nothing of text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from bifolio.protos.errors import ConfigError
from bifolio.replicas.model_files import read_json

from .vocabulary import Vocabulary


def read_directory(path: Path) -> Vocabulary:
    try:
        backend: Any = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
    backend.no_truncation()  # both are settings of whoever saved the file
    backend.no_padding()
    settings = _read_json(path / "tokenizer_config.json")
    named = {**_read_json(path / "special_tokens_map.json"), **settings}
    special_tokens = {
        name: text for name, token in named.items() if name.endswith("_token") and (text := _text_of(token))
    }

    def id_of(name: str) -> int | None:
        token = special_tokens.get(name)
        return None if token is None else backend.token_to_id(token)

    bos = id_of("bos_token")
    match settings.get("add_bos_token"):
        case None:
            prefix = _written_first(json.loads(backend.to_str())["post_processor"], path)
            if lacking := [id for id in prefix if backend.id_to_token(id) is None]:
                raise ConfigError(f"{path / 'tokenizer.json'} begins prompts with tokens that it has not: {lacking}")
        case add_bos if not isinstance(add_bos, bool):
            raise ConfigError(f"{path}: add_bos_token is {add_bos!r}; allowed is true or false")
        case add_bos:
            if add_bos and bos is None:
                raise ConfigError(f"{path} asks for a beginning-of-sequence token (add_bos_token) but names none")
            prefix = [bos] if add_bos and bos is not None else []
    return Vocabulary(
        backend,
        prefix=tuple(prefix),
        eos_ids=_ends(path, id_of("eos_token")),
        special_tokens=special_tokens,
        chat_template=_chat_template(path, settings),
    )


def _ends(path: Path, of_text: int | None) -> tuple[int, ...]:
    """What transformers' generate obeys, and the tokenizer's own end beside it: a tuned model often names the end of a
    turn there alone."""
    said: Any = None
    for file in ("generation_config.json", "config.json"):
        said = _read_json(path / file).get("eos_token_id") if said is None else said
    listed = said if isinstance(said, list) else [] if said is None else [said]
    if not all(type(id) is int and id >= 0 for id in listed):
        raise ConfigError(f"{path}: eos_token_id is {said!r}; allowed is a token id, or a list of them")
    ends = [*listed, *([] if of_text is None else [of_text])]
    if not ends:
        raise ConfigError(f"{path} names no end-of-sequence token (eos_token_id in generation_config.json)")
    return tuple(dict.fromkeys(ends))


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    try:
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / 'chat_template.jinja'} cannot be read: {error}") from error
    template = settings.get("chat_template")
    if template is None:
        template = _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = [each.get("template") for each in template if isinstance(each, dict) and each.get("name") == "default"]
        template = named[-1] if named else None
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{path}: chat_template is {template!r}; allowed is a text, or a list of named ones")
    return template


def _written_first(processor: dict[str, Any] | None, path: Path) -> list[int]:
    """The ids a post-processor writes before the text. What it writes after it is left out: a prompt has no end."""
    match processor:
        case None | {"type": "ByteLevel"}:  # ByteLevel moves offsets only
            return []
        case {"type": "Sequence", "processors": list(steps)}:
            return [id for step in reversed(steps) for id in _written_first(step, path)]
        case {"type": "TemplateProcessing", "single": list(items), "special_tokens": dict(tokens)}:
            ids: list[int] = []
            for item in items:
                if "SpecialToken" not in item:
                    break
                ids += tokens[item["SpecialToken"]["id"]]["ids"]
            return ids
    raise ConfigError(
        f"{path / 'tokenizer.json'}: the post-processor {processor['type']} is not supported; "
        "supported: TemplateProcessing, ByteLevel"
    )


def _text_of(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    return read_json(path) if path.exists() else {}
