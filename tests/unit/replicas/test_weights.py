"""Loading a directory, and all that its configuration and its tensors can have wrong. GGUF: `test_gguf.py`."""

from __future__ import annotations

import json
import logging
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bifolio.protos.errors import ConfigError
from bifolio.replicas import weights as weights_module
from bifolio.replicas.model_files import fingerprint, model_config
from bifolio.replicas.rope_scaling import Yarn, yarn_attention_factor
from bifolio.replicas.weights import REPORT_S, Progress, load

META = torch.device("meta")


@pytest.fixture
def model(glassllm_dir: Path, tmp_path: Path) -> Path:
    """A copy of glassllm that a test may damage."""
    return Path(shutil.copytree(glassllm_dir, tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_directory_loads_in_the_dtype_asked_for(glassllm_dir: Path) -> None:
    config, weights = load(glassllm_dir, torch.bfloat16)
    stored = load_file(glassllm_dir / "model.safetensors")
    assert weights.keys() == config.tensors().keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name].bfloat16()) for name in stored)


def test_how_many_are_under_way_together_changes_nothing(glassllm_dir: Path) -> None:
    alone, together = (load(glassllm_dir, torch.bfloat16, at_once=count)[1] for count in (1, 7))
    assert list(together) == list(alone)
    assert all(torch.equal(together[name], alone[name]) for name in alone)


def test_tensors_go_to_the_device(glassllm_dir: Path) -> None:
    config, weights = load(glassllm_dir, torch.float16, META)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == config.tensors()
    assert list(weights) == list(config.tensors())
    assert all(tensor.is_meta and tensor.dtype == torch.float16 for tensor in weights.values())


@pytest.mark.parametrize("device", [torch.device("cpu"), META])
def test_a_tensor_that_cannot_be_read_is_named_with_its_file(model: Path, device: torch.device) -> None:
    store_in_6_bits(model / "model.safetensors", "model.layers.2.input_layernorm.weight")
    named = r"layers\.2\.input_layernorm\.weight of .*model\.safetensors cannot be brought to (cpu|meta) as torch"
    with pytest.raises(ConfigError, match=named) as caught:
        load(model, torch.float32, device)
    assert caught.value.message.isprintable()


def store_in_6_bits(path: Path, wrong: str) -> None:
    """A dtype of the format that torch has no name for."""
    header, data = {}, b""
    for name, tensor in load_file(path).items():
        raw = tensor.numpy().tobytes()[: tensor.numel() * 6 // 8 if name == wrong else None]
        dtype = "F6_E2M3" if name == wrong else "F32"
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_progress_is_said_when_it_has_been_long_and_is_not_over() -> None:
    progress = Progress(5_000_000_000, now=100.0)
    assert progress.add(1_000_000_000, 100.0 + REPORT_S - 0.1) is None
    assert progress.add(1_000_000_000, 107.0) == "weights: 2.0 of 5.0 GB in 7 s"
    assert progress.add(1_000_000_000, 107.0 + REPORT_S - 0.1) is None
    assert progress.add(500_000_000, 131.4) == "weights: 3.5 of 5.0 GB in 31 s"
    assert progress.add(1_500_000_000, 150.0) is None  # done: whoever loads says so


def test_progress_is_logged(
    glassllm_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights_module, "REPORT_S", 0.0)
    with caplog.at_level(logging.INFO, "bifolio.replicas.weights"):
        tensors = load(glassllm_dir, torch.float32)[1]
    assert len(caplog.messages) == len(tensors) - 1
    assert caplog.messages[0].startswith("weights: 0.0 of 0.0 GB in ")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'; allowed is 'LlamaForCausalLM' or 'Mistral"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, r"q_proj\.bias is missing"),
        ({"mlp_bias": True}, r"gate_proj\.bias is missing"),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}, r"q_norm\.weight is missing"),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": None}, "no 'head_dim'"),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": None}, "no 'num_key_value_heads'"),
        ({"rms_norm_eps": None}, "no 'rms_norm_eps'"),
        ({"head_dim": 16}, "head_dim is 16"),
        ({"num_key_value_heads": 3}, "4 heads; allowed is a multiple of 3"),
        ({"num_hidden_layers": 5}, r"layers\.4\.input_layernorm\.weight is missing.*and 4 more"),
        ({"num_hidden_layers": 3}, r"layers\.3\..* is not part of it"),
        ({"intermediate_size": 340}, r"is \[341, 128\], expected \[340, 128\]"),
        ({"quantization_config": {"quant_method": "gptq"}}, "has quantization_config, which this engine does not"),
        ({"num_local_experts": 8}, "has num_local_experts"),
        ({"final_logit_softcapping": 30.0}, "has final_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed is 1.0"),
        ({"no_rope_layers": [1, 1, 0, 1]}, "no_rope_layers in a LlamaForCausalLM"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types do not fit a sliding_window of None"),
        ({"layer_types": ["linear_attention"] * 4}, "layer type is 'linear_attention'"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "number of layer_types is 1"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4}, "sliding_window of None"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 4}, "sliding_window of 4096"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window is 0; allowed is a whole number from 1",
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "1 entries; allowed is one for each of 4"),
    ],
)
def test_a_directory_that_does_not_fit_is_refused(model: Path, changes: dict[str, object], named: str) -> None:
    edit(model / "config.json", **changes)
    with pytest.raises(ConfigError, match=named):
        load(model, torch.float32)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'; allowed are 'default', 'linear'.*chunked or resumed"),
        ({"type": "longrope", "short_factor": [1.0]}, "'longrope'; allowed are .*, because"),
        ({"rope_type": "su"}, "'su'; allowed are 'default', 'linear', 'llama3' and 'yarn'$"),
        ({"rope_type": "linear"}, "factor of the rope scaling is None"),
        ({"rope_type": "linear", "factor": -2.0}, "factor of the rope scaling is -2.0; allowed is a number from 1 to"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor of the rope scaling is None"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "low_freq_factor is 4.0; allowed is less than high_freq_factor, 4.0",
        ),
        ({"rope_type": "default", "mrope_section": [1, 2, 3]}, "'default' with mrope_section, which this engine"),
        ({"full_attention": {"rope_type": "default"}}, r"differ by layer \(full_attention\)"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
    ],
)
def test_rope_that_is_not_computed_is_refused(model: Path, rope: dict[str, object], named: str) -> None:
    edit(model / "config.json", rope_scaling=rope, rope_parameters=None)
    with pytest.raises(ConfigError, match=named):
        model_config(model)


def test_two_rope_scalings_that_differ_are_refused(model: Path) -> None:
    edit(model / "config.json", rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 1e4})
    with pytest.raises(ConfigError, match="rope_parameters and rope_scaling, which differ"):
        model_config(model)


@pytest.mark.parametrize("outside", [True, False])
def test_the_length_of_the_pre_training_is_the_models_where_nothing_says_it(model: Path, outside: bool) -> None:
    changes = {"original_max_position_embeddings": 16} if outside else {}
    edit(model / "config.json", rope_scaling={"type": "yarn", "factor": 4.0}, rope_parameters=None, **changes)
    config = model_config(model)
    assert config.rope_scaling == Yarn(4.0, 16 if outside else 128, yarn_attention_factor(4.0))
    assert config.max_positions == (128 if outside else 512)  # as far as YaRN stretches the pre-training


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
