"""A server that makes Python processes by forking itself, with everything imported already.

A worker's process imports torch for two seconds of processor time, a test's job has several, and there are
hundreds of tests. `forked_start` puts this in the place of fork and exec: the process that asks gets a child
of its own (its real parent, CLONE_PARENT), with the session, folder, environment, descriptors, limits and
`/proc` files that the program would have had. It can tell nothing but that its modules are there already.

Programs that start others (`_STARTING`) get a server of their own, forked before they begin.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import os
import pickle
import platform
import resource
import runpy
import signal
import socket
import struct
import sys
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "torch",
    "torch._dynamo",  # the first optimizer of a process imports it
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.optim.swa_utils",
    "torch.profiler",
    "forked_start",
    "grpc.aio",
    "grpc._channel",
    "kopf",
    "springtide.api",
    "springtide.embedding.modules",
    "springtide.embedding.unmanaged",
    "springtide.launch.main",
    "springtide.launch.script_launcher",
    "springtide_coordinator.logs",
    "springtide_coordinator.service",
    "springtide_local.process",
    "springtide_operator.runtime",
    "springtide_operator.kopf_lists",
    "springtide_ps.server.metrics",
    "springtide_ps.server.registration",
    "springtide_ps.server.server",
    "springtide_ps.server.settings",
)
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 1, 15, 35, 14
# The environment that the server began with: what its libraries have read once. Set in who starts it, too.
begun_with = dict(os.environ)
_LONGEST = 192 * 1024
_libc = ctypes.PyDLL(None)
_libc.sbrk.restype = ctypes.c_void_p


@dataclass
class Program:
    """The code that an interpreter runs.

    kind: `-c`, `-m` or a script's "". safe: no folder of its own goes before sys.path.
    """

    kind: str
    target: str
    argv: list[str]
    safe: bool


@dataclass
class Request:
    """A process to be made. limit: of open files. Descriptors come beside it: input, output, errors."""

    program: Program
    command: list[str]
    environment: dict[str, str]
    folder: str
    session: bool
    umask: int
    limit: tuple[int, int]
    before: bytes | None
    """A function that is called first, marshalled (`forked_start.packed`)."""


# ---- the server


def can_clone() -> bool:
    """Whether this machine's way to make a sibling is known here."""
    return platform.machine() in _CLONE and sys.platform == "linux"


def serve(asked: socket.socket) -> None:
    """Fork for each request until the other end closes.

    Args:
        asked: from which requests come, and to which the number of each process goes.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, _LONGEST, 3)
        if not message:
            return
        pid = _clone_sibling()
        if pid == 0:
            asked.close()
            become(pickle.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        asked.send(str(pid).encode())


def _clone_sibling() -> int:
    """Fork a process whose parent is this one's own parent; return its number, 0 in the process itself."""
    flags = (
        _CLONE_PARENT | (_CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID if _thread_id else 0) | signal.SIGCHLD
    )
    place, none = ctypes.c_void_p(_thread_id), ctypes.c_void_p()
    arguments = (place, none) if platform.machine() == "x86_64" else (none, place)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _libc.syscall(
        ctypes.c_long(_CLONE[platform.machine()]), ctypes.c_ulong(flags), none, none, *arguments
    )
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("clone failed")
    return int(pid)


def _find_thread_id() -> int:
    """Return the address where the C library keeps this thread's number, which the kernel writes in a fork.

    0 where it is not found: then the child's C library believes to be its parent's thread.
    """
    _libc.pthread_self.restype = ctypes.c_void_p
    start = _libc.pthread_self()
    words = (ctypes.c_int32 * 256).from_address(start)
    found = [number for number, word in enumerate(words) if word == os.getpid()]
    return start + 4 * found[0] if len(found) == 1 else 0


def keep_at_exit() -> None:
    """Let no fork take apart at its end what was there before it: it would be half of what a short process
    does, for torch takes its libraries back one by one."""
    for thing in gc.get_objects():
        if type(thing) is weakref.finalize:
            thing.atexit = False


def _stat_fields() -> list[int]:
    """Return the numbers of /proc/self/stat from the parent's on: field 4 of proc(5) is the first."""
    return [int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]]


# ---- the child


def become(request: Request, descriptors: list[int]) -> NoReturn:
    """Be the process of the request, to its end.

    Args:
        request: what to be.
        descriptors: input, output and errors; more than these three are not closed.
    """
    try:
        if request.session:
            os.setsid()
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
        for descriptor in descriptors:
            os.close(descriptor)
        os.umask(request.umask)
        resource.setrlimit(resource.RLIMIT_NOFILE, request.limit)
        os.chdir(request.folder)
        if request.before is not None:
            _unpacked(request.before)()
        _take_environment(request.environment)
        _show(request.command, request.environment)
        _reset_interpreter(request.program, request.environment)
    except BaseException:
        traceback.print_exc()
        os._exit(127)
    target = request.program.target
    if target.startswith(_INIT):
        _fork_in_spawn()
    elif (prepare := _STARTING.get(_module_of(request.program))) is not None:
        prepare()
    end(run(request.program))


def _take_environment(environment: dict[str, str]) -> None:
    for name in [*os.environ]:
        del os.environ[name]
    os.environ.update(environment)
    if not any(environment.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG")):
        os.environ["LC_CTYPE"] = "C.UTF-8"  # as Python does at its start (PEP 538)


def _show(command: list[str], environment: dict[str, str]) -> None:
    """Let /proc show the command and the environment, as after an exec.

    A kernel that does not let their ends be moved shows zeros behind them, as empty arguments.
    """
    arg_start, arg_end, env_start, env_end = _room
    arg_end = _write(arg_start, arg_end, command)
    env_end = _write(env_start, env_end, [f"{key}={value}" for key, value in environment.items()])
    fields = _stat_fields()
    code, stack, data = fields[22:24], fields[24], fields[41:43]
    heap = (fields[43], _libc.sbrk(ctypes.c_ssize_t(0)))
    # struct prctl_mm_map: nothing but the two ends changes.
    layout = struct.pack(
        "=12QIi", *code, *data, *heap, stack, arg_start, arg_end, env_start, env_end, 0, 0, -1
    )
    size, zero = ctypes.c_ulong(len(layout)), ctypes.c_ulong(0)
    _libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), layout, size, zero)
    _libc.prctl(_PR_SET_NAME, os.path.basename(command[0]).encode()[:15])


def _write(start: int, end: int, words: list[str]) -> int:
    """Write words with a zero behind each, and return where they end."""
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(text) > end - start:
        raise OSError(f"{len(text)} bytes of arguments or environment: there is room for {end - start}")
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))
    return start + len(text)


def _reset_interpreter(program: Program, environment: dict[str, str]) -> None:
    """Bring what the interpreter reads at its start to what it would be."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (it stays for the life of the process)
    sys.stdout = _writer(1, unbuffered)
    sys.stderr = _writer(2, unbuffered)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    first = {"-c": "", "-m": os.getcwd()}.get(program.kind, os.path.dirname(os.path.abspath(program.target)))
    roots = [] if program.safe else [root for root in environment.get("PYTHONPATH", "").split(":") if root]
    safe = program.safe or bool(environment.get("PYTHONSAFEPATH"))
    sys.path[:] = [*([] if safe else [first]), *roots, *_path]
    sys.argv = program.argv
    sys.orig_argv = [sys.executable, *program.argv]
    warnings.resetwarnings()
    warnings.filters[:] = _filters  # type: ignore[index]
    torch = sys.modules["torch"]
    if (threads := environment.get("OMP_NUM_THREADS", "1")) != "1":  # it starts threads
        torch.set_num_threads(int(threads))
    torch.default_generator.seed()  # as of any process; Python's own does so by itself
    sys.modules["numpy"].random.seed()
    metrics = sys.modules["prometheus_client"]
    if environment.get("PROMETHEUS_DISABLE_CREATED_SERIES", "").lower() in ("t", "true", "1"):
        metrics.disable_created_metrics()
    else:
        metrics.enable_created_metrics()


def _writer(descriptor: int, unbuffered: bool) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "wb", closefd=False)
    buffered: Any = raw if unbuffered else io.BufferedWriter(raw)
    lines = descriptor == 2 or os.isatty(descriptor)
    errors = "backslashreplace" if descriptor == 2 else "strict"
    return io.TextIOWrapper(buffered, "utf-8", errors, line_buffering=lines, write_through=unbuffered)


def _unpacked(packed: bytes) -> Callable[[], None]:
    """Return the function that `forked_start.packed` has packed."""
    import marshal

    module, name, code, cells = pickle.loads(packed)
    names = vars(importlib.import_module(module))
    return types.FunctionType(marshal.loads(code), names, name, (), tuple(map(types.CellType, cells)))


def run(program: Program) -> int:
    """Run a program as the interpreter does, and return its exit code."""
    try:
        if program.kind == "-m":
            with warnings.catch_warnings():
                # What is imported already is no reason to say so.
                warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
                runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        elif program.kind == "-c":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(program.target, "<string>", "exec"), vars(main))
        else:
            runpy.run_path(program.target, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return int(stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def end(code: int) -> NoReturn:
    """End as the interpreter does, but leave the memory as it is: to tear torch's modules down takes longer
    than all else."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


# ---- programs that start others


def _attach_server() -> None:
    """Fork a server for the processes that this one will start, and let `subprocess` use it."""
    import forked_start

    asked, asking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        asking.close()
        null = os.open(os.devnull, os.O_RDWR)
        for target in range(3):
            os.dup2(null, target)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        serve(asked)
        os._exit(0)
    asked.close()
    forked_start.use(asking)


def _attach_server_to_fork() -> None:
    """The embedded cluster's outermost process forks the one that starts containers."""
    attached: list[bool] = []

    def attach() -> None:
        if not attached:
            attached.append(True)
            _attach_server()

    os.register_at_fork(after_in_child=attach)


def _fork_in_spawn() -> None:
    """Let the init process of a container, which has one thread and imports nothing, fork for its command."""
    import forked_start

    plain = os.posix_spawnp

    def spawn(path: str, words: list[str], environment: Any, **named: Any) -> int:
        places = [path] if "/" in path else [os.path.join(p, path) for p in os.get_exec_path(environment)]
        request = forked_start.request(places, words, dict(environment), os.getcwd())
        if request is None:
            return plain(path, words, environment, **named)
        pid = os.fork()
        if pid == 0:
            _close_as_exec()
            become(request, [])
        return pid

    os.posix_spawnp = spawn  # type: ignore[assignment]


def _close_as_exec() -> None:
    """Do to descriptors and to signals what an exec does."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) > 2 and not os.get_inheritable(int(name)):
                os.close(int(name))


def _module_of(program: Program) -> str:
    """Return the module that a program runs; `springtide launch` is one by another name."""
    launches = os.path.basename(program.target) == "springtide" and program.argv[1:2] == ["launch"]
    return "springtide.launch" if launches else program.target


_INIT = "# The init process of Springtide"
_STARTING = {
    "springtide.launch": _attach_server,
    "springtide_cli.main": _attach_server,  # `springtide run --local` starts a cluster
    "springtide_local.reaper": _attach_server_to_fork,
}
_room = (0, 0, 0, 0)
_thread_id = 0
_path = [entry for entry in sys.path if entry not in ("", str(Path(__file__).parent))]
_filters = [*warnings.filters]


def main() -> None:
    """Serve at the socket that is descriptor 0."""
    global _room, _thread_id
    asked = socket.socket(fileno=os.dup(0))
    gc.disable()  # none of it is garbage
    for module in PRELOADED:
        importlib.import_module(module)
    gc.enable()
    _room, _thread_id = (*_stat_fields()[44:48],), _find_thread_id()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What is here lives for ever, so collecting garbage in a child must not copy the pages that it is in.
    gc.collect()
    keep_at_exit()
    gc.freeze()
    serve(asked)
