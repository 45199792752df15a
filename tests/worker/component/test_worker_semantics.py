"""Semantics of DDP that users rely on, on real groups: unused parameters, accumulation, clipping, tracked
objects.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from worker_ranks import Rank, on_ranks, seeded

import springtide

SAMPLES, BATCH, EPOCHS = 24, 8, 2
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
Y = X[:, :2].sum(1, keepdim=True)


class Branches(torch.nn.Module):
    """One head for most samples, one for the few of the highest numbers, and one that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
            self.body = torch.nn.Linear(4, 6)
            self.heads = torch.nn.ModuleList([torch.nn.Linear(6, 1) for _ in range(3)])

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        total = torch.zeros(())
        for kind in (0, 1):
            mine = (ids >= 20) == (kind == 1)
            # A head that has no samples here gets no gradient at all: find_unused_parameters in DDP's words.
            if bool(mine.any()):
                total = total + (self.heads[kind](hidden[mine]) - Y[ids[mine]]).square().sum()
        return total / len(ids)


def values(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


def test_parameters_used_by_some_members_and_by_none() -> None:
    """Parts of two samples: in some steps a head has samples on one worker only, or on none."""
    order: list[torch.Tensor] = []
    unused: dict[int, set[int]] = {}

    def script(rank: Rank) -> tuple[torch.Tensor, list[list[bool]]]:
        model = Branches()
        # Weight decay and momentum would move a parameter that got zeros instead of no gradient.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        rank.distribute(model, optimizer)
        seen = []
        for batch in rank.batches((X, torch.arange(SAMPLES)), batch_size=4, epochs=EPOCHS, seed=0):
            x, ids = batch
            number = rank.step_number
            with rank.step():
                model(x, ids).backward()
                optimizer.step()
                seen.append([head.weight.grad is None for head in model.heads])
                optimizer.zero_grad()
            unused.setdefault(number, set()).update(ids.tolist())
            if rank.rank == 0:
                order.append(batch.ids)
        return values(model), seen

    results = on_ranks(2, script)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    expected = []
    for number in sorted(unused):
        ids = torch.tensor(sorted(unused[number]))
        model(X[ids], ids).backward()
        optimizer.step()
        expected.append([head.weight.grad is None for head in model.heads])
        optimizer.zero_grad()
    assert [False, True, True] in expected
    assert [False, False, True] in expected
    for parameters, seen in results:
        assert seen == expected
        torch.testing.assert_close(parameters, values(model), rtol=0, atol=2e-6)


def test_accumulation_clipping_scheduler_and_average_of_weights() -> None:
    """Three micro-batches, whole steps dropped in between: all as on the whole batch in one process."""

    class Net:
        def __init__(self) -> None:
            with seeded(3):
                self.model = torch.nn.Sequential(
                    torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
                )
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=12)
            self.average = torch.optim.swa_utils.AveragedModel(
                self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )

        def finish(self) -> None:
            self.optimizer.step()
            self.scheduler.step()
            self.average.update_parameters(self.model)
            self.optimizer.zero_grad()

    def script(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, float]:
        net = Net()
        rank.distribute(net.model, net.optimizer, clip_norm=0.2, scheduler=net.scheduler, average=net.average)
        attempts = 0
        for batch in rank.batches((X, Y), batch_size=BATCH, epochs=EPOCHS, seed=0):
            attempts += 1
            with rank.step():
                for micro in batch.split(3):
                    x, y = micro
                    (net.model(x) - y).square().mean().backward()
                    if attempts == 3:
                        rank.drop()
                net.finish()
        assert attempts == 7
        return values(net.model), values(net.average), net.optimizer.param_groups[0]["lr"]

    results = on_ranks(2, script)
    net = Net()

    def alone(rank: Rank) -> None:
        for batch in rank.batches((X, Y), batch_size=BATCH, epochs=EPOCHS, seed=0):
            with rank.step():
                x, y = batch
                (net.model(x) - y).square().mean().backward()
                net.finish()

    def plain(rank: Rank) -> None:
        rank.distribute(net.model, net.optimizer, clip_norm=0.2, scheduler=net.scheduler, average=net.average)
        alone(rank)

    on_ranks(1, plain)
    for parameters, average, rate in results:
        torch.testing.assert_close(parameters, values(net.model), rtol=0, atol=1e-5)
        torch.testing.assert_close(average, values(net.average), rtol=0, atol=1e-5)
        assert rate == net.optimizer.param_groups[0]["lr"]


def one_body(body: Any, model: torch.nn.Module) -> None:
    def script(rank: Rank) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank.distribute(model, optimizer)
        for batch in rank.batches((X, torch.arange(SAMPLES)), batch_size=BATCH, seed=0):
            with rank.step():
                body(batch, optimizer)

    on_ranks(1, script)


def test_sparse_gradients_are_refused_with_the_remedy() -> None:
    model = torch.nn.Embedding(SAMPLES, 2, sparse=True)

    def body(batch: Any, optimizer: Any) -> None:
        model(batch[1]).sum().backward()

    with pytest.raises(springtide.UsageError, match=r"weight is sparse.*sparse=False"):
        one_body(body, model)


def test_gradients_scaled_by_hand_are_told() -> None:
    model = torch.nn.Linear(4, 1)

    def body(batch: Any, optimizer: Any) -> None:
        model(batch[0]).sum().backward()
        for parameter in model.parameters():
            parameter.grad *= 2
        optimizer.step()

    with pytest.raises(springtide.UsageError, match=r"gradient was changed between backward.*clip_norm"):
        one_body(body, model)


class Experts(torch.nn.Module):
    """Three experts, each in a bucket of its own; of one batch's samples all go to the same one."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
            self.body = torch.nn.Linear(4, 600)
            self.experts = torch.nn.ModuleList([torch.nn.Linear(600, 1) for _ in range(3)])
            self.first = torch.nn.Linear(600, 1)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        # What is computed first has its gradient last: its bucket, the first one in order, has left by then.
        part = self.experts[expert](hidden)
        return part + self.first(hidden)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_experts_that_come_and_go_train_as_in_one_process(micro_batches: int) -> None:
    """Experts that are used in some steps only train the same as in one process.

    A parameter that no member used in the last step holds up no bucket, and counts although its gradient
    comes late.
    """
    choice = [0, 0, 1, 1, 2, 0, 1, 0, 0, 2, 2, 1]

    def train(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        (model(x, choice[number]) - y).square().mean().backward()

    def script(rank: Rank) -> tuple[torch.Tensor, list[list[int]], list[torch.Tensor]]:
        model = Experts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
        rank.distribute(model, optimizer, clip_norm=1.0)
        late, order = [], []
        for batch in rank.batches((X, Y), batch_size=6, epochs=3, seed=0):
            number = rank.step_number - 1
            with rank.step():
                for x, y in batch.split(micro_batches):
                    train(model, optimizer, x, y, number)
                late.append(
                    [i for i in range(len(list(model.parameters()))) if rank.trainer.buckets.is_late(i)]
                )
                optimizer.step()
                unused = [i for i, expert in enumerate(model.experts) if expert.weight.grad is None]
                assert unused == [i for i in range(3) if i != choice[number]]
                optimizer.zero_grad()
            order.append(batch.ids)
        return values(model), late, order

    first, second = on_ranks(2, script)
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    for number, parts in enumerate(zip(first[2], second[2], strict=True)):
        ids = torch.cat(parts)
        train(model, optimizer, X[ids], Y[ids], number)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    # The bucket of the expert that was used last waits for it, and with it those behind: of lower numbers.
    changes = [number for number in range(1, 12) if choice[number] > choice[number - 1]]
    for parameters, late, _ in (first, second):
        assert [number for number, indices in enumerate(late) if indices] == changes
        torch.testing.assert_close(parameters, values(model), rtol=0, atol=2e-5)


@pytest.mark.parametrize("lists", [False, True])
def test_losses_of_two_backwards_add_up(lists: bool) -> None:
    """Two losses of one forward, or of two; parts of other sizes, micro-batches, a dropped body."""

    def made() -> torch.nn.Module:
        with seeded(4):
            return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def losses(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = model(x)
        return (out[:, :1] - y).square().mean(), 0.3 * (out[:, 1:] + y).abs().mean()

    def script(rank: Rank) -> torch.Tensor:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        rank.distribute([model] if lists else model, [optimizer] if lists else optimizer)
        for attempt, batch in enumerate(rank.batches((X, Y), batch_size=7, epochs=EPOCHS, seed=0)):
            with rank.step():
                for x, y in batch.split(2):
                    first, second = losses(model, x, y)
                    first.backward(retain_graph=True)
                    second.backward()
                    if attempt == 3:
                        rank.drop()
                    losses(model, x, y)[1].backward()
                optimizer.step()
                optimizer.zero_grad()
        return values(model)

    results = on_ranks(2, script)
    model, batches = made(), []

    def plain(rank: Rank) -> None:
        other = torch.nn.Linear(1, 1)
        steps = torch.optim.SGD(other.parameters(), lr=0.1)
        rank.distribute(other, steps)
        for batch in rank.batches((X, Y), batch_size=7, epochs=EPOCHS, seed=0):
            batches.append(batch.ids)
            with rank.step():
                other(torch.ones(1)).backward()
                steps.step()
                steps.zero_grad()

    on_ranks(1, plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for ids in batches:
        first, second = losses(model, X[ids], Y[ids])
        (first + 2 * second).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters in results:
        torch.testing.assert_close(parameters, values(model), rtol=0, atol=1e-6)


class Watching(torch.nn.Module):
    """Buffers of all kinds, each as its users mean it."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(7):
            self.linear = torch.nn.Linear(4, 1)
        self.register_buffer("queue", torch.zeros(3))
        self.register_buffer("lowest", torch.full((1,), float("inf")))
        self.register_buffer("highest", torch.full((1,), float("-inf")))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("own", torch.zeros(1))
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = 1.0 + x.detach().abs().mean(0)
        self.queue = torch.cat([x.detach()[:1, 0], self.queue])[:3]
        self.lowest = torch.minimum(self.lowest, x.detach().min().view(1))
        self.highest = torch.maximum(self.highest, x.detach().max().view(1))
        self.count += len(x)
        self.own += 1
        out: torch.Tensor = self.linear(x / self.scale)
        return out


@pytest.mark.parametrize("lists", [False, True])
def test_buffers_by_the_rules_that_the_script_gives(lists: bool) -> None:
    """One is None until the first forward. Where a body is dropped, nothing of it stays."""

    def script(rank: Rank) -> dict[str, torch.Tensor]:
        model = Watching()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rules = {"lowest": "min", "highest": "max", "count": "sum", "own": "local"}
        rank.distribute([model] if lists else model, [optimizer] if lists else optimizer, buffers=rules)
        for attempt, batch in enumerate(rank.batches((X, Y), batch_size=BATCH, epochs=EPOCHS, seed=0)):
            with rank.step():
                x, y = batch
                loss = (model(x) - y).square().mean()
                if attempt == 0:
                    rank.drop()
                loss.backward()
                optimizer.step()
                if lists:
                    (0.1 * (model(x) - y).square().mean()).backward()
                    optimizer.step()
                optimizer.zero_grad()
        return {name: item.clone() for name, item in model.state_dict().items()}

    one, other = on_ranks(2, script)
    rounds = 2 if lists else 1
    for found in (one, other):
        assert found["lowest"].item() == X.min().item()
        assert found["highest"].item() == X.max().item()
        assert found["count"].item() == SAMPLES * EPOCHS * rounds
        assert found["own"].item() == SAMPLES // BATCH * EPOCHS * rounds
    for name in ("queue", "scale", "linear.weight"):
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)
    assert set(one["queue"].tolist()) <= set(X[:, 0].tolist())


def normed(synchronised: bool) -> torch.nn.Module:
    with seeded(8):
        model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(4, 6, bias=False),  # its gradient would be noise, which Adam takes for one
            torch.nn.BatchNorm1d(6),
            torch.nn.Tanh(),
            torch.nn.Unflatten(1, (2, 3)),
            torch.nn.BatchNorm1d(2, affine=False, momentum=None),
            torch.nn.Flatten(),
            torch.nn.Linear(6, 1),
        )
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) if synchronised else model


@pytest.mark.parametrize(("workers", "batch_size"), [(1, 8), (2, 7), (3, 5), (3, 8)])
def test_synchronised_statistics_are_those_of_the_whole_batch(workers: int, batch_size: int) -> None:
    """Parts of other sizes, a worker without samples, a dropped body: all as BatchNorm in one process."""
    dealt: dict[int, set[int]] = {}

    def script(rank: Rank) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model = normed(True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        rank.distribute(model, optimizer)
        for attempt, batch in enumerate(rank.batches((X, Y), batch_size=batch_size, epochs=2, seed=0)):
            number = rank.step_number
            with rank.step():
                x, y = batch
                loss = (model(x) - y).square().mean()
                if attempt == 2:
                    rank.drop()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            dealt.setdefault(number, set()).update(batch.ids.tolist())
        return values(model), [buffer.clone() for buffer in model.buffers()]

    results = on_ranks(workers, script)
    model = normed(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in sorted(dealt):
        ids = torch.tensor(sorted(dealt[number]))
        (model(X[ids]) - Y[ids]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters, buffers in results:
        torch.testing.assert_close(parameters, values(model), rtol=0, atol=1e-5)
        for one, other in zip(buffers, model.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_synchronised_with_other_numbers_of_micro_batches() -> None:
    def script(rank: Rank) -> None:
        model = normed(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rank.distribute(model, optimizer)
        for batch in rank.batches((X, Y), batch_size=8, seed=0):
            with rank.step():
                for x, y in batch.split(1 + rank.rank):
                    (model(x) - y).square().mean().backward()
                optimizer.step()

    with pytest.raises(springtide.UsageError, match=r"SyncBatchNorm: this worker has cut .* micro-batches"):
        on_ranks(2, script)


def test_synchronised_layers_outside_of_a_step_and_copied() -> None:
    """An average of weights, an evaluation: everybody's own, as in one process."""

    def script(rank: Rank) -> None:
        model, twin = normed(True), normed(False)
        rank.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
        copied = copy.deepcopy(model)
        for one in (copied, model):
            torch.testing.assert_close(one(X), normed(False)(X))
        torch.testing.assert_close(model.eval()(X), (twin(X), twin.eval()(X))[1])

    on_ranks(1, script)
