"""A job without Kubernetes: the real coordinator, real worker processes on addresses of their own, and the
operator's Sync.

Everything a test does to it is a verb: add, kill, stop, wake, terminate, kill_coordinator. Every wait has a
deadline and, when it passes, shows the processes' logs.

A job of some seconds would often be over before a loaded machine has done what a test waits for. So its
members stand still after their next commit from the end of one wait to the beginning of the next, however
long the test takes in between, and until a worker that is added is ready; and they make slow steps while
something else is waited for that takes long.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
from worker_brake import Brake
from worker_processes import LONG_SECONDS, READY, Coordinator, ServerPod, Worker, Zygote

from springtide.coordination import outcome
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol import coordinator_pb2_grpc as pb_grpc
from springtide_protocol.codec import speaks_to_proto
from springtide_protocol.versions import OWN

__all__ = ["PROGRAM", "READY", "SCRIPT", "ServerPod", "Worker", "WorkerCluster", "Zygote"]

_HOLD_SECONDS = 120.0
_SLOW_SECONDS = 0.25  # of a step
_STOP_SECONDS = 2.0  # the same, of those from the one on that is waited for
SCRIPT = Path(__file__).with_name("worker_script.py")
PROGRAM = Path(__file__).with_name("program.py")
TOKEN = "token-of-the-test"
_SYNC_SECONDS = 0.1


class WorkerCluster:
    """One job. sizes: (target, minimum, maximum) in pods. environment: of the workers, besides their
    own."""

    _numbers = itertools.count(random.randrange(1, 200))

    def __init__(
        self,
        zygote: Zygote,
        folder: Path,
        options: dict[str, Any],
        *,
        minimum: int = 1,
        maximum: int = 8,
        script: Path = SCRIPT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._script = script
        self.environment = dict(environment or {})
        self.everywhere: dict[str, str] = {}  # the environment of coordinators and servers, too
        self._zygote = self.coordinator_zygote = self.server_zygote = zygote  # of those made from now on
        self.folder = folder
        self._options = options
        self.processes_per_pod = 1
        self.net = f"127.{100 + os.getpid() % 100}.{next(self._numbers) % 250}"
        self.minimum, self._maximum = minimum, maximum
        self.target = 0
        self.standby = 0  # pods that wait beyond the target
        # As the real operator: a job with a Finished worker is over, and nobody says whose pods are gone.
        self.over_when_finished = False
        self.suspend = False
        self.saved = ""  # name of the checkpoint that the job was put away with
        self.coordinator_of: Callable[[str, str], str] = lambda name, address: address
        self.front_of: Callable[[int, str], str] = lambda slot, address: address  # of a server, for workers
        self.hang_seconds = 0.0
        self.sees_ends = True  # the operator does, of pods
        self.hung: set[str] = set()  # uids of pods that the operator replaces since they hang
        self.workers: list[Worker] = []
        self.servers: list[ServerPod] = []
        self.servers_wanted = 0
        self.server_programs: dict[int, Path] = {}  # by slot; others run `PROGRAM`
        self.consistency = pb.Consistency(
            mode=self.environment.get("SPRINGTIDE_CONSISTENCY", ""),
            staleness=int(self.environment.get("SPRINGTIDE_STALENESS", "4")),
        )
        self._coordinator: Coordinator | None = None
        self._incarnation = 0
        self._closing = threading.Event()
        self.reply: pb.SyncReply | None = None
        self._brake = Brake(folder / "hold")
        self._braking = threading.Lock()
        self._held_for: list[Worker] = []
        # Who does things to the job while it trains says False: nobody stands still between two waits.
        self.stands_still = True
        self._waits, self._stop_at = True, 0  # for this step; 0: for none
        self._waits_since = 0.0
        self._coordinator_since = 0.0
        self.asked_at = 0.0  # monotonic, when the present reply was asked for
        self._operator = threading.Thread(target=self._sync_for_ever, daemon=True)

    # ---- verbs

    def change_release(self, zygote: Zygote, script: Path) -> None:
        """Make all processes from now on of another release.

        Args:
            zygote: of that release.
            script: of its tests.
        """
        self._zygote = self.coordinator_zygote = self.server_zygote = zygote
        self._script = script

    def start_coordinator(self, same_pod: bool = False) -> None:
        """Start the next incarnation: of a new pod, or of the container in the same pod."""
        if not same_pod:
            self._incarnation += 1
        state = self.folder / f"coordinator-{self._incarnation}"
        state.mkdir(exist_ok=True)
        env = {
            "SPRINGTIDE_TOKEN": TOKEN,
            "SPRINGTIDE_INCARNATION": str(self._incarnation),
            "SPRINGTIDE_STATE_DIR": str(state),
            "SPRINGTIDE_BIND": f"{self.net}.1",
            "SPRINGTIDE_PORT": "7070",
            "SPRINGTIDE_TARGET": str(self.target * self.processes_per_pod),
            "SPRINGTIDE_MINIMUM": str(self.minimum * self.processes_per_pod),
            "SPRINGTIDE_MAXIMUM": str(self._maximum),
            "SPRINGTIDE_STANDBY": str(self.standby * self.processes_per_pod),
            "SPRINGTIDE_SERVERS": str(self.servers_wanted),
            "SPRINGTIDE_CONSISTENCY": self.consistency.mode,
            "SPRINGTIDE_STALENESS": str(self.consistency.staleness or 4),
            **self.everywhere,
        }
        self._coordinator_since = time.monotonic()
        argv = [str(PROGRAM), "springtide_coordinator"]
        pid = self.coordinator_zygote.fork(env, argv, self.folder / "coordinator.log")
        self._coordinator = Coordinator(pid, self.coordinator_zygote)

    def kill_coordinator(self) -> None:
        assert self._coordinator is not None
        self._coordinator.kill()
        self._coordinator.wait(10.0)

    def stop_coordinator(self) -> None:
        assert self._coordinator is not None
        self._coordinator.stop()

    def wake_coordinator(self) -> None:
        assert self._coordinator is not None
        self._coordinator.wake()

    def train_in(self, consistency: pb.Consistency) -> None:
        """The manifest says this from now on; pods that are made later have it in their environment."""
        self.consistency = consistency
        self.environment |= {
            "SPRINGTIDE_CONSISTENCY": consistency.mode,
            "SPRINGTIDE_STALENESS": str(consistency.staleness or 4),
        }

    def add_server(self, slot: int) -> ServerPod:
        """Start a parameter server in a new pod of that slot."""
        number = len(self.servers)
        name, address = f"ps-{slot}-{number}", f"{self.net}.{200 + number}"
        env = {
            "SPRINGTIDE_COORDINATOR": f"{self.net}.1:7070",
            "SPRINGTIDE_TOKEN": TOKEN,
            "SPRINGTIDE_POD_NAME": name,
            "SPRINGTIDE_POD_UID": f"uid-{name}",
            "SPRINGTIDE_POD_IP": self.front_of(slot, address),
            "SPRINGTIDE_BIND": address,
            "SPRINGTIDE_SLOT": str(slot),
            "SPRINGTIDE_METRICS_PORT": "0",
            **self.everywhere,
        }
        path = self.folder / f"{name}.log"
        argv = [str(self.server_programs.get(slot, PROGRAM)), "springtide_ps"]
        pid = self.server_zygote.fork(env, argv, path)
        server = ServerPod(name, slot, f"uid-{name}", pid, path, self.server_zygote)
        self.servers.append(server)
        return server

    def add(self, fault: str = "", hold: bool = True, **options: Any) -> Worker:
        """Start a worker in a new pod; options override the script's. hold: a running job waits for it."""
        number = len(self.workers)
        name, address = f"worker-{number}", f"{self.net}.{10 + number}"
        env = {
            "SPRINGTIDE_JOB": "test",
            "SPRINGTIDE_COORDINATOR": self.coordinator_of(name, f"{self.net}.1:7070"),
            "SPRINGTIDE_TOKEN": TOKEN,
            "SPRINGTIDE_POD_NAME": name,
            "SPRINGTIDE_POD_UID": f"uid-{number}",
            "SPRINGTIDE_POD_IP": address,
            "SPRINGTIDE_BIND": address,
            "SPRINGTIDE_SLOT": str(number),
            "SPRINGTIDE_TERMINATION_LOG": str(self.folder / f"{name}.end"),
            "SPRINGTIDE_STEP_LOG": str(self.folder / f"{name}.steps"),
            "SPRINGTIDE_FAULT": f"{self._brake.fault};{fault}",
            "SPRINGTIDE_BUCKET_MIB": "0.002",
            **self.everywhere,
            **self.environment,
        }
        argv = [str(self._script), str(self.folder), json.dumps(self._options | options)]
        pid = self._zygote.fork(env, argv, self.folder / f"{name}.log")
        worker = Worker(name, number, f"uid-{number}", address, pid, self.folder, self._zygote)
        self.workers.append(worker)
        if hold and self._operator.ident is not None:
            with self._braking:
                self._held_for.append(worker)
            self._set_pace()
        self.target = sum(1 for other in self.workers if other.running) - self.standby
        return worker

    def start(
        self, count: int, faults: dict[int, str] | None = None, options: dict[str, Any] | None = None
    ) -> list[Worker]:
        """Begin the job: the coordinator, the operator, and workers that are all in the first generation."""
        minimum, self.minimum = self.minimum, max(count, self.minimum)
        self.target = count
        self.start_coordinator()
        for slot in range(self.servers_wanted):
            self.add_server(slot)
        workers = [self.add((faults or {}).get(number, ""), **(options or {})) for number in range(count)]
        self._operator.start()
        self.until(
            lambda: self.reply is not None and self.reply.generation.number > 0, "the first generation", 90.0
        )
        self.minimum = minimum
        return workers

    # ---- waits

    def until(
        self,
        condition: Callable[[], bool],
        what: str,
        seconds: float = 60.0,
        *,
        slowly: bool = True,
        stop_at: int = 0,
    ) -> None:
        """Poll until the condition holds; AssertionError with all logs when it does not in time.

        slowly: while that takes long, the job makes slow steps. stop_at: from this step on it makes very slow
        ones.
        """
        deadline = time.monotonic() + seconds
        self._waits_since = time.monotonic() if slowly else 0.0
        self._waits, self._stop_at = True, stop_at
        self._set_pace()
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds:g} s in vain for {what}\n{self.logs()}")
            time.sleep(0.01)
        self._waits_since = 0.0
        self._waits = not self.stands_still
        self._set_pace()

    def until_settled(self) -> None:
        """Wait until all chunks of a job with servers are in their places with their copies, now or later."""
        now = time.monotonic()
        self.until(
            lambda: self.asked_at > now and self.reply is not None and self.reply.servers_settled, "copies"
        )

    def until_step(self, step: int, worker: Worker | None = None) -> None:
        worker = worker or self.workers[0]
        self.until(
            lambda: bool(c := worker.commits()) and c[-1]["step"] >= step,
            f"{worker.name} at step {step}",
            slowly=False,
            stop_at=step if self.stands_still else 0,
        )

    def until_done(self, *workers: Worker, seconds: float = 90.0) -> None:
        """Wait until the workers have ended; when none is left, also for the coordinator's last reply."""
        chosen = workers or tuple(self.workers)
        ended_at = 0.0

        def over() -> bool:
            nonlocal ended_at
            if any(worker.running for worker in chosen):
                return False
            if not self._asks() or any(worker.running for worker in self.workers):
                return True
            ended_at = ended_at or time.monotonic()
            return self.asked_at > ended_at

        self.until(
            over,
            f"the end of {[worker.name for worker in chosen if worker.running]}",
            seconds,
            slowly=False,
        )

    def finished(self) -> list[Worker]:
        """The workers whose script ran to its end."""
        return [worker for worker in self.workers if isinstance(worker.outcome(), outcome.Finished)]

    def coordinator_log(self) -> str:
        """Return what all coordinators have logged."""
        return (self.folder / "coordinator.log").read_text()

    def logs(self) -> str:
        texts = [self.coordinator_log()[-6000:]]
        texts += [
            f"--- {w.name} (code {w.code}, {len(w.commits())} commits)\n{w.log()[-3000:]}"
            for w in self.workers
        ]
        texts += [f"--- {s.name} ({s.code})\n{s.log()[-3000:]}" for s in self.servers]
        return "\n".join(texts)

    def close(self) -> None:
        self._closing.set()
        for worker in self.workers:
            worker.kill()
        for server in self.servers:
            server.kill()
        if self._coordinator is not None:
            self.kill_coordinator()
        if self._operator.ident is not None:
            self._operator.join(10)
        self.until(
            lambda: not any(process.running for process in (*self.workers, *self.servers)),
            "the processes' end",
        )

    # ---- the operator's part

    def _asks(self) -> bool:
        """Whether there is somebody who asks, and somebody who answers."""
        if self._operator.ident is None or (self.over_when_finished and self.finished()):
            return False
        return self._coordinator is not None and self._coordinator.running

    def _set_pace(self) -> None:
        """Hold the job for the test and for those not ready yet; slow it down for what takes long."""
        now = time.monotonic()
        with self._braking:
            self._held_for = [worker for worker in self._held_for if not self._is_ready(worker)]
            slow = (
                0 < self._waits_since < now - LONG_SECONDS
                or self.asked_at < self._coordinator_since < now - LONG_SECONDS
                or any(worker.waited_for(now) for worker in self.workers)
            )
            if self._held_for or not self._waits:
                self._brake.set(_HOLD_SECONDS)
            elif self._stop_at:
                # Not for ever: who waits for a step may get it with another's state, and commit the next one.
                self._brake.set(_STOP_SECONDS, self._stop_at)
            else:
                self._brake.set(_SLOW_SECONDS if slow else None)

    def _is_ready(self, worker: Worker) -> bool:
        """Whether it waits to be admitted, and the coordinator, where there is one, knows that it does."""
        if not worker.running:
            return True
        if READY not in worker.log():
            return False
        if self._coordinator is None or not self._coordinator.running:
            return True
        members = [] if self.reply is None else self.reply.members
        return any(m.member.pod_name == worker.name and m.standing != pb.STARTING for m in members)

    def _sync_for_ever(self) -> None:
        while not self._closing.is_set():
            channel = grpc.insecure_channel(
                f"{self.net}.1:7070", options=[("grpc.max_reconnect_backoff_ms", 200)]
            )
            try:
                stub = pb_grpc.CoordinatorStub(channel)
                while not self._closing.wait(_SYNC_SECONDS):
                    self._set_pace()
                    if self.over_when_finished and self.finished():
                        continue
                    began = time.monotonic()
                    self.reply = stub.Sync(
                        self._request(), metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=1.0
                    )
                    self.asked_at = began
            except grpc.RpcError:
                self._closing.wait(_SYNC_SECONDS)
                self._set_pace()
            finally:
                channel.close()

    def _request(self) -> pb.SyncRequest:
        living = [
            pb.Pod(uid=w.uid, name=w.name, slot=w.slot, started=True, leave_by=w.leave_by)
            for w in self.workers
            if (w.running or not self.sees_ends) and w.uid not in self.hung
        ]
        living_servers = [
            pb.Pod(uid=s.uid, name=s.name, slot=s.slot, started=True, leave_by=s.leave_by)
            for s in self.servers
            if s.running
        ]
        each = self.processes_per_pod
        return pb.SyncRequest(
            speaks=speaks_to_proto(OWN),
            servers=self.servers_wanted,
            living_servers=living_servers,
            consistency=self.consistency,
            target=0 if self.suspend else self.target * each,
            minimum=self.minimum * each,
            maximum=self._maximum * each,
            living=living,
            observed=True,
            processes_per_pod=each,
            hang_seconds=self.hang_seconds,
            hung=sorted(self.hung),
            suspend=self.suspend,
            suspend_by=time.time() + 60 if self.suspend else 0.0,
            standby=self.standby * each,
            saved=self.saved,
            generation=1 if self.saved else 0,
        )
