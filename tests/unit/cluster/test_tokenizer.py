"""Token ids and texts are those of `tokenizers`, from a GGUF and from a directory."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

from bifolio.cluster.tokenizer import Tokenizer
from bifolio.protos.errors import ConfigError

TEXTS = [
    "The capital of France is Paris, since 987.",
    "def f(x):\n\treturn x  # 12345\n\n\n",
    "서울은 대한민국의 수도이다.",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 a\u0308\u0323",
    "שלום עולם، مرحبا بالعالم",
    "\ufffd \x00 \u200f",
    "",
]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_gguf)


@pytest.fixture(scope="module")
def glassllm(glassllm_dir: Path) -> Tokenizer:
    return Tokenizer.load(glassllm_dir)


def test_gguf_names_its_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_ids == (2,)
    assert smollm2.special_ids == frozenset(range(17))


def test_directory_names_its_special_tokens(glassllm: Tokenizer) -> None:
    assert glassllm.vocab_size == 1024
    assert glassllm.eos_ids == (3,)
    assert glassllm.special_ids == frozenset(range(4))


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


def test_no_token_is_added_unless_the_model_says_so(smollm2: Tokenizer) -> None:
    assert smollm2.encode("Hello") == [19556]


def test_special_tokens_in_a_text_are_recognised_and_have_no_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>user")
    assert ids[0] == 1
    assert smollm2.decode(ids) == "user"


@pytest.mark.parametrize("name", ["smollm2", "glassllm"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_text_is_the_tokenizers_text(request: pytest.FixtureRequest, name: str, data: st.DataObject) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40))
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=True)


def test_each_byte_alone_is_decoded_as_tokenizers_does(smollm2: Tokenizer) -> None:
    backend = smollm2._backend
    single = [id for id in range(smollm2.vocab_size) if len(smollm2.piece(id)) == 1]
    assert {smollm2.piece(id) for id in single} >= {bytes([byte]) for byte in range(0x20, 0x7F)}
    for id in single:
        assert smollm2.decode([id]) == backend.decode([id])


# --- directories made here -------------------------------------------------------------------------------


def write_model(folder: Path, backend: Any, config: dict[str, Any], settings: dict[str, Any]) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def sentencepiece(*words: str) -> Any:
    """Llama 2's kind: ▁ for spaces, bytes for what has no token, the text's first space dropped."""
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend: Any = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def test_sentencepiece_with_byte_fallback(tmp_path: Path) -> None:
    backend = sentencepiece("▁a", "b", "▁")
    tokenizer = Tokenizer.load(write_model(tmp_path, backend, {"eos_token_id": [1, 7]}, {}))
    ids = [0, 258, 259, *(2 + byte for byte in "é한".encode()), 260, 258, 1]
    assert tokenizer.decode(ids) == backend.decode(ids) == "abé한  a"
    assert tokenizer.eos_ids == (1, 7)


@pytest.mark.parametrize(("add_bos", "ids"), [(None, [0, 259]), (True, [0, 259]), (False, [259]), ("absent", [0, 259])])
def test_the_beginning_token_follows_the_models_own_word(tmp_path: Path, add_bos: Any, ids: list[int]) -> None:
    backend = sentencepiece("▁a", "b")
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    settings = {"bos_token": {"content": "<s>"}} | ({} if add_bos == "absent" else {"add_bos_token": add_bos})
    tokenizer = Tokenizer.load(write_model(tmp_path, backend, {"eos_token_id": 1}, settings))
    assert tokenizer.encode("b") == ids


def test_generation_config_decides_which_tokens_end(tmp_path: Path) -> None:
    write_model(tmp_path, sentencepiece("b"), {"eos_token_id": 1}, {})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 258]}')
    assert Tokenizer.load(tmp_path).eos_ids == (1, 258)


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, sentencepiece("b"), {}, {})
    with pytest.raises(ConfigError, match="names no end-of-sequence token"):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    backend = sentencepiece("b")
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match=r"WordPiece.*cannot be streamed exactly; supported: ByteLevel"):
        Tokenizer.load(write_model(tmp_path, backend, {"eos_token_id": 1}, {}))


def test_a_broken_tokenizer_json_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


# --- GGUF files made here --------------------------------------------------------------------------------


def gguf(path: Path, pairs: dict[str, Any]) -> Path:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def value(item: Any) -> bytes:
        match item:
            case bool():
                return struct.pack("<I?", 7, item)
            case int():
                return struct.pack("<Ii", 5, item)
            case str():
                return struct.pack("<I", 8) + text(item)
            case _:
                items = [value(each) for each in item]
                return (
                    struct.pack("<I", 9)
                    + items[0][:4]
                    + struct.pack("<Q", len(items))
                    + b"".join(each[4:] for each in items)
                )

    body = b"".join(text(key) + value(item) for key, item in pairs.items())
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(pairs)) + body)
    return path


COMPLETE: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<end>", "<bos>", "a", "b", "ab", "<tool>"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 4],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
}


def test_gguf_flags_decide(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(gguf(tmp_path / "m.gguf", COMPLETE))
    assert tokenizer.encode("ab<tool>a<end>") == [1, 4, 5, 2, 0]
    assert tokenizer.decode([1, 4, 5, 0]) == "ab<tool>"  # user-defined tokens are text, control tokens are not


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture is 'qwen2'; supported: llama"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'; supported: gpt2"),
        ({"tokenizer.ggml.pre": "new"}, "tokenizer.ggml.pre is 'new'; supported: gpt-2, smollm"),
        ({"tokenizer.ggml.merges": None}, "has no tokenizer.ggml.merges"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    pairs = {key: value for key, value in (COMPLETE | change).items() if value is not None}
    with pytest.raises(ConfigError, match=says):
        Tokenizer.load(gguf(tmp_path / "m.gguf", pairs))


@pytest.mark.parametrize("keep", [0, 10, 60, 200])
def test_a_cut_off_file_is_a_clear_error(tmp_path: Path, keep: int) -> None:
    path = gguf(tmp_path / "m.gguf", COMPLETE)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"not a GGUF file|cut short"):
        Tokenizer.load(path)
