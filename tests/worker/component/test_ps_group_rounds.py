"""Several backward passes and steps in a body of a group that takes ranges: its numbers are those of one
process, and each range is once in each chunk and slice, whoever looks at what the steps have made, and dies.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from batch_game import (
    BATCH,
    EPOCHS,
    SAMPLES,
    WORDS,
    Body,
    Clip,
    Game,
    X,
    carried,
    closures,
    gan,
    looked_at,
    one_rests,
    one_word,
    plain,
    play,
    recovers,
    scaled,
)
from batch_sums_by_hand import Loose, assert_equal, undisturbed
from ps_members import Store, together
from ps_servers import TOKEN, servers
from worker_groups import addresses
from worker_ranks import on_ranks

from springtide.ps.connections import ServerError
from springtide.ps.context import GroupSettings
from springtide_ps.server.server import Server

torch.set_num_threads(1)
HOW: dict[str, Any] = {"strategy": "ParameterServer", "token": TOKEN}


def both(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """Nobody looks at anything."""
    (game.judge(X[ids], True) + game.judge(game.generator(WORDS[ids]), False)).backward()
    for optimizer in (game.adagrad, game.sgd):
        clip(optimizer)
        optimizer.step()
    game.sgd.zero_grad()
    game.adagrad.zero_grad()


def one_looks(who: int, game: Game, ids: torch.Tensor, clip: Clip) -> None:
    """One of the members looks at what the steps have made, the others at nothing."""
    (game.judge(X[ids], True) + game.judge(game.generator(WORDS[ids]), False)).backward()
    for optimizer in (game.adagrad, game.sgd):
        clip(optimizer)
        optimizer.step()
        with torch.no_grad():
            if game.rank == who:
                game.generator(WORDS[:4])
                game.critic.state_dict()
    game.sgd.zero_grad()
    game.adagrad.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "size", "clip_norm"),
    [
        (both, 2, None),
        (gan, 1, None),
        (gan, 2, 0.05),
        (gan, 3, None),
        (carried, 2, None),
        (carried, 3, 0.05),
        (looked_at, 2, None),
        (looked_at, 3, 0.05),
        (scaled, 2, None),
        (one_rests, 2, 0.05),
        (one_word, 3, None),
        (recovers, 2, None),
        (closures, 2, 0.05),
        (partial(one_looks, 0), 3, None),
        (partial(one_looks, 1), 3, None),
        (partial(one_looks, 2), 3, None),
    ],
)
def test_one_group_makes_the_numbers_of_plain_torch(body: Body, size: int, clip_norm: float | None) -> None:
    store = Store()
    with servers(2) as running:
        results = on_ranks(
            size,
            lambda rank: play(rank, body, clip_norm, running, store),
            consistency="Asynchronous",
            group_size=3,
            **HOW,
        )
        pushed = sum(server.counters.batches for server in running)
        assert sum(server.counters.repeated for server in running) == 0
    order = [torch.cat(parts) for parts in zip(*(found[2] for found in results), strict=True)]
    expected = plain(body, order, clip_norm)
    for game, values, _, audit in results:
        torch.testing.assert_close(values, expected.values(), rtol=0, atol=2e-5)
        assert torch.equal(values, results[0][1])
        assert len(game.seen) == len(expected.seen)
        assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (SAMPLES * EPOCHS, 0, 0)
        assert audit["skipped"] == (EPOCHS if body is scaled else 0)
    for parts, theirs in zip(
        zip(*(found[0].seen for found in results), strict=True), expected.seen, strict=True
    ):
        torch.testing.assert_close(torch.cat(parts), theirs, rtol=0, atol=2e-5)
    assert pushed % (EPOCHS * SAMPLES // BATCH) == 0


def test_ranges_of_two_groups_are_once_in_all() -> None:
    store = Store()
    with servers(2) as running:
        results = on_ranks(
            4,
            lambda rank: play(rank, gan, None, running, store),
            consistency="BoundedStaleness",
            group_size=2,
            **HOW,
        )
        assert sum(server.counters.repeated for server in running) == 0
    for _, values, _, audit in results:
        assert torch.equal(values, results[0][1])
        assert values.isfinite().all()
        assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (SAMPLES * EPOCHS, 0, 0)


# ---- by hand


class Trio:
    """Three workers in groups of two, on two servers."""

    def __init__(self, running: list[Server], table_first: bool) -> None:
        self.running = running

        def member(name: str, address: str) -> Loose:
            return Loose(name, table_first, group=GroupSettings(2, address, 60.0))

        self.all = {name: member(name, address) for name, address in zip("abc", addresses(3), strict=True)}

    def begin(self, names: str) -> list[Loose]:
        """The next generation. Return who is in its first group."""
        store, chosen = Store(), [self.all[name] for name in names]
        together(*(lambda m=m: m.begin(self.running, tuple(names), store) for m in chosen))
        together(*(member.exchange.resolve for member in chosen))
        return chosen[:2]


@pytest.fixture(scope="module", params=[False, True], ids=["layer first", "table first"])
def alone(request: pytest.FixtureRequest) -> tuple[bool, list[torch.Tensor]]:
    """(which steps first, what one worker makes in three bodies)"""
    return request.param, undisturbed(3, request.param, "a")


@pytest.mark.slow
@pytest.mark.parametrize("next_team", ["ab", "ba", "bc", "ca"])
@pytest.mark.parametrize("seen", ["", "a", "ab"])
def test_body_left_between_two_steps_is_completed_by_next_group(
    alone: tuple[bool, list[torch.Tensor]], seen: str, next_team: str
) -> None:
    """A body left between its two steps is completed by the next group, whichever members that has.

    The group's first member has pushed a step whose values one member or both have looked at.
    """
    table_first, wanted = alone
    with servers(2) as running:
        trio = Trio(running, table_first)
        trio.begin("abc")
        together(*(lambda n=n: trio.all[n].half(0, see=n in seen) for n in "ab"))
        for name in set("ab") - set(next_team):
            trio.all[name].exchange.close()
        group = trio.begin(next_team)
        for number in range(3):
            together(*(lambda m=m, n=number: m.half(n) for m in group))
            together(*(member.rest for member in group))
        found = together(*(member.values for member in group))
        assert_equal(found[0], wanted)
        assert_equal(found[1], found[0])
        assert group[0].applied_batches() == {(0, 3)}
        keys = group[0].batches.keys_in_order()
        assert sum(server.counters.batches for server in running) == 3 * len(keys)
        there = len(group[0].first_keys) if seen else 0
        assert sum(server.counters.repeated for server in running) == there
        for member in trio.all.values():
            member.exchange.close()


def test_waiter_for_the_first_members_push_hears_of_its_death() -> None:
    with servers(2) as running:
        trio = Trio(running, table_first=False)
        trio.begin("abc")

        def dies() -> None:
            trio.all["a"].half(0, see=False)
            trio.all["a"].exchange.close()

        def waits() -> None:
            trio.all["b"].half(0, see=False)
            with pytest.raises(ServerError, match="group"):
                trio.all["b"].exchange.settle()

        together(dies, waits)
        group = trio.begin("bc")
        together(*(lambda m=m: m.half(0) for m in group))
        together(*(member.rest for member in group))
        together(*(member.values for member in group))
        assert group[0].applied_batches() == {(0, 1)}
        assert sum(server.counters.repeated for server in running) == 0
        for member in trio.all.values():
            member.exchange.close()
