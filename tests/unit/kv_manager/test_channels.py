"""Where a connection goes to."""

from __future__ import annotations

import pytest

from bifolio.kv_manager.channels import bracketed


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
