"""Sends a call to the decode replica its placement names, or fails it at once so that the ingress can place it again.

Serve pickles a router by value with everything of its own module that it touches, so this file holds nothing else
(an exception class defined here would be another class in the ingress, and never caught).

It overrides the private `_choose_replica_for_request`, not the public `choose_replicas`: calls made under one parent
request share its internal_request_id, the base class indexes waiting calls by that id, and the second call (a resume
after a failure) is then never matched: the router spins without suspending and blocks the ingress' event loop. Ray is
pinned for this, and a test resumes under one request.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ray.serve.request_router import RequestRouter

from bifolio.protos.errors import Draining, ReplicaGone


class PlacementRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """An own lookup that never queues: waiting belongs to the KV manager's admission."""

    def initialize_state(self, **kwargs: Any) -> None:
        self.seen: set[str] = set()

    async def _choose_replica_for_request(self, pending_request: Any, *, is_retry: bool = False) -> Any:
        wanted = pending_request.args[0].decode.replica
        patience_s = 2.0  # for a replica that registered with the KV manager before Serve's long poll announced it
        while True:
            live = {replica.replica_id.unique_id: replica for replica in self.curr_replicas.values()}
            self.seen |= live.keys()
            age = time.time() - pending_request.created_at
            if wanted in live and age < patience_s:
                if is_retry:  # it could not be reached
                    await asyncio.sleep(0.05)
                return live[wanted]
            if wanted in self.seen:
                raise Draining(f"decode replica {wanted} has left, or is leaving: Serve no longer offers it", wanted)
            if age >= patience_s:
                raise ReplicaGone(f"decode replica {wanted} is not known to the router yet", wanted)
            await asyncio.sleep(0.02)

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        raise AssertionError("unreachable: every choice goes through _choose_replica_for_request")
