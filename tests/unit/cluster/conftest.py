"""A model as the doors see it: SmolLM2's tokenizer and chat template, with a context of 128 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from bifolio.cluster.query import Served, template_of
from bifolio.cluster.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def served(smollm2_gguf: Path) -> Served:
    tokenizer = Tokenizer.load(smollm2_gguf)
    template = template_of(tokenizer)
    assert template is not None
    return Served("smollm2", tokenizer, template, 128, tokenizer.vocab_size)
