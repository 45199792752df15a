"""Settings of a parameter server, from its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide_protocol.former_keys import former_certificates_by_name, former_tokens

DEFAULT_PORT = 7080
DEFAULT_METRICS_PORT = 9402


@dataclass(frozen=True)
class Settings:
    """token: the job's. former_tokens: which pods of the job may still have. bind: the one address to listen
    on; all when empty. memory_limit: bytes, 0 is none.

    threads: that make steps; 0: one for each core that the process may use.
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
    former_certificates: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # by the name asked for


def read(environment: Mapping[str, str]) -> Settings:
    """Raise ValueError that names the variable and what it must hold."""

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
