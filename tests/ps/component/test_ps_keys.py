"""Parameter servers and clients of a job that has got another key: each knows one the other has."""

from __future__ import annotations

import ssl
from contextlib import closing

import pytest
import torch
from job_tls import job_tls

from springtide_protocol.former_keys import (
    former_authorities,
    former_certificates,
    former_certificates_by_name,
    former_tokens,
)
from springtide_protocol.tls_names import server_name
from springtide_ps.server.kv_store import Store
from springtide_ps.server.server import Server
from springtide_ps.wire.auth import MOST_PROOFS, Tokens, known_token, proof, proofs
from springtide_ps.wire.client import ServerClient
from springtide_ps.wire.stream import RejectedError
from springtide_ps.wire.tls import client_context, server_context

OLD, NEW, OTHER = "the old token", "the new token", "the token of another job"
OLD_TLS, NEW_TLS = job_tls("uid", root_key=b"o" * 32), job_tls("uid", root_key=b"n" * 32)
BOTH = f"{NEW_TLS.authority}\n{OLD_TLS.authority}"


def talks(server: Server, tokens: Tokens, tls: ssl.SSLContext | None = None) -> bool:
    """Connect, write and read a value; whether a connection came of it."""
    try:
        client = ServerClient(("127.0.0.1", server.port), tokens, 20, tls)
    except (RejectedError, ssl.SSLError):
        return False
    with closing(client):
        client.init("w", torch.arange(8.0)).result(20)
    return True


@pytest.mark.parametrize("servers", [OLD, (NEW, OLD)], ids=["made before", "made after"])
@pytest.mark.parametrize("clients", [OLD, (NEW, OLD)], ids=["made before", "made after"])
def test_pods_of_before_and_after_know_each_other(servers: Tokens, clients: Tokens) -> None:
    with closing(Server(Store(0), servers, "127.0.0.1")) as server:
        assert talks(server, clients)


@pytest.mark.parametrize("clients", [OTHER, (OTHER, "and another")])
def test_who_knows_none_of_the_tokens_is_refused(clients: Tokens) -> None:
    with closing(Server(Store(0), (NEW, OLD), "127.0.0.1")) as server:
        assert not talks(server, clients)


def test_token_that_has_been_given_up_is_refused() -> None:
    with closing(Server(Store(0), (NEW,), "127.0.0.1")) as server:
        assert not talks(server, OLD)
        assert talks(server, (NEW, OLD))


@pytest.mark.parametrize("after", [False, True], ids=["server of before", "server of after"])
@pytest.mark.parametrize(
    ("authorities", "trusted"),
    [(OLD_TLS.authority, True), (BOTH, True), (job_tls("another").authority, False)],
    ids=["client of before", "client of after", "another job"],
)
def test_each_client_is_shown_what_it_trusts(after: bool, authorities: str, trusted: bool) -> None:
    shown = server_context(OLD_TLS.certificate, OLD_TLS.key)
    if after:
        former = {server_name(OLD_TLS.authority): (OLD_TLS.certificate, OLD_TLS.key)}
        shown = server_context(NEW_TLS.certificate, NEW_TLS.key, former)
    with closing(Server(Store(0), OLD, "127.0.0.1", tls=shown)) as server:
        assert talks(server, OLD, client_context(authorities)) is trusted


def test_newest_certificate_is_shown_to_clients_that_trust_it() -> None:
    former = {server_name(OLD_TLS.authority): (OLD_TLS.certificate, OLD_TLS.key)}
    shown = server_context(NEW_TLS.certificate, NEW_TLS.key, former)
    with closing(Server(Store(0), NEW, "127.0.0.1", tls=shown)) as server:
        assert talks(server, NEW, client_context(NEW_TLS.authority))


# ---- without connections


def test_one_of_several_proofs_is_enough() -> None:
    given = proofs((NEW, OLD), "client", "a", "b")
    assert known_token(given, OLD, "client", "a", "b") == OLD
    assert known_token(given, (OTHER, NEW, OLD), "client", "a", "b") == NEW
    assert known_token(given, OTHER, "client", "a", "b") is None
    assert known_token(given, NEW, "server", "a", "b") is None, "of the other role"
    for nothing in (None, [], "x", given[0], [None, 7, ["x"]], {"0": given[0]}):
        assert known_token(nothing, NEW, "client", "a", "b") is None


def test_no_more_than_a_few_proofs_are_looked_at() -> None:
    right = proof(NEW, "client", "a", "b")
    assert known_token(["0" * 64] * (MOST_PROOFS - 1) + [right], NEW, "client", "a", "b") == NEW
    assert known_token(["0" * 64] * MOST_PROOFS + [right], NEW, "client", "a", "b") is None
    assert len(proofs([str(number) for number in range(20)], "client", "a", "b")) == MOST_PROOFS


def test_former_keys_are_read_by_number_and_gaps_are_none() -> None:
    env = {
        "SPRINGTIDE_FORMER_TOKEN_10": "third",
        "SPRINGTIDE_FORMER_TOKEN_1": "first",
        "SPRINGTIDE_FORMER_TOKEN_2": "",
        "SPRINGTIDE_FORMER_TOKEN_X": "none",
        "SPRINGTIDE_FORMER_CA_1": OLD_TLS.authority,
        "SPRINGTIDE_FORMER_CERTIFICATE_1": OLD_TLS.certificate,
        "SPRINGTIDE_FORMER_KEY_1": OLD_TLS.key,
        "SPRINGTIDE_FORMER_CERTIFICATE_2": NEW_TLS.certificate,
    }
    assert former_tokens(env) == ("first", "third")
    assert former_authorities(env) == (OLD_TLS.authority,)
    assert former_certificates(env) == ((OLD_TLS.certificate, OLD_TLS.key),)
    name = server_name(OLD_TLS.authority)
    assert former_certificates_by_name(env) == {name: (OLD_TLS.certificate, OLD_TLS.key)}
    assert former_tokens({}) == ()
