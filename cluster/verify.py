"""`bifolio verify`: does the answer depend on how it was computed? Tried on the user's own model, shown as one table.

In exact mode every bit of every row of logits must agree, and each greedy token with transformers', where that is
installed; otherwise the exit status is 1. In bfloat16 and float16 the table shows how often a token flips.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bifolio.protos.errors import ConfigError, Unavailable

from .app import replica_environment, replica_spec
from .config import ClusterConfig
from .models import resolve
from .oracle import TIE, Oracle, Verdict
from .tokenizer import Tokenizer

LONG = 10_000  # token comparisons of `verify --long`, at least
PER_TOKEN = 4.5  # comparisons: four ways, and one that computes half of the answer

# Cut into prompts. Several scripts, numbers, code and joined characters: not only what is one token a word.
TEXT = """Serving a language model has two stages. Prefill reads the whole prompt at once and is limited by arithmetic;
decode writes one token at a time and is limited by memory. In 1843 Ada Lovelace wrote that the engine "might act upon
other things besides number". What would she have asked it first?
def gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a  # Euclid, Elements VII.2: gcd(1071, 462) == 21
Der Bogen Papier wird einmal gefaltet und hat dann zwei Blätter und vier Seiten. Le café coûte 2,50 €, n'est-ce pas ?
한 장의 종이를 접으면 두 장이 됩니다. 一枚の紙を二つに折る。 折一次，便成两页。 ورقة واحدة تُطوى مرة واحدة.
👩‍👩‍👧‍👦 and 🇵🇹 are one character each.
| step | tokens | ms |
|-----:|-------:|---:|
|    1 |    256 | 41 |
Question: Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips
did Natalia sell altogether in April and May? Answer: 48 / 2 = 24 clips in May, so 48 + 24 = 72 clips altogether.
"""


def verify(config: ClusterConfig, *, long: bool) -> int:
    """Compute, compare, print. Returns the exit status; raises ConfigError where `exact` does not hold at all."""
    model = resolve(config.model.source)
    tokenizer = Tokenizer.load(model)
    exact = config.engine.exact
    _prepare(config)
    from bifolio.replicas.model_files import model_config
    from bifolio.replicas.verify import BATCH, Verifier

    assert config.model.dtype is not None, "the configuration is resolved"
    context = model_config(model).max_positions
    console, began = Console(highlight=False), time.monotonic()
    with Verifier(replica_spec(config, model, ("", ""))) as verifier:
        most = min(context, verifier.most_tokens)
        if most < 2:
            raise ConfigError(
                f"engine.cache_tokens is {config.engine.cache_tokens}; needed to verify: "
                f"{BATCH * config.engine.block_size}, a block for each of {BATCH} sequences"
            )
        tokens = min(64 if long else 16, most // 2)
        count = BATCH * math.ceil(LONG / (PER_TOKEN * tokens * BATCH)) if long else BATCH
        print(f"computing {count} prompts in 6 ways, {tokens} tokens each", file=sys.stderr)
        prompts = list(itertools.islice(_prompts(tokenizer.encode(TEXT), most - tokens), count))
        with _progress() as progress:
            task = progress.add_task("reference", total=count)
            answers = []
            for prompt in prompts:
                answers.append(verifier.answer(prompt, tokens))
                progress.advance(task)
            results = []
            task = progress.add_task("other ways", total=5 * count)
            for way in verifier.ways(answers, lambda: progress.advance(task)):
                results.append(way)
                if not progress.console.is_terminal:  # which shows no bars
                    progress.console.print(f"{way.name}: {way.compared:,} compared, {time.monotonic() - began:.0f} s")
    verdict, reason = _judged([(a.prompt, a.tokens) for a in answers], model, config.model.dtype)

    lengths = sorted(map(len, prompts))
    quantized = f" with {config.model.quantization} weights" if config.model.quantization else ""
    console.print(
        f"{config.model.served_name}: {config.model.dtype}{quantized}, exact {'on' if exact else 'off'}, threads "
        f"{config.engine.threads}; {count} prompts of {lengths[0]} to {lengths[-1]} tokens, {tokens} tokens each; "
        f"{time.monotonic() - began:.0f} s",
        soft_wrap=True,
    )
    console.print(_table(results, verdict, reason))
    differing = sum(way.compared - way.equal for way in results)
    compared = sum(way.compared for way in results)
    what = "differences" if exact else "rows of logits with other bits"
    console.print(f"{differing:,} {what} in {compared:,} token comparisons")
    plain = config.model.dtype == "float32" and config.model.quantization is None
    wrong = plain and verdict.mismatches > 0
    return 1 if wrong or (exact and differing) else 0


def _prepare(config: ClusterConfig) -> None:
    """The environment of a replica, for this process: only works before torch is imported."""
    os.environ.update(replica_environment(config))


def _prompts(tokens: list[int], most: int) -> Any:
    """Pieces of the text: of one token, around the edges of blocks and chunks, and as long as fits."""
    stream = tokens * (2 + 1200 // len(tokens))
    lengths = (5, 16, 33, 64, 129, 257, 300, 520, 1, 15, 17, 31, 32, 48, 100, 255, 256, 272, 400, 640)
    for number, length in enumerate(itertools.cycle(lengths)):
        begin = number * 37 % len(tokens)
        yield stream[begin : begin + max(1, min(length, most))]


def _judged(answers: list[Any], model: Path, dtype: str) -> tuple[Verdict, str]:
    """Transformers' verdict, and why there is none."""
    verdict = Verdict()
    try:
        oracle = Oracle.load(model, dtype)
    except Unavailable as error:
        return verdict, error.message
    with _progress() as progress:
        for number, (prompt, tokens) in enumerate(progress.track(answers, description="transformers"), 1):
            oracle.judge(prompt, tokens, verdict, partial(progress.console.print, f"prompt {number},"))
    return verdict, ""


def _table(results: list[Any], verdict: Verdict, reason: str) -> Table:
    table = Table()
    table.add_column("computed")
    for name in ("compared", "bit-equal logits", "other token", "flip rate"):
        table.add_column(name, justify="right")
    for way in results:
        rate = f"{way.flips / way.compared:.2%}"
        table.add_row(way.name, f"{way.compared:,}", f"{way.equal:,}", f"{way.flips:,}", rate)
    if reason:
        table.add_row("by transformers", "no", "", "", "")
        table.caption = f"not compared with transformers: {reason}"
    else:
        others = verdict.ties + verdict.mismatches
        rate = f"{others / verdict.compared:.2%}"
        table.add_row("by transformers", f"{verdict.compared:,}", "", f"{others:,}", rate)
        if verdict.ties:
            table.caption = (
                f"other tokens than transformers': {verdict.ties} of {others} are ties, closer than {TIE:.0e}"
            )
    return table


def _progress() -> Progress:
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
