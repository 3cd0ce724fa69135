"""Which cores an engine computes on alone, and where everything else stays: real claims, threads of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from bifolio.cluster.app import own_cores
from bifolio.cluster.config import load
from bifolio.protos.messages import Role
from bifolio.replicas import cores as module
from bifolio.replicas.cores import THREADS, Cores, claimed, for_loops

Claim = Callable[[Role, int], Cores]
pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system binds no threads")


@pytest.fixture(autouse=True)
def claim(monkeypatch: pytest.MonkeyPatch) -> Iterator[Claim]:
    """Makes claims that no other test and no cluster here sees; afterwards all threads are where they were."""
    before, made = os.sched_getaffinity(0), []
    monkeypatch.setattr(module, "_NAME", f"bifolio-test-{os.getpid()}")

    def claim(role: Role, count: int) -> Cores:
        made.append(Cores(role, count))
        return made[-1]

    yield claim
    for each in made:
        each.release()
    for thread in THREADS.iterdir():
        os.sched_setaffinity(int(thread.name), before)


@pytest.mark.parametrize(("allowed", "claims", "loops"), [
    ({0, 1, 2, 3}, {}, {0, 1, 2, 3}),
    ({0, 1, 2, 3}, {3: "decode", 0: "prefill"}, {1, 2}),
    ({0, 1}, {1: "decode", 0: "prefill"}, {0}),
    ({0, 1}, {1: "decode", 0: "decode"}, {0, 1}),
    ({2, 3}, {1: "decode"}, {2, 3}),
    ({0}, {0: "prefill"}, {0}),
])  # fmt: skip
def test_loops_stay_off_cores_that_decode_before_those_of_prompts(
    allowed: set[int], claims: dict[int, str], loops: set[int]
) -> None:
    assert for_loops(allowed, claims) == loops


def test_decoding_claims_from_the_last_core_down_and_prompts_from_the_first_up(claim: Claim) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("a machine of one core")
    decode, prefill = claim("decode", 1), claim("prefill", 1)
    assert (decode.own, prefill.own) == ({allowed[-1]}, {allowed[0]})
    assert claimed(module.listing()) == {allowed[-1]: "decode", allowed[0]: "prefill"}


def test_who_finds_too_few_cores_claims_none(claim: Claim) -> None:
    count = len(os.sched_getaffinity(0))
    first = claim("decode", 1)
    assert not claim("prefill", count).own
    assert claimed(module.listing()) == dict.fromkeys(first.own, "decode")
    assert len(claim("prefill", count - 1).own) == count - 1


def test_a_claim_ends_with_its_process(claim: Claim) -> None:
    script = (
        f"from bifolio.replicas import cores; cores._NAME = {module._NAME!r}; c = cores.Cores('decode', 1); input()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as other:
        while not (theirs := claimed(module.listing())):
            assert other.poll() is None
        other.kill()
    assert claimed(module.listing()) == {}
    assert claim("decode", 1).own == theirs.keys()


def test_the_engine_and_what_it_starts_are_bound_and_the_others_are_moved_away(claim: Claim) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("a machine of one core")
    mine, done, go = claim("decode", 1), threading.Event(), threading.Event()
    seen: list[set[int]] = []

    def look() -> None:
        go.wait()
        seen.append(os.sched_getaffinity(0))

    def engine() -> None:
        mine.bind_engine()
        worker = threading.Thread(target=look)
        worker.start()
        done.set()
        look()
        worker.join()

    thread = threading.Thread(target=engine)
    thread.start()
    done.wait()
    mine.place_loops()
    go.set()
    thread.join()
    assert seen == [mine.own, mine.own]
    assert os.sched_getaffinity(0) == allowed - mine.own


@pytest.mark.parametrize(("given", "prefill", "decode"), [
    ({}, 1, 1),
    ({"pools.decode.replicas": 63}, 0, 0),
    ({"pools.decode.replicas": 63, "pools.decode.cpus_per_replica": 2}, 0, 2),
    ({"engine.threads": 64}, 0, 0),
    ({"pools.prefill.cpus_per_replica": 0, "engine.threads": 2}, 0, 2),
    ({"pools.prefill.replicas": 0, "engine.threads": 2}, 0, 2),
])  # fmt: skip
def test_cores_are_claimed_where_all_replicas_find_theirs(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, object], prefill: int, decode: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    config = load(None, {"engine.device": "cpu", **given})
    found = {role: own_cores(config, role) for role in config.pools.used}
    assert found.get("prefill", 0) == prefill
    assert found["decode"] == decode
