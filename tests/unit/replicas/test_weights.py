"""Loading: a real GGUF file against the definition of its format, and all that a model can have wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from bifolio.protos.errors import ConfigError
from bifolio.replicas.gguf_file import GgufFile
from bifolio.replicas.llama import LlamaConfig
from bifolio.replicas.model_files import fingerprint, model_config
from bifolio.replicas.weights import load


@pytest.fixture
def model(glassllm_dir: Path, tmp_path: Path) -> Path:
    """A copy of glassllm that a test may damage."""
    return Path(shutil.copytree(glassllm_dir, tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tiny_gguf(path: Path, architecture: str = "llama", **extra: str) -> tuple[Path, dict[str, np.ndarray]]:
    """A one-layer file of random float32, and what was put in it."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_eos_token_id(2)
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (3, 64), "output": (3, 64), "output_norm": (64,), "blk.0.attn_norm": (64,)}
    shapes |= {
        "blk.0.ffn_norm": (64,),
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
    }
    shapes |= {"blk.0.attn_output": (64, 64), "blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64)}
    shapes |= {"blk.0.ffn_down": (64, 96)}
    tensors = {f"{n}.weight": rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


def test_the_configuration_of_a_gguf_file(smollm2_gguf: Path) -> None:
    assert model_config(smollm2_gguf) == LlamaConfig(
        vocab_size=49152,
        hidden=576,
        intermediate=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        eps=1e-5,
        rope_theta=100000.0,
        max_positions=8192,
        tied=True,
        bos_id=1,
        eos_ids=(2,),
    )


def test_quantised_tensors_are_what_their_numbers_mean(smollm2_gguf: Path) -> None:
    """Q4_1, by its definition: 32 weights are 4-bit numbers times a float16 scale plus a float16 minimum."""
    _, weights = load(smollm2_gguf, torch.float32)
    file = GgufFile(smollm2_gguf)
    info = file._tensors["blk.3.ffn_up.weight"]
    raw = np.frombuffer(smollm2_gguf.read_bytes(), np.uint8, 1536 * 576 // 32 * 20, info.offset).reshape(-1, 20)
    scale, least = raw[:, :4].copy().view(np.float16).astype(np.float32).T
    digits = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], axis=1)
    want = (digits * scale[:, None] + least[:, None]).reshape(1536, 576)
    got = weights["model.layers.3.mlp.up_proj.weight"]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.from_numpy(want), rtol=1e-6, atol=1e-7)
    assert not torch.equal(got, got.bfloat16().float())


def test_tokenizer_metadata_is_there_when_asked_for(smollm2_gguf: Path) -> None:
    file = GgufFile(smollm2_gguf)
    assert file["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(file["tokenizer.ggml.merges"]) == 48900
    assert file["tokenizer.ggml.add_bos_token"] is False
    assert "nonsense" not in file


def test_rows_of_queries_and_keys_are_put_back_in_halves(tmp_path: Path) -> None:
    path, stored = tiny_gguf(tmp_path / "tiny.gguf")
    config, weights = load(path, torch.float32)
    assert (config.tied, config.vocab_size, config.eos_ids, config.bos_id) == (False, 3, (2,), None)
    for name, heads in (("q", 2), ("k", 1)):
        kept = stored[f"blk.0.attn_{name}.weight"]
        got = weights[f"model.layers.0.self_attn.{name}_proj.weight"].numpy()
        for h in range(heads):
            for i in range(16):  # llama.cpp's pair (2i, 2i + 1) is our pair (i, i + 16)
                assert np.array_equal(got[32 * h + i], kept[32 * h + 2 * i])
                assert np.array_equal(got[32 * h + i + 16], kept[32 * h + 2 * i + 1])
    assert np.array_equal(weights["lm_head.weight"].numpy(), stored["output.weight"])


def test_a_directory_loads_in_the_dtype_asked_for(glassllm_dir: Path) -> None:
    config, weights = load(glassllm_dir, torch.bfloat16)
    stored = load_file(glassllm_dir / "model.safetensors")
    assert weights.keys() == config.tensors().keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name].bfloat16()) for name in stored)


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        (
            "config.json",
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel'; allowed is 'LlamaForCausalLM'",
        ),
        ("config.json", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("config.json", {"attention_bias": True}, "attention_bias"),
        ("config.json", {"rope_scaling": {"rope_type": "llama3"}}, "rope type is 'llama3'"),
        ("config.json", {"rms_norm_eps": None}, "no 'rms_norm_eps'"),
        ("config.json", {"head_dim": 16}, "head_dim is 16"),
        ("config.json", {"num_key_value_heads": 3}, "4 heads; allowed is a multiple of 3"),
        (
            "config.json",
            {"num_hidden_layers": 5},
            r"layers\.4\.input_layernorm\.weight is missing.*and 1 more",
        ),
        ("config.json", {"num_hidden_layers": 3}, r"layers\.3\..* is not part of a Llama"),
        ("config.json", {"intermediate_size": 340}, r"is \[341, 128\], expected \[340, 128\]"),
    ],
)
def test_a_directory_that_does_not_fit_is_refused(
    model: Path, file: str, changes: dict[str, object], named: str
) -> None:
    edit(model / file, **changes)
    with pytest.raises(ConfigError, match=named):
        load(model, torch.float32)


def test_files_that_are_missing_or_damaged_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "nowhere", torch.float32)
    (model / "model.safetensors").write_bytes(b"not a model at all, only some text")
    with pytest.raises(ConfigError, match="damaged"):
        load(model, torch.float32)
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors does not exist"):
        load(model, torch.float32)
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        load(model, torch.float32)


def test_gguf_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path, _ = tiny_gguf(tmp_path / "qwen.gguf", "qwen2")
    with pytest.raises(ConfigError, match="architecture is 'qwen2'; allowed is 'llama'"):
        load(path, torch.float32)
    path, _ = tiny_gguf(tmp_path / "scaled.gguf", llama__rope__scaling__type="linear")
    with pytest.raises(ConfigError, match="rope scaling is 'linear'"):
        load(path, torch.float32)
    whole = tiny_gguf(tmp_path / "whole.gguf")[0].read_bytes()
    for end in (2, 10, 100, 700, len(whole) - 40):
        (tmp_path / "cut.gguf").write_bytes(whole[:end])
        with pytest.raises(ConfigError, match=r"GGUF|cut short|ends before"):
            load(tmp_path / "cut.gguf", torch.float32)


def test_eos_ids_come_from_both_files_of_a_directory(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    assert model_config(model).eos_ids == (3, 7)


def test_a_second_copy_of_a_tied_embedding_is_ignored(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight" not in load(model, torch.float32)[1]


def test_the_fingerprint_is_the_same_in_another_process_and_place(glassllm_dir: Path, model: Path) -> None:
    code = "import sys; from pathlib import Path; from bifolio.replicas.model_files import fingerprint as f"
    code += "; print(f(Path(sys.argv[1])))"
    other = subprocess.run([sys.executable, "-c", code, str(model)], check=True, capture_output=True, text=True)
    assert other.stdout.strip() == fingerprint(glassllm_dir)


def test_the_fingerprint_tells_other_weights_and_other_configurations(glassllm_dir: Path, model: Path) -> None:
    edit(model / "config.json", rope_theta=20000.0)
    prints = {fingerprint(glassllm_dir), fingerprint(model)}
    weights = {name: w * 1.001 for name, w in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    prints.add(fingerprint(model))
    assert len(prints) == 3
