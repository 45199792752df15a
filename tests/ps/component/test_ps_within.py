"""Rounds and parts of one step on servers: the rules alone, and what a generation's end makes of them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_members import Member, Store, build, gradients_of, members, together
from ps_servers import servers
from worker_groups import addresses

from springtide_ps.params.chunk import BACKWARD_PASSES_LIMIT, Chunk, ChunkError, StepSpec
from springtide_ps.server.intermediate import Substeps, make_substeps
from springtide_ps.server.server import Server
from springtide_ps.server.shard_store import ShardStore
from springtide_ps.server.step_protocol import Effect, StepProtocol, StepProtocolError, Token

FIRST: Token = (1, 0, 1)
SECOND: Token = (1, 0, 2)


def step_spec(*rounds: int, lr: float = 0.1) -> StepSpec:
    """Return a step spec whose substeps take the sums of these backward passes."""
    parts = tuple(
        StepSpec(1.0 + n, False, ({"lr": lr},), backward_pass=number) for n, number in enumerate(rounds)
    )
    return StepSpec(
        **{
            **{name: getattr(parts[-1], name) for name in ("scale", "skip", "groups", "backward_pass")},
            "before": parts[:-1],
        }
    )


def begun(*done: tuple[str, int]) -> StepProtocol:
    """Two members, of whom these have prepared these rounds, one after another, with a gradient each."""
    rounds = StepProtocol()
    rounds.enter(FIRST, ["a", "b"], 0, "run")
    for member, number in done:
        rounds.stage(FIRST, 1, member, "chunk", number)
        rounds.prepare(FIRST, 1, member, 1, number)
    return rounds


def test_a_round_begins_when_all_have_prepared_the_one_before() -> None:
    rounds = begun(("a", 0))
    with pytest.raises(StepProtocolError, match="a is in backward pass 1 of the step, and this server in 0"):
        rounds.stage(FIRST, 1, "a", "chunk", 1)
    rounds = begun(("a", 0), ("b", 0))
    assert rounds.complete
    with pytest.raises(StepProtocolError, match="in backward pass 2"):
        rounds.stage(FIRST, 1, "a", "chunk", 2)
    # The first one to say so begins it, if only by having nothing to send here.
    assert rounds.prepare(FIRST, 1, "a", 0, 1) == []
    assert (rounds.backward_pass, rounds.complete) == (1, False)
    with pytest.raises(StepProtocolError, match="b is in backward pass 0"):
        rounds.stage(FIRST, 1, "b", "chunk", 0)
    assert rounds.stage(FIRST, 1, "b", "chunk", 1)
    assert rounds.prepare(FIRST, 1, "b", 1, 1) == [Effect.PREPARED]


def test_rounds_have_a_limit() -> None:
    rounds = begun(*[(member, number) for number in range(BACKWARD_PASSES_LIMIT) for member in "ab"])
    with pytest.raises(StepProtocolError, match=f"at most {BACKWARD_PASSES_LIMIT}"):
        rounds.stage(FIRST, 1, "a", "chunk", BACKWARD_PASSES_LIMIT)


def test_committed_step_ends_and_missing_round_is_not_committed() -> None:
    rounds = begun(("a", 0), ("b", 0))
    with pytest.raises(
        StepProtocolError, match="a makes backward pass 1 of step 1, which not all have prepared"
    ):
        rounds.commit(FIRST, 1, "a", step_spec(0, 1))
    with pytest.raises(StepProtocolError, match="backward pass 1"):
        rounds.check_substeps(FIRST, 1, "a", step_spec(1))
    rounds.check_substeps(FIRST, 1, "a", step_spec(0, 0))
    rounds.commit(FIRST, 1, "a", step_spec(0))
    with pytest.raises(StepProtocolError, match="b goes on with a step that a has committed"):
        rounds.stage(FIRST, 1, "b", "chunk", 1)
    assert rounds.commit(FIRST, 1, "b", step_spec(0)) == [Effect.APPLY]
    assert (rounds.version, rounds.backward_pass) == (1, 0)
    assert rounds.stage(FIRST, 2, "b", "chunk")


@pytest.mark.parametrize(
    ("done", "step", "effects", "unresolved"),
    [
        ("aabb", 1, [Effect.FENCE], 1),
        ("aabb", 0, [Effect.FENCE, Effect.DROP], None),
        ("aab", 0, [Effect.FENCE, Effect.DROP], None),
        # Whoever has committed has seen the last round complete on all servers, so this one is another run's.
        ("aab", 1, [Effect.FENCE, Effect.FORGET], None),
    ],
)
def test_next_generation_begins_from_whole_step_or_none_of_it(
    done: str, step: int, effects: list[Effect], unresolved: int | None
) -> None:
    order = [("a", 0), ("b", 0), ("a", 1), ("b", 1)][: len(done)]
    rounds = begun(*order)
    assert rounds.enter(SECOND, ["a"], step, "run") == effects
    assert rounds.unresolved == unresolved
    if unresolved is None:
        assert rounds.backward_pass == 0
        return
    assert rounds.backward_pass == 1
    assert rounds.resolve(SECOND, step_spec(0, 1)) == [Effect.APPLY]
    assert (rounds.backward_pass, rounds.version) == (0, 1)


@given(st.lists(st.integers(1, 4), max_size=8), st.lists(st.integers(1, 4), max_size=8), st.data())
@settings(deadline=None, max_examples=80)
def test_members_doing_the_same_agree_in_any_order(a: list[int], b: list[int], data: st.DataObject) -> None:
    """Each of them tells of more and more parts."""
    whole = step_spec(0, 0, 1, 2)
    words = [sorted(a), sorted(b)]
    parts, told = Substeps(), 0
    while any(words):
        own = data.draw(st.sampled_from([word for word in words if word]))
        count = own.pop(0)
        parts, told = parts.with_report(7, whole.first(count)), max(told, count)
        assert parts.first(7, count) == whole.first(count)
        assert parts.step_spec == whole.first(told)
    with pytest.raises(StepProtocolError, match="which nobody has told of"):
        parts.first(7, told + 1)
    with pytest.raises(StepProtocolError, match="which nobody has told of"):
        parts.first(8, 1)
    if told:
        with pytest.raises(
            StepProtocolError, match="the members make different optimizer steps within step 7"
        ):
            parts.with_report(7, step_spec(0, 0, 1, 2, lr=0.2).first(told))
        assert parts.with_report(8, step_spec(0)).first(8, 1) == step_spec(0)


def test_parts_are_made_one_after_another_and_sums_may_be_kept() -> None:
    def chunk() -> Chunk:
        return Chunk(torch.zeros(2), [(0, 0, 0, 2)], "sgd", [{"lr": 0.0, "momentum": 0.5}])

    groups = ({"lr": 1.0, "momentum": 0.5},)
    whole = StepSpec(
        1.0,
        False,
        groups,
        backward_pass=1,
        before=(StepSpec(2.0, False, groups), StepSpec(1.0, False, groups)),
    )
    assert StepSpec.from_json(whole.to_json()) == whole
    totals = {0: torch.ones(2), 1: torch.full((2,), 3.0)}
    kept, used = chunk(), chunk()
    make_substeps(kept, totals, whole, keep=True)
    assert (totals[0].tolist(), totals[1].tolist()) == ([1, 1], [3, 3])
    make_substeps(used, totals, whole, keep=False)
    # Momentum 2, then 1 + 1, then 1 + 3: the sums of backward pass 0 twice.
    assert kept.values.tolist() == used.values.tolist() == [-8.0, -8.0]
    for broken in (
        {"round": -1},
        {"round": BACKWARD_PASSES_LIMIT},
        {"before": [whole.to_json()]},
        {"before": 3},
    ):
        with pytest.raises(ChunkError):
            StepSpec.from_json({**step_spec(0).to_json(), **broken})


# ---- with servers


def test_parts_of_a_step_wait_until_the_one_before_is_made() -> None:
    """The substeps of a step wait until the step before is made on the server.

    That step is decided and its values were sent early, so the member goes on before the server has made it.
    """
    stopped, go = threading.Event(), threading.Event()

    class Slow(ShardStore):
        def make_steps(self, key: str, version: int, trying: bool) -> None:
            if version == 1:
                stopped.set()
                assert go.wait(60)
            super().make_steps(key, version, trying)

    def done(name: str) -> Any:
        return lambda result, error: told.append((name, result if error is None else str(error)))

    told: list[tuple[str, Any]] = []
    shards = Slow(lambda *_: None, lambda *_: lambda: None)
    try:
        shards.enter(FIRST, ["a"], 0, "run")
        shards.load(FIRST, "k", 0, Chunk(torch.ones(2), [(0, 0, 0, 2)], "sgd", [{"lr": 1.0}]))
        for step in (1, 2):
            shards.stage(FIRST, step, "a", "k", torch.full((2,), 0.25))
            shards.prepare(FIRST, step, "a", 1, False, done("prepared"))
            if step == 1:
                shards.commit(FIRST, 1, "a", step_spec(0, lr=1.0), done("committed"))
        assert stopped.wait(60)
        shards.add_substeps(FIRST, 2, "a", step_spec(0, lr=1.0))
        shards.fetch_intermediate(FIRST, 2, "k", 1, done("values"))
        assert [name for name, _ in told] == ["prepared", "committed", "prepared"]
        go.set()
        deadline = time.monotonic() + 60
        while len(told) < 4:
            assert time.monotonic() < deadline, told
            time.sleep(0.002)
        assert told[3][0] == "values"
        assert told[3][1].tolist() == [0.5, 0.5]
        with pytest.raises(StepProtocolError, match="after step 3 are asked for"):
            shards.fetch_intermediate(FIRST, 3, "k", 1, done("never"))
    finally:
        go.set()
        shards.close()


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def expected(steps: int) -> list[torch.Tensor]:
    """The values after so many steps of two rounds, each through what the last one has made."""
    model = build(seed=sum(map(ord, "m0")))
    optimizer = sgd(model)
    for step in range(steps):
        for number in range(2):
            gradients_of(model, 10 * (step + 1) + number, 0, 1)
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def run_rounds(member: Member, part: int, parts: int) -> None:
    """A body up to its end: two rounds with a step each, the values of the first one seen."""
    exchange: Any = member.exchange
    exchange.begin_step()
    for number in range(2):
        if number:
            exchange.begin_backward_pass()
        exchange.settle()
        gradients_of(member.model, 10 * (member.step + 1) + number, part, parts)
        member.flats = [torch.zeros(size) for size in member.layout.sizes]
        for bucket, flat in enumerate(member.flats):
            for index in member.layout.members[bucket]:
                gradient = list(member.model.parameters())[index].grad
                assert gradient is not None
                offset = member.layout.slots[index].offset
                flat[offset : offset + gradient.numel()] = gradient.flatten()
            exchange.push(flat, bucket)
        exchange.prepare()
        exchange.stage(member.optimizer, None, 1.0, 1.0, (), ())


def compare(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("committed", [0, 1, 2])
@pytest.mark.parametrize("replication", [1, 2])
@pytest.mark.parametrize("grouped", [False, True])
def test_step_of_two_rounds_is_whole_or_not_at_generation_end(
    committed: int, replication: int, grouped: bool
) -> None:
    """A step of two backward passes counts as a whole or not at all when the generation ends.

    Args:
        committed: how many of the two members have committed the second step.
        replication: with 2, a server is lost as well.
    """
    places = dict(zip(("m0", "m1"), addresses(2), strict=True))

    with (
        servers(3) as running,
        members(2, sgd, early=True, places=places if grouped else {}, replication=replication) as both,
    ):
        a, _ = both
        names, store = ["m0", "m1"], Store()
        together(*(lambda m=m: m.begin(1, names, running, store, fresh=True, holds=m is a) for m in both))
        together(*(lambda m=m: m.exchange.resolve() for m in both))
        together(*(lambda n=n, m=m: run_rounds(m, n, 2) for n, m in enumerate(both)))
        for member in both:
            member.commit()
        for member in both:
            compare(member.values(), expected(1))
        together(*(lambda n=n, m=m: run_rounds(m, n, 2) for n, m in enumerate(both)))
        for member in both[:committed]:
            member.commit()
        for member in both[committed:]:
            member.exchange.settle()  # seen, and dropped
        if committed == 2:
            for member in both:
                member.exchange.settle()
        left: list[Server] = running
        if replication == 2:
            running[0].close(30.0)
            left = running[1:]
        step, again = 2 if committed else 1, Store()
        if committed:
            for member in both:
                # What passes from a holder to the others.
                member.exchange.load_state_dict(a.exchange.state_dict())
        together(
            *(
                lambda m=m: m.begin(2, names, left, again, step=step, holds=m.step == step or not committed)
                for m in both
            )
        )
        together(*(lambda m=m: m.exchange.resolve() for m in both))
        for member in both:
            compare(member.values(), expected(step))
        together(*(lambda n=n, m=m: run_rounds(m, n, 2) for n, m in enumerate(both)))
        for member in both:
            member.commit()
        for member in both:
            compare(member.values(), expected(step + 1))
