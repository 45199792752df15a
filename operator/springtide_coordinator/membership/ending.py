"""The end of a training loop: nobody goes on before all members stand at its end with the same state."""

from __future__ import annotations

from springtide_coordinator.membership.events import Effect, LoopEnded
from springtide_coordinator.membership.generation import Generation
from springtide_coordinator.membership.liveness import proof_of_death
from springtide_coordinator.membership.messages import EndOk, Standing
from springtide_coordinator.membership.send_once import once
from springtide_coordinator.membership.state import Membership


def end_loop(m: Membership, generation: Generation) -> list[Effect]:
    """Say EndOk when all members wait at the end of the same loop; say it again to who missed it."""
    effects: list[Effect] = []
    records = [m.members.get(member) for member in generation.ids]
    there = [record for record in records if record is not None]
    after = [r for r in there if r.standing is Standing.AFTER and r.generation == generation.name]
    if after:
        stage = max(record.ended_stages for record in after) - 1
        if stage >= 0 and (generation.ended_stage is None or stage > generation.ended_stage):
            generation.ended_stage = stage
            generation.ended_state = max((r.state for r in after if r.state is not None), default=None)
    waiting = [r for r in there if r.standing is Standing.ENDED and r.generation == generation.name]
    if not waiting or generation.closing:
        return effects
    ends = {(record.at_stage, record.state) for record in waiting}
    together = len(waiting) == len(generation.ids) and all(r.connected for r in waiting) and len(ends) == 1
    if together or not m.rules.end_together:
        stage = max(record.at_stage or 0 for record in waiting)
        if generation.ended_stage is None or stage > generation.ended_stage:
            generation.ended_stage = stage
            generation.ended_state = max((r.state for r in waiting if r.state is not None), default=None)
            effects.append(LoopEnded(stage))
    if generation.ended_stage is None:
        return effects
    m.ended_stages = max(m.ended_stages, generation.ended_stage + 1)
    for record in waiting:
        if record.at_stage is not None and record.at_stage <= generation.ended_stage and record.connected:
            effects += once(record, ("end", record.at_stage), EndOk(generation.name, record.at_stage))
            record.standing = Standing.AFTER
            record.ended_stages = max(record.ended_stages, record.at_stage + 1)
    return effects


def reconsider_finish(m: Membership, now: float) -> None:
    """Forget a Finished that nobody took: its pod was deleted before the operator could read it.

    It was in vain when the operator still wants workers a while later and nobody who holds state is alive.
    The job can then only start again, and says that its state is lost.
    """
    heard = m.operator_heard_at
    if not m.finished or heard is None or now - m.finished_at < m.settings.finish:
        return
    if heard < m.finished_at + m.settings.finish or m.deaf(now) or not m.target or not m.living:
        return
    holders = {record.info.id: record.info for record in m.members.values() if record.state is not None}
    if m.current is not None:
        holders.update((info.id, info) for info in m.current.members)
    if all(info.pod_uid not in m.living and proof_of_death(m, info) for info in holders.values()):
        m.finished = False
