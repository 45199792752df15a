"""Promises about any history of servers: no generation without them, none goes on without one, and it always
goes on.

The world itself checks (tests/support/coordinator_server_world.py); each rule is taken out in turn, to show
that it notices.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
from coordinator_server_world import BrokenPromise, Server, Worker, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from membership_rules import without

WHICH = st.integers(0, 5)
OFTEN = ["step"] * 4 + ["elapse", "operator", "reconnect"] * 2
SELDOM = ["delete", "break", "scale", "slow", "copied"]
OUT_OF_SIGHT = ["restart", "break worker", "connect one", "connect one"]


def one_of(things: list[Server] | list[Worker], which: int) -> Server | Worker | None:
    alive = [thing for thing in things if thing.alive]
    return alive[which % len(alive)] if alive else None


class LifeWithServers(RuleBasedStateMachine):
    """Random losses, replacements and numbers of servers, with workers and coordinators that come and go."""

    world: World

    @initialize(
        wanted=st.integers(1, 3),
        workers=st.integers(1, 2),
        replication=st.integers(1, 2),
        turn=st.sampled_from([1, 3]),
    )
    def begin(self, wanted: int, workers: int, replication: int, turn: int) -> None:
        self.world = World(wanted, workers, replication=replication, turn=turn)
        self.world.step()

    @rule(which=WHICH)
    def kill_server(self, which: int) -> None:
        if isinstance(server := one_of(list(self.world.servers.values()), which), Server):
            self.world.kill_server(server)

    @rule(which=WHICH)
    def delete_server_pod(self, which: int) -> None:
        if isinstance(server := one_of(list(self.world.servers.values()), which), Server):
            self.world.delete_server_pod(server)

    @rule(which=WHICH)
    def break_server_stream(self, which: int) -> None:
        if server := one_of(list(self.world.servers.values()), which):
            self.world.break_stream(server)

    @rule(which=WHICH)
    def kill_worker(self, which: int) -> None:
        if isinstance(worker := one_of(list(self.world.workers.values()), which), Worker):
            self.world.kill_worker(worker)

    @rule(which=WHICH)
    def break_worker_stream(self, which: int) -> None:
        if worker := one_of(list(self.world.workers.values()), which):
            self.world.break_stream(worker)

    @rule()
    def restart_containers(self) -> None:
        self.world.restart_containers()

    @rule()
    def reconnect(self) -> None:
        self.world.reconnect()

    @rule()
    def operator(self) -> None:
        self.world.operator()

    @rule(up=st.booleans())
    def operator_comes_and_goes(self, up: bool) -> None:
        self.world.operator_up = up

    @rule(wanted=st.integers(1, 3))
    def scale_servers(self, wanted: int) -> None:
        self.world.wanted = wanted

    @rule(slow=st.booleans())
    def copies(self, slow: bool) -> None:
        self.world.copied()
        self.world.copies_take_long = slow

    @rule()
    def restart_coordinator(self) -> None:
        self.world.restart_coordinator()

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0, 20.0]))
    def elapse(self, seconds: float) -> None:
        self.world.elapse(seconds)

    @rule(times=st.integers(1, 3))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.step()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.must_go_on()


LifeWithServers.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestLifeWithServers = pytest.mark.slow(LifeWithServers.TestCase)


def walk(seed: int, events: int = 60, kills: bool = True, more: Sequence[str] = ()) -> World:
    """Random things by seed, then undisturbed. Raises BrokenPromise."""
    kinds = [*OFTEN, *SELDOM, *more, "kill" if kills else "delete"]
    chance = random.Random(seed)
    sizes = chance.randint(1, 3), chance.randint(1, 2)
    world = World(*sizes, replication=chance.randint(1, 2))
    for _ in range(events):
        server = one_of(list(world.servers.values()), chance.randrange(6))
        match chance.choice(kinds):
            case "step":
                world.step()
            case "kill" if isinstance(server, Server):
                world.kill_server(server)
            case "delete" if isinstance(server, Server):
                world.delete_server_pod(server)
            case "break" if server is not None:
                world.break_stream(server)
            case "break worker" if worker := one_of(list(world.workers.values()), chance.randrange(6)):
                world.break_stream(worker)
            case "connect one":
                world.connect(chance.choice([*world.servers.values(), *world.workers.values()]))
            case "restart":
                world.restart_coordinator()
            case "elapse":
                world.elapse(chance.choice([0.1, 1.0]))
            case "scale":
                world.wanted = chance.randint(1, 3)
            case "slow":
                world.copies_take_long = True
            case "copied":
                world.copied()
            case "operator":
                world.operator()
            case "reconnect":
                world.restart_containers()
                world.reconnect()
    world.must_go_on()
    return world


def test_random_walks_break_no_promise() -> None:
    worlds = [walk(seed) for seed in range(60)]
    assert max(world.commits for world in worlds) > 10
    assert any(world.m.states_lost for world in worlds)


@pytest.mark.slow
def test_live_servers_replaced_or_scaled_cost_no_state() -> None:
    for seed in range(150):
        world = walk(seed, kills=False)
        assert not world.void, f"seed {seed} lost {world.void}"
        assert not world.m.states_lost


@pytest.mark.slow
def test_server_that_leaves_stays_while_workers_are_out_of_sight() -> None:
    for seed in range(300):
        world = walk(seed, kills=False, more=OUT_OF_SIGHT)
        assert not world.void, f"seed {seed} lost {world.void}"
        assert not world.m.states_lost


@pytest.mark.slow
def test_one_server_at_a_time_may_be_killed_with_two_copies() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        world = World(chance.randint(2, 3), chance.randint(1, 2), replication=2)
        world.must_go_on()
        for _ in range(4):
            alive = [server for server in world.servers.values() if server.alive]
            world.kill_server(chance.choice(alive))
            for _ in range(chance.randint(0, 6)):
                chance.choice([world.step, world.reconnect, world.operator, partial(world.elapse, 1.0)])()
            world.must_go_on()
        assert not world.void, f"seed {seed} lost {world.void}"


@pytest.mark.parametrize("name", ["all_servers", "server_loss_ends", "void_is_none"])
def test_without_the_rule_a_promise_breaks(name: str) -> None:
    for seed in range(100):
        try:
            with without(name):
                walk(seed)
        except BrokenPromise:
            return
    pytest.fail(f"100 walks without the rule {name} broke no promise: the rule or its check does nothing")
