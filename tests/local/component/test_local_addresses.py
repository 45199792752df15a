"""Which loopback network a cluster takes, and which addresses its pods get."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from springtide_local.addresses import PodAddresses, claim_network, listened_networks

SEED = "a folder of this test"


def test_the_same_seed_gets_the_same_network_while_nobody_has_it() -> None:
    first, claim = claim_network(SEED)
    with claim:
        other, second = claim_network(SEED)
        second.close()
    assert other != first
    again, claim = claim_network(SEED)
    claim.close()
    assert again == first


def test_a_network_in_which_somebody_listens_is_left_out() -> None:
    first, claim = claim_network(SEED)
    claim.close()
    with socket.create_server((f"127.{first}.16.7", 0)):
        assert first in listened_networks()
        other, claim = claim_network(SEED)
        claim.close()
    assert other != first
    assert first not in listened_networks()


def test_only_listeners_on_an_address_of_the_network_count(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0710147F:24BA 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1\n"
        "   1: 0710157F:24BA 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 2 1\n"
        "   2: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 3 1\n"
        "   3: 0A00140A:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4 1\n"
    )
    assert listened_networks(table) == {20}
    assert listened_networks(tmp_path / "missing") == set()


def test_without_a_free_network_the_error_says_what_to_do(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    lines = [
        f"   {n}: 0110{n:02X}7F:24BA 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 1 1"
        for n in range(256)
    ]
    table.write_text("header\n" + "\n".join(lines) + "\n")
    with pytest.raises(RuntimeError, match="stop other clusters"):
        claim_network(SEED, table)


def test_an_address_rests_before_another_pod_gets_it() -> None:
    addresses = PodAddresses(20)
    first, second = addresses.take(), addresses.take()
    assert first != second
    addresses.give_back(first)
    assert addresses.take() not in (first, second)
