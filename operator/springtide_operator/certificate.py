"""The certificate of a job's coordinator, derived from the operator's root key.

Nothing has to be read back to know it, and every operator that has the key makes the same bytes.
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

from springtide_protocol.tls import SERVER_NAME as TLS_SERVER_NAME

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256 (FIPS 186-5)
_BEGIN = datetime(2020, 1, 1, tzinfo=UTC)
_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # no end of its own (RFC 5280, 4.1.2.5)


@lru_cache(maxsize=4096)
def job_certificate(root_key: bytes, uid: str) -> tuple[str, str]:
    """Return a job's certificate and private key: P-256, self-signed, deterministically (RFC 6979).

    Args:
        root_key: the operator's.
        uid: of the job.

    Returns:
        Both in PEM.
    """
    seed = hmac.new(root_key, f"springtide tls {uid}".encode(), hashlib.sha512).digest()
    key = ec.derive_private_key(1 + int.from_bytes(seed) % (_ORDER - 1), ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, TLS_SERVER_NAME)])
    serial = int.from_bytes(hashlib.sha256(seed).digest()[:19]) | 1
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TLS_SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256(), ecdsa_deterministic=True)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode()
