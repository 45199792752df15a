"""Steps through real servers over real sockets: members are threads, their commit vote is a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ps_members import Store, build, gradients_of, members, together
from ps_servers import servers

from springtide.errors import SpringtideError, UsageError
from springtide.ps.connections import ServerError
from springtide.ps.generation import ServersLackState
from springtide.ps.sharding import LackError, arrange, place_fresh
from springtide.ps.step_spec import optimizer_name

torch.set_num_threads(1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(
        [{"params": m[0].parameters(), "lr": 0.02}, {"params": m[1:].parameters(), "weight_decay": 0.3}],
        lr=0.01,
    ),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), amsgrad=True),
    # Centered, a small variance is the difference of two larger ones: eps keeps its rounding small.
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True, eps=1e-2),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, lr_decay=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_members_and_two_servers_equal_one_process(name: str, early: bool) -> None:
    make = OPTIMIZERS[name]
    with servers(2) as running, members(2, make, early=early) as (a, b):
        store = Store()
        names = ["m0", "m1"]
        together(
            lambda: a.begin(1, names, running, store, fresh=True),
            lambda: b.begin(1, names, running, store, fresh=True, holds=False),
        )
        reference = build(seed=sum(map(ord, "m0")))
        optimizer = make(reference)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        schedules = [torch.optim.lr_scheduler.StepLR(m.optimizer, 2, gamma=0.5) for m in (a, b)]
        for member in (a, b):
            member.exchange.resolve()
        for step in range(1, 6):
            together(lambda: a.push(0, 2), lambda: b.push(1, 2))
            unused = (3,) if step == 3 else ()
            for member, own in zip((a, b), schedules, strict=True):
                member.commit(scale=0.5, unused=unused)
                member.optimizer.zero_grad()
                member.optimizer.step()
                own.step()
            gradients_of(reference, step, 0, 1)
            for index, parameter in enumerate(reference.parameters()):
                assert parameter.grad is not None
                parameter.grad = None if index in unused else parameter.grad * 0.5
            optimizer.step()
            schedule.step()
        for mine, theirs, expected in zip(a.values(), b.values(), reference.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-4, atol=5e-5)
            print("MAX", name, float((mine - expected.detach()).abs().max()))


def test_step_committed_by_one_survivor_counts_and_no_other() -> None:
    make = OPTIMIZERS["adam"]
    with servers(2) as running, members(3, make, with_norm=True) as (a, b, c):
        store, names = Store(), ["m0", "m1"]
        together(
            lambda: a.begin(1, names, running, store, fresh=True),
            lambda: b.begin(1, names, running, store, fresh=True, holds=False),
        )
        for member in (a, b):
            member.exchange.resolve()
        first, second = together(lambda: a.push(0, 2), lambda: b.push(1, 2))
        assert first == second > 0
        for member in (a, b):
            member.commit()
        before = a.values()
        # Both have prepared step 2; only a has the result of its commit vote, and b is no more.
        together(lambda: a.push(0, 2), lambda: b.push(1, 2))
        a.commit()
        a.exchange.connections.over("b is gone")
        with pytest.raises(ServerError, match="b is gone"):
            a.exchange.settle()
        store, names = Store(), ["m0", "m2"]
        together(
            lambda: a.begin(2, names, running, store, step=2),
            lambda: c.begin(2, names, running, store, step=2, holds=False),
        )
        c.exchange.load_state_dict(a.exchange.state_dict())
        together(a.exchange.resolve, c.exchange.resolve)
        assert all(torch.equal(x, y) for x, y in zip(a.values(), c.values(), strict=True))
        assert not any(torch.equal(x, y) for x, y in zip(a.values(), before, strict=True))
        # Step 3 is prepared by both and committed by nobody: it is dropped.
        at_two = a.values()
        together(lambda: a.push(0, 2), lambda: c.push(1, 2))
        a.begin(3, ["m0"], running, Store(), step=2)
        a.exchange.resolve()
        assert all(torch.equal(x, y) for x, y in zip(a.values(), at_two, strict=True))
        # What the old generation still says is refused.
        c.commit()
        with pytest.raises(ServerError, match="is over"):
            c.exchange.settle()


def test_values_of_committed_step_are_had_when_a_member_died() -> None:
    """A member that committed a step gets its values although the other member has died.

    The servers keep or undo the step as the next generation begins from it or from the one before.
    """
    make = OPTIMIZERS["adam"]
    with servers(3) as running, members(2, make, replication=2) as (a, b):
        names, store = ["m0", "m1"], Store()
        together(
            lambda: a.begin(1, names, running[:2], store, fresh=True),
            lambda: b.begin(1, names, running[:2], store, fresh=True, holds=False),
        )
        together(a.exchange.resolve, b.exchange.resolve)
        reference = build(seed=sum(map(ord, "m0")))
        optimizer = make(reference)

        def expect(member: Any) -> None:
            for mine, expected in zip(member.model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine.detach(), expected.detach(), rtol=1e-4, atol=5e-5)

        def advance(step: int) -> None:
            gradients_of(reference, step, 0, 1)
            optimizer.step()

        def one_commits(one: Any, step: int) -> None:
            """The other one has no result of the step's commit vote, and is gone."""
            together(lambda: a.push(0, 2), lambda: b.push(1, 2))
            one.commit()
            one.exchange.connections.over("the other one is gone")
            with pytest.raises(ServerError, match="is gone"):
                one.exchange.settle()

        together(lambda: a.push(0, 2), lambda: b.push(1, 2))
        a.commit()
        b.commit()
        advance(1)
        a.values()
        for number, step in enumerate((2, 3), start=2):
            one_commits(a, step)
            advance(step)
            for member in (a, b):
                member.exchange.sync_backend.fetches.forget()
            a.exchange.sync_backend.fetches.fetch(a.exchange.chunks, step)
            a.exchange.settle(to_the_end=True)
            expect(a)
            # a goes on from it; a server is new, and gets copies of what stays.
            store = Store()
            there = running[number - 2 : number]
            together(
                lambda number=number, there=there, store=store, step=step: a.begin(
                    number, names, there, store, step=step
                ),
                lambda number=number, there=there, store=store, step=step: b.begin(
                    number, names, there, store, step=step, holds=False
                ),
            )
            b.exchange.load_state_dict(a.exchange.state_dict())
            together(a.exchange.resolve, b.exchange.resolve)
            for member in (a, b):
                member.values()
                expect(member)
        # Once more; a is the one that dies, and b knows of no step 4.
        one_commits(a, 4)
        a.exchange.sync_backend.fetches.forget()
        a.exchange.sync_backend.fetches.fetch(a.exchange.chunks, 4)
        a.exchange.settle(to_the_end=True)
        moved = [parameter.detach().clone() for parameter in a.model.parameters()]
        b.begin(9, ["m1"], running[1:], Store(), step=3)
        b.exchange.fetch_again()
        b.exchange.resolve()
        b.values()
        expect(b)
        assert not any(
            torch.equal(mine, other) for mine, other in zip(b.model.parameters(), moved, strict=True)
        )
        # The optimizer's state has been put back as well.
        for step in (4, 5, 6):
            b.push(0, 1)
            b.commit()
            b.values()
            advance(step)
            expect(b)


def test_committed_values_come_from_the_copy_at_a_servers_loss() -> None:
    """A member that committed a step gets its values from the copy when a server is lost.

    A member that has not committed the step drops it at that loss.
    """
    with servers(2) as running, members(2, OPTIMIZERS["momentum"], replication=2) as (a, b):
        names, store = ["m0", "m1"], Store()
        together(
            lambda: a.begin(1, names, running, store, fresh=True),
            lambda: b.begin(1, names, running, store, fresh=True, holds=False),
        )
        together(a.exchange.resolve, b.exchange.resolve)
        together(lambda: a.push(0, 2), lambda: b.push(1, 2))
        a.commit()
        running[0].close(30.0)
        reading = threading.Thread(target=lambda: a.exchange.settle(to_the_end=True))
        reading.start()
        a.exchange.connections.over("a server is gone")
        reading.join(30)
        assert not reading.is_alive()
        reference = build(seed=sum(map(ord, "m0")))
        optimizer = OPTIMIZERS["momentum"](reference)
        gradients_of(reference, 1, 0, 1)
        optimizer.step()
        for mine, expected in zip(a.model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), expected.detach(), rtol=1e-4, atol=5e-5)


def test_copies_take_over_and_a_lack_is_told_to_all() -> None:
    make = OPTIMIZERS["momentum"]
    with servers(3) as running, members(1, make, replication=2) as (a,):
        a.begin(1, ["m0"], running[:2], Store(), fresh=True)
        a.exchange.resolve()
        for _ in range(3):
            a.push(0, 1)
            a.commit()
        before = a.values()
        # A third server takes the place of the first: it is filled while training goes on.
        a.begin(2, ["m0"], running[1:], Store(), step=3)
        assert not a.exchange.settled
        a.exchange.resolve()
        assert all(torch.equal(x, y) for x, y in zip(a.values(), before, strict=True))
        for _ in range(20):
            a.push(0, 1)
            a.commit()
        number, at = 3, a.step
        for number in range(3, 100):
            a.begin(number, ["m0"], running[1:], Store(), step=a.step)
            a.exchange.resolve()
            if a.exchange.settled:
                break
            a.push(0, 1)
            a.commit()
        assert a.exchange.settled
        a.push(0, 1)
        a.commit()
        at, before = a.step, a.values()
        a.begin(200, ["m0"], running[2:], Store(), step=at)
        a.exchange.resolve()
        for key in a.exchange.chunks:
            a.exchange.context.values.held_keys.discard(key.key)
        a.begin(201, ["m0"], running[2:], Store(), step=at, holds=True)
        a.exchange.context.values.held_keys = set()
        a.exchange.resolve()
        assert all(torch.equal(x, y) for x, y in zip(a.values(), before, strict=True))
        reference = build(seed=sum(map(ord, "m0")))
        optimizer = make(reference)
        for step in range(1, at + 1):
            gradients_of(reference, step, 0, 1)
            optimizer.step()
        for mine, expected in zip(a.values(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-4, atol=5e-5)
        with pytest.raises(ServersLackState, match="held by no server"):
            a.begin(202, ["m0"], running[:1], Store(), step=at)


def test_model_too_large_for_the_servers_is_one_clear_error() -> None:
    """No generation after it would be better: the worker ends, and says what to do."""
    with servers(1, memory_limit=100) as running, members(1, OPTIMIZERS["momentum"]) as (a,):
        told = r"parameter server 127.* does not fit: 0 of 100 .*raise SPRINGTIDE_PS_MEMORY_BYTES"
        with pytest.raises(SpringtideError, match=told):
            a.begin(1, ["m0"], running, Store(), fresh=True)


def test_optimizer_that_servers_lack_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="do not have the optimizer Adamax: use one of SGD, Adam"):
        optimizer_name(torch.optim.Adamax(build().parameters()))


def test_copies_are_kept_until_those_that_take_over_have_theirs() -> None:
    sizes = {str(number): 4 + number % 3 for number in range(9)}
    holders = {key: list(home) for key, home in place_fresh(sizes, ["a", "b", "c"], 2).homes.items()}
    for gone, names in (("a", ["b", "c", "d"]), ("b", ["c", "d", "e", "f"]), ("", ["c"])):
        for having in holders.values():
            having[:] = [server for server in having if server != gone]
        leaving = sorted({server for having in holders.values() for server in having} - set(names))
        for _ in range(3):
            decided = arrange(sizes, names, holders, 2, leaving)
            for key, having in holders.items():
                assert key not in decided.fills or key not in decided.drops
                assert set(decided.homes[key]) <= set(having)
                assert len(decided.homes[key]) >= min(2, len(having), len(names))
                having[:] = sorted({*having, *decided.fills.get(key, ())} - set(decided.drops.get(key, ())))
            if decided.settled:
                break
        assert decided.settled
        load = {
            server: sum(sizes[k] for k, home in decided.homes.items() if home[0] == server)
            for server in names
        }
        assert max(load.values()) <= 1.05 * sum(sizes.values()) / len(names) + max(sizes.values())
    with pytest.raises(LackError, match="1 of 9 chunks are held by no server, 4 for one"):
        arrange(sizes, ["c"], {**holders, "4": []}, 2)


def test_joining_server_gets_its_share_while_others_give_up_some() -> None:
    with servers(4) as running, members(1, OPTIMIZERS["momentum"], replication=2) as (a,):
        a.begin(1, ["m0"], running[:3], Store(), fresh=True)
        a.exchange.resolve()
        for number, there in ((2, running[1:3]), (3, running[1:4])):
            a.begin(number, ["m0"], there, Store(), step=a.step)
            a.exchange.resolve()
            assert not a.exchange.settled
            for _ in range(1000):
                a.push(0, 1)
                a.commit()
                if a.exchange.copied():
                    break
            else:
                raise AssertionError("the copies do not come")
        a.begin(4, ["m0"], running[1:4], Store(), step=a.step)
        assert a.exchange.settled
        a.exchange.resolve()
        reference = build(seed=sum(map(ord, "m0")))
        optimizer = OPTIMIZERS["momentum"](reference)
        for step in range(1, a.step + 1):
            gradients_of(reference, step, 0, 1)
            optimizer.step()
        for mine, expected in zip(a.values(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-4, atol=5e-5)
