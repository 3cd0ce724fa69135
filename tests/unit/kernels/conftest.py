from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from backends import BACKENDS

from bifolio.kernels import using


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """What computes in the test. `parametrize(..., indirect=["backend"])` takes other ones."""
    with using(request.param) as name:
        yield name


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread, because other tests run beside these; `parametrize("threads", [..], indirect=True)` takes more."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield torch.get_num_threads()
    torch.set_num_threads(before)
