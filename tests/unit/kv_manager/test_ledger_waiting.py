"""What the ledger says of those who wait: which replica is kept for them, and whether a name may come again."""

from __future__ import annotations

import pytest
from ledger_kit import Side, ask, info, placed

from bifolio.kv_manager.ledger import Ledger
from bifolio.protos.errors import Revoked
from bifolio.protos.messages import RequestId


def test_what_others_wait_for_is_kept(ledger: Ledger) -> None:
    few, many = Side(ledger, info("few", blocks=4)), Side(ledger, info("many", blocks=8))
    large = ask("large", 20)  # 6 blocks
    assert placed(ledger, large).decode.replica == many.info.id
    again = ask("again", 20)
    assert ledger.admit(again, 0) is None
    assert ledger.waits_for(again) == many.info.id  # the only one where it can ever fit
    assert ledger.admit(ask("small", 4), 0, {many.info.id}).decode.replica == few.info.id  # type: ignore[union-attr]
    assert ledger.admit(ask("small", 4), 0, {many.info.id, few.info.id}) is None
    ledger.check_integrity()


def test_a_prefill_replica_that_is_kept_is_there_all_the_same(always: Ledger) -> None:
    decode, prefill = Side(always, info("d", blocks=40)), Side(always, info("p", "prefill", blocks=40))
    assert placed(always, ask("a", 8)).prefill is not None
    assert always.admit(ask("b", 8), 0, {prefill.info.id}) is None  # waits, and is not computed at decode
    assert always.admit(ask("b", 8), 0, {decode.info.id}) is None
    always.check_integrity()


def test_the_name_of_a_request_that_was_known_may_be_used_again(ledger: Ledger) -> None:
    Side(ledger, info("d"))
    placed(ledger, ask("a"))
    ledger.revoke(RequestId("a"), 0)
    placed(ledger, ask("a"), 1)
    ledger.revoke(RequestId("refused"), 0, known=True)
    placed(ledger, ask("refused"), 1)
    ledger.revoke(RequestId("unheard of"), 0)
    with pytest.raises(Revoked):
        ledger.admit(ask("unheard of"), 1)
