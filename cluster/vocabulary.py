"""What a model's files say about its text: the encoder, its special tokens, its ends, its chat template.

Only the record, and what the readers of GGUF files and of model directories share. Knows nothing of either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Vocabulary:
    backend: Any  # a tokenizers.Tokenizer; its post-processor is not used
    prefix: tuple[int, ...]  # what every prompt begins with: the beginning-of-sequence token, or nothing
    eos_ids: tuple[int, ...]  # each of them ends an answer
    special_tokens: Mapping[str, str]  # under the names chat templates know: bos_token, eos_token, pad_token, ...
    chat_template: str | None  # Jinja; None for a model that was not made for chats
