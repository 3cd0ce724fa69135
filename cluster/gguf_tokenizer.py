"""The vocabulary in a GGUF's metadata: byte-level BPE ("gpt2") and SentencePiece BPE with byte fallback ("llama").

Builds what the model's own tokenizer.json would be. The names and defaults are llama.cpp's (src/llama-vocab.cpp),
because it is llama.cpp's converter that writes these files. Knows nothing of text once it is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from bifolio.protos.errors import ConfigError
from bifolio.replicas.gguf_file import GgufFile

from .vocabulary import Vocabulary

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # GGUF's token types that are matched in text before BPE

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

# `tokenizer.ggml.pre` -> the patterns that cut a text before BPE, each what the one before left
_CUTS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
        r"\p{N}",
    ),
    "tekken": (_TEKKEN,),
}
# A piece of text that is a token is that token, whatever the merges say; and prompts begin with BOS by default
_WHOLE_TOKENS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}
_COMPOSED = {"qwen2", "deepseek-r1-qwen"}  # text is brought to NFC first, which llama.cpp itself leaves out

# Merges that are looked for grow with the square of a token's length; real vocabularies have some two for each token
_LONGEST = 256
_MOST_MERGES = (10_000, 8)  # of a vocabulary, and for each token besides
_ENDS = ("eos", "eot", "eom")  # of a text, a turn, a message: an answer is over at each
_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # in GGUF -> in templates


def read_gguf(path: Path) -> Vocabulary:
    metadata = GgufFile(path)
    _known(metadata, "general.architecture", ["llama", "qwen2", "qwen3"])
    kind = _known(metadata, "tokenizer.ggml.model", ["gpt2", "llama"])
    try:
        tokens: list[str] = _list(metadata, "tokenizer.ggml.tokens", str)
        types = _for_each(tokens, metadata, "tokenizer.ggml.token_type", int)
        metadata["tokenizer.ggml.eos_token_id"]
        ids = _named(metadata, tokens)
        backend, begins = (_byte_level if kind == "gpt2" else _sentencepiece)(metadata, tokens)
    except KeyError as error:
        raise ConfigError(f"{path} has no {error.args[0]} in its metadata; needed to tokenize") from error
    ends = [ids[name] for name in _ENDS if name in ids]
    special = {id for id, type in enumerate(types) if type in (_UNKNOWN, _CONTROL)} | {*ends, ids.get("bos", ends[0])}
    backend.add_tokens(
        [
            AddedToken(token, special=id in special, normalized=False)
            for id, (token, type) in enumerate(zip(tokens, types, strict=True))
            if id in special or type == _USER_DEFINED
        ]
    )
    add_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", None)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{path}: tokenizer.chat_template is {template!r}; allowed is a text")
    if add_bos and "bos" not in ids:
        raise ConfigError(f"{path} asks for a beginning-of-sequence token (add_bos_token) but names none")
    return Vocabulary(
        backend,
        prefix=(ids["bos"],) if (begins if add_bos is None else add_bos) and "bos" in ids else (),
        eos_ids=tuple(ends),
        special_tokens={f"{theirs}_token": tokens[ids[ours]] for ours, theirs in _NAMES.items() if ours in ids},
        chat_template=template,
    )


def _known(metadata: GgufFile, key: str, allowed: Iterable[str]) -> str:
    value, allowed = metadata.get(key), sorted(allowed)
    if value not in allowed:
        raise ConfigError(f"{metadata.path}: {key} is {value!r}; supported: {', '.join(allowed)}")
    return str(value)


def _named(metadata: GgufFile, tokens: list[str]) -> dict[str, int]:
    """The tokens with a task of their own: GGUF's name -> id."""
    ids = {name: metadata[key] for name in (*_NAMES, *_ENDS) if (key := f"tokenizer.ggml.{name}_token_id") in metadata}
    if beyond := {name: id for name, id in ids.items() if type(id) is not int or not 0 <= id < len(tokens)}:
        raise ConfigError(
            f"{metadata.path} names tokens that it has not: {beyond} of {len(tokens)}; get the file again"
        )
    return ids


def _flag(metadata: GgufFile, key: str, otherwise: bool | None) -> bool | None:
    value = metadata.get(key, otherwise)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{metadata.path}: {key} is {value!r}; allowed is true or false")
    return value


def _list(metadata: GgufFile, key: str, of: type) -> list[Any]:
    values = metadata[key]
    if not isinstance(values, list) or not all(type(each) is of for each in values):
        raise ConfigError(f"{metadata.path}: {key} is no list of {of.__name__}; get the file again")
    return values


def _for_each(tokens: list[str], metadata: GgufFile, key: str, of: type) -> list[Any]:
    values = _list(metadata, key, of)
    if len(values) != len(tokens):
        raise ConfigError(f"{metadata.path}: {key} has {len(values)} entries for {len(tokens)} tokens; get it again")
    return values


def _byte_level(metadata: GgufFile, tokens: list[str]) -> tuple[Any, bool]:
    """(the encoder, whether a prompt begins with BOS unless the file says otherwise)."""
    pre = _known(metadata, "tokenizer.ggml.pre", _CUTS)
    merges = _merges(metadata)
    backend = _build(metadata.path, lambda: models.BPE(_vocab(tokens), merges, ignore_merges=pre in _WHOLE_TOKENS))
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _CUTS[pre]]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _WHOLE_TOKENS


def _sentencepiece(metadata: GgufFile, tokens: list[str]) -> tuple[Any, bool]:
    """As Llama 2's tokenizer.json: a space before every stretch of text, also those after special tokens."""
    prefix_space = _flag(metadata, "tokenizer.ggml.add_space_prefix", True)
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata)
    else:
        scores = _for_each(tokens, metadata, "tokenizer.ggml.scores", float)
        if longest := max((token for token in tokens if len(token) > _LONGEST), key=len, default=None):
            raise ConfigError(
                f"{metadata.path}: a token of {len(longest)} characters; allowed without merges are {_LONGEST}"
            )
        merges = merges_by_score(tokens, scores)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = _build(
        metadata.path,
        lambda: models.BPE(_vocab(tokens), merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True),
    )
    spaces = [normalizers.Prepend("▁")] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strips = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strips])
    return backend, True


def merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's BPE performs: any two tokens that make a token, the best score first.

    The same order as transformers' `generate_merges`, also among equal scores. ValueError where they are countless.
    """
    ids = _vocab(tokens)
    found = []
    for token, score in {token: scores[id] for token, id in ids.items()}.items():
        splits = ((ids.get(token[:cut]), ids.get(token[cut:])) for cut in range(1, len(token)))
        pairs = sorted((left, right) for left, right in splits if left is not None and right is not None)
        found += [(score, tokens[left], tokens[right]) for left, right in pairs]
        if len(found) > _MOST_MERGES[0] + _MOST_MERGES[1] * len(tokens):
            raise ValueError(f"{len(tokens)} tokens with more than {len(found) - 1} merges")
    found.sort(key=lambda each: (each[0], len(each[1]), len(each[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _merges(metadata: GgufFile) -> list[Any]:
    merges = _list(metadata, "tokenizer.ggml.merges", str)
    return [tuple(merge.split(" ")) for merge in merges]  # pairs, or `_build` refuses


def _vocab(tokens: list[str]) -> dict[str, int]:
    return {token: id for id, token in enumerate(tokens)}


def _build(path: Path, model: Callable[[], Any]) -> Any:
    try:
        return tokenizers.Tokenizer(model())
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{path}: its vocabulary makes no tokenizer ({error}); get the file again") from error
