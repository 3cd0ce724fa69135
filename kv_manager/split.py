"""Whether a request's prompt is computed on a prefill replica or by the decode replica itself. Pure.

What the decode replica computes makes its other sequences wait, step by step. So it takes only what is short, and only
if that is done before a prefill replica would come to it and hand it over:

    tokens that decode lacks / its speed
        <=  seconds queued at the prefill replica + seconds that a hand-over adds
            + tokens that prefill lacks beyond those / its speed

The last line counts where decode has more of the history: answers are cached there alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .config import KvConfig
from .policy import Need, seconds

Reason = Literal["always", "never", "no_prefill", "long", "short", "quick"]

REASONS: dict[Reason, str] = {
    "always": "split: kv.split says so",
    "never": "local: kv.split says so",
    "no_prefill": "local: no prefill replica can take it",
    "long": "split: the decode replica lacks more than kv.local_blocks blocks",
    "short": "local: done before a prefill replica would come to it",
    "quick": "split: short, but a prefill replica is quicker",
}


@dataclass(frozen=True, slots=True)
class Choice:
    local: bool
    reason: Reason


def choose(config: KvConfig, decode: Need, prefill: Need | None, *, able: bool, speed: float) -> Choice:
    """`able`: prefill replicas could take the prompt, now or later; `prefill`: the one that would take it now.

    `speed`: prompt tokens a second of a replica that has not measured.
    """
    if config.split == "never":
        return Choice(True, "never")
    if config.split == "always":
        return Choice(False, "always")
    if not able:
        return Choice(True, "no_prefill")
    if decode.tokens > config.local_blocks * decode.book.block_size:
        return Choice(False, "long")
    if prefill is None:
        return Choice(True, "short")
    local = seconds(decode.book, decode.tokens, speed)
    before = prefill.book.queued + max(0, prefill.tokens - decode.tokens)  # tokens, until it comes to what decode lacks
    there = seconds(prefill.book, before, speed) + decode.book.speeds.transfer
    return Choice(True, "short") if local <= there else Choice(False, "quick")
