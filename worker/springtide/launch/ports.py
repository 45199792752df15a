"""A port that nobody else takes between the moment it is chosen and the moment a script listens on it."""

from __future__ import annotations

import socket


class ReservedPort:
    """Bound and not listening, with SO_REUSEADDR: the kernel gives it to nobody who asks for any free port,
    and lets a server that sets the same option (torch's store does) listen on it.
    """

    def __init__(self) -> None:
        """Raise OSError when there is no free port."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("", 0))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()
