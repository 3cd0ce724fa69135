"""Clusters for the tests in this folder: each starts when a test first asks for it and serves until the last test.

Their output lies in pytest's temporary directory and is shown when a cluster does not start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cluster_kit import settle

from bifolio.cluster.spawn import SpawnedCluster, spawned
from bifolio.cluster.tokenizer import Tokenizer
from bifolio.protos.errors import Unavailable

ONE_AND_ONE = """\
model:
  source: {model}
  served_name: smollm2
  dtype: bfloat16
engine:
  kv_memory: 45056 tokens   # room for 20 prompts of 2,000 tokens at once
kv:
  split: always
  prefill_queue_s: 600      # all of them at once at the prefill replica
"""

TWO_AND_TWO = """\
model:
  source: {model}
  served_name: glassllm
engine:
  exact: true
  block_size: 8             # many blocks and several chunks, although the context is 128 tokens
  kv_memory: 2048 tokens
  max_batched_tokens: 32
  max_sequences: 8
kv:
  local_blocks: 0           # split, as long as there is a prefill replica
pools:
  prefill: {{replicas: 2}}
  decode: {{replicas: 2}}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts clusters of its own comes before the clusters that stay: on two cores they would slow it."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.parent == here and item.path.name != "test_signals.py")


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpawnedCluster]:
    """SmolLM2 in bfloat16: one prefill and one decode replica."""
    file = tmp_path_factory.mktemp("yaml") / "cluster.yaml"
    file.write_text(ONE_AND_ONE.format(model=smollm2_gguf))
    with _running([str(file)], tmp_path_factory, prefill=1, decode=1) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def two_and_two(glassllm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpawnedCluster]:
    """glassllm in exact mode, from a YAML file: two prefill and two decode replicas."""
    file = tmp_path_factory.mktemp("yaml") / "cluster.yaml"
    file.write_text(TWO_AND_TWO.format(model=glassllm_dir))
    with _running([str(file)], tmp_path_factory, prefill=2, decode=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def single_pool(glassllm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpawnedCluster]:
    """glassllm in exact mode: one decode replica that prefills for itself."""
    arguments = ["--model", str(glassllm_dir), "--served-model-name", "glassllm", "--exact"]
    with _running([*arguments, "--prefill", "0"], tmp_path_factory, prefill=0, decode=1) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_gguf)


@contextlib.contextmanager
def _running(
    arguments: Sequence[str], directories: pytest.TempPathFactory, *, prefill: int, decode: int
) -> Iterator[SpawnedCluster]:
    output = directories.mktemp("cluster") / "output.txt"
    with output.open("wb") as file, contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(spawned(arguments, file))
        except Unavailable as error:
            pytest.fail(f"{error.message}\n{output.read_text()}")
        settle(cluster, prefill, decode)
        yield cluster
