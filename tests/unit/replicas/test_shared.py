"""Handles of device memory: what finds it, and what does not. CUDA's own part needs two processes and a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bifolio.kv_manager.block_store import Unreached
from bifolio.replicas import shared
from bifolio.replicas.delayed_device import DelayedDevice
from bifolio.replicas.device import HostDevice, open_device

CPU = torch.device("cpu")
PLACE = "boot-1 GPU-1"


def memory(rows: int = 3, row_bytes: int = 8) -> torch.Tensor:
    return torch.arange(rows * row_bytes, dtype=torch.uint8).view(rows, row_bytes)


def of_another_process(handle: bytes, **changed: object) -> bytes:
    fields = dict(zip(("pid", "key", "place", "offset", "rows", "row_bytes", "ipc"), json.loads(handle), strict=True))
    return json.dumps(list({**fields, "pid": os.getpid() + 1, **changed}.values())).encode()


def why_not(found: torch.Tensor | Unreached) -> str:
    assert isinstance(found, Unreached), found
    return found.reason


def test_in_one_process_it_is_the_tensor_itself() -> None:
    one, other = memory(), memory()
    handles = [shared.export(tensor) for tensor in (one, other)]
    assert shared.reach(handles[0], CPU) is one
    assert shared.reach(handles[1], CPU) is other


def test_a_handle_is_no_longer_than_its_tensor() -> None:
    tensor = memory()
    handle = shared.export(tensor)
    del tensor
    assert why_not(shared.reach(handle, CPU)) == "none"


def test_of_another_process_or_device_it_is_not_reached() -> None:
    tensor = memory()
    handle = shared.export(tensor)
    assert why_not(shared.reach(of_another_process(handle), CPU)) == "none"
    assert shared.reach(handle, torch.device("cuda", 0)) == ("misfit", "it is on cpu, this replica on cuda:0")
    assert why_not(shared.reach(of_another_process(handle, place="boot-1 GPU-2"), CPU, PLACE)) == "elsewhere"
    assert why_not(shared.reach(of_another_process(handle, place=PLACE), CPU)) == "elsewhere"


@pytest.mark.parametrize("ipc", [[], [1], ["!"], ["AmM=", 24, 0, "", 0, "", False], [[{}]]])
def test_what_cannot_be_opened_is_not_reached(ipc: object) -> None:
    handle = of_another_process(shared.export(memory()), place=PLACE, ipc=ipc)
    assert why_not(shared.reach(handle, CPU, PLACE)) in {"hidden", "misfit"}


@pytest.mark.parametrize(
    "handle",
    [
        b"",
        b"\xff\0\x80",
        b"null",
        b"7",
        b'"sevenAB"',
        b"{}",
        b"[]",
        b"[1,2,3,4,5,6,7]",
        b'[1,"key","place",0,1,1,{}]',
        b'["1","key","place",0,1,1,[]]',
        b'[1,"key","place",0,1,1,[],0]',
        b"[" * 100_000,
        b"9" * 10_000,
        b"\x80\x04N.",  # a pickle
        bytes(range(256)),
    ],
)
def test_bytes_that_are_no_handle_are_not_reached(handle: bytes) -> None:
    assert why_not(shared.reach(handle, CPU, PLACE)) == "misfit"
    assert why_not(DelayedDevice(0).reach(handle)) == "misfit"


def test_a_host_is_no_device_that_shares_or_reaches() -> None:
    assert HostDevice().export(memory()) is None
    tensor = memory()
    assert why_not(HostDevice().reach(shared.export(tensor))) == "misfit"


class FakeIpc:
    """What torch's two calls pass on, without a GPU: shows that the handle carries it, not that CUDA takes it."""

    parts = (b"\x02c" + bytes(range(64)), 32, 512, b"/torch_1_2", 3, bytes(64), True)

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened: list[object] = []
        self.storage: torch.UntypedStorage | None = None
        patch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: self.export(storage))
        patch.setattr(torch.UntypedStorage, "_new_shared_cuda", lambda *parts: self.open(*parts), raising=False)

    def export(self, storage: torch.UntypedStorage) -> tuple[object, ...]:
        self.storage = storage
        return 0, *self.parts

    def open(self, *parts: object) -> torch.UntypedStorage:
        self.opened.append(parts)
        assert self.storage is not None
        return self.storage


def test_another_process_is_given_what_torch_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    ipc, whole = FakeIpc(monkeypatch), memory(4)
    tensor = whole[1:]  # not at the beginning of its storage
    found = shared.reach(of_another_process(shared.export(tensor, PLACE)), CPU, PLACE)
    assert ipc.opened == [(None, *ipc.parts)]  # the device's index comes from the one who opens
    assert isinstance(found, torch.Tensor)
    assert (found.data_ptr(), found.shape, found.is_contiguous()) == (tensor.data_ptr(), tensor.shape, True)


@pytest.mark.parametrize("wrong", [{"rows": 4}, {"offset": 9}, {"offset": -1}, {"rows": 0}, {"row_bytes": 10**30}])
def test_no_more_is_reached_than_there_is(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, int]) -> None:
    FakeIpc(monkeypatch)
    tensor = memory(4)[1:]
    handle = of_another_process(shared.export(tensor, PLACE), **wrong)
    assert "cannot be opened" in str(shared.reach(handle, CPU, PLACE))


def test_expandable_segments_are_shared_with_this_process_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeIpc, "parts", (b"\x02e" + bytes(64), *FakeIpc.parts[1:]))
    FakeIpc(monkeypatch)
    tensor = memory()
    handle = shared.export(tensor, PLACE)
    assert "expandable segments" in caplog.text
    assert shared.reach(handle, CPU, PLACE) is tensor
    assert "not shared with any" in str(shared.reach(of_another_process(handle), CPU, PLACE))


def test_a_driver_that_shares_nothing_stops_no_replica(caplog: pytest.LogCaptureFixture) -> None:
    tensor = memory()  # not of CUDA: torch refuses
    handle = shared.export(tensor, PLACE)
    assert "does not share" in caplog.text
    assert shared.reach(handle, CPU, PLACE) is tensor


def test_a_host_that_cannot_be_told_from_others_is_no_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared, "_BOOT_ID", tmp_path / "boot_id")
    place, tensor = shared.place_of(torch.device("cuda", 0)), memory()
    assert place == ""
    assert "boot_id" in caplog.text
    handle = shared.export(tensor, place)
    assert shared.reach(handle, CPU, place) is tensor
    assert "not shared with any" in str(shared.reach(of_another_process(handle), CPU, place))


OTHER = """
import sys
import torch
from bifolio.replicas.device import open_device
device = open_device("cuda")
found = device.reach(sys.stdin.buffer.read())
assert isinstance(found, torch.Tensor), found
own = torch.empty_like(found)
device.copy(own, found).wait()
print(own.cpu().numpy().tobytes().hex())
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC takes two processes on a GPU")
def test_another_process_on_the_gpu_copies_the_same_bytes() -> None:
    device = open_device("cuda")
    tensor = memory(5)[1:].to(device.torch)
    handle = device.export(tensor)
    assert handle is not None
    assert device.reach(handle) is tensor
    other = [sys.executable, "-c", OTHER]
    for _ in range(2):  # one after the other, as replicas come and go
        got = subprocess.run(
            other,
            input=handle,
            capture_output=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert bytes.fromhex(got.stdout.decode()) == tensor.cpu().numpy().tobytes(), got.stderr.decode()
