"""The model against transformers: random weights in an odd shape, and a small real model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bifolio.replicas.batch import Row, build_batch
from bifolio.replicas.kv_cache import KvCache
from bifolio.replicas.llama import Llama, LlamaConfig
from bifolio.replicas.weights import load

TOKENS = torch.randint(0, 211, (3, 60), generator=torch.Generator().manual_seed(4)).tolist()
BLOCK = 8


@pytest.fixture(scope="module")
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of importing a third party
        import transformers
    return transformers


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def odd(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, transformers: Any
) -> tuple[Path, Any]:
    """(directory, transformers model): 5 query heads, 1 KV head, of 40; several files when untied."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=211,
        hidden_size=120,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=40,
        max_position_embeddings=100,
        rms_norm_eps=3e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=request.param,
        initializer_range=0.2,
        eos_token_id=[3, 7],
    )
    model = transformers.LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("odd")
    model.save_pretrained(path, max_shard_size="200KB" if not request.param else "1GB")
    return path, model


def ours(path: Path, dtype: torch.dtype = torch.float32) -> Llama:
    return Llama(*load(path, dtype))


def cache_for(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> KvCache:
    cache = KvCache(40, config.layers, config.kv_heads, BLOCK, config.head_dim, dtype)
    for i in range(config.layers):
        cache.layer(i).fill_(torch.nan)  # what is not written may not be read
    return cache


def blocks(sequence: int) -> list[int]:
    order = (torch.randperm(39, generator=torch.Generator().manual_seed(9)) + 1).tolist()
    return [int(b) for b in order[sequence * 13 : sequence * 13 + 13]]


def run(model: Llama, cache: KvCache, *rows: Row) -> Tensor:
    batch = build_batch(rows, BLOCK)
    return model.logits(model.forward(batch, cache)[batch.logit_rows])


def theirs(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


def test_logits_at_every_position_are_those_of_transformers(odd: tuple[Path, Any]) -> None:
    path, reference = odd
    model = ours(path)
    hidden = model.forward(build_batch([Row(TOKENS[0], 0, blocks(0))], BLOCK), cache_for(model.config))
    torch.testing.assert_close(model.logits(hidden), theirs(reference, TOKENS[0]), rtol=0, atol=1e-4)


def test_chunks_and_single_tokens_equal_the_whole_in_any_company(odd: tuple[Path, Any]) -> None:
    path, reference = odd
    model = ours(path)
    cache = cache_for(model.config)
    run(model, cache, Row(TOKENS[0][:24], 0, blocks(0), False), Row(TOKENS[1][:8], 0, blocks(1), False))
    mixed = run(
        model,
        cache,
        Row(TOKENS[1][8:30], 8, blocks(1)),
        Row(TOKENS[0][24:25], 24, blocks(0)),
        Row(TOKENS[2][:60], 0, blocks(2)),
    )
    want = torch.stack(
        [theirs(reference, TOKENS[1])[29], theirs(reference, TOKENS[0])[24], theirs(reference, TOKENS[2])[59]]
    )
    torch.testing.assert_close(mixed, want, rtol=0, atol=1e-4)
    for i in range(25, 60):
        last = run(model, cache, Row([TOKENS[0][i]], i, blocks(0)))
    torch.testing.assert_close(last[0], theirs(reference, TOKENS[0])[59], rtol=0, atol=1e-4)


def test_a_step_without_wanted_logits_gives_none(odd: tuple[Path, Any]) -> None:
    model = ours(odd[0])
    assert run(model, cache_for(model.config), Row([1, 2], 0, blocks(0), False)).shape == (0, 211)


def test_building_the_model_takes_the_weights_out_of_the_dictionary(odd: tuple[Path, Any]) -> None:
    config, weights = load(odd[0], torch.float32)
    Llama(config, weights)
    assert not weights


def test_bfloat16_stays_close_to_float32(glassllm_dir: Path) -> None:
    exact, rounded = ours(glassllm_dir), ours(glassllm_dir, torch.bfloat16)
    want = run(exact, cache_for(exact.config), Row(TOKENS[0], 0, blocks(0)))
    got = run(rounded, cache_for(exact.config, torch.bfloat16), Row(TOKENS[0], 0, blocks(0)))
    assert got.dtype == torch.float32
    assert (got - want).norm() / want.norm() < 0.03


def test_a_real_model_writes_what_transformers_writes(glassllm_dir: Path, transformers: Any) -> None:
    reference = transformers.LlamaForCausalLM.from_pretrained(glassllm_dir, dtype=torch.float32)
    prompt = [2, *TOKENS[0][:20]]
    out = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=40,
        min_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = ours(glassllm_dir)
    cache = cache_for(model.config)
    tokens = list(prompt)
    tokens.append(int(run(model, cache, Row(prompt, 0, blocks(0))).argmax()))
    while len(tokens) < len(prompt) + 40:
        tokens.append(int(run(model, cache, Row(tokens[-1:], len(tokens) - 1, blocks(0))).argmax()))
    assert tokens == out[0].tolist()
