"""Proofs that both sides of a connection know the job's token, which is not sent. PURE.

Challenge and response with HMAC-SHA256 over both nonces, so that neither side can be played an old answer.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Final

NONCE_BYTES: Final = 32
_HEX: Final = re.compile(r"[0-9a-f]{64}")
"""Nonces and proofs alike."""


def nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def nonce_in(given: object) -> str | None:
    """Return the peer's nonce; None for what is none."""
    return given if isinstance(given, str) and _HEX.fullmatch(given) else None


def proof(token: str, role: str, server_nonce: str, client_nonce: str) -> str:
    """Return the answer to a challenge.

    Args:
        token: the secret that both sides know.
        role: "client" or "server", the side that answers.
        server_nonce: the server's.
        client_nonce: the client's.
    """
    text = f"springtide-ps/{role}/{server_nonce}/{client_nonce}".encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def holds(given: object, token: str, role: str, server_nonce: str, client_nonce: str) -> bool:
    """Return whether the other side's answer is right; compared in constant time.

    Args:
        given: the answer.
        token: the secret that both sides know.
        role: "client" or "server", the side that answers.
        server_nonce: the server's.
        client_nonce: the client's.
    """
    expected = proof(token, role, server_nonce, client_nonce)
    return nonce_in(given) is not None and hmac.compare_digest(str(given).encode(), expected.encode())
