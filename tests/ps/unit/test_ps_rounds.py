"""The rules of synchronous steps on servers: several servers, members that die, words that get lost."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from springtide_ps.params.chunk import StepSpec
from springtide_ps.server.step_protocol import Effect, StaleError, StepProtocol, StepProtocolError

SERVERS = 2
STEP_SPEC = StepSpec(1.0, False, ({},))


def entered(token: tuple[int, int, int] = (1, 0, 1), members: tuple[str, ...] = ("a", "b")) -> StepProtocol:
    rounds = StepProtocol()
    for _ in members:
        rounds.enter(token, members, 0, "L")
    return rounds


def prepare_all(rounds: StepProtocol, token: tuple[int, int, int], step: int) -> None:
    for member in sorted(rounds.members):
        rounds.stage(token, step, member, "k")
    for member in sorted(rounds.members):
        rounds.prepare(token, step, member, 1)


def test_a_step_is_made_when_all_have_committed() -> None:
    rounds, token = entered(), (1, 0, 1)
    assert rounds.stage(token, 1, "a", "k")
    assert rounds.prepare(token, 1, "a", 1) == []
    with pytest.raises(StepProtocolError, match="which b did not prepare"):
        rounds.commit(token, 1, "a", STEP_SPEC)
    assert not rounds.stage(token, 1, "b", "k")
    assert rounds.prepare(token, 1, "b", 1) == [Effect.PREPARED]
    assert rounds.commit(token, 1, "a", STEP_SPEC) == []
    assert rounds.version == 0
    assert rounds.commit(token, 1, "b", STEP_SPEC) == [Effect.APPLY]
    assert rounds.version == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r, t: r.stage((1, 0, 0), 1, "a", "k"), "is over"),
        (lambda r, t: r.stage((2, 0, 0), 1, "a", "k"), "has not entered"),
        (lambda r, t: r.stage(t, 2, "a", "k"), "this server is at 0"),
        (lambda r, t: r.stage(t, 1, "z", "k"), "no member"),
        (lambda r, t: [r.stage(t, 1, "a", "k") for _ in range(2)], "twice"),
        (lambda r, t: r.prepare(t, 1, "a", 3), "has sent 0 gradients of step 1 and says 3"),
        (lambda r, t: r.may_fetch(t, 2), "asked for"),
    ],
)
def test_words_that_do_not_belong_to_the_step(call, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(StepProtocolError, match=message):
        call(entered(), (1, 0, 1))


def test_a_new_generation_refuses_the_old_one() -> None:
    rounds = entered()
    assert rounds.enter((1, 0, 2), ("b",), 0, "L") == [Effect.FENCE, Effect.DROP]
    with pytest.raises(StaleError):
        rounds.enter((1, 0, 1), ("a", "b"), 0, "L")
    assert rounds.enter((1, 1, 0), ("b",), 0, "L") == [Effect.FENCE, Effect.DROP]


def test_step_one_survivor_committed_is_made_by_next_generation() -> None:
    rounds = entered()
    prepare_all(rounds, (1, 0, 1), 1)
    assert rounds.enter((1, 0, 2), ("b", "c"), 1, "L") == [Effect.FENCE]
    assert rounds.enter((1, 0, 2), ("b", "c"), 1, "L") == []
    assert not rounds.ready
    with pytest.raises(StepProtocolError, match="nobody says how"):
        rounds.resolve((1, 0, 2), None)
    assert rounds.resolve((1, 0, 2), STEP_SPEC) == [Effect.APPLY]
    assert rounds.resolve((1, 0, 2), STEP_SPEC) == []
    assert rounds.ready
    assert rounds.version == 1


def test_another_training_run_is_forgotten_even_at_same_step() -> None:
    rounds = entered()
    assert rounds.enter((1, 0, 2), ("a",), 0, "other") == [Effect.FENCE, Effect.FORGET]
    prepare_all(rounds, (1, 0, 2), 1)
    # All gradients are here, but not those that made the other run's step 1.
    assert rounds.enter((1, 0, 3), ("a",), 1, "third") == [Effect.FENCE, Effect.FORGET]
    # Incomplete gradients are no step.
    rounds.stage((1, 0, 3), 2, "a", "k")
    assert rounds.enter((1, 0, 4), ("a",), 2, "third") == [Effect.FENCE, Effect.FORGET]


def test_step_is_tried_for_its_committer_and_undone_after_it() -> None:
    rounds, token = entered(), (1, 0, 1)
    prepare_all(rounds, token, 1)
    with pytest.raises(StepProtocolError, match="a needs step 1, which it has not committed"):
        rounds.try_step(token, 1, "a")
    assert rounds.commit(token, 1, "a", STEP_SPEC) == []
    assert rounds.try_step(token, 1, "a") == [Effect.TRY]
    assert rounds.try_step(token, 1, "a") == []
    assert rounds.version == 0
    assert rounds.enter((1, 0, 2), ("a",), 1, "L") == [Effect.FENCE]
    # The only one that knows of it dies before the others hold the state.
    assert rounds.enter((1, 0, 3), ("b",), 0, "L") == [Effect.FENCE, Effect.ROLL_BACK, Effect.DROP]
    prepare_all(rounds, (1, 0, 3), 1)
    assert rounds.commit((1, 0, 3), 1, "b", STEP_SPEC) == [Effect.APPLY]
    assert rounds.try_step((1, 0, 3), 1, "b") == []


class Training(RuleBasedStateMachine):
    """Members and servers exchange words one by one; members die and new generations begin at any moment.

    The commit vote is modelled as it is: it completes for a member only if all members of the generation
    have entered it, and then some may hear the result and others not. A server's step is recorded as the set
    of members whose gradients are in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.servers = [StepProtocol() for _ in range(SERVERS)]
        self.made: list[dict[int, frozenset[str]]] = [{} for _ in range(SERVERS)]
        self.sums: list[set[str]] = [set() for _ in range(SERVERS)]
        self.tried: list[frozenset[str] | None] = [None] * SERVERS
        self.number = 0
        self.born = 0
        self.truth: dict[int, frozenset[str]] = {}  # step -> members whose gradients are in it
        self.step: dict[str, int] = {}  # of living members: last committed step
        self.begin({"m1", "m2", "m3"}, 0)

    def begin(self, members: set[str], step: int) -> None:
        self.number += 1
        self.token = (1, 0, self.number)
        self.members = members
        self.base = step
        self.first = self.number == 1
        if self.first:
            self.step = dict.fromkeys(members, 0)
        leader = min(m for m in members if self.step.get(m) == step)
        self.to_enter = {(leader, s) for s in range(SERVERS)}
        self.resolving = False
        self.to_resolve: set[tuple[str, int]] = set()
        self.in_reduction: set[str] = set()
        self.to_commit: set[tuple[str, int]] = set()
        self.reasons: set[tuple[str, int]] = set()
        self.sent: set[tuple[str, int]] = set()
        self.ready: set[int] = set()  # servers that have all gradients of the step

    def apply(self, s: int) -> None:
        tried = self.tried[s]
        self.made[s][self.servers[s].version] = frozenset(self.sums[s]) if tried is None else tried
        self.sums[s], self.tried[s] = set(), None

    @rule(random=st.randoms(use_true_random=False), words=st.integers(1, 25))
    def go_on(self, random: Random, words: int) -> None:
        """Some of what can happen next, happens, in any order."""
        for _ in range(words):
            can = self.possible()
            if not can:
                return
            act, arguments = random.choice(can)
            act(*arguments)
            self.servers_hold_what_was_committed()

    def possible(self) -> list[tuple[Callable[..., None], tuple[object, ...]]]:
        can: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        can += [(self.enter, word) for word in sorted(self.to_enter)]
        if not self.to_enter and not self.resolving:
            lacking = sorted(m for m in self.members if self.step.get(m) != self.base)
            can += [(self.receive_the_state, (member,)) for member in lacking]
            if not lacking:
                can.append((self.pass_the_barrier, ()))
        can += [(self.resolve, word) for word in sorted(self.to_resolve)]
        if self.resolving:
            can += [(self.send, word) for word in self.may_send()]
            if self.in_reduction == self.members:
                waiting = sorted(m for m in self.members if (m, 0) in self.sent)
                can += [(self.reduction_completes_for, (member,)) for member in waiting]
        can += [(self.commit, word) for word in sorted(self.to_commit)]
        can += [(self.values_are_needed, word) for word in sorted(self.reasons)]
        return can

    def enter(self, member: str, s: int) -> None:
        self.to_enter.discard((member, s))
        effects = self.servers[s].enter(self.token, self.members, self.base, "L")
        if Effect.ROLL_BACK in effects:
            self.tried[s] = None
        if Effect.DROP in effects:
            self.sums[s] = set()
        if Effect.FORGET in effects:
            assert self.first, "a server forgot the state that survivors name"
        if Effect.APPLY in effects:
            self.apply(s)

    def receive_the_state(self, member: str) -> None:
        self.step[member] = self.base

    def resolve(self, member: str, s: int) -> None:
        self.to_resolve.discard((member, s))
        if Effect.APPLY in self.servers[s].resolve(self.token, STEP_SPEC if self.base else None):
            self.apply(s)

    def pass_the_barrier(self) -> None:
        """Begin the barrier after the transfers: nobody passes before all hold the state."""
        self.resolving = True
        self.to_resolve = {(m, s) for m in self.members for s in range(SERVERS)}

    def may_send(self) -> list[tuple[str, int]]:
        return [
            (m, s)
            for m in sorted(self.members)
            for s in range(SERVERS)
            if (m, s) not in self.sent
            and m not in self.in_reduction
            and not any((m, other) in self.to_resolve for other in range(SERVERS))
            and all(server.version == self.step[m] for server in self.servers)
        ]

    def send(self, member: str, s: int) -> None:
        """A member stages and prepares on one server."""
        step = self.step[member] + 1
        self.servers[s].stage(self.token, step, member, "k")
        self.sums[s].add(member)
        effects = self.servers[s].prepare(self.token, step, member, 1)
        self.sent.add((member, s))
        if Effect.PREPARED in effects:
            self.ready.add(s)
        # The answer to `prepare`, without which nobody enters the reduction, comes when the server has all.
        if len(self.ready) == SERVERS:
            self.in_reduction = {m for m in self.members if (m, 0) in self.sent}

    def reduction_completes_for(self, member: str) -> None:
        self.step[member] += 1
        self.truth[self.step[member]] = frozenset(self.members)
        for s in range(SERVERS):
            self.sent.discard((member, s))
            self.reasons.discard((member, s))
            self.to_commit.add((member, s))
        if not self.sent:
            self.in_reduction, self.ready = set(), set()

    def commit(self, member: str, s: int) -> None:
        self.to_commit.discard((member, s))
        self.reasons.add((member, s))
        effects = self.servers[s].commit(self.token, self.step[member], member, STEP_SPEC)
        if Effect.APPLY in effects:
            self.apply(s)

    def values_are_needed(self, member: str, s: int) -> None:
        """Check that a member can fetch the values of a step that it has committed, even if the others have
        died.
        """
        server, step = self.servers[s], self.step[member]
        if Effect.TRY in server.try_step(self.token, step, member):
            self.tried[s] = frozenset(self.sums[s])
        assert server.version == step or (server.version == step - 1 and self.tried[s] == self.truth[step])

    @rule(random=st.randoms(use_true_random=False))
    def generation_changes(self, random: Random) -> None:
        """Any proper subset dies; the survivors' greatest state counts."""
        if self.number == 1 and self.to_enter:
            return  # the first generation makes the chunks; until then there is nothing to go on with
        members, newest = sorted(self.members), max(self.step.values())
        alive = set(random.sample(members, random.randint(1, len(members))))
        if random.random() < 0.3:  # all that know of the newest step
            alive = {member for member in members if self.step.get(member) != newest} or alive
        # Only a member that holds a state can hand it on.
        holders = {m for m in alive if m in self.step}
        if not holders:
            return
        self.step = {m: s for m, s in self.step.items() if m in alive}
        if random.random() < 0.5 and len(alive) < 4:
            self.born += 1
            alive.add(f"j{self.born}")
        self.begin(alive, max(self.step.values()))

    @invariant()
    def servers_hold_what_was_committed(self) -> None:
        for s, server in enumerate(self.servers):
            assert server.tried == (self.tried[s] is not None)
            for step, members in self.made[s].items():
                if step <= max(self.step.values(), default=0):
                    assert members == self.truth[step], f"server {s} made step {step} from {members}"
            if self.step and (self.resolving and not self.to_resolve):
                low, high = min(self.step.values()), max(self.step.values())
                assert low - 1 <= server.version <= high
                assert server.version >= high - 1


def walk(training: Training, random: Random) -> None:
    """A long run without hypothesis: faster, and its steps can be weighed."""
    for _ in range(60):
        training.go_on(random, random.choice((1, 3, 10, 25)))
        training.generation_changes(random)
        training.servers_hold_what_was_committed()


Training.TestCase.settings = settings(deadline=None, max_examples=100, stateful_step_count=20)
TestTraining = pytest.mark.slow(Training.TestCase)
