"""Reading GGUF, the single-file format of llama.cpp: metadata, and tensors dequantised to float32.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is walked here, because the
`gguf` package's reader makes an object of every string of the vocabulary: 2.7 s where this takes 0.03 s.
Dequantising is the package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from bifolio.protos.errors import ConfigError

# value type -> struct code; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEEPEST = 8  # arrays in arrays; llama.cpp reads none
_AT_ONCE = 4096  # quantised blocks: what becomes of them stays in a core's cache

_MOST_DIMS = 4  # as in ggml
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    kind: int
    shape: tuple[int, ...]  # row-major: linears are [out, in]
    offset: int  # in the file


@cache
def _readable(kind: int) -> bool:
    """Whether the package dequantises tensors of this type; it says so only by trying."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType(kind)][1]), np.uint8), GGMLQuantizationType(kind))
    except (ValueError, NotImplementedError):
        return False
    return True


class GgufFile(Mapping[str, Any]):
    """A mapping of the file's metadata, decoded when asked for, with its tensors beside it.

    Raises ConfigError when the file is not GGUF version 2 or 3, is cut short, or holds a tensor that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, tuple[int, int]] = {}  # key -> (value type, where the value starts)
        self._tensors: dict[str, _TensorInfo] = {}
        if not path.is_file():
            raise ConfigError(f"{path} does not exist, or is no file; allowed is a .gguf file or a model directory")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(f"{path} is not a GGUF file; allowed is a .gguf file or a model directory")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._walk()
        except (struct.error, ValueError, KeyError, TypeError, ArithmeticError) as error:  # what nonsense leads to
            raise ConfigError(f"{path} is cut short or damaged; get the file again") from error

    def __getitem__(self, key: str) -> Any:
        return self._decode(*self._values[key])[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and row-major shape of every tensor, in the file's order."""
        return {name: info.shape for name, info in self._tensors.items()}

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor dequantised to float32, in memory of its own."""
        info = self._tensors[name]
        kind = GGMLQuantizationType(info.kind)
        elements, size = GGML_QUANT_SIZES[kind]
        count = math.prod(info.shape)
        raw = np.frombuffer(self._data, np.uint8, count * size // elements, info.offset)
        if kind is GGMLQuantizationType.Q4_1:
            return _from_q4_1(raw).reshape(info.shape)
        values: npt.NDArray[np.float32] = dequantize(raw.reshape(*info.shape[:-1], -1), kind).reshape(info.shape)
        return values if values.flags.writeable else values.copy()  # float32 came as a view of the file

    def _walk(self) -> None:
        version, tensors, keys = struct.unpack_from("<IQQ", self._data, 4)
        if version not in (2, 3):
            raise ConfigError(f"{self.path} is GGUF version {version}; allowed are 2 and 3, little endian")
        at = 24
        for _ in range(keys):
            key, at = self._string(at)
            (kind,) = _U32.unpack_from(self._data, at)
            self._values[key] = (kind, at + 4)
            at = self._skip(kind, at + 4)
            if at > len(self._data):
                raise ValueError(f"the value of {key} goes on behind the end")
        found = []
        for _ in range(tensors):
            name, at = self._string(at)
            (dims,) = _U32.unpack_from(self._data, at)
            if dims > _MOST_DIMS:
                raise ConfigError(f"{self.path}: {name} has {dims} dimensions; allowed are {_MOST_DIMS} at most")
            *shape, kind, offset = struct.unpack_from(f"<{dims}QIQ", self._data, at + 4)
            at += 4 + 8 * dims + 12
            found.append((name, kind, tuple(reversed(shape)), offset))  # the file counts axes from the innermost
        alignment = self.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ConfigError(f"{self.path}: general.alignment is {alignment!r}; allowed is a power of two")
        base = -(-at // alignment) * alignment
        for name, kind, shape_, offset in found:
            if not _readable(kind):
                known = kind in {each.value for each in GGMLQuantizationType}
                stored = GGMLQuantizationType(kind).name if known else f"type {kind}"
                raise ConfigError(
                    f"{self.path}: {name} is stored as {stored}, which cannot be read; quantise it otherwise"
                )
            elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            if 0 in shape_ or (shape_[-1] if shape_ else 1) % elements:
                raise ConfigError(
                    f"{self.path}: {name} is {list(shape_)}; allowed are rows of a multiple of {elements}, and no 0"
                )
            if base + offset + math.prod(shape_) * size // elements > len(self._data):
                raise ConfigError(f"{self.path} ends before tensor {name} does; get the file again")
            self._tensors[name] = _TensorInfo(kind, shape_, base + offset)

    def _string(self, at: int) -> tuple[str, int]:
        end = at + 8 + _U64.unpack_from(self._data, at)[0]
        return self._data[at + 8 : end].decode(), end

    def _skip(self, kind: int, at: int, depth: int = 0) -> int:
        """Where the value that starts at `at` ends."""
        if kind == _STRING:
            return int(at + 8 + _U64.unpack_from(self._data, at)[0])
        if kind != _ARRAY:
            return at + struct.calcsize(_SCALARS[kind])
        if depth == _DEEPEST:
            raise ValueError(f"arrays nested deeper than {_DEEPEST}")
        inner, count = struct.unpack_from("<IQ", self._data, at)
        at += 12
        if inner in _SCALARS:
            return int(at + count * struct.calcsize(_SCALARS[inner]))
        for _ in range(count):
            at = self._skip(inner, at, depth + 1)
        return at

    def _decode(self, kind: int, at: int) -> tuple[Any, int]:
        """(the value that starts at `at`, where it ends)."""
        if kind == _STRING:
            return self._string(at)
        if kind != _ARRAY:
            code = struct.Struct("<" + _SCALARS[kind])
            return code.unpack_from(self._data, at)[0], at + code.size
        inner, count = struct.unpack_from("<IQ", self._data, at)
        at += 12
        if inner in _SCALARS:
            code = struct.Struct(f"<{count}{_SCALARS[inner]}")
            return list(code.unpack_from(self._data, at)), at + code.size
        values = []
        for _ in range(count):
            value, at = self._decode(inner, at)
            values.append(value)
        return values, at


def _from_q4_1(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """As `dequantize`, bit for bit, in a third of the time, which is most of what a start takes to load the demo's
    model: 32 values are scale, least value and 4 bits each, the first half of them in the lower bits."""
    blocks = raw.reshape(-1, 20)
    scale, least = (blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
    values = np.empty((len(blocks), 32), np.float32)
    for i in range(0, len(blocks), _AT_ONCE):
        some = slice(i, i + _AT_ONCE)
        of, packed = values[some], np.ascontiguousarray(blocks[some, 4:])
        of[:, :16] = packed & 15
        of[:, 16:] = packed >> 4
        of *= scale[some]
        of += least[some]
    return values
