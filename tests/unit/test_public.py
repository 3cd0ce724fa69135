"""The public surface: what users and other layers may rely on. A change here is a change for them."""

import inspect

import bifolio.kernels
from bifolio.cluster import cli
from bifolio.cluster.client import Client
from bifolio.protos import errors, inference_pb2


def test_kernels():
    signatures = {
        name: list(inspect.signature(getattr(bifolio.kernels, name)).parameters)
        for name in bifolio.kernels.__all__
        if inspect.isfunction(getattr(bifolio.kernels, name))
    }
    assert signatures == {
        "paged_attention": [
            *("q", "kv", "plan", "causal", "window", "softcap", "sinks", "k_scale", "v_scale", "scale", "out", "lse"),
            *("exact", "layout"),
        ],
        "decoder_layer": ["x", "residual", "weights", "step", "kv", "layout"],
        "decoder_layers": ["x", "residual", "weights", "steps", "kv", "layout"],
        "kv_layout": ["dtype", "head_dim", "block_size", "device_type"],
        "linear": ["x", "weights", "out_dtype"],
        "pack_linear": ["weight", "bias", "quantization", "exact"],
        "plan": ["cu_q", "seq_lens", "block_table", "device", "batch_invariant"],
        "rms_norm": ["x", "residual", "weight", "eps"],
        "rope_and_write": ["q", "k", "v", "cos", "sin", "positions", "slots", "kv", "layout"],
        "rope_tables": ["frequencies", "max_positions", "scale"],
        "runs_triton": ["device"],
        "sample": ["logits", "temperature", "top_p", "top_k", "min_p", "uniforms"],
        "self_check": ["linears", "heads", "kv_heads", "head_dim", "windows"],
        "silu_mul": ["gate_up", "exact"],
        "use": ["backend"],
        "using": ["backend"],
    }
    assert sorted(set(bifolio.kernels.__all__) - signatures.keys()) == [
        *(
            "AttentionPlan",
            "Backend",
            "DecoderLayers",
            "LayerWeights",
            "Layout",
            "LinearWeights",
            "Quantization",
            "StaticPlan",
            "Step",
        ),
    ]


def test_the_grpc_service():
    service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    assert service.full_name == "bifolio.v1.Inference"
    assert [method.name for method in service.methods] == ["Generate", "Cancel", "ListModels"]


def test_the_client():
    methods = [name for name, _ in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")]
    assert methods == ["cancel", "close", "generate", "models"]
    assert list(inspect.signature(Client.generate).parameters)[1:] == [
        *("prompt", "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "seed", "stop", "stop_token_ids"),
        *("ignore_eos", "logprobs", "prompt_logprobs", "n", "request_id", "cache_salt", "priority", "user", "timeout"),
    ]


def test_the_commands():
    commands = next(action.choices for action in cli._parser()._actions if action.choices)
    assert sorted(commands) == ["cancel", "config", "demo", "drain", "generate", "models", "serve", "status", "verify"]


def test_every_error_has_a_status():
    tree = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.BifolioError)]
    assert len(tree) == 17
    for error in tree:
        code, status, _ = errors.status_of(error.__new__(error))
        assert (code, status) != ("INTERNAL", 500) or error is errors.BifolioError, error
