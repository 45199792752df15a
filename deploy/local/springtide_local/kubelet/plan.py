"""Next actions of a kubelet for a pod that lives: which containers to start now, which wait and until when,
whether the pod is done.

`decide` is pure; the rules are those of the kubelet: init containers in order, sidecars before and beside,
then all others together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide_local.kubelet.restarts import describe, should_restart
from springtide_local.kubelet.state import ContainerRecord, Running, Terminated, Waiting


@dataclass
class Decision:
    """`start`: names to start now. `waiting`: new waiting states. `wake_at`: when to decide again if
    nothing happens, or None.

    `finished` says why no container will run again (empty while the pod goes on); sidecars are then to be
    stopped.
    """

    start: list[str] = field(default_factory=list)
    waiting: dict[str, Waiting] = field(default_factory=dict)
    wake_at: float | None = None
    finished: str = ""

    def wake(self, at: float) -> None:
        self.wake_at = at if self.wake_at is None else min(self.wake_at, at)


def decide(records: Mapping[str, ContainerRecord], restart_policy: str, pod: str, now: float) -> Decision:
    """Decide what happens to the containers of a pod next.

    Args:
        records: of the containers, by name, in the order of the spec.
        restart_policy: of the pod.
        pod: `NAME_NAMESPACE(UID)`, as it stands in the messages.
        now: in unix seconds.
    """
    decision = Decision()
    mains = [record for record in records.values() if record.kind == "main"]
    ended = [
        r.state
        for r in mains
        if isinstance(r.state, Terminated) and not should_restart(restart_policy, r.state.exit_code)
    ]
    if len(ended) == len(mains):
        codes = ", ".join(
            f"{record.name} {state.exit_code}" for record, state in zip(mains, ended, strict=True)
        )
        decision.finished = f"all containers have ended (exit codes: {codes})"
        return decision
    initialized = any(record.starts for record in mains)
    for record in records.values():
        if record.kind == "sidecar":
            _keep_going(record, "Always", pod, now, decision)
            if not initialized and not (isinstance(record.state, Running) and record.passed_startup):
                return decision
        elif record.kind == "init" and not initialized:
            last = record.ended
            if last is not None and last.exit_code == 0:
                continue
            if last is not None and restart_policy == "Never":
                decision.finished = f"init container {record.name} failed with exit code {last.exit_code}"
                return decision
            _keep_going(record, restart_policy, pod, now, decision)
            return decision
    for record in mains:
        _keep_going(record, restart_policy, pod, now, decision)
    return decision


def _keep_going(
    record: ContainerRecord, restart_policy: str, pod: str, now: float, decision: Decision
) -> None:
    if isinstance(record.state, Running):
        return
    if record.retry_at > now:
        decision.wake(record.retry_at)
        return
    ended = record.ended
    if ended is None:
        decision.start.append(record.name)
        return
    if not should_restart(restart_policy, ended.exit_code):
        return
    ready_at = record.backoff.ready_at(ended.finished_at)
    if ready_at <= now:
        decision.start.append(record.name)
        return
    delay = describe(record.backoff.delay)
    decision.waiting[record.name] = Waiting(
        "CrashLoopBackOff", f"back-off {delay} restarting failed container={record.name} pod={pod}"
    )
    decision.wake(ready_at)
