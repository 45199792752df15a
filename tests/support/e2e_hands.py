"""Faults that tests may make on the machines under a cluster, where its owner gives them a command for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

COMMAND_SECONDS = 120.0


@dataclass(frozen=True)
class Hands:
    """Each does one thing to the machines, or is None where it cannot be done.

    `crash_node`: the node's machine is gone without a packet. `restore_node`: it works again; both get its
    name. `stop_dns`, `start_dns`: no pod resolves any name; all do again.
    """

    crash_node: Callable[[str], None] | None = None
    restore_node: Callable[[str], None] | None = None
    stop_dns: Callable[[], None] | None = None
    start_dns: Callable[[], None] | None = None

    def to_crash_nodes(self) -> tuple[Callable[[str], None], Callable[[str], None]]:
        """Return what crashes and restores a node; skip the test where nobody may."""
        if self.crash_node is None or self.restore_node is None:
            pytest.skip(
                "nodes of this cluster cannot be killed: SPRINGTIDE_E2E_NODE_CRASH and"
                " SPRINGTIDE_E2E_NODE_RESTORE name commands that do ($NODE is the node's name)"
            )
        return self.crash_node, self.restore_node

    def to_stop_dns(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return what stops and starts the cluster's DNS; skip the test where nobody may."""
        if self.stop_dns is None or self.start_dns is None:
            pytest.skip(
                "DNS of this cluster is others' as well: SPRINGTIDE_E2E_DNS_STOP and SPRINGTIDE_E2E_DNS_START"
                " name commands that stop and start it"
            )
        return self.stop_dns, self.start_dns


def given_hands(environ: Mapping[str, str]) -> Hands:
    """Return what the owner of a cluster allows: shell commands in environment variables."""

    def command(name: str) -> str:
        return environ.get(f"SPRINGTIDE_E2E_{name}", "")

    crash, restore = command("NODE_CRASH"), command("NODE_RESTORE")
    stop, start = command("DNS_STOP"), command("DNS_START")
    return Hands(
        crash_node=(lambda node: _carry_out(crash, node)) if crash else None,
        restore_node=(lambda node: _carry_out(restore, node)) if restore else None,
        stop_dns=(lambda: _carry_out(stop)) if stop else None,
        start_dns=(lambda: _carry_out(start)) if start else None,
    )


def _carry_out(command: str, node: str = "") -> None:
    done = subprocess.run(
        ["sh", "-c", command],
        env={**os.environ, "NODE": node},
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{command!r} ended with {done.returncode}: {done.stderr or done.stdout}"
