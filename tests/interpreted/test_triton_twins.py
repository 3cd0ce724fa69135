"""Every public kernel exists in Triton and in torch, under one name and with one signature; which computes is said."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys

import pytest
import torch

from bifolio.kernels import backend, torch_twins, triton_twins, use, using


def test_twins_have_the_same_names_and_signatures() -> None:
    assert torch_twins.__all__ == triton_twins.__all__
    for name in torch_twins.__all__:
        theirs, ours = (inspect.signature(getattr(module, name)) for module in (torch_twins, triton_twins))
        assert list(ours.parameters.values()) == list(theirs.parameters.values()), name


def test_triton_is_chosen_by_name_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bifolio.kernels"), using("triton") as chosen:
        assert chosen == "triton"
        assert backend.twins_for(torch.zeros(1)) is triton_twins
        assert backend.native_for(torch.zeros(1)) is None
    assert caplog.messages == ["kernels: triton, interpreted, as asked"]


def test_tensors_of_a_cpu_are_not_tritons_unless_it_was_asked_for() -> None:
    with using("torch"):
        assert backend.twins_for(torch.zeros(1)) is torch_twins
    with using("auto"):
        assert backend.twins_for(torch.zeros(1)) is torch_twins


def test_without_a_gpu_and_the_interpreter_the_error_says_what_to_do() -> None:
    code = "from bifolio.kernels import use; use('triton')"
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "ValueError: triton: there is no GPU; allowed with one, or with TRITON_INTERPRET=1" in found.stderr


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, package: str | None = None) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(backend.importlib, "import_module", missing)


@pytest.mark.usefixtures("without_triton")
def test_where_triton_is_not_installed_the_error_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"triton: not installed; install bifolio\[gpu\]"):
        use("triton")


@pytest.mark.usefixtures("without_triton")
def test_a_gpu_without_triton_is_a_warning_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with using("auto") as chosen:
        assert chosen != "triton"
        assert backend.twins_for(torch.empty(1, device="meta")) is torch_twins
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_with_a_gpu_its_tensors_are_tritons_and_those_of_the_cpu_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_cpu, elsewhere = torch.zeros(1), torch.empty(1, device="meta")
    with using("auto"):
        assert backend.twins_for(elsewhere) is triton_twins
        assert backend.native_for(elsewhere) is None
        assert backend.twins_for(on_cpu) is torch_twins
        assert backend.native_for(on_cpu) is not None


def test_another_module_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, package: str | None = None) -> None:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(backend.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        use("triton")
