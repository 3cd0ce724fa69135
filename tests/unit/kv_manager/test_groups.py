"""Which replicas may exchange blocks: those of one model, in one geometry. The fixture ends every test with
check_integrity."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ledger_kit import GEOMETRY, Side, ask, info, placed

from bifolio.kv_manager.ledger import Ledger
from bifolio.protos.errors import GeometryMismatch


@pytest.mark.parametrize(
    ("name", "mine", "theirs"),
    [
        ("block_size", 16, 4),
        ("dtype", "bfloat16", "float32"),
        ("layout", "packed", "plain"),
        ("layers", 2, 1),
        ("kv_heads", 3, 1),
        ("head_dim", 64, 8),
    ],
)
def test_the_same_model_in_other_blocks_is_refused_and_both_sides_are_named(
    ledger: Ledger, decode: Side, name: str, mine: object, theirs: object
) -> None:
    other = replace(info("e"), geometry=replace(GEOMETRY, **{name: mine}))  # type: ignore[arg-type]
    with pytest.raises(GeometryMismatch, match=rf"e \(.* {name}={mine} .*d \(.* {name}={theirs} "):
        Side(ledger, other)
    assert [r.id for r in ledger.replicas()] == ["d"]


def test_how_a_replica_divides_the_heads_is_its_own_business(ledger: Ledger, decode: Side) -> None:
    divided = replace(GEOMETRY, tensor_parallel=2)
    Side(ledger, replace(info("p", "prefill"), geometry=divided))
    placement = placed(ledger, ask("a", 24))
    assert placement.prefill is not None
    assert ledger.geometries() in ((GEOMETRY,), (divided,)), "a model's prompts are hashed once"


def test_other_models_are_other_groups(ledger: Ledger, decode: Side) -> None:
    other = replace(GEOMETRY, fingerprint="other", block_size=16)
    Side(ledger, replace(info("p", "prefill"), geometry=other))
    assert placed(ledger, ask("a", 24)).prefill is None
    assert ledger.geometries() == (GEOMETRY, other)


def test_a_request_with_tokens_stays_with_its_model(ledger: Ledger) -> None:
    Side(ledger, replace(info("e"), geometry=replace(GEOMETRY, fingerprint="other")))
    assert ledger.admit(ask("a", model="m"), 0) is None
    Side(ledger, info("d", max_sequences=1))
    placement = placed(ledger, ask("a", model="m"))
    assert (placement.decode.replica, placement.model) == ("d", "m")
    assert ledger.admit(ask("b", model="m"), 0) is None  # e has room
    assert placed(ledger, ask("c")).model == "other"
