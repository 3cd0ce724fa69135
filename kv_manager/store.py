"""What a cell remembers beyond the life of its KV manager: the newest epoch, and which requests were cancelled. Knows
nothing about leases, Ray or configuration.

    bifolio:{CELL}:epoch                   the newest epoch that a manager of the cell has had
    bifolio:{CELL}:cancelled:REQUEST       a tombstone; the store lets it expire

The braces are part of the keys: they keep a cell's keys together where keys are spread over servers. A store's methods
belong to one event loop, and raise Unavailable when it does not answer, within seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from bifolio.protos.errors import ConfigError, Unavailable
from bifolio.protos.messages import RequestId

from .redis_url import checked, shown

STEP_S = 1.0  # to connect, and for each answer
CALL_S = 2.0  # for all that a call asks
SCAN_S = 5.0
AT_ONCE = 1000  # keys

# Epochs are compared as decimal texts: Lua's numbers are doubles, which do not hold nanoseconds since 1970
_EPOCH = """
local newest = redis.call('GET', KEYS[1])
if not newest or #newest < #ARGV[1] or (#newest == #ARGV[1] and newest < ARGV[1]) then
  redis.call('SET', KEYS[1], ARGV[1])
elseif ARGV[2] == 'later' then
  redis.call('INCR', KEYS[1])
end
if ARGV[2] == 'later' then
  return redis.call('GET', KEYS[1])
end
return newest or '0'
"""

T = TypeVar("T")


class Store(Protocol):
    where: str  # for people, without passwords

    async def epoch(self, now_ns: int) -> int:
        """The time, or, if an epoch is stored that is not earlier, the one after it. Stored before this returns, so
        no two managers of the cell have the same."""

    async def keep(self, epoch: int) -> int:
        """Stores an epoch unless a later one is there. Returns what was there before: 0 is nothing."""

    async def bury(self, request: RequestId, seconds: float) -> None:
        """A tombstone for so long."""

    async def buried(self) -> dict[RequestId, float]:
        """The tombstones, and for how many seconds each still stands."""

    async def close(self) -> None: ...


class RedisStore:
    """In a Redis, or whatever speaks its protocol. ConfigError if its client cannot make sense of the address."""

    def __init__(self, url: str, cell: str) -> None:
        self.where = shown(url)
        self._prefix = f"bifolio:{{{cell}}}:"
        try:
            self._redis = Redis.from_url(
                checked(url),
                protocol=3,
                socket_timeout=STEP_S,
                socket_connect_timeout=STEP_S,
                retry=Retry(NoBackoff(), 1),  # a connection that broke while idle is made anew at once
                client_name="bifolio-kv-manager",
            )
        except ValueError as error:
            raise ConfigError(f"redis.url: {self.where}: {error}") from None

    async def epoch(self, now_ns: int) -> int:
        return await self._epoch(now_ns, "later")

    async def keep(self, epoch: int) -> int:
        return await self._epoch(epoch, "newest")

    async def bury(self, request: RequestId, seconds: float) -> None:
        key = self._tombstones + request.encode("utf-8", "surrogatepass")
        await self._ask(lambda: self._redis.set(key, b"", px=max(1, int(seconds * 1000))))

    async def buried(self) -> dict[RequestId, float]:
        return await self._ask(self._scan, SCAN_S)

    async def close(self) -> None:
        await self._redis.aclose()

    @property
    def _tombstones(self) -> bytes:
        return f"{self._prefix}cancelled:".encode()

    async def _epoch(self, epoch: int, which: str) -> int:
        async def call() -> int:
            return int(await self._redis.eval(_EPOCH, 1, f"{self._prefix}epoch", str(epoch), which))

        return await self._ask(call)

    async def _scan(self) -> dict[RequestId, float]:
        pattern = b"".join(b"\\" + bytes([c]) if c in b"\\*?[]" else bytes([c]) for c in self._tombstones) + b"*"
        keys = [key async for key in self._redis.scan_iter(match=pattern, count=AT_ONCE)]
        found: dict[RequestId, float] = {}
        for begin in range(0, len(keys), AT_ONCE):
            some = keys[begin : begin + AT_ONCE]
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key in some:
                    pipeline.pttl(key)
                left = await pipeline.execute()
            names = (key[len(self._tombstones) :].decode("utf-8", "surrogatepass") for key in some)
            found.update((RequestId(name), ms / 1000) for name, ms in zip(names, left, strict=True) if ms > 0)
        return found

    async def _ask(self, call: Callable[[], Awaitable[T]], seconds: float = CALL_S) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await call()
        except (RedisError, OSError, ValueError) as error:  # ValueError: what it answers is no number
            raise Unavailable(f"{self.where} cannot be used: {str(error) or type(error).__name__}") from error


class MemoryStore:
    """In this process, and no longer than it: where there is no Redis, and for tests."""

    where = "memory"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest = 0
        self._until: dict[RequestId, float] = {}

    async def epoch(self, now_ns: int) -> int:
        self._newest = max(now_ns, self._newest + 1)
        return self._newest

    async def keep(self, epoch: int) -> int:
        before, self._newest = self._newest, max(epoch, self._newest)
        return before

    async def bury(self, request: RequestId, seconds: float) -> None:
        await self.buried()  # which forgets those that are over
        self._until[request] = self._clock() + seconds

    async def buried(self) -> dict[RequestId, float]:
        now = self._clock()
        self._until = {request: until for request, until in self._until.items() if until > now}
        return {request: until - now for request, until in self._until.items()}

    async def close(self) -> None:
        pass


def cell_of(name: str, namespace: str) -> str:
    """The cell of the KV manager that Ray knows by this name."""
    return f"{namespace}/{name}"


async def reach(url: str, cell: str) -> None:
    """Unavailable, with the reason, unless a Redis answers there and can be written."""
    store = RedisStore(url, cell)
    try:
        await store.keep(0)
        await store.bury(RequestId(""), 0.001)  # this one surely writes
    finally:
        await store.close()
