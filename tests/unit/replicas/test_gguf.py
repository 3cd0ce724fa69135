"""GGUF: every tensor type against its definition, the order of rows, and what a file can hold that is not computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from bifolio.protos.errors import ConfigError
from bifolio.replicas.gguf_file import GgufFile
from bifolio.replicas.llama import LlamaConfig
from bifolio.replicas.model_files import model_config
from bifolio.replicas.rope_scaling import Divided, Linear, RopeScaling, Yarn, yarn_attention_factor
from bifolio.replicas.weights import load

Value = str | int | float | bool


def tiny_gguf(
    path: Path, architecture: str = "llama", more: dict[str, np.ndarray] | None = None, **extra: Value
) -> tuple[Path, dict[str, np.ndarray]]:
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
    for name, value in extra.items():
        key = name.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (3, 64), "output": (3, 64), "output_norm": (64,), "blk.0.attn_norm": (64,)}
    shapes |= {"blk.0.ffn_norm": (64,), "blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64)}
    shapes |= {"blk.0.attn_output": (64, 64), "blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64)}
    shapes |= {"blk.0.ffn_down": (64, 96)}
    tensors = {f"{n}.weight": rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()} | (more or {})
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    _write(writer)
    return path, tensors


def _write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks_of(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """A tensor's bytes: of random numbers where the package quantises, else random ones with sane scales."""
    rng = np.random.default_rng(int(kind))
    try:
        return quantize(rng.standard_normal((rows, columns)).astype(np.float32), kind).view(np.uint8)
    except NotImplementedError:
        elements, size = GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
        scales = {Kind.Q4_K: (0, 4), Kind.Q6_K: (208, 210)}[kind]  # where a block keeps its float16
        wide = rng.uniform(-0.01, 0.01, (rows, columns // elements, (scales[1] - scales[0]) // 2)).astype(np.float16)
        raw[..., slice(*scales)] = wide.view(np.uint8)
        return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K])
def test_a_tensor_of_each_type_reads_as_the_package_says(kind: Kind, tmp_path: Path) -> None:
    raw = blocks_of(kind, 6, 512)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("before", np.ones(5, np.float32))  # so that ours begins behind padding
    writer.add_tensor("ours", raw, raw_dtype=kind)
    writer.add_tensor("after", np.ones(5, np.float32))
    _write(writer)
    file = GgufFile(tmp_path / "model.gguf")
    got, want = file.tensor("ours"), dequantize(raw, kind).reshape(6, 512)
    assert file.shapes["ours"] == got.shape == (6, 512)
    assert got.dtype == np.float32
    assert np.array_equal(got, want)
    assert 0.01 < np.abs(got).max() < 1000


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
    )


def test_tensors_go_to_the_device(tmp_path: Path) -> None:
    path, _ = tiny_gguf(tmp_path / "model.gguf")
    config, weights = load(path, torch.bfloat16, torch.device("meta"))
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == config.tensors()
    assert all(tensor.is_meta and tensor.dtype == torch.bfloat16 for tensor in weights.values())


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
    biases = {
        f"blk.0.attn_{name}.bias": np.arange(rows, dtype=np.float32) for name, rows in (("q", 64), ("k", 32), ("v", 32))
    }
    path, stored = tiny_gguf(tmp_path / "tiny.gguf", more=biases)
    config, weights = load(path, torch.float32)
    assert (config.tied, config.vocab_size) == (False, 3)
    for name, heads in (("q", 2), ("k", 1)):
        for kind in ("weight", "bias"):
            kept = stored[f"blk.0.attn_{name}.{kind}"]
            got = weights[f"model.layers.0.self_attn.{name}_proj.{kind}"].numpy()
            for h in range(heads):
                for i in range(16):  # llama.cpp's pair (2i, 2i + 1) is our pair (i, i + 16)
                    assert np.array_equal(got[32 * h + i], kept[32 * h + 2 * i])
                    assert np.array_equal(got[32 * h + i + 16], kept[32 * h + 2 * i + 1])
    assert np.array_equal(weights["model.layers.0.self_attn.v_proj.bias"].numpy(), biases["blk.0.attn_v.bias"])
    assert np.array_equal(weights["lm_head.weight"].numpy(), stored["output.weight"])


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        ({}, None),
        ({"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 8.0}, None),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.5}, Linear(2.5)),
        ({"llama__rope__scaling__factor": 2.5}, Linear(2.5)),
        ({"llama__rope__scale_linear": 4.0}, Linear(4.0)),
        ({"llama__rope__scaling__factor": 0.0}, None),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 4.0,
                "llama__rope__scaling__original_context_length": 16,
                "llama__rope__scaling__yarn_beta_fast": 24.0,
            },
            Yarn(4.0, 16, yarn_attention_factor(4.0), beta_fast=24.0),
        ),
    ],
)
def test_rope_scaling_is_read_as_llama_cpp_reads_it(
    extra: dict[str, Value], scaling: RopeScaling | None, tmp_path: Path
) -> None:
    assert model_config(tiny_gguf(tmp_path / "tiny.gguf", **extra)[0]).rope_scaling == scaling


def test_divisors_of_the_frequencies_are_kept_as_they_are(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 16, dtype=np.float32)
    path, _ = tiny_gguf(tmp_path / "tiny.gguf", more={"rope_freqs.weight": divisors})
    assert load(path, torch.float32)[0].rope_scaling == Divided(tuple(divisors.tolist()))
    both, _ = tiny_gguf(tmp_path / "both.gguf", more={"rope_freqs.weight": divisors}, llama__rope__scaling__factor=2.0)
    with pytest.raises(ConfigError, match=r"rope scaling beside rope_freqs\.weight is Linear"):
        model_config(both)
    short, _ = tiny_gguf(tmp_path / "short.gguf", more={"rope_freqs.weight": divisors[:8]})
    with pytest.raises(ConfigError, match=r"shape of rope_freqs\.weight is \(8,\); allowed is \(16,\)"):
        model_config(short)


@pytest.mark.parametrize(
    ("architecture", "extra", "named"),
    [
        ("gemma3", {}, "architecture is 'gemma3'; allowed is 'llama' or 'qwen2' or 'qwen3'$"),
        ("qwen2", {}, r"q_proj\.bias is missing"),
        ("qwen3", {}, r"q_norm\.weight is missing"),
        ("llama", {"llama__rope__scaling__type": "longrope"}, "rope scaling is 'longrope'; allowed is 'none' or"),
        ("llama", {"llama__rope__scaling__yarn_attn_factor": 1.5}, r"yarn_attn_factor = 1\.5 in the GGUF metadata"),
        ("llama", {"llama__expert_count": 8}, r"llama\.expert_count = 8 in the GGUF metadata, which this engine does"),
        ("llama", {"llama__final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"llama__attention__sliding_window": 16}, "sliding_window = 16"),
        ("llama", {"llama__rope__dimension_count": 16}, "rope dimensions is 16; allowed is 32"),
        ("llama", {"llama__attention__value_length": 16}, "length of values is 16; allowed is 32"),
        ("llama", {"llama__attention__causal": False}, "attention.causal is False"),
        ("llama", {"split__count": 3}, "number of files .* is 3; allowed is 1"),
    ],
)
def test_gguf_files_that_are_not_computed_are_refused(
    architecture: str, extra: dict[str, Value], named: str, tmp_path: Path
) -> None:
    path, _ = tiny_gguf(tmp_path / "tiny.gguf", architecture, **extra)
    with pytest.raises(ConfigError, match=named):
        load(path, torch.float32)


def test_a_feature_that_is_zero_is_not_used(tmp_path: Path) -> None:
    path, _ = tiny_gguf(tmp_path / "tiny.gguf", llama__expert_count=0, llama__pooling_type=0)
    load(path, torch.float32)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    path, _ = tiny_gguf(tmp_path / "tiny.gguf", more={"blk.0.attn_sinks.weight": np.ones(2, np.float32)})
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_sinks\.weight is not part of it"):
        load(path, torch.float32)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    whole = tiny_gguf(tmp_path / "whole.gguf")[0].read_bytes()
    for end in (2, 10, 100, 700, len(whole) - 40):
        (tmp_path / "cut.gguf").write_bytes(whole[:end])
        with pytest.raises(ConfigError, match=r"GGUF|cut short|ends before"):
            load(tmp_path / "cut.gguf", torch.float32)
