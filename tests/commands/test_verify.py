"""`bifolio verify` on a small real model: what it prints, and that it can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

# Where transformers is not installed: that takes less time
ALONE = """
import sys
sys.modules["transformers"] = None
from bifolio.cluster.cli import main
sys.exit(main(["verify", *sys.argv[1:]]))
"""
# As if the last bits of a product depended on its rows, and the self-check had missed it
CROOKED = """
import sys
sys.modules["transformers"] = None
from bifolio.cluster.cli import main
import bifolio.kernels.torch_exact as torch_exact
import bifolio.replicas.core as core
true = torch_exact.linear
torch_exact.linear = lambda x, weight, bias: true(x, weight, bias) * (1 + 1e-6 * (len(x) % 2))
core.self_check = lambda *shapes: "00000000"
sys.exit(main(["verify", *sys.argv[1:]]))
"""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True, timeout=120)


def _rows(output: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    return {name: cells for name, *cells in lines}


def test_exact_mode_is_verified_in_every_way(glassllm_dir: Path) -> None:
    done = _run("-m", "bifolio.cluster.cli", "verify", "--model", str(glassllm_dir))
    assert done.returncode == 0, done.stderr
    assert "float32, exact on, threads 1; 8 prompts of 5 to 112 tokens, 16 tokens each" in done.stdout
    rows = _rows(done.stdout)
    for way in ("in chunks of 32", "in chunks of 256", "in a batch of 8", "cached", "split", "split, copied"):
        assert rows[way] == ["128", "128", "0", "0.00%", "0", "0"]
    assert rows["resumed"] == ["64", "64", "0", "0.00%", "0", "0"]
    assert rows["by transformers"] == ["128", "", "0", "0.00%", "", ""]
    assert len(rows) == 8  # no steps are recorded on a CPU, and it is its float32 that computes
    assert "0 differences in 832 token comparisons" in done.stdout


def test_in_bfloat16_flips_are_counted_and_are_no_failure(glassllm_dir: Path) -> None:
    bfloat16 = ("--dtype", "bfloat16", "--kernels", "torch")
    done = _run("-c", ALONE, "--model", str(glassllm_dir), *bfloat16)
    assert done.returncode == 0, done.stderr
    assert "bfloat16, exact off" in done.stdout
    assert re.fullmatch(r"\d+\.\d\d%", _rows(done.stdout)["in a batch of 8"][3])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--dtype", "bfloat16", "--quantization", "int8", "--threads", "2"), "bfloat16 with int8 weights, exact on"),
        (("--kernels", "torch"), "float32, exact on, threads 1"),
    ],
)
def test_the_native_kernels_are_exact_in_every_dtype_and_torch_in_float32(
    glassllm_dir: Path, options: tuple[str, ...], says: str
) -> None:
    done = _run("-c", ALONE, "--model", str(glassllm_dir), "--exact", *options)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert "0 differences in 832 token comparisons" in done.stdout


def test_a_difference_is_found_and_is_the_exit_status(glassllm_dir: Path) -> None:
    done = _run("-c", CROOKED, "--model", str(glassllm_dir), "--kernels", "torch")
    assert done.returncode == 1
    _, equal, _, _, largest, mean = _rows(done.stdout)["in a batch of 8"]
    assert int(equal) < 128
    assert 0 < float(mean) < float(largest) < 1e-3
    assert not re.search(r"^0 differences", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(("arguments", "message"), [(["--model", "nope"], "there is no model 'nope'")])
def test_a_mistake_is_one_line(arguments: list[str], message: str) -> None:
    done = _run("-m", "bifolio.cluster.cli", "verify", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_cache_too_small_to_verify_is_refused(glassllm_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text("engine: {block_size: 256, kv_memory: 1024 tokens, max_batched_tokens: 512}")
    done = _run("-m", "bifolio.cluster.cli", "verify", str(file), "--model", str(glassllm_dir))
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "bifolio: engine.kv_memory is 1024 tokens; needed to verify: 2048 tokens, a block for each of 8 sequences"
    )
