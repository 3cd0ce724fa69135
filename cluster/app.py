"""The composition root: the only file that binds deployments. Knows nothing about where they run, or about requests.

Heavy imports wait: Ray reads its environment when it is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import ClusterConfig

if TYPE_CHECKING:
    from bifolio.replicas.core import Listen, ReplicaSpec

APPLICATION = "bifolio"
MANAGER = "kv-manager"
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
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
    }

    # Not as decorators: then the module's name would no longer be the class, and Serve would pickle it by value.
    def pool(role: str, cls: type, **options: Any) -> Any:
        make = serve.deployment(
            name=role.capitalize(),
            num_replicas=config.pools.wanted[role],
            ray_actor_options=actor_options(config, role),
            graceful_shutdown_timeout_s=60,
            **common,
            **options,
        )
        share = config.pools.used[role].num_gpus or 1.0
        return make(cls).bind(replica_spec(config, model, (MANAGER, APPLICATION), share, listen))

    router = {"request_router_class": "bifolio.cluster.router:PlacementRouter"}
    decode = pool("decode", DecodeReplica, request_router_config=router)
    prefill = [pool("prefill", PrefillReplica)] if config.pools.prefill.replicas else []
    ingress = serve.deployment(name="Ingress", ray_actor_options={"num_cpus": 0}, **common)(Ingress)
    # The ingress never calls prefill; binding it here makes it part of the application.
    return ingress.bind(config, model, (MANAGER, APPLICATION), decode, *prefill)


def actor_options(config: ClusterConfig, role: str) -> dict[str, Any]:
    """What Ray is told about the processes of a pool: where they may run, and how much of a GPU they take."""
    pool = config.pools.used[role]
    options: dict[str, Any] = {
        "num_cpus": 0,  # small machines: the operating system shares the cores
        "runtime_env": {"env_vars": replica_environment(config)},
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
) -> ReplicaSpec:
    """What a replica is told; `num_gpus` is its share of a GPU, where it has one. Imports torch."""
    from bifolio.replicas.core import ReplicaSpec

    assert config.model.dtype is not None, "the configuration is resolved"
    return ReplicaSpec(
        model, config.model.dtype, config.model.quantization, config.engine, config.kv, manager, num_gpus, listen
    )


def replica_environment(config: ClusterConfig) -> dict[str, str]:
    """What a replica process needs before torch is loaded. By the CPU of this machine: all replicas are on it.

    Nothing for GPUs: torch's allocator stays as it is, because memory of expandable segments cannot be shared between
    processes. What `exact` needs is the CPU's alone, as `exact` is.
    """
    threads = {"OMP_NUM_THREADS": str(config.engine.threads)}
    exact = {"MKL_CBWR": "AVX512,STRICT" if _has_avx512() else "AVX2,STRICT"} if config.engine.exact else {}
    return MALLOC | threads | exact


def _has_avx512() -> bool:
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
