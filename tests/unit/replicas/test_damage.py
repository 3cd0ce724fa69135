"""Model files of nonsense: each loads, or is a ConfigError of one line, at once and in little memory."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bifolio.cluster.tokenizer import Tokenizer
from bifolio.protos.errors import ConfigError
from bifolio.replicas.model_config import LlamaConfig
from bifolio.replicas.model_files import check_model, fingerprint, model_config
from bifolio.replicas.rope_frequencies import rope_frequencies
from bifolio.replicas.weights import load

Read = Callable[[Path], Any]
DEEP = "[" * 100_000 + "]" * 100_000


def refusal(read: Read, path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path)
    message = caught.value.message
    assert message.isprintable()
    assert len(message) < 700
    return message


# --- GGUF ------------------------------------------------------------------------------------------------

TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<end>", "a", "b", "ab"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages }}",
}
SPM = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None, "tokenizer.ggml.scores": [0.0] * 4}
MODEL: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 1,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 16,
}
BLOCK = {"attn_q": (64, 64), "attn_k": (64, 32), "attn_v": (64, 32), "attn_output": (64, 64), "attn_norm": (64,)}
BLOCK |= {"ffn_gate": (64, 96), "ffn_up": (64, 96), "ffn_down": (96, 64), "ffn_norm": (64,)}
TENSORS: dict[str, tuple[int, ...]] = {"token_embd.weight": (64, 4), "output_norm.weight": (64,)}
TENSORS |= {f"blk.0.{name}.weight": dims for name, dims in BLOCK.items()}


def text(content: str | bytes) -> bytes:
    raw = content if isinstance(content, bytes) else content.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(of: Any) -> tuple[int, bytes]:
    """(GGUF's type, the bytes); a tuple is such a pair already."""
    match of:
        case tuple():
            return of
        case bool():
            return 7, struct.pack("<?", of)
        case int():
            return (4, struct.pack("<I", of)) if of >= 0 else (5, struct.pack("<i", of))
        case float():
            return 12, struct.pack("<d", of)
        case list():
            kinds = [value(each) for each in of]
            return 9, struct.pack("<IQ", kinds[0][0] if kinds else 4, len(of)) + b"".join(raw for _, raw in kinds)
    return 8, text(of)


def header(changes: dict[Any, Any], tensors: dict[str, tuple[int, ...]]) -> bytes:
    pairs = {key: each for key, each in (MODEL | TOKENIZER | changes).items() if each is not None}
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for key, each in pairs.items():
        kind, raw = value(each)
        out += text(key) + struct.pack("<I", kind) + raw
    for name, dims in tensors.items():
        out += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, 0)
    return out


def write(path: Path, changes: dict[Any, Any], tensors: dict[str, tuple[int, ...]] | None = None) -> Path:
    path.write_bytes(header(changes, TENSORS if tensors is None else tensors) + b"\0" * 40_000)
    return path


def nested(depth: int) -> tuple[int, bytes]:
    return 9, struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)


def test_the_file_that_is_damaged_below_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"general.nested": nested(3)})
    assert load(path, torch.float32)[0].layers == 1
    assert Tokenizer.load(path).decode([3]) == "ab"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.eos_token_id": "0"}, "names tokens that it has not: {'eos': '0'}"),
        ({"tokenizer.ggml.eos_token_id": [0]}, "names tokens that it has not"),
        ({"tokenizer.ggml.bos_token_id": 0.5}, "{'bos': 0.5} of 4"),
        ({"tokenizer.ggml.padding_token_id": -1}, "{'padding': -1} of 4"),
        ({"tokenizer.ggml.eot_token_id": True}, "{'eot': True} of 4"),
        ({"tokenizer.ggml.tokens": 4}, "tokens is no list of str"),
        ({"tokenizer.ggml.tokens": "abcd"}, "tokens is no list of str"),
        ({"tokenizer.ggml.tokens": [1, 2, 3, 4]}, "tokens is no list of str"),
        ({"tokenizer.ggml.tokens": [b"\xff", "a", "b", "ab"]}, "UnicodeDecodeError"),
        ({"tokenizer.ggml.token_type": 1}, "token_type is no list of int"),
        ({"tokenizer.ggml.token_type": ["1"] * 4}, "token_type is no list of int"),
        ({"tokenizer.ggml.merges": 1}, "merges is no list of str"),
        ({"tokenizer.ggml.merges": [1]}, "merges is no list of str"),
        (SPM | {"tokenizer.ggml.scores": 1.0}, "scores is no list of float"),
        (SPM | {"tokenizer.ggml.scores": [1, 2, 3, 4]}, "scores is no list of float"),
        (SPM | {"tokenizer.ggml.unknown_token_id": -1}, "{'unknown': -1} of 4"),
        (SPM | {"tokenizer.ggml.add_space_prefix": 1}, "add_space_prefix is 1; allowed is true or false"),
        ({"tokenizer.ggml.model": []}, "model is []; supported"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, "pre is ['gpt-2']; supported"),
        ({"tokenizer.ggml.add_bos_token": "no"}, "add_bos_token is 'no'; allowed is true or false"),
        ({"tokenizer.chat_template": 7}, "chat_template is 7; allowed is a text"),
        ({"tokenizer.chat_template": b"\xff"}, "UnicodeDecodeError"),
    ],
)
def test_a_gguf_vocabulary_of_nonsense_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(Tokenizer.load, write(tmp_path / "m.gguf", changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"llama.block_count": 3_000_000_000},
            "llama.block_count is 3000000000; allowed is a whole number from 1 to 2048",
        ),
        ({"llama.block_count": 1.5}, "block_count is 1.5; allowed is a whole number"),
        ({"llama.block_count": "1"}, "block_count is '1'"),
        ({"llama.embedding_length": True}, "embedding_length is True"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count_kv": [1, 1]}, "kv_heads is [1, 1]"),
        ({"llama.attention.key_length": 32.0, "llama.attention.value_length": 32}, "head_dim is 32.0"),
        ({"llama.context_length": -1}, "context_length is -1"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "eps of the norms is nan"),
        ({"llama.attention.layer_norm_rms_epsilon": "small"}, "eps of the norms is 'small'"),
        ({"llama.rope.freq_base": 0.0}, "freq_base is 0.0"),
        ({"llama.rope.freq_base": 1e300}, "freq_base is inf"),
        ({"llama.rope.freq_base": 1.0}, "rope_theta is 1; allowed for YaRN is more"),
        ({"llama.rope.scaling.factor": float("inf")}, "factor of the rope scaling is inf"),
        ({"llama.rope.scaling.factor": [2.0]}, "factor of the rope scaling is [2.0]"),
        ({"llama.rope.scaling.original_context_length": 0}, "before YaRN is 0"),
        ({"llama.rope.scaling.yarn_beta_fast": 1.0}, "beta_fast of the rope scaling is 1.0; allowed is more than"),
        ({"llama.rope.scaling.yarn_beta_slow": 0.0}, "beta_slow of the rope scaling is 0.0"),
        ({"general.architecture": [1]}, "architecture is [1]"),
        ({"general.alignment": 0}, "alignment is 0; allowed is a power of two"),
        ({"general.alignment": "32"}, "alignment is '32'"),
        ({"general.odd": nested(5000)}, "damaged"),
        ({"general.long": (9, struct.pack("<IQ", 4, 1 << 60))}, "damaged"),
        ({"general.long": (8, struct.pack("<Q", 1 << 62))}, "damaged"),
        ({b"\xff": 1}, "damaged"),
        ({"llama.two\nlines": 1}, "llama.two lines = 1"),
        ({"llama." + "long" * 2000: 1}, "which this engine does not compute; use a model without"),
    ],
)
def test_a_gguf_configuration_of_nonsense_is_refused(tmp_path: Path, changes: dict[Any, Any], says: str) -> None:
    assert says in refusal(check_model, write(tmp_path / "m.gguf", changes))


@pytest.mark.parametrize(
    ("dims", "says"),
    [
        ((1,) * 5, "has 5 dimensions; allowed are 4 at most"),
        ((1,) * 1_000_000, "has 1000000 dimensions"),
        ((1 << 63, 2), "ends before tensor token_embd.weight does"),
        ((64, 0), "allowed are rows"),
        ((1 << 40, 0), "allowed are rows"),
        ((), "IndexError"),
    ],
)
def test_tensors_of_nonsense_are_refused(tmp_path: Path, dims: tuple[int, ...], says: str) -> None:
    assert says in refusal(check_model, write(tmp_path / "m.gguf", {}, TENSORS | {"token_embd.weight": dims}))


def test_divisors_of_nonsense_are_refused(tmp_path: Path) -> None:
    plain = {"llama.rope.scaling.type": "none"}
    path = write(tmp_path / "m.gguf", plain, TENSORS | {"rope_freqs.weight": (16,)})  # zeros
    assert "a divisor of the rope frequencies is 0.0" in refusal(check_model, path)
    path = write(tmp_path / "m.gguf", plain, TENSORS | {"rope_freqs.weight": (16, 600)})
    assert "the shape of rope_freqs.weight is (600, 16); allowed is (16,)" in refusal(check_model, path)


def test_long_tokens_are_not_split_in_every_way(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", SPM | {"tokenizer.ggml.tokens": ["<end>", "a", "b", "a" * 100_000]})
    assert "a token of 100000 characters; allowed without merges are 256" in refusal(Tokenizer.load, path)


def test_tokens_that_merge_in_countless_ways_are_refused(tmp_path: Path) -> None:
    tokens = ["<end>", *(letter * times for letter in "abcdef" for times in range(1, 129))]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens)}
    changes |= {"tokenizer.ggml.scores": [0.0] * len(tokens)}
    assert "769 tokens with more than" in refusal(Tokenizer.load, write(tmp_path / "m.gguf", SPM | changes))


# --- directories -----------------------------------------------------------------------------------------


@pytest.fixture
def model(glassllm_dir: Path, tmp_path: Path) -> Path:
    """A copy of glassllm that a test may damage."""
    return Path(shutil.copytree(glassllm_dir, tmp_path / "model"))


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, "factor": 2.0, **more}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 4.7}, "num_hidden_layers is 4.7; allowed is a whole number from 1 to 2048"),
        ({"num_hidden_layers": 10**9, "architectures": ["SmolLM3ForCausalLM"]}, "num_hidden_layers is 1000000000"),
        ({"hidden_size": "128"}, "hidden_size is '128'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": 2**24 + 1}, "vocab_size is 16777217"),
        ({"vocab_size": 10**400}, "vocab_size is 1000"),
        ({"intermediate_size": [341]}, "intermediate_size is [341]"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim": "32"}, "head_dim is '32'"),
        ({"max_position_embeddings": 1e9}, "max_position_embeddings is 1000000000.0"),
        ({"rms_norm_eps": 1}, "rms_norm_eps is 1"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": 0}, "rope_theta is 0; allowed is a number from 1"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; allowed is a list, as in [\"L"),
        ({"architectures": {"a": 1}}, "architectures is {'a': 1}"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architecture is ['LlamaForCausalLM']"),
        ({"architectures": ["x\n" * 5000]}, "allowed is 'LlamaForCausalLM' or"),
        ({"attention_bias": "false"}, "attention_bias is 'false'; allowed is True or False"),
        ({"tie_word_embeddings": []}, "tie_word_embeddings is []"),
        ({"layer_types": "full"}, "layer_types is 'full'; allowed is a list"),
        ({"max_window_layers": 1.5}, "max_window_layers is 1.5"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4.5}, "sliding_window is 4.5"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "8"}, "sliding_window is '8'"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": "1111"}, "no_rope_layers is '1111'"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ({"rope_scaling": [1]}, "the rope parameters are [1]"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope type is ['linear']"),
        (rope("linear", factor=float("nan")), "factor of the rope scaling is nan"),
        (rope("linear", factor=10**400), "factor of the rope scaling is 1000"),
        (rope("linear", factor=True), "factor of the rope scaling is True"),
        (rope("yarn", attention_factor=0), "attention_factor of the rope scaling is 0"),
        (rope("yarn", mscale=-20.0, mscale_all_dim=1), "mscale of the rope scaling is -20.0"),
        (rope("yarn", beta_fast=1, beta_slow=1), "beta_fast of the rope scaling is 1.0; allowed is more than"),
        (rope("yarn", beta_slow=0), "beta_slow of the rope scaling is 0"),
        (rope("yarn", truncate="no"), "truncate of the rope scaling is 'no'"),
        (rope("yarn", original_max_position_embeddings=0), "original_max_position_embeddings is 0"),
        (rope("yarn", factor=2**20, original_max_position_embeddings=2**20), "max_positions is 1099511627776"),
        (rope("yarn") | {"rope_theta": 1}, "rope_theta is 1; allowed for YaRN is more"),
        (rope("llama3", low_freq_factor=1e-320, high_freq_factor=4.0), "low_freq_factor of the rope scaling is"),
    ],
)
def test_a_config_of_nonsense_is_refused(model: Path, changes: dict[str, Any], says: str) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert says in refusal(check_model, model)
    assert says in refusal(fingerprint, model)


@pytest.mark.parametrize("content", [DEEP, "[]", "7", "", "\x00", '{"architectures": ' + DEEP + "}"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", model_config),
        ("model.safetensors.index.json", check_model),
        ("generation_config.json", Tokenizer.load),
        ("tokenizer_config.json", Tokenizer.load),
        ("tokenizer.json", Tokenizer.load),
    ],
)
def test_json_of_nonsense_is_refused(model: Path, name: str, read: Read, content: str) -> None:
    (model / name).write_text(content)
    assert name in refusal(read, model)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": []}, "has no weight_map"),
        ({"weight_map": {"a": 1}}, "has no weight_map"),
        ({"weight_map": {"a": []}}, "has no weight_map"),
        ({"weight_map": {}}, "is missing"),
        ({"weight_map": {"a": "n" * 5000}}, "cannot be read (OSError"),
        ({"weight_map": {"a": "."}}, "needed is every weight file"),
        ({"weight_map": {"a": "\0"}}, "model"),
        ({"weight_map": {"a": "\ud800"}}, "model"),
    ],
)
def test_an_index_of_nonsense_is_refused(model: Path, content: Any, says: str) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps(content))
    assert says in refusal(check_model, model)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"bos_token": "\ud800"}, "surrogates"),
        ({"unk_token": "\ud800"}, "unk_token of the tokenizer is no text"),
        ({"chat_template": "\udfff"}, "chat_template of the tokenizer is no text"),
        ({"chat_template": 5}, "chat_template is 5; allowed is a text, or a list"),
        ({"chat_template": [{"name": "default", "template": 5}]}, "chat_template is 5"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'; allowed is true or false"),
    ],
)
def test_settings_of_nonsense_are_refused(model: Path, settings: dict[str, Any], says: str) -> None:
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert says in refusal(Tokenizer.load, model)


def test_chat_templates_with_names_of_nonsense_are_none(model: Path) -> None:
    (model / "tokenizer_config.json").write_text('{"chat_template": [{"name": []}, 7]}')
    assert Tokenizer.load(model).chat_template is None


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", Path("/dev/null"), tmp_path / ("n" * 300), tmp_path / "two\nlines"):
        refusal(Tokenizer.load, path)
        refusal(check_model, path)


# --- chance ----------------------------------------------------------------------------------------------


def mutated(chance: random.Random, whole: bytes) -> bytes:
    """One to four bytes changed, added or left out, with a liking for what counts something."""
    content = bytearray(whole)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(content))
        new = bytes([chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256), *b'[]{}",:019-.en'])])
        content[at : at + chance.choice([0, 1, 1, 1, 1])] = new * chance.choice([1, 1, 1, 0, 4])
    return bytes(content)


def loads_or_is_refused(path: Path) -> None:
    try:
        config = check_model(path)
    except ConfigError as error:
        assert error.message.isprintable()
        assert len(error.message) < 700
    else:
        usable(config)
        if path.is_file():
            load(path, torch.float32)
    try:
        tokenizer = Tokenizer.load(path)
    except ConfigError as error:
        assert error.message.isprintable()
        assert len(error.message) < 700
    else:
        tokenizer.decode(tokenizer.encode("ab <end>"))


def usable(config: LlamaConfig) -> None:
    frequencies, scale = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    assert frequencies.isfinite().all()
    assert scale > 0


@pytest.mark.parametrize("model_name", ["gpt2", "llama"])
def test_a_gguf_with_bytes_of_chance_loads_or_is_refused(tmp_path: Path, model_name: str) -> None:
    whole = header(SPM if model_name == "llama" else {}, TENSORS)
    chance = random.Random(model_name)
    path = tmp_path / "m.gguf"
    for _ in range(150):
        path.write_bytes(mutated(chance, whole) + b"\0" * 40_000)
        loads_or_is_refused(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_directory_with_bytes_of_chance_loads_or_is_refused(model: Path, name: str) -> None:
    whole = (model / name).read_bytes()
    chance = random.Random(name)
    for _ in range(100):
        (model / name).write_bytes(mutated(chance, whole))
        loads_or_is_refused(model)
