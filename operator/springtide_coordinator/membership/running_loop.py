"""The training loop that the running generation is in, and who is told of it. PURE.

A process that comes to a running job goes through the loops before that one by itself, before it asks to be
admitted. So it must never be told of a later loop than there is: it could not go back, and would have to
begin again. Members of the running generation alone are asked, for another process may know a job that has
gone back to a checkpoint since; and a loop counts when a step of it was committed, for the loop that has just
ended may have been the script's last one, behind which nobody has a part that is no member.
"""

from __future__ import annotations

from springtide_coordinator.membership.events import Effect, Send
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.messages import RunningLoop, Standing
from springtide_coordinator.membership.state import Membership


def note_loop(m: Membership, stage: int) -> None:
    """Note that the running generation is in a loop, or past it.

    Args:
        m: facts of the membership, which are changed.
        stage: number of the loop, from 0.
    """
    m.running_loop = max(m.running_loop or 0, stage)


def forget_loop(m: Membership) -> None:
    """Forget where the job was: its next generation may go back to an earlier loop, or to the first one.

    Args:
        m: facts of the membership, which are changed.
    """
    m.running_loop = None


def note_hello(m: Membership, record: Record, ended: int) -> None:
    """Take a Hello into account: it says where the generation stands if its process is a member that trains.

    Args:
        m: facts of the membership, which are changed.
        record: of the process, with what it says it is.
        ended: loops that it knows to be ended.
    """
    current = m.current
    if current is None or record.info.id not in current.ids or record.generation != current.name:
        return
    formed = current.adopted or record.info.id in current.formed
    if not formed or record.state is None:
        return
    if record.standing in (Standing.ACTIVE, Standing.ENDED):
        note_loop(m, ended)
    elif record.standing is Standing.AFTER and ended:
        note_loop(m, ended - 1)


def loop_to_tell(m: Membership) -> int | None:
    """Return the loop before which a process that comes now goes through all; None: it is to ask at once.

    That is so while no member is there that the job could go on from: its next generation may begin at an
    earlier loop, where only those can take part that have not left it.

    Args:
        m: facts of the membership.
    """
    current = m.current
    if current is None or m.finished:
        return None
    records = (m.members[member] for member in current.order if member in m.members)
    holds = any(record.connected and record.state is not None and not record.voided for record in records)
    return m.running_loop if holds else None


def tell_running_loop(m: Membership) -> list[Effect]:
    """Tell processes that have not been members which loop the job is in, each once.

    Args:
        m: facts of the membership; records note what they were told.

    Returns:
        RunningLoop messages.
    """
    stage, effects = loop_to_tell(m), list[Effect]()
    if stage is None:
        return effects
    for record in m.connected():
        new = record.generation is None and record.state is None and not m.in_current(record.info.id)
        if not new or record.dismissed or record.told_loop == stage or record.session is None:
            continue
        record.told_loop = stage
        effects.append(Send(record.session, record.info.id, RunningLoop(stage)))
    return effects
