"""Settings of a parameter server, from its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide_protocol.former_keys import former_certificates_by_name, former_tokens

DEFAULT_PORT = 7080
DEFAULT_METRICS_PORT = 9402


@dataclass(frozen=True)
class Settings:
    """Settings of a parameter server, as its environment has them.

    Attributes:
        token: of the job, which each connection shows.
        bind: the one address to listen on; all when empty.
        port: where tensors come and go.
        metrics_port: of `/metrics`.
        memory_limit: bytes that values and optimizer state may take; 0: no limit.
        threads: that make steps; 0: one for each core that the process may use.
        certificate: PEM, of the job; empty without TLS.
        key: PEM, the certificate's private key; empty without TLS.
        former_tokens: tokens that pods of the job may still have.
        former_certificates: certificates and keys, PEM, by the name that a client asks for.
    """

    token: str
    bind: str
    port: int
    metrics_port: int
    memory_limit: int
    threads: int
    certificate: str
    key: str
    former_tokens: tuple[str, ...] = ()
    former_certificates: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def read(environment: Mapping[str, str]) -> Settings:
    """Return the settings that an environment has.

    Args:
        environment: variables by name.

    Raises:
        ValueError: a variable is missing, or holds something else than it must; it is named.
    """

    def number(name: str, default: int, most: int) -> int:
        text = environment.get(f"SPRINGTIDE_{name}", "")
        if not text:
            return default
        if not text.isdigit() or int(text) > most:
            raise ValueError(
                f"environment variable SPRINGTIDE_{name}: {text!r} is no number from 0 to {most}"
            )
        return int(text)

    token = environment.get("SPRINGTIDE_TOKEN", "")
    if not token:
        raise ValueError("environment variable SPRINGTIDE_TOKEN: not set; it holds the job's token")
    certificate, key = (environment.get(f"SPRINGTIDE_TLS_{name}", "") for name in ("CERTIFICATE", "KEY"))
    if bool(certificate) != bool(key):
        raise ValueError(
            "SPRINGTIDE_TLS_CERTIFICATE and SPRINGTIDE_TLS_KEY belong together: set both or none"
        )
    return Settings(
        token,
        environment.get("SPRINGTIDE_BIND", ""),
        number("PS_PORT", DEFAULT_PORT, 65535),
        number("METRICS_PORT", DEFAULT_METRICS_PORT, 65535),
        number("PS_MEMORY_BYTES", 0, 2**62),
        number("PS_THREADS", 0, 1024),
        certificate,
        key,
        former_tokens(environment),
        former_certificates_by_name(environment),
    )
