"""Triton's kernels in its interpreter: on the CPU, in numpy, with a check of every 32-bit sum and product."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from triton.runtime.interpreter import interpreter_builder

from bifolio.kernels import using


@pytest.fixture(autouse=True)
def triton() -> Iterator[None]:
    with using("triton"):
        yield


@pytest.fixture(autouse=True)
def overflow_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address computed in 32 bits wraps silently otherwise, here as on a GPU."""
    checked = dataclasses.replace(interpreter_builder.options, debug=True, sanitize_overflow=True)
    monkeypatch.setattr(interpreter_builder, "options", checked)
