"""Keys of full blocks: what a block's K and V depend on, as one hash, equal in every process that is asked.

    root  = SHA-256 of (format, model's fingerprint, dtype, block size, layout, salt, adapter)
    key_i = SHA-256 of (key_{i-1}, the tokens of block i)            key_{-1} = root

So equal keys are equal blocks at the same position after the same tokens: a hit needs no other check. Tensor
parallelism is not in it: a block holds the same, into however many caches a replica divides its heads. Each text is
preceded by its length, so that no two lists of them read alike, and numbers are little endian on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from bifolio.protos.messages import Geometry, Key

_FORMAT = "bifolio kv 2"


def root(geometry: Geometry, salt: str = "", adapter: str = "") -> bytes:
    """Where the chain begins. `salt` keeps tenants apart, `adapter` names what is added to the model's weights."""
    g = geometry
    fields = (_FORMAT, g.fingerprint, g.dtype, str(g.block_size), g.layout, salt, adapter)
    digest = sha256()
    for text in fields:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def chain(parent: bytes, tokens: Sequence[int], block_size: int) -> tuple[Key, ...]:
    """A key for each full block of `tokens`, which follow what `parent` stands for: a root, or a block's key."""
    line = memoryview(np.asarray(tokens, dtype="<u4").tobytes())
    size = 4 * block_size
    keys = []
    for begin in range(0, len(line) - size + 1, size):
        parent = sha256(parent + line[begin : begin + size]).digest()
        keys.append(Key(parent))
    return tuple(keys)
