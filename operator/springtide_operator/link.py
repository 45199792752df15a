"""The line to one job's coordinator: Sync calls to the pod of the incarnation in status, and the last
answer.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from springtide_coordinator import coordinator_pb2 as pb
from springtide_coordinator.client import SyncClient, SyncError
from springtide_operator.api import names
from springtide_operator.plan.observation import (
    CheckpointReport,
    CoordinatorPod,
    FailureReport,
    LateReport,
    MemberReport,
    PoisonReport,
    RateReport,
    Report,
    ServerReport,
    SlowReport,
    StallReport,
)
from springtide_operator.plan.relay import LivingPod, Word

log = logging.getLogger("springtide.operator")

_DOING: Mapping[int, str] = {
    pb.DOING_FETCHING: "fetching samples",
    pb.DOING_COMPUTING: "computing (forward and backward)",
    pb.DOING_REDUCING: "waiting for the other workers' gradients",
    pb.DOING_STEPPING: "in the optimizer's step",
    pb.DOING_BETWEEN: "in the script's code between two steps",
    pb.DOING_EVALUATING: "in an evaluation loop",
    pb.DOING_ASKING: "waiting for the others' part of an evaluation",
}
_IN_GENERATION = (pb.ACTIVE, pb.ENDED, pb.AFTER)


class Caller(Protocol):
    """What `SyncClient` does."""

    async def sync(self, request: pb.SyncRequest, timeout: float = 2.0) -> pb.SyncReply: ...

    async def close(self) -> None: ...


class Link:
    """`report`: the last answer of the current coordinator. `unreachable_since`: since when calls fail, or
    None.
    """

    def __init__(
        self,
        token: str,
        timeout: float,
        connect: Callable[..., Caller] = SyncClient,
        clock: Callable[[], float] = time.time,
        authority: str = "",
    ) -> None:
        self._token = token
        self._timeout = timeout
        self._connect = functools.partial(connect, authority=authority) if authority else connect
        self._clock = clock
        self._caller: Caller | None = None
        self._target: tuple[str, str] | None = None  # pod uid, address
        self.report: Report | None = None
        self.unreachable_since: float | None = None
        self.why = ""

    async def close(self) -> None:
        if self._caller is not None:
            await self._caller.close()
        self._caller = None
        self._target = None

    async def call(self, pod: CoordinatorPod, word: Word) -> bool:
        """Tell and ask once; False if it failed, for the reason in `why`."""
        if pod.ip is None:
            self._failed(f"{pod.name} has no address yet")
            return False
        target = (pod.uid, _address(pod.ip))
        if target != self._target or self._caller is None:
            await self.close()
            self._caller = self._connect(target[1], self._token)
            self._target = target
        try:
            reply = await self._caller.sync(to_request(word), self._timeout)
        except SyncError as error:
            self._failed(str(error))
            await self.close()  # idle lines are not pinged: one that broke is noticed here alone
            return False
        if reply.incarnation.number != pod.incarnation:
            self._failed(
                f"{target[1]} says it is incarnation {reply.incarnation.number}, not {pod.incarnation}"
            )
            return False
        living = frozenset(living.uid for living in word.living)
        self.report = replace(to_report(reply, self._clock()), told_living=living)
        self.unreachable_since = None
        self.why = ""
        return True

    async def retire(self, pod: CoordinatorPod, word: Word) -> None:
        """Tell a coordinator that was replaced and still runs that it is out of date. It need not answer."""
        if pod.ip is None:
            return
        caller = self._connect(_address(pod.ip), self._token)
        try:
            await caller.sync(to_request(word), self._timeout)
        except SyncError as error:
            log.debug("%s, out of date, does not answer: %s", pod.name, error)
        finally:
            await caller.close()

    def nobody(self) -> None:
        """There is no coordinator pod to call."""
        self.unreachable_since = None
        self.why = ""

    def _failed(self, why: str) -> None:
        self.why = why
        if self.unreachable_since is None:
            self.unreachable_since = self._clock()


def _address(ip: str) -> str:
    return f"[{ip}]:{names.COORDINATOR_PORT}" if ":" in ip else f"{ip}:{names.COORDINATOR_PORT}"


def to_request(word: Word) -> pb.SyncRequest:
    """The message of one Sync."""
    return pb.SyncRequest(
        target=word.target,
        minimum=word.minimum,
        maximum=word.maximum,
        observed=True,
        incarnation_number=word.incarnation,
        generation=word.generation,
        pause_seconds=word.pause,
        processes_per_pod=word.processes_per_pod,
        hang_seconds=word.hang_seconds,
        suspend=word.suspend_by > 0,
        suspend_by=word.suspend_by,
        saved=word.saved,
        hung=word.hung,
        living=[_pod(pod) for pod in word.living],
        servers=word.servers,
        living_servers=[_pod(pod) for pod in word.living_servers],
        consistency=pb.Consistency(mode=word.consistency, staleness=word.staleness),
    )


def _pod(pod: LivingPod) -> pb.Pod:
    return pb.Pod(uid=pod.uid, name=pod.name, slot=pod.slot, started=pod.started, leave_by=pod.leave_by)


def to_report(reply: pb.SyncReply, at: float) -> Report:
    """What policies need of an answer; `at` in unix seconds."""
    generation = reply.generation.number if reply.HasField("generation") else None
    data: Mapping[str, int] | None = None
    if reply.HasField("data"):
        source = reply.data
        data = {
            "epoch": source.epoch,
            "seen": source.seen,
            "repeated": source.repeated,
            "lost": source.lost,
            "skipped": source.skipped,
            "totalSeen": source.total_seen,
        }
    recovered = reply.HasField("last_recovery") and reply.last_recovery.cause not in ("", "start")
    return Report(
        incarnation=reply.incarnation.number,
        restart=reply.incarnation.restart,
        at=at,
        phase=pb.Phase.Name(reply.phase),
        generation=generation,
        generation_incarnation=reply.generation.incarnation.number if generation is not None else None,
        step=reply.state.step if reply.HasField("state") else None,
        members=tuple(
            MemberReport(
                pod_uid=member.member.pod_uid,
                active=member.standing in _IN_GENERATION,
                connected=member.connected,
                leaving=member.leaving,
            )
            for member in reply.members
        ),
        waiting_for=tuple(reply.waiting_for),
        reason=reply.reason,
        message=reply.message,
        data=data,
        samples_per_second=reply.samples_per_second,
        goodput=reply.goodput,
        values=dict(reply.values),
        recoveries=reply.recoveries,
        recovery_seconds=reply.last_recovery.seconds if recovered else None,
        recovery_cause=reply.last_recovery.cause if recovered else "",
        failures=tuple(
            FailureReport(failure.number, failure.generation.number, failure.seconds, failure.reason)
            for failure in reply.failures
        ),
        states_lost=reply.states_lost,
        last_commit_at=reply.last_commit_unix or None,
        step_seconds=reply.step_seconds,
        lost_seconds=dict(reply.lost_seconds),
        slow=(
            SlowReport(reply.slow.pod_name, reply.slow.busy_seconds, reply.slow.median_seconds)
            if reply.HasField("slow")
            else None
        ),
        servers=tuple(
            ServerReport(server.server.pod_uid, server.connected, server.serving) for server in reply.servers
        ),
        servers_settled=reply.servers_settled,
        consistency=reply.consistency.mode,
        staleness=reply.consistency.staleness,
        consistency_refused=reply.consistency_refused,
        consistency_pending=reply.consistency_pending,
        checkpoint=_checkpoint(reply),
        checkpoint_error=reply.checkpoint_error,
        restored=f"{reply.restored.uri}/{reply.restored.name}" if reply.restored.name else "",
        restored_step=reply.restored.state.step,
        not_restored=tuple(reply.restored.skipped),
        put_away=reply.put_away,
        all_saved=reply.all_saved,
        silent=frozenset(reply.silent),
        vanished=frozenset(reply.vanished),
        stall=to_stall(reply.stall) if reply.HasField("stall") else None,
        poison=_poison(reply),
        rates=tuple(
            RateReport(rate.workers, rate.samples_per_second, rate.seconds, rate.steps)
            for rate in reply.rates
        ),
        opaque=reply.opaque,
    )


def _poison(reply: pb.SyncReply) -> PoisonReport | None:
    if not reply.HasField("poison"):
        return None
    told = reply.poison
    return PoisonReport(told.step, told.samples, tuple(told.workers), told.detail)


def to_stall(stall: pb.Stall) -> StallReport:
    """Who is late, and with what."""
    late = [
        LateReport(
            member.pod_uid,
            member.pod_name,
            _DOING.get(member.activity.doing, ""),
            member.activity.where,
            member.since_unix,
        )
        for member in stall.late
    ]
    return StallReport(stall.seconds, stall.since_unix, stall.step, tuple(late), stall.waiting)


def _checkpoint(reply: pb.SyncReply) -> CheckpointReport | None:
    if not reply.HasField("checkpoint"):
        return None
    told = reply.checkpoint
    return CheckpointReport(told.name, told.uri, told.state.step, told.written_unix)


def news(before: Report | None, after: Report | None) -> bool:
    """Whether conditions may follow from the difference; numbers that always move are no news."""
    if before is None or after is None:
        return before is not after

    def still(report: Report) -> Report:
        return replace(
            report,
            at=0.0,
            step=None,
            data=None,
            samples_per_second=0.0,
            goodput=0.0,
            values={},
            last_commit_at=None,
            step_seconds=0.0,
            lost_seconds={},
            slow=None,
            rates=(),
            stall=replace(report.stall, seconds=0.0) if report.stall is not None else None,
        )

    return still(before) != still(after)
