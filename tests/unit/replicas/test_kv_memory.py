"""How large a cache is: the forms it is asked for in, the arithmetic by hand, and what is refused with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bifolio.protos.errors import ConfigError
from bifolio.replicas.config import EngineConfig
from bifolio.replicas.device import HostDevice
from bifolio.replicas.kv_memory import (
    CUDA_OVERHEAD,
    BlockShape,
    Budget,
    KvMemory,
    Sizing,
    check_host,
    context_of,
    parse,
    size,
    size_cache,
)
from bifolio.replicas.model_config import LlamaConfig

GIB, MIB = 1 << 30, 1 << 20
SHAPE = BlockShape(16, 8, 64, 64, 2)  # 2 MiB
# Half of 80 GiB, of which 1 GiB is CUDA's: 39 GiB, and 2 + 1.5 + 0.5 GiB are taken: 35 GiB
HALF = Budget(80 * GIB, 60 * GIB, 2 * GIB, 0.5, 2 * GIB, 3 * GIB // 2, GIB // 2, overhead=GIB)
HOST = Budget(16 * GIB, 4 * GIB, overhead=0, device="cpu")


def model(positions: int = 8192, layers: int = 16) -> LlamaConfig:
    return LlamaConfig(1000, 2048, 4096, layers, 32, 8, 64, 1e-5, 10_000.0, positions, True)


@pytest.mark.parametrize(
    ("text", "asked", "normal"),
    [
        ("auto", KvMemory(), "auto"),
        (" AUTO ", KvMemory(), "auto"),
        (0.5, KvMemory(fraction=0.5), "0.5"),
        ("0.5", KvMemory(fraction=0.5), "0.5"),
        (1, KvMemory(fraction=1.0), "1.0"),
        (1e-5, KvMemory(fraction=1e-5), "1e-05"),
        ("12GiB", KvMemory(bytes=12 * GIB), "12 GiB"),
        ("512 mib", KvMemory(bytes=512 * MIB), "512 MiB"),
        ("1.5 GiB", KvMemory(bytes=3 * GIB // 2), "1536 MiB"),
        ("8GB", KvMemory(bytes=8 * 10**9), "8 GB"),
        ("1 TiB", KvMemory(bytes=1 << 40), "1 TiB"),
        ("1001 B", KvMemory(bytes=1001), "1001 B"),
        ("16384 tokens", KvMemory(tokens=16384), "16384 tokens"),
        ("256tokens", KvMemory(tokens=256), "256 tokens"),
    ],
)
def test_every_form_has_one_text_that_is_read_back(text: object, asked: KvMemory, normal: str) -> None:
    assert parse(text) == asked
    assert str(asked) == normal
    assert parse(normal) == asked
    assert EngineConfig(kv_memory=text).kv_memory == normal  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", "all", 0, -0.5, 1.5, "1.1", True, None, [], "nan", "inf", 16384, "12", "12 Gi", "12 iB", "0 GiB", "-1 GiB",
     "1e3 GiB", "GiB", "50%", "9" * 5000 + " GiB", "٣ GiB"],
)  # fmt: skip
def test_nonsense_names_the_forms(text: object) -> None:
    with pytest.raises(
        ValueError, match=r"^got .{1,60}; allowed: auto, a fraction .*, bytes such as 12 GiB, or tokens"
    ):
        parse(text)


@pytest.mark.parametrize("tokens", [0, 255, 2**31 + 1])
def test_tokens_have_a_range(tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"got {tokens} tokens; allowed: 256 to 2147483648 tokens"):
        parse(f"{tokens} tokens")


def test_a_block_says_what_it_is_made_of() -> None:
    assert str(SHAPE) == "16 layers x 2 x 8 KV heads x 64 positions x 64 dims x 2 bytes = 2097152 bytes, 2.00 MiB"
    assert BlockShape.of(model(), 64, 2) == SHAPE


@pytest.mark.parametrize(
    ("count", "text"), [(360 << 10, "360.00 KiB"), (5 * MIB // 2, "2.50 MiB"), (80 * GIB, "80.000 GiB")]
)
def test_sizes_are_told_in_a_unit_that_suits_them(count: int, text: str) -> None:
    assert size(count) == text


ROOM = "room: min(80.000 GiB x 0.5 - 1.000 GiB overhead, 60.000 GiB free + 2.000 GiB ours) - 2.000 GiB weights"
TAKES = f"{ROOM} - 1.500 GiB activations - 512.00 MiB graphs"


@pytest.mark.parametrize(
    ("asked", "room", "blocks", "counted", "holds"),
    [
        # 3% of 40 GiB are kept: 35 - 1.2 = 33.8 GiB, and 33.8 x 512 = 17305.6 blocks
        (
            "auto",
            " - 1.200 GiB spare = 33.800 GiB",
            17304,
            "36292473652 bytes / 2097152 - 1 (the null block)",
            "1107456, 135.2",
        ),
        ("1.0", " = 35.000 GiB", 17919, "37580963840 bytes x 1.0 / 2097152 - 1 (the null block)", "1146816, 140.0"),
        ("0.5", " = 35.000 GiB", 8959, "37580963840 bytes x 0.5 / 2097152 - 1 (the null block)", "573376, 70.0"),
        ("12 GiB", " = 35.000 GiB", 6143, "12884901888 bytes / 2097152 - 1 (the null block)", "393152, 48.0"),
    ],
)
def test_a_gpus_cache_by_hand(asked: str, room: str, blocks: int, counted: str, holds: str) -> None:
    positions, times = holds.split(", ")
    assert size_cache(asked, SHAPE, HALF, 8192) == Sizing(
        blocks,
        (
            f"a block: {SHAPE}",
            TAKES + room,
            f"blocks: {counted} = {blocks}, rounded down; {positions} positions, {times} sequences of 8192",
        ),
    )


def test_tokens_are_whole_blocks_beside_the_null_block() -> None:
    sizing = size_cache("16400 tokens", SHAPE, HALF, 8192)
    assert sizing.blocks == 256
    assert sizing.lines[-1] == (
        "blocks: 16400 tokens / 64 = 256, rounded down; with the null block 514.00 MiB; 16384 positions, "
        "2.0 sequences of 8192"
    )


def test_what_others_have_taken_is_not_there() -> None:
    busy = replace(HALF, free=20 * GIB)  # 20 + 2 GiB are less than our 39
    assert size_cache("1.0", SHAPE, busy, 8192).blocks == 18 * 512 - 1


def test_the_usual_overhead_is_taken_off_the_share() -> None:
    usual = replace(HALF, overhead=CUDA_OVERHEAD)
    assert size_cache("1.0", SHAPE, usual, 8192).blocks == (36 * GIB - CUDA_OVERHEAD) // (2 * MIB) - 1


@pytest.mark.parametrize(
    ("asked", "blocks", "says"),
    [
        ("auto", 256, "blocks: 16384 tokens / 64 = 256, rounded down; with the null block 514.00 MiB; 16384 positions"),
        ("1 GiB", 511, "blocks: 1073741824 bytes / 2097152 - 1 (the null block) = 511, rounded down; 32704 positions"),
        (
            "8192 tokens",
            128,
            "blocks: 8192 tokens / 64 = 128, rounded down; with the null block 258.00 MiB; 8192 positions, 1.0",
        ),
    ],
)
def test_a_cpus_cache_by_hand(asked: str, blocks: int, says: str) -> None:
    sizing = size_cache(asked, SHAPE, HOST, 8192)
    assert sizing.blocks == blocks
    assert len(sizing.lines) == 2
    assert sizing.lines[-1].startswith(says)


def test_this_machine_has_room() -> None:
    assert size_cache("auto", BlockShape(2, 2, 16, 32, 4), Budget.of_host(HostDevice().memory()), 128).blocks == 1024


@pytest.mark.parametrize(
    ("asked", "budget", "context", "says"),
    [
        (
            "40 GiB",
            HALF,
            8192,
            ["engine.kv_memory 40 GiB takes 40.000 GiB (42949672960 bytes / 2097152 - 1 (the null block) = 20479, "
             "rounded down), and "
             f"35.000 GiB are left: {TAKES} = 35.000 GiB; allowed: 1146816 tokens at most here",
             "or give a replica more of its GPU than 0.5 (num_gpus of its pool)"],
        ),
        (
            "1146817 tokens",  # fits, in the same blocks
            replace(HALF, share=1.0, free=37 * GIB),
            2 * 10**6,
            ["engine.kv_memory 1146817 tokens holds 1146816 positions, and one sequence may have 2000000",
             "set engine.context to 1146816 or less, or raise engine.kv_memory"],
        ),
        (
            "1146880 tokens",  # one block more
            HALF,
            8192,
            ["takes 35.002 GiB (1146880 tokens / 64 = 17920, rounded down; with the null block 35.002 GiB), "
             "and 35.000 GiB are"],
        ),
        (
            "auto",
            HALF,
            1107457,
            ["engine.kv_memory auto holds 1107456 positions, and one sequence may have 1107457: room: min(",
             "a block is 16 layers x 2 x", "/ 2097152 - 1 (the null block) = 17304, "
             "rounded down; set engine.context to 1107456 or less, or give a replica more of its GPU than 0.5"],
        ),
        (
            "0.01",
            HALF,
            131072,
            ["holds 11392 positions", "37580963840 bytes x 0.01 / 2097152 - 1 (the null block) = 178",
             "or raise engine.kv_memory"],
        ),
        ("auto", replace(HALF, weights=50 * GIB), 8192, ["holds 0 positions", "nothing is left for the cache"]),
        ("0.5", HOST, 8192, ["engine.kv_memory is 0.5 and engine.device cpu; allowed on CPUs: auto, bytes or tokens"]),
        ("5 GiB", HOST, 8192, ["takes 5.000 GiB", "4.000 GiB are left: room: 4.000 GiB of 16.000 GiB are available"]),
        ("auto", replace(HOST, free=100 * MIB), 256, ["takes 514.00 MiB", "100.00 MiB are left", ": 3136 tokens"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    asked: str, budget: Budget, context: int, says: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        size_cache(asked, SHAPE, budget, context)
    for text in says:
        assert text in caught.value.message
    assert "\n" not in caught.value.message, "Serve hands on the last line of a replica's error"


def test_the_context_that_would_fit_does() -> None:
    with pytest.raises(ConfigError, match=r"set engine\.context to 1107456 or less"):
        size_cache("auto", SHAPE, HALF, 10**7)
    assert size_cache("auto", SHAPE, HALF, 1107456).lines[-1].endswith("1.0 sequences of 1107456")


@given(
    asked=st.one_of(
        st.just("auto"),
        st.floats(1e-4, 1).map(str),
        st.integers(1, 200 * 1024).map("{} MiB".format),
        st.integers(256, 10**7).map("{} tokens".format),
    ),
    shape=st.builds(
        BlockShape,
        st.integers(1, 100),
        st.integers(1, 16),
        st.sampled_from([8, 16, 64, 256]),
        st.sampled_from([32, 64, 80, 128]),
        st.sampled_from([1, 2, 4]),
    ),
    budget=st.builds(
        Budget,
        st.integers(8 * GIB, 140 * GIB),
        st.integers(0, 140 * GIB),
        st.integers(0, 20 * GIB),
        st.floats(0.01, 1),
        st.integers(0, 20 * GIB),
        st.integers(0, 4 * GIB),
        st.integers(0, GIB),
    ),
)
def test_a_cache_never_exceeds_its_room_and_one_block_more_would(asked: str, shape: BlockShape, budget: Budget) -> None:
    wanted = parse(asked)
    taken = budget.weights + budget.activations + budget.graphs
    there = min(budget.total * budget.share - budget.overhead, budget.free + budget.ours) - taken
    try:
        blocks = size_cache(asked, shape, budget, 1).blocks
    except ConfigError:
        if wanted.bytes is not None and wanted.bytes < 2 * shape.bytes:
            return  # not even a block beside the null block was asked for
        least = 1 if wanted.tokens is None else wanted.tokens // shape.block_size
        assert there < max(wanted.bytes or 0, (least + 1) * shape.bytes / (wanted.fraction or 1)) + 0.04 * budget.total
        return
    used = (blocks + 1) * shape.bytes
    assert used <= there
    if wanted.tokens is not None:
        assert blocks == wanted.tokens // shape.block_size
        return
    if wanted == KvMemory():
        limit = there - 0.03 * budget.total * budget.share
    else:
        limit = wanted.bytes or there * (wanted.fraction or 1)
    assert used <= limit + 2 < used + shape.bytes + 4  # bytes are rounded down


def engine(**given: Any) -> EngineConfig:
    return EngineConfig.model_validate({"device": "cpu", "block_size": 64, "max_batched_tokens": 512} | given)


@pytest.mark.parametrize(
    ("given", "context"),
    [
        ({}, 8192),
        ({"context": 1000}, 1000),
        ({"kv_memory": "1000 tokens"}, 960),
        ({"kv_memory": "1000 tokens", "context": 960}, 960),
        ({"kv_memory": "64 MiB"}, 31 * 64),
        ({"kv_memory": "64 MiB", "device": "cuda"}, 31 * 64),
        ({"device": "cuda"}, 8192),
        ({"device": "cuda", "kv_memory": 0.01}, 8192),
        ({"device": "cuda", "context": 4096}, 4096),
    ],
)
def test_what_a_request_may_have_is_known_before_the_start(given: dict[str, Any], context: int) -> None:
    assert context_of(model(), engine(**given), 2) == context


def test_a_cpus_cache_bounds_a_long_context_and_a_gpus_is_asked_to_hold_it() -> None:
    assert context_of(model(131072), engine(), 2) == 16384
    assert context_of(model(131072), engine(device="cuda"), 2) == 131072


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"context": 8193}, "engine.context is 8193; allowed for this model: 8192, its positions"),
        ({"device": "cuda", "context": 8193}, "engine.context is 8193; allowed for this model: 8192, its positions"),
        (
            {"context": 1000, "kv_memory": "1000 tokens"},
            "engine.context is 1000, and engine.kv_memory 1000 tokens holds 960 positions; lower the one or raise the",
        ),
        (
            {"kv_memory": "8 MiB"},
            "engine.kv_memory 8 MiB holds 192 positions; allowed: at least 256, for this model 10485760 bytes; a block",
        ),
    ],
)
def test_a_context_that_cannot_be_promised_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        context_of(model(), engine(**given), 2)
    assert caught.value.message.startswith(says)


@given(
    st.sampled_from([8, 16, 64, 256]),
    st.one_of(st.just("auto"), st.integers(256, 40_000).map("{} tokens".format), st.just("40 MiB")),
    st.integers(2, 40_000),
)
def test_a_replica_holds_what_the_ingress_promises(block_size: int, kv_memory: str, positions: int) -> None:
    """Where it does not know, on a GPU, it does not start: `what_does_not_fit_is_refused`."""
    llama, asked = model(positions), engine(block_size=block_size, kv_memory=kv_memory)
    shape = BlockShape.of(llama, block_size, 2)
    context = context_of(llama, asked, 2)
    blocks = size_cache(kv_memory, shape, HOST, context).blocks
    assert context <= min(positions, blocks * block_size)


def test_the_caches_of_all_replicas_of_a_host_share_its_memory() -> None:
    check_host(model(), engine(kv_memory="64 MiB"), 2, 2, (GIB, 128 * MIB))
    with pytest.raises(
        ConfigError, match=r"takes 64\.00 MiB in each of 3 replicas, 192\.00 MiB in all, and 128\.00 MiB"
    ):
        check_host(model(), engine(kv_memory="64 MiB"), 2, 3, (GIB, 128 * MIB))
