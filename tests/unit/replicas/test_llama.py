"""What the model promises besides its logits, which `test_families.py` compares; and a small real model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import NATIVE
from families import BLOCK, logits_in_steps, tokens

from bifolio.kernels import Backend, using
from bifolio.replicas.batch import Row, build_batch
from bifolio.replicas.kv_cache import KvCache
from bifolio.replicas.llama import Llama
from bifolio.replicas.weights import load

TOKENS = tokens(60)[0]


def ours(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Llama:
    return Llama(*load(path, dtype), **options)


def test_a_step_without_wanted_logits_gives_none(glassllm_dir: Path) -> None:
    model = ours(glassllm_dir)
    c = model.config
    cache = KvCache(1, c.layers, c.kv_heads, BLOCK, c.head_dim, torch.float32)
    batch = build_batch([Row([1, 2], 0, [1], want_logits=False)], BLOCK)
    assert model.logits(model.forward(batch, cache)[batch.logit_rows]).shape == (0, c.vocab_size)


def test_building_the_model_takes_the_weights_out_of_the_dictionary(glassllm_dir: Path) -> None:
    config, weights = load(glassllm_dir, torch.float32)
    Llama(config, weights)
    assert not weights


def test_bfloat16_stays_close_to_float32(glassllm_dir: Path) -> None:
    want = logits_in_steps(ours(glassllm_dir), [TOKENS], [[(0, 60)]])[0]
    got = logits_in_steps(ours(glassllm_dir, torch.bfloat16), [TOKENS], [[(0, 60)]])[0]
    assert got.dtype == torch.float32
    assert (got - want).norm() / want.norm() < 0.03


@pytest.mark.parametrize("backend", [NATIVE[0], "torch"])
def test_int8_weights_stay_close_to_float32(glassllm_dir: Path, backend: Backend) -> None:
    want = logits_in_steps(ours(glassllm_dir), [TOKENS], [[(0, 60)]])[0]
    with using(backend):
        got = logits_in_steps(ours(glassllm_dir, quantization="int8"), [TOKENS], [[(0, 60)]])[0]
    assert (got - want).norm() / want.norm() < 0.03
    assert (got.argmax(-1) == want.argmax(-1)).sum() >= 57


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_logits_have_the_same_bits_in_chunks_and_in_a_batch(glassllm_dir: Path, dtype: torch.dtype) -> None:
    model = ours(glassllm_dir, dtype, quantization="int8", exact=True)
    alone = logits_in_steps(model, [TOKENS], [[(0, 60)]])[0]
    company = [[(1, 33), (0, 30)], [(2, 20), (0, 1)], [(0, 29)]]
    assert torch.equal(logits_in_steps(model, [TOKENS, TOKENS[7:40], TOKENS[::3]], company)[0], alone)
    for cuts in ((1, 7, 32, 20), (1,) * 60):
        assert torch.equal(logits_in_steps(model, [TOKENS], [[(0, n)] for n in cuts])[0], alone)


def test_a_real_model_writes_what_transformers_writes(glassllm_dir: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of importing a third party
        import transformers
    model = transformers.LlamaForCausalLM.from_pretrained(glassllm_dir, dtype=torch.float32)
    prompt = [2, *TOKENS[:20]]
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=40,
        min_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()
    logits = logits_in_steps(ours(glassllm_dir), [out], [[(0, len(prompt))], *[[(0, 1)]] * 39])[0]
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == out[len(prompt) :]
