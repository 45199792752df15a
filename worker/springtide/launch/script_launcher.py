"""The launcher of scripts that know nothing of the library, in a job: one seat for each process.

Threads and locks: the launcher's (main) thread waits for signals and buries ended children; each member runs
in a thread of its own and calls `spawn`, `one_too_many` and `describe`. `_lock` guards the children, the
starts and the attempts; it is held across the start of a process, so that a child is registered before it can
be buried.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Mapping

from springtide.coordination import outcome
from springtide.coordination.outcome import Failed, Finished, Left, Outcome
from springtide.elastic.termination import UNHEARD_SECONDS
from springtide.launch import cgroup
from springtide.launch.metrics_proxy import MetricsProxy
from springtide.launch.options import Options
from springtide.launch.pod import machine
from springtide.launch.processes import Child, reap, spawn
from springtide.launch.script import Attempts
from springtide.launch.script_member import ScriptMember
from springtide.launch.series import LauncherSeries
from springtide.launch.signals import ENDING, Signals
from springtide.launch.supervision import End
from springtide.launch.verdict import failure
from springtide.settings import Settings

log = logging.getLogger("springtide")

_WAIT_SECONDS = 1.0


class ScriptLauncher:
    """Runs `count` seats to their common end."""

    def __init__(
        self, options: Options, settings: Settings, count: int, environ: Mapping[str, str], run_id: str
    ) -> None:
        self._options, self._settings, self._count = options, settings, count
        self._prefixed = count > 1 if options.prefix is None else options.prefix
        self._lock = threading.Lock()
        self._children: dict[int, Child] = {}
        self._starts = [0] * count
        self._attempts = Attempts(options.restarts)
        self._oom_kills = cgroup.out_of_memory_kills()
        threads, self._cpus = machine(count, options.numa)
        environment = dict(environ)
        environment.setdefault("PYTHONUNBUFFERED", "1")
        if threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        self._series = LauncherSeries(settings.job, settings.namespace, count, lambda: len(self._children))
        grace = options.grace if options.grace is not None else 10.0
        self._seats = [
            ScriptMember(rank, settings, environment, self, run_id=run_id, grace=grace)
            for rank in range(count)
        ]
        self._gave_up = ""
        self._signals: Signals | None = None

    # ---- from the seats' threads

    def spawn(self, rank: int, environment: Mapping[str, str]) -> Child:
        """Start the script of one seat; called from the seat's thread.

        Args:
            rank: of the seat in this pod.
            environment: of the script, with RANK.

        Raises:
            CannotStart: the system refuses, in its own words.
        """
        # Under the lock, so that its end is not noticed before it is known.
        with self._lock:
            child = spawn(
                rank,
                self._options.command,
                environment,
                prefix=f"[{environment['RANK']}] " if self._prefixed else "",
                relayed=True,
                cpus=self._cpus[rank],
            )
            self._children[child.pid] = child
            if self._starts[rank]:
                self._series.restarted(rank)
            self._starts[rank] += 1
        return child

    def one_too_many(self) -> bool:
        with self._lock:
            return self._attempts.failed(time.monotonic())

    def describe(self, rank: int, end: End) -> Failed:
        """Describe the end of a script.

        Args:
            rank: of its process.
            end: its code and last lines.
        """
        with self._lock:
            restarts = sum(self._starts) - self._count
        said = failure(rank, end, max(2, self._count), restarts)
        assert said is not None  # that is for a single process whose output nobody reads
        return said

    # ---- the launcher's thread

    def run(self) -> int:
        """Return the exit code; the outcome is in the termination message."""
        proxy = MetricsProxy({}, self._series.registry, self._health)
        threads = [
            threading.Thread(
                target=self._sit, args=(member,), name=f"springtide-seat-{member.rank}", daemon=True
            )
            for member in self._seats
        ]
        try:
            port = proxy.start(self._settings.bind, self._settings.metrics_port)
            log.info("metrics and health on port %d", port)
            with Signals() as signals:
                self._signals = signals
                for thread in threads:
                    thread.start()
                while any(thread.is_alive() for thread in threads):
                    for number in signals.wait(_WAIT_SECONDS):
                        self._signalled(number)
                    self._bury()
                    self._check_seats()
        finally:
            with self._lock:
                for child in self._children.values():
                    child.signal(signal.SIGKILL)
            proxy.close()
        said = self._merged()
        try:
            outcome.write(said, self._settings.termination_log)
        except OSError as error:
            log.error("cannot write the outcome to %s: %s", self._settings.termination_log, error)
        return 1 if isinstance(said, Failed) else 0

    def _sit(self, member: ScriptMember) -> None:
        member.run()
        if self._signals is not None:
            self._signals.wake()

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if number not in ENDING:
            with self._lock:
                for child in self._children.values():
                    child.signal(number)
            return
        for member in self._seats:
            if member.term_at is None:
                member.leave(name)
            else:
                member.stop(f"{name} again")

    def _bury(self) -> None:
        with self._lock:
            ended = [(self._children.pop(pid), code) for pid, code in reap() if pid in self._children]
        for child, code in ended:
            tail = child.bury(code)
            end = End(code, None, self._starved(code), tail)
            level = logging.INFO if code == 0 else logging.WARNING
            log.log(level, "process %d (pid %d) ended with code %d", child.rank, child.pid, end.exit_code)
            self._seats[child.rank].ended(end)

    def _starved(self, code: int) -> bool:
        if code != -signal.SIGKILL:
            return False
        kills = cgroup.out_of_memory_kills()
        before, self._oom_kills = self._oom_kills, kills
        return kills is not None and before is not None and kills > before

    def _check_seats(self) -> None:
        """One seat that failed ends the pod; so does SIGTERM when no coordinator is there to leave from."""
        failed = next((member for member in self._seats if isinstance(member.outcome, Failed)), None)
        if failed is not None and not self._gave_up:
            self._gave_up = f"process {failed.rank} failed"
            for member in self._seats:
                member.stop(self._gave_up)
        now = time.monotonic()
        for member in self._seats:
            waited = now - member.term_at if member.term_at is not None else 0.0
            if waited > UNHEARD_SECONDS and not member.connected and member.outcome is None:
                member.stop("SIGTERM, and no coordinator to leave from")

    def _merged(self) -> Outcome:
        said = [member.outcome for member in self._seats]
        finished = [one for one in said if isinstance(one, Finished)]
        if finished:
            return max(finished, key=lambda f: (f.incarnation, f.generation))
        failed = next((one for one in said if isinstance(one, Failed)), None)
        left = next((one for one in said if isinstance(one, Left)), None)
        return failed or left or Left("asked")

    def _health(self) -> tuple[bool, Mapping[str, object]]:
        with self._lock:
            pids = {child.rank: child.pid for child in self._children.values()}
        seats = [
            {
                "localRank": member.rank,
                "connected": member.connected,
                "pid": pids.get(member.rank),
                "generations": member.generations,
            }
            for member in self._seats
        ]
        return not self._gave_up, {"processes": seats, "ending": self._gave_up}
