"""Recorded traces as plans: Mooncake's (lengths and ids of prefix blocks), Azure's (lengths), and agents' (texts).

Which one a file is, its first line says. Traces longer than a model's context can be divided: Mooncake's keeps its
sharing exactly, as one id is 512 tokens and so 512 / `divide` of ours. Knows nothing of servers.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from load_plan import Plan, Request
from load_text import EMPTY, Book, InputError, Prompt, read_text

MOONCAKE_BLOCK = 512
KNOWN = "allowed: Mooncake's and agents' JSON lines, Azure's CSV, gzipped or not"
BATCH = 3.0  # seconds to which Mooncake's conversation trace rounds its times


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace. Its prompt is made last: most rows of a file are often not wanted."""

    at: float  # seconds
    prompt_tokens: int | None  # None: the prompt tells
    output_tokens: int
    prompt: Callable[[], Prompt]
    session: str = ""


def trace(
    book: Book,
    path: Path,
    *,
    divide: int = 1,
    window: float | None = None,
    limit: int | None = None,
    context: int | None = None,
    clock_scale: float = 1.0,
    spread_batches: bool = False,
    session_every: float | None = None,
    seed: int = 0,
) -> Plan:
    """`window` and `session_every` are seconds of the trace's own clock, which `clock_scale` slows afterwards."""
    kind, rows = _rows(book, path, divide, seed)
    if kind != "agents" and session_every is not None:
        raise InputError(f"{path.name} has no sessions; --session-every is for agents' traces")
    if kind == "agents" and divide != 1:
        raise InputError(f"{path.name} has its own texts, which cannot be divided; leave --divide out")
    if spread_batches:
        rows = list(_spread(rows))
    if session_every is not None:
        rows = _restarted(rows, session_every)
    rows = [row for row in rows if window is None or row.at < window]
    requests: list[Request] = []
    left_out = 0
    for row in rows:
        if limit is not None and len(requests) >= limit:
            break
        # Known lengths first: a prompt that is left out need not be made
        known = row.prompt_tokens
        prompt = None if known is not None and _too_long(known, row, context) else row.prompt()
        if prompt is None or _too_long(len(prompt.ids), row, context):
            left_out += 1
            continue
        requests.append(Request(len(requests), prompt, row.output_tokens, row.at * clock_scale, row.session))
    what = [f"{kind} trace {path.name}"]
    what += [f"lengths / {divide}"] if divide != 1 else []
    what += [f"its first {window:g} s"] if window is not None else []
    what += [f"batches spread over {BATCH:g} s"] if spread_batches else []
    what += [f"a session begins every {session_every:g} s"] if session_every is not None else []
    return Plan(", ".join(what), tuple(requests), left_out=left_out, clock_scale=clock_scale)


def _too_long(prompt_tokens: int, row: Row, context: int | None) -> bool:
    return context is not None and prompt_tokens + row.output_tokens > context


def _rows(book: Book, path: Path, divide: int, seed: int) -> tuple[str, list[Row]]:
    lines = read_text(path).splitlines()
    first = lines[0] if lines else ""
    try:
        if first.startswith("TIMESTAMP,"):
            return "Azure", _from_zero(list(_azure(book, lines, divide, seed)))
        fields = json.loads(first)
        if "hash_ids" in fields:
            return "Mooncake", _from_zero(list(_mooncake(book, lines, divide)))
        if "session_id" in fields:
            return "agents", _from_zero(list(_agents(book, lines)))
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is no known trace ({error!r}); {KNOWN}") from error
    raise InputError(f"{path} is no known trace; {KNOWN}")


def _mooncake(book: Book, lines: Sequence[str], divide: int) -> Iterator[Row]:
    block = MOONCAKE_BLOCK // divide
    if block * divide != MOONCAKE_BLOCK:
        raise InputError(f"--divide is {divide}; of Mooncake's traces allowed: 1, 2, 4, ... 512, as a block has 512")
    for line in lines:
        fields: dict[str, Any] = json.loads(line)
        tokens, ids = _divided(fields["input_length"], divide), tuple(fields["hash_ids"])

        def prompt(tokens: int = tokens, ids: tuple[int, ...] = ids) -> Prompt:
            parts = (book.prompt(f"block {id}", block, tokens - block * k) for k, id in enumerate(ids))
            return sum(parts, EMPTY)

        yield Row(fields["timestamp"] / 1e3, tokens, _divided(fields["output_length"], divide), prompt)


def _azure(book: Book, lines: Sequence[str], divide: int, seed: int) -> Iterator[Row]:
    for i, fields in enumerate(csv.DictReader(lines)):
        at = datetime.strptime(fields["TIMESTAMP"][:26], "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=UTC).timestamp()
        tokens = _divided(int(fields["ContextTokens"]), divide)

        def prompt(i: int = i, tokens: int = tokens) -> Prompt:
            return book.prompt(f"azure {seed} {i}", tokens)

        yield Row(at, tokens, _divided(int(fields["GeneratedTokens"]), divide), prompt)


def _agents(book: Book, lines: Sequence[str]) -> Iterator[Row]:
    for line in lines:
        fields = json.loads(line)
        said = len(book.read(fields["output"]).ids)
        text = fields["input"]

        def prompt(text: str = text) -> Prompt:
            return book.read(text)

        yield Row(fields["timestamp"] / 1e6, None, max(1, said), prompt, fields["session_id"])


def _divided(length: int, divide: int) -> int:
    """Rounded up, and never nothing."""
    return max(1, -(-length // divide))


def _from_zero(rows: list[Row]) -> list[Row]:
    """By time, the first one at 0."""
    rows.sort(key=lambda row: row.at)
    return [replace(row, at=row.at - rows[0].at) for row in rows]


def _spread(rows: list[Row]) -> Iterator[Row]:
    """Requests of one time, evenly over the seconds until the next batch may come."""
    for at, batch in groupby(rows, key=lambda row: row.at):
        each = list(batch)
        yield from (replace(row, at=at + BATCH * k / len(each)) for k, row in enumerate(each))


def _restarted(rows: list[Row], every: float) -> list[Row]:
    """Sessions begin `every` seconds, in their order, and keep their own pace."""
    shifts: dict[str, float] = {}
    for row in rows:
        shifts.setdefault(row.session, every * len(shifts) - row.at)
    return sorted((replace(row, at=row.at + shifts[row.session]) for row in rows), key=lambda row: row.at)
