"""Who is let in."""

import pytest

from bifolio.cluster.peers import address_of, require_loopback
from bifolio.protos.errors import PeerRefused


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.9.1", "::1", None, ""])
def test_this_machine_is_let_in(peer):
    require_loopback(peer)


@pytest.mark.parametrize("peer", ["10.0.0.1", "192.0.2.2", "::", "fe80::1", "2001:db8::1"])
def test_other_machines_are_refused_by_name(peer):
    with pytest.raises(PeerRefused, match=peer):
        require_loopback(peer)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:4711", "127.0.0.1"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("ipv6:[2001:db8::1]:4711", "2001:db8::1"),
        ("unix:/tmp/socket", None),
    ],
)
def test_the_address_is_read_from_grpcs_name(peer, address):
    assert address_of(peer) == address
