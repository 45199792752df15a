"""Keys that other processes of the job may still have, from the environment of a pod. Needs no gRPC.

The operator numbers them from 1; a Secret that somebody deleted leaves a gap.
"""

from __future__ import annotations

from collections.abc import Mapping

from springtide_protocol.tls_names import server_name

TOKEN = "SPRINGTIDE_FORMER_TOKEN"
AUTHORITY = "SPRINGTIDE_FORMER_CA"
CERTIFICATE = "SPRINGTIDE_FORMER_CERTIFICATE"
KEY = "SPRINGTIDE_FORMER_KEY"


def former_tokens(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the tokens, the newest first."""
    return tuple(env[f"{TOKEN}_{number}"] for number in _numbers(env, TOKEN))


def former_authorities(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the authorities, in PEM, the newest first."""
    return tuple(env[f"{AUTHORITY}_{number}"] for number in _numbers(env, AUTHORITY))


def former_certificates(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the certificates, each with its private key, in PEM, the newest first; no half ones."""
    numbers = [number for number in _numbers(env, CERTIFICATE) if env.get(f"{KEY}_{number}")]
    return tuple((env[f"{CERTIFICATE}_{number}"], env[f"{KEY}_{number}"]) for number in numbers)


def former_certificates_by_name(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the certificates and their keys by the name that clients ask for which trust their authority."""
    numbers = [number for number in _numbers(env, CERTIFICATE) if env.get(f"{KEY}_{number}")]
    return {
        server_name(env[f"{AUTHORITY}_{number}"]): (env[f"{CERTIFICATE}_{number}"], env[f"{KEY}_{number}"])
        for number in numbers
        if env.get(f"{AUTHORITY}_{number}")
    }


def _numbers(env: Mapping[str, str], name: str) -> list[int]:
    """Return the numbers of the variables of this name that are set, in order."""
    prefix = f"{name}_"
    ends = (key.removeprefix(prefix) for key in env if key.startswith(prefix) and env[key])
    return sorted(int(end) for end in ends if end.isdecimal())
