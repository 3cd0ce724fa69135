"""`bifolio verify`: does the answer depend on how it was computed? Tried on the user's own model, shown as one table.

In exact mode every bit of every row of logits must agree, and each greedy token with transformers', where that is
installed; otherwise the exit status is 1. In bfloat16 and float16, and on GPUs, the table shows how often a token flips
and how far logits are apart; there only a decode step that chooses another token when it is replayed is a failure.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bifolio.protos.errors import ConfigError, Unavailable

from .app import replica_environment, replica_spec
from .config import ClusterConfig, PoolsConfig
from .devices import Node, on_devices
from .models import resolve
from .oracle import TIE, Oracle, Verdict
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from bifolio.replicas.differences import Way

LONG = 10_000  # token comparisons of `verify --long`, at least
PER_TOKEN = 5.5  # comparisons, at least: five ways, and one that computes half of the answer

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
    config = _prepared(config)
    from bifolio.replicas.verify import Verifier

    assert config.model.dtype is not None, "the configuration is resolved"
    console, began = Console(highlight=False, width=None if sys.stdout.isatty() else 120), time.monotonic()
    with Verifier(replica_spec(config, model, ("", ""))) as verifier:
        most, batch = verifier.most_tokens, verifier.batch
        if most < 2:
            raise ConfigError(
                f"engine.kv_memory is {config.engine.kv_memory}; needed to verify: "
                f"{batch * config.engine.block_size} tokens, a block for each of {batch} sequences"
            )
        tokens = min(64 if long else 3 if verifier.interpreted else 16, most // 2)
        count = batch * math.ceil(LONG / (PER_TOKEN * tokens * batch)) if long else batch
        ways = 1 + verifier.ways_there
        print(f"computing {count} prompts in {ways} ways, {tokens} tokens each", file=sys.stderr)
        prompts = list(itertools.islice(_prompts(tokenizer.encode(TEXT), most - tokens), count))
        answers: list[tuple[Any, Any]] = []
        results: dict[str, Way] = {}
        with _progress() as progress:
            task = progress.add_task("computing", total=ways * count)
            # One batch after the other: the logits of more are not held
            for first in range(0, count, batch):
                group = []
                for prompt in prompts[first : first + batch]:
                    group.append(verifier.answer(prompt, tokens))
                    progress.advance(task)
                for way in verifier.ways(group, lambda: progress.advance(task)):
                    results.setdefault(way.name, way.fresh()).add(way)
                    if not progress.console.is_terminal:  # which shows no bars
                        done = results[way.name].compared
                        progress.console.print(f"{way.name}: {done:,} compared, {time.monotonic() - began:.0f} s")
                answers += [(a.prompt, a.tokens) for a in group]
        missing = verifier.float32.missing if verifier.float32 else ""
    verdict, reason = _judged(answers, model, config.model.dtype)

    lengths = sorted(map(len, prompts))
    console.print(
        f"{config.model.served_name}: {_computing(config)}, exact {'on' if config.engine.exact else 'off'}, threads "
        f"{config.engine.threads}; {count} prompts of {lengths[0]} to {lengths[-1]} tokens, {tokens} tokens each; "
        f"{time.monotonic() - began:.0f} s",
        soft_wrap=True,
    )
    console.print(_table(list(results.values()), verdict, reason, missing))
    return _concluded(config, list(results.values()), verdict, console)


def _concluded(config: ClusterConfig, results: list[Way], verdict: Verdict, console: Console) -> int:
    """The last line, and the exit status."""
    exact = config.engine.exact
    here = [way for way in results if way.against != "float32"]  # of that nobody expects the same bits
    differing = sum(way.compared - way.equal for way in here)
    what = "differences" if exact else "rows of logits with other bits"
    console.print(f"{differing:,} {what} in {sum(way.compared for way in here):,} token comparisons")
    replayed = sum(way.flips for way in results if way.against == "eager")
    if replayed:
        console.print(
            f"{replayed:,} replayed decode steps choose another token: a mistake of Bifolio or of the driver; "
            "engine.cuda_graphs: false computes without them"
        )
    plain = config.model.dtype == "float32" and config.model.quantization is None
    wrong = plain and verdict.mismatches > 0
    return 1 if wrong or replayed or (exact and differing) else 0


def _computing(config: ClusterConfig) -> str:
    """In which numbers, by what; what is usual is not named."""
    engine, quantization = config.engine, config.model.quantization
    on = "" if engine.device == "cpu" else f" on {engine.device}"
    by = f", {engine.kernels} kernels" if engine.kernels == "triton" else ""
    return f"{config.model.dtype}{on}{f' with {quantization} weights' if quantization else ''}{by}"


def _prepared(config: ClusterConfig) -> ClusterConfig:
    """The environment of a replica, for this process: only works before torch is imported. Then what is left open is
    decided as `serve` does on this machine alone: `auto` is the CPU where exactness is asked for."""
    os.environ.update(replica_environment(config))
    import torch

    alone = config.model_copy(update={"pools": PoolsConfig()})  # however many replicas there would be
    return on_devices(alone, [Node(torch.cuda.device_count())])


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


def _table(results: list[Way], verdict: Verdict, reason: str, missing: str) -> Table:
    """`reason`, `missing`: why transformers and the CPU's float32 were not asked, if they were not."""
    table = Table()
    table.add_column("computed", no_wrap=True)
    for name in ("compared", "bit-equal logits", "other token", "flip rate", "largest difference", "mean"):
        table.add_column(name, justify="right")
    for way in results:
        counts = (f"{way.compared:,}", f"{way.equal:,}", f"{way.flips:,}", f"{way.flip_rate:.2%}")
        table.add_row(way.name, *counts, _small(way.largest), _small(way.mean))
    notes = [f"not compared with float32 on the CPU: it {missing}"] if missing else []
    if reason:
        table.add_row("by transformers", "no", *[""] * 5)
        notes.append(f"not compared with transformers: {reason}")
    else:
        others = verdict.ties + verdict.mismatches
        rate = f"{others / verdict.compared:.2%}"
        table.add_row("by transformers", f"{verdict.compared:,}", "", f"{others:,}", rate, "", "")
        if verdict.ties:
            notes.append(f"other tokens than transformers': {verdict.ties} of {others} are ties, closer than {TIE:.0e}")
    if any(way.against == "eager" for way in results):
        notes.append("graph: replayed decode steps against the same ones launched kernel by kernel")
    table.caption = "\n".join(notes) or None
    return table


def _small(number: float) -> str:
    return f"{number:.1e}" if number else "0"


def _progress() -> Progress:
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
