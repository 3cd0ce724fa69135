"""`bifolio verify` as who has no GPU runs it: Triton's kernels in the interpreter, decode steps that are replayed.

Of glassllm only the first layer: the interpreter takes half a second for a step of all of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from bifolio.cluster.app import replica_spec
from bifolio.cluster.config import load, resolved
from bifolio.kernels import StaticPlan
from bifolio.replicas.differences import Way
from bifolio.replicas.verify import Verifier

COMPUTING = {"engine.device": "cpu", "engine.kernels": "triton", "model.dtype": "float32", "engine.max_sequences": 2}


@pytest.fixture(scope="module")
def one_layer(glassllm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("one-layer")
    for file in glassllm_dir.glob("*.json"):
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    weights = load_file(glassllm_dir / "model.safetensors")
    kept = {name: w for name, w in weights.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    return model


def test_every_way_is_in_the_table(one_layer: Path) -> None:
    asked = ("--device", "cpu", "--kernels", "triton", "--dtype", "float32", "--model", str(one_layer))
    command = [sys.executable, "-P", "-m", "bifolio.cluster.cli", "verify", *asked]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "float32, triton kernels, exact off, threads 1; 4 prompts of 5 to 64 tokens, 3 tokens each" in done.stdout
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    rows = {name: cells for name, *cells in lines}
    assert list(rows)[-2:] == ["float32 on the CPU", "by transformers"]
    for name in ("in chunks of 32", "in chunks of 256", "in a batch of 4", "split", "float32 on the CPU"):
        compared, _, _, flips, largest, _ = rows[name]
        assert (compared, flips) == ("12", "0.00%")
        assert float(largest) < 1e-4
    assert rows["resumed"][0] == "8"
    assert rows["graph"] == ["8", "8", "0", "0.00%", "0", "0"]  # two of each answer: the first is the prompt's
    assert float(rows["float32 on the CPU"][4]) > 0


def test_a_replay_that_does_not_write_its_keys_is_found(one_layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it should have written is not there: the eager step has written elsewhere."""
    fill = StaticPlan.fill

    def elsewhere(static: StaticPlan, size: int, tokens: Any, positions: Any, slots: Any, *rest: Any) -> None:
        fill(static, size, tokens, positions, np.full_like(slots, -1), *rest)

    monkeypatch.setattr(StaticPlan, "fill", elsewhere)
    with Verifier(replica_spec(resolved(load(None, COMPUTING)), one_layer, ("", ""))) as verifier:
        answers = [verifier.answer(prompt, 3) for prompt in ([5, 300, 41], [702, 11, 66])]
        way = verifier._replayed(Way("graph", "eager"), answers, lambda: None)
    assert (way.compared, way.equal) == (4, 0)
    assert way.largest > 0.01
