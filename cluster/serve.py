"""`bifolio serve`: the application on a private Ray cluster of this machine, from the first check to the last process.

Says in lines of its own what happens, on standard output; Ray's chatter there is dropped. Heavy imports wait until
Ray's environment stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from bifolio.kv_manager import redis_url
from bifolio.kv_manager.config import TlsConfig
from bifolio.protos.errors import ConfigError, Unavailable
from bifolio.replicas.host_memory import host_memory
from bifolio.replicas.kv_memory import ITEMSIZES, check_host, context_of
from bifolio.replicas.model_files import check_model, model_config

from .app import APPLICATION, MANAGER, SERVICER, build
from .config import ClusterConfig
from .devices import Node, describe, on_devices
from .embedded_redis import embedded_redis
from .local import local_ray, private_place, require_free
from .models import resolve
from .query import template_of
from .tokenizer import Tokenizer

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_S = 0.5  # between two looks at a cluster that starts
WATCH_S = 2.0  # and at one that serves
LOST_S = 60.0  # a cluster that does not answer for so long is given up

Say = Callable[[str], None]


class _Stop(BaseException):
    """A signal to stop, wherever it lands."""


def _raise_stop(number: int, frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # stopping has begun, once is enough
    raise _Stop(number)


def _handle_signals() -> None:
    for each in SIGNALS:  # a background shell starts us with SIGINT ignored
        signal.signal(each, _raise_stop)


def serve(config: ClusterConfig) -> int:
    """Run the cluster until a signal. Returns the exit status: 128 + signal if it came before the cluster was ready.

    Raises ConfigError before anything starts, and Unavailable if the cluster does not start or is lost.
    """
    model = resolve(config.model.source)
    check_model(model)  # what is wrong with a model is said here, not by replicas that cannot start
    template_of(Tokenizer.load(model))
    require_free(config.http.host, config.http.port, "http.port")
    require_free(config.http.host, config.grpc.port, "grpc.port")
    if config.kv.tls is not None:
        check_tls(config.kv.tls)
    if config.redis.url is not None:
        check_redis(config.redis.url)
    began, out = time.monotonic(), sys.stdout

    def say(text: str) -> None:
        print(f"bifolio: {text} ({time.monotonic() - began:.1f} s)", file=out, flush=True)

    ready = False
    _handle_signals()
    try:
        say(f"starting Ray, for {_pools(config.pools.wanted)}")
        doors = (config.http.port, config.grpc.port)
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            private_place(doors) as place,
            _redis(config, place, say) as redis,
            local_ray(place) as logs,
        ):
            _handle_signals()  # Ray has put its own
            try:
                _start(config, model, redis, say)
                ready, host = True, config.http.host
                say(f"logs: {logs}")
                say(f"ready: http://{host}:{config.http.port}/v1 and grpc://{host}:{config.grpc.port}")
                _watch(config, say)
            except Unavailable as error:
                raise Unavailable(f"{error.message}\nits logs are kept: {logs}") from error
            finally:
                say("stopping")
    except _Stop as stop:
        return 0 if ready else 128 + int(stop.args[0])
    except SystemExit:  # from the handler that Ray puts in ray.init, for as long as that runs
        return 128 + signal.SIGTERM
    finally:
        say("stopped")


def check_tls(config: TlsConfig) -> None:
    """ConfigError unless replicas with these files would accept each other."""
    from bifolio.kv_manager.tls import Tls, checked

    tls = Tls.of(config)
    assert tls is not None
    checked(tls)


def check_redis(url: str) -> None:
    """ConfigError unless it can be used."""
    from bifolio.kv_manager.store import cell_of, reach

    try:
        asyncio.run(reach(url, cell_of(MANAGER, APPLICATION)))
    except Unavailable as error:
        raise ConfigError(
            f"redis.url: {error.message}; start it, or set redis.url to null for one that the cluster starts"
        ) from error


@contextlib.contextmanager
def _redis(config: ClusterConfig, place: Path, say: Say) -> Iterator[str]:
    """The address of the one that is configured, or of the cluster's own, which ends after all that use it."""
    if config.redis.url is not None:
        say(f"Redis: {redis_url.shown(config.redis.url)}")
        yield config.redis.url
    else:
        with embedded_redis(place / "redis") as url:
            say("Redis: a Valkey of the cluster's own")
            yield url


def _start(config: ClusterConfig, model: Path, redis: str, say: Say) -> None:
    """Decide on devices, deploy, and say which replicas are there, until all are."""
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
        target = serve.RunTarget(build(config, model), name=APPLICATION, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        _wait_until_running(config, say)
        for line in _caches(ray.get(connect(MANAGER, APPLICATION).snapshot.remote())["replicas"]):
            say(line)
    except (RayError, RuntimeError) as error:
        raise Unavailable(f"the cluster did not start: {error}") from error


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
            say(f"alive: {_pools(wanted, alive)}")
            before = alive
        time.sleep(LOOK_S)
    if before != wanted:
        say(f"alive: {_pools(wanted, wanted)}")


def _watch(config: ClusterConfig, say: Say) -> NoReturn:
    """Say when replicas or Redis are lost and come back. Ends by _Stop, or as Unavailable when the cluster is lost."""
    import ray
    from ray.exceptions import RayError

    from bifolio.kv_manager.actor import connect

    wanted = before = config.pools.wanted
    manager, heard = connect(MANAGER, APPLICATION), time.monotonic()
    answered = True
    while True:
        time.sleep(WATCH_S)
        try:
            snapshot = ray.get(manager.snapshot.remote(), timeout=WATCH_S)
        except RayError as error:
            if time.monotonic() - heard > LOST_S:
                raise Unavailable(f"the KV manager has not answered for {LOST_S:.0f} s: {error}") from error
            continue
        heard = time.monotonic()
        roles = [replica["role"] for replica in snapshot["replicas"] if replica["state"] == "alive"]
        alive = {role: roles.count(role) for role in wanted}
        if alive != before:
            say(f"alive: {_pools(wanted, alive)}")
            before = alive
        if (answers := snapshot["store"]["answers"]) != answered:
            where = snapshot["store"]["where"]
            say(f"Redis answers again: {where}" if answers else f"Redis is away, serving goes on without it: {where}")
            answered = answers


def _pools(wanted: dict[str, int], alive: dict[str, int] | None = None) -> str:
    return ", ".join(f"{alive[role]} of {n} {role}" if alive else f"{n} {role}" for role, n in wanted.items())
