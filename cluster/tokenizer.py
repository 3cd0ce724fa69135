"""Text to token ids and back, from a GGUF's metadata or a `tokenizer.json`.

Decoding here is concatenation: every token stands for fixed bytes (`piece`), and a text is the UTF-8 reading
of the pieces in order, U+FFFD for what is not UTF-8. It is what lets `Detokenizer` stream without decoding
anything twice. The text is the `tokenizers` decoder's, for byte-level BPE to the last character; in a
SentencePiece vocabulary with byte fallback, bytes that are no character give one U+FFFD a run here and one a
byte there. A `tokenizer.json` whose decoder looks at neighbouring tokens in another way is refused. Knows
nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from bifolio.protos.errors import ConfigError
from bifolio.replicas.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types that are matched in text before BPE


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# `tokenizer.ggml.pre` -> how text is cut before BPE
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _byte_level,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
}


class Tokenizer:
    def __init__(
        self, backend: Any, *, eos_ids: Iterable[int], bos_id: int | None = None, add_bos: bool | None = None
    ) -> None:
        """`add_bos` None leaves it to the backend's post-processor; else it decides, as in transformers."""
        if add_bos and bos_id is None:
            raise ConfigError("the model asks for a beginning-of-sequence token (add_bos) but names none")
        self._backend = backend
        self._prefix = [bos_id] if add_bos and bos_id is not None else []
        self._post_process = add_bos is None
        self._piece_of, self.strips_space = _text_rule(json.loads(backend.to_str())["decoder"])
        self._pieces: dict[int, bytes] = {}
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """From a .gguf file or a Hugging Face model directory."""
        path = Path(path)
        return _from_directory(path) if path.is_dir() else _from_gguf(path)

    def encode(self, text: str) -> list[int]:
        """Special tokens written in the text are recognised, as in transformers."""
        # A batch of one: unlike `encode` it lets other threads run, and a long text takes seconds
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=self._post_process)
        ids: list[int] = encoding.ids
        return self._prefix + ids

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


def _from_gguf(path: Path) -> Tokenizer:
    metadata = GgufFile(path)

    def known(key: str, allowed: Iterable[str]) -> str:
        value, allowed = metadata.get(key), sorted(allowed)
        if value not in allowed:
            raise ConfigError(f"{path}: {key} is {value!r}; supported: {', '.join(allowed)}")
        return str(value)

    known("general.architecture", ["llama"])
    known("tokenizer.ggml.model", ["gpt2"])
    pre = known("tokenizer.ggml.pre", _PRE_TOKENIZERS)
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        types: list[int] = metadata["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        eos = metadata["tokenizer.ggml.eos_token_id"]
    except KeyError as error:
        raise ConfigError(f"{path} has no {error.args[0]} in its metadata; needed to tokenize") from error

    backend: Any = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    added = {_CONTROL: True, _USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(token, special=added[kind], normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in added
        ]
    )
    ends = [eos, *(metadata[key] for key in ("tokenizer.ggml.eot_token_id",) if key in metadata)]
    return Tokenizer(
        backend,
        eos_ids=ends,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    )


def _from_directory(path: Path) -> Tokenizer:
    try:
        backend: Any = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
    settings = _read_json(path / "tokenizer_config.json")

    def id_of(name: str) -> int | None:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        return backend.token_to_id(text) if isinstance(text, str) else None

    # generation_config.json is what transformers' generate obeys; the others are where older models keep it
    ends: Any = None
    for file in ("generation_config.json", "config.json"):
        ends = _read_json(path / file).get("eos_token_id") if ends is None else ends
    if ends is None and (ends := id_of("eos_token")) is None:
        raise ConfigError(f"{path} names no end-of-sequence token (eos_token_id in generation_config.json)")
    return Tokenizer(
        backend,
        eos_ids=ends if isinstance(ends, list) else [ends],
        bos_id=id_of("bos_token"),
        add_bos=settings.get("add_bos_token"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}; an object is needed")
    return content


def _text_rule(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """How a decoder of `tokenizer.json` makes text: token -> bytes, and whether one leading space goes."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level_piece, False
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
        if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.translate(table).encode()

    return piece, strips


def _byte_level_piece(token: str) -> bytes:
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
