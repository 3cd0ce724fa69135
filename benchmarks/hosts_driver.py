"""Deploys Bifolio on a Ray cluster of several hosts, from the head, and answers questions about it until its end.

    python -P benchmarks/hosts_driver.py CONFIG.yaml GCS_ADDRESS HEAD [--anywhere] [--one-address]

Prints {"ready": true} once the cluster serves. Then for each line "where" it prints on which host what runs:
{"prefill": {id: host}, "decode": {id: host}, "ingress": {id: host}, "manager": host}.

KV manager and ingress are put on the host HEAD, where the load is, and of the decode replicas one on each host, so that
the loss of a host is the loss of what is meant. `--anywhere` leaves that to Ray, which puts an actor that asks for no
CPU on any node. `--one-address`: hosts that share their ports have one front, on the head.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bifolio.cluster.config import load, resolved
from bifolio.cluster.embedded_redis import embedded_redis
from bifolio.cluster.models import resolve


def put_on(host: str) -> None:
    """From here on, the KV manager and the ingress are made there. Neither has a setting for that."""
    import ray
    from ray import serve

    make_actor, make_deployment, there = ray.remote, serve.deployment, {"label_selector": {"host": host}}

    def remote(*arguments: Any, **options: Any) -> Any:
        manager = "concurrency_groups" in options
        return make_actor(*arguments, **options, **(there if manager else {}))

    def deployment(*arguments: Any, **options: Any) -> Any:
        if options.get("name") == "Ingress":
            options["ray_actor_options"] = {**options["ray_actor_options"], **there}
        if options.get("name") == "Decode":
            options["max_replicas_per_node"] = 1
        return make_deployment(*arguments, **options)

    ray.remote, serve.deployment = remote, deployment


def where() -> dict[str, Any]:
    """What runs on which host, by the GCS."""
    import ray
    from ray._private.state import actors  # the API for that needs the dashboard

    hosts = {node["NodeID"]: node["Labels"]["host"] for node in ray.nodes()}
    found: dict[str, Any] = {"prefill": {}, "decode": {}, "ingress": {}, "manager": None}
    for actor in actors().values():
        if actor["State"] == "ALIVE":
            deployment, _, id = actor["Name"].rpartition("#")
            role, host = deployment.rpartition("#")[2].lower(), hosts.get(actor["Address"]["NodeID"])
            if actor["Name"] == "kv-manager":
                found["manager"] = host
            elif role in found:
                found[role][id] = host
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("address")
    parser.add_argument("head")
    parser.add_argument("--anywhere", action="store_true")
    parser.add_argument("--one-address", action="store_true")
    asked = parser.parse_args()
    out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # Ray prints as it likes

    def answer(said: dict[str, Any]) -> None:
        print(json.dumps(said), file=out, flush=True)

    import ray

    ray.init(address=asked.address, log_to_driver=False, configure_logging=False)
    from bifolio.cluster.deploy import deploy

    if not asked.anywhere:
        put_on(asked.head)
    config = resolved(load(asked.config))
    if asked.one_address:
        from ray import serve

        from bifolio.cluster.app import SERVICER

        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": config.http.host, "port": config.http.port},
            grpc_options={"port": config.grpc.port, "grpc_servicer_functions": [SERVICER]},
        )
    with tempfile.TemporaryDirectory(prefix="bfh-") as scratch, embedded_redis(Path(scratch) / "redis") as redis:
        deploy(config, resolve(config.model.source), redis, lambda text: print(text, flush=True), listen="node")
        answer({"ready": True})
        for line in sys.stdin:
            if line.strip() == "where":
                answer(where())


if __name__ == "__main__":
    main()
