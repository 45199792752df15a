"""Processes that `subprocess` starts, made by a fork server where they are Python programs of this tree.

Within `forked()` each such process costs milliseconds instead of the seconds that its imports take; what else
is started, and what cannot be told from an import anew (`_PLAIN`), starts as always.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import marshal
import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fork_server
from fork_server import Program, Request

_SUPPORT = str(Path(__file__).parent)
_BEGIN = f"import sys; sys.path.insert(0, {_SUPPORT!r}); import fork_server; fork_server.main()"
# A child's arguments and environment stand where the server's are, so these are long.
_ROOM = "x" * (100 * 1024)
_FLAGS = {"-I", "-P", "-S", "-u", "-E", "-s", "-B"}
# Read once, at the start of the interpreter or of a library.
_PLAIN = ("GRPC_", "KMP_", "LD_", "MALLOC_", "MKL_", "PYTHON", "RES_OPTIONS", "TORCH_")
_HEEDED = {
    # Read at the first product of matrices, and the server multiplies none.
    "MKL_CBWR",
    "MKL_VERBOSE",
    "PYTHONPATH",
    "PYTHONSAFEPATH",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # by a group that these machines do not have
}

_fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]
_lock = threading.Lock()


class _Server:
    """The asking end of a fork server that is a child of this process. Any thread may call `fork_exec`."""

    def __init__(self, asking: socket.socket) -> None:
        self._asking = asking

    def fork_exec(self, arguments: Sequence[Any], executables: Sequence[bytes], *rest: Any) -> int:
        """Do as `_posixsubprocess.fork_exec`."""
        wanted, descriptors = self._request(arguments, executables, *rest) or (None, [])
        if wanted is not None:
            message = pickle.dumps(wanted)
            try:
                with _lock:
                    socket.send_fds(self._asking, [message], descriptors)
                    if answer := self._asking.recv(64):
                        return int(answer)
            except OSError:
                pass  # it is too long, or the server is gone
        return int(_fork_exec(arguments, executables, *rest))

    def _request(
        self, arguments: Sequence[Any], executables: Sequence[bytes], *rest: Any
    ) -> tuple[Request, list[int]] | None:
        """Return what to ask for, and its input, output and errors; None when it must start plainly."""
        (close_fds, kept, folder, environ, input_, _, _, output, _, errors, _, pipe, _, session) = rest[:14]
        group, gid, gids, uid, umask, before, _ = rest[14:]
        if not close_fds or set(kept) != {pipe} or group != -1 or (gid, gids, uid) != (None, None, None):
            return None
        environment = (
            dict(os.environ)
            if environ is None
            else dict(os.fsdecode(entry).split("=", 1) for entry in environ)
        )
        where = os.path.join(os.getcwd(), os.fsdecode(folder or "."))
        made = request(
            [os.fsdecode(path) for path in executables],
            [os.fsdecode(word) for word in arguments],
            environment,
            where,
        )
        if made is None:
            return None
        if before is not None:
            try:
                made.before = packed_function(before)
            except ValueError:
                return None
        made.session = bool(session)
        if umask != -1:
            made.umask = umask
        return made, [
            target if given == -1 else given for target, given in enumerate((input_, output, errors))
        ]


def request(
    executables: Sequence[str], words: Sequence[str], environment: dict[str, str], folder: str
) -> Request | None:
    """Return how a fork becomes the process of a command; None where it must be a process of its own.

    Args:
        executables: where the program is looked for.
        words: its arguments, from its own name on.
        environment: all of it.
        folder: in which it starts.
    """
    program = program_of(executables, words, folder)
    plain = {name for name in environment if _is_plain(name)}
    usual = all(environment[name] == fork_server.begun_with.get(name) for name in plain)
    size = sum(map(len, words)), sum(len(name) + len(value) + 2 for name, value in environment.items())
    if program is None or not usual or max(size) > len(_ROOM) / 2:
        return None
    mask = os.umask(0)
    os.umask(mask)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Request(program, list(words), environment, folder, False, mask, limit, None)


def _is_plain(name: str) -> bool:
    return name.startswith(_PLAIN) and name not in _HEEDED


def packed_function(function: Callable[[], object]) -> bytes:
    """Return a function with the values that it closes over. Raises ValueError where that cannot be."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    try:
        code = marshal.dumps(function.__code__)
        return pickle.dumps((function.__module__, function.__name__, code, cells))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ValueError(str(error)) from error


def program_of(executables: Sequence[str], words: Sequence[str], folder: str) -> Program | None:
    """Return what this interpreter would run; None for all else that an exec starts.

    Args:
        executables: where the program is looked for.
        words: its arguments, from its own name on.
        folder: in which it starts.
    """
    found = next((path for path in executables if os.access(os.path.join(folder, path), os.X_OK)), "")
    if os.path.dirname(found) != os.path.dirname(sys.executable):
        return None
    if os.path.realpath(found) != os.path.realpath(sys.executable):
        return Program("", found, [found, *words[1:]], False) if _is_script(found) else None
    safe = False
    for number, word in enumerate(words[1:], 1):
        if word in _FLAGS:
            safe = safe or word in ("-I", "-P")
        elif word in ("-c", "-m") and number + 1 < len(words):
            name = "-c" if word == "-c" else words[number + 1]
            return Program(word, words[number + 1], [name, *words[number + 2 :]], safe)
        elif word.startswith("-") or not os.path.isfile(os.path.join(folder, word)):
            return None
        else:
            return Program("", word, list(words[number:]), safe)
    return None


@functools.cache
def _is_script(path: str) -> bool:
    with open(path, "rb") as file:
        line = file.readline(200).decode(errors="replace")
    return line.startswith("#!") and os.path.dirname(line[2:].strip()) == os.path.dirname(sys.executable)


def use(asking: socket.socket) -> None:
    """Let `subprocess` in this process ask a server from now on."""
    subprocess._fork_exec = _Server(asking).fork_exec  # type: ignore[attr-defined]


@functools.cache
def _server() -> _Server:
    """Start the server of this process; it ends with it."""
    asked, asking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fork_server.begun_with = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SPRINGTIDE")},
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "GRPC_ENABLE_FORK_SUPPORT": "false",
        "OMP_NUM_THREADS": "1",
    }
    environment = fork_server.begun_with | {"FORK_SERVER_ROOM": _ROOM}
    with asked:
        process = subprocess.Popen([sys.executable, "-P", "-c", _BEGIN, _ROOM], stdin=asked, env=environment)

    def close() -> None:
        asking.close()
        process.wait(30)

    atexit.register(close)
    return _Server(asking)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Make processes by a fork server.

    Nothing changes where this machine's way to do so is not known, nor with SPRINGTIDE_PLAIN_START=1.
    """
    if not fork_server.can_clone() or os.environ.get("SPRINGTIDE_PLAIN_START"):
        yield
        return
    before = subprocess._fork_exec  # type: ignore[attr-defined]
    subprocess._fork_exec = _server().fork_exec  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = before  # type: ignore[attr-defined]
