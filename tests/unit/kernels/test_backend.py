"""Which kernels compute: chosen once, said once, forced by name, and torch where none were built."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from backends import NATIVE

from bifolio.kernels import Backend, library, linear, pack_linear, use, using


def test_auto_is_the_best_that_the_cpu_runs() -> None:
    with using("auto") as chosen:
        assert chosen == library.best() == NATIVE[0]


@pytest.mark.parametrize("backend", [*NATIVE, "torch"])
def test_any_other_can_be_forced(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bifolio.kernels"), using(backend) as chosen:
        assert chosen == backend
    assert [backend in message for message in caplog.messages] == [True]


def test_without_libraries_torch_computes_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    with using("auto") as chosen:
        assert chosen == "torch"
        weights = pack_linear(torch.eye(3))
        assert torch.equal(linear(torch.ones(2, 3), weights), torch.ones(2, 3))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "torch" in record.message
    assert "install g++" in record.message
    assert "\n" not in record.message


def test_a_native_backend_that_was_not_built_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    with pytest.raises(ValueError, match="none built"):
        use("avx2")


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^backend: 'sse'; allowed: auto, avx512, avx2, generic, triton, torch"):
        use("sse")  # type: ignore[arg-type]


def test_after_the_context_computes_what_computed_before() -> None:
    with using("torch"):
        with using(NATIVE[-1]):
            pass
        assert pack_linear(torch.eye(2)).native is None
