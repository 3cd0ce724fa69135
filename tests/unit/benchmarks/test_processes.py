"""CPU time by thread and process, as `tokens.py` adds it up."""

from __future__ import annotations

import os
import threading

import processes

OF = {1: "decode", 2: "ingress", 3: "HAProxy", 4: "HAProxy"}


def test_threads_of_a_replica_are_told_apart_by_what_they_did() -> None:
    spent = {(1, 10): 0.5, (1, 11): 5.0, (1, 12): 0.25, (2, 20): 1.0, (2, 21): 2.0, (3, 30): 0.5, (4, 40): 0.25}
    roles = processes.roles(spent, OF)
    assert processes.by_part(spent, OF, roles) == {
        "decode: engine": 5.0,
        "decode: event loop": 0.5,
        "decode: other threads": 0.25,
        "ingress: event loop": 2.0,
        "ingress: other threads": 1.0,
        "HAProxy": 0.75,
    }


def test_a_thread_that_has_begun_since_counts_from_its_beginning() -> None:
    assert processes.spent({(1, 10): 1.0}, {(1, 10): 1.5, (1, 11): 0.25}) == {(1, 10): 0.5, (1, 11): 0.25}


def test_this_process_is_seen() -> None:
    used = processes.cpu([os.getpid()])
    assert used[os.getpid(), threading.get_native_id()] > 0
    pss, rss = processes.memory(os.getpid())
    assert 0 < pss <= rss
