"""A GGUF's vocabulary gives the ids that transformers gives, or is refused with what is supported."""

from __future__ import annotations

import unicodedata
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import generate_merges
from vocab_kit import CONTROL, NORMAL, SCRIPTS, USER_DEFINED, byte_level, corpus, sentencepiece, write_gguf

from bifolio.cluster.gguf_tokenizer import _CUTS, merges_by_score
from bifolio.cluster.tokenizer import Tokenizer
from bifolio.protos.errors import ConfigError

COMPOSED = partial(unicodedata.normalize, "NFC")
# name -> architecture, `pre`, vocabulary
KINDS: dict[str, tuple[str, str | None, Any]] = {
    "gpt-2": ("llama", "gpt-2", byte_level),
    "llama-bpe": ("llama", "llama-bpe", byte_level),
    "tekken": ("llama", "tekken", byte_level),
    "qwen2": ("qwen2", "qwen2", byte_level),
    "qwen3": ("qwen3", "qwen2", byte_level),
    "sentencepiece": ("llama", None, sentencepiece),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    """Of each kind our tokenizer, and transformers' from the same file."""
    folder = tmp_path_factory.mktemp("gguf")
    for name, (architecture, pre, vocabulary) in KINDS.items():
        own = {"general.architecture": architecture} | ({"pre": pre} if pre else {})
        write_gguf(folder / f"{name}.gguf", own | vocabulary())
    return {
        name: (
            Tokenizer.load(folder / f"{name}.gguf"),
            AutoTokenizer.from_pretrained(folder, gguf_file=f"{name}.gguf"),
        )
        for name in KINDS
    }


def theirs_of(name: str, theirs: Any, text: str) -> list[int]:
    # transformers leaves out Qwen's NFC when it reads a GGUF; from Qwen's own directory it does not
    ids: list[int] = theirs.encode(COMPOSED(text) if name.startswith("qwen") else text)
    return ids


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_transformers(pairs: dict[str, tuple[Tokenizer, Any]], name: str) -> None:
    ours, theirs = pairs[name]
    for text in corpus() + SCRIPTS:
        assert ours.encode(text) == theirs_of(name, theirs, text)
    assert ours.special_tokens == theirs.special_tokens_map


@pytest.mark.parametrize("name", KINDS)
@given(text=st.one_of(st.text(max_size=40), st.text("aZé한 \n\t1'sLlтД\u0301", max_size=40)))
@settings(max_examples=100, deadline=None)
def test_every_text_has_the_ids_of_transformers_and_comes_back(
    pairs: dict[str, tuple[Tokenizer, Any]], name: str, text: str
) -> None:
    ours, theirs = pairs[name]
    ids = ours.encode(text)
    if name != "sentencepiece" or not text.startswith((" ", "▁")):  # a space more here, see below
        assert ids == theirs_of(name, theirs, text)
    expected = COMPOSED(text) if name.startswith("qwen") else text
    assert ours.decode(ids) == (expected.replace("▁", " ") if name == "sentencepiece" else expected)


@pytest.mark.parametrize("name", sorted(set(KINDS) - {"sentencepiece"}))
def test_marked_tokens_are_whole_and_only_control_tokens_have_no_text(
    pairs: dict[str, tuple[Tokenizer, Any]], name: str
) -> None:
    ours, theirs = pairs[name]
    text = "<|begin|>A<tool> b<|end|><|turn|>"
    ids = ours.encode(text, special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == "A<tool> b"
    assert len(ours.eos_ids) == 2  # of the text and of the turn
    assert (ours.special_tokens["bos_token"], ours.special_tokens["eos_token"]) == ("<|begin|>", "<|end|>")


def test_sentencepiece_puts_a_space_before_each_stretch_of_text(pairs: dict[str, tuple[Tokenizer, Any]]) -> None:
    """As SentencePiece, llama.cpp and Llama 2's tokenizer.json; transformers' reader of GGUF files does it once."""
    ours, _ = pairs["sentencepiece"]
    word, space = (ours.encode(text, special_tokens=False) for text in ("the", ""))
    assert space == []
    assert ours.encode("the</s>the<s>") == [1, *word, 2, *word, 1]
    assert ours._backend.encode(" the", add_special_tokens=False).tokens[0].startswith("▁")
    assert ours.decode(ours.encode(" the")) == " the"


def test_sentencepiece_without_the_space(tmp_path: Path) -> None:
    pairs = sentencepiece() | {"add_space_prefix": False, "add_bos_token": False}
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", pairs))
    spaced = Tokenizer.load(write_gguf(tmp_path / "n.gguf", sentencepiece()))
    assert tokenizer.encode(" the cat") == spaced.encode("the cat")[1:]
    for text in SCRIPTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_are_found_in_the_order_of_transformers() -> None:
    vocabulary = sentencepiece()
    tokens, scores = vocabulary["tokens"], vocabulary["scores"]
    for given_scores in (scores, [-float(i // 7) for i in range(len(tokens))]):  # also among equals
        expected = generate_merges({t: i for i, t in enumerate(tokens)}, dict(zip(tokens, given_scores, strict=True)))
        assert merges_by_score(tokens, given_scores) == expected


def test_the_patterns_are_those_of_transformers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as THEIRS

    for pre in set(_CUTS) & set(THEIRS):
        assert _CUTS[pre] == (THEIRS[pre],), pre
    assert set(_CUTS) - set(THEIRS) == {
        "default", "gpt-2", "olmo", "smollm", "starcoder", "refact", "command-r", "deepseek-coder"
    }  # fmt: skip


def cut(pre: str, text: str) -> list[str]:
    pieces = [text]
    for pattern in _CUTS[pre]:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        pieces = [part for piece in pieces for part, _ in split.pre_tokenize_str(piece)]
    return pieces


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("default", ["Hello", ",", " it", "'", "s", " ", "123", "45", "!", "\n", " 中文", "=", "2", "\t", "x"]),
        ("gpt-2", ["Hello", ",", " it", "'s", " 12345", "!", "\n", " 中文", "=", "2", "\t", "x"]),
        ("smollm", ["Hello", ",", " it", "'s", " ", "1", "2", "3", "4", "5", "!", "\n", " 中文", "=", "2", "\t", "x"]),
        ("llama-bpe", ["Hello", ",", " it", "'s", " ", "123", "45", "!\n", " 中文", "=", "2", "\tx"]),
        ("qwen2", ["Hello", ",", " it", "'s", " ", "1", "2", "3", "4", "5", "!\n", " 中文", "=", "2", "\tx"]),
        ("tekken", ["Hello", ",", " it", "'s", " ", "1", "2", "3", "4", "5", "!\n", " 中文", "=", "2", "\tx"]),
        (
            "deepseek-coder",
            ["Hello", ",", " it", "'", "s", " ", "1", "2", "3", "4", "5", "!", "\n", " ", "中文", "=", "2", "\tx"],
        ),
    ],
)
def test_where_a_text_is_cut(pre: str, pieces: list[str]) -> None:
    assert cut(pre, "Hello, it's 12345!\n 中文=2\tx") == pieces


@given(text=st.one_of(st.text(max_size=40), st.text("aB \n\t12'sé", max_size=40)))
@settings(max_examples=100, deadline=None)
def test_gpt2s_pattern_is_the_one_of_tokenizers(text: str) -> None:
    split = pre_tokenizers.Split(Regex(_CUTS["gpt-2"][0]), "isolated")
    ours = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    assert ours.pre_tokenize_str(text) == pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)


def test_smollm2s_digits_stand_alone(smollm2_gguf: Path) -> None:
    """transformers does not know `smollm`; given the rule of SmolLM2's own tokenizer.json it gives the same ids."""
    ours = Tokenizer.load(smollm2_gguf)
    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    backend: Backend = theirs.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = corpus() + SCRIPTS + ["a 12345 ٣٤ ½ Ⅷ"]
    assert [ours.encode(text) for text in texts] == theirs(texts)["input_ids"]
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template


# --- files made by hand ----------------------------------------------------------------------------------

COMPLETE: dict[str, Any] = {
    "general.architecture": "llama",
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["<end>", "<bos>", "a", "b", "ab", "<tool>"],
    "token_type": [CONTROL, CONTROL, NORMAL, NORMAL, NORMAL, USER_DEFINED],
    "merges": ["a b"],
    "eos_token_id": 0,
    "bos_token_id": 1,
    "add_bos_token": True,
}


def load(folder: Path, change: dict[str, Any]) -> Tokenizer:
    return Tokenizer.load(write_gguf(folder / "m.gguf", COMPLETE | change))


def test_flags_decide(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, {})
    assert tokenizer.encode("ab<tool>a<end>") == [1, 4, 5, 2, 0]
    assert tokenizer.encode("ab", special_tokens=False) == [4]
    assert tokenizer.decode([1, 4, 5, 0]) == "ab<tool>"


@pytest.mark.parametrize(
    ("change", "ids"),
    [
        ({"add_bos_token": False}, [4]),
        ({"add_bos_token": None}, [4]),
        ({"add_bos_token": None, "pre": "llama-bpe"}, [1, 4]),
        ({"add_bos_token": None, "pre": "llama-bpe", "bos_token_id": None}, [4]),
        ({"add_bos_token": False, "pre": "llama-bpe"}, [4]),
        ({"add_eos_token": True}, [1, 4]),
    ],
)
def test_how_a_prompt_begins(tmp_path: Path, change: dict[str, Any], ids: list[int]) -> None:
    assert load(tmp_path, change).encode("ab") == ids


def test_llama3_takes_a_whole_token_though_no_merge_makes_it(tmp_path: Path) -> None:
    merges = {"tokens": ["<end>", "<bos>", "a", "b", "ab", "aba"], "token_type": [3, 3, 1, 1, 1, 1]}
    assert load(tmp_path, merges | {"pre": "gpt-2"}).encode("aba") == [1, 4, 2]
    assert load(tmp_path, merges | {"pre": "llama-bpe"}).encode("aba") == [1, 5]


def test_every_end_is_one(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, {"eot_token_id": 3, "eom_token_id": 4})
    assert tokenizer.eos_ids == (0, 3, 4)
    assert tokenizer.decode([2, 3, 4]) == "a"  # an end has no text, whatever its type


def test_the_template_is_handed_on(tmp_path: Path) -> None:
    assert load(tmp_path, {"tokenizer.chat_template": "{{ x }}"}).chat_template == "{{ x }}"
    assert load(tmp_path, {}).chat_template is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"general.architecture": "gemma"}, "general.architecture is 'gemma'; supported: llama, qwen2, qwen3"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; supported: gpt2, llama"),
        ({"pre": "new"}, "tokenizer.ggml.pre is 'new'; supported: command-r, .*gpt-2, llama-bpe, .*tekken"),
        ({"pre": None}, "tokenizer.ggml.pre is None; supported"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"eos_token_id": None}, "has no tokenizer.ggml.eos_token_id"),
        ({"model": "llama", "merges": None}, "has no tokenizer.ggml.scores"),
        ({"model": "llama", "merges": None, "scores": [0.0]}, "scores has 1 entries for 6 tokens"),
        ({"token_type": [1]}, "token_type has 1 entries for 6 tokens"),
        ({"eot_token_id": 6}, "names tokens that it has not: {'eot': 6} of 6"),
        ({"merges": ["a c"]}, "its vocabulary makes no tokenizer"),
        ({"merges": ["a b a"]}, "its vocabulary makes no tokenizer"),
        ({"bos_token_id": None}, "asks for a beginning-of-sequence token"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, change)


@pytest.mark.parametrize("keep", [0, 10, 60, 200])
def test_a_cut_off_file_is_a_clear_error(tmp_path: Path, keep: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", COMPLETE)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"not a GGUF file|cut short"):
        Tokenizer.load(path)
