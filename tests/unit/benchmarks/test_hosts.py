"""Which hosts are whose, and which of their faults come when."""

from __future__ import annotations

import os

import chaos_hosts
import hosts
import pytest


def test_one_seed_is_one_plan_with_every_kind() -> None:
    planned = chaos_hosts.plan(3, 10, links=True)
    assert planned == chaos_hosts.plan(3, 10, links=True) != chaos_hosts.plan(4, 10, links=True)
    assert {each.fault.kind for each in planned} == set(chaos_hosts.catalogue(links=True))


def test_without_links_only_hosts_die() -> None:
    assert {each.fault.kind for each in chaos_hosts.plan(3, 8, links=False)} == {
        "kill decode host",
        "kill prefill host",
    }


def test_a_kind_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no such faults: kill gcs; allowed: kill decode host"):
        chaos_hosts.plan(3, 1, links=False, only=["kill gcs"])


def test_names_of_two_contexts_differ() -> None:
    assert hosts.new_name() != hosts.new_name()


def test_only_hosts_of_runs_that_are_gone_are_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = f"{hosts.PREFIX}{2**22 + 1}n0"  # above every process id
    there = [f"{hosts.PREFIX}{os.getpid()}n0-head", "somebody", f"{gone}-head", f"{gone}-d0"]
    removed: set[str] = set()
    monkeypatch.setattr(hosts, "namespaces", lambda: there)
    monkeypatch.setattr(hosts, "_remove", removed.add)
    hosts.remove_left_over()
    assert removed == {gone}
