"""The application on a Ray cluster that runs: what is decided and checked once there are nodes, what is deployed, and
the wait until it serves. Knows nothing about where the cluster came from or how it ends.

    ray.init(address=...)
    deploy(config, resolve(config.model.source), redis_url, print, listen="node")

Again with another configuration it changes what runs: pools grow and shrink, and replicas whose settings are others are
replaced one by one, while requests go on. The KV manager stays, with the settings that it began with. Heavy imports
wait until Ray's environment stands.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bifolio.protos.errors import ConfigError, Unavailable
from bifolio.replicas.host_memory import host_memory
from bifolio.replicas.kv_memory import ITEMSIZES, check_host, context_of
from bifolio.replicas.model_files import model_config

from .app import APPLICATION, MANAGER, SERVICER, build
from .config import ClusterConfig
from .devices import Node, describe, on_devices
from .watch import counted

if TYPE_CHECKING:
    from bifolio.replicas.core import Listen

LOOK_S = 0.5  # between two looks at what starts

Say = Callable[[str], None]


def deploy(config: ClusterConfig, model: Path, redis: str, say: Say, listen: Listen = "loopback") -> ClusterConfig:
    """Decide on devices, deploy, and say which replicas are there, until all are. Returns the configuration as decided.

    Replicas on several machines have to `listen` at their nodes' addresses. Raises ConfigError for what the cluster
    does not have, Unavailable if it does not come to serve.
    """
    import ray
    from ray import serve
    from ray.exceptions import RayError

    from bifolio.kv_manager.actor import connect, start

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # our own lines say what happens
    try:
        nodes = _nodes()
        config = on_devices(config, nodes)
        _check(config, model)
        say(describe(config, nodes))
        start(MANAGER, APPLICATION, config.kv, redis)
        serve.start(
            http_options={"host": config.http.host, "port": config.http.port},
            grpc_options={"port": config.grpc.port, "grpc_servicer_functions": [SERVICER]},
        )
        say(f"loading {config.model.source}")
        target = serve.RunTarget(build(config, model, listen), name=APPLICATION, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        _wait_until_running(config, say)
        for line in _caches(ray.get(connect(MANAGER, APPLICATION).snapshot.remote())["replicas"]):
            say(line)
    except (RayError, RuntimeError) as error:
        raise Unavailable(f"the cluster did not start: {error}") from error
    return config


def _check(config: ClusterConfig, model: Path) -> None:
    """Refuse here, now that the device is known, what replicas would refuse."""
    assert config.model.dtype is not None, "the configuration is resolved"
    shape, engine, itemsize = model_config(model), config.engine, ITEMSIZES[config.model.dtype]
    context_of(shape, engine, itemsize)
    if engine.device == "cpu":
        check_host(shape, engine, itemsize, sum(config.pools.wanted.values()), host_memory())
        if engine.kernels == "triton" and not os.environ.get("TRITON_INTERPRET"):
            raise ConfigError(
                "engine.kernels: triton: there is no GPU; allowed with one, or with TRITON_INTERPRET=1 in the "
                "environment, which is for tests: it is many times slower"
            )


def _caches(replicas: list[dict[str, Any]]) -> Iterator[str]:
    """How the KV caches came to their sizes: what the first replica of each role says, equal lines once."""
    roles: dict[str, list[str]] = {}
    for role in ("prefill", "decode"):
        for line in next((replica["cache"] for replica in replicas if replica["role"] == role), ()):
            roles.setdefault(line, []).append(role)
    yield from (f"KV cache, {' and '.join(who)}: {line}" for line, who in roles.items())


def _nodes() -> tuple[Node, ...]:
    """What the cluster has."""
    import ray

    return tuple(Node.of(node["Resources"], node["Labels"]) for node in ray.nodes() if node["Alive"])


def _wait_until_running(config: ClusterConfig, say: Say) -> None:
    from ray import serve

    wanted, before = config.pools.wanted, {"prefill": 0, "decode": 0}
    while (application := serve.status().applications.get(APPLICATION)) is None or application.status != "RUNNING":
        deployments = application.deployments if application else {}
        for deployment in deployments.values():
            if "failed" in deployment.message.lower():
                last = [line for line in deployment.message.strip().splitlines() if line.strip()][-1]
                raise Unavailable(f"the cluster did not start: a replica failed: {last}")
        running = {n.lower(): d.replica_states.get("RUNNING", 0) for n, d in deployments.items()}
        alive = {role: running.get(role, 0) for role in wanted}
        if alive != before:
            say(f"alive: {counted(wanted, alive)}")
            before = alive
        time.sleep(LOOK_S)
    if before != wanted:
        say(f"alive: {counted(wanted, wanted)}")
