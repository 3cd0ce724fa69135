from __future__ import annotations

import logging

import pytest

from bifolio.kv_manager import seldom
from bifolio.kv_manager.seldom import Seldom


def test_one_line_in_a_while_of_each_kind_counts_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(seldom.time, "monotonic", lambda: now)
    log = Seldom(logging.getLogger("bifolio.test"), every_s=5.0)
    for number in range(4):
        log.warning("a", f"a{number}")
        log.warning("b", f"b{number}")
        now += 1
    now += 1
    log.warning("a", "a4")
    assert caplog.messages == ["a0", "b0", "a4 (3 more of this kind since the last that was logged)"]
