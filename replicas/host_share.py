"""A replica's blocks in memory of this host that others on it may read: a memfd, its handle, and where that leads.

    memfd   blocks [rows, row_bytes] │ owners [rows, 2] uint64 │ a page with the key      each from a page's beginning

Only its owner ever writes it. It is sealed: no mapping but the owner's, which was there before, can be written through;
and it never changes its size, so a reader finds memory wherever it looks. Nothing has a name in a file system: when
the owner and all who have it mapped are gone, so is the memory, however they went.

A handle is JSON, as in `shared.py`: who makes one up is told so. It leads to /proc/PID/fd/FD, and the key says whether
that is still what it was: another process may have got the number. It is reached by processes of the same user, and
only where both see the same process numbers.

Knows nothing of leases, replicas or what the bytes are. Needs no torch.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.kv_manager.block_store import Unreached, WhyNot

from .owners import Owners

logger = logging.getLogger(__name__)

NAME = "bifolio-kv"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of the host; not its name: those repeat
_NUMBERS = "/proc/self/ns/pid"  # whose process numbers we see
_KEY_BYTES = 16
# Numbers of Linux: a Python that was built beside an old C library does not have their names, nor memfd_create
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_MFD_NOEXEC_SEAL = 8  # since Linux 6.3; some hosts allow no other
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_FIXED_SIZE = 1 | 2 | 4  # seals: no others, no shrinking, no growing
_F_SEAL_FUTURE_WRITE = 16
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

# Not the mmap module: a mapping of its own kind holds another file descriptor, and the GIL while memory is taken
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class _Handle:
    pid: int
    fd: int
    key: bytes
    rows: int
    row_bytes: int
    boot: str
    numbers: str


class HostShare:
    """The owner's side. The memory lives as long as this, its blocks or a reader's mapping; the handle leads to it as
    long as this."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        """Zeros. The memory is taken at once: MemoryError where there is too little, OSError where memory of this
        kind is not to be had."""
        places, key, here = _Places(rows, row_bytes), secrets.token_bytes(_KEY_BYTES), _here()
        fd = _memfd()
        close = weakref.finalize(self, os.close, fd)
        close.atexit = False
        try:
            os.ftruncate(fd, places.size)
            mapping = _Mapping(fd, places.size, mmap.PROT_READ | mmap.PROT_WRITE)
            mapping.populate(fd)
            fcntl.fcntl(fd, _F_ADD_SEALS, _FIXED_SIZE | _F_SEAL_FUTURE_WRITE)
        except OSError as error:
            close()
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise MemoryError(f"no memory for a KV cache of {places.size} bytes: {error}") from error
            raise
        bytes_ = mapping.bytes()
        bytes_[places.key : places.key + _KEY_BYTES] = np.frombuffer(key, np.uint8)
        self.blocks = bytes_[: rows * row_bytes]
        self.owners = Owners(places.owners_of(bytes_))
        self.handle = json.dumps([os.getpid(), fd, key.hex(), rows, row_bytes, *here]).encode()


class Reached:
    """The reader's side: it is mapped as long as this lives, or an array of it."""

    def __init__(self, bytes_: NDArray[np.uint8], places: _Places) -> None:
        self.rows = places.rows
        self.blocks: memoryview = bytes_[: places.rows * places.row_bytes].data  # read-only
        self.owners = Owners(places.owners_of(bytes_))


def share(rows: int, row_bytes: int) -> HostShare | None:
    """Memory for so many blocks; None where none can be shared, which is said in the log.

    MemoryError where there is too little.
    """
    try:
        return HostShare(rows, row_bytes)
    except OSError as error:
        logger.warning(
            "the KV cache is in memory of this process alone, and its blocks go to decode replicas of this host as "
            "messages: %s",
            error,
        )
        return None


def reach(handle: bytes, row_bytes: int) -> Reached | Unreached:
    """The blocks of another replica on this host, or of this process. Any bytes may be tried."""
    known = _parse(handle)
    if known is None:
        return Unreached("misfit", "its handle is none of a host's memory")
    if known.row_bytes != row_bytes:
        return Unreached("misfit", f"its blocks are of {known.row_bytes} bytes, this replica's of {row_bytes}")
    try:
        boot, numbers = _here()
    except OSError as error:
        return Unreached("hidden", f"whether it is on this host cannot be told: {error}")
    if known.boot != boot:
        return Unreached("elsewhere", "it is on another host")
    if known.numbers != numbers:
        return Unreached("hidden", "it is in another container: it has other process numbers")
    try:
        return _open(known)
    except (FileNotFoundError, ProcessLookupError):
        return Unreached("gone", "its process has ended")
    except OSError as error:
        reason: WhyNot = "short" if error.errno in _SHORT else "hidden"
        return Unreached(reason, f"its memory cannot be opened: {error}")


def _open(known: _Handle) -> Reached | Unreached:
    gone = Unreached("gone", "its process has ended, and another one has got its number")
    path, places = f"/proc/{known.pid}/fd/{known.fd}", _Places(known.rows, known.row_bytes)
    if not os.readlink(path).startswith(f"/memfd:{NAME} "):  # opening some other thing may do something, or wait
        return gone
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        if fcntl.fcntl(fd, _F_GET_SEALS) & _FIXED_SIZE != _FIXED_SIZE:
            return gone  # it could be cut off below us
        if os.fstat(fd).st_size != places.size or os.pread(fd, _KEY_BYTES, places.key) != known.key:
            return gone
        bytes_ = _Mapping(fd, places.size, mmap.PROT_READ).bytes()
    finally:
        os.close(fd)
    bytes_.flags.writeable = False
    return Reached(bytes_, places)


class _Places:
    """Where what lies in the memory."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.rows, self.row_bytes = rows, row_bytes
        self.owners = _up(rows * row_bytes)
        self.key = self.owners + _up(rows * 2 * 8)
        self.size = self.key + mmap.PAGESIZE

    def owners_of(self, bytes_: NDArray[np.uint8]) -> NDArray[np.uint64]:
        return bytes_[self.owners : self.owners + self.rows * 2 * 8].view(np.uint64).reshape(self.rows, 2)


class _Mapping:
    """All of a file, as long as this or an array of its bytes lives."""

    def __init__(self, fd: int, size: int, protection: int) -> None:
        self._size = size
        self._address: int | None = _libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
        if self._address == _FAILED:
            raise _os_error()
        self._memory: Any = (ctypes.c_uint8 * size).from_address(self._address)
        # Not at the process's end, while other threads may still copy
        weakref.finalize(self._memory, _libc.munmap, self._address, size).atexit = False

    def bytes(self) -> NDArray[np.uint8]:
        array: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        return array

    def populate(self, fd: int) -> None:
        """Takes the memory, in huge pages where the host has them for such memory (shmem_enabled: advise)."""
        _libc.madvise(self._address, self._size, _MADV_HUGEPAGE)  # a wish
        if _libc.madvise(self._address, self._size, _MADV_POPULATE_WRITE):
            if ctypes.get_errno() != errno.EINVAL:
                raise _os_error()
            os.posix_fallocate(fd, 0, self._size)  # an older Linux


def _memfd() -> int:
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    try:
        return _memfd_create(flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _memfd_create(flags)


def _memfd_create(flags: int) -> int:
    if not hasattr(_libc, "memfd_create"):
        raise OSError(errno.ENOSYS, "the C library has no memfd_create")
    fd: int = _libc.memfd_create(NAME.encode(), flags)
    if fd < 0:
        raise _os_error()
    return fd


def _here() -> tuple[str, str]:
    """What two processes have in common if each can open what the other means by /proc/PID."""
    return _BOOT_ID.read_text(encoding="ascii").strip(), os.readlink(_NUMBERS)


def _parse(handle: bytes) -> _Handle | None:
    try:
        pid, fd, key, rows, row_bytes, boot, numbers = json.loads(handle)
        if not all(type(number) is int and number > 0 for number in (pid, fd, rows, row_bytes)):
            return None
        if not all(isinstance(text, str) for text in (boot, numbers)):
            return None
        return _Handle(pid, fd, bytes.fromhex(key), rows, row_bytes, boot, numbers)
    except (ValueError, TypeError, RecursionError):
        return None


def _up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
