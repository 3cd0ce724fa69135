"""The native kernels without the Python around them: their calls recorded and made again, or timed where they happen.

Both put themselves in the way of `Native._call`, through which every call goes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from bifolio.kernels import Backend, use
from bifolio.kernels.backend import native_for
from bifolio.kernels.bindings import Native


def chosen(backend: Backend) -> Native:
    """The native kernels, chosen for this process. Raises ValueError where torch would compute."""
    if use(backend) == "torch" or (native := native_for(torch.empty(0))) is None:
        raise ValueError("there are no native kernels to measure; make native builds them")
    return native


class Tape:
    """The native calls that `made` makes, which are made again with the same arguments: what is left is a loop over C
    functions. `made` returns every tensor that it allocated for them and that nobody else holds."""

    def __init__(self, native: Native, made: Callable[[], object]) -> None:
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

        def record(name: str, *arguments: Any) -> None:
            self._calls.append((getattr(native, f"_{name}"), arguments))

        with patch.object(native, "_call", record):
            self._alive = made, made()
        assert self._calls, "nothing native was called"

    def __call__(self) -> None:
        for function, arguments in self._calls:
            function(*arguments)


@contextmanager
def timed(native: Native) -> Iterator[dict[str, float]]:
    """The seconds spent in each of the library's functions while the context lasts."""
    seconds: defaultdict[str, float] = defaultdict(float)
    call = native._call

    def measured(name: str, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = call(name, *arguments)
        seconds[name] += time.perf_counter() - began
        return result

    with patch.object(native, "_call", measured):
        yield seconds
