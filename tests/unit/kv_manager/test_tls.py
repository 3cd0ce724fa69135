"""TLS between replicas: who is let in, what a mistake is called, and files that are replaced in use."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat
from transfer_kit import DONE, GEOMETRY, WAIT, ScriptedSource, filled_store, ids, start

from bifolio.kv_manager import tls as tls_module
from bifolio.kv_manager.channels import Channels, translated
from bifolio.kv_manager.config import TlsConfig
from bifolio.kv_manager.heads import whole
from bifolio.kv_manager.pull import PrefillClient
from bifolio.kv_manager.tls import Certificates, Tls, checked, read, server_credentials
from bifolio.kv_manager.traffic import TrafficMeter
from bifolio.kv_manager.transfer import PrefillServer
from bifolio.kv_manager.wire import METHOD, SERVICE, pack
from bifolio.protos.errors import ConfigError, ReplicaGone

ECHO = "/echo/once"


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "one")


@pytest.fixture(scope="module")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "other")


@contextmanager
def serving(tls: Tls | None) -> Iterator[str]:
    """The address of a server that answers what it is told."""
    threads = ThreadPoolExecutor(2)
    once = grpc.unary_unary_rpc_method_handler(lambda said, _: said)
    server = grpc.server(threads, handlers=(grpc.method_handlers_generic_handler("echo", {"once": once}),))
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", server_credentials(tls))
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
        threads.shutdown()


def said(channels: Channels, address: str) -> bytes:
    with channels.use(address) as channel:
        answer: bytes = channel.unary_unary(ECHO)(b"hello", timeout=WAIT)
        return answer


def heard(address: str, tls: Tls | None) -> bytes:
    """What a client with these files is answered, over a connection of its own."""
    channels = Channels(5.0, tls)
    try:
        return said(channels, address)
    except grpc.RpcError as error:
        raise translated(error, address) from error
    finally:
        channels.close()


# -- who is let in


def test_replicas_with_certificates_of_one_authority_talk_at_any_address(ca: Authority) -> None:
    with serving(ca.issue("prefill")) as address:
        assert heard(address, ca.issue("decode")) == b"hello"


def test_a_client_that_shows_no_certificate_is_refused(ca: Authority) -> None:
    with serving(ca.issue()) as address:
        knows = grpc.ssl_channel_credentials(ca.file.read_bytes())
        options = [("grpc.ssl_target_name_override", "bifolio")]
        with grpc.secure_channel(address, knows, options) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(ECHO)(b"hello", timeout=WAIT)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def stranger(ca: Authority, other_ca: Authority) -> Tls:
    """It trusts the server, which does not trust it."""
    theirs = other_ca.issue("stranger")
    both = theirs.ca.with_name("both.pem")
    both.write_bytes(ca.file.read_bytes() + other_ca.file.read_bytes())
    return replace(theirs, ca=both)


@pytest.mark.parametrize(
    ("server", "client"),
    [
        (lambda ca, _: ca.issue(), stranger),
        (lambda ca, _: ca.issue(), lambda _, other: other.issue()),
        (lambda ca, _: ca.issue(), lambda *_: None),
        (lambda *_: None, lambda ca, _: ca.issue()),
    ],
    ids=["of another authority", "that trusts another", "without TLS", "with TLS, of a server without"],
)
def test_a_connection_that_fails_of_tls_says_so(
    ca: Authority,
    other_ca: Authority,
    server: Callable[[Authority, Authority], Tls | None],
    client: Callable[[Authority, Authority], Tls | None],
) -> None:
    with (
        serving(server(ca, other_ca)) as address,
        pytest.raises(ReplicaGone, match=rf"from {address} broke: .*TLS \(kv\.tls\) must be on at both sides"),
    ):
        heard(address, client(ca, other_ca))


def test_a_server_of_another_name_is_not_trusted(ca: Authority) -> None:
    theirs = replace(ca.issue("theirs", name="elsewhere"), name="elsewhere")
    with serving(theirs) as address, pytest.raises(ReplicaGone, match="Hostname"):
        heard(address, ca.issue("ours"))


def test_blocks_are_pulled_over_tls_and_not_without(ca: Authority) -> None:
    source, meter = ScriptedSource(filled_store(64), DONE), TrafficMeter()
    server = PrefillServer(source, max_streams=4, tls=ca.issue("prefill"))
    target = whole(filled_store(64), GEOMETRY)
    with ExitStack() as stack:
        stack.callback(server.stop, WAIT)
        address = f"127.0.0.1:{server.start()}"
        ours, plain = PrefillClient(target, meter, tls=ca.issue("decode")), PrefillClient(target, meter)
        stack.callback(ours.close)
        stack.callback(plain.close)
        assert ours.pull(address, start()).run(ids(1, 2, 3)).block_count == 3
        with pytest.raises(ReplicaGone, match=r"TLS \(kv\.tls\) must be on at both sides"):
            plain.pull(address, start()).run(ids(1, 2, 3))
    assert len(source.jobs) == 1


# -- files that are replaced


def test_a_server_uses_files_that_were_replaced_and_those_who_are_connected_stay(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    served, joining = old.issue("server"), new.issue("joining")
    early = Channels(5.0, old.issue("early"))
    with serving(served) as address:
        assert said(early, address) == b"hello"
        with pytest.raises(ReplicaGone):
            heard(address, joining)
        new.issue("server")
        shutil.copytree(new.file.parent, old.file.parent, dirs_exist_ok=True)
        assert heard(address, joining) == b"hello"
        assert said(early, address) == b"hello"
        early.close()


def test_a_new_connection_shows_the_certificate_that_the_files_hold_then(ca: Authority) -> None:
    tls = ca.issue("moving")
    certificates = Certificates(tls)
    before = certificates.current()
    ca.issue("moving")
    assert certificates.current().certificate == tls.certificate.read_bytes() != before.certificate


def test_half_written_files_are_not_used_and_are_looked_at_again(
    ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = ca.issue("written")
    certificates = Certificates(tls)
    before = certificates.current()
    key = ca.issue("next").key.read_bytes()
    with caplog.at_level(logging.WARNING, "bifolio"):
        tls.key.write_bytes(key)
        assert certificates.current() is certificates.current() is before
    (record,) = caplog.records
    assert "is not the key of the certificate" in record.getMessage()
    shutil.copy(ca.file.with_name("next.pem"), tls.certificate)
    assert certificates.current().key == key


def test_no_key_is_ever_shown(ca: Authority) -> None:
    assert "PRIVATE" not in repr(read(ca.issue()))


# -- mistakes


def missing(tls: Tls) -> str:
    tls.key.unlink()
    return rf"kv\.tls\.key: {tls.key} cannot be read: No such file"


def no_ca(tls: Tls) -> str:
    tls.ca.write_text("nothing")
    return rf"kv\.tls\.ca: {tls.ca} is no certificate in PEM form"


def no_certificate(tls: Tls) -> str:
    tls.certificate.write_bytes(b"\xff\0")
    return rf"kv\.tls\.certificate: {tls.certificate} is no certificate in PEM form"


def no_key(tls: Tls) -> str:
    tls.key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    return rf"kv\.tls\.key: {tls.key} is no PEM key without a passphrase"


def another_key(tls: Tls) -> str:
    shutil.copy(Authority(tls.ca.with_name("b")).issue().key, tls.key)
    return rf"kv\.tls\.key: {tls.key} is not the key of the certificate {tls.certificate}"


def another_authority(tls: Tls) -> str:
    shutil.copy(Authority(tls.ca.with_name("c")).file, tls.ca)
    return rf"kv\.tls\.certificate: {tls.certificate} would be refused by other replicas: .*of a CA in {tls.ca}"


@pytest.mark.parametrize("spoil", [missing, no_ca, no_certificate, no_key, another_key, another_authority])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, spoil: Callable[[Tls], str]) -> None:
    tls = Authority(tmp_path / "ca").issue()
    says = spoil(tls)
    with pytest.raises(ConfigError, match=says):
        server_credentials(tls)
    with pytest.raises(ConfigError, match=says):
        Channels(5.0, tls)


def test_a_certificate_that_has_expired_is_refused(ca: Authority) -> None:
    with pytest.raises(ConfigError, match="has expired; needed is one that is valid now"):
        read(ca.issue("old", days=-0.5))


@pytest.mark.parametrize("key", [ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP521R1())])
def test_a_key_that_only_openssl_can_use_is_refused(ca: Authority, key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_module, "HANDSHAKE_S", 0.3)
    with pytest.raises(ConfigError, match=r"gRPC cannot use .* make it with an RSA key, or one of the curve P-256"):
        checked(ca.issue("odd", key=key))


def test_a_ca_that_is_replaced_by_nothing_is_used_as_it_was(tmp_path: Path) -> None:
    tls = Authority(tmp_path / "ca").issue()
    certificates = Certificates(tls)
    before = certificates.current()
    tls.ca.write_text("-----BEGIN NOTHING-----")
    assert certificates.current() is before


def test_a_client_of_another_name_is_told_which_one_is_needed(ca: Authority) -> None:
    source, theirs = ScriptedSource(filled_store(64), DONE), ca.issue("www", name="www.example.org")
    server = PrefillServer(source, max_streams=4, tls=ca.issue("prefill"))
    with ExitStack() as stack:
        stack.callback(server.stop, WAIT)
        address, pair = f"127.0.0.1:{server.start()}", (theirs.key.read_bytes(), theirs.certificate.read_bytes())
        credentials = grpc.ssl_channel_credentials(ca.file.read_bytes(), *pair)
        options = [("grpc.ssl_target_name_override", "bifolio")]
        channel = stack.enter_context(grpc.secure_channel(address, credentials, options))
        with pytest.raises(grpc.RpcError, match=r"for the DNS name bifolio \(kv\.tls\.name\) is needed"):
            next(channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter([pack(start())]), timeout=WAIT))
    assert not source.jobs


def test_a_certificate_of_another_name_is_refused(ca: Authority) -> None:
    with pytest.raises(ConfigError, match=r"for the DNS name bifolio \(kv\.tls\.name\)"):
        read(ca.issue("named", name="elsewhere"))


def test_a_key_with_a_passphrase_is_no_reason_to_ask_for_it(ca: Authority) -> None:
    tls = ca.issue("locked")
    key = serialization.load_pem_private_key(tls.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    tls.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    with pytest.raises(ConfigError, match="is no PEM key without a passphrase"):
        read(tls)


def test_the_configuration_names_the_files(ca: Authority) -> None:
    tls = ca.issue("configured")
    named = TlsConfig(ca=str(tls.ca), certificate=str(tls.certificate), key=str(tls.key))
    assert Tls.of(named) == tls
    assert Tls.of(None) is None
