"""The composition root: the only file that binds deployments, and `serve`, which runs them on this machine.

Knows nothing about requests. Heavy imports wait until Ray's environment stands.
"""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from bifolio.protos.errors import Unavailable
from bifolio.replicas.model_files import check_model

from .config import ClusterConfig
from .local import local_ray, require_free
from .models import resolve
from .tokenizer import Tokenizer

APPLICATION = "bifolio"
MANAGER = "kv-manager"
SERVICER = "bifolio.protos.inference_pb2_grpc.add_InferenceServicer_to_server"

# Fresh large allocations page-fault at 1 GB/s: keep what was allocated once.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 31),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def build(config: ClusterConfig, model: Path) -> Any:
    """The Serve application: one ingress over the two pools."""
    from ray import serve

    from bifolio.replicas.core import ReplicaSpec
    from bifolio.replicas.decode import DecodeReplica
    from bifolio.replicas.prefill import PrefillReplica

    from .ingress import Ingress

    spec = ReplicaSpec(model, config.model.dtype, config.engine, config.kv, (MANAGER, APPLICATION))
    common = {
        "max_ongoing_requests": 100_000,  # the ledger admits; Serve must never queue
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
    }
    replica_actor = {
        "num_cpus": 0,  # small machines: the operating system shares the cores
        "runtime_env": {"env_vars": replica_environment(config)},
    }

    # Not as decorators: then the module's name would no longer be the class, and Serve would pickle it by value.
    def pool(name: str, cls: type, replicas: int, **options: Any) -> Any:
        make = serve.deployment(
            name=name,
            num_replicas=replicas,
            ray_actor_options=replica_actor,
            graceful_shutdown_timeout_s=60,
            **common,
            **options,
        )
        return make(cls).bind(spec)

    router = {"request_router_class": "bifolio.cluster.router:PlacementRouter"}
    decode = pool("Decode", DecodeReplica, config.pools.decode.replicas, request_router_config=router)
    prefill = [pool("Prefill", PrefillReplica, config.pools.prefill.replicas)] if config.pools.prefill.replicas else []
    ingress = serve.deployment(name="Ingress", ray_actor_options={"num_cpus": 0}, **common)(Ingress)
    # The ingress never calls prefill; binding it here makes it part of the application.
    return ingress.bind(config, model, (MANAGER, APPLICATION), decode, *prefill)


def replica_environment(config: ClusterConfig) -> dict[str, str]:
    """What a replica process needs before torch is loaded."""
    threads = {"OMP_NUM_THREADS": str(config.engine.threads)}
    exact = {"MKL_CBWR": "AVX512,STRICT" if _has_avx512() else "AVX2,STRICT"} if config.model.dtype == "float32" else {}
    return MALLOC | threads | exact


def _has_avx512() -> bool:
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


class _Stop(BaseException):
    """SIGINT or SIGTERM, wherever it lands."""


def _raise_stop(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # stopping has begun, once is enough
    raise _Stop


def _handle_signals() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # a background shell starts us with SIGINT ignored
        signal.signal(each, _raise_stop)


def serve(config: ClusterConfig) -> int:
    """Run the cluster on this machine until SIGINT or SIGTERM. Returns the exit status."""
    model = resolve(config.model.source)
    check_model(model)  # what is wrong with a model is said here, not by replicas that cannot start
    Tokenizer.load(model)
    require_free(config.http.host, config.http.port, "http.port")
    require_free(config.http.host, config.grpc.port, "grpc.port")
    began = time.monotonic()

    def report(text: str) -> None:
        print(f"bifolio: {text} ({time.monotonic() - began:.1f} s)", flush=True)

    _handle_signals()
    try:
        pools = config.pools
        report(f"starting Ray for {pools.prefill.replicas} prefill and {pools.decode.replicas} decode replicas")
        with local_ray(report):
            _handle_signals()  # Ray has put its own
            _deploy(config, model, report)
            host = config.http.host
            report(f"ready: http://{host}:{config.http.port}/v1/completions and grpc://{host}:{config.grpc.port}")
            while True:
                signal.pause()
    except (_Stop, SystemExit):  # SystemExit: from the handler that Ray puts in ray.init, for as long as that runs
        return 0
    finally:
        report("stopped")


def _deploy(config: ClusterConfig, model: Path, report: Any) -> None:
    from ray import serve
    from ray.exceptions import RayError

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # our own lines say what happens
    from bifolio.kv_manager.actor import start

    try:
        start(MANAGER, APPLICATION, config.kv)
        serve.start(
            http_options={"host": config.http.host, "port": config.http.port},
            grpc_options={"port": config.grpc.port, "grpc_servicer_functions": [SERVICER]},
        )
        report(f"loading {config.model.source}")
        serve.run(build(config, model), name=APPLICATION, route_prefix="/")
    except (RayError, RuntimeError) as error:
        raise Unavailable(f"the cluster did not start: {error}") from error
