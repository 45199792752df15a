"""The launcher of a script that knows nothing of the library, without a job: torchrun for one machine."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from springtide.launch.gang import Gang
from springtide.launch.options import Options
from springtide.launch.pod import machine
from springtide.launch.ports import ReservedPort
from springtide.launch.processes import CannotStart, Child, reap, spawn
from springtide.launch.script import Rendezvous, variables
from springtide.launch.signals import ENDING, Signals
from springtide.launch.supervision import Action, End, Policy, Spawn

log = logging.getLogger("springtide")

_LONGEST_WAIT = 5.0
_CANNOT_START = 127
_GRACE = 10.0


class _Member(NamedTuple):
    id: str
    pod_uid: str


class Solo:
    """Runs `count` processes on this machine, all of which end when one fails."""

    def __init__(self, options: Options, count: int, environ: Mapping[str, str]) -> None:
        grace = _GRACE if options.grace is None else options.grace
        self._options = options
        self._gang = Gang(count, Policy(options.restarts, backoff=options.backoff, grace=grace))
        self._members = [_Member(str(rank), "this machine") for rank in range(count)]
        self._environ = dict(environ)
        self._environ.setdefault("PYTHONUNBUFFERED", "1")
        self._prefixed = count > 1 if options.prefix is None else options.prefix
        threads, self._cpus = machine(count, options.numa)
        if threads is not None:
            self._environ.setdefault("OMP_NUM_THREADS", str(threads))
        self._children: dict[int, Child] = {}
        self._port: ReservedPort | None = None

    def run(self) -> int:
        """Return the exit code: 0 when all processes ended with 0, else that of the first that failed."""
        gang = self._gang
        try:
            with Signals() as signals:
                self._act(gang.begin(time.monotonic()))
                while not gang.over:
                    due = gang.due - time.monotonic()
                    for number in signals.wait(due if math.isfinite(due) else _LONGEST_WAIT):
                        self._signalled(number)
                    self._bury()
                    self._act(gang.tick(time.monotonic()))
        except CannotStart as error:
            log.error("%s", error)
            return _CANNOT_START
        finally:
            for child in self._children.values():
                child.signal(signal.SIGKILL)
            if self._port is not None:
                self._port.close()
        return gang.code

    def _act(self, actions: Sequence[Action]) -> None:
        if any(isinstance(action, Spawn) for action in actions):
            if self._port is not None:
                self._port.close()
            self._port = ReservedPort()
        for action in actions:
            if isinstance(action, Spawn):
                self._spawn(action)
            elif action.rank in self._children:
                child = self._children[action.rank]
                name = signal.Signals(action.number).name
                log.info("process %d (pid %d) gets %s: %s", action.rank, child.pid, name, action.why)
                child.signal(action.number)

    def _spawn(self, action: Spawn) -> None:
        assert self._port is not None
        rank = action.rank
        rendezvous = Rendezvous(f"alone-{os.getpid()}", "127.0.0.1", self._port.number, self._gang.restart)
        self._children[rank] = child = spawn(
            rank,
            self._options.command,
            variables(self._environ, self._members, self._members[rank].id, rendezvous),
            prefix=f"[{rank}] " if self._prefixed else "",
            cpus=self._cpus[rank],
        )
        log.info("process %d of %d runs as pid %d (%s)", rank, self._gang.count, child.pid, action.why)

    def _signalled(self, number: int) -> None:
        if number in ENDING:
            self._act(self._gang.asked(number, time.monotonic()))
            return
        for child in self._children.values():
            child.signal(number)

    def _bury(self) -> None:
        ranks = {child.pid: rank for rank, child in self._children.items()}
        for pid, code in reap():
            if pid not in ranks:
                continue
            end = End(code, tail=self._children.pop(ranks[pid]).bury(code))
            log.info("process %d (pid %d) ended with code %d", ranks[pid], pid, end.exit_code)
            self._act(self._gang.ended(ranks[pid], end, time.monotonic()))
