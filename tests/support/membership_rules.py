"""The rules of membership that keep the promises, each of which a test can take out from outside.

Property tests show that a promise breaks without a rule: what the rule is must be what does it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from springtide_coordinator.membership import (
    Membership,
    boundary,
    failure,
    group_size,
    hello,
    running_loop,
    saving,
    seats,
    servers,
    succession,
)
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.messages import ServerInfo, Standing
from springtide_protocol.names import GenerationName, StateName

Rule = tuple[Callable[..., Any], Callable[..., Any]]  # the function of the rule, and what is there without it


def _candidate(m: Membership, record: Record) -> bool:
    active = record.connected and record.standing is Standing.ACTIVE
    return not record.voided and (record.parked or active)


def _first_state(m: Membership, pool: Sequence[Record]) -> StateName | None:
    return next((record.state for record in pool if record.state is not None), None)


def _settled(m: Membership, now: float) -> list[str]:
    m.settled = True
    return []


def _name_of_old_incarnation(m: Membership) -> GenerationName:
    m.generations += 1
    made_by = m.incarnation if m.current is None else m.current.name.incarnation
    return GenerationName(made_by, m.generations)


def _all_leavers(
    m: Membership, leavers: list[Record], staying: int, holders: int, now: float
) -> list[Record]:
    return list(leavers)


def _all_of_pool(pool: Sequence[Record], holders: Sequence[Record] = (), most: int = 0) -> tuple[Record, ...]:
    return tuple(pool[: most or len(pool)])


def _servers_there(m: Membership, now: float) -> tuple[ServerInfo, ...]:
    return tuple(record.info for record in m.servers.values() if record.usable)


RULES: dict[str, list[Rule]] = {
    # A generation is made from parked members alone.
    "parked_only": [
        (succession.is_candidate, _candidate),
        (succession.cannot_commit, lambda record: record is not None and (record.parked or record.connected)),
    ],
    # It begins from the greatest state that one of them holds.
    "greatest_state": [(succession.choose_state, _first_state)],
    # A later incarnation makes none before everybody reported or is known to be gone.
    "wait_for_reports": [
        (hello.settle, _settled),
        (succession.cannot_commit, lambda record: record is None or record.parked),
    ],
    # None is made while a connected member of the old one has not parked.
    "wait_for_survivors": [(succession.not_parked, lambda m, generation, now: None)],
    # Starting anew needs the operator's word that no holder lives.
    "fresh_needs_word": [(succession.may_start_fresh, lambda m: None)],
    # Generations carry the incarnation of the coordinator that made them.
    "own_incarnation": [(Membership.next_name, _name_of_old_incarnation)],
    # A coordinator that hears of a newer one makes no generations.
    "supersede": [(failure.is_outranked, lambda m, newest: False)],
    # Older state is taken only with proof that all holders of newer state are dead.
    "guard_rollback": [(succession.newer_state_at_risk, lambda m, pool, chosen: None)],
    # A silent loss without the operator pauses instead of shrinking.
    "pause_when_deaf": [(failure.paused_without_operator, lambda m, generation, now: False)],
    # EndOk is said only when all members ended at the same state.
    "end_together": [(boundary.ended_together, lambda generation, waiting: True)],
    # The last holders of the state write it to storage before they leave.
    "save_before_leaving": [(saving.saves, lambda m, record: False)],
    # A generation is no larger than its members have room for.
    "room_for_all": [(group_size.choose_members, _all_of_pool)],
    # With standbys, no more take part than are wanted.
    "seats": [(seats.seated, lambda m, staying, holders=(): list(staying))],
    # A generation that begins anew may be in an earlier loop than the last one was.
    "loop_is_forgotten": [(running_loop.forget_loop, lambda m: None)],
    # A leaver goes when a member that stays holds the state.
    "leaver_hands_over": [(boundary.may_leave, _all_leavers)],
    # A server that others have copies of is not waited for.
    "copies_suffice": [(servers.copied, lambda m, without="": False)],
    # A generation begins with one connected server in each slot wanted.
    "all_servers": [(servers.choose_servers, _servers_there)],
    # A lost server ends the generation that it serves.
    "server_loss_ends": [(servers.end_with_servers, lambda generation, now: None)],
    # A state that the servers do not hold is held by nobody.
    "void_is_none": [(servers.void, lambda m, generation, said: None)],
}


def take_out(patch: pytest.MonkeyPatch, *rules: str) -> None:
    """Take rules out of the machine, wherever a module uses them, until the patch is undone."""
    for function, instead in (pair for rule in rules for pair in RULES[rule]):
        for owner in _owners(function):
            patch.setattr(owner, function.__name__, instead)


@contextlib.contextmanager
def without(*rules: str) -> Iterator[None]:
    """Take rules out for a while."""
    with pytest.MonkeyPatch.context() as patch:
        take_out(patch, *rules)
        yield


def _owners(function: Callable[..., Any]) -> list[Any]:
    """The class that a method belongs to, or every module that has imported a function."""
    if "." in function.__qualname__:
        return [Membership]
    modules = [m for name, m in sys.modules.items() if name.startswith("springtide_coordinator.membership")]
    found = [module for module in modules if vars(module).get(function.__name__) is function]
    assert found, f"{function.__name__} is nowhere to be found"
    return found
