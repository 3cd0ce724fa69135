"""Whether a prompt is computed on a prefill replica: the rule, case by case."""

from __future__ import annotations

from typing import Literal, get_args

import pytest
from ledger_kit import CONFIG, info

from bifolio.kv_manager import split
from bifolio.kv_manager.book import Book
from bifolio.kv_manager.policy import Need
from bifolio.kv_manager.prefix_index import PrefixIndex
from bifolio.kv_manager.split import Choice
from bifolio.protos.measures import Speeds
from bifolio.protos.messages import Role

UNMEASURED = Speeds()
SHORT = CONFIG.local_blocks * 4  # the most tokens that a decode replica may compute


def need(role: Role, tokens: int, speeds: Speeds = UNMEASURED, queued: int = 0) -> Need:
    book = Book(info(role, role, 100), PrefixIndex().add())
    book.speeds, book.queued = speeds, queued
    return Need(book, 1, 0, 10, tokens)


def choose(
    decode: Need, prefill: Need | None, mode: Literal["auto", "always", "never"] = "auto", *, able: bool = True
) -> Choice:
    return split.choose(CONFIG.model_copy(update={"split": mode}), decode, prefill, able=able, speed=100)


def test_always_and_never_look_at_nothing_else() -> None:
    for tokens in (1, 1000):
        for prefill, able in ((need("prefill", tokens), True), (None, True), (None, False)):
            assert choose(need("decode", tokens), prefill, "always", able=able) == Choice(False, "always")
            assert choose(need("decode", tokens), prefill, "never", able=able) == Choice(True, "never")


def test_without_a_prefill_replica_decode_computes_everything() -> None:
    assert choose(need("decode", 1000), None, able=False) == Choice(True, "no_prefill")


def test_what_is_long_is_split_or_waits() -> None:
    assert choose(need("decode", SHORT + 1), need("prefill", 100)) == Choice(False, "long")
    assert choose(need("decode", SHORT + 1), None) == Choice(False, "long")  # all are busy


def test_what_is_short_does_not_wait() -> None:
    assert choose(need("decode", SHORT), None) == Choice(True, "short")


@pytest.mark.parametrize(
    ("tokens", "queued", "transfer", "reason"),
    [
        (10, 0, 0.05, "quick"),  # 0.1 s here, and 0.05 s until it could come from there
        (10, 0, 0.1, "short"),
        (10, 10, 0.0, "quick"),  # 0.05 s of others before it there
        (10, 10, 0.05, "short"),
        (5, 10, 0.0, "short"),
    ],
)
def test_what_is_short_stays_if_it_is_done_before_a_prefill_replica_comes_to_it(
    tokens: int, queued: int, transfer: float, reason: str
) -> None:
    """The time it takes there is not compared: what decode computes makes its other sequences wait."""
    decode = need("decode", tokens, Speeds(prefill=100, transfer=transfer))
    prefill = need("prefill", tokens, Speeds(prefill=200), queued)
    assert choose(decode, prefill) == Choice(reason == "short", reason)  # type: ignore[arg-type]


def test_what_decode_alone_has_counts_as_a_wait_for_prefill() -> None:
    """As in the next turn of a conversation: its answers are cached at decode."""
    decode = need("decode", 10, Speeds(prefill=100))
    assert choose(decode, need("prefill", 29, Speeds(prefill=200))) == Choice(False, "quick")  # 19 tokens in 0.095 s
    assert choose(decode, need("prefill", 30, Speeds(prefill=200))) == Choice(True, "short")


def test_who_has_not_measured_is_taken_for_the_mean() -> None:
    assert choose(need("decode", 10, Speeds(transfer=0.1)), need("prefill", 10)) == Choice(True, "short")
    assert choose(need("decode", 11, Speeds(transfer=0.1)), need("prefill", 11)) == Choice(False, "quick")


def test_each_reason_is_told_to_people() -> None:
    assert set(split.REASONS) == set(get_args(split.Reason))
