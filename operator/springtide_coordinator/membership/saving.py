"""The last holders of the state do not leave before it is on storage, or their time is over.

While they train, checkpoints are the workers' own affair. When all of them are to go (the job is suspended
or wants no workers, their pods are drained or deleted) and nobody is there to take the state over, they stop
at a boundary, write what they hold as parked members, and leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from springtide_coordinator.membership.events import Effect
from springtide_coordinator.membership.members import Record, once
from springtide_coordinator.membership.messages import Checkpointed, Save, Standing
from springtide_coordinator.membership.state import Membership, Saving, Status
from springtide_protocol.names import StateName

TRIES = 3


def leave_deadline(m: Membership, record: Record) -> float:
    """Return the unix time at which a leaver must be let go, whatever it holds.

    Args:
        m: facts of the membership.
        record: of the process.
    """
    return record.leave_deadline(m.settings.leave_margin, m.settings.assumed_grace_period)


def saves(m: Membership, record: Record) -> bool:
    """Return whether what a process holds can be saved, and is not known to be.

    Args:
        m: facts of the membership.
        record: of the process.
    """
    return (
        record.checkpoints
        and record.state is not None
        and (m.saved is None or m.saved < record.state)
        and not (m.saving is not None and m.saving.given_up and m.saving.state == record.state)
    )


def time_to_go(m: Membership, record: Record, now: float) -> bool:
    """Return whether a leaver that nobody relieves begins to go: nobody wants it any more, or it needs the
    rest of its time for saving.

    Args:
        m: facts of the membership.
        record: of the process.
        now: in unix seconds.
    """
    wanted = m.target > 0 or m.operator_synced_at is None
    if not wanted or m.suspended:
        return True
    margin = m.settings.save_margin + 3.0 * m.save_seconds
    return record.checkpoints and now >= leave_deadline(m, record) - margin


def before_leaving(
    m: Membership, pool: Sequence[Record], chosen: StateName | None, now: float
) -> Status | None:
    """Return which checkpoint parked leavers wait for, when all processes that are there leave.

    Args:
        m: the state machine.
        pool: parked processes.
        chosen: the state to keep.
        now: seconds on the machine's clock.

    Returns:
        None: they wait for nothing.
    """
    holders = [
        record
        for record in pool
        if record.state == chosen and saves(m, record) and now < leave_deadline(m, record)
    ]
    if chosen is None or not any(time_to_go(m, record, now) for record in holders):
        return None
    ids = tuple(record.info.id for record in sorted(holders, key=lambda record: record.info.rank_key))
    saving = m.saving
    if saving is None or saving.state != chosen:
        saving = m.saving = Saving(chosen, ids)
    elif saving.failed or not set(saving.writers) <= set(ids):
        if saving.attempt >= TRIES:
            saving.given_up = True
            return None
        saving = m.saving = Saving(chosen, ids, saving.attempt + 1)
    labels = tuple(record.info.label for record in holders if record.info.id in saving.writers)
    return Status("Saving", f"{chosen} is written to storage before those who hold it leave", labels)


def ask_to_save(m: Membership) -> list[Effect]:
    """Save: to those who hold the state and wait."""
    saving = m.saving
    if saving is None or saving.given_up or m.blocked is None or m.blocked.reason != "Saving":
        return []
    effects: list[Effect] = []
    message = Save(saving.state, saving.writers, saving.attempt)
    for writer in saving.writers:
        record = m.members.get(writer)
        if record is not None and record.parked:
            effects += once(record, ("save", saving.state, saving.attempt), message)
    return effects


def record_checkpoint(m: Membership, said: Checkpointed) -> None:
    """Write down what became of a checkpoint.

    Args:
        m: facts of the membership, which are changed.
        said: a member's word.
    """
    if said.error:
        if m.saving is not None and m.saving.state == said.state and said.reason == "leaving":
            m.saving.failed = said.error
    elif m.saved is None or said.state > m.saved:
        m.saved = said.state
    m.save_seconds = said.seconds or m.save_seconds


@dataclass(frozen=True, slots=True)
class SavedOnSuspend:
    """Report to the operator about a job that it suspends.

    done: no process is left that has anything to save. all_saved: the newest checkpoint holds the job's
    newest state.
    """

    done: bool
    all_saved: bool


def put_away(m: Membership) -> SavedOnSuspend:
    """Return how far a suspended job is saved.

    Only a coordinator that knows of every process reports that nothing is left.
    """
    left = any(r.state is not None or r.standing is not Standing.STARTING for r in m.connected())
    return SavedOnSuspend(
        done=m.suspended and m.settled and (m.operator_synced or m.incarnation.is_first) and not left,
        all_saved=m.saved is not None
        and (m.known is None or m.known <= m.saved)
        and all(r.state is None or r.state <= m.saved for r in m.connected()),
    )
