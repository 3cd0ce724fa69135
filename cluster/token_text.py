"""The bytes a token stands for, by a tokenizer's decoder.

Knows the decoders of `tokenizers` by their JSON, and nothing of models or vocabularies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from bifolio.protos.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def text_rule(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """How a decoder makes text: token -> bytes, and whether one leading space of the whole text goes.

    A decoder that looks at neighbouring tokens in another way is refused: its text could not be streamed.
    """
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return byte_level_piece, False
    spelled: dict[str, str] = {}  # such as "▁" -> " "
    fallback = strips = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(old) == 1:
                spelled[old] = new
            case {"type": "ByteFallback"}:
                fallback = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strips = True
            case {"type": "Fuse"}:
                pass
            case _:
                spelled.clear()
                break
    if not spelled:
        raise ConfigError(
            f"tokenizer.json: the decoder {json.dumps(decoder)} cannot be streamed exactly; supported: "
            "ByteLevel, or Replace of one character with ByteFallback, Fuse and Strip of one leading space"
        )
    table = str.maketrans(spelled)

    def piece(token: str) -> bytes:
        if fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.translate(table).encode()

    return piece, strips


def byte_level_piece(token: str) -> bytes:
    """Each character of a byte-level token names a byte; a token with other characters stands for itself."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 bytes stand for themselves, the others for the code points from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
