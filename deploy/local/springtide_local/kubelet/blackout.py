"""Processes that are gone while their addresses stay silent, as when a machine loses power.

The kernel of a machine that lives answers for processes that die: a peer gets FIN or RST, and a new
connection is refused. Here the sockets of the dead are kept: each gets a filter that drops all that comes in
(nothing is acknowledged, no SYN is answered), and is held open by this process after its owner was killed.
Only a segment that was on its way at that moment may be sent again, by the kernel, until it gives up.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

_PIDFD_GETFD = 438  # the same number on every architecture
_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K, 0 bytes: the packet is dropped
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def why_impossible() -> str:
    """Say what keeps this machine from silencing the sockets of a dead process; "" when nothing does."""
    if _ptrace_scope() >= 2 and os.geteuid() != 0:
        return f"{_PTRACE_SCOPE} is {_ptrace_scope()}, so one process may not take over another one's sockets"
    reading, writing = os.pipe()
    own = os.pidfd_open(os.getpid())
    try:
        os.close(_descriptor_of(own, reading))
    except OSError as error:
        return f"the system call pidfd_getfd fails here ({error.strerror}): it needs Linux 5.6 or newer"
    finally:
        for descriptor in (own, reading, writing):
            os.close(descriptor)
    return ""


class SilentSockets:
    """The sockets of processes that died with their machine."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def __len__(self) -> int:
        return len(self._held)

    def take(self, pids: Iterable[int]) -> list[str]:
        """Silence and hold all network sockets of these processes, which must stand still (SIGSTOP).

        Returns:
            Descriptions of the sockets that could not be taken over. A process that is gone already is no
                failure.
        """
        failures = []
        for pid in pids:
            try:
                self._take_of(pid)
            except ProcessLookupError:
                continue
            except OSError as error:
                failures.append(f"the sockets of process {pid} cannot be taken over: {error.strerror}")
        return failures

    def release(self) -> None:
        """Close them: the kernel answers for these addresses again, as after a reboot."""
        held, self._held = self._held, []
        for one in held:
            one.close()

    def _take_of(self, pid: int) -> None:
        process = os.pidfd_open(pid)
        try:
            for number in _socket_descriptors(pid):
                self._hold(socket.socket(fileno=_descriptor_of(process, number)))
        finally:
            os.close(process)

    def _hold(self, found: socket.socket) -> None:
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            found.close()
            return
        program = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
        pointer = struct.pack("HP", 1, ctypes.addressof(program))
        found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)
        self._held.append(found)


def _socket_descriptors(pid: int) -> list[int]:
    folder = f"/proc/{pid}/fd"
    result = []
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"{folder}/{name}").startswith("socket:"):
                result.append(int(name))
    return result


def _descriptor_of(process: int, number: int) -> int:
    """Duplicate a descriptor of another process, given by its pidfd, into this one."""
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(_PIDFD_GETFD, process, number, 0)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _ptrace_scope() -> int:
    try:
        return int(_PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        return 0
