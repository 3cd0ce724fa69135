"""Prompts of a wanted length, cut from one text at places that are hashed from a name: equal names, equal prompts.

With a tokenizer a prompt has exactly the tokens that were asked for, as ids and as text. Passages begin and end between
words, where byte-level tokenizers cut anyway, so a prompt made of passages has the passages' tokens one after another.
Without a tokenizer pieces of words stand for tokens; their ids mean nothing to any model, and lengths are about right.
Knows nothing of requests and when they are sent.
"""

from __future__ import annotations

import gzip
import random
import re
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROSE = Path("shared/data/prompts/tinyshakespeare.txt.gz")  # inside the checkout, or beside it
# Of tinyshakespeare: 3.6 characters each, where SmolLM2's tokens have 3.7
_PIECE = re.compile(r" ?\w{1,5}| ?[^\w\s]+|\s")
_WORDS = (
    "about after again between both city could country different every family follow great hand house large learn "
    "letter light list might mountain night often paper people place river second sentence song story study thought "
    "together under until watch water while without world write year"
)


class InputError(ValueError):
    """What was asked for cannot be done: says what, what is allowed, and what to do."""


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    ids: tuple[int, ...]

    def __add__(self, other: Prompt) -> Prompt:
        return Prompt(self.text + other.text, self.ids + other.ids)


EMPTY = Prompt("", ())
FEWEST = 200  # words of a text
OPENING = 8  # tokens of a prompt that are of another place in the text than those after them


class Book:
    """One text and how it falls into tokens."""

    def __init__(self, text: str, tokenizer: Any = None) -> None:
        """`tokenizer` is one of the library `tokenizers`."""
        self._tokenizer = tokenizer
        self._pieces: dict[str, int] = {}
        self.text = " " + " ".join(text.split())
        ids, begins, self._ends = self._cut(self.text)
        self._ids = tuple(ids)
        # Where words begin: token -> character of the space before it. The end of the text is such a place, too
        self._words: dict[int, int] = {}
        last = -1
        for i, begin in enumerate(begins):
            place = begin if self.text[begin] == " " else begin - 1  # some tokenizers leave the space out
            if self.text[place] == " " and place != last:  # a space may be a token of its own
                self._words[i] = last = place
        self._words[len(self._ids)] = len(self.text)
        self._firsts = array("I", [i for i in self._words if i < len(self._ids)])
        if len(self._firsts) < FEWEST:
            raise InputError(f"the text has {len(self._firsts)} words; at least {FEWEST} are needed, take another one")

    @property
    def exact(self) -> bool:
        return self._tokenizer is not None

    def prompt(self, name: str, tokens: int, keep: int | None = None) -> Prompt:
        """The name's `tokens` tokens, of which the first `keep` are kept; then it may end within a word.

        Two passages: there are fewer places in a text than names, and two names must not have one block of a cache.
        """
        few = min(OPENING, tokens // 2)
        kept = tokens if keep is None else min(keep, tokens)
        return self.passage(f"{name} begins", few, kept) + self.passage(name, tokens - few, kept - few)

    def passage(self, name: str, tokens: int, keep: int | None = None) -> Prompt:
        """One piece of the text, or several where it is shorter than `tokens`."""
        most = len(self._ids) // 2
        kept = tokens if keep is None else min(keep, tokens)
        if kept <= 0:
            return EMPTY
        if tokens > most:
            return self.passage(f"{name}+", most, kept) + self.passage(f"{name}-", tokens - most, kept - most)
        place = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % len(self._firsts)
        for step in range(len(self._firsts)):
            begin = self._firsts[(place + step) % len(self._firsts)]
            if (end := self._words.get(begin + tokens)) is not None:
                if kept < tokens:
                    end = self._ends[begin + kept - 1]
                return Prompt(self.text[self._words[begin] : end], self._ids[begin : begin + kept])
        raise InputError(f"the text has no {tokens} tokens between the beginnings of two words; take another text")

    def read(self, text: str) -> Prompt:
        """A text that is given."""
        return Prompt(text, tuple(self._cut(text)[0]))

    def ends(self, text: str) -> array[int]:
        """Where each token ends, in characters."""
        return self._cut(text)[2]

    def _cut(self, text: str) -> tuple[list[int], array[int], array[int]]:
        """Tokens, and where each begins and ends."""
        if self._tokenizer is not None:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            begins, ends = ([offsets[side] for offsets in encoding.offsets] for side in (0, 1))
            return encoding.ids, array("I", begins), array("I", ends)
        found = list(_PIECE.finditer(text))
        ids = [self._pieces.setdefault(piece.group(), len(self._pieces)) for piece in found]
        return ids, array("I", [piece.start() for piece in found]), array("I", [piece.end() for piece in found])


def open_book(text: Path | None, tokenizer: Path | None) -> tuple[Book, str]:
    """A book and what it is made of, in words."""
    if text is None:
        text = next((path for path in (ROOT / PROSE, ROOT.parent / PROSE) if path.exists()), None)
    content = _random_prose() if text is None else read_text(text)
    named = "words at random (no --text)" if text is None else text.name
    if tokenizer is None:
        return Book(content), f"text from {named}, its tokens estimated (no --tokenizer)"
    return Book(content, read_tokenizer(tokenizer)), f"text from {named}, tokens of {tokenizer}"


def read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text, gzipped or not: {error}") from error


def read_tokenizer(path: Path) -> Any:
    """A tokenizer.json, a directory with one, or a .gguf file."""
    if path.suffix == ".gguf":
        from bifolio.cluster.gguf_tokenizer import read_gguf

        return read_gguf(path).backend
    import tokenizers

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(f"{file} cannot be read: {error}; allowed: a tokenizer.json or a .gguf file") from error
    tokenizer.no_truncation()  # both are settings of whoever saved the file
    tokenizer.no_padding()
    return tokenizer


def _random_prose() -> str:
    return " ".join(random.Random(0).choices(_WORDS.split(), k=200_000))
