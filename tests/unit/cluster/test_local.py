"""The ports of a private cluster."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from bifolio.cluster import local
from bifolio.protos.errors import ConfigError


@pytest.fixture(autouse=True)
def ten_ports(monkeypatch: pytest.MonkeyPatch) -> int:
    """Room for ten ports, all free when looked at; its first."""
    first = local.free_ports(10)[0]
    monkeypatch.setattr(local, "LOWEST_PORT", first)
    monkeypatch.setattr(local, "HIGHEST_PORT", first + 10)
    return first


def test_free_ports_are_neighbours_and_leave_out_those_somebody_listens_on(ten_ports: int) -> None:
    with socket.socket() as taken:
        taken.bind(("", ten_ports + 4))
        for _ in range(20):
            assert local.free_ports(5) == [ten_ports + i for i in range(5, 10)]


def test_free_ports_leave_out_those_that_are_spoken_for(ten_ports: int) -> None:
    for _ in range(50):
        assert ten_ports + 3 not in local.free_ports(2, {ten_ports + 3})


def test_no_room_between_the_ports_that_are_spoken_for_is_an_error(ten_ports: int) -> None:
    with pytest.raises(ConfigError, match="no 3 neighbouring free ports"):
        local.free_ports(3, range(ten_ports, ten_ports + 10, 3))


def test_a_cluster_keeps_off_the_doors_its_user_chose(
    tmp_path: Path, ten_ports: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PORTS_PER_RANGE", 1)
    for _ in range(50):
        chosen = local.environment(tmp_path, "mark", (ten_ports + 2, ten_ports + 3))
        ports = {int(value) for name, value in chosen.items() if name.endswith("_PORT")}
        assert not ports & {ten_ports + 2, ten_ports + 3}
