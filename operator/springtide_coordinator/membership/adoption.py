"""How a later incarnation learns what there is.

It takes the greatest reported generation as it is, so that training goes on without a missed step. Before it
makes a generation of its own it must know of every process that may hold state. That is the case

* when every member of the greatest reported generation has reported to it: a greater one would need one of
  them, parked, as the source of its state, and none has heard of one; or
* when the operator listed the living pods after this incarnation began, every started one among them has said
  Hello, and every process that a report named has reported or is known to be dead. A process whose machine
  nobody hears, neither the operator nor this coordinator, is not waited for (`liveness.gone_with_machine`).

The very first incarnation knows that nobody holds state.
"""

from __future__ import annotations

from springtide_coordinator.membership.generation import Generation
from springtide_coordinator.membership.liveness import (
    gone_with_machine,
    proof_of_death,
    silent_machine,
    silent_pods,
)
from springtide_coordinator.membership.messages import Hello, MemberInfo
from springtide_coordinator.membership.state import Membership
from springtide_protocol.names import StateName


def adopt(m: Membership, hello: Hello, now: float) -> None:
    """Take a report into account: the process's generation, its members and its state."""
    name = hello.generation
    m.heard[hello.member.id] = hello.member
    if name is None:
        return
    m.generations = max(m.generations, name.number)
    members = hello.members or (hello.member,)
    m.named.update((info.id, info) for info in members)
    current = m.current
    if name.incarnation < m.incarnation and (current is None or (current.adopted and name > current.name)):
        m.current = current = Generation(name, members, made_at=now, base=None, servers=hello.servers)
        current.consistency = hello.consistency
    if current is not None and current.adopted and current.name == name and hello.state is not None:
        current.base = higher(current.base, hello.state, below=current)


def higher(base: StateName | None, state: StateName, below: Generation) -> StateName | None:
    """The greater of two states that a generation may have begun from."""
    if state.generation == below.name:
        return base
    return state if base is None else max(base, state)


def settle(m: Membership, now: float) -> list[str]:
    """Find out whether enough is known to make generations; return for whom it still waits."""
    if m.settled or m.incarnation.is_first or not m.rules.wait_for_reports:
        m.settled = True
        return []
    current = m.current
    if current is not None and all(info.id in m.heard for info in current.members):
        m.settled = True
        return []
    missing = [info.label for info in unreported(m) if not gone_with_machine(m, info, now)]
    awaited = ((uid, name) for uid, name in silent_pods(m) if not silent_machine(m, m.living[uid], now))
    missing += [name for _, name in awaited if name not in missing]
    if not m.operator_word:
        missing.append("the operator")
    m.settled = not missing
    return missing


def unreported(m: Membership) -> list[MemberInfo]:
    """Processes that reports name, that have not reported and are not known to be dead."""
    named = dict(m.named)
    if m.current is not None:
        named.update((info.id, info) for info in m.current.members)
    return [info for info in named.values() if info.id not in m.heard and not proof_of_death(m, info)]
