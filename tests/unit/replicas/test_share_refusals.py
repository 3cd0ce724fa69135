"""Where memory of the host cannot be shared, or not now: blocks are sent, and nothing fails to start."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from transfer_kit import WAIT

from bifolio.kv_manager.block_store import Unreached
from bifolio.replicas import host_share
from bifolio.replicas.host_share import HostShare

NAMELESS = """
import fcntl, mmap, os
for module, begin in ((fcntl, "F_"), (os, "MFD"), (os, "memfd"), (mmap, "MADV")):
    for name in [name for name in dir(module) if name.startswith(begin)]:
        delattr(module, name)
from bifolio.replicas import host_share
share = host_share.HostShare(3, 64)
assert isinstance(host_share.reach(share.handle, 64), host_share.Reached)
"""


def test_a_python_that_was_built_beside_an_old_c_library_shares_too() -> None:
    subprocess.run([sys.executable, "-P", "-c", NAMELESS], check=True, timeout=6 * WAIT)


def test_a_c_library_without_memfd_shares_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_share, "_libc", object())
    assert host_share.share(3, 64) is None
    assert "has no memfd_create" in caplog.text


def test_a_shortage_of_files_is_no_other_container(monkeypatch: pytest.MonkeyPatch) -> None:
    share = HostShare(3, 64)

    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "open", full)
    found = host_share.reach(share.handle, 64)
    monkeypatch.undo()
    assert isinstance(found, Unreached)
    assert found.reason == "short"
