"""The init process of a worker's container: it stands before the template's command and hears SIGTERM for it.

A container's first process is process 1 of a PID namespace, to which the kernel delivers only what it
catches: a program that still imports torch, or a shell that waits for one, drops SIGTERM and stays for the
pod's whole grace period. This program catches it, and passes it on to the first process below that catches
it (a worker behind a shell leaves politely), or to all of them where none does. It also reaps what lost its
parent, and ends as the command ends: with its exit code, or 128 + n after signal n.

It runs in the user's image by `python -c`, under any Python from 3.8 on: only the standard library, no
f-strings, no dollar signs (Kubernetes would expand them). `manifests.init_process` puts it into the pod.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
WATCHED = (signal.SIGTERM, signal.SIGCHLD, *FORWARDED)
SHELLS = ("sh", "bash", "dash", "ash", "ksh", "zsh", "busybox")
LOOK_SECONDS = 0.25  # while ending: who has come to catch SIGTERM, and who is left
LEFT_SECONDS = 5.0  # after the last process that caught it has gone: for a shell's next line


def run(argv: list[str]) -> int:
    """Run a command until it ends and return its exit code; 127 or 126 where it cannot be started."""
    heard, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in WATCHED:
        if number not in FORWARDED or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, nothing)  # what is caught is not inherited; what is ignored is, and stays
    try:
        # Python ignores these two, which a program that is started would inherit.
        child = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ))
    except OSError as error:
        print("cannot start the command " + repr(argv[0]) + ": " + str(error.strerror), file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    told: set[int] = set()
    ending, patience = False, 0.0
    while True:
        ready = select.select([heard], [], [], LOOK_SECONDS if ending else None)[0]
        numbers = os.read(heard, 4096) if ready else b""
        code = reap(child)
        if code is not None:
            return code
        for number in FORWARDED:
            for pid in below(child, number)[0] if number in numbers else ():
                send(pid, number)
        if signal.SIGTERM in numbers:
            ending = True
            told.clear()
        if not ending:
            continue
        catching, deaf = below(child, signal.SIGTERM)
        now = time.monotonic()
        if catching:
            patience = now + LEFT_SECONDS
        for pid in catching if catching else deaf if now >= patience else ():
            if pid not in told or not catching:
                told.add(pid)
                send(pid, signal.SIGTERM)


def nothing(number: int, frame: object) -> None:
    """Be there, so that the signal is caught: its number comes through the pipe.

    Args:
        number: of the signal.
        frame: at which the signal came; not looked at.
    """


def reap(child: int) -> int | None:
    """Take leave of all processes that have ended; return the exit code of `child` if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def below(child: int, number: int) -> tuple[list[int], list[int]]:
    """Return the processes below this one by how they take a signal.

    A process that catches the signal is left to end those below it. Blocking counts: `sigwait` and its like
    take a signal that is blocked.

    Args:
        child: the command's process, for a system that does not tell of processes.
        number: of the signal.

    Returns:
        Those that catch it; and those above and beside them that do not.
    """
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return [child], []
    for name in names:
        if name.isdigit():
            state, parent = stat(name)
            if state not in ("", "Z", "X"):
                children.setdefault(parent, []).append(int(name))
    catching: list[int] = []
    deaf: list[int] = []
    queue = children.get(os.getpid(), [])
    while queue:
        pid = queue.pop(0)
        if catches(pid, number):
            catching.append(pid)
        else:
            deaf.append(pid)
            queue.extend(children.get(pid, []))
    return catching, deaf


def stat(name: str) -> tuple[str, int]:
    """Return a process's state and its parent; ("", 0) where it is gone."""
    try:
        with open("/proc/" + name + "/stat", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
        return words[0], int(words[1])
    except (OSError, IndexError, ValueError):
        return "", 0


def catches(pid: int, number: int) -> bool:
    """Return whether a process catches or blocks a signal. Some sandboxes do not tell: then all but shells
    do.

    Args:
        pid: of the process.
        number: of the signal.
    """
    try:
        with open("/proc/" + str(pid) + "/status", errors="replace") as file:
            words = dict(line.split(":", 1) for line in file)
        masks = [int(words[key], 16) for key in ("SigCgt", "SigBlk") if key in words]
    except (OSError, ValueError):
        return False
    if not masks:
        return words.get("Name", "").strip() not in SHELLS
    return any(mask >> (number - 1) & 1 for mask in masks)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone, or somebody else's.

    Args:
        pid: of the process.
        number: of the signal.
    """
    try:
        os.kill(pid, number)
    except OSError:
        return


if __name__ == "__main__":
    os._exit(run(sys.argv[1:]))
