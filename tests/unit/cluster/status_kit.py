"""What `/status` answers for a real ledger and queue, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bifolio.kv_manager.admission import AdmissionQueue
from bifolio.kv_manager.config import KvConfig
from bifolio.kv_manager.ledger import Ledger
from bifolio.kv_manager.snapshot import snapshot
from bifolio.kv_manager.tags import BlockTags
from bifolio.protos.measures import Traffic
from bifolio.protos.messages import Ask, Geometry, ReplicaId, ReplicaInfo, RequestId, Role

EPOCH = 1_796_045_543_970_481_913
GEOMETRY = Geometry("m", 1, 1, 8, 4, "float32")
CONFIG = KvConfig(admission_queue=2)

SENT = Traffic(
    streams=1,
    in_flight=3,
    done=1_214,
    failed={"StalePlacement": 1, "cancelled": 2},
    ways={"copied": 1_100, "sent": 118},
    frames=48_720,
    bytes=51_086_622_720,
    moving_s=20.0,
    stalled_s={"start": 0.25, "acks": 12.5},
)
RECEIVED = Traffic(
    done=15,
    ways={"copied": 12, "sent: hidden": 3},
    frames=615,
    bytes=613_000_000,
    moving_s=0.25,
    stalled_s={"frames": 31.5},
)


def status(traffic: Mapping[tuple[str, Role], Traffic]) -> dict[str, Any]:
    """Of replicas of these names that report this; the decode replica has a lease of three blocks, and two wait for
    more than there is."""
    ledger, queue = Ledger(EPOCH, CONFIG), AdmissionQueue(CONFIG)
    for (name, role), moved in traffic.items():
        info = ReplicaInfo(ReplicaId(name), role, GEOMETRY, 8, f"127.0.0.1:500{len(name)}", pid=4242)
        ledger.register(info, replace(BlockTags(info.id, 8).report(0), traffic=moved), 0)
    for name, tokens in (("a", 11), ("b", 28), ("c", 28), ("d", 28)):
        queue.push(Ask(RequestId(name), tokens, tokens + 1, 0.0, tenant=name), 0)
        queue.pump(lambda ask, kept: ledger.admit(ask, 0, kept), 0)
    return {
        **snapshot(ledger, 0.0),
        "waiting": len(queue),
        "queue": {**queue.snapshot(3.5), "idle_s": 0.0},
        "store": {"where": "memory", "answers": True},
        "model": "served",
    }
