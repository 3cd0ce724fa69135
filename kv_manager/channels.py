"""One gRPC channel per prefill replica, shared by all pulls from it, replaced once its connection broke; and what a
broken one means."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import grpc

from bifolio.protos.errors import BifolioError, ReplicaGone, TransferFailed

from .tls import OF_ITS_OWN, Certificates, Tls, channel_credentials, name_options
from .wire import ERROR_KEY, channel_options

NO_CONNECTION = "failed to connect to all addresses"  # as grpc's details begin then


@dataclass(slots=True)
class _Link:
    channel: grpc.Channel
    users: int = 0
    broken: bool = False


class Channels:
    """With `tls`, connections to replicas that have it too."""

    def __init__(self, keepalive_s: float, tls: Tls | None = None) -> None:
        self._links: dict[str, _Link] = {}
        self._certificates = None if tls is None else Certificates(tls)
        self._lock = threading.Lock()
        self._closed = False
        self._options = [
            *channel_options(keepalive_s),
            ("grpc.min_reconnect_backoff_ms", int(keepalive_s * 1000)),  # as long a connection may take; else 20 s
            *OF_ITS_OWN,
            *([] if tls is None else name_options(tls)),
        ]

    @contextmanager
    def use(self, address: str) -> Iterator[grpc.Channel]:
        """The address's channel. An error that says it is lost gives the next user a new one.

        Otherwise that one would fail at once while grpc waits to reconnect. The last user closes the old one. Raises
        TransferFailed once this is closed.
        """
        with self._lock:
            if self._closed:
                raise TransferFailed("this decode replica is leaving, and opens no more Prefill streams")
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = _Link(self._connect(address))
            link.users += 1
        try:
            yield link.channel
        except grpc.RpcError as error:
            link.broken |= is_lost(error)
            raise
        finally:
            with self._lock:
                link.users -= 1
                if link.broken and self._links.get(address) is link:
                    del self._links[address]
                unused = link.broken and not link.users
            if unused:
                link.channel.close()

    def _connect(self, address: str) -> grpc.Channel:
        if self._certificates is None:
            return grpc.insecure_channel(address, self._options)
        return grpc.secure_channel(address, channel_credentials(self._certificates), self._options)

    def close(self) -> None:
        """Calls still running on a channel fail with CANCELLED."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.channel.close()


def translated(error: grpc.RpcError, address: str) -> BifolioError:
    """What ended a stream, as one of our errors: the one that the other side raised, or what became of the
    connection."""
    details, names = error.details() or "", _names(error)
    for cls in _family(BifolioError):
        if cls.__name__ in names:
            return cls(details)
    if details.startswith(NO_CONNECTION):
        details += (
            "; if the replica is there: TLS (kv.tls) must be on at both sides, with certificates of one CA, "
            "or at neither"
        )
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return TransferFailed(f"the prefill replica at {address} has as many Prefill streams as it takes: {details}")
    kind = ReplicaGone if is_lost(error) else TransferFailed
    return kind(f"the Prefill stream from {address} broke: {error.code().name}: {details}")


def is_lost(error: grpc.RpcError) -> bool:
    """Whether the connection is: an error of ours says UNAVAILABLE too, over one that is good."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and not _names(error)


def _names(error: grpc.RpcError) -> list[str]:
    return [str(entry.value) for entry in error.trailing_metadata() or () if entry.key == ERROR_KEY]


def _family(cls: type[BifolioError]) -> Iterator[type[BifolioError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _family(child)


def listening(where: Literal["loopback", "node"], node: str) -> str:
    """The host to listen on: only where replicas are on several machines, the node's own address."""
    return "127.0.0.1" if where == "loopback" else bracketed(node)


def bracketed(host: str) -> str:
    """As it stands before a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
