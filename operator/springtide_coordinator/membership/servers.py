"""Which parameter servers a generation has, what becomes of it when they change, and states lost with them.

The servers keep the parameters of the generation's state; workers and servers see to that among themselves.
Here it is only decided which processes they are: one for each slot wanted. Another set is another generation.

A worker holds the parameters of its state, but not what belongs to them on the servers (the optimizer's
state, tables): when the servers of a generation do not hold the state that its Start named, nobody can go on
and stay; one that cannot says so. A process that trained cannot go back to its initial values, so without
checkpoints all that held the state leave, and processes that never trained begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from springtide_coordinator.membership import failure
from springtide_coordinator.membership.events import Effect, EndStream, MemberLost, Send
from springtide_coordinator.membership.failure import (
    MACHINE_SILENT,
    complaint_in,
    is_outranked,
    may_return,
    paused_without_operator,
    silent_machine,
    step_down,
)
from springtide_coordinator.membership.generation import Generation
from springtide_coordinator.membership.members import Record, ServerRecord, once
from springtide_coordinator.membership.messages import (
    Parked,
    Refused,
    ServerHello,
    ServerInfo,
    ServerLeave,
    Start,
    Welcome,
)
from springtide_coordinator.membership.state import Membership, Status
from springtide_protocol.names import StateName
from springtide_protocol.versions import OWN, agree, agreed, as_coordinator, as_server


def greet_server(m: Membership, session: int, hello: ServerHello, now: float) -> list[Effect]:
    """Let a parameter server in on a new stream, or refuse it with the reason.

    Args:
        m: facts of the membership, which are changed.
        session: number of the stream.
        hello: first message of the server.
        now: in unix seconds.

    Returns:
        Welcome; or the refusal and the end of the stream.
    """
    info, newest = hello.server, hello.newest_incarnation
    effects: list[Effect] = []
    if is_outranked(m, newest):
        effects += step_down(m, f"{info.label} has heard of incarnation {newest}")
    refused = why_refused(m, hello)
    if refused is not None:
        return [*effects, Send(session, info.id, refused), EndStream(session, info.id, refused.reason)]
    for other in m.servers.values():
        if other.info.id != info.id and not other.replaced and same_pod(other.info, info):
            other.replaced = True
            reason = f"process {info.id} took the place of {other.info.id} in pod {info.label}"
            effects += disconnect(m, other, Refused(reason, retry=False), now)
    record = m.servers.get(info.id)
    if record is None:
        m.arrivals += 1
        record = m.servers[info.id] = ServerRecord(info, order=m.arrivals)
    elif record.session is not None:
        effects.append(EndStream(record.session, info.id, "the process opened a new stream"))
        m.server_sessions.pop(record.session, None)
    m.server_sessions[session] = info.id
    m.known_servers[info.id] = info
    record.info, record.session, record.disconnected_at = info, session, None
    record.speaks = hello.speaks
    record.sent, record.replaced, record.dismissed = set(), False, False
    if hello.leaving:
        record.leaving = record.leaving or "it was asked to leave"
    mark_leaving(m)
    if m.current is not None:
        m.current.lost_servers.pop(info.id, None)
    agreement = agreed(as_server(hello.speaks), as_coordinator(OWN))
    effects.append(Send(session, info.id, Welcome(m.incarnation, agreement)))
    return effects


def why_refused(m: Membership, hello: ServerHello) -> Refused | None:
    """Return why a server is not let in; None when it is welcome.

    Args:
        m: facts of the membership.
        hello: first message of the server.
    """
    if not hello.server.id or not hello.server.address:
        return Refused("ServerHello.server needs a random id of its own and an address", retry=False)
    if isinstance(disagreement := agree(as_server(hello.speaks), as_coordinator(OWN)), str):
        return Refused(disagreement, retry=False)
    if m.superseded:
        return Refused(f"this coordinator is out of date: {m.superseded}", retry=True)
    return None


def disconnect(m: Membership, record: ServerRecord, message: Refused, now: float) -> list[Effect]:
    """End a server's stream with the reason.

    Args:
        m: facts of the membership.
        record: of the server; it is changed.
        message: that says it.
        now: in unix seconds.

    Returns:
        The message and the end of the stream; empty without one.
    """
    session, member = record.session, record.info.id
    if session is None:
        return []
    m.server_sessions.pop(session, None)
    record.session, record.disconnected_at = None, now
    return [Send(session, member, message), EndStream(session, member, message.reason)]


def same_pod(one: ServerInfo, other: ServerInfo) -> bool:
    """Return whether two processes can only have lived one after the other.

    Args:
        one: of a server.
        other: of another one.
    """
    return bool(one.pod_uid) and one.pod_uid == other.pod_uid


def mark_leaving(m: Membership) -> None:
    """Servers whose pods are going away, or that the operator does not list any more, are to leave."""
    for record in m.servers.values():
        pod = m.living_servers.get(record.info.pod_uid)
        if pod is not None and pod.leave_by and not record.leaving:
            record.leaving = "its pod is going away"
        elif pod is None and record.info.pod_uid in m.gone and not record.leaving:
            record.leaving = "its pod is held for gone"


def proof_of_death(m: Membership, info: ServerInfo) -> str:
    """Return how it is known that a server can never act again; "" when it is not known.

    Args:
        m: facts of the membership.
        info: of the server.
    """
    record = m.servers.get(info.id)
    if record is not None:
        if record.replaced:
            return "another process took its place"
        if record.connected:
            return ""
    if m.operator_synced and info.pod_uid and info.pod_uid not in m.living_servers:
        left = record.disconnected_at if record is not None else None
        if left is None or (m.operator_synced_at or 0.0) >= left:
            return "its pod is gone"
    if record is None and any(o.id != info.id and same_pod(o, info) for o in m.known_servers.values()):
        return "another process took its place"
    return ""


def why_lost(m: Membership, generation: Generation, info: ServerInfo, now: float) -> str:
    """Return how it is known that a server will not serve the generation any more; "" while it may.

    The same patience as for workers: see `failure.why_lost`.

    Args:
        m: facts of the membership.
        generation: the current one.
        info: of the server.
        now: in unix seconds.
    """
    if proof := proof_of_death(m, info):
        return proof
    record = m.servers.get(info.id)
    if record is None and info.id not in m.known_servers:
        return MACHINE_SILENT if silent_machine(m, m.living_servers.get(info.pod_uid), now) else ""
    if record is None or record.connected or record.disconnected_at is None:
        return ""
    if record.dismissed:
        return "it left"
    if complaint_in(m, generation):
        return "its stream broke and a worker could not reach it"
    if may_return(m, record.disconnected_at, now) or paused_without_operator(m, generation, now):
        return ""
    return "its stream broke"


def note_lost_servers(m: Membership, generation: Generation, now: float) -> list[Effect]:
    """Write down which servers of the generation are lost by now; the first of them ends it.

    Args:
        m: facts of the membership, which are changed.
        generation: the current one; it is changed.
        now: in unix seconds.

    Returns:
        One effect for each server that is lost since the last call.
    """
    effects: list[Effect] = []
    if generation.complete and not generation.closing:
        m.lost_servers.clear()
    for info in generation.serving:
        if info.id in generation.lost_servers or not (why := why_lost(m, generation, info, now)):
            continue
        generation.lost_servers[info.id] = why
        m.lost_servers.append(info.label)
        effects.append(MemberLost(info.id, f"parameter server {info.label}: {why}"))
    if generation.ended_stage is None:  # at the end of a loop all hold the state themselves
        end_with_servers(generation, now)
    return effects


def end_with_servers(generation: Generation, now: float) -> None:
    """Close a generation one of whose servers is lost.

    Args:
        generation: the current one; it is changed.
        now: in unix seconds.
    """
    for info in generation.serving:
        if lost := generation.lost_servers.get(info.id):
            generation.close(f"parameter server {info.label} is lost: {lost}", now)


def choose_servers(m: Membership, now: float) -> tuple[ServerInfo, ...] | Status:
    """Return one server for each slot wanted, in their order; or whom the choice waits for.

    A server that others have copies of is not waited for: it joins when it comes.

    Args:
        m: facts of the membership.
        now: in unix seconds.
    """
    chosen: list[ServerInfo] = []
    if copied(m):
        for slot in range(m.servers_wanted):
            there = [r for r in m.servers.values() if r.usable and r.info.slot == slot]
            chosen += [max(there, key=lambda record: record.newness).info] if there else []
        if chosen:
            return tuple(chosen)
    # Whoever is out of sight may be alone in holding its share of the state.
    out = {info.slot: info.label for info in holders(m) if may_come_back(m, info, now)}
    missing = list(out.values())
    for slot in range(m.servers_wanted):
        there = [r for r in m.servers.values() if r.usable and r.info.slot == slot]
        if there:
            chosen.append(max(there, key=lambda record: record.newness).info)
        elif slot not in out:
            pods = [pod.name or pod.uid for pod in m.living_servers.values() if pod.slot == slot]
            missing.append(pods[-1] if pods else f"parameter server {slot}")
    if not missing:
        return tuple(chosen)
    return Status(
        "WaitingForServers",
        f"{len(chosen)} of {m.servers_wanted} parameter servers are connected",
        tuple(missing),
    )


def copied(m: Membership, without: str = "") -> bool:
    """Return whether the last generation's state is whole without those of its servers that are not there
    now.

    Args:
        m: facts of the membership.
        without: id of another one; "" for none.
    """
    current = m.current
    if current is None or (not current.complete and current.copies_before < 2):
        return False
    copies = current.copies if current.complete else current.copies_before
    there = {record.info.id for record in m.servers.values() if record.usable} - {without}
    return sum(info.id not in there for info in current.serving) < max(1, copies)


def copies_kept(before: Generation | None, start: Start) -> int:
    """Return how many servers hold each chunk, at least, while a generation forms.

    With the same servers as before nothing moves. So a server whose death a worker noticed first, and with
    which a generation began that cannot form, is not waited for either.

    Args:
        before: the generation before; None: there was none.
        start: of the one that forms.
    """
    same = before is not None and {info.id for info in before.serving} == {info.id for info in start.servers}
    if before is None or not same or start.fresh or start.leaving_servers:
        return 1
    return before.copies if before.complete else before.copies_before


def holders(m: Membership) -> tuple[ServerInfo, ...]:
    """The servers that the last generation's state is on, as far as they live."""
    current = m.current
    if current is None:
        return ()
    return current.serving if current.complete else (*current.servers, *current.leaving_servers)


def disconnect_unreached(m: Membership, unreached: Sequence[ServerInfo], now: float) -> list[Effect]:
    """Disconnect the first of some servers without which the state is whole; none when each holds what no
    other one has.

    Args:
        m: facts of the membership, which are changed.
        unreached: servers that most members complain of, in the order in which they are tried.
        now: in unix seconds.

    Returns:
        The refusal and the end of its stream.
    """
    current = m.current
    for info in unreached:
        record = m.servers.get(info.id)
        if current is None or record is None or not record.connected or not copied(m, info.id):
            continue
        reason = (
            f"{m.complaints.length} generations in a row failed because most workers could not reach"
            f" parameter server {info.label}, which reaches the coordinator"
            f" ({m.complaints.details[info.id]}). Others have copies of what it holds."
            " Check that pods can reach each other (network policy, firewalls, a mesh)."
        )
        record.replaced = True
        current.lost_servers[info.id] = reason
        m.lost_servers.append(info.label)
        return [
            MemberLost(info.id, f"parameter server {info.label}: {reason}"),
            *disconnect(m, record, Refused(reason, retry=False), now),
        ]
    return []


def may_come_back(m: Membership, info: ServerInfo, now: float) -> bool:
    """Return whether a server of the last generation is out of sight and may still live, with what it holds.

    Args:
        m: facts of the membership.
        info: of the server.
        now: in unix seconds.
    """
    record = m.servers.get(info.id)
    if m.server_connected(info.id) or proof_of_death(m, info):
        return False
    if record is None or record.disconnected_at is None or m.current is None:
        return True
    waited = now - record.disconnected_at
    return waited < m.settings.server_return or paused_without_operator(m, m.current, now)


def still_holding(m: Membership, servers: tuple[ServerInfo, ...]) -> tuple[ServerInfo, ...]:
    """Return connected servers of the last generation that the next one does not have, and that may hold its
    state.

    Args:
        m: facts of the membership.
        servers: the next generation's.
    """
    ids = {info.id for info in servers}
    there = {record.info.id for record in m.servers.values() if record.usable}
    return tuple(info for info in holders(m) if info.id not in ids and info.id in there)


def why_other_servers(m: Membership, generation: Generation, now: float) -> tuple[str, str] | None:
    """Return why a boundary is to be asked for at which the set of servers changes.

    Nobody waits there for a server: the ones that take over are connected before it is asked for.

    Args:
        m: facts of the membership.
        generation: the current one.
        now: in unix seconds.

    Returns:
        (cause, reason); None while the set is right.
    """
    if not m.servers_wanted or not m.operator_synced:
        return None
    if not all(m.server_connected(info.id) for info in generation.servers):
        return None  # it comes back within its grace, or it is lost
    chosen = choose_servers(m, now)
    if isinstance(chosen, Status):
        return None
    before = {info.id for info in generation.servers}
    ids = {info.id for info in chosen}
    come = [info.label for info in chosen if info.id not in before]
    go = [info.label for info in generation.servers if info.id not in ids]
    if not come and not go:
        return None
    parts = [f"parameter server {', '.join(go)} leaves"] if go else []
    parts += [f"parameter server {', '.join(come)} joins"] if come else []
    return ("join" if come else "leave"), "; ".join(parts)


def is_needed(m: Membership, server: str) -> bool:
    """Return whether the newest generation has a server, or asks it for the state while it forms.

    A coordinator that is new may not have heard yet of the generation that trains, which then has the server.
    A generation whose members are all out of sight may go on when one of them is back, and needs its servers.

    Args:
        m: facts of the membership.
        server: its id.
    """
    current = m.current
    if m.finished or (current is None and m.settled):
        return False
    if current is None or not m.settled:
        return True
    if all(failure.proof_of_death(m, info) for info in current.members):
        return False
    if any(info.id == server for info in current.serving):
        return server not in current.lost_servers
    return not current.complete and any(info.id == server for info in current.leaving_servers)


def let_servers_go(m: Membership) -> list[Effect]:
    """ServerLeave: to servers that are leaving and that nobody needs."""
    effects: list[Effect] = []
    for record in m.servers.values():
        if record.connected and record.leaving and not is_needed(m, record.info.id):
            record.dismissed = True
            effects += once(record, "leave", ServerLeave(record.leaving))
    return effects


def forget_servers(m: Membership) -> None:
    """Drop processes that are gone and that no generation names."""
    current = m.current
    named = set() if current is None else {i.id for i in (*current.servers, *current.leaving_servers)}
    for server, record in list(m.servers.items()):
        if not record.connected and server not in named and proof_of_death(m, record.info):
            del m.servers[server]


def settled(m: Membership) -> bool:
    """Whether a generation runs with exactly the servers that are wanted, and nothing is being copied."""
    current = m.current
    if current is None or current.closing or not current.complete or current.unsettled:
        return False
    if m.servers_wanted and current.adopted and not current.formed.issuperset(current.ids):
        return False  # its members have not said yet what is on which servers
    return tuple(info.slot for info in current.serving) == tuple(range(m.servers_wanted))


def hold(m: Membership, record: Record, state: StateName | None) -> None:
    """Write down which state a process holds.

    Args:
        m: facts of the membership.
        record: of the process; it is changed.
        state: its name; None: the process holds none.
    """
    record.state = state
    if state is not None and m.void is not None and state <= m.void:
        record.state, record.voided = None, not record.can_go_back
    record.voided = record.voided or record.stuck


def void(m: Membership, generation: Generation, said: Parked) -> None:
    """Note that the servers of a generation, or its members in shards, lack the state that it begins from:
    nobody holds it, or an older one.

    Args:
        m: facts of the membership, which are changed.
        generation: the current one.
        said: word of the member that found it out.
    """
    state = generation.start.state if generation.start is not None else said.state
    if state is None or (m.void is not None and state <= m.void):
        return
    who, more = ", ".join(dict.fromkeys(m.lost_servers)), f": {said.detail}" if said.detail else ""
    if who:
        m.void_reason = f"StateLost: parameter server {who} took its parameters with it"
    elif generation.servers:
        m.void_reason = f"StateLost: the parameter servers do not hold {state}{more}"
    else:  # the workers hold it in shards
        m.void_reason = f"StateLost: the workers that are left do not hold {state}{more}"
    m.void, m.void_found_by = state, generation.name
    for record in m.members.values():
        hold(m, record, record.state)
