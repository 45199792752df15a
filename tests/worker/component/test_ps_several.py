"""Several optimizers and models on servers: the numbers of plain torch, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_members import Store
from ps_servers import TOKEN, names, servers
from ps_snapshots import joined
from torch.optim.swa_utils import AveragedModel
from worker_ranks import Rank, on_ranks, seeded

from springtide.comm.layout import Field, plan_layout
from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop
from springtide.errors import UsageError
from springtide.ps.sharding import plan_chunks
from springtide.ps.step_spec import ServerOptimizers
from springtide.train_step.validation import declare
from springtide_ps.params.chunk import Chunk, ChunkError, StepSpec

SAMPLES, BATCH, EPOCHS = 24, 8, 3
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
Y = X[:, :2].sum(1, keepdim=True)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(-1, 2)), min_size=1, max_size=12), st.integers(1, 60)
)
@settings(deadline=None, max_examples=80)
def test_chunks_hold_one_optimizers_parameters_and_miss_none(
    parameters: list[tuple[int, int]], chunk_bytes: int
) -> None:
    """The number of an optimizer -1: in none."""
    fields = [Field(f"p{i}", (size,), torch.float32) for i, (size, _) in enumerate(parameters)]
    owners = {f"p{i}": owner for i, (_, owner) in enumerate(parameters) if owner >= 0}
    layout = plan_layout(fields, 64)
    found: dict[int, list[int]] = {}
    taken: set[tuple[int, int]] = set()
    chunks = plan_chunks(layout, dict.fromkeys(owners, 0), chunk_bytes, owners)
    assert len({chunk.key for chunk in chunks}) == len(chunks)
    for chunk in chunks:
        assert chunk.nbytes == 4 * (chunk.stop - chunk.start) <= max(4, chunk_bytes)
        span = {(chunk.bucket, element) for element in range(chunk.start, chunk.stop)}
        assert not span & taken
        taken |= span
        for index, _, start, stop in chunk.pieces:
            assert owners[f"p{index}"] == chunk.optimizer
            offset = chunk.start - layout.slots[index].offset
            found.setdefault(index, []).extend(range(offset + start, offset + stop))
    for index, (size, owner) in enumerate(parameters):
        assert sorted(found.get(index, [])) == (list(range(size)) if owner >= 0 else [])


def test_a_chunk_takes_the_options_of_its_own_optimizer() -> None:
    step_spec = StepSpec(0.5, False, ({"lr": 9.0}, {"lr": 1.0}, {"lr": 3.0}), factors=(7.0, 0.5, 0.5))
    assert StepSpec.from_json(step_spec.to_json()) == step_spec
    chunk = Chunk(torch.zeros(4), [(0, 0, 0, 2), (1, 1, 2, 4)], "sgd", [{"lr": 0.0}, {"lr": 0.0}], 1, 3)
    chunk = Chunk.load(*chunk.dump())
    chunk.apply(torch.ones(4), step_spec)
    assert chunk.values.tolist() == [-0.25, -0.25, -0.75, -0.75]
    with pytest.raises(ChunkError, match="2 parameter groups, not 3"):
        chunk.apply(torch.ones(4), StepSpec(1.0, False, ({"lr": 1.0}, {"lr": 1.0})))
    with pytest.raises(ChunkError, match="2 factors for 3 groups"):
        StepSpec.from_json({**step_spec.to_json(), "factors": [[2, 1.5]]})
    for first, among in ((2, 3), (-1, 3), (0, 1)):
        with pytest.raises(ChunkError, match="are not among"):
            Chunk(torch.zeros(1), [(0, 0, 0, 1)], "sgd", [{}, {}], first, among)


class Pair:
    """Two models; an optimizer for most of both, and one for a layer of the first."""

    def __init__(self) -> None:
        with seeded(7):
            self.body = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5))
            self.head = torch.nn.Linear(5, 1)
        adam = torch.optim.Adam(
            [{"params": self.body[0].parameters()}, {"params": self.head.parameters(), "lr": 0.03}], lr=0.01
        )
        sgd = torch.optim.SGD(self.body[2].parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        self.models, self.optimizers = [self.body, self.head], [adam, sgd]
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.8)

    def step(self, ids: torch.Tensor, number: int, clip: Callable[[int], None] | None = None) -> None:
        """Every second step is of the first optimizer alone."""
        (self.head(self.body(X[ids])) - Y[ids]).square().mean().backward()
        for which, optimizer in enumerate(self.optimizers):
            if which == 0 or number % 2:
                if clip is not None:
                    clip(which)
                optimizer.step()
                if which == 0:
                    # The step has been made with what it was.
                    self.schedule.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for m in self.models for p in m.parameters()]).clone()


def global_batches() -> list[torch.Tensor]:
    plan, cursor, found = (
        plan_loop(torch.arange(SAMPLES), batch_size=BATCH, epochs=EPOCHS, seed=0),
        Cursor(),
        [],
    )
    while not plan.ended(cursor):
        found.append(plan.global_ids(cursor))
        cursor = plan.advance(cursor)
    return found


Body = Callable[[Pair, torch.Tensor, int], None]


def train(
    size: int, clip_norm: float | None, body: Body = Pair.step, **how: Any
) -> list[tuple[torch.Tensor, Any]]:
    """Train a pair of models.

    Returns:
        for each worker, the values, and the state of all optimizers in the form that a checkpoint has.
    """
    store = Store()

    def script(rank: Rank) -> tuple[torch.Tensor, Any]:
        pair = Pair()
        rank.distribute(pair.models, pair.optimizers, clip_norm=clip_norm, schedule=pair.schedule)
        rank.enter_servers(names(running), store)
        for batch in rank.batches(torch.arange(SAMPLES), batch_size=BATCH, epochs=EPOCHS, seed=0):
            with rank.step():
                body(pair, batch.data, rank.step_number)
        rank.runtime.settle(None)
        assert not any(optimizer.state for optimizer in pair.optimizers)
        snapshot = rank.trainer.take_snapshot("the end", rank.rank, range(size))
        assert snapshot is not None
        try:
            return pair.values(), snapshot.collect(rank.runtime.group.rank, size)
        finally:
            snapshot.close()

    with servers(2) as running:
        results = on_ranks(size, script, strategy="ParameterServer", token=TOKEN, **how)
    state = joined([part for _, part in results])["optimizer"]
    return [(values, [state[position] for position in sorted(state)]) for values, _ in results]


@pytest.mark.parametrize(
    ("size", "clip_norm", "how"), [(1, None, {}), (2, None, {}), (3, 0.05, {}), (3, 0.05, {"group_size": 2})]
)
def test_each_optimizer_makes_its_own_steps(size: int, clip_norm: float | None, how: dict[str, Any]) -> None:
    plain = Pair()

    def clip(which: int) -> None:
        if clip_norm is not None:
            parameters = [p for group in plain.optimizers[which].param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)

    for number, ids in enumerate(global_batches(), start=1):
        plain.step(ids, number, clip)
    results = train(size, clip_norm, **how)
    for values, state in results:
        assert torch.equal(values, results[0][0])
        torch.testing.assert_close(values, plain.values(), rtol=0, atol=2e-5)
        expected = [o.state[p] for o in plain.optimizers for g in o.param_groups for p in g["params"]]
        assert len(state) == len(expected) == 6
        for ours, theirs in zip(state, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=0, atol=2e-5)


@pytest.mark.parametrize("how", [{}, {"group_size": 2}])
def test_gradients_removed_after_another_step_are_not_used(how: dict[str, Any]) -> None:
    """Weight decay and momentum stay as they were, too."""

    def step(pair: Pair, ids: torch.Tensor, number: int) -> None:
        def take_away(which: int) -> None:
            if which == 1 and number == 3:
                pair.body[2].weight.grad = None

        pair.step(ids, number, take_away)

    plain = Pair()
    for number, ids in enumerate(global_batches(), start=1):
        step(plain, ids, number)
    for values, _ in train(2, None, step, **how):
        torch.testing.assert_close(values, plain.values(), rtol=0, atol=2e-5)


def test_a_state_from_a_checkpoint_is_each_optimizer_s_own() -> None:
    """The state that each optimizer holds when training begins goes to the servers as its own."""
    pair = Pair()
    for number, ids in enumerate(global_batches(), start=1):
        pair.step(ids, number)
    own = dict(
        zip(["w0", "b0", "w2", "b2", "w", "b"], [p for m in pair.models for p in m.parameters()], strict=True)
    )
    optimizers = ServerOptimizers(pair.optimizers, own)
    assert optimizers.owners == {"w0": 0, "b0": 0, "w": 0, "b": 0, "w2": 1, "b2": 1}
    assert own["w2"] in optimizers.state_of(1)
    assert own["w2"] not in optimizers.state_of(0)
    optimizers.forget(list(own.values()))
    assert not any(optimizer.state for optimizer in pair.optimizers)


def one_body(body: Callable[[Rank, Pair], None], **settings: Any) -> None:
    store = Store()

    def script(rank: Rank) -> None:
        pair = Pair()
        rank.distribute(pair.models, pair.optimizers)
        rank.enter_servers(names(running), store)
        for _ in rank.batches(torch.arange(SAMPLES), batch_size=BATCH, seed=0):
            with rank.step():
                pair.head(pair.body(X[:8])).mean().backward()
                pair.optimizers[0].step()
                body(rank, pair)

    with servers(1) as running:
        on_ranks(1, script, strategy="ParameterServer", token=TOKEN, **settings)


LOOSE_GROUPS: dict[str, Any] = {"group_size": 2, "consistency": "Asynchronous"}
TWICE = r"second step of the same optimizer \(Adam\) in one body takes .*consistency Synchronous"


@pytest.mark.parametrize("settings", [{"consistency": "Asynchronous"}, LOOSE_GROUPS])
def test_a_second_step_of_one_optimizer_takes_common_steps(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=TWICE):
        one_body(lambda rank, pair: pair.optimizers[0].step(), **settings)


def _scale_gradient(rank: Rank, pair: Pair) -> None:
    gradient = pair.body[2].weight.grad  # type: ignore[union-attr]
    assert isinstance(gradient, torch.Tensor)
    gradient.mul_(2.0)
    pair.optimizers[1].step()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda rank, pair: rank.report(loss=1.0), r"report\(\) after the last optimizer\.step"),
        (_scale_gradient, r"the gradient of 0\.2\.weight was changed between backward\(\) and"),
        (lambda rank, pair: pair.head.weight.sum().backward(), r"ended without optimizer\.step\(\) after"),
    ],
)
def test_what_a_body_cannot_do(body: Callable[[Rank, Pair], None], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        one_body(body)


def test_what_is_refused_at_once() -> None:
    pair = Pair()

    def check(optimizers: Any = pair.optimizers, consistency: str = "Synchronous", **tracked: Any) -> None:
        declare(
            pair.models,
            optimizers,
            None,
            tracked,
            in_job=True,
            exact=False,
            strategy="ParameterServer",
            consistency=consistency,
        )

    for consistency in ("Synchronous", "BoundedStaleness", "Asynchronous"):
        check(consistency=consistency, schedule=pair.schedule, scaler=torch.amp.GradScaler("cpu"))
        check(pair.optimizers[0], consistency=consistency)
    check(average=AveragedModel(pair.head))
    both = [*pair.optimizers, torch.optim.SGD(pair.head.parameters(), lr=0.1)]
    with pytest.raises(UsageError, match=r"parameter 1\.weight is in two optimizers"):
        ServerOptimizers(both, dict(torch.nn.ModuleList(pair.models).named_parameters()))
