"""`bifolio demo`: a real cluster, one question over HTTP and one over gRPC, twice, all streamed, then what they cost.

Knows the cluster only from outside, as any client does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bifolio.protos.errors import Unavailable

from .chat import Chat
from .client import Client
from .convert import usage_to_json
from .spawn import SpawnedCluster, spawned

MODEL = "smollm2-135m"

PASSAGE = (
    "Serving a language model has two stages. Prefill reads the whole prompt at once and is limited by arithmetic; "
    "decode writes one token at a time and is limited by memory. When both run on one device, a long prompt makes "
    "every other user's tokens wait. Splitting the stages onto two pools keeps the tokens steady: the prompt's keys "
    "and values are computed in one pool, moved block by block while the next part is still being computed, and the "
    "answer is written in the other. "
)
QUESTION = "Why are the two stages split?"

# Of a start: how the line begins with which a part ends, and what it was. Each is looked for behind the one before
_STARTS = (
    ("bifolio: starting Ray", "imports and checks"),
    ("bifolio: device", "Ray: its processes, and those that wait for work"),
    ("bifolio: loading", "Serve: its controller, its proxy, the KV manager"),
    ("bifolio: KV cache", "replicas: imports, weights, warm-up; the ingress"),
)


def run() -> int:
    console, began = Console(highlight=False), time.monotonic()
    with spawned(["--model", MODEL, "--prefill", "1", "--decode", "1"]) as cluster:
        console.print()
        usage, first = _over_http(console, cluster, "What is the capital of France? Answer in one sentence.")
        answers = [
            ("HTTP", usage),
            ("gRPC", _over_grpc(console, cluster, f"over gRPC[/] (a passage of some 400 tokens, then) {QUESTION}")),
            ("again", _over_grpc(console, cluster, "over gRPC, the same again[/]")),
        ]
        console.print(_table(answers))
        console.print(_start_table(parts_of_a_start(cluster.said, began, first)))
    return 0


def parts_of_a_start(said: Sequence[tuple[float, str]], began: float, first: float) -> list[tuple[str, float]]:
    """What the time from the command to the first token went to, in seconds; `said` are the cluster's lines."""
    parts, at, lines = list[tuple[str, float]](), began, iter(said)
    for begin, what in _STARTS:
        ended = next((when for when, line in lines if line.startswith(begin)), at)
        parts.append((what, ended - at))
        at = ended
    return [*parts, ("first answer, over HTTP", first - at)]


def _start_table(parts: Sequence[tuple[str, float]]) -> Table:
    table = Table(title="From the command to the first token")
    table.add_column("")
    table.add_column("seconds", justify="right")
    for what, seconds in parts:
        table.add_row(what, f"{seconds:.1f}")
    table.add_section()
    table.add_row("in all", f"{sum(seconds for _, seconds in parts):.1f}")
    return table


def _over_http(console: Console, cluster: SpawnedCluster, question: str) -> tuple[dict[str, Any], float]:
    """What it cost, and when its first token came."""
    console.print(f"[bold]over HTTP[/] {question}")
    connection = cluster.connect()
    messages = [{"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 40, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise Unavailable(f"HTTP {response.status}: {response.read().decode()}")
    usage: dict[str, Any] = {}
    first = 0.0
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            for choice in event["choices"]:
                first = first or (time.monotonic() if choice["delta"].get("content") else 0.0)
                console.print(choice["delta"].get("content", ""), end="", markup=False, soft_wrap=True)
            usage = event.get("usage") or usage
    console.print("\n")
    return usage, first


def _over_grpc(console: Console, cluster: SpawnedCluster, title: str) -> dict[str, Any]:
    console.print(f"[bold]{title}", soft_wrap=True)
    usage: dict[str, Any] = {}
    chat = Chat(({"role": "user", "content": PASSAGE * 4 + QUESTION},))
    with Client(cluster.grpc_address) as client:
        for message in client.generate(chat, max_tokens=60, temperature=0.0):
            console.print(message.text, end="", markup=False, soft_wrap=True)
            if message.HasField("usage"):
                usage = usage_to_json(message.usage)
    console.print("\n")
    return usage


def _table(answers: list[tuple[str, dict[str, Any]]]) -> Table:
    table = Table(title="Prefilled on one replica, decoded on another, cached on both")
    table.add_column("")
    for name, _ in answers:
        table.add_column(name, justify="right")

    def row(label: str, value: Any) -> None:
        table.add_row(label, *(value(usage) for _, usage in answers))

    def seconds(part: str) -> Any:
        return lambda usage: f"{1e3 * usage['timings'][part]:.1f} ms"

    row("prefill replica", lambda u: u["route"]["prefill_replica"] or "-")
    row("decode replica", lambda u: u["route"]["decode_replica"])
    row("prompt tokens", lambda u: str(u["prompt_tokens"]))
    row("  from the cache", lambda u: str(u["prompt_tokens_details"]["cached_tokens"]))
    row("split or not", lambda u: u["route"]["reason"])
    row("KV blocks moved", lambda u: str(u["route"]["blocks"]))
    row("bytes moved", lambda u: f"{u['route']['bytes']:,}")
    row("time to first token", seconds("ttft"))
    for part in ("queue", "prefill", "transfer", "first_decode", "overhead"):
        row(f"  {part.replace('_', ' ')}", seconds(part))
    row("tokens", lambda u: str(u["completion_tokens"]))
    row("tokens/s after the first", _rate)
    return table


def _rate(usage: dict[str, Any]) -> str:
    timings, tokens = usage["timings"], usage["completion_tokens"]
    spent = timings["total"] - timings["ttft"]
    return f"{(tokens - 1) / spent:.1f}" if tokens > 1 and spent > 0 else "-"
