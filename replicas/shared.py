"""Device memory that others on the machine may reach: handles that are given away, and what they lead to.

    in this process         the tensor itself, found by its key: a process cannot open a handle of its own
    in another, same GPU    a mapping of the same memory, by CUDA IPC
    anywhere else           nothing, and why

Knows nothing of blocks or replicas. A handle is JSON: who makes one up is told so, and nothing of it is executed. It is
no secret from the machine's user, and lets its holder write: hand it only to replicas.

NEVER RUN: the calls of CUDA IPC, which take two processes on a GPU. They are those that torch.multiprocessing makes.
torch keeps exported memory beyond its tensor until a mapping of it is closed for the first time, or to the end of the
process: its counter begins at 1 for a handle and loses 1 at each closing, so from then on it knows of no mapping.
Freeing what is mapped elsewhere is undefined: so a replica that leaves ends its streams first. With the allocator's
`expandable_segments:True`, handles are of another kind (file descriptors, or a fabric's), which has not always worked:
then no other process reaches the memory.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from base64 import b64decode, b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from bifolio.kv_manager.block_store import Unreached

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of the host; not its name: those repeat
_OF_CUDA_MALLOC = b"c"  # the second byte of torch's handles says which kind of memory it is

_here: WeakValueDictionary[str, Tensor] = WeakValueDictionary()  # exported by this process, by key


@dataclass(frozen=True, slots=True)
class _Handle:
    pid: int
    key: str
    place: str  # host and GPU on which other processes can open it; "": nowhere
    offset: int  # bytes, in its storage
    rows: int
    row_bytes: int
    ipc: tuple[Any, ...]  # what torch's _new_shared_cuda takes after the device: numbers and bytes


def place_of(gpu: torch.device) -> str:
    """The same for two processes exactly if they compute on one GPU; "" where that cannot be told."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError as error:
        logger.warning("other processes do not reach the GPU memory of this one: %s", error)
        return ""
    return f"{boot} {torch.cuda.get_device_properties(gpu).uuid}"


def export(tensor: Tensor, place: str = "") -> bytes:
    """A handle of a contiguous uint8 [rows, row_bytes], good as long as the tensor lives.

    With a place, for other processes there too. Once for each tensor: torch counts every handle as one holder.
    """
    assert (tensor.dtype, tensor.dim()) == (torch.uint8, 2)
    assert tensor.is_contiguous()
    ipc = _ipc(tensor) if place else ()
    key = secrets.token_hex(16)
    _here[key] = tensor
    packed = [b64encode(part).decode() if isinstance(part, bytes) else part for part in ipc]
    where = place if ipc else ""
    return json.dumps([os.getpid(), key, where, tensor.storage_offset(), *tensor.shape, packed]).encode()


def reach(handle: bytes, device: torch.device, place: str = "") -> Tensor | Unreached:
    """The memory, on `device`; or why it cannot be reached from here. Any bytes may be tried."""
    known = _parse(handle)
    if known is None:
        return Unreached("misfit", "its handle is none of a device's memory")
    if known.pid == os.getpid() and (tensor := _here.get(known.key)) is not None:
        if tensor.device == device:
            return tensor
        return Unreached("misfit", f"it is on {tensor.device}, this replica on {device}")
    if not known.place:
        return Unreached("none", "its memory is of another process, and not shared with any")
    if known.place != place:
        return Unreached("elsewhere", "it is on another GPU")
    try:
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *known.ipc)
        return _view(storage, known, device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:  # it is dead, or hidden by a container
        return Unreached("hidden", f"its memory cannot be opened: {str(error).splitlines()[0]}")


def _ipc(tensor: Tensor) -> tuple[Any, ...]:
    try:
        _, handle, *rest = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        logger.warning("CUDA does not share this memory with other processes: %s", error)
        return ()
    if handle[1:2] != _OF_CUDA_MALLOC:
        logger.warning("memory of expandable segments is not shared with other processes: see PYTORCH_CUDA_ALLOC_CONF")
        return ()
    return handle, *rest


def _view(storage: torch.UntypedStorage, known: _Handle, device: torch.device) -> Tensor:
    shape = known.rows, known.row_bytes
    size = known.rows * known.row_bytes
    if not 0 <= known.offset <= storage.nbytes() - size or min(shape) < 1:
        raise ValueError(f"{size} bytes at {known.offset} of {storage.nbytes()}")
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, known.offset, shape, (known.row_bytes, 1))


def _parse(handle: bytes) -> _Handle | None:
    try:
        pid, key, place, offset, rows, row_bytes, packed = json.loads(handle)
        if not (_all(int, pid, offset, rows, row_bytes) and _all(str, key, place) and _all(list, packed)):
            return None
        ipc = tuple(b64decode(part, validate=True) if isinstance(part, str) else part for part in packed)
    except (ValueError, TypeError, RecursionError):
        return None
    return _Handle(pid, key, place, offset, rows, row_bytes, ipc)


def _all(kind: type, *values: object) -> bool:
    return all(isinstance(value, kind) for value in values)
