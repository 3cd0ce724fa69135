"""Whether requests are served and move on: judged from the KV manager's snapshot, stage by stage.

Health is progress, not life: a process that runs and gets nothing done is named, with how long it has done so. Pure:
knows nothing about how a snapshot is asked for, and has no clock.

    unhealthy   a request could not be served now
    degraded    something is missing or stands still, and requests are served
    ok          neither
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Status = Literal["ok", "degraded", "unhealthy"]
Part = Literal["manager", "admission", "prefill", "transfer", "decode", "redis"]
PARTS: tuple[Part, ...] = get_args(Part)

OK = "ok"
LOST_S = 60.0  # a replica that was lost is named for so long


@dataclass(frozen=True, slots=True)
class Health:
    """`stages` says of each "ok", or in a sentence what stands still, where and for how long."""

    status: Status
    stages: Mapping[Part, str]

    @property
    def ready(self) -> bool:
        """A request would be served."""
        return self.status != "unhealthy"


def health(
    snapshot: Mapping[str, Any] | None,
    wanted: Mapping[str, int],
    split: str,
    silence_s: float,
    manager_silent_s: float,
) -> Health:
    """By the manager's last snapshot, or None if there never was one; it answered anything `manager_silent_s` ago.

    `wanted` replicas are there of each role, `split` is kv.split, `silence_s` kv.silence_s.
    """
    if snapshot is None:
        unknown = f"not known: the KV manager has not answered yet, for {manager_silent_s:.1f} s"
        return Health("unhealthy", dict.fromkeys(PARTS, unknown))
    replicas = snapshot["replicas"]
    alive = alive_of(replicas, silence_s)
    stages: dict[Part, str] = {
        "manager": _manager(silence_s, manager_silent_s),
        "admission": _admission(snapshot, silence_s) if alive.get("decode") else OK,  # what waits waits for decode
        "prefill": _pool("prefill", snapshot, wanted["prefill"], silence_s),
        "transfer": _transfer(replicas),
        "decode": _pool("decode", snapshot, wanted["decode"], silence_s),
        "redis": _redis(snapshot["store"]),
    }
    helpless = (
        not alive.get("decode")
        or (split == "always" and wanted["prefill"] > 0 and not alive.get("prefill"))
        or stages["manager"] != OK
        or (stages["admission"] != OK and not _at_work(replicas))
    )
    missing = any(sentence != OK for sentence in stages.values())
    return Health("unhealthy" if helpless else "degraded" if missing else "ok", stages)


def alive_of(replicas: Iterable[Mapping[str, Any]], silence_s: float) -> dict[str, int]:
    """Replicas of each role that take new work and are heard of."""
    found: dict[str, int] = {}
    for replica in replicas:
        found[replica["role"]] = found.get(replica["role"], 0) + _works(replica, silence_s)
    return found


def _works(replica: Mapping[str, Any], silence_s: float) -> bool:
    return bool(replica["state"] == "alive" and replica["silent_s"] < silence_s)


def _at_work(replicas: Iterable[Mapping[str, Any]]) -> bool:
    """A decode replica has requests and goes on with them: then those that wait may wait for their end."""
    return any(each["role"] == "decode" and each["state"] == "alive" and each["active"] for each in replicas)


def _manager(silence_s: float, silent_s: float) -> str:
    return OK if silent_s < silence_s else f"the KV manager has not answered for {silent_s:.1f} s"


def _admission(snapshot: Mapping[str, Any], silence_s: float) -> str:
    waiting, idle_s = snapshot["waiting"], snapshot["queue"]["idle_s"]
    if not waiting or idle_s <= silence_s:
        return OK
    what = "request waits" if waiting == 1 else "requests wait"
    return f"{waiting} {what}; for {idle_s:.1f} s none was admitted and none ended"


def _pool(role: str, snapshot: Mapping[str, Any], wanted: int, silence_s: float) -> str:
    members = [replica for replica in snapshot["replicas"] if replica["role"] == role]
    alive = sum(_works(replica, silence_s) for replica in members)
    stalled = [f"{each['id']}: {still(each['stalled'])}" for each in members if each["state"] == "stalled"]
    silent = [
        f"{each['id']} has not reported for {each['silent_s']:.1f} s"
        for each in members
        if each["state"] != "stalled" and each["silent_s"] >= silence_s
    ]
    if alive >= wanted and not stalled:  # who leaves or was lost beside them is replaced already
        return OK
    leaving = [
        f"{each['id']} is leaving"
        for each in members
        if each["state"] == "draining" and each["silent_s"] < silence_s and alive < wanted
    ]
    lost = [
        f"{each['id']} was lost {each['ago_s']:.1f} s ago: {each['why']}"
        for each in snapshot["lost"]
        if each["role"] == role and each["ago_s"] <= LOST_S and alive < wanted
    ]
    return "; ".join([f"{alive} of {wanted} {role} replicas alive", *stalled, *silent, *leaving, *lost])


def _transfer(replicas: Iterable[Mapping[str, Any]]) -> str:
    """Threads that carry blocks: each is of the replica that says so."""
    standing = [
        f"{each['role']} replica {each['id']}: a transfer has stood still for {each['stalled']['transfer']:.1f} s"
        for each in replicas
        if "transfer" in each["stalled"]
    ]
    return "; ".join(standing) or OK


def _redis(store: Mapping[str, Any]) -> str:
    if store["answers"]:
        return OK
    return f"{store['where']} does not answer; serving goes on, a cancel is not kept for a restart"


def still(stalled: Mapping[str, float]) -> str:
    """What of a replica stands still, in words: "engine stands still for 6.2 s"."""
    return ", ".join(f"{stage} stands still for {seconds:.1f} s" for stage, seconds in stalled.items())
