"""`bifolio serve`: the application on a private Ray cluster of this machine, from the first check to the last process.

Says in lines of its own what happens, on standard output; Ray's chatter there is dropped. Heavy imports wait until
Ray's environment stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from bifolio.kv_manager import redis_url
from bifolio.kv_manager.config import TlsConfig
from bifolio.protos.errors import ConfigError, Unavailable
from bifolio.replicas.model_files import check_model

from . import doors
from .app import APPLICATION, MANAGER
from .config import ClusterConfig
from .deploy import Say, deploy
from .embedded_redis import EmbeddedRedis
from .local import LocalRay, local_ray, private_place, require_free
from .models import resolve
from .query import template_of
from .tokenizer import Tokenizer
from .watch import Open, Snapshot, Watch, counted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WATCH_S = 2.0  # between two looks at a cluster that serves
MISSES = 2  # so many questions in a row to the KV manager without an answer are told
LOOK_S = 0.5  # between two looks at what may end
TELL_S = 2.0  # and between two lines about that
LAST_S = 0.5  # for the last words of streams to reach their clients
TOGETHER_S = 1.0  # signals so close are one
LOST_S = 60.0  # a cluster that does not answer for so long is given up


class _Stop(BaseException):
    """A signal to stop, wherever it lands."""


def _raise_stop(number: int, frame: FrameType | None) -> None:
    _ignore_signals()
    raise _Stop(number)


def _ignore_signals() -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)


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
        say(f"starting Ray, for {counted(config.pools.wanted)}")
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            private_place((config.http.port, config.grpc.port)) as place,
            _redis(config, place, say) as (url, valkey),
            local_ray(place) as here,
        ):
            _handle_signals()  # Ray has put its own
            try:
                deploy(config, model, url, say)
                ready, host = True, config.http.host
                say(f"logs: {here.logs}")
                say(f"ready: http://{host}:{config.http.port}/v1 and grpc://{host}:{config.grpc.port}")
                try:
                    _watch(config, here, valkey, say)
                except _Stop:
                    _let_end(config, place, say)
            except Unavailable as error:
                raise Unavailable(f"{error.message}\nits logs are kept: {here.logs}") from error
            finally:
                say("stopping")
        return 0
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
def _redis(config: ClusterConfig, place: Path, say: Say) -> Iterator[tuple[str, EmbeddedRedis | None]]:
    """The address of the one that is configured, or of the cluster's own, which ends after all that use it."""
    if config.redis.url is not None:
        say(f"Redis: {redis_url.shown(config.redis.url)}")
        yield config.redis.url, None
    else:
        with EmbeddedRedis(place / "redis") as server:
            say("Redis: a Valkey of the cluster's own")
            yield server.url, server


def _watch(config: ClusterConfig, here: LocalRay, valkey: EmbeddedRedis | None, say: Say) -> NoReturn:
    """Say what is lost and comes back, and start again what nobody else would. Ends by _Stop, or as Unavailable when
    the cluster is lost."""
    look, watch, heard, missed = _looks(), Watch(config.pools.wanted), time.monotonic(), 0
    while True:
        time.sleep(WATCH_S)
        if here.gcs.revive():
            say("Ray's GCS has died: started again")
        _revive(valkey, say)
        if (snapshot := look()) is None:
            missed += 1
            if missed == MISSES:
                say("the KV manager does not answer")
            if time.monotonic() - heard > LOST_S:
                raise Unavailable(f"the KV manager has not answered for {LOST_S:.0f} s")
            continue
        if missed >= MISSES:
            say("the KV manager answers again")
        heard, missed = time.monotonic(), 0
        for line in watch.news(snapshot):
            say(line)


def _revive(valkey: EmbeddedRedis | None, say: Say) -> None:
    try:
        if valkey is not None and valkey.revive():
            say("the cluster's own Valkey has died: started again")
    except Unavailable as error:
        say(error.message)  # the next look tries again


def _let_end(config: ClusterConfig, place: Path, say: Say) -> None:
    """Until no stream is open, or the time is up. Ends by _Stop at a second signal: not one that came with the first,
    as it does where a supervisor tells both a process and its group."""
    look, began, armed = _looks(), time.monotonic(), False
    doors.shut(place)
    opened, said, told = Open(), -1, began
    while (left := opened.count) and (now := time.monotonic()) - began < config.pools.drain_s:
        if not armed and now - began > TOGETHER_S:
            _handle_signals()
            armed = True
        if (snapshot := look()) is not None:
            opened.look(snapshot)
            left = opened.count
        if said < 0 < left:
            what = "stream" if left == 1 else "streams"
            say(f"stopping: {left} {what} may end, up to {config.pools.drain_s:.0f} s; again to stop at once")
            said = left
        elif 0 < left != said and now - told > TELL_S:
            say(f"stopping: {left} left")
            said, told = left, now
        if left:
            time.sleep(LOOK_S)
    _ignore_signals()
    if said > 0:
        time.sleep(LAST_S)


def _looks() -> Callable[[], Snapshot | None]:
    """Asks the KV manager for a snapshot; None if it does not answer."""
    import ray
    from ray.exceptions import RayError

    from bifolio.kv_manager.actor import connect

    manager = connect(MANAGER, APPLICATION)

    def look() -> Snapshot | None:
        try:
            snapshot: Snapshot = ray.get(manager.snapshot.remote(), timeout=WATCH_S)
        except RayError:
            return None
        return snapshot

    return look
