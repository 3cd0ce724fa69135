"""The demo tells where the time of a start goes."""

from __future__ import annotations

from bifolio.cluster.demo import parts_of_a_start


def test_the_parts_of_a_start_add_up() -> None:
    said = [
        (11.0, "bifolio: starting Ray, for 1 prefill, 1 decode (0.0 s)\n"),
        (12.0, "bifolio: Redis: a Valkey of the cluster's own (1.0 s)\n"),
        (15.0, "bifolio: device cpu (4.0 s)\n"),
        (18.0, "bifolio: loading smollm2-135m (7.0 s)\n"),
        (24.0, "bifolio: alive: 1 of 1 prefill, 1 of 1 decode (13.0 s)\n"),
        (24.5, "bifolio: KV cache, decode: 1024 blocks (13.5 s)\n"),
        (24.6, "bifolio: ready: http://127.0.0.1:8000/v1 (13.6 s)\n"),
    ]
    parts = parts_of_a_start(said, 10.0, 25.0)
    assert [seconds for _, seconds in parts] == [1.0, 4.0, 3.0, 6.5, 0.5]
