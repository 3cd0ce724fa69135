"""Streams the text of tokens as they come: complete characters only, and nothing of a stop string.

The pieces handed out, joined, are exactly the tokenizer's text of all tokens (cut before the first stop
string), however the tokens were grouped into pushes. Cost per token does not depend on what came before.
`Tokenizer` says what that text is where tokens are no UTF-8.

An answer may be asked to have at least so many tokens. A stop string then counts only if the token that
completes it is number `least` or a later one, counted from 1. It may begin before: its beginning is held back
as ever. Occurrences that are complete earlier are text, and one that overlaps such an occurrence counts.

Knows nothing of requests or of why a sequence ends otherwise.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from .tokenizer import Tokenizer


class Detokenizer:
    """
    detokenizer = Detokenizer(tokenizer, stops=["\\nUser:"])
    for tokens in stream:
        send(detokenizer.push(tokens))
        if detokenizer.stopped:
            break
    send(detokenizer.finish())
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), least: int = 0) -> None:
        self._tokenizer = tokenizer
        # Holds back the bytes of a character until it is complete or can no longer become one (then U+FFFD)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_StopString(stop) for stop in stops]
        self._least = least
        self._strip = tokenizer.strips_space
        self._held = ""  # the end of the text so far that may be the start of a stop string
        self.stopped = False
        self.tokens = 0  # taken so far, up to and including the one that completed a stop string

    def push(self, token_ids: Iterable[int]) -> str:
        """What may be sent now. Tokens after the one that completes a stop string are not taken."""
        ready = []
        for id in token_ids:
            if self.stopped:
                break
            self.tokens += 1
            text = self._characters.decode(self._tokenizer.piece(id))
            if text and self._strip:
                text, self._strip = text.removeprefix(" "), False
            ready.append(self._take(text))
        return "".join(ready)

    def finish(self) -> str:
        """The rest, when no more tokens come: a cut-off character as one U+FFFD, and what was held back."""
        if self.stopped:
            return ""
        ready = self._take(self._characters.decode(b"", final=True))
        rest, self._held = self._held, ""
        return ready + rest

    def _take(self, text: str) -> str:
        """Adds text, returns what can no longer be part of a stop string.

        The stop string that is complete first ends the answer, the longest of those complete at the same
        character: a rule that does not depend on how the text is cut into pushes.
        """
        if not self._stops:
            return text
        seen, text = len(self._held), self._held + text
        for end, character in enumerate(text[seen:], start=seen + 1):
            found = max(stop.feed(character) for stop in self._stops)
            if found and self.tokens >= self._least:
                self.stopped, self._held = True, ""
                return text[: end - found]
        keep = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]


class _StopString:
    """Knuth-Morris-Pratt: `matched` is the longest beginning of the stop string that the text ends with, short
    of all of it."""

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string would stop everything; requests with one are refused"
        self._stop = stop
        self.matched = 0
        # _back[i]: the next shorter match to try after i matched characters
        self._back = [0] * (len(stop) + 1)
        for i in range(1, len(stop)):
            self._back[i + 1] = self._advance(self._back[i], stop[i])

    def feed(self, character: str) -> int:
        """The stop string's length if this character completes it, else 0."""
        self.matched = self._advance(self.matched, character)
        if self.matched < len(self._stop):
            return 0
        self.matched = self._back[self.matched]
        return len(self._stop)

    def _advance(self, matched: int, character: str) -> int:
        while matched and self._stop[matched] != character:
            matched = self._back[matched]
        return matched + 1 if self._stop[matched] == character else 0
