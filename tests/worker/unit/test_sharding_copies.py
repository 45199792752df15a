"""Copies of shards that differ: found by the sum of hashes, named, and mended by the owner's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharding_world import Member, World, same

from springtide.comm import commit_vote
from springtide.sharding.backend import certain
from springtide.sharding.copies import CopyDigest, Difference
from springtide.train_step.replica_digest import INTERVAL, LIMIT, PIECES

SETS = st.frozensets(st.integers(0, 9))


def trained(nodes: str, seed: int = 0) -> World:
    world = World(list(nodes), seed)
    world.form()
    assert world.train(2)
    return world


def round_of(world: World) -> range:
    """The steps with which all pieces are seen once."""
    pieces = min(PIECES, len(world.members[0].home.shards))
    return range(INTERVAL, INTERVAL * (pieces + 1), INTERVAL)


def balances(world: World) -> list[int]:
    """The sums that the members' votes have in one round."""
    digests = [CopyDigest(member.home) for member in world.members]
    return [
        sum(digest.balance(step, rank) for rank, digest in enumerate(digests)) for step in round_of(world)
    ]


def differences(world: World) -> list[Difference]:
    digests = [CopyDigest(member.home) for member in world.members]
    total = torch.stack([digest.table(rank) for rank, digest in enumerate(digests)]).sum(0)
    found = [digest.differences(total) for digest in digests]
    assert all(one == found[0] for one in found)  # all members find the same
    return found[0]


def shard_of(world: World, member: Member, owned: bool) -> int:
    """A shard with state that the member owns, or has as a buddy."""
    rank, assigned = world.members.index(member), member.home.assigned
    assert assigned is not None
    holders = assigned.owners if owned else assigned.buddies
    numbers = [number for number, holder in enumerate(holders) if holder == rank]
    return next(number for number in numbers if member.home.held.shard_parts(member.home.shards, number))


def flip(member: Member, number: int, key: str) -> None:
    """Change one bit of a shard's state, or of the parameter's values with the key ""."""
    home = member.home
    part = home.held.shard_parts(home.shards, number)[0]
    memory = part.state[key] if key else home.held.values.of(part.stretch)
    memory.reshape(-1).view(torch.int32)[-1] ^= 1


def copies_of(world: World, number: int) -> list[list[Any]]:
    """Return all that its holders have of a shard."""
    found = []
    for rank, member in enumerate(world.members):
        home = member.home
        assert home.assigned is not None
        if rank in home.assigned.holders(number):
            parts = home.held.shard_parts(home.shards, number)
            state = [value for part in parts for _, value in sorted(part.state.items())]
            found.append([*state, *(home.held.values.of(part.stretch).clone() for part in parts)])
    return found


@pytest.mark.parametrize("nodes", ["ab", "abc", "aabbc"])
def test_equal_copies_have_no_balance(nodes: str) -> None:
    world = trained(nodes)
    assert set(balances(world)) == {0}
    assert not differences(world)


def test_one_member_compares_nothing() -> None:
    world = trained("a")
    assert set(balances(world)) == {0}
    assert not CopyDigest(world.members[0].home).table(0).any()


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step", ""])
@pytest.mark.parametrize("owned", [True, False])
def test_one_flipped_bit_is_found_once_in_a_round(key: str, owned: bool) -> None:
    world = trained("abc")
    number = shard_of(world, world.members[1], owned)
    flip(world.members[1], number, key)
    assert len([total for total in balances(world) if total]) >= 1
    (found,) = differences(world)
    # A count of steps is one for all shards of a piece.
    assert number in found.shards
    assert key == "step" or found.shards == (number,)
    assert (found.owner if owned else found.buddy) == 1


def doubt(world: World) -> list[Difference]:
    found = differences(world)
    for rank, member in enumerate(world.members):
        CopyDigest(member.home).doubt(found, rank)
    return found


@pytest.mark.parametrize("key", ["exp_avg_sq", ""])
def test_a_buddys_odd_copy_is_mended_at_the_next_generation(key: str) -> None:
    world = trained("abc")
    number = shard_of(world, world.members[2], owned=False)
    flip(world.members[2], number, key)
    assert doubt(world)
    world.form()
    assert set(balances(world)) == {0}
    world.check()
    assert world.train(2)
    world.check()


def test_an_owners_odd_copy_counts_and_both_are_equal() -> None:
    world = trained("abc")
    number = shard_of(world, world.members[0], owned=True)
    flip(world.members[0], number, "exp_avg")
    kept = copies_of(world, number)
    assert doubt(world)
    world.form()
    one, other = copies_of(world, number)
    assert all(same(here, there) for here, there in zip(one, other, strict=True))
    before = [row for row in kept if all(same(a, b) for a, b in zip(row, one, strict=True))]
    assert len(before) == 1  # the owner's, and not the buddy's
    assert set(balances(world)) == {0}


def test_an_odd_copy_is_better_than_none() -> None:
    """The owner is lost before its copy was sent: nobody goes back to a checkpoint."""
    world = trained("abc")
    member = world.members[2]
    number = shard_of(world, member, owned=False)
    assert member.home.assigned is not None
    owner = world.members[member.home.assigned.owners[number]]
    flip(member, number, "exp_avg")
    doubt(world)
    world.lose([owner])
    world.form()
    assert world.restored == 0
    assert set(balances(world)) == {0}


def test_an_owner_that_leaves_hands_its_copy_over() -> None:
    world = trained("abcd")
    member = world.members[2]
    number = shard_of(world, member, owned=False)
    assert member.home.assigned is not None
    owner = world.members[member.home.assigned.owners[number]]
    flip(member, number, "exp_avg")
    doubt(world)
    world.leave([owner])
    world.form()
    world.check()  # the truth was the owner's


@given(st.lists(st.tuples(SETS, SETS), min_size=1, max_size=5))
def test_certain_forgets_no_shard_and_prefers_the_sure(rows: list[tuple[frozenset[int], Any]]) -> None:
    held = [own for own, _ in rows]
    doubted = [odd & own for own, odd in rows]
    found = certain(held, doubted)
    everything = frozenset().union(*held)
    assert frozenset().union(*found) == everything
    for own, odd, kept in zip(held, doubted, found, strict=True):
        assert own - odd <= kept <= own
        for number in kept & odd:
            assert not any(number in other - doubts for other, doubts in zip(held, doubted, strict=True))


@given(st.lists(st.integers(1, LIMIT - 1), min_size=1, max_size=20), st.integers(0, 19), st.booleans())
def test_the_vote_sees_one_copy_that_differs(hashes: list[int], place: int, differs: bool) -> None:
    """Owner i adds its hash, the next member takes its own away."""
    theirs = list(hashes)
    if differs:
        theirs[place % len(hashes)] = hashes[place % len(hashes)] % (LIMIT - 1) + 1
    size = max(2, len(hashes))
    own = [0] * size
    for number, (owner, buddy) in enumerate(zip(hashes, theirs, strict=True)):
        own[number] += owner
        own[(number + 1) % size] -= buddy
    parts = [commit_vote.Contribution(3, 1.0, 1, 0, 0, False, 0.1, [True], [], copies=total) for total in own]
    total = torch.stack([commit_vote.encode(part) for part in parts]).sum(0)
    changed = theirs != hashes
    assert commit_vote.decode(total, parts[0], size).replicas_agree == (not changed)
