"""Hello: the processes that are let in, and how a later incarnation learns from them what there is.

A later incarnation takes the greatest reported generation as it is, so that training goes on without a missed
step. Before it makes a generation of its own it must know of every process that may hold state. That is the
case

* when every member of the greatest reported generation has reported to it: a greater one would need one of
  them, parked, as the source of its state, and none has heard of one; or
* when the operator listed the living pods after this incarnation began, every started one among them has said
  Hello, and every process that a report named has reported or is known to be dead. A process whose machine
  nobody hears, neither the operator nor this coordinator, is not waited for (`failure.gone_with_machine`).

The very first incarnation knows that nobody holds state.
"""

from __future__ import annotations

from springtide_coordinator.membership.events import Effect, EndStream, Send
from springtide_coordinator.membership.failure import (
    gone_with_machine,
    is_outranked,
    proof_of_death,
    same_place,
    silent_machine,
    silent_pods,
    step_down,
)
from springtide_coordinator.membership.generation import Generation
from springtide_coordinator.membership.members import Record, once
from springtide_coordinator.membership.messages import (
    Hello,
    MemberInfo,
    ParkReason,
    Refused,
    Standing,
    Welcome,
)
from springtide_coordinator.membership.running_loop import forget_loop, loop_to_tell, note_hello
from springtide_coordinator.membership.servers import hold
from springtide_coordinator.membership.state import Membership
from springtide_protocol.names import StateName
from springtide_protocol.versions import OWN, Speaks, agree, agreed, as_coordinator, as_worker

SUSPENDED = "the job is suspended"


def greet(m: Membership, session: int, hello: Hello, now: float) -> list[Effect]:
    """Let a process in on a new stream, or refuse it with the reason.

    Args:
        m: facts of the membership, which are changed.
        session: number of the stream.
        hello: first message of the process.
        now: in unix seconds.

    Returns:
        Welcome and the messages that the process has missed; or the refusal and the end of the stream.
    """
    effects: list[Effect] = []
    heard_of = [hello.newest_incarnation, hello.generation.incarnation if hello.generation else None]
    newest = max((incarnation for incarnation in heard_of if incarnation), default=m.incarnation)
    if is_outranked(m, newest):
        effects += step_down(m, f"{hello.member.label} has heard of incarnation {newest}")
    refused = why_refused(m, hello)
    if refused is not None:
        return [
            *effects,
            Send(session, hello.member.id, refused),
            EndStream(session, hello.member.id, refused.reason),
        ]
    effects += replace_predecessors(m, hello)
    effects += send_strangers_away(m, hello)
    record = m.members.get(hello.member.id)
    if record is None:
        m.arrivals += 1
        record = m.members[hello.member.id] = Record(hello.member, order=m.arrivals)
        m.places.setdefault(hello.member.place, set()).add(hello.member.id)
    elif record.session is not None:
        effects.append(EndStream(record.session, record.info.id, "the process opened a new stream"))
        m.sessions.pop(record.session, None)
    m.sessions[session] = hello.member.id
    take_report(m, record, hello, now)
    record.session, record.connected_at, record.disconnected_at = session, now, None
    record.ended = False
    record.sent = set()
    adopt(m, hello, now)
    note_hello(m, record, hello.ended_stage)
    agreement = agreed(as_worker(hello.speaks), as_coordinator(OWN))
    record.told_loop = loop_to_tell(m)
    effects.append(Send(session, record.info.id, Welcome(m.incarnation, agreement, record.told_loop)))
    effects += resume(m, record)
    return effects


def why_refused(m: Membership, hello: Hello) -> Refused | None:
    """Return why a process is not let in; None when it is welcome.

    Args:
        m: facts of the membership.
        hello: first message of the process.
    """
    if not hello.member.id:
        return Refused("Hello.member.id is empty: every process needs a random id of its own", retry=False)
    if isinstance(disagreement := agree(as_worker(hello.speaks), as_coordinator(OWN)), str):
        return Refused(disagreement, retry=False)
    if m.superseded:
        return Refused(f"this coordinator is out of date: {m.superseded}", retry=True)
    if hello.member.id in m.excluded:
        return Refused(m.excluded[hello.member.id], retry=False)
    name = hello.generation
    known = m.current.name if m.current is not None and not m.current.adopted else None
    if name is not None and name.incarnation == m.incarnation and (known is None or name > known):
        return Refused(
            f"it reports generation {name}, which this coordinator never made although it is incarnation"
            f" {m.incarnation}: the incarnation was used twice; the coordinator's state directory was lost",
            retry=False,
        )
    return peers_mismatch(m, hello) or layout_mismatch(m, hello.member.id, hello.layout_hash)


def peers_mismatch(m: Membership, hello: Hello) -> Refused | None:
    """Return why a process is refused that exchanges otherwise with workers than the others do.

    None where it does not, and where it has trained and none of those has.

    Args:
        m: facts of the membership.
        hello: first message of the process.
    """
    if m.peers <= {hello.speaks.peers}:
        return None
    m.peers = {record.speaks.peers for record in m.connected()}
    others = [record for record in m.connected() if record.info.id != hello.member.id]
    if has_trained(hello):
        others = [record for record in others if has_trained(record)]
    other = min(others, key=lambda r: (not m.in_current(r.info.id), r.state is None, r.order), default=None)
    if other is None or other.speaks.peers == hello.speaks.peers:
        return None
    return of_another_release(hello.speaks, other.speaks, other.info.label)


def has_trained(process: Hello | Record) -> bool:
    """Whether a process has been in a generation, or holds a state."""
    return process.generation is not None or process.state is not None


def of_another_release(its: Speaks, theirs: Speaks, label: str) -> Refused:
    """Return the answer to a process that cannot train with the others.

    Args:
        its: what it speaks.
        theirs: what the others speak.
        label: of one of these.
    """
    own, other = (speaks.peers or "peers-1 or older" for speaks in (its, theirs))
    return Refused(
        f"its release of springtide exchanges gradients and state as {own}, that of {label} as {other}: the"
        " workers of a job train with one release; give this pod the others' image (a changed template takes"
        " effect for new pods only), or suspend and resume the job, so that all are made anew",
        retry=False,
    )


def send_strangers_away(m: Membership, hello: Hello) -> list[Effect]:
    """Refuse those that were let in first, have never trained, and cannot train with one that has.

    Args:
        m: facts of the membership, which are changed.
        hello: first message of the process that has trained.

    Returns:
        The refusals and the ends of the streams.
    """
    effects: list[Effect] = []
    if m.peers <= {hello.speaks.peers} or not has_trained(hello):
        return effects
    for other in list(m.connected()):
        if other.speaks.peers != hello.speaks.peers and not has_trained(other):
            refused = of_another_release(other.speaks, hello.speaks, hello.member.label)
            assert other.session is not None
            effects.append(Send(other.session, other.info.id, refused))
            effects.append(EndStream(other.session, other.info.id, refused.reason))
            m.sessions.pop(other.session, None)
            other.session, other.replaced = None, True
    return effects


def layout_mismatch(m: Membership, member: str, layout_hash: str) -> Refused | None:
    """Return why a process is refused whose model is not that of the others; None when it is the same.

    Args:
        m: facts of the membership.
        member: id of the process.
        layout_hash: of its model; "" for not known.
    """
    if not layout_hash or m.layouts <= {layout_hash}:
        return None
    m.layouts = {record.layout_hash for record in m.members.values() if record.layout_hash}
    reference = reference_layout(m, member)
    if reference is None or reference[0] == layout_hash:
        return None
    return Refused(
        f"its model has the layout {layout_hash}, that of {reference[1]} is {reference[0]}: names, shapes,"
        " dtypes and order of the parameters must be equal on all workers; check that all pods run the same"
        " script, arguments and image (a changed template takes effect for new pods only)",
        retry=False,
    )


def reference_layout(m: Membership, besides: str) -> tuple[str, str] | None:
    """Return the layout that others must have: of the current generation, else of a holder of state, else of
    the eldest.

    Args:
        m: facts of the membership.
        besides: id of a process that does not count.

    Returns:
        (layout hash, label of the process); None where nobody has said any.
    """
    known = [r for r in m.connected() if r.layout_hash and r.info.id != besides]
    if not known:
        return None
    best = min(known, key=lambda r: (not m.in_current(r.info.id), r.state is None, r.order))
    return best.layout_hash, best.info.label


def replace_predecessors(m: Membership, hello: Hello) -> list[Effect]:
    """End the stream of a process whose place a new one has taken, which proves that it is dead.

    Args:
        m: facts of the membership, which are changed.
        hello: first message of the process.

    Returns:
        The refusal and the end of the stream.
    """
    effects: list[Effect] = []
    for member in sorted(m.places.get(hello.member.place, ())):
        other = m.members[member]
        if other.info.id == hello.member.id or other.replaced or not same_place(other.info, hello.member):
            continue
        other.replaced = True
        if other.session is not None:
            reason = f"process {hello.member.id} took the place of {other.info.id} in pod {other.info.label}"
            effects.append(Send(other.session, other.info.id, Refused(reason, retry=False)))
            effects.append(EndStream(other.session, other.info.id, reason))
            m.sessions.pop(other.session, None)
            other.session = None
    return effects


def take_report(m: Membership, record: Record, hello: Hello, now: float) -> None:
    """Write down what a process says it is.

    Args:
        m: facts of the membership, which are changed.
        record: of the process; it is changed.
        hello: first message of the process.
        now: in unix seconds.
    """
    if hello.standing is not record.standing or hello.generation != record.generation:
        record.park_reason, record.detail = ParkReason.UNKNOWN, ""
        record.suspects = record.reached = ()
    move(m, record.info, hello.member)
    record.info, record.speaks = hello.member, hello.speaks
    m.peers.add(hello.speaks.peers)
    record.standing = hello.standing
    record.generation = hello.generation
    record.checkpoints, record.storage = hello.checkpoints, hello.storage
    record.bound_to_steps, record.at_epoch_end = hello.bound_to_steps, hello.at_epoch_end
    hold(m, record, hello.state)
    keep_layout(m, record, hello.layout_hash)
    record.ended_stages = hello.ended_stage
    record.opaque, record.keeps_applied_batches = hello.opaque, hello.keeps_applied_batches
    record.stop_seconds = hello.stop_seconds
    record.largest_group, record.together = hello.largest_group, hello.together
    record.at_stage = hello.ended_stage if hello.standing is Standing.ENDED else None
    record.dismissed = record.goodbye = ""
    record.replaced = False
    if hello.standing is Standing.PARKED:
        record.parked_at = now
    if hello.leaving:
        record.asked_to_leave(now, "it was asked to leave")
    elif hello.member.pod_uid in m.gone:  # its node came back; only a state that nobody else has is of use
        record.asked_to_leave(now, "its pod is held for gone")
    if m.suspended:
        record.asked_to_leave(now, SUSPENDED, m.suspend_by)
    m.state_existed = m.state_existed or hello.state is not None
    m.ended_stages = max(m.ended_stages, hello.ended_stage)


def move(m: Membership, before: MemberInfo, after: MemberInfo) -> None:
    """Note where a process is now.

    Args:
        m: facts of the membership, which are changed.
        before: of the process, by its last report.
        after: of the same process, by this one.
    """
    if before.place != after.place:
        m.places.get(before.place, set()).discard(before.id)
        m.places.setdefault(after.place, set()).add(after.id)


def keep_layout(m: Membership, record: Record, layout_hash: str) -> None:
    """Note the layout of a process's model.

    Args:
        m: facts of the membership, which are changed.
        record: of the process; it is changed.
        layout_hash: "" for not known yet.
    """
    if layout_hash:
        record.layout_hash = layout_hash
        m.layouts.add(layout_hash)


def resume(m: Membership, record: Record) -> list[Effect]:
    """Go on with a member of the current generation whose stream broke.

    Args:
        m: facts of the membership, which are changed.
        record: of the process; it is changed.

    Returns:
        The Start that it has missed, if it did.
    """
    current = m.current
    if current is None or not m.in_current(record.info.id):
        return []
    if record.info.id not in current.fenced or record.parked:
        current.lost.pop(record.info.id, None)
        current.fenced.pop(record.info.id, None)
    missed_start = record.parked and (record.generation is None or record.generation < current.name)
    if (
        missed_start
        and current.start is not None
        and not current.closing
        and record.info.id not in current.formed
    ):
        record.standing, record.generation = Standing.ACTIVE, current.name
        return once(record, ("start", current.name), current.start)
    return []


def adopt(m: Membership, hello: Hello, now: float) -> None:
    """Take a report into account: the process's generation, its members and its state.

    Args:
        m: facts of the membership, which are changed.
        hello: first message of the process.
        now: in unix seconds.
    """
    name = hello.generation
    m.known_members[hello.member.id] = hello.member
    if name is None:
        return
    m.generations = max(m.generations, name.number)
    members = hello.members or (hello.member,)
    m.named.update((info.id, info) for info in members)
    current = m.current
    if name.incarnation < m.incarnation and (current is None or (current.adopted and name > current.name)):
        m.current = current = Generation(name, members, made_at=now, base=None, servers=hello.servers)
        forget_loop(m)  # what was heard so far is of an earlier one
        current.consistency = hello.consistency
    if current is not None and current.adopted and current.name == name and hello.state is not None:
        current.base = higher(current.base, hello.state, below=current)


def higher(base: StateName | None, state: StateName, below: Generation) -> StateName | None:
    """Return the greater of two states that a generation may have begun from.

    Args:
        base: the one that was greatest so far; None: none was.
        state: another one; a state of the generation itself is none that it began from.
        below: the generation.
    """
    if state.generation == below.name:
        return base
    return state if base is None else max(base, state)


def settle(m: Membership, now: float) -> list[str]:
    """Find out whether enough is known to make generations.

    Args:
        m: facts of the membership, which are changed.
        now: in unix seconds.

    Returns:
        For whom it still waits.
    """
    if m.settled or m.incarnation.is_first:
        m.settled = True
        return []
    current = m.current
    if current is not None and all(info.id in m.known_members for info in current.members):
        m.settled = True
        return []
    missing = [info.label for info in unreported(m) if not gone_with_machine(m, info, now)]
    awaited = ((uid, name) for uid, name in silent_pods(m) if not silent_machine(m, m.living[uid], now))
    missing += [name for _, name in awaited if name not in missing]
    if not m.operator_synced:
        missing.append("the operator")
    m.settled = not missing
    return missing


def unreported(m: Membership) -> list[MemberInfo]:
    """Processes that reports name, that have not reported and are not known to be dead."""
    named = dict(m.named)
    if m.current is not None:
        named.update((info.id, info) for info in m.current.members)
    return [info for info in named.values() if info.id not in m.known_members and not proof_of_death(m, info)]
