"""Text to token ids and back.

Decoding here is concatenation: every token stands for fixed bytes (`piece`), and a text is the UTF-8 reading
of the pieces in order. It is what lets `Detokenizer` stream without decoding anything twice. What is not UTF-8
reads as U+FFFD, one for each ill-formed sequence (Unicode's "maximal subpart"). That is the text of the
`tokenizers` decoder to the last character, with one exception: in a vocabulary with byte fallback it turns
every byte of a run of byte tokens into U+FFFD when a single one is wrong, also complete characters that were
right. To equal that, a stream would have to hold back each run to its end: all of a Korean text.

Knows nothing of models, nor of the files this is read from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from bifolio.replicas.model_files import refusing_nonsense

from .gguf_tokenizer import read_gguf
from .hf_tokenizer import read_directory
from .token_text import text_rule
from .vocabulary import Vocabulary


class Tokenizer:
    def __init__(self, vocabulary: Vocabulary) -> None:
        backend = self._backend = vocabulary.backend
        self._prefix = list(vocabulary.prefix)
        self._piece_of, self.strips_space = text_rule(json.loads(backend.to_str())["decoder"])
        self._pieces: dict[int, bytes] = {}
        self.eos_ids = tuple(sorted(set(vocabulary.eos_ids)))
        self.special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens = dict(vocabulary.special_tokens)
        self.chat_template = vocabulary.chat_template

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """From a .gguf file or a Hugging Face model directory. Raises ConfigError, whatever is wrong with them."""
        path = Path(path)
        with refusing_nonsense(path):
            return cls(read_directory(path) if path.is_dir() else read_gguf(path))

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Special tokens written in the text are recognised, as in transformers.

        `special_tokens` False adds none at the beginning: a chat template has written them itself.
        """
        # A batch of one: unlike `encode` it lets other threads run, and a long text takes seconds
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return self._prefix + ids if special_tokens else ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens have none."""
        text = b"".join(map(self.piece, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_space else text

    def piece(self, id: int) -> bytes:
        """The bytes one token adds to a text: none for special tokens and for ids outside the vocabulary."""
        piece = self._pieces.get(id)
        if piece is None:
            token = None if id in self.special_ids else self._backend.id_to_token(id)
            piece = self._pieces[id] = b"" if token is None else self._piece_of(token)
        return piece

    def special_name(self, id: int) -> str | None:
        """How a special token is written, which has no text; None for other tokens."""
        name: str | None = self._backend.id_to_token(id) if id in self.special_ids else None
        return name
