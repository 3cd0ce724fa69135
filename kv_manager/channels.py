"""One gRPC channel per prefill replica, shared by all pulls from it, replaced once its connection broke."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from .wire import channel_options


@dataclass(slots=True)
class _Link:
    channel: grpc.Channel
    users: int = 0
    broken: bool = False


class Channels:
    def __init__(self, keepalive_s: float) -> None:
        self._links: dict[str, _Link] = {}
        self._lock = threading.Lock()
        self._options = [
            *channel_options(keepalive_s),
            (
                "grpc.use_local_subchannel_pool",
                1,
            ),  # connections of our own, shared with no other user of grpc
            ("grpc.enable_http_proxy", 0),  # replicas are neighbours: $http_proxy is not meant for them
        ]

    @contextmanager
    def use(self, address: str) -> Iterator[grpc.Channel]:
        """The address's channel. An UNAVAILABLE that leaves the `with` gives the next user a new one.

        Otherwise that one would fail at once while grpc waits to reconnect. The last user closes the old one.
        """
        with self._lock:
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = _Link(grpc.insecure_channel(address, self._options))
            link.users += 1
        try:
            yield link.channel
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                link.broken = True
            raise
        finally:
            with self._lock:
                link.users -= 1
                if link.broken and self._links.get(address) is link:
                    del self._links[address]
                unused = link.broken and not link.users
            if unused:
                link.channel.close()

    def close(self) -> None:
        """Calls still running on a channel fail with CANCELLED."""
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.channel.close()
