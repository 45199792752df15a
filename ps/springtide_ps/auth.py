"""Who may talk: both sides prove that they know the job's token, without sending it. PURE.

Challenge and response with HMAC-SHA256 over both nonces, so that neither side can be played an old answer.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

NONCE_BYTES: Final = 32


def nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def proof(token: str, role: str, server_nonce: str, client_nonce: str) -> str:
    """What `role` ("client" or "server") answers."""
    text = f"springtide-ps/{role}/{server_nonce}/{client_nonce}".encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def holds(given: object, token: str, role: str, server_nonce: str, client_nonce: str) -> bool:
    """Whether `given` is the proof of `role`; compared in constant time."""
    expected = proof(token, role, server_nonce, client_nonce)
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())
