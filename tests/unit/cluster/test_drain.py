"""`bifolio drain`, against a cluster that is played: which replica is meant, what is asked, what is told."""

from __future__ import annotations

from typing import Any

import pytest

from bifolio.cluster import cli, drain, plain_http
from bifolio.protos.errors import InvalidRequest, Unavailable


def replica(id: str, role: str = "decode", state: str = "alive", active: int = 0) -> dict[str, Any]:
    return {"id": id, "role": role, "state": state, "active": active}


class Cluster:
    """Its states one after the other, the last one for good; None: it does not answer."""

    def __init__(self, *states: list[dict[str, Any]] | None) -> None:
        self.states = list(states)
        self.posted: list[tuple[str, str]] = []

    def get(self, address: str, path: str) -> Any:
        assert path == "/status"
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if state is None:
            raise Unavailable("it does not answer")
        return {"replicas": state}

    def post(self, address: str, path: str) -> Any:
        self.posted.append((address, path))
        return {}


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(*states: list[dict[str, Any]] | None) -> Cluster:
        cluster = Cluster(*states)
        monkeypatch.setattr(plain_http, "get", cluster.get)
        monkeypatch.setattr(plain_http, "post", cluster.post)
        monkeypatch.setattr(drain, "LOOK_S", 0.0)
        return cluster

    return start


def test_a_replica_is_asked_to_leave(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = play([replica("ab/1"), replica("ac", "prefill")])
    assert cli.main(["drain", "ab", "--address", "here:1"]) == 0
    assert cluster.posted == [("here:1", "/v1/replicas/ab%2F1/drain")]
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "decode replica ab/1: leaving; it ends what it has, and another one comes"


@pytest.mark.parametrize(
    ("name", "what"),
    [("x", "'x' is no replica"), ("a", "'a' is the beginning of several replicas' ids")],
)
def test_one_that_is_not_known_is_answered_with_those_there_are(
    name: str, what: str, play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = play([replica("ab"), replica("ac", "prefill")])
    assert cli.main(["drain", name]) == 1
    assert not cluster.posted
    assert capsys.readouterr().err == (
        f"bifolio: {what}; allowed: an id, or the beginning of one; there are: ab (decode), ac (prefill)\n"
    )


def test_an_id_that_others_begin_with_is_an_id() -> None:
    assert drain.named("ab", [replica("abc"), replica("ab")])["id"] == "ab"
    with pytest.raises(InvalidRequest, match="there are: none"):
        drain.named("ab", [])


def test_with_wait_it_tells_how_it_goes(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    play(
        [replica("ab", active=2), replica("cd")],
        [replica("ab", state="draining", active=2), replica("cd")],
        [replica("ab", state="draining", active=1), replica("cd")],
        None,
        [replica("cd")],
        [replica("cd"), replica("ef")],
    )
    assert cli.main(["drain", "ab", "--wait"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" (")[0] or line for line in lines] == [
        "decode replica ab: leaving",
        "draining, 2 leases left; 1 of 2 decode replicas alive",
        "draining, 1 lease left; 1 of 2 decode replicas alive",
        "it has left; 1 of 2 decode replicas alive",
        "it has left; 2 of 2 decode replicas alive",
    ]


def test_a_cluster_that_stays_away_is_given_up(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "AWAY_S", 0.0)
    play([replica("ab")], None)
    with pytest.raises(Unavailable, match="does not answer"):
        drain.drain("ab", "here:1", wait=True)
