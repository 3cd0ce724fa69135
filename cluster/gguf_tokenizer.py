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

_ENDS = ("eos", "eot", "eom")  # of a text, a turn, a message: an answer is over at each
_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # in GGUF -> in templates


def read_gguf(path: Path) -> Vocabulary:
    metadata = GgufFile(path)
    _known(metadata, "general.architecture", ["llama", "qwen2", "qwen3"])
    kind = _known(metadata, "tokenizer.ggml.model", ["gpt2", "llama"])
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        types = _for_each(tokens, metadata, "tokenizer.ggml.token_type")
        metadata["tokenizer.ggml.eos_token_id"]
        backend, begins = (_byte_level if kind == "gpt2" else _sentencepiece)(metadata, tokens)
    except KeyError as error:
        raise ConfigError(f"{path} has no {error.args[0]} in its metadata; needed to tokenize") from error
    ids = {name: metadata[key] for name in (*_NAMES, *_ENDS) if (key := f"tokenizer.ggml.{name}_token_id") in metadata}
    if beyond := {name: id for name, id in ids.items() if not 0 <= id < len(tokens)}:
        raise ConfigError(f"{path} names tokens that it has not: {beyond} of {len(tokens)}; get the file again")
    ends = [ids[name] for name in _ENDS if name in ids]
    special = {id for id, type in enumerate(types) if type in (_UNKNOWN, _CONTROL)} | {*ends, ids.get("bos", ends[0])}
    backend.add_tokens(
        [
            AddedToken(token, special=id in special, normalized=False)
            for id, (token, type) in enumerate(zip(tokens, types, strict=True))
            if id in special or type == _USER_DEFINED
        ]
    )
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos and "bos" not in ids:
        raise ConfigError(f"{path} asks for a beginning-of-sequence token (add_bos_token) but names none")
    return Vocabulary(
        backend,
        prefix=(ids["bos"],) if (begins if add_bos is None else add_bos) and "bos" in ids else (),
        eos_ids=tuple(ends),
        special_tokens={f"{theirs}_token": tokens[ids[ours]] for ours, theirs in _NAMES.items() if ours in ids},
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _known(metadata: GgufFile, key: str, allowed: Iterable[str]) -> str:
    value, allowed = metadata.get(key), sorted(allowed)
    if value not in allowed:
        raise ConfigError(f"{metadata.path}: {key} is {value!r}; supported: {', '.join(allowed)}")
    return str(value)


def _for_each(tokens: list[str], metadata: GgufFile, key: str) -> list[Any]:
    values: list[Any] = metadata[key]
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
    prefix_space: bool = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata)
    else:
        merges = merges_by_score(tokens, _for_each(tokens, metadata, "tokenizer.ggml.scores"))
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

    The same order as transformers' `generate_merges`, also among equal scores.
    """
    ids = _vocab(tokens)
    found = []
    for token, score in {token: scores[id] for token, id in ids.items()}.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in ids and right in ids]
        found += [(score, *pair) for pair in sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    found.sort(key=lambda each: (each[0], len(each[1]), len(each[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _merges(metadata: GgufFile) -> list[Any]:
    return [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]  # pairs, or `_build` refuses


def _vocab(tokens: list[str]) -> dict[str, int]:
    return {token: id for id, token in enumerate(tokens)}


def _build(path: Path, model: Callable[[], Any]) -> Any:
    try:
        return tokenizers.Tokenizer(model())
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{path}: its vocabulary makes no tokenizer ({error}); get the file again") from error
