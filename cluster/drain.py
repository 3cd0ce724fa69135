"""`bifolio drain`: asks a replica to leave, and with --wait shows how it goes until another has taken its place.

Knows the cluster only as any client does: by /status and one POST.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from bifolio.protos.errors import InvalidRequest, Unavailable

from . import plain_http

LOOK_S = 0.5
AWAY_S = 60.0  # a cluster that has not answered for so long is given up

Replica = Mapping[str, Any]  # as /status says


def drain(name: str, address: str, *, wait: bool) -> None:
    """`name` is an id, or the beginning of just one. Raises InvalidRequest if it is not, and Unavailable."""
    began = time.monotonic()
    replicas = plain_http.get(address, "/status")["replicas"]
    replica = named(name, replicas)
    plain_http.post(address, f"/v1/replicas/{quote(replica['id'], safe='')}/drain")
    who, role = f"{replica['role']} replica {replica['id']}", replica["role"]
    if not wait:
        print(f"{who}: leaving; it ends what it has, and another one comes")
        return
    wanted = max(1, alive(role, replicas))
    print(f"{who}: leaving", flush=True)
    shown, heard = "", time.monotonic()
    while True:
        try:
            replicas = plain_http.get(address, "/status")["replicas"]
            heard = time.monotonic()
        except Unavailable:
            if time.monotonic() - heard > AWAY_S:
                raise
        here = [each for each in replicas if each["id"] == replica["id"]]
        now = progress(here, alive(role, replicas), wanted, role)
        if now != shown:
            print(f"{now} ({time.monotonic() - began:.1f} s)", flush=True)
            shown = now
        if not here and alive(role, replicas) >= wanted:
            return
        time.sleep(LOOK_S)


def named(name: str, replicas: Iterable[Replica]) -> Replica:
    """The replica of this id, or the only one whose id begins so."""
    every = list(replicas)
    found = [each for each in every if each["id"] == name] or [each for each in every if each["id"].startswith(name)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{each['id']} ({each['role']})" for each in every) or "none"
    what = "is the beginning of several replicas' ids" if found else "is no replica"
    raise InvalidRequest(f"{name!r} {what}; allowed: an id, or the beginning of one; there are: {there}")


def alive(role: str, replicas: Iterable[Replica]) -> int:
    return sum(each["role"] == role and each["state"] == "alive" for each in replicas)


def progress(here: Iterable[Replica], alive: int, wanted: int, role: str) -> str:
    """`here` is the one that leaves, as long as it is listed."""
    left = [f"{each['state']}, {_counted(each['active'], 'lease')} left" for each in here]
    return f"{left[0] if left else 'it has left'}; {alive} of {wanted} {role} replicas alive"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
