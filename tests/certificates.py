"""Certificates for tests: an authority, and the files of replicas that it has vouched for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from bifolio.kv_manager.tls import Tls


class Authority:
    """A CA with its files in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), _named(folder.name)
        certificate = _certificate(self._name, self._name, self._key, x509.BasicConstraints(ca=True, path_length=None))
        self.file = folder / "ca.pem"
        self.file.write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))

    def issue(
        self,
        to: str = "replica",
        name: str = "bifolio",
        days: float = 1.0,
        key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | None = None,
    ) -> Tls:
        """Files of a replica; of the same one again they replace the earlier."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        certificate = _certificate(_named(to), self._name, key, names, days).sign(self._key, hashes.SHA256())
        tls = Tls(self.file, self._folder / f"{to}.pem", self._folder / f"{to}.key")
        tls.certificate.write_bytes(_pem(certificate))
        tls.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return tls


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey,
    says: x509.ExtensionType,
    days: float = 1.0,
) -> x509.CertificateBuilder:
    """Of yesterday, for so many days from now."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(says, critical=False)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
