"""What a model's files say about its text: the encoder, its special tokens, its ends, its chat template.

Only the record, and what the readers of GGUF files and of model directories share. Knows nothing of either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bifolio.protos.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    backend: Any  # a tokenizers.Tokenizer; its post-processor is not used
    prefix: tuple[int, ...]  # what every prompt begins with: the beginning-of-sequence token, or nothing
    eos_ids: tuple[int, ...]  # each of them ends an answer
    special_tokens: Mapping[str, str]  # under the names chat templates know: bos_token, eos_token, pad_token, ...
    chat_template: str | None  # Jinja; None for a model that was not made for chats

    def __post_init__(self) -> None:
        for name, text in {"chat_template": self.chat_template or "", **self.special_tokens}.items():
            try:
                text.encode()
            except UnicodeEncodeError as error:  # JSON can spell half a character, which no prompt can hold
                raise ConfigError(f"{name} of the tokenizer is no text ({error}); get its files again") from error
