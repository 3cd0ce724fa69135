"""Who may ask. Knows nothing about models or requests."""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from bifolio.protos.errors import PeerRefused

from .responses import refusal


def require_loopback(peer: str | None) -> None:
    """Raise PeerRefused unless `peer` is an address of this machine's loopback; None is a unix socket."""
    try:
        address = ipaddress.ip_address(peer or "127.0.0.1")
    except ValueError:
        raise PeerRefused(f"connections from {peer} are refused: it is no IP address") from None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if not (mapped or address).is_loopback:
        raise PeerRefused(f"connections from {peer} are refused: only this machine may ask, until API keys are set")


def address_of(peer: str) -> str | None:
    """The IP address in gRPC's name of a peer: ipv4:127.0.0.1:123, ipv6:%5B::1%5D:123, unix:…"""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")


class OnlyLoopback:
    """ASGI middleware: HTTP requests of other machines end here."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                require_loopback((scope.get("client") or (None,))[0])
            except PeerRefused as error:
                await refusal(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
