"""Proofs that both sides of a connection know the job's token, which is not sent. PURE.

Challenge and response with HMAC-SHA256 over both nonces, so that neither side can be played an old answer.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Final

NONCE_BYTES: Final = 32
_HEX: Final = re.compile(r"[0-9a-f]{64}")
"""Nonces and proofs alike."""


def nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def nonce_in(given: object) -> str | None:
    """Return the peer's nonce; None for what is none."""
    return given if isinstance(given, str) and _HEX.fullmatch(given) else None


Tokens = str | Sequence[str]
"""The job's token; or several, the newest first, while pods with older ones live."""
MOST_PROOFS: Final = 8


def as_tokens(tokens: Tokens) -> tuple[str, ...]:
    """Return the tokens, the newest first."""
    return (tokens,) if isinstance(tokens, str) else tuple(tokens)


def proofs(tokens: Tokens, role: str, server_nonce: str, client_nonce: str) -> list[str]:
    """Return an answer to a challenge for each token, the newest first; no more than the other side looks at.

    Args:
        tokens: the secrets that this side knows.
        role: "client" or "server", the side that answers.
        server_nonce: the server's.
        client_nonce: the client's.
    """
    known = as_tokens(tokens)[:MOST_PROOFS]
    return [proof(token, role, server_nonce, client_nonce) for token in known]


def known_token(given: object, tokens: Tokens, role: str, server_nonce: str, client_nonce: str) -> str | None:
    """Return the token of which one of the other side's answers is a proof; None where none is.

    Args:
        given: the answers; what is no list of them proves nothing.
        tokens: the secrets that this side knows.
        role: "client" or "server", the side that answers.
        server_nonce: the server's.
        client_nonce: the client's.
    """
    answers = given[:MOST_PROOFS] if isinstance(given, list) else []
    found = None
    for token in as_tokens(tokens):
        for answer in answers:
            if holds(answer, token, role, server_nonce, client_nonce):
                found = found or token
    return found


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
