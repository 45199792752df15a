"""Sizing, policy Capacity: extra workers beyond `replicas` as long as nodes take them.

All the room up to maxReplicas is tried at once. Workers that no node has taken within the patience are given
back, and the next try waits longer each time; nodes that come bring it forward. Extras are given back first:
as soon as a pod that is needed, of this job or another's, finds no node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from springtide_operator.api import reasons
from springtide_operator.plan.values import parse_time, timestamp

RETRY_LIMIT_SECONDS = 600.0
YIELD_SECONDS = 10.0  # from one giving back for others to the next: the scheduler has to use the room
SHOWN = 3


@dataclass(frozen=True)
class Room:
    """Room in the cluster for one job. Counts are worker pods that live; times are seconds.

    `placed`: those that a node has taken. `stuck`: the scheduler has said of one that no node takes it.
    `leaving`: pods of the job that end and still have their place. `crowd`: needed pods of others that no
    node takes. `refused`: the API server's words while it creates no more pods. `open_nodes`: how many nodes
    take pods; None where they cannot be read. `may_grow`: the job is not about to end. `held_back`: workers
    that failed are made again later, so what lacks a node is not for want of one. `what`: the pods beyond
    `replicas`, in words, and `limit`: what they are limited by; "": maxReplicas.
    """

    replicas: int
    maximum: int
    patience: float
    placed: int
    stuck: bool = False
    leaving: int = 0
    crowd: tuple[str, ...] = ()
    refused: str = ""
    open_nodes: int | None = None
    may_grow: bool = True
    held_back: bool = False
    what: str = "extra workers"
    limit: str = ""

    @property
    def most(self) -> str:
        """Return what the pods beyond are limited by, in words."""
        return self.limit or f"maxReplicas {self.maximum}"


@dataclass(frozen=True)
class Extras:
    """The state; in status between rounds. Times are unix seconds.

    `workers`: the size last settled on, which people are told of.
    """

    extra: int = 0
    workers: int = 0
    trying_since: float | None = None
    failures: int = 0
    retry_at: float = 0.0
    open_nodes: int | None = None
    returned_at: float | None = None
    reason: str = ""
    message: str = ""

    @classmethod
    def from_status(cls, entry: dict[str, Any]) -> Extras:
        return cls(
            extra=entry.get("extra", 0),
            workers=entry.get("workers", 0),
            trying_since=parse_time(entry.get("tryingSince")),
            failures=entry.get("failures", 0),
            retry_at=parse_time(entry.get("retryTime")) or 0.0,
            open_nodes=entry.get("openNodes"),
            returned_at=parse_time(entry.get("returnedTime")),
            reason=entry.get("reason", ""),
            message=entry.get("message", ""),
        )

    def to_status(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "workers": self.workers,
            "reason": self.reason,
            "message": self.message[:1024],
            "extra": self.extra,
            "failures": self.failures,
        }
        if self.trying_since is not None:
            result["tryingSince"] = timestamp(self.trying_since)
        if self.retry_at:
            result["retryTime"] = timestamp(self.retry_at)
        if self.open_nodes is not None:
            result["openNodes"] = self.open_nodes
        if self.returned_at is not None:
            result["returnedTime"] = timestamp(self.returned_at)
        return result

    def wakes(self, room: Room, now: float) -> list[float]:
        """Return when to look again, where no event would wake the job; in seconds on the caller's clock.

        Args:
            room: in the cluster.
            now: seconds on the same clock.
        """
        result = []
        if self.trying_since is not None:
            result.append(self.trying_since + room.patience)
        elif room.replicas + self.extra < room.maximum and not room.crowd:
            result.append(self.retry_at)
        if room.crowd and self.extra:
            result.append((self.returned_at or now) + YIELD_SECONDS)
        return [at for at in result if at > now]


def wait(failures: int, patience: float) -> float:
    """Return the seconds before the next try.

    Args:
        failures: tries in a row that found no room.
        patience: seconds for which a try waits for nodes.
    """
    return min(RETRY_LIMIT_SECONDS, patience * 2.0 ** min(failures, 16))


def step(state: Extras, room: Room, now: float) -> Extras:
    """Return the next state: one round's decision, with its reason.

    Args:
        state: of the last round.
        room: workers as they are, and what limits them.
        now: in unix seconds.
    """
    most = max(0, room.maximum - room.replicas)
    state = replace(state, extra=min(state.extra, most))
    if room.crowd or (room.stuck and room.placed < room.replicas):
        return _settled(_yield(state, room, now), room)
    if room.placed < room.replicas:
        text = f"{room.placed} of {room.replicas} workers have a node"
        return _settled(replace(state, reason=reasons.SIZE_WAITING, message=text), room)
    if room.placed < room.replicas + state.extra:
        return _settled(_wait_for_nodes(state, room, now), room)
    state = replace(state, trying_since=None)
    if state.extra >= most:
        text = f"nodes have taken all {most} {room.what} up to {room.most}"
        if not most:
            text = f"replicas is maxReplicas, {room.maximum}"
        reason = reasons.SIZE_MAXIMUM
        return _settled(
            replace(state, failures=0, retry_at=0.0, open_nodes=None, reason=reason, message=text), room
        )
    appeared = (room.open_nodes or 0) > state.open_nodes if state.open_nodes is not None else False
    if room.may_grow and not room.refused and (appeared or now >= state.retry_at):
        text = f"{room.what} up to {room.most} are tried"
        if appeared:
            text += ": a node has come"
        return _settled(
            replace(state, extra=most, trying_since=now, reason=reasons.SIZE_TRYING, message=text), room
        )
    if state.reason in ("", reasons.SIZE_WAITING, reasons.SIZE_MAXIMUM, reasons.SIZE_YIELDED):
        text = f"{state.extra or 'no'} {room.what}"
        if state.retry_at > now:
            text += f"; {_next(state)}"
        reason = reasons.SIZE_EXTRA if state.extra else reasons.SIZE_WAITING
        state = replace(state, reason=reason, message=text)
    return _settled(state, room)


def _wait_for_nodes(state: Extras, room: Room, now: float) -> Extras:
    """Some extras have no node yet."""
    since = state.trying_since if state.trying_since is not None else now
    got = room.placed - room.replicas
    if room.held_back:
        return state
    if not room.refused and now - since < room.patience:
        if state.trying_since is None:  # they had one before
            text = f"{got} of {state.extra} {room.what} have a node"
            state = replace(state, reason=reasons.SIZE_TRYING, message=text)
        return replace(state, trying_since=since)
    why = f"no node took {state.extra - got} of the {room.what} within {room.patience:g} s"
    if room.refused:
        why = f"the API server refuses more pods: {room.refused[:300]}"
    before = max(0, state.workers - room.replicas)
    failures = 1 if got > before else state.failures + 1
    state = _failed(replace(state, extra=got, failures=failures), room, now)
    reason = reasons.SIZE_EXTRA if got else reasons.SIZE_NO_ROOM
    return replace(state, reason=reason, message=f"{got} {room.what}: {why}; {_next(state)}")


def _yield(state: Extras, room: Room, now: float) -> Extras:
    """A pod that is needed finds no node: extras that have none go at once, the others one for each such
    pod, and then the scheduler gets time to use the room.
    """
    placed = max(0, room.placed - room.replicas)
    keep = min(state.extra, placed)
    rested = state.returned_at is None or not 0 <= now - state.returned_at < YIELD_SECONDS
    if room.crowd and keep and not room.leaving and rested:
        keep -= min(keep, len(room.crowd))
    who = ", ".join(room.crowd[:SHOWN])
    if len(room.crowd) > SHOWN:
        who += f" and {len(room.crowd) - SHOWN} more"
    if not who:
        who = f"{room.replicas - room.placed} of this job's own {room.replicas} workers"
    if keep == state.extra:
        if state.extra == 0 and state.reason != reasons.SIZE_YIELDED:
            text = f"no {room.what} while others find no node: {who}"
            return replace(state, trying_since=None, reason=reasons.SIZE_YIELDED, message=text)
        return replace(state, trying_since=None)
    text = f"{state.extra - keep} {room.what} are given back: no node takes {who}"
    placed_went = keep < placed
    state = _failed(replace(state, extra=keep, failures=state.failures + 1), room, now)
    return replace(
        state,
        returned_at=now if placed_went else state.returned_at,
        reason=reasons.SIZE_YIELDED,
        message=text,
    )


def _failed(state: Extras, room: Room, now: float) -> Extras:
    return replace(
        state,
        trying_since=None,
        retry_at=now + wait(state.failures, room.patience),
        open_nodes=room.open_nodes,
    )


def _next(state: Extras) -> str:
    return f"the next try is after {timestamp(state.retry_at)}"


def _settled(state: Extras, room: Room) -> Extras:
    """Return the state with the size that status shows: unchanged while extras are tried, lowered at once
    when they are given back.
    """
    workers = room.replicas + state.extra
    if state.trying_since is None:
        return replace(state, workers=workers)
    return replace(state, workers=min(workers, max(state.workers, room.replicas)))
