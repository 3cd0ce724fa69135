"""TLS between replicas: both sides show a certificate of one CA, and every certificate bears one DNS name.

The name is of no machine: replicas come and go, at addresses that nobody knows before. So a certificate says that its
holder belongs to this cluster, and no more. Knows nothing about streams; files may be replaced while they are in use.
"""

from __future__ import annotations

import logging
import ssl
import threading
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from bifolio.protos.errors import ConfigError

from .config import TlsConfig

logger = logging.getLogger(__name__)

HANDSHAKE_S = 3.0
OF_ITS_OWN = [
    ("grpc.use_local_subchannel_pool", 1),  # connections of our own, shared with no other user of grpc
    ("grpc.enable_http_proxy", 0),  # replicas are neighbours: $http_proxy is not meant for them
]

Stamp = tuple[tuple[int, int, int], ...]  # of each file: by which it is seen that it was replaced


@dataclass(frozen=True, slots=True)
class Tls:
    """Where the files are, in PEM form, and the DNS name in every replica's certificate."""

    ca: Path
    certificate: Path
    key: Path
    name: str = "bifolio"

    @classmethod
    def of(cls, config: TlsConfig | None) -> Tls | None:
        return None if config is None else cls(Path(config.ca), Path(config.certificate), Path(config.key), config.name)


@dataclass(frozen=True, slots=True)
class Contents:
    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)


class Certificates:
    """What is in the files now. Those that are replaced by something that cannot be used are used as they were: they
    may be half written. ConfigError where the first ones cannot be."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._stamp, self._contents = _stamp(tls), checked(tls)

    def current(self) -> Contents:
        with self._lock:
            if (stamp := _stamp(self._tls)) != self._stamp:
                self._stamp = stamp  # not read again until it changes again
                try:
                    self._contents = read(self._tls)
                    logger.info("TLS: %s has been replaced, and is used", self._tls.certificate)
                except ConfigError as error:
                    logger.warning("TLS: going on with the files as they were: %s", error.message)
            return self._contents


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """For a server that lets in who shows a certificate of the CA, and looks at the files at each handshake."""
    certificates = Certificates(tls)
    last = certificates.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        before, last = last, certificates.current()
        return None if last is before else _configuration(last)  # None: go on with what there is

    return grpc.dynamic_ssl_server_credentials(
        _configuration(last),
        fetch,  # type: ignore[arg-type]  # the stubs know nothing of None
        require_client_authentication=True,
    )


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """For connections that show the certificate which the files hold now."""
    now = certificates.current()
    return grpc.ssl_channel_credentials(now.ca, now.key, now.certificate)


def name_options(tls: Tls) -> list[tuple[str, str]]:
    """By which a channel asks for that name, whatever the address is."""
    return [("grpc.ssl_target_name_override", tls.name)]


def read(tls: Tls) -> Contents:
    """ConfigError, which names the file and what to do, unless two replicas with these files would accept each
    other: that is tried, in memory."""
    contents = Contents(*(_content(name, path) for name, path in _files(tls)))
    for name, path in _files(tls)[:2]:
        _require_certificate(name, path)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.verify_mode = ssl.CERT_REQUIRED
    for side in (server, client):
        try:
            side.load_verify_locations(cadata=contents.ca.decode("ascii", "replace"))  # not the file: it may change
        except ssl.SSLError as error:
            raise ConfigError(f"kv.tls.ca: {tls.ca} cannot be used: {error.reason}") from error
        try:
            side.load_cert_chain(tls.certificate, tls.key, password=b"")  # or it asks at the terminal for one
        except (ssl.SSLError, OSError) as error:
            mismatch = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
            wrong = "is not the key of" if mismatch else "is no PEM key without a passphrase, as is needed for"
            raise ConfigError(
                f"kv.tls.key: {tls.key} {wrong} the certificate {tls.certificate}: set both to a pair that was made "
                "together"
            ) from error
    try:
        _shake_hands(server, client, tls.name)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"kv.tls.certificate: {tls.certificate} would be refused by other replicas: {error.verify_message}; needed "
            f"is one that is valid now, of a CA in {tls.ca}, for the DNS name {tls.name} (kv.tls.name), and for "
            "servers and clients"
        ) from error
    except ssl.SSLError as error:
        raise ConfigError(f"kv.tls.certificate: {tls.certificate} cannot be used for TLS: {error.reason}") from error
    return contents


def checked(tls: Tls) -> Contents:
    """As `read`, and ConfigError for what gRPC would not take: it knows fewer kinds of keys than Python."""
    contents = read(tls)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    pair = [(contents.key, contents.certificate)]
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair, contents.ca, True))
    server.start()
    credentials = grpc.ssl_channel_credentials(contents.ca, contents.key, contents.certificate)
    try:
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials, [*name_options(tls), *OF_ITS_OWN]) as channel:
            grpc.channel_ready_future(channel).result(HANDSHAKE_S)
    except grpc.FutureTimeoutError as error:
        raise ConfigError(
            f"kv.tls.certificate: gRPC cannot use {tls.certificate} with {tls.key}, though OpenSSL can; make it with "
            "an RSA key, or one of the curve P-256 or P-384"
        ) from error
    finally:
        server.stop(None).wait()
    return contents


def _files(tls: Tls) -> tuple[tuple[str, Path], ...]:
    return ("ca", tls.ca), ("certificate", tls.certificate), ("key", tls.key)


def _content(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"kv.tls.{name}: {path} cannot be read: {error.strerror}; it is needed on every machine with replicas, "
            "readable for who runs them"
        ) from error


def _require_certificate(name: str, path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"kv.tls.{name}: {path} is no certificate in PEM form (-----BEGIN CERTIFICATE-----)"
        ) from error


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    left = [client.wrap_bio(down, up, server_hostname=name), server.wrap_bio(up, down, server_side=True)]
    while left:
        for side in list(left):
            try:
                side.do_handshake()
                left.remove(side)
            except ssl.SSLWantReadError:
                pass


def _stamp(tls: Tls) -> Stamp:
    return tuple(_stamped(path) for _, path in _files(tls))


def _stamped(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError:
        return (0, 0, 0)  # `read` says why
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _configuration(contents: Contents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.certificate)], contents.ca)
