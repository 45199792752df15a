"""A certificate authority of the embedded cluster's own: server certificate, client certificates,
kubeconfig.

Keys are P-256. Files with keys are written with mode 0600. A client certificate's common name is the user,
its organisations are the groups, as in Kubernetes.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = timedelta(days=3650)
_SKEW = timedelta(hours=1)
ADMIN = "springtide-admin"
MASTERS = "system:masters"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """PEM texts of a certificate and its key."""

    certificate: bytes
    key: bytes


class Authority:
    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = _name("springtide-local-ca", ())
        self._name = name
        builder = _builder(name, name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = builder.add_extension(usage, critical=True).add_extension(identifier, critical=False)
        self._certificate = builder.sign(self._key, hashes.SHA256())

    @property
    def certificate(self) -> bytes:
        """The CA's certificate as PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def server(self, addresses: Sequence[str], names: Sequence[str] = ("localhost",)) -> KeyPair:
        """Issue a certificate for the API server.

        Args:
            addresses: on which it is reached.
            names: of hosts, likewise.
        """
        alternatives: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(a)) for a in addresses]
        alternatives += [x509.DNSName(name) for name in names]
        return self._issue("kube-apiserver", (), ExtendedKeyUsageOID.SERVER_AUTH, alternatives)

    def client(self, user: str, groups: Sequence[str] = ()) -> KeyPair:
        """Issue a certificate for a client.

        Args:
            user: its common name.
            groups: its organisations.
        """
        return self._issue(user, groups, ExtendedKeyUsageOID.CLIENT_AUTH, [])

    def _issue(
        self,
        user: str,
        groups: Sequence[str],
        purpose: x509.ObjectIdentifier,
        alternatives: list[x509.GeneralName],
    ) -> KeyPair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(user, groups), self._name, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(authority, critical=False)
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), private)


def _name(user: str, groups: Sequence[str]) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _LIFETIME)
    )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read; a reader never sees half of it.

    Args:
        path: of the file.
        content: its bytes.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
    os.replace(aside, path)


def server_context(authority: Authority, addresses: Sequence[str], folder: Path) -> ssl.SSLContext:
    """Return TLS of the server; clients may present a certificate of the same authority.

    Args:
        authority: issues the server's certificate.
        addresses: on which the server is reached.
        folder: gets the files of key and authority; it is made when it is missing.
    """
    pair = authority.server(addresses)
    folder.mkdir(parents=True, exist_ok=True)
    key_file = folder / "apiserver.pem"
    write_private(key_file, pair.key + pair.certificate)
    (folder / "ca.crt").write_bytes(authority.certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=authority.certificate.decode())
    context.load_cert_chain(key_file)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.set_alpn_protocols(["http/1.1"])
    return context


def kubeconfig(
    server: str,
    authority: Authority,
    *,
    client: KeyPair | None = None,
    token: str | None = None,
    name: str = "springtide-local",
    namespace: str = "default",
) -> str:
    """Return a kubeconfig as YAML, with a client certificate or a bearer token.

    Args:
        server: URL.
        authority: that the client trusts.
        client: its certificate.
        token: its bearer token.
        name: of cluster, user and context.
        namespace: for commands that name none.
    """
    user: dict[str, str] = {}
    if client is not None:
        user["client-certificate-data"] = base64.b64encode(client.certificate).decode()
        user["client-key-data"] = base64.b64encode(client.key).decode()
    if token is not None:
        user["token"] = token
    cluster = {
        "server": server,
        "certificate-authority-data": base64.b64encode(authority.certificate).decode(),
    }
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": namespace}}],
    }
    return yaml.safe_dump(content, sort_keys=False)
