"""The prefill deployment: prompts in over the Prefill stream, KV blocks and the last logits out.

A thin shell: `jobs.py` and the engine do the work. Serve sees none of the streams, so the replica drains them itself.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os

import ray
from ray import serve

from bifolio.kv_manager.channels import listening
from bifolio.kv_manager.logs import log_to_stderr
from bifolio.kv_manager.tls import Tls
from bifolio.kv_manager.transfer import PrefillServer
from bifolio.protos.messages import Generation, ReplicaId

from .beat import Beat
from .core import Core, ReplicaSpec
from .jobs import Jobs
from .leaving import Leaving, on_sigterm

logger = logging.getLogger(__name__)

PLACED_S = 1.0  # for prompts that were placed here before the manager knew that this replica leaves


class PrefillReplica:
    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        log_to_stderr()
        replica = ReplicaId(serve.get_replica_context().replica_id.unique_id)
        self._core = Core(spec, replica, "prefill")
        self._beat = Beat(self._core, spec)
        self._leaving = Leaving(self._beat.drain)
        on_sigterm(self._leaving.leave)
        self._jobs = Jobs(self._core, self._beat.close, self._beat.ask_if_due)
        self._core.start(self._jobs.deliver)
        host = listening(spec.listen, ray.util.get_node_ip_address())
        if spec.listen == "node" and spec.kv.tls is None:
            logger.warning("blocks and prompts leave this machine in the clear: set kv.tls")
        self._server = PrefillServer(
            self._jobs,
            max_streams=spec.engine.max_sequences,
            host=host,
            stall_s=spec.kv.stall_s,
            tls=Tls.of(spec.kv.tls),
        )
        await self._beat.start(self._core.info(f"{host}:{self._server.start()}"), self, self._leaving.leave)
        gc.freeze()  # what is loaded stays: looking through it again holds up streams for 200 ms

    def revoke(self, generation: Generation) -> None:
        self._jobs.revoke(generation)

    def give_up(self, why: str) -> None:
        """Decode replicas hear nothing more of their prompts, and give them up."""

    def stalled_s(self) -> float:
        return self._server.stalled_s()

    async def check_health(self) -> None:
        self._core.check()
        self._beat.check()
        self._leaving.check()

    async def __del__(self) -> None:
        """Serve calls this when the replica leaves: its streams end first, unless it stands still."""
        self._beat.drain()
        await asyncio.sleep(PLACED_S)
        self._jobs.draining = True
        while self._server.active and not self._beat.stalled:
            await asyncio.sleep(0.02)
        if self._beat.stalled:
            await self._beat.stop()
            os._exit(1)
        await asyncio.to_thread(self._server.stop, 1.0)
        await self._beat.stop()
        await asyncio.to_thread(self._core.stop)
