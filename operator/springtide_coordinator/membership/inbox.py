"""Handling of members' messages after Hello. A message that names an older generation is ignored."""

from __future__ import annotations

from springtide_coordinator.membership.consistency import keeps_applied_batches
from springtide_coordinator.membership.events import Effect, EndStream, Send
from springtide_coordinator.membership.following import on_follow
from springtide_coordinator.membership.hello import keep_layout, layout_mismatch
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.messages import (
    BoundToSteps,
    Bye,
    Checkpointed,
    Ended,
    Follow,
    Formed,
    Incoming,
    Leaving,
    Parked,
    ParkReason,
    Progressed,
    Standing,
)
from springtide_coordinator.membership.running_loop import note_loop, tell_running_loop
from springtide_coordinator.membership.saving import record_checkpoint
from springtide_coordinator.membership.servers import hold, void
from springtide_coordinator.membership.state import Membership
from springtide_protocol.names import StateName


def receive(m: Membership, record: Record, message: Incoming, now: float) -> list[Effect]:
    """Write down what a member says; a wrong layout, the wish to follow and another loop have an answer.

    Args:
        m: facts of the membership, which are changed.
        record: of the process; it is changed.
        message: of the process.
        now: in unix seconds.

    Returns:
        The refusal of a wrong layout, if it is one; who is told to send the state, for one that follows; and
        word of the next loop.
    """
    match message:
        case Parked():
            return on_parked(m, record, message, now)
        case Formed():
            on_formed(m, record, message)
        case Checkpointed():
            record_checkpoint(m, message)
        case Progressed():
            return on_progress(m, record, message)
        case Leaving():
            record.asked_to_leave(now, message.reason or "it was asked to leave")
        case Ended():
            on_ended(m, record, message)
        case BoundToSteps():
            record.bound_to_steps = message.reason
        case Follow():
            return on_follow(m, record, message)
        case Bye():
            record.goodbye = message.outcome or "Failed"
            record.detail = message.detail
            if message.outcome == "Finished" and not m.finished:
                m.finished, m.finished_at = True, now
    return []


def on_parked(m: Membership, record: Record, message: Parked, now: float) -> list[Effect]:
    """Note a member's promise; it counts unless a Start for a newer generation is already on its way.

    Args:
        m: facts of the membership, which are changed.
        record: of the process; it is changed.
        message: of the process.
        now: in unix seconds.

    Returns:
        The refusal of a wrong layout, if it is one.
    """
    current = m.current
    started = record.generation is not None and record.standing is not Standing.STARTING
    if (
        m.in_current(record.info.id)
        and current is not None
        and record.generation == current.name
        and started
        and message.generation != current.name
    ):
        return []
    refused = layout_mismatch(m, record.info.id, message.layout_hash)
    if refused is not None and record.session is not None:
        m.excluded[record.info.id] = refused.reason
        return [
            Send(record.session, record.info.id, refused),
            EndStream(record.session, record.info.id, refused.reason),
        ]
    if record.standing is not Standing.PARKED:
        record.parked_at = now
    record.standing = Standing.PARKED
    record.generation = message.generation
    record.stuck = record.stuck or message.cannot_go_back
    record.at_epoch_end = message.at_epoch_end
    lacking = message.reason is ParkReason.SERVERS_LACK_STATE
    if lacking and current is not None and message.generation == current.name:
        void(m, current, message)
    hold(m, record, message.state)
    keep_layout(m, record, message.layout_hash)
    record.park_reason = message.reason
    record.detail, record.suspects, record.reached = message.detail, message.suspects, message.reached
    record.largest_group = message.largest_group or record.largest_group
    record.together, record.hands_over = message.together, message.hands_over
    record.at_stage = None
    m.state_existed = m.state_existed or message.state is not None
    return []


def on_formed(m: Membership, record: Record, message: Formed) -> None:
    """Note that a member has formed the current generation.

    Args:
        m: facts of the membership, which are changed.
        record: of the process; it is changed.
        message: of the process.
    """
    current = m.current
    if current is None or message.generation != current.name or record.info.id not in current.ids:
        return
    again = record.info.id in current.formed
    current.formed.add(record.info.id)
    record.at_epoch_end = False
    if current.consistency is not None:
        record.keeps_applied_batches = keeps_applied_batches(m)
        record.checkpoints = record.storage and not record.keeps_applied_batches
    current.needed_servers |= set(message.needed_servers)
    current.unsettled = current.unsettled or message.servers_unsettled
    current.copies = message.server_copies
    if current.start is not None and not again:
        hold(m, record, current.start.state)
        if current.start.fresh and record.info.id == current.order[0]:
            on_restored(m, current.start.state, message.restored)
    m.state_existed = True


def on_restored(m: Membership, state: StateName, name: str) -> None:
    """Note that a fresh start began from a checkpoint, or from none.

    Args:
        m: facts of the membership, which are changed.
        state: of the start.
        name: of the checkpoint, under which the state is on storage; "" for none.
    """
    if name:
        m.saved = state
    if m.resumes and m.resumes != name:
        m.states_lost += 1  # of what the job was put away with, something could not be read
    m.resumes = ""


def on_progress(m: Membership, record: Record, message: Progressed) -> list[Effect]:
    """Note a commit, which proves that all members of its generation take part in its steps.

    Which state the process holds it says itself when it parks, or on a new stream. Commits are reported by
    another of its threads, so one may come after that: it is what was held then, and may be gone since (one
    that has drifted from the others holds none). Only while the process is in the commit's generation and has
    not parked does a commit say what it holds.

    Args:
        m: facts of the membership, which are changed.
        record: of the process; it is changed.
        message: of the process.

    Returns:
        Word of the loop that the commit is of, for those that have not been members, where that is news.
    """
    if m.known is None or message.state > m.known:
        m.known = message.state
    m.state_existed = True
    current = m.current
    trains = record.standing is not Standing.PARKED and message.state.generation == record.generation
    if trains and (record.state is None or message.state > record.state):
        hold(m, record, message.state)
    if current is None or message.state.generation != current.name or record.generation != current.name:
        return []
    news = message.loop is not None and message.loop > (-1 if m.running_loop is None else m.running_loop)
    if message.loop is not None:
        note_loop(m, message.loop)
    if record.standing is Standing.AFTER and newer_than_the_end(m, message):
        for member in current.order:
            other = m.members.get(member)
            if other is not None and other.standing is Standing.AFTER:
                other.standing = Standing.ACTIVE
        current.ended_stage = current.ended_state = None
    return tell_running_loop(m) if news else []


def newer_than_the_end(m: Membership, message: Progressed) -> bool:
    """Return whether a commit was made after the loop's end that all waited at: the next loop runs.

    Args:
        m: facts of the membership.
        message: of the process.
    """
    current = m.current
    return current is not None and current.ended_state is not None and message.state > current.ended_state


def on_ended(m: Membership, record: Record, message: Ended) -> None:
    """Note that a member waits at the end of a loop.

    Args:
        m: facts of the membership, which are changed.
        record: of the process; it is changed.
        message: of the process.
    """
    current = m.current
    if current is None or message.generation != current.name or record.info.id not in current.ids:
        return
    if record.standing is Standing.PARKED:
        return
    record.standing = Standing.ENDED
    record.at_stage = message.stage
    hold(m, record, message.state)
    m.state_existed = True
