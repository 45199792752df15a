"""Several models, optimizers and steps in a body: the numbers of plain torch, and an undo of all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from worker_ranks import Rank, on_ranks, seeded

import springtide
from springtide.comm import codec
from springtide.data.loop import plan_loop
from springtide.train_step.state import Position

SAMPLES, BATCH, EPOCHS = 24, 8, 2
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
NOISE = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(2))
Y = X[:, :2].sum(1, keepdim=True)


class Game:
    """Generator and discriminator with an optimizer each, in the usual two rounds of a body."""

    def __init__(self) -> None:
        with seeded(5):
            layers = torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)
            self.generator = torch.nn.Sequential(*layers)
            self.critic = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
            )
        self.critic[1].eval()  # its batch statistics are those of a part
        self.models = [self.generator, self.critic]
        self.optimizers = [
            torch.optim.Adam(self.generator.parameters(), lr=0.02),
            torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.9),
        ]

    def body(self, x: torch.Tensor, noise: torch.Tensor, between: Callable[[str], None]) -> None:
        fake = self.generator(noise)
        ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        bce = F.binary_cross_entropy_with_logits
        self.optimizers[1].zero_grad()
        bce(self.critic(x), ones).backward()
        # A second backward of the same round would be refused: both losses in one.
        between("critic's gradients")
        self.optimizers[1].step()
        between("critic stepped")
        self.optimizers[0].zero_grad()
        bce(self.critic(fake), ones - zeros).backward()
        self.optimizers[0].step()
        between("generator stepped")

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for model in self.models for p in model.parameters()])


def batches() -> Iterator[torch.Tensor]:
    """The ids of all global batches."""
    plan = plan_loop((X, NOISE), batch_size=BATCH, epochs=EPOCHS, seed=0)
    from springtide.data.cursor import Cursor

    cursor = Cursor()
    while not plan.ended(cursor):
        yield plan.global_ids(cursor)
        cursor = plan.advance(cursor)


def nothing(_: str) -> None:
    pass


def play(rank: Rank, drop: tuple[int, str] | None = None) -> tuple[torch.Tensor, dict[str, int], Any]:
    game = Game()
    rank.distribute(game.models, game.optimizers)
    dropped = False

    def between(place: str) -> None:
        nonlocal dropped
        if drop == (rank.step_number, place) and not dropped:
            dropped = True
            rank.drop()

    for batch in rank.batches((X, NOISE), batch_size=BATCH, epochs=EPOCHS, seed=0):
        x, noise = batch
        with rank.step():
            game.body(x, noise, between)
    assert (drop is not None) == dropped
    state = rank.trainer.state.read(rank.runtime.position, {})
    return game.values(), rank.runtime.position.ledger.audit(), state


@pytest.fixture(scope="module")
def undisturbed() -> torch.Tensor:
    game = Game()
    for ids in batches():
        game.body(X[ids], NOISE[ids], nothing)
    return game.values()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_two_players_as_in_plain_torch(size: int, undisturbed: torch.Tensor) -> None:
    results = on_ranks(size, play)
    for values, audit, _ in results:
        torch.testing.assert_close(values, undisturbed, rtol=0, atol=2e-5)
        assert torch.equal(values, results[0][0])
        # A sample counts once, although its gradients went into two rounds.
        assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (SAMPLES * EPOCHS, 0, 0)


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("place", ["critic's gradients", "critic stepped", "generator stepped"])
def test_all_that_a_dropped_body_stepped_is_put_back(
    step: int, place: str, undisturbed: torch.Tensor
) -> None:
    """Parameters, both optimizers' states, hyperparameters: also after the last optimizer step."""
    for values, audit, state in on_ranks(2, lambda rank: play(rank, (step, place))):
        torch.testing.assert_close(values, undisturbed, rtol=0, atol=2e-5)
        assert audit["totalSeen"] == SAMPLES * EPOCHS
        # Adam counts its steps: a step too many would show.
        assert {int(entry["step"]) for entry in state["optimizer"]["state"] if "step" in entry} == {6}


def test_a_joiner_gets_the_state_of_all_optimizers() -> None:
    _, _, tree = on_ranks(1, play)[0]

    def join(rank: Rank) -> tuple[torch.Tensor, Any]:
        game = Game()
        rank.distribute(game.models, game.optimizers)
        assert isinstance(rank.trainer.state.check(tree), Position)
        rank.trainer.state.write(tree)
        return game.values(), rank.trainer.state.read(rank.runtime.position, {})["optimizer"]

    values, optimizer = on_ranks(1, join)[0]
    assert torch.equal(values, torch.cat([tree["parameters"][n].reshape(-1) for n in tree["parameters"]]))
    for ours, theirs in zip(optimizer["state"], tree["optimizer"]["state"], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# ---- one model


class Net:
    """A model for the tests below; `optimizer` is made by the test."""

    def __init__(self) -> None:
        with seeded(7):
            self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))

    def loss(self, ids: Any) -> torch.Tensor:
        return (self.model(X[ids]) - Y[ids]).square().mean()

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).clone()


Make = Callable[[torch.nn.Module], list[torch.optim.Optimizer]]
Step = Callable[[Net, list[Any], torch.Tensor], None]


def both(size: int, make: Make, step: Step, atol: float = 2e-5, drop_after: int | None = None) -> None:
    """Train on ranks and in plain torch; compare. drop_after: the step that is dropped at its end."""
    expected = Net()
    optimizers = make(expected.model)
    for ids in batches():
        step(expected, optimizers, ids)

    def script(rank: Rank) -> torch.Tensor:
        net = Net()
        own = make(net.model)
        rank.distribute(net.model, own)
        dropped = False
        for batch in rank.batches(torch.arange(SAMPLES), batch_size=BATCH, epochs=EPOCHS, seed=0):
            with rank.step():
                step(net, own, batch.data)
                if rank.step_number == drop_after and not dropped:
                    dropped = True
                    rank.drop()
        assert dropped == (drop_after is not None)
        return net.values()

    values = on_ranks(size, script)
    assert all(torch.equal(other, values[0]) for other in values)
    torch.testing.assert_close(values[0], expected.values(), rtol=0, atol=atol)


@pytest.mark.parametrize("drop_after", [None, 1, 3])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_with_a_closure(search: str | None, drop_after: int | None) -> None:
    """Every evaluation of the closure is a sum over the workers, its loss included: all search alike."""

    def make(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4, line_search_fn=search)]

    def step(net: Net, optimizers: list[Any], ids: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizers[0].zero_grad()
            loss = net.loss(ids)
            loss.backward()
            return loss.detach()

        optimizers[0].step(closure)

    both(2, make, step, atol=2e-3, drop_after=drop_after)


def test_a_joiner_goes_on_searching_as_the_holder_does() -> None:
    """LBFGS keeps lists of tensors in its state, under one of its parameters."""

    def steps(rank: Rank, tree: Any) -> tuple[torch.Tensor, Any]:
        net = Net()
        optimizer = torch.optim.LBFGS(net.model.parameters(), lr=0.3, max_iter=3)
        rank.distribute(net.model, optimizer)
        if tree is not None:
            rank.trainer.state.write(tree)
        for batch in rank.batches(torch.arange(SAMPLES), batch_size=BATCH, seed=0):

            def closure(ids: torch.Tensor = batch.data) -> torch.Tensor:
                optimizer.zero_grad()
                loss = net.loss(ids)
                loss.backward()
                return loss.detach()

            with rank.step():
                optimizer.step(closure)
        header, tensors = codec.flatten(rank.trainer.state.read(rank.runtime.position, {}))
        return net.values(), codec.unpack(header, codec.pack(tensors))

    _, tree = on_ranks(1, lambda rank: steps(rank, None))[0]
    # Twice from one tree: what has been received is not written into.
    holder, _ = on_ranks(1, lambda rank: steps(rank, tree))[0]
    again, _ = on_ranks(1, lambda rank: steps(rank, tree))[0]
    assert torch.equal(holder, again)
    assert not torch.equal(holder, on_ranks(1, lambda rank: steps(rank, None))[0][0])


def test_sgd_with_a_closure() -> None:
    def step(net: Net, optimizers: list[Any], ids: torch.Tensor) -> None:
        def closure() -> float:
            optimizers[0].zero_grad()
            loss = net.loss(ids)
            loss.backward()
            return loss.item()

        loss = optimizers[0].step(closure=closure)
        assert isinstance(loss, float)

    both(3, lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)], step)


class SharpnessAware(torch.optim.Optimizer):
    """Climbs along the gradient, takes the gradient there, and steps with it from where it stood.

    Foret et al., Sharpness-Aware Minimization, ICLR 2021.
    """

    def __init__(self, base: torch.optim.Optimizer, radius: float) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {"radius": radius})
        self.base = base

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad, alpha=float(self.param_groups[0]["radius"] / (norm + 1e-12)))
        with torch.enable_grad():
            closure()
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)
        self.base.step()


def sharpness_aware(net: Net, optimizers: list[Any], ids: torch.Tensor) -> None:
    def closure() -> torch.Tensor:
        optimizers[0].zero_grad()
        loss = net.loss(ids)
        loss.backward()
        return loss

    closure()
    optimizers[0].step(closure)
    optimizers[0].zero_grad()


@pytest.mark.parametrize("drop_after", [None, 2])
def test_two_gradients_for_one_step(drop_after: int | None) -> None:
    def make(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return [SharpnessAware(base, 0.05), base]

    both(2, make, sharpness_aware, drop_after=drop_after)


def test_optimizer_inside_of_another_one_has_to_be_declared() -> None:
    def make(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        return [SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), 0.05)]

    with pytest.raises(springtide.UsageError, match=r"\(SGD\) that distribute\(\) was not given.*as lists"):
        both(1, make, sharpness_aware)


@pytest.mark.parametrize("drop_after", [None, 2])
def test_two_optimizers_after_one_backward(drop_after: int | None) -> None:
    def make(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        first, second = model[0], model[2]  # type: ignore[index]
        return [
            torch.optim.Adam(first.parameters(), lr=0.01),
            torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9),
        ]

    def step(net: Net, optimizers: list[Any], ids: torch.Tensor) -> None:
        net.loss(ids).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    both(2, make, step, drop_after=drop_after)


def test_gradients_that_are_not_zeroed_are_added_to() -> None:
    """Gradients that are not zeroed are added to, so the body's second step takes the sum, the same as in
    plain torch.
    """

    def step(net: Net, optimizers: list[Any], ids: torch.Tensor) -> None:
        optimizers[0].zero_grad()
        net.loss(ids).backward()
        optimizers[0].step()
        (net.model[2].weight.square().mean() + 0 * net.loss(ids)).backward()
        optimizers[0].step()

    both(2, lambda model: [torch.optim.SGD(model.parameters(), lr=0.05)], step)


def test_clamped_after_the_step() -> None:
    def step(net: Net, optimizers: list[Any], ids: torch.Tensor) -> None:
        optimizers[0].zero_grad()
        net.loss(ids).backward()
        optimizers[0].step()
        with torch.no_grad():
            for parameter in net.model.parameters():
                parameter.clamp_(-0.3, 0.3)

    both(2, lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)], step, drop_after=2)


# ---- misuse


def one_body(body: Callable[[Rank, Net, Any, Any], None], multi_step: bool = True, **settings: Any) -> None:
    def script(rank: Rank) -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.model.parameters(), lr=0.1)
        rank.distribute(net.model, [optimizer] if multi_step else optimizer)
        for batch in rank.batches(torch.arange(SAMPLES), batch_size=BATCH, seed=0):
            with rank.step():
                body(rank, net, optimizer, batch.data)

    on_ranks(1, script, **settings)


def test_gradients_that_no_step_takes() -> None:
    def body(rank: Rank, net: Net, optimizer: Any, ids: Any) -> None:
        net.loss(ids).backward()
        optimizer.step()
        net.loss(ids).backward()

    with pytest.raises(springtide.UsageError, match=r"without optimizer.step\(\) after its last backward"):
        one_body(body)


def test_report_that_travels_with_no_gradient() -> None:
    def body(rank: Rank, net: Net, optimizer: Any, ids: Any) -> None:
        net.loss(ids).backward()
        optimizer.step()
        rank.report(loss=1.0)

    with pytest.raises(springtide.UsageError, match=r"report\(\) after the last optimizer.step"):
        one_body(body)


def test_exact_mode_takes_one_backward() -> None:
    def body(rank: Rank, net: Net, optimizer: Any, ids: Any) -> None:
        net.loss(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        net.loss(ids).backward()

    with pytest.raises(springtide.UsageError, match="exact mode takes one backward"):
        one_body(body, logical_workers=2)


def test_second_step_and_optimizer_are_told_how_to_declare() -> None:
    def twice(rank: Rank, net: Net, optimizer: Any, ids: Any) -> None:
        net.loss(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        net.loss(ids).backward()

    def other(rank: Rank, net: Net, optimizer: Any, ids: Any) -> None:
        torch.optim.Adam(net.model.parameters()).step()

    with pytest.raises(springtide.UsageError, match=r"one optimizer step.*as lists.*\[optimizer"):
        one_body(twice, multi_step=False)
    with pytest.raises(springtide.UsageError, match=r"\(Adam\) that distribute\(\) was not given.*as lists"):
        one_body(other, multi_step=False)


def test_workers_that_make_other_numbers_of_steps() -> None:
    def script(rank: Rank) -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.model.parameters(), lr=0.1)
        rank.distribute(net.model, [optimizer])
        for batch in rank.batches(torch.arange(SAMPLES), batch_size=BATCH, seed=0):
            with rank.step():
                for _ in range(1 + (rank.rank == 0 and rank.step_number == 1)):
                    net.loss(batch.data).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(springtide.SpringtideError, match="have to make the same optimizer steps"):
        on_ranks(2, script)
