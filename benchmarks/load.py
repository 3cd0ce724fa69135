#!/usr/bin/env python3
"""Load on an OpenAI-compatible endpoint, whoever serves it, and how its answers came.

    python -P benchmarks/load.py --url http://127.0.0.1:8000/v1 steady --concurrency 4 --requests 40
    python -P benchmarks/load.py steady --rate 2 --duration 60 --prompt-tokens 100-500 --output-tokens 64
    python -P benchmarks/load.py mixed --extensions vllm
    python -P benchmarks/load.py trace mooncake_conversation.jsonl.gz --divide 32 --window 300 --clock-scale 10
    python -P benchmarks/load.py trace azure2023_code.csv.gz --divide 32 --limit 200 --dry-run

`steady` are requests of one kind, so many at a time or so many a second; `mixed` are decoding streams, and in every
second phase long prompts besides, so what the one does to the other is measured in one run; `trace` sends a recorded
one. The plan is made first and no answer changes it; --dry-run prints it and sends nothing. Ctrl-C prints what there
is. An API key is taken from $OPENAI_API_KEY. The exit status is 0 if no request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import platform
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

sys.path.append(os.path.dirname(__file__))
import load_show
import measure
from load_client import Answer, Client, Endpoint, first_model
from load_figures import Slo, figures, records
from load_plan import Lengths, Plan, mixed, statistics, steady
from load_run import Run, drive
from load_text import Book, InputError, open_book
from load_trace import trace


def main() -> int:
    args = parser().parse_args()
    try:
        book, source = open_book(args.text, args.tokenizer)
        if args.token_ids and (args.chat or not book.exact):
            raise InputError("--token-ids needs --tokenizer, and /v1/completions (no --chat)")
        plan = make_plan(args, book)
        if not (known := plan.known()):
            raise InputError("the plan has no requests; a longer --window or --duration, or a larger --context may do")
        counts = statistics(plan)
        measure.show(*load_show.plan_shown(plan, counts, source))
        results: dict[str, Any] = {"plan": {"what": plan.what, "source": source} | counts}
        if args.dry_run:
            measure.write_json(args.json, results)
            return 0
        with uvloop_runner() as runner:
            endpoint = runner.run(make_endpoint(args))
            keep = book if book.exact else None
            run = runner.run(
                send(plan, endpoint, keep_text=keep is not None, warm_up=warm_ups(known, args.warmup, book))
            )
    except InputError as error:
        print(f"load.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # nothing that counts was sent yet
        return 130
    found = figures(plan, run, Slo(args.slo_ttft, args.slo_itl), keep)
    if run.interrupted:
        measure.show("interrupted: what there is so far")
    measure.show(*load_show.figures_shown(found))
    options = {name: str(value) if isinstance(value, Path | Lengths) else value for name, value in vars(args).items()}
    results |= {"options": options, "model": endpoint.model, "client": facts(), "figures": found}
    measure.write_json(args.json, results | {"requests": records(run, keep)})
    return 130 if run.interrupted else int(found["requests"]["failed"] > 0)


def uvloop_runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def make_plan(args: argparse.Namespace, book: Book) -> Plan:
    match args.workload:
        case "steady":
            return steady(
                book,
                prompt_tokens=args.prompt_tokens,
                output_tokens=args.output_tokens,
                concurrency=args.concurrency,
                rate=args.rate,
                uniform=args.uniform,
                requests=args.requests,
                duration=args.duration,
                seed=args.seed,
            )
        case "mixed":
            return mixed(
                book,
                streams=args.streams,
                stream_prompt=args.stream_prompt,
                stream_output=args.stream_output,
                long_prompt=args.long_prompt,
                long_output=args.long_output,
                long_every=args.long_every,
                phase_seconds=args.phase_seconds,
                phases=args.phases,
                settle=args.settle,
                seed=args.seed,
            )
    return trace(
        book,
        args.file,
        divide=args.divide,
        window=args.window,
        limit=args.limit,
        context=args.context,
        clock_scale=args.clock_scale,
        spread_batches=args.spread,
        session_every=args.session_every,
        seed=args.seed,
    )


async def make_endpoint(args: argparse.Namespace) -> Endpoint:
    key = os.environ.get("OPENAI_API_KEY", "")
    try:
        model = args.model or await first_model(args.url, key)
    except (aiohttp.ClientError, TimeoutError, LookupError, ValueError) as error:
        raise InputError(f"{args.url}/models does not say which models there are ({error}); is --url right?") from error
    return Endpoint(
        args.url,
        model,
        chat=args.chat,
        token_ids=args.token_ids,
        vllm=args.extensions == "vllm",
        continuous_usage=args.continuous_usage,
        usage=not args.no_usage,
        temperature=args.temperature,
        timeout=args.timeout,
        key=key,
    )


def warm_ups(known: list[Any], count: int, book: Book) -> list[Any]:
    """As long as the plan's first requests, with texts that it has not."""
    return [
        (book.prompt(f"warm-up {i}", len(known[i % len(known)].prompt.ids)), known[i % len(known)].output_tokens)
        for i in range(count)
    ]


async def send(plan: Plan, endpoint: Endpoint, *, keep_text: bool, warm_up: list[Any]) -> Run:
    run, stop = Run(), asyncio.Event()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # an overloaded server keeps many connections open
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    async with Client(endpoint, keep_text=keep_text) as client:
        for prompt, tokens in warm_up:
            answer = Answer()
            await client.ask(prompt, tokens, answer)
            if answer.status == "failed":
                raise InputError(f"a warm-up request failed: {answer.error}: {answer.message}")
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop.set)
        gc.collect()
        gc.freeze()  # looking through the plan again and again would make the client late
        client.events = 0
        showing = asyncio.create_task(load_show.report(run, client))
        try:
            await drive(plan, client.ask, run, stop)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
    return run


def facts() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _shared(made, later=False)
    workloads = made.add_subparsers(dest="workload", required=True, metavar="steady|mixed|trace")

    steady = workloads.add_parser("steady", help="requests of one kind")
    steady.add_argument("--concurrency", type=_count, metavar="N", help="closed loop: so many at a time")
    steady.add_argument("--rate", type=_positive, metavar="R", help="open loop: so many a second, Poisson")
    steady.add_argument("--uniform", action="store_true", help="with --rate: evenly instead")
    steady.add_argument("--prompt-tokens", type=Lengths.parse, default=Lengths(256, 256), metavar="N|LOW-HIGH")
    steady.add_argument("--output-tokens", type=Lengths.parse, default=Lengths(64, 64), metavar="N|LOW-HIGH")
    steady.add_argument("--requests", type=_count, metavar="N")
    steady.add_argument("--duration", type=_positive, metavar="SECONDS", help="nothing is sent afterwards")

    mixed = workloads.add_parser("mixed", help="decoding streams, by turns without and with long prompts")
    for name, default, kind, text in (
        ("streams", 8, _count, "streams that decode all the time"),
        ("stream-prompt", 32, _count, "tokens"),
        ("stream-output", 256, _count, "tokens"),
        ("long-prompt", 1600, _count, "tokens"),
        ("long-output", 16, _count, "tokens"),
        ("long-every", 3.0, _positive, "seconds"),
        ("phase-seconds", 15.0, _positive, "seconds of a phase"),
        ("phases", 8, _count, "phases; an even number"),
        ("settle", 3.0, _positive, "seconds before the first phase"),
    ):
        mixed.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=f"{text}; default: %(default)s")

    trace = workloads.add_parser("trace", help="a recorded trace: Mooncake's, Azure's or agents'")
    trace.add_argument("file", type=Path, metavar="FILE")
    trace.add_argument("--divide", type=_count, default=1, metavar="D", help="lengths by D; 32: an id is 16 tokens")
    trace.add_argument("--window", type=_positive, metavar="SECONDS", help="only these first ones of the trace")
    trace.add_argument("--limit", type=_count, metavar="N", help="only the first N requests")
    trace.add_argument("--context", type=_count, metavar="N", help="leave out what has more tokens, prompt and output")
    trace.add_argument("--clock-scale", type=_positive, default=1.0, metavar="X", help="its clock X times slower")
    trace.add_argument("--spread", action="store_true", help="requests of one time evenly over the next 3 s")
    trace.add_argument("--session-every", type=_positive, metavar="SECONDS", help="begin sessions so, not as recorded")
    for each in (steady, mixed, trace):
        _shared(each, later=True)
    return made


def _shared(to: argparse.ArgumentParser, *, later: bool) -> None:
    """Options that may stand before the workload or after it; there they have no defaults, or those would win."""

    def add(name: str, text: str, default: Any = None, **how: Any) -> None:
        to.add_argument(name, help=text, default=argparse.SUPPRESS if later else default, **how)

    add("--url", "default: http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1", metavar="URL")
    add("--model", "default: the first one that it lists", metavar="NAME")
    add("--chat", "/v1/chat/completions; default: /v1/completions", False, action="store_true")
    add("--token-ids", "prompts as token ids, with --tokenizer", False, action="store_true")
    add("--tokenizer", "for exact lengths: tokenizer.json, its directory, or .gguf", type=Path, metavar="PATH")
    add("--text", "what prompts are cut from; default: tinyshakespeare, if it is there", type=Path, metavar="FILE")
    add("--extensions", "vllm: ask with ignore_eos and min_tokens", "", choices=("vllm",))
    add("--continuous-usage", "ask for the usage in every chunk, as vLLM has it", False, action="store_true")
    add("--no-usage", "do not send stream_options", False, action="store_true")
    add("--temperature", "default: 0", 0.0, type=float, metavar="T")
    add("--timeout", "of a request; default: 600", 600.0, type=_positive, metavar="SECONDS")
    add("--warmup", "requests before, which are not counted; default: 0", 0, type=int, metavar="N")
    add("--slo-ttft", "goodput: the first token within", type=_positive, metavar="SECONDS")
    add("--slo-itl", "goodput: p99 of a request's gaps within", type=_positive, metavar="SECONDS")
    add("--seed", "of arrivals and texts; default: 0", 0, type=int, metavar="S")
    add("--dry-run", "print the plan's statistics and send nothing", False, action="store_true")
    add("--json", "also write everything, with each request's times", type=Path, metavar="FILE")


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
