"""A ledger, checked when a test ends, and a decode replica at its side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ledger_kit import CONFIG, Side, info

from bifolio.kv_manager.ledger import Ledger


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger(1, CONFIG)
    yield ledger
    ledger.check_integrity()


@pytest.fixture
def always() -> Iterator[Ledger]:
    """One that leaves no prompt to decode."""
    ledger = Ledger(1, CONFIG.model_copy(update={"split": "always"}))
    yield ledger
    ledger.check_integrity()


@pytest.fixture
def decode(ledger: Ledger) -> Side:
    return Side(ledger, info("d"))
