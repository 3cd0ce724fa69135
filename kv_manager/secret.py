"""What proves that a lease was granted: a signature over it, by a key that its replica has told the KV manager alone.

The manager keeps no secret of its own: a replica's key comes back with its registration, and so does what is signed by
it. Who can read a placement can use it: between machines that others can listen to, streams need TLS (`kv.tls`).
"""

from __future__ import annotations

import hmac
import struct

from bifolio.protos.messages import Lease

BYTES = 16


def sign(key: bytes, lease: Lease) -> bytes:
    """The lease's secret: of its generation, its blocks and how many of them are cached, so that it opens no others."""
    said = struct.pack(f"<QQq{len(lease.blocks)}I", *lease.generation, lease.cached, *lease.blocks)
    return hmac.digest(key, said, "sha256")[:BYTES]


def proves(secret: bytes, key: bytes, lease: Lease) -> bool:
    return hmac.compare_digest(secret, sign(key, lease))
