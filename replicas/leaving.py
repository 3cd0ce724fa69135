"""How a replica, of whatever role, leaves by itself: on SIGTERM to its process, or when it is asked to.

It only says so: Serve finds it unhealthy after three checks, gives it nothing new, lets what it has end, and starts
another one. Knows nothing about what it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray._private.worker as ray_worker

logger = logging.getLogger(__name__)


class Leaving:
    """`begin` is called once, when it begins, in whatever thread that is."""

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self.started = False
        self._begin = begin

    def leave(self) -> None:
        if not self.started:
            self.started = True
            logger.info("leaving: nothing new is begun, what is open may end")
            self._begin()

    def check(self) -> None:
        """For Serve's check of health: raises once the replica leaves."""
        if self.started:
            raise RuntimeError("this replica is leaving")


def on_sigterm(leave: Callable[[], None]) -> None:
    """The first SIGTERM to this Ray worker calls `leave`, in its main thread; the second ends it at once.

    Ray's own handler would end it at the first. Only the main thread may set another one, and no code of ours runs
    there: so this takes the place of what the handler calls. Ray is pinned, and a test ends replicas so.
    """
    end, terms = ray_worker.raise_sys_exit_with_custom_error_message, 0

    def take(*args: Any, **named: Any) -> None:
        nonlocal terms
        terms += 1
        if terms > 1:
            end(*args, **named)
        leave()

    ray_worker.raise_sys_exit_with_custom_error_message = take
