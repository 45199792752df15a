"""A running container with what belongs to it: its probes, its hooks, and how it is being stopped.

Tasks: in the event loop of the kubelet; the pod's worker starts and ends a container, whose probes and hooks
are tasks that end with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from springtide_local.kubelet.probes import Prober, Verdict, keep_probing
from springtide_local.kubelet.runtime import ExecResult, Launch, RunningContainer, Runtime, StartError
from springtide_local.kubelet.state import ContainerRecord

Object = dict[str, Any]


class LiveContainer:
    """`changed` is called when a probe moved `record.ready` or `record.passed_startup`; `failed` with
    (kind, output) for each failed probe, and `unhealthy` with a sentence when the container must be
    restarted.

    `kill_at` is the moment (seconds since 1970) at which it is killed if it still runs; None while nobody
    stops it.
    """

    def __init__(
        self,
        container: Object,
        record: ContainerRecord,
        launch: Launch,
        running: RunningContainer,
        runtime: Runtime,
        node_works: asyncio.Event,
        address: str,
        exec_launch: Callable[[list[str]], Launch],
        changed: Callable[[], None],
        failed: Callable[[str, str], None],
        unhealthy: Callable[[str], None],
    ) -> None:
        self.launch = launch
        self.running = running
        self.kill_at: float | None = None
        self.killed = False
        self._container = container
        self._record = record
        self._runtime = runtime
        self._node_works = node_works
        self._exec_launch = exec_launch
        self._changed = changed
        self._failed = failed
        self._unhealthy = unhealthy
        ports = {
            port["name"]: int(port["containerPort"])
            for port in container.get("ports") or []
            if port.get("name")
        }
        self._prober = Prober(address, ports, self._execute)
        self._tasks: set[asyncio.Task[None]] = set()
        self._readiness: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Run the post-start hook and the probes. Without a probe its verdict is given at once."""
        record = self._record
        record.passed_startup = not self._container.get("startupProbe")
        record.ready = record.passed_startup and not self._container.get("readinessProbe")
        if hook := (self._container.get("lifecycle") or {}).get("postStart"):
            self._spawn(self._post_start(hook))
        if probe := self._container.get("startupProbe"):
            self._spawn(keep_probing(probe, False, self._check, self._on_startup, until_success=True))
        else:
            self._begin_checks()

    def stop(self, kill_at: float) -> None:
        """Pre-stop hook, then SIGTERM; the caller kills it at `kill_at`. Called again, nothing changes: a
        kubelet asks its runtime once, which a later deletion with a shorter grace does not reach. Kubelets go
        on with the readiness probe until the container has ended, and so does this one.
        """
        if self.kill_at is not None:
            return
        self.kill_at = kill_at
        self._cancel(but=self._readiness)
        hook = (self._container.get("lifecycle") or {}).get("preStop")
        if hook:
            self._spawn(self._pre_stop(hook))
        else:
            self.running.terminate()

    def kill(self) -> None:
        self.killed = True
        self.running.kill()

    def end(self) -> None:
        """Cancel probes and hooks after the container has ended."""
        self._cancel()

    def _begin_checks(self) -> None:
        if probe := self._container.get("readinessProbe"):
            self._readiness = self._spawn(keep_probing(probe, False, self._check, self._on_readiness))
        if probe := self._container.get("livenessProbe"):
            self._spawn(keep_probing(probe, True, self._check, self._on_liveness))

    async def _check(self, probe: Object, timeout: float) -> Verdict:
        """A probe of a node that works: what was seen while it did not says nothing about the container."""
        while True:
            await self._node_works.wait()
            verdict = await self._prober.check(probe, timeout)
            if self._node_works.is_set():
                return verdict

    def _on_startup(self, state: bool | None, verdict: Verdict) -> None:
        if state:
            self._record.passed_startup = True
            self._record.ready = not self._container.get("readinessProbe")
            self._begin_checks()
            self._changed()
            return
        self._complain("Startup", verdict)
        if state is False:
            self._unhealthy("failed startup probe")

    def _on_readiness(self, state: bool | None, verdict: Verdict) -> None:
        self._complain("Readiness", verdict)
        if state is not None and state != self._record.ready:
            self._record.ready = state
            self._changed()

    def _on_liveness(self, state: bool | None, verdict: Verdict) -> None:
        self._complain("Liveness", verdict)
        if state is False:
            self._unhealthy("failed liveness probe")

    def _complain(self, kind: str, verdict: Verdict) -> None:
        if not verdict.ok:
            self._failed(kind, verdict.output)

    async def _post_start(self, hook: Object) -> None:
        verdict = await self._prober.check(hook, timeout=60.0)
        if not verdict.ok and self.kill_at is None:
            self._failed("PostStartHook", verdict.output)
            self._unhealthy("failed postStart hook")

    async def _pre_stop(self, hook: Object) -> None:
        loop = asyncio.get_running_loop()
        if "sleep" in hook:
            await asyncio.sleep(float(hook["sleep"]["seconds"]))
        else:
            verdict = await self._prober.check(hook, timeout=max(0.1, (self.kill_at or 0.0) - time.time()))
            if not verdict.ok:
                self._failed("PreStopHook", verdict.output)
        loop.call_soon(self.running.terminate)

    async def _execute(self, command: list[str], timeout: float) -> ExecResult:
        try:
            return await self._runtime.execute(self._exec_launch(command), timeout)
        except StartError as error:
            return ExecResult(128, str(error))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _cancel(self, but: asyncio.Task[None] | None = None) -> None:
        for task in self._tasks - {but}:
            task.cancel()
