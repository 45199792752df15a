"""A pod's worker: starts, stops and restarts its containers as `plan` decides, and writes its status.

Tasks: one task a pod (`run`) decides and acts, in the kubelet's event loop; informers, ended containers and
due times wake it by `_wake`. Files are removed in a thread of the default executor, which touches nothing
else.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from springtide_local.clock import timestamp
from springtide_local.kubelet import plan
from springtide_local.kubelet.kept_logs import keep_logs
from springtide_local.kubelet.live import LiveContainer
from springtide_local.kubelet.runtime import Exit
from springtide_local.kubelet.services import NodeServices
from springtide_local.kubelet.starter import ContainerStarter
from springtide_local.kubelet.state import ContainerRecord, Running, Terminated, Waiting, new_records
from springtide_local.kubelet.status import pod_status
from springtide_local.kubelet.termination import termination_message
from springtide_local.kubelet.volumes import MountError, refers_to
from springtide_local.ports import ApiError

Object = dict[str, Any]
_log = logging.getLogger(__name__)
_MOUNT_RETRY = 2.0
_ERROR_RETRY = 1.0
_LEAST_GRACE = 2.0  # seconds between SIGTERM and SIGKILL that a kubelet gives at least
_DEADLINE = ("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")


class PodWorker:
    """One per pod on this node, from the moment it is bound until it is gone from the API and its processes
    are dead.
    """

    def __init__(self, pod: Object, node: NodeServices) -> None:
        self.pod = pod
        self.uid = pod["metadata"]["uid"]
        self.records: dict[str, ContainerRecord] = new_records(pod["spec"])
        self.live: dict[str, LiveContainer] = {}
        self._node = node
        self._folder = node.pods_root / self.uid
        self._host_network = bool(pod["spec"].get("hostNetwork"))
        self._ip = node.host_ip if self._host_network else node.addresses.take()
        self._started_at = time.time()
        self._removed = False
        self._finished = False
        self._failure: tuple[str, str] | None = None
        self._mount_problem = ""
        self._wake = asyncio.Event()
        containers = [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]
        self._containers: dict[str, Object] = {container["name"]: container for container in containers}
        self._starter = ContainerStarter(node, self._folder, self._ip)

    @property
    def name(self) -> str:
        return f"{self.pod['metadata']['namespace']}/{self.pod['metadata']['name']}"

    @property
    def _described(self) -> str:
        metadata = self.pod["metadata"]
        return f"{metadata['name']}_{metadata['namespace']}({self.uid})"

    def update(self, pod: Object) -> None:
        """The API has a newer version of the pod."""
        self.pod = pod
        self._wake.set()

    def removed(self) -> None:
        """The pod is no longer in the API: its processes are killed at once."""
        self._removed = True
        self._wake.set()

    def reference_changed(self, kind: str, name: str) -> None:
        """Note that an object of the pod's namespace is there or has changed: it may be what the pod waits
        for or shows.

        Args:
            kind: Secret, ConfigMap or PersistentVolumeClaim.
            name: of the object.
        """
        for record in self.records.values():
            if isinstance(record.state, Waiting) and record.state.reason == "CreateContainerConfigError":
                record.retry_at = 0.0
                self._wake.set()
        if self._mount_problem:
            self._wake.set()
        elif self.live and refers_to(self.pod, kind, name):
            try:
                self._starter.refresh(self._with_addresses())
            except (MountError, OSError) as error:
                self._node.events.warning(self.pod, "FailedMount", str(error))

    def log_path(self, container: str, attempt: int) -> Path:
        """Return the log of one start of a container.

        Args:
            container: its name.
            attempt: number of the start, from 0.
        """
        return self._starter.folder(container).log(attempt)

    def wake(self) -> None:
        self._wake.set()

    def kill_all(self) -> None:
        for live in self.live.values():
            live.kill()

    async def run(self) -> None:
        """Return when the pod is gone and nothing of it runs."""
        try:
            while True:
                await self._node.running.wait()
                self._wake.clear()
                now = time.time()
                try:
                    wake_at = self._step(now)
                except Exception:
                    _log.exception(
                        "pod %s on %s: trying again in %g s", self.name, self._node.node, _ERROR_RETRY
                    )
                    wake_at = now + _ERROR_RETRY
                if self._removed and not self.live:
                    return
                await self._sleep(None if wake_at is None else wake_at - now)
        finally:
            self.kill_all()
            for live in list(self.live.values()):
                await live.running.exited
            if not self._host_network:
                self._node.addresses.give_back(self._ip)
            await asyncio.get_running_loop().run_in_executor(None, self._remove_files)

    def _remove_files(self) -> None:
        if self._node.logs_root is not None:
            try:
                keep_logs(self.pod, self._folder, self._node.logs_root)
            except OSError as error:
                _log.warning("the logs of pod %s are not kept: %s", self._described, error)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _sleep(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(None if seconds is None else max(seconds, 0.0)):
                await self._wake.wait()
        except TimeoutError:
            return

    def _step(self, now: float) -> float | None:
        """Do what is due; the answer is when to look again if nothing happens."""
        self._kill_overdue(now)
        if self._removed:
            self.kill_all()
            return None
        if self.pod["metadata"].get("deletionTimestamp"):
            return self._end_deleted(now)
        if self._failure or self._finished:
            return self._end_finished(now)
        deadline = self.pod["spec"].get("activeDeadlineSeconds")
        ends_at = None if deadline is None else self._started_at + float(deadline)
        if ends_at is not None and now >= ends_at:
            self._failure = _DEADLINE
            self._node.events.normal(self.pod, "DeadlineExceeded", _DEADLINE[1])
            return self._end_finished(now)
        wake_at = self._carry_on(now)
        due = [at for at in (wake_at, ends_at, self._next_kill(), self._renew(now)) if at is not None]
        return min(due) if due else None

    def _carry_on(self, now: float) -> float | None:
        if not self._mount():
            self._write_status(now)
            return now + _MOUNT_RETRY
        decision = plan.decide(
            self.records, self.pod["spec"].get("restartPolicy", "Always"), self._described, now
        )
        for name in decision.start:
            self._start(name, now)
        for name, waiting in decision.waiting.items():
            self._wait(self.records[name], waiting)
        if decision.finished:
            self._finished = True
            return self._end_finished(now)
        self._write_status(now)
        # What was just started may allow the next step, such as what waits for a sidecar.
        return now if decision.start else decision.wake_at

    def _mount(self) -> bool:
        try:
            self._starter.mount(self._with_addresses())
        except (MountError, OSError) as error:
            if str(error) != self._mount_problem:
                self._mount_problem = str(error)
                self._node.events.warning(self.pod, "FailedMount", str(error))
            return False
        self._mount_problem = ""
        return True

    def _renew(self, now: float) -> float | None:
        """Replace tokens that are due; return when to look again."""
        due = self._starter.refresh_at
        if due is None or now < due:
            return due
        try:
            self._starter.refresh(self._with_addresses())
        except (MountError, OSError) as error:
            self._node.events.warning(self.pod, "FailedMount", str(error))
            return now + _MOUNT_RETRY
        return self._starter.refresh_at

    def _with_addresses(self) -> Object:
        """The pod with what its downward API may refer to, before the status is written."""
        status = {**(self.pod.get("status") or {}), **self._addresses()}
        return {**self.pod, "status": status}

    def _addresses(self) -> Object:
        return {
            "hostIP": self._node.host_ip,
            "hostIPs": [{"ip": self._node.host_ip}],
            "podIP": self._ip,
            "podIPs": [{"ip": self._ip}],
        }

    def _start(self, name: str, now: float) -> None:
        record, container = self.records[name], self._containers[name]
        launched = self._starter.start(self._with_addresses(), container, record, now)
        if launched is None:
            return
        launch, running = launched
        live = LiveContainer(
            container,
            record,
            launch,
            running,
            self._node.runtime,
            self._node.running,
            self._ip,
            exec_launch=partial(self._starter.exec_launch, name, launch),
            changed=self._wake.set,
            failed=partial(self._probe_failed, name),
            unhealthy=partial(self._restart_unhealthy, name),
        )
        self.live[name] = live
        running.exited.add_done_callback(lambda future: self._on_exit(name, live, future.result()))
        live.begin()

    def _wait(self, record: ContainerRecord, waiting: Waiting) -> None:
        if isinstance(record.state, Terminated):
            record.last = record.state
        if record.state != waiting:
            record.state = waiting
            text = f"Back-off restarting failed container {record.name} in pod {self._described}"
            self._node.events.warning(self.pod, "BackOff", text, self._field(record.name))

    def _on_exit(self, name: str, live: LiveContainer, ended: Exit) -> None:
        live.end()
        record, container = self.records[name], self._containers[name]
        del self.live[name]
        started = record.state.started_at if isinstance(record.state, Running) else ended.at
        folder = self._starter.folder(name)
        attempt = record.starts - 1
        policy = container.get("terminationMessagePolicy") or "File"
        message = termination_message(folder.termination(attempt), folder.log(attempt), policy, ended.code)
        reason = "OOMKilled" if ended.out_of_memory else "Completed" if ended.code == 0 else "Error"
        record.state = Terminated(
            ended.code, reason, started, ended.at, ended.signal, message, live.running.id
        )
        record.ready = record.passed_startup = False
        if self._node.running.is_set():
            # At once, not after a turn of the event loop: how long a job stands still depends on it.
            self._write_status(ended.at, settled=False)
        self._wake.set()

    def _probe_failed(self, name: str, kind: str, output: str) -> None:
        reason = {"PostStartHook": "FailedPostStartHook", "PreStopHook": "FailedPreStopHook"}.get(
            kind, "Unhealthy"
        )
        text = output if reason != "Unhealthy" else f"{kind} probe failed: {output}"
        self._node.events.warning(self.pod, reason, text, self._field(name))

    def _restart_unhealthy(self, name: str, why: str) -> None:
        live = self.live.get(name)
        if live is None or live.kill_at is not None:
            return
        self._node.events.normal(
            self.pod, "Killing", f"Container {name} {why}, will be restarted", self._field(name)
        )
        live.stop(time.time() + self._grace())
        self._wake.set()

    def _grace(self) -> float:
        seconds = self.pod["spec"].get("terminationGracePeriodSeconds")
        return 30.0 if seconds is None else float(seconds)

    def _end_deleted(self, now: float) -> float | None:
        metadata = self.pod["metadata"]
        grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
        # Of the first deletion: a kill that has begun takes its time, whatever a later one says.
        self._stop_all(now, now + max(grace, _LEAST_GRACE))
        if self.live:
            return self._next_kill()
        self._write_status(now, ending=True)
        try:
            self._node.store.delete(
                "pods", metadata["name"], metadata["namespace"], grace_period_seconds=0, uid=self.uid
            )
        except ApiError as error:
            if error.code not in (404, 409):
                raise
            self._removed = True
            self._wake.set()
        return None

    def _end_finished(self, now: float) -> float | None:
        self._stop_all(now, now + self._grace())
        self._write_status(now)
        return self._next_kill()

    def _stop_all(self, now: float, kill_at: float) -> None:
        for name, live in self.live.items():
            if live.kill_at is None:
                self._node.events.normal(self.pod, "Killing", f"Stopping container {name}", self._field(name))
            live.stop(kill_at)
        self._kill_overdue(now)

    def _kill_overdue(self, now: float) -> None:
        for live in self.live.values():
            if live.kill_at is not None and live.kill_at <= now and not live.killed:
                live.kill()

    def _next_kill(self) -> float | None:
        return min(
            (live.kill_at for live in self.live.values() if live.kill_at is not None and not live.killed),
            default=None,
        )

    def _write_status(self, now: float, ending: bool = False, settled: bool = True) -> None:
        """`ending`: nothing will be started again, whatever the restart policy says. settled: as in
        `pod_status`.
        """
        spec = self.pod["spec"]
        policy = "Never" if ending or self._failure else spec.get("restartPolicy", "Always")
        failure = None if self.live else self._failure
        gates = [gate["conditionType"] for gate in spec.get("readinessGates") or []]

        def change(pod: Object) -> None:
            if pod["metadata"]["uid"] != self.uid:
                raise ApiError(
                    404,
                    "NotFound",
                    f'pods "{pod["metadata"]["name"]}" not found: another one has its name now',
                )
            status = pod_status(pod.get("status") or {}, self.records, policy, gates, now, failure, settled)
            pod["status"] = {
                **status,
                **self._addresses(),
                "startTime": status.get("startTime") or timestamp(self._started_at),
            }

        metadata = self.pod["metadata"]
        try:
            self.pod = self._node.store.mutate(
                "pods", metadata["name"], metadata["namespace"], change, subresource="status"
            )
        except ApiError as error:
            if error.code != 404:
                raise
            self.removed()

    @staticmethod
    def _field(container: str) -> str:
        return f"spec.containers{{{container}}}"
