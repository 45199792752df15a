"""The certificates of a job: an authority of its own, derived from the root key, and what it signs.

Nothing has to be read back to know them, and every operator that has the root key makes the same bytes. The
authority has no end, and its private key is in no object; what it signs ends, and is renewed.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from springtide_protocol.tls_names import SERVER_NAME as TLS_SERVER_NAME
from springtide_protocol.tls_names import server_name

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256 (FIPS 186-5)
_BEGIN = datetime(2020, 1, 1, tzinfo=UTC)
_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # no end of its own (RFC 5280, 4.1.2.5)
_EARLIER = 0.1  # of its validity a certificate begins before it is made: clocks differ


@lru_cache(maxsize=4096)
def job_authority(root_key: bytes, uid: str, turn: str = "") -> str:
    """Return the certificate that a job's processes trust: P-256, signed by itself, deterministically
    (RFC 6979), in PEM.

    Args:
        root_key: the operator's.
        uid: of the job.
        turn: of the job's keys; another one makes another authority.
    """
    return _pem(_authority(root_key, uid, turn)[1])


@lru_cache(maxsize=4096)
def job_certificate(root_key: bytes, uid: str, ends: int, seconds: float, turn: str = "") -> tuple[str, str]:
    """Return a certificate that the job's authority signs, and its private key.

    Args:
        root_key: the operator's.
        uid: of the job.
        ends: unix seconds from which it is not valid any more.
        seconds: of its validity, from when it is made.
        turn: of the job's keys.

    Returns:
        Both in PEM.
    """
    authority_key, authority = _authority(root_key, uid, turn)
    key, seed = _derive(root_key, f"springtide tls {uid} {turn} {ends}")
    begins = max(_BEGIN.timestamp(), ends - seconds * (1 + _EARLIER))
    names = [x509.DNSName(server_name(_pem(authority))), x509.DNSName(TLS_SERVER_NAME)]
    known_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(TLS_SERVER_NAME))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(_serial(seed))
        .not_valid_before(datetime.fromtimestamp(int(begins), UTC))
        .not_valid_after(datetime.fromtimestamp(min(ends, int(_END.timestamp())), UTC))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(known_by, critical=False)
        .sign(authority_key, hashes.SHA256(), ecdsa_deterministic=True)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return _pem(certificate), private.decode()


@lru_cache(maxsize=4096)
def _authority(root_key: bytes, uid: str, turn: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key, seed = _derive(root_key, f"springtide authority {uid} {turn}")
    name = _name("springtide-job-authority")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(_serial(seed))
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256(), ecdsa_deterministic=True)
    )
    return key, certificate


def _derive(root_key: bytes, purpose: str) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    seed = hmac.new(root_key, purpose.encode(), hashlib.sha512).digest()
    return ec.derive_private_key(1 + int.from_bytes(seed) % (_ORDER - 1), ec.SECP256R1()), seed


def _serial(seed: bytes) -> int:
    return int.from_bytes(hashlib.sha256(seed).digest()[:19]) | 1


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
