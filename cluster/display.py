"""What `bifolio generate` and `bifolio status` show. Knows answers and states, nothing about how they are asked for."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any


class Answers:
    """Prints the answers to one request as they come: of several, one after the other, each under its number."""

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._now = 0  # the one that is printed; what comes of later ones is kept
        self._kept: dict[int, str] = defaultdict(str)
        self._reasons: dict[int, str] = {}
        self._last: Any = None

    def take(self, message: Any) -> None:
        if self._last is None:
            self._begin()
        self._last = message
        if message.finish_reason:
            self._reasons[message.choice] = message.finish_reason
        if message.choice != self._now:
            self._kept[message.choice] += message.text
            return
        print(message.text, end="", flush=True)
        while self._now in self._reasons and self._now + 1 < self._choices:
            self._now += 1
            print()
            self._begin()

    def _begin(self) -> None:
        if self._choices > 1:
            print(f"[{self._now}] {self._kept.pop(self._now, '')}", end="", flush=True)

    def end(self) -> None:
        """Also of half an answer."""
        if self._last is not None:
            print()

    def usage(self) -> str:
        """In one line."""
        usage = self._last.usage
        timings, route = usage.timings, usage.route
        parts = ("queue", "prefill", "transfer", "first_decode", "overhead")
        return (
            f"{usage.prompt_tokens}{f' ({usage.cached_tokens} cached)' if usage.cached_tokens else ''} + "
            f"{usage.completion_tokens} tokens, {', '.join(sorted(set(self._reasons.values())))}, seed {usage.seed}; "
            f"TTFT {timings.ttft * 1e3:.0f} ms = "
            + " + ".join(f"{part} {getattr(timings, part) * 1e3:.0f}" for part in parts)
            + f"; total {timings.total:.2f} s; prefilled on {route.prefill_replica or route.decode_replica}"
            + (f" ({route.reason})" if route.reason else "")
            + f", decoded on {route.decode_replica}, KV blocks moved: {route.blocks} ({route.bytes / 1e6:.1f} MB)"
            + (f", placed again: {route.resumes}" if route.resumes else "")
        )


def print_status(status: dict[str, Any]) -> None:
    """The KV manager's snapshot: replicas as a table, and what the cell has done since the manager began."""
    from rich.console import Console
    from rich.table import Table

    from bifolio.kv_manager.split import REASONS

    table = Table(title=f"{status['model']}: {status['waiting']} waiting", title_justify="left")
    words = ("id", "role", "state", "address")
    counts = ("pid", "free", "cached", "leased", "total", "offered", "active", "held")
    for name in words + counts:
        table.add_column(name, justify="right" if name in counts else "left")
    for replica in status["replicas"]:
        table.add_row(*(str(replica[name]) for name in words + counts))
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)  # in a pipe nothing is cut off
    console.print(table)
    if not status["store"]["answers"]:
        console.print(f"Redis is away: {status['store']['where']}; serving goes on, a cancel is not kept for a restart")
    cache = status["cache"]
    share = cache["hit_tokens"] / max(1, cache["asked_tokens"])
    console.print(
        f"cache: {cache['hit_tokens']} of {cache['asked_tokens']} tokens ({share:.1%}) were there when they were asked "
        f"for, {cache['evicted_blocks']} blocks evicted"
    )
    for reason, why in REASONS.items():
        if count := status["splits"].get(reason):
            console.print(f"{reason}: {count} {'request' if count == 1 else 'requests'}, {why}")
