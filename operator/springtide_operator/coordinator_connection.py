"""The line to one job's coordinator: Sync calls to the pod of the incarnation in status, and the last answer.

Tasks: used by one task of the job's loop at a time, in the operator's event loop; `report`, `why` and
`unreachable_since` are read by its other tasks, between two awaits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from google.protobuf.message import Message

from springtide_operator.api import names
from springtide_operator.api.job import JobKey
from springtide_operator.api.limits import MAX_NUMBER
from springtide_operator.api.names import MAX_WORKERS
from springtide_operator.job_credentials import JobCredentials
from springtide_operator.plan.coordinator_sync import CoordinatorUpdate, LivingPod
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
    ShareReport,
    SlowReport,
    StallReport,
    TakenReport,
    TraceReport,
)
from springtide_operator.plan.values import LAST_SECOND
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import memory_from_proto, speaks_from_proto, speaks_to_proto
from springtide_protocol.names import process_label
from springtide_protocol.sync_client import SyncClient, SyncError
from springtide_protocol.versions import OWN, STANDBY, Speaks, agree, as_coordinator, as_operator

log = logging.getLogger("springtide.operator")

STILL_SECONDS = 4.0

_DOING: Mapping[int, str] = {
    pb.DOING_FETCHING: "fetching samples",
    pb.DOING_COMPUTING: "computing (forward and backward)",
    pb.DOING_REDUCING: "waiting for the other workers' gradients",
    pb.DOING_STEPPING: "in the optimizer's step",
    pb.DOING_BETWEEN: "in the script's code between two steps",
    pb.DOING_EVALUATING: "in an evaluation loop",
    pb.DOING_ASKING: "waiting for the others' part of an evaluation",
}
_OTHER_TOKEN = (
    "; the job's Secret {} holds another token than the operator's, as when somebody else made it: delete"
    " that Secret, and then the pod {}"
)
_MOST_TEXT = 4096  # of a reply: characters of a text
MAX_SHARES = 32
_MOST_ENTRIES = 64  # and of what is told of one by one
_AS_SAID = ("members", "servers", "values", "silent", "vanished")  # lists of thousands, and a loss may be NaN
_IN_GENERATION = (pb.ACTIVE, pb.ENDED, pb.AFTER)


class Caller(Protocol):
    """Interface of `SyncClient`."""

    async def sync(self, request: pb.SyncRequest, timeout: float = 2.0) -> pb.SyncReply:
        """Call the coordinator.

        Args:
            request: the operator's word.
            timeout: in seconds.

        Returns:
            The coordinator's answer.

        Raises:
            SyncError: it does not answer, or refuses.
        """
        ...

    async def close(self) -> None: ...


class CoordinatorConnection:
    """`report`: the last answer of the current coordinator. `unreachable_since`: since when calls fail, in
    unix seconds, or None; `deaf_since`: the same by the steady clock.
    """

    def __init__(
        self,
        token: str,
        timeout: float,
        connect: Callable[..., Caller] = SyncClient,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a line that is not open yet.

        Args:
            token: The job's, until others are presented.
            timeout: Of one call, in seconds.
            connect: Makes what calls an address.
            clock: Unix seconds.
            steady: Seconds that never jump.
        """
        self._token = token
        self._timeout = timeout
        self._connect = connect
        self._credentials: JobCredentials | None = None
        self._secret = ""
        self._clock, self._steady = clock, steady
        self._caller: Caller | None = None
        # Pod uid, address, whether with TLS, credentials.
        self._target: tuple[str, str, bool, JobCredentials | None] | None = None
        self.report: Report | None = None
        self.unreachable_since: float | None = None
        self.deaf_since: float | None = None
        self.why = ""

    async def close(self) -> None:
        if self._caller is not None:
            await self._caller.close()
        self._caller = None
        self._target = None

    def present(self, credentials: JobCredentials, secret: str) -> None:
        """Show these credentials from the next call on.

        Args:
            credentials: of the job.
            secret: name of the Secret that holds them, for people.
        """
        self._credentials, self._secret = credentials, secret

    def shows(self, pod: CoordinatorPod) -> bool:
        """Return whether the coordinator of this pod has the key that is shown, as far as its pod says. No
        other may hear it.
        """
        shown = self._credentials
        return shown is None or any(JobKey.parse(name).id == shown.key for name in pod.keys)

    async def call(self, pod: CoordinatorPod, word: CoordinatorUpdate, tls: bool = False) -> bool:
        """Send the wanted sizes and the living pods once, and take the answer in.

        Args:
            pod: The coordinator's.
            word: the sizes and pods.
            tls: Whether the job uses TLS.

        Returns:
            False if it failed, for the reason in `why`.
        """
        if pod.ip is None:
            self._failed(f"{pod.name} has no address yet")
            return False
        if not self.shows(pod):
            self._failed(f"{pod.name} has another key than the job has now, and gets a successor")
            return False
        target = (pod.uid, _address(pod.ip), tls, self._credentials)
        if target != self._target or self._caller is None:
            await self.close()
            self._caller = self._open(target[1], tls)
            self._target = target
        try:
            reply = await self._caller.sync(to_request(word), self._timeout)
        except SyncError as error:
            refused = "UNAUTHENTICATED" in str(error)
            self._failed(f"{error}{_OTHER_TOKEN.format(self._secret, pod.name) if refused else ''}")
            await self.close()  # idle lines are not pinged: one that broke is noticed here alone
            return False
        if reply.incarnation.number != pod.incarnation:
            self._failed(
                f"{target[1]} says it is incarnation {reply.incarnation.number}, not {pod.incarnation}"
            )
            return False
        if isinstance(agreement := agree(as_operator(OWN), as_coordinator(_speaks(reply.speaks))), str):
            self._failed(agreement)
            return False
        living = frozenset(living.uid for living in word.living)
        try:
            report = to_report(reply, self._clock())
        except Exception as error:  # one coordinator's word must not end the line to it
            text = f"{type(error).__name__}: {str(error)[:200]}"
            self._failed(f"what {target[1]} answers cannot be read ({text})")
            return False
        self.report = replace(report, asked_living=living, steady_at=self._steady())
        self.unreachable_since = self.deaf_since = None
        self.why = ""
        return True

    def _open(self, address: str, tls: bool) -> Caller:
        shown = self._credentials
        if shown is None:
            return self._connect(address, self._token)
        authority = {"authority": shown.authority} if tls else {}
        return self._connect(address, shown.token, operator_token=shown.operator_token, **authority)

    async def retire(self, pod: CoordinatorPod, word: CoordinatorUpdate, tls: bool = False) -> None:
        """Tell a coordinator that was replaced and still runs that it is out of date. It need not answer.

        Args:
            pod: of the coordinator.
            word: with the incarnation that replaced it.
            tls: it speaks TLS.
        """
        if pod.ip is None or not self.shows(pod):
            return
        caller = self._open(_address(pod.ip), tls)
        try:
            await caller.sync(to_request(word), self._timeout)
        except SyncError as error:
            log.debug("%s, out of date, does not answer: %s", pod.name, error)
        finally:
            await caller.close()

    def nobody(self) -> None:
        """Note that there is no coordinator pod to call."""
        self.unreachable_since = self.deaf_since = None
        self.why = ""

    def _failed(self, why: str) -> None:
        self.why = why
        if self.unreachable_since is None:
            self.unreachable_since, self.deaf_since = self._clock(), self._steady()


def _address(ip: str) -> str:
    return f"[{ip}]:{names.COORDINATOR_PORT}" if ":" in ip else f"{ip}:{names.COORDINATOR_PORT}"


def to_request(word: CoordinatorUpdate) -> pb.SyncRequest:
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
        suspend_in_seconds=_from_now(word.suspend_at, word.steady),
        saved=word.saved,
        hung=word.hung,
        living=[_pod(pod, word.steady) for pod in word.living],
        speaks=speaks_to_proto(OWN),
        servers=word.servers,
        living_servers=[_pod(pod, word.steady) for pod in word.living_servers],
        consistency=pb.Consistency(mode=word.consistency, staleness=word.staleness),
        standby=word.standby,
    )


_AT_ONCE_SECONDS = 0.001


def _from_now(at: float, now: float) -> float:
    """Return the seconds until then, a little above 0 where it is past; 0 for 0, which means never. PURE."""
    return max(_AT_ONCE_SECONDS, at - now) if at else 0.0


def _pod(pod: LivingPod, now: float) -> pb.Pod:
    return pb.Pod(
        uid=pod.uid,
        name=pod.name,
        slot=pod.slot,
        started=pod.started,
        leave_by=pod.leave_by,
        leave_in_seconds=_from_now(pod.leave_at, now),
        unheard=pod.unheard,
    )


def to_report(reply: pb.SyncReply, at: float) -> Report:
    """Convert an answer to the facts that policies need.

    Numbers that no coordinator of ours reports are replaced by the nearest that one might.

    Args:
        reply: of the coordinator.
        at: when it came, in unix seconds.
    """
    _make_sane(reply)
    generation = reply.generation.number if reply.HasField("generation") else None
    recovered = reply.HasField("last_recovery") and reply.last_recovery.cause not in ("", "start")
    return Report(
        incarnation=reply.incarnation.number,
        restart=reply.incarnation.restart,
        at=at,
        phase=pb.Phase.Name(reply.phase),
        generation=generation,
        generation_incarnation=reply.generation.incarnation.number if generation is not None else None,
        step=reply.state.step if reply.HasField("state") else None,
        members=tuple(map(_member, reply.members)),
        waiting_for=tuple(reply.waiting_for),
        reason=reply.reason,
        message=reply.message,
        data=_data(reply),
        taken=_taken(reply),
        samples_per_second=reply.samples_per_second,
        goodput=reply.goodput,
        values=dict(reply.values),
        recoveries=reply.recoveries,
        recovery_seconds=reply.last_recovery.seconds if recovered else None,
        recovery_cause=reply.last_recovery.cause if recovered else "",
        failures=tuple(
            FailureReport(failure.number, failure.generation.number, failure.seconds, failure.reason)
            for failure in reply.failures[-_MOST_ENTRIES:]
        ),
        states_lost=reply.states_lost,
        last_commit_at=reply.last_commit_unix or None,
        still=_stands_still(reply),
        step_seconds=reply.step_seconds,
        planned_steps=reply.planned_steps,
        seconds_per_step=reply.seconds_per_step,
        lost_seconds=dict(reply.lost_seconds),
        shares=_shares(reply),
        slow=_slow(reply),
        servers=tuple(map(_server, reply.servers)),
        servers_settled=reply.servers_settled,
        consistency=reply.consistency.mode,
        staleness=reply.consistency.staleness,
        consistency_refused=reply.consistency_refused,
        consistency_pending=reply.consistency_pending,
        checkpoint=_checkpoint(reply),
        checkpoint_error=reply.checkpoint_error,
        held_back=reply.held_back,
        seats=STANDBY in _speaks(reply.speaks).capabilities,
        steps_in=reply.steps_in,
        former_members=frozenset(reply.former_members[-2 * _MOST_ENTRIES :]),
        memory=memory_from_proto(reply.memory),
        protocol=_speaks(reply.speaks).newest,
        restored=f"{reply.restored.uri}/{reply.restored.name}" if reply.restored.name else "",
        restored_step=reply.restored.state.step,
        not_restored=tuple(reply.restored.skipped[:_MOST_ENTRIES]),
        put_away=reply.put_away,
        all_saved=reply.all_saved,
        silent=frozenset(reply.silent),
        vanished=frozenset(reply.vanished),
        stall=to_stall(reply.stall) if reply.HasField("stall") else None,
        poison=_poison(reply),
        rates=tuple(
            RateReport(rate.workers, rate.samples_per_second, rate.seconds, rate.steps)
            for rate in reply.rates[:MAX_WORKERS]
        ),
        opaque=reply.opaque,
        traces=tuple(
            TraceReport(trace.traceparent, frozenset(trace.lost_pods))
            for trace in reply.traces[-_MOST_ENTRIES:]
        ),
    )


def _data(reply: pb.SyncReply) -> dict[str, int] | None:
    """Return counts of the job's samples, by the names that they have in status; None: there are none."""
    if not reply.HasField("data"):
        return None
    source = reply.data
    return {
        "epoch": source.epoch,
        "seen": source.seen,
        "repeated": source.repeated,
        "lost": source.lost,
        "skipped": source.skipped,
        "totalSeen": source.total_seen,
    }


def _taken(reply: pb.SyncReply) -> TakenReport | None:
    if not (reply.HasField("data") and reply.data.HasField("taken")):
        return None
    taken = reply.data.taken
    return TakenReport(taken.step, taken.samples, taken.shards, taken.begun)


def _member(member: pb.MemberStatus) -> MemberReport:
    return MemberReport(
        pod_uid=member.member.pod_uid,
        active=member.standing in _IN_GENERATION,
        connected=member.connected,
        leaving=member.leaving,
        starting=member.standing == pb.STARTING,
        waiting=member.standing == pb.PARKED and member.connected,
        protocol=_speaks(member.speaks).newest,
    )


def _server(server: pb.ServerStatus) -> ServerReport:
    protocol = _speaks(server.speaks).newest
    return ServerReport(server.server.pod_uid, server.connected, server.serving, protocol)


def _slow(reply: pb.SyncReply) -> SlowReport | None:
    if not reply.HasField("slow"):
        return None
    return SlowReport(reply.slow.pod_name, reply.slow.busy_seconds, reply.slow.median_seconds)


def _speaks(told: pb.Speaks) -> Speaks:
    return speaks_from_proto(told, version=1)


def _make_sane(message: Message) -> None:
    """Bound the numbers and texts of a message, as far as they end up in status."""
    for field, value in message.ListFields():
        if field.name in _AS_SAID:
            continue
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            for key in list(value):
                value[key] = _sane(value[key])
        elif entry is not None:
            for inner in [*value][-_MOST_ENTRIES:] if field.is_repeated else (value,):
                _make_sane(inner)
        elif field.is_repeated:
            value[:] = [_sane(one) for one in value[:_MOST_TEXT]]
        else:
            setattr(message, field.name, _sane(value))


def _sane(value: Any) -> Any:
    if isinstance(value, float):
        return max(min(value, LAST_SECOND), -LAST_SECOND) if math.isfinite(value) else 0.0
    if isinstance(value, str):
        return value[:_MOST_TEXT]
    return min(value, MAX_NUMBER) if isinstance(value, int) else value


def _stands_still(reply: pb.SyncReply) -> bool:
    """Whether it commits nothing: by the coordinator's own clock."""
    idle = reply.unix_time - reply.last_commit_unix
    return reply.last_commit_unix > 0 and idle > max(STILL_SECONDS, 3 * reply.step_seconds)


def _shares(reply: pb.SyncReply) -> tuple[ShareReport, ...]:
    """Return the parts of the slowest members; none where all have even parts."""
    told = [
        ShareReport(
            process_label(entry.member.pod_name, entry.member.id, entry.member.local_rank)[:_MOST_TEXT],
            _sane(entry.share_samples),
            max(0.0, _sane(entry.sample_seconds)),
        )
        for entry in reply.members
        if entry.standing in _IN_GENERATION and entry.by_speed
    ]
    return tuple(sorted(told, key=lambda share: (-share.sample_seconds, share.name))[:MAX_SHARES])


def _poison(reply: pb.SyncReply) -> PoisonReport | None:
    if not reply.HasField("poison"):
        return None
    told = reply.poison
    return PoisonReport(told.step, told.samples, tuple(told.workers[:_MOST_ENTRIES]), told.detail)


def to_stall(stall: pb.Stall) -> StallReport:
    """Convert a stall: which members are late, and with which activity."""
    late = [
        LateReport(
            member.pod_uid,
            member.pod_name,
            _DOING.get(member.activity.doing, ""),
            member.activity.where,
            member.since_unix,
        )
        for member in stall.late[:_MOST_ENTRIES]
    ]
    return StallReport(stall.seconds, stall.since_unix, stall.step, tuple(late), stall.waiting)


def _checkpoint(reply: pb.SyncReply) -> CheckpointReport | None:
    if not reply.HasField("checkpoint"):
        return None
    told = reply.checkpoint
    return CheckpointReport(told.name, told.uri, told.state.step, told.written_unix)


def news(before: Report | None, after: Report | None) -> bool:
    """Return whether conditions may follow from the difference of two reports; numbers that always move are
    no news.

    Args:
        before: the last report; None: there was none.
        after: the one of now; None: there is none.
    """
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
            planned_steps=0,
            seconds_per_step=0.0,
            lost_seconds={},
            slow=None,
            shares=(),
            rates=(),
            stall=replace(report.stall, seconds=0.0) if report.stall is not None else None,
        )

    return still(before) != still(after)
