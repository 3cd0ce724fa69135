"""A script for `test_native.py`: which native build this CPU takes, and a digest of float32 results of it. Needs the
standard library alone, so that it runs in an emulator too.
"""

from __future__ import annotations

import array
import ctypes
import hashlib
import random
from pathlib import Path

KERNELS = Path(__file__).parents[3] / "kernels"


def library() -> tuple[str, ctypes.CDLL]:
    """As `library.best()` and `load()` do."""
    question = ctypes.CDLL(str(KERNELS / "native_generic.so")).bifolio_best_isa
    question.restype = ctypes.c_char_p
    isa = question().decode()
    return isa, ctypes.CDLL(str(KERNELS / f"native_{isa}.so"))


class Linear(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "scale")),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("type", ctypes.c_int32),
    )


def main() -> None:
    isa, lib = library()
    draw = random.Random(1)
    rows, inputs, outputs = 11, 333, 100

    def noise(count: int) -> array.array[float]:
        return array.array("f", (draw.gauss(0, 1) for _ in range(count)))

    def pointer(values: array.array[float]) -> ctypes.c_void_p:
        return ctypes.c_void_p(values.buffer_info()[0])

    size = ctypes.c_int64
    weight, x, y = noise(inputs * outputs), noise(rows * inputs), array.array("f", bytes(4 * rows * outputs))
    lib.bifolio_packed_bytes.restype = size
    packed = ctypes.create_string_buffer(lib.bifolio_packed_bytes(size(inputs), size(outputs), 0))
    lib.bifolio_pack(pointer(weight), size(inputs), size(outputs), 0, packed)
    linear = Linear(ctypes.addressof(packed), None, None, inputs, outputs, 0)
    lib.bifolio_linear(ctypes.byref(linear), 0, 0, pointer(x), size(inputs), pointer(y), size(outputs), size(rows), 1)
    normed = array.array("f", bytes(4 * rows * inputs))
    lib.bifolio_rms_norm(
        0, pointer(x), None, pointer(weight), ctypes.c_float(1e-5), size(rows), size(inputs), pointer(normed), 1
    )
    activated = array.array("f", bytes(4 * rows * 150))
    lib.bifolio_silu_mul(0, pointer(weight), size(rows), size(150), pointer(activated), 1)
    digest = hashlib.sha256(y.tobytes() + normed.tobytes() + activated.tobytes()).hexdigest()
    print(isa, digest)


if __name__ == "__main__":
    main()
