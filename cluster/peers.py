"""Who may ask, and how a gRPC call learns what went wrong. Knows nothing about models or requests."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from bifolio.protos.errors import BifolioError, PeerRefused, status_of


def require_loopback(peer: str | None) -> None:
    """Raise PeerRefused for an IP address of another machine; None or empty is a connection without one."""
    if peer and not ipaddress.ip_address(peer).is_loopback:
        raise PeerRefused(f"connections from {peer} are refused: only this machine may ask, until API keys are set")


@contextmanager
def admitted(context: Any) -> Iterator[None]:
    """Around a gRPC method: refuses strangers, and gives the call the status of the error it ends with."""
    try:
        require_loopback(address_of(context.peer()))
        yield
    except BifolioError as error:
        context.set_code(grpc.StatusCode[status_of(error)[0]])
        context.set_details(error.message)
        raise


def address_of(peer: str) -> str | None:
    """The IP address in gRPC's name of a peer: ipv4:127.0.0.1:123, ipv6:%5B::1%5D:123, unix:…"""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
