"""Token ids and texts are those of `tokenizers` and transformers; what a model directory says is obeyed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, processors
from transformers import AutoTokenizer
from vocab_kit import SCRIPTS, corpus, write_gguf
from vocab_kit import sentencepiece as sentencepiece_vocabulary

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
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_text_is_the_tokenizers_text(request: pytest.FixtureRequest, name: str, data: st.DataObject) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40))
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_gguf(tmp_path_factory.mktemp("spm") / "m.gguf", sentencepiece_vocabulary()))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_byte_tokens_read_as_utf8_reads(byte_fallback: Tokenizer, data: st.DataObject) -> None:
    """And as in `tokenizers`, unless a byte is wrong: then it makes each byte of the run a U+FFFD."""
    characters = st.characters(exclude_categories=["Cs"]).map(lambda c: [3 + byte for byte in c.encode()])
    words = st.integers(259, byte_fallback.vocab_size - 1).map(lambda id: [id])
    parts = [characters, words]
    if wrong := data.draw(st.booleans()):
        parts.append(st.integers(3, 258).map(lambda id: [id]))
    ids = [id for part in data.draw(st.lists(st.one_of(parts), max_size=12)) for id in part]

    pieces = b"".join(bytes([id - 3]) if id < 259 else byte_fallback.piece(id) for id in ids)
    assert byte_fallback.decode(ids) == pieces.decode("utf-8", "replace").removeprefix(" ")
    if not wrong:
        assert byte_fallback.decode(ids) == byte_fallback._backend.decode(ids, skip_special_tokens=True)


def test_a_wrong_byte_does_not_take_whole_characters_along(byte_fallback: Tokenizer) -> None:
    ids = [3 + byte for byte in "한".encode() + b"\xff" + "글".encode()[:2]]
    assert byte_fallback.decode(ids) == "한\ufffd\ufffd"
    assert byte_fallback._backend.decode(ids) == "\ufffd" * 6


@pytest.mark.parametrize("name", ["smollm2", "glassllm", "byte_fallback"])
@given(text=st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_without_special_tokens_a_text_has_the_same_ids_less_the_first(
    request: pytest.FixtureRequest, name: str, text: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    begins = [1] if name == "byte_fallback" else []
    assert tokenizer.encode(text) == begins + tokenizer.encode(text, special_tokens=False)


def test_each_byte_alone_is_decoded_as_tokenizers_does(smollm2: Tokenizer) -> None:
    backend = smollm2._backend
    single = [id for id in range(smollm2.vocab_size) if len(smollm2.piece(id)) == 1]
    assert {smollm2.piece(id) for id in single} >= {bytes([byte]) for byte in range(0x20, 0x7F)}
    for id in single:
        assert smollm2.decode([id]) == backend.decode([id])


def test_a_directory_is_read_as_transformers_reads_it(glassllm_dir: Path, glassllm: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(glassllm_dir)
    texts = corpus() + SCRIPTS + TEXTS
    assert [glassllm.encode(text) for text in texts] == theirs(texts)["input_ids"]
    assert glassllm.special_tokens == theirs.special_tokens_map
    assert glassllm.chat_template is None


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


def test_a_prompt_is_given_no_end_and_is_not_cut(tmp_path: Path) -> None:
    backend = sentencepiece("▁a", "b")
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]),
        ]
    )
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer.load(write_model(tmp_path, backend, {"eos_token_id": 1}, {}))
    assert tokenizer.encode("bbbbb") == [0, *[259] * 5]
    assert tokenizer.encode("b", special_tokens=False) == [259]


def test_a_post_processor_that_is_not_known_is_refused(tmp_path: Path) -> None:
    backend = sentencepiece("b")
    backend.post_processor = processors.BertProcessing(("</s>", 1), ("<s>", 0))
    with pytest.raises(ConfigError, match="post-processor BertProcessing is not supported; supported: Template"):
        Tokenizer.load(write_model(tmp_path, backend, {"eos_token_id": 1}, {}))


def test_special_tokens_have_the_names_templates_know(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        sentencepiece("b"),
        {"eos_token_id": 1},
        {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "add_bos_token": True},
    )
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "b", "additional_special_tokens": ["<s>"]}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_tokens == {"unk_token": "b", "bos_token": "<s>", "eos_token": "</s>"}


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "of the list"}]


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, None),
        ({"chat_template.json": '{"chat_template": "of the json"}'}, "of the json"),
        ({"chat_template.json": '{"chat_template": "of the json"}', "settings": "of the settings"}, "of the settings"),
        ({"chat_template.jinja": "of the jinja ü\n", "settings": "of the settings"}, "of the jinja ü\n"),
        ({"settings": NAMED}, "of the list"),
        ({"settings": NAMED[:1]}, None),
    ],
)
def test_where_a_chat_template_comes_from(tmp_path: Path, files: dict[str, Any], template: str | None) -> None:
    settings = {"chat_template": files.pop("settings")} if "settings" in files else {}
    write_model(tmp_path, sentencepiece("b"), {"eos_token_id": 1}, settings)
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert Tokenizer.load(tmp_path).chat_template == template


def test_a_chat_template_that_is_no_text_is_a_clear_error(tmp_path: Path) -> None:
    write_model(tmp_path, sentencepiece("b"), {"eos_token_id": 1}, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read"):
        Tokenizer.load(tmp_path)


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


def test_the_tokenizers_own_end_counts_beside_the_models(tmp_path: Path) -> None:
    write_model(tmp_path, sentencepiece("b", "<end>"), {"eos_token_id": 1}, {"eos_token": "<end>"})
    assert Tokenizer.load(tmp_path).eos_ids == (1, 259)


@pytest.mark.parametrize("ends", [-1, "1", [1, None], 1.0, True])
def test_an_end_that_is_no_token_id_is_refused(tmp_path: Path, ends: Any) -> None:
    write_model(tmp_path, sentencepiece("b"), {"eos_token_id": ends}, {})
    with pytest.raises(ConfigError, match=r"eos_token_id is .*; allowed is a token id"):
        Tokenizer.load(tmp_path)
