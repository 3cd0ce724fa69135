"""The native kernels without the Python around them: their calls recorded and made again, or timed where they happen.

Both put themselves in the way of `Native._call`, through which every call goes.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import measure
import torch

from bifolio.kernels import use
from bifolio.kernels.backend import native_for
from bifolio.kernels.bindings import Native


def begin(parser: ArgumentParser, args: Namespace, *, exact: bool = False) -> Native:
    """As a replica that has `args.threads` and the native kernels of `args.kernels`. Ends the script where there are
    none."""
    measure.become_a_replica(args.threads, exact=exact)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    try:
        if use(args.kernels) == "torch" or (native := native_for(torch.empty(0))) is None:
            raise ValueError("there are no native kernels to measure; make native builds them")
    except ValueError as error:
        parser.error(str(error))
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
