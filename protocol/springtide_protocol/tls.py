"""TLS for the coordinator's port, where a job asks for it: certificates that the job's own authority signs.

Clients trust that authority and nothing else. A coordinator whose job has got another key has certificates of
the old and the new authority; clients say which one they trust by the name that they ask for, which follows
from the authority. The job's token still decides which callers are let in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import grpc.aio

from springtide_protocol.channel import Options
from springtide_protocol.former_keys import former_certificates
from springtide_protocol.tls_names import server_name

AUTHORITY = "SPRINGTIDE_TLS_CA"
CERTIFICATE = "SPRINGTIDE_TLS_CERTIFICATE"
KEY = "SPRINGTIDE_TLS_KEY"

_BEGIN = "-----BEGIN "


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """PEM. `former`: certificates and their keys that some clients still ask for."""

    certificate: str
    key: str
    former: tuple[tuple[str, str], ...] = ()

    def credentials(self) -> grpc.ServerCredentials:
        # gRPC takes the first that has the name. Former ones come first: processes of before names were told
        # apart ask for SERVER_NAME, which all of them have.
        pairs = [*self.former, (self.certificate, self.key)]
        return grpc.ssl_server_credentials(
            [(key.encode(), certificate.encode()) for certificate, key in pairs]
        )


def read_certificate(env: Mapping[str, str]) -> ServerCertificate | None:
    """The server's, from its environment; None where the job does without TLS.

    Raises ValueError that names the variable and what it must hold.
    """
    certificate, key = _pem(env, CERTIFICATE), _pem(env, KEY)
    if bool(certificate) != bool(key):
        raise ValueError(f"{CERTIFICATE} and {KEY} belong together: set both or none")
    return ServerCertificate(certificate, key, former_certificates(env)) if certificate else None


def read_authority(env: Mapping[str, str]) -> str:
    """The certificate that a client trusts, in PEM; "" where the job does without TLS. Raises ValueError."""
    return _pem(env, AUTHORITY)


def _pem(env: Mapping[str, str], name: str) -> str:
    text = env.get(name, "")
    if text and not text.lstrip().startswith(_BEGIN):
        raise ValueError(f"{name} must hold PEM text, which begins with {_BEGIN.strip()!r}")
    return text


def _named(options: Options, authority: str) -> list[tuple[str, object]]:
    return [*options, ("grpc.ssl_target_name_override", server_name(authority))]


def channel(address: str, options: Options, authority: str = "") -> grpc.Channel:
    """Return a channel to a coordinator; with an authority it is encrypted, and only its holder is served.

    Args:
        address: host and port.
        options: of the channel.
        authority: the job's certificate in PEM; "": without TLS.
    """
    if not authority:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, _credentials(authority), options=_named(options, authority))


def aio_channel(address: str, options: Options, authority: str = "") -> grpc.aio.Channel:
    """Return an asyncio channel to a coordinator, encrypted where there is an authority.

    Args:
        address: host and port.
        options: of the channel.
        authority: the job's certificate in PEM; "": without TLS.
    """
    if not authority:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _credentials(authority), options=_named(options, authority))


def _credentials(authority: str) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(root_certificates=authority.encode())
