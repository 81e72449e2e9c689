"""A cluster's own certificate authority, and the certificates of its NATS servers and nodes (RFC 5280)."""

import ipaddress
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from unicron.errors import InvalidInputError
from unicron.files import read_secret, write_secret

LIFE = timedelta(days=3650)
"""How long a certificate holds. Each is made anew in the last half of it, when keys are looked after next."""

EARLY = timedelta(hours=1)
"""Clocks that are slow by less take it from the start."""


class Authority:
    """The authority whose key and certificate lie in `folder`; both are made at first use."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self._key = folder / "ca.pem", folder / "ca.key"

    @property
    def exists(self) -> bool:
        """Whether it was made."""
        return self.certificate.exists()

    def ensure(self) -> None:
        """Make the authority, where there is none.

        Raises:
            InvalidInputError: one of its two files is missing, or can't be used.
        """
        if self.exists:
            self._load()
            return
        if self._key.exists():
            raise InvalidInputError(f"{self._key}: there is no ca.pem beside it; restore that, or remove both")
        self._key.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "unicron")])
        usage = x509.KeyUsage(**dict.fromkeys(_USES, False) | {"key_cert_sign": True, "crl_sign": True})
        made = (
            _begun(name, key.public_key())
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        write_secret(self._key, _pem(key))
        self.certificate.write_bytes(made.public_bytes(Encoding.PEM))

    def certify(self, folder: Path, names: Iterable[str]) -> None:
        """Put a certificate for these host names and addresses in a folder, with its key and the authority's own.

        It stays as it is while it is for these names, of this authority, and in the first half of its life.

        Raises:
            InvalidInputError: the authority's files can't be used.
        """
        _, authority = self._load()
        own = sorted(set(names))
        (folder / "ca.pem").write_bytes(self.certificate.read_bytes())
        path = folder / "tls.pem"
        if path.exists() and (folder / "tls.key").exists() and _fits(path.read_bytes(), own, authority):
            return
        fresh = ec.generate_private_key(ec.SECP256R1())
        made = self._signed(folder.name, own, fresh.public_key())
        write_secret(folder / "tls.key", _pem(fresh))
        path.write_bytes(made.public_bytes(Encoding.PEM))

    def sign(self, request: bytes, name: str) -> bytes:
        """Return a certificate in PEM for the key of a request (PKCS #10, PEM), and for this name alone.

        Raises:
            InvalidInputError: it is no request, its key is of another kind, or who made it does not have that key.
        """
        try:
            asked = x509.load_pem_x509_csr(request)
            key, sound = asked.public_key(), asked.is_signature_valid
        except (ValueError, UnsupportedAlgorithm) as error:
            raise InvalidInputError(f"no certificate request: {error}") from error
        if not sound or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise InvalidInputError("a certificate request that is not signed by a key on P-256; make another one")
        return self._signed(name, [name], key).public_bytes(Encoding.PEM)

    def _signed(self, name: str, own: list[str], public: ec.EllipticCurvePublicKey) -> x509.Certificate:
        key, authority = self._load()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
        return (
            _begun(subject, public)
            .issuer_name(authority.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([_name(each) for each in own]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(issuer, critical=False)
            .sign(key, hashes.SHA256())
        )

    def _load(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        key = load_pem_private_key(read_secret(self._key), None)
        certificate = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise InvalidInputError(f"{self._key}: not the key of {self.certificate}; restore both, or remove both")
        return key, certificate


_USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def _begun(subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(now + LIFE)
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _fits(pem: bytes, names: list[str], authority: x509.Certificate) -> bool:
    """Whether a certificate need not be made anew."""
    made = x509.load_pem_x509_certificate(pem)
    try:
        made.verify_directly_issued_by(authority)
    except (InvalidSignature, TypeError, ValueError):  # of another one
        return False
    told = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    young = datetime.now(UTC) < made.not_valid_after_utc - LIFE / 2
    return young and set(told) == {_name(each) for each in names}
