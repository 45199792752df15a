"""A server says that it lives, to each client that waits for it.

An answer may be late for good reasons: other members have not sent their part, or the step of a large model
is being made. Only a server that is silent beside cannot be told from one that no packet reaches. So each
second every client gets a PULSE that waits for an answer, or whose request is being read or carried out; and
a client that waits and hears nothing at all for a while gives the connection up.

The client counts its own waits instead of looking at a clock: a process that stood still itself, with or
without the server, has waited once.
"""

from __future__ import annotations

from typing import Final, Protocol

KEEPALIVE_SECONDS: Final = 1.0
SILENT_SECONDS: Final = 10.0


class Waits(Protocol):
    """A client's connection, as far as it decides about pulses."""

    @property
    def waited_for(self) -> bool:
        """Return whether it has asked what is not answered yet."""

    @property
    def unsent(self) -> int:
        """Return the bytes of answers that are on their way."""


class Keepalive:
    """Decide when one client is to hear that the server lives.

    The thread that reads its requests says what it does; another thread asks whether a pulse is due.
    """

    def __init__(self) -> None:
        self._reading = self._read = False

    def begin(self) -> None:
        """Note that the head of a request is here."""
        self._reading = self._read = True

    def end(self) -> None:
        """Note that the request was answered, or will be by another thread."""
        self._reading = False

    def due(self, client: Waits) -> bool:
        """Return whether the client is to be told; called once in PULSE_SECONDS.

        Not while answers are on their way, which say the same and are not to be overtaken by any number of
        pulses where the client reads slowly.
        """
        read, self._read = self._read, False
        return not client.unsent and (self._reading or read or client.waited_for)
