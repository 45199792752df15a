"""The names by which clients ask a server of a job for a certificate (SNI). Needs no gRPC.

A server whose job has got another key has a certificate of the old and of the new authority; a client says by
the name which one it trusts.
"""

from __future__ import annotations

import hashlib

SERVER_NAME = "springtide-coordinator"
_END = "-----END CERTIFICATE-----"


def server_name(authorities: str) -> str:
    """Return the name that a client asks for which trusts these authorities (PEM): that of the first."""
    first = authorities.partition(_END)[0].strip() + f"\n{_END}"
    return f"{hashlib.sha256(first.encode()).hexdigest()[:16]}.{SERVER_NAME}"
