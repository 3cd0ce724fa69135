"""Where a connection goes to."""

from __future__ import annotations

import pytest

from bifolio.kv_manager.channels import bracketed, listening


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("192.0.2.7", "192.0.2.7"),
        ("node-1.example", "node-1.example"),
        ("::1", "[::1]"),
        ("2001:db8::7", "[2001:db8::7]"),
        ("[::1]", "[::1]"),
    ],
)
def test_a_port_can_follow_any_address(host: str, shown: str) -> None:
    assert bracketed(host) == shown


def test_only_where_it_is_said_a_replica_listens_to_the_network():
    assert listening("loopback", "192.0.2.7") == "127.0.0.1"
    assert listening("node", "192.0.2.7") == "192.0.2.7"
    assert listening("node", "2001:db8::7") == "[2001:db8::7]"
