"""What `bifolio generate` and `bifolio status` show. Knows answers and states, nothing about how they are asked for."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

SILENT_S = 3.0  # a replica that has not reported for longer is shown as silent


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

    from bifolio.kv_manager.resumes import CAUSES
    from bifolio.kv_manager.split import REASONS

    words = ("id", "role", "state", "address")
    counts = ("pid", "free", "cached", "leased", "total", "offered", "active", "held")
    table = _table(f"{status['model']}: {status['waiting']} waiting", words, counts)
    for replica in status["replicas"]:
        shown = replica | {"state": _state(replica)}
        table.add_row(*(str(shown[name]) for name in words + counts))
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)  # in a pipe nothing is cut off
    console.print(table)
    if transfers := [replica for replica in status["replicas"] if _has_moved(replica["transfer"])]:
        console.print(_transfers(transfers))
    for lost in status["lost"]:
        console.print(f"lost {lost['ago_s']:.0f} s ago: {lost['role']} replica {lost['id']}: {lost['why']}")
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
    for cause, why in CAUSES.items():
        if count := status["resumes"].get(cause):
            console.print(f"placed again, {cause}: {count} {'time' if count == 1 else 'times'}, {why}")


def _state(replica: Mapping[str, Any]) -> str:
    """ "alive", "stalled: engine 6 s", "alive, silent for 4 s" """
    stalled = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in replica["stalled"].items())
    silent = f", silent for {silent_s:.0f} s" if (silent_s := replica["silent_s"]) >= SILENT_S else ""
    return f"{replica['state']}{f': {stalled}' if stalled else ''}{silent}"


def _table(title: str, words: Sequence[str], counts: Sequence[str], more: Sequence[str] = ()) -> Table:
    """Columns of words, then of counts, then of words again."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in (*words, *counts, *more):
        table.add_column(name, justify="right" if name in counts else "left")
    return table


def _has_moved(transfer: Mapping[str, Any]) -> bool:
    """Or tried to."""
    return any(transfer[key] for key in ("streams", "done", "failed", "frames"))


def _transfers(replicas: Iterable[Mapping[str, Any]]) -> Table:
    """What each has moved since its process began."""
    counts = ("moved", "frames", "in flight", "GB/s", "under way", "done")
    table = _table("transfers", ("id",), counts, ("failed", "blocks were", "seconds of waiting"))
    for replica in replicas:
        transfer = replica["transfer"]
        failed, ways, stalls = (_most_first(transfer[key]) for key in ("failed", "ways", "stalled_s"))
        table.add_row(
            replica["id"],
            f"{'sent' if replica['role'] == 'prefill' else 'received'} {_human(transfer['bytes'])}",
            f"{transfer['frames']:,}",
            str(transfer["in_flight"]),
            f"{transfer['bandwidth'] / 1e9:.2f}",
            str(transfer["streams"]),
            f"{transfer['done']:,}",
            ", ".join(f"{count:,} {error}" for error, count in failed) or "0",
            ", ".join(_way(way, count) for way, count in ways),
            ", ".join(f"{what_for} {seconds:,.1f}" for what_for, seconds in stalls),
        )
    return table


def _most_first(counts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _way(way: str, count: float) -> str:
    """ "sent: hidden" -> "sent 3: the other process is hidden" """
    from bifolio.kv_manager.traffic import WHY_NOT_COPIED

    words: Mapping[str, str] = {str(word): phrase for word, phrase in WHY_NOT_COPIED.items()}
    how, _, why = way.partition(": ")
    return f"{how} {count:,}" + (f": {words.get(why, why)}" if why else "")


def _human(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.2f} TB"
