"""The composition root: the only file that binds deployments. Knows nothing about where they run, or about requests.

Heavy imports wait: Ray reads its environment when it is imported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import ClusterConfig

if TYPE_CHECKING:
    from bifolio.replicas.core import Listen, ReplicaSpec

APPLICATION = "bifolio"
MANAGER = "kv-manager"
DRAIN_MARGIN_S = 5.0  # beyond `pools.drain_s`, for what a replica does when its last stream has ended
SERVICER = "bifolio.protos.inference_pb2_grpc.add_InferenceServicer_to_server"

# Fresh large allocations page-fault at 1 GB/s: keep what was allocated once; in one place, or each of gRPC's threads
# keeps its own.
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 31),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def build(config: ClusterConfig, model: Path, listen: Listen = "loopback") -> Any:
    """The Serve application: one ingress over the two pools. Where replicas are on several machines they have to
    `listen` at their nodes' addresses: whoever is in that network can then speak to them, so `kv.tls` should be set."""
    from ray import serve

    from bifolio.replicas.decode import DecodeReplica
    from bifolio.replicas.prefill import PrefillReplica

    from .ingress import Ingress

    common = {
        "max_ongoing_requests": 100_000,  # the ledger admits; Serve must never queue
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": config.pools.drain_s + DRAIN_MARGIN_S,
        # Three failures in a row, and Serve lets the replica end what it has and starts another
        "health_check_period_s": 2,
        "health_check_timeout_s": 5,
    }

    specs = {
        role: replica_spec(config, model, (MANAGER, APPLICATION), used.num_gpus or 1.0, listen, own_cores(config, role))
        for role, used in config.pools.used.items()
    }

    # Not as decorators: then the module's name would no longer be the class, and Serve would pickle it by value.
    def pool(role: str, cls: type, **options: Any) -> Any:
        make = serve.deployment(
            name=role.capitalize(),
            num_replicas=config.pools.wanted[role],
            ray_actor_options=actor_options(config, role),
            **common,
            **options,
        )
        return _versioned(make(cls), specs[role], _stamp(model)).bind(specs[role])

    router = {"request_router_class": "bifolio.cluster.router:PlacementRouter"}
    decode = pool("decode", DecodeReplica, request_router_config=router)
    prefill = [pool("prefill", PrefillReplica)] if config.pools.prefill.replicas else []
    door = {"num_replicas": config.ingress.replicas, "ray_actor_options": {"num_cpus": 0}}
    ingress = _versioned(serve.deployment(name="Ingress", **door, **common)(Ingress), config, _stamp(model))
    # The ingress never calls prefill; binding it here makes it part of the application.
    return ingress.bind(config, model, (MANAGER, APPLICATION), decode, *prefill)


def _versioned(deployment: Any, *what: object) -> Any:
    """As long as it is made of the same, Serve leaves the replicas as they are when it is deployed again: by default it
    replaces all of them, also where only their number changes. Ray has no public way to say so, and is pinned."""
    parts = (importlib.metadata.version("bifolio"), *what)
    version = hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:16]
    return deployment.options(version=version, _internal=True)


def _stamp(model: Path) -> tuple[tuple[str, int, int], ...]:
    """Of the model's files: other ones have another."""
    files = sorted(file for file in model.iterdir() if file.is_file()) if model.is_dir() else [model]
    return tuple((str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files)


def actor_options(config: ClusterConfig, role: str) -> dict[str, Any]:
    """What Ray is told about the processes of a pool: where they may run, and how much of a GPU they take."""
    pool = config.pools.used[role]
    options: dict[str, Any] = {
        "num_cpus": 0,  # small machines: the operating system shares the cores
        "runtime_env": {"env_vars": replica_environment(config, own_cores(config, role))},
    }
    if config.engine.device == "cuda":
        assert pool.num_gpus is not None, "the configuration is decided"
        options["num_gpus"] = pool.num_gpus
    if pool.accelerator_type is not None:
        options["accelerator_type"] = pool.accelerator_type
    if pool.labels:
        options["label_selector"] = pool.labels
    return options


def replica_spec(
    config: ClusterConfig,
    model: Path,
    manager: tuple[str, str],
    num_gpus: float = 1.0,
    listen: Listen = "loopback",
    cores: int = 0,
) -> ReplicaSpec:
    """What a replica is told; `num_gpus` is its share of a GPU, where it has one, `cores` how many of its host's it
    computes on alone. Imports torch."""
    from bifolio.replicas.core import ReplicaSpec

    assert config.model.dtype is not None, "the configuration is resolved"
    engine = config.engine.model_copy(update={"threads": cores}) if cores else config.engine
    return ReplicaSpec(
        model, config.model.dtype, config.model.quantization, engine, config.kv, manager, num_gpus, listen, cores
    )


def own_cores(config: ClusterConfig, role: str) -> int:
    """How many cores a replica of this pool computes on alone. Where nothing is said: as many as it has threads, if
    this machine has so many for every replica; on several machines one that finds too few shares them."""
    if config.engine.device == "cuda":
        return 0
    wanted = {name: pool.cpus_per_replica for name, pool in config.pools.used.items()}
    own = wanted[role]
    if own is not None:
        return own
    each = {name: config.engine.threads if count is None else count for name, count in wanted.items()}
    total = sum(count * config.pools.wanted[name] for name, count in each.items())
    return each[role] if total <= (os.cpu_count() or 1) else 0


def replica_environment(config: ClusterConfig, cores: int = 0) -> dict[str, str]:
    """What a replica process needs before torch is loaded. By the CPU of this machine: all replicas are on it.

    Nothing for GPUs: torch's allocator stays as it is, because memory of expandable segments cannot be shared between
    processes. What `exact` needs is the CPU's alone, as `exact` is.
    """
    exact = {"MKL_CBWR": "AVX512,STRICT" if _has_avx512() else "AVX2,STRICT"} if config.engine.exact else {}
    return MALLOC | {"OMP_NUM_THREADS": str(cores or config.engine.threads)} | exact


def _has_avx512() -> bool:
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
