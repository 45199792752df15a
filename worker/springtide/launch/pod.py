"""The launcher of scripts that use the library: each of its processes is a member of the job by itself."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence

from springtide.coordination import outcome
from springtide.coordination.outcome import Failed, Left, Outcome
from springtide.launch import cgroup, cpus
from springtide.launch.metrics_proxy import MetricsProxy
from springtide.launch.options import Options
from springtide.launch.process_env import Folder, environment
from springtide.launch.processes import CannotStart, Child, reap, spawn
from springtide.launch.series import LauncherSeries
from springtide.launch.signals import ENDING, Signals
from springtide.launch.supervision import Action, End, Phase, Policy, Spawn, Supervisor
from springtide.launch.verdict import merged
from springtide.settings import Settings

log = logging.getLogger("springtide")

_LONGEST_WAIT = 5.0
_CANNOT_START = 127
_GRACE = 60.0


def machine(count: int, numa: bool) -> tuple[int | None, Sequence[frozenset[int] | None]]:
    """Share this machine out among processes.

    Args:
        count: processes of the launcher.
        numa: whether each is to run near its memory and its GPU.

    Returns:
        OMP_NUM_THREADS, None: as it is; and CPUs by local rank, None: no pinning.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    quota = cgroup.cpu_limit()
    threads = cpus.threads(len(allowed), quota, count) if count > 1 or quota is not None else None
    if not numa or count == 1:
        return threads, [None] * count
    return threads, cpus.pinning(count, allowed, cpus.read_nodes(), cpus.read_gpu_nodes())


class Pod:
    """Runs `count` processes of the command to their common end."""

    def __init__(self, options: Options, settings: Settings, count: int, environ: Mapping[str, str]) -> None:
        self._options, self._settings, self._environ = options, settings, dict(environ)
        grace = _GRACE if options.grace is None else options.grace
        self._supervisor = Supervisor(count, Policy(options.restarts, backoff=options.backoff, grace=grace))
        self._prefixed = count > 1 if options.prefix is None else options.prefix
        self._children: dict[int, Child] = {}
        self._killed: set[int] = set()
        self._oom_kills = cgroup.out_of_memory_kills()
        self._threads, self._cpus = machine(count, options.numa)
        self._series = LauncherSeries(settings.job, settings.namespace, count, lambda: len(self._children))

    def run(self) -> int:
        """Return the exit code; the outcome is in the termination message."""
        folder = Folder(self._supervisor.count)
        proxy = MetricsProxy(
            {rank: place.port for rank, place in enumerate(folder.rank_files)},
            self._series.registry,
            self._health,
        )
        try:
            if not self._settings.alone:
                port = proxy.start(self._settings.bind, self._settings.metrics_port)
                log.info("metrics and health on port %d", port)
            with Signals() as signals:
                said, code = self._supervise(folder, signals)
        finally:
            for child in self._children.values():
                child.signal(signal.SIGKILL)
            proxy.close()
            folder.close()
        if said is not None and not self._settings.alone:
            try:
                outcome.write(said, self._settings.termination_log)
            except OSError as error:
                log.error("cannot write the outcome to %s: %s", self._settings.termination_log, error)
        return code

    def _supervise(self, folder: Folder, signals: Signals) -> tuple[Outcome | None, int]:
        supervisor = self._supervisor
        try:
            self._act(supervisor.begin(time.monotonic()), folder)
            while not supervisor.over:
                due = supervisor.next_at - time.monotonic()
                for number in signals.wait(min(due, _LONGEST_WAIT) if math.isfinite(due) else _LONGEST_WAIT):
                    self._pass_on(number, folder)
                self._bury(folder)
                self._act(supervisor.tick(time.monotonic()), folder)
        except CannotStart as error:
            log.error("%s", error)
            return Failed("", str(error)), _CANNOT_START
        return merged(supervisor)

    def _act(self, actions: Sequence[Action], folder: Folder) -> None:
        for action in actions:
            if isinstance(action, Spawn):
                try:
                    self._spawn(action, folder)
                except CannotStart as error:
                    if not self._children:
                        raise
                    # The others train: for them it is a process that ended.
                    log.error("%s", error)
                    end = End(_CANNOT_START, Failed("", str(error)))
                    self._act(self._ended(action.rank, end, folder), folder)
            elif action.rank in self._children:
                child = self._children[action.rank]
                name = signal.Signals(action.number).name
                log.info("process %d (pid %d) gets %s: %s", action.rank, child.pid, name, action.why)
                if action.number == signal.SIGKILL:
                    self._killed.add(action.rank)
                child.signal(action.number)

    def _spawn(self, action: Spawn, folder: Folder) -> None:
        rank, count = action.rank, self._supervisor.count
        place = folder.rank_files[rank]
        place.clear()
        self._killed.discard(rank)
        child = spawn(
            rank,
            self._options.command,
            environment(self._environ, rank, count, folder, self._threads),
            prefix=f"[{rank}] " if self._prefixed else "",
            cpus=self._cpus[rank],
        )
        self._children[rank] = child
        if self._supervisor.restarts[rank]:
            self._series.restarted(rank)
        log.info("process %d of %d runs as pid %d (%s)", rank, count, child.pid, action.why)

    def _pass_on(self, number: int, folder: Folder) -> None:
        if number in ENDING:
            self._act(self._supervisor.asked(number, time.monotonic()), folder)
            return
        for child in self._children.values():
            child.signal(number)

    def _bury(self, folder: Folder) -> None:
        """Take note of processes that have ended. Orphans that became ours are only reaped."""
        ranks = {child.pid: rank for rank, child in self._children.items()}
        for pid, code in reap():
            if pid not in ranks:
                continue
            rank = ranks[pid]
            tail = self._children.pop(rank).bury(code)
            said = folder.rank_files[rank].outcome()
            if self._settings.alone and code == 0:
                said = Left("it trained alone")  # without a job the library says nothing
            end = End(code, said, self._starved(rank, code), tail)
            actions = self._ended(rank, end, folder)
            self._report_end(rank, pid, end)
            self._act(actions, folder)

    def _ended(self, rank: int, end: End, folder: Folder) -> list[Action]:
        """Return what follows from the end of a process."""
        return self._supervisor.ended(rank, end, time.monotonic(), as_one=folder.trains_as_one)

    def _starved(self, rank: int, code: int) -> bool:
        """Whether the kernel killed it for want of memory. One such kill explains one end."""
        if code != -signal.SIGKILL or rank in self._killed:
            return False
        kills = cgroup.out_of_memory_kills()
        before, self._oom_kills = self._oom_kills, kills
        return kills is not None and before is not None and kills > before

    def _report_end(self, rank: int, pid: int, end: End) -> None:
        how = f"signal {-end.code}" if end.code < 0 else f"code {end.code}"
        why = " (out of memory)" if end.out_of_memory else ""
        word = type(end.outcome).__name__ if end.outcome is not None else "no outcome"
        process = self._supervisor.processes[rank]
        if process.phase is Phase.WAITING:
            pause = process.due - time.monotonic()
            log.warning(
                "process %d (pid %d) ended with %s%s, %s; it is started again in %.1f s (%d of %d restarts)",
                rank, pid, how, why, word, max(0.0, pause), self._supervisor.spent, self._options.restarts,
            )  # fmt: skip
            return
        level = logging.INFO if end.well else logging.ERROR
        log.log(level, "process %d (pid %d) ended with %s%s, %s", rank, pid, how, why, word)

    def _health(self) -> tuple[bool, Mapping[str, object]]:
        now = time.monotonic()
        processes = [
            {
                "localRank": rank,
                "phase": process.phase.value,
                "seconds": round(now - process.since, 1),
                "restarts": self._supervisor.restarts[rank],
            }
            for rank, process in enumerate(self._supervisor.processes)
        ]
        well = self._supervisor.gave_up is None
        return well, {"processes": processes, "ending": self._supervisor.stopping}
