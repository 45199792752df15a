"""What can be tuned (Settings), and the protocol's rules as switches (Rules).

Nobody turns a rule off in production. The switches exist so that the property tests can take out one rule at
a time and show that a promise breaks without it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Patience, in seconds."""

    grace: float = 0.5  # a broken stream may come back within it; a part of the heartbeat limit
    standstill: float = 0.5  # a tick that is later than this shows that this process stood still
    return_after_standstill: float = 4.0  # after that nobody's stream counts as broken for so long
    server_return: float = 10.0  # so long no other process takes the slot of a server whose stream broke
    first_start: float = 10.0  # from `minimum` reached until starting without the missing ones
    joiners: float = 1.0  # a joiner waits this long for others that are starting
    complaint: float = 0.3  # a failed reduction with all streams alive
    parking: float = 30.0  # a member told to park that does not answer is cut off
    operator_silence: float = 15.0  # after it the operator counts as unreachable
    save_margin: float = 10.0  # beyond leave_margin, for a checkpoint; and three times what the last one took
    leave_margin: float = 5.0  # a leaver that alone holds the state goes this long before its pod is killed
    assumed_grace_period: float = 25.0  # of a leaver whose end nobody named (SIGTERM only)
    finish: float = 30.0  # the operator takes a Finished within it, or never
    complaints: int = 3  # generations in a row with a complaint until a member is cut off
    healthy_generation: float = 30.0  # a generation that lived longer ends a row of complaints


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that keep the promises; see the module's docstring."""

    parked_only: bool = True  # a generation is made from parked members alone
    greatest_state: bool = True  # it begins from the greatest state that one of them holds
    wait_for_reports: bool = True  # a later incarnation makes none before everybody reported or is known gone
    wait_for_survivors: bool = True  # none while a connected member of the old one has not parked
    fresh_needs_word: bool = True  # starting anew needs the operator's word that no holder lives
    own_incarnation: bool = True  # generations carry the incarnation of the coordinator that made them
    supersede: bool = True  # a coordinator that hears of a newer one makes no generations
    guard_rollback: bool = True  # older state only with proof that all holders of newer state are dead
    pause_when_deaf: bool = True  # a silent loss without the operator pauses instead of shrinking
    end_together: bool = True  # EndOk only when all members ended at the same state
    save_before_leaving: bool = True  # the last holders of the state write it to storage before they leave
    leaver_hands_over: bool = True  # a leaver goes when a member that stays holds the state
    copies_suffice: bool = True  # a server that others have copies of is not waited for
    all_servers: bool = True  # a generation begins with one connected server in each slot wanted
    server_loss_ends: bool = True  # a lost server ends the generation that it serves
    void_is_none: bool = True  # a state that the servers do not hold is held by nobody
