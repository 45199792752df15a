"""Embedding tables in one process: against torch's own modules and sparse optimizers."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from worker_alone import library

import springtide
from springtide.errors import UsageError
from springtide.train_step.validation import declare

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def pair(bag: bool, **options: Any) -> tuple[Any, Any]:
    """Our module and torch's with the same values."""
    padding = options.get("padding_idx")
    if bag:
        ours = springtide.EmbeddingBag(20, 4, seed=3, **options)
        theirs: Any = torch.nn.EmbeddingBag(20, 4, sparse=options.get("mode") != "max", **options)
    else:
        ours = springtide.Embedding(20, 4, seed=3, **options)
        theirs = torch.nn.Embedding(20, 4, sparse=True, **options)
    with torch.no_grad():
        theirs.weight.copy_(ours.to_dense())
    assert padding is None or not theirs.weight[padding].any()
    return ours, theirs


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3, lr_decay=0.1, initial_accumulator_value=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("padding", [None, 2])
def test_an_embedding_trains_as_torch_s_with_sparse_gradients(name: str, padding: int | None) -> None:
    ours, theirs = pair(False, padding_idx=padding)
    optimizer = OPTIMIZERS[name](ours.parameters())
    sparse = torch.optim.SparseAdam(theirs.parameters(), lr=0.1, betas=(0.8, 0.9))
    reference = sparse if name == "adam" else OPTIMIZERS[name](theirs.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    other = torch.optim.lr_scheduler.StepLR(reference, 2, 0.5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        ids = torch.randint(0, 20, (3, 2, 5), generator=generator)
        for model in (ours, theirs):
            # Used twice in a pass, and gradients of two passes.
            (model(ids[0]).tanh().sum() + model(ids[1]).square().sum()).backward()
            model(ids[2]).sin().sum().backward()
        optimizer.step()
        reference.step()
        schedule.step()
        other.step()
        optimizer.zero_grad()
        reference.zero_grad()
        torch.testing.assert_close(ours.to_dense(), theirs.weight.detach())
    assert len(ours.export()[0]) <= 20


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 5])
def test_bags_are_torch_s(mode: str, padding: int | None) -> None:
    ours, theirs = pair(True, mode=mode, padding_idx=padding)
    ids = torch.tensor([5, 1, 1, 7, 5, 5, 9])
    offsets, weights = torch.tensor([0, 3, 3, 5]), torch.rand(7)
    results = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        out = model(ids, offsets, weights if mode == "sum" else None)
        also = model(ids[:6].view(2, 3))
        (out.square().sum() + also.sin().sum()).backward()
        optimizer.step()
        results.append((out.detach(), also.detach()))
    for mine, their in zip(*results, strict=True):
        torch.testing.assert_close(mine, their)
    torch.testing.assert_close(ours.to_dense(), theirs.weight.detach())
    assert ours(ids[:0], torch.tensor([0, 0])).shape == (2, 4)


@pytest.mark.parametrize("name", ["Embedding", "EmbeddingBag"])
def test_arguments_without_a_name_mean_what_they_mean_to_torch(name: str) -> None:
    ours = [
        parameter.name
        for parameter in inspect.signature(getattr(springtide, name)).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    theirs = list(inspect.signature(getattr(torch.nn, name)).parameters)
    assert ours == theirs[: theirs.index("sparse") + 1]


def test_weights_of_samples_get_gradients_and_frozen_tables_none() -> None:
    ours, theirs = pair(True, mode="sum")
    ids, weights = torch.tensor([[1, 2], [2, 3]]), torch.rand(2, 2)
    grads = []
    for model in (ours, theirs):
        own = weights.clone().requires_grad_()
        model(ids, per_sample_weights=own).square().sum().backward()
        grads.append(own.grad)
    torch.testing.assert_close(*grads)
    ours.requires_grad_(False)
    assert not ours(ids).requires_grad


def test_gradients_that_were_zeroed_are_gone() -> None:
    table = springtide.Embedding(None, 2, seed=1)
    before = table(torch.tensor([-7, 2**62])).detach()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    table(torch.tensor([-7])).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    table(torch.tensor([2**62])).sum().backward()
    optimizer.step()
    optimizer.step()  # its gradients are used up
    torch.testing.assert_close(table(torch.tensor([-7, 2**62])), before - torch.tensor([[0.0], [1.0]]))
    assert table.export()[0].tolist() == [2**62]


def test_state_goes_through_a_state_dict() -> None:
    table = springtide.Embedding(9, 2, seed=1, max_rows=4, slices=2)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.5)
    table(torch.arange(3)).square().sum().backward()
    optimizer.step()
    other = springtide.Embedding(9, 2, seed=2)
    other.load_state_dict(copy.deepcopy(table.state_dict()))
    assert torch.equal(other.to_dense(), table.to_dense())


def converted(model: torch.nn.Module) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.parametrize(
    "replace", [lambda model: model.load_state_dict(model.state_dict(), assign=True), converted]
)
def test_rows_are_trained_when_another_parameter_stands_for_them(replace: Any) -> None:
    table = springtide.Embedding(9, 2, seed=1)
    old, before = table.weight, table.to_dense()
    replace(table)
    assert table.weight is not old
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    table(torch.tensor([4])).sum().backward()
    optimizer.step()
    before[4] -= 1.0
    torch.testing.assert_close(table.to_dense(), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps, AveragedModel])
def test_copy_with_frozen_rows_is_refused_with_the_remedy(copied: Any) -> None:
    model = torch.nn.Sequential(springtide.EmbeddingBag(9, 2), torch.nn.Linear(2, 1))
    with pytest.raises(UsageError, match=r"EmbeddingBag is neither copied .* state_dict\(\) has the rows"):
        copied(model)


def test_rows_that_a_table_has_no_place_for_are_refused() -> None:
    table = springtide.Embedding(9, 2, seed=1)
    table(torch.tensor([2, 8])).sum().backward()
    torch.optim.SGD(table.parameters(), lr=1.0).step()
    springtide.Embedding(None, 2).load_state_dict(table.state_dict())
    with pytest.raises(UsageError, match="rows of ids 2 to 8, and there are 5 embeddings"):
        springtide.Embedding(5, 2).load_state_dict(table.state_dict())


def test_same_seed_makes_the_same_table_and_torch_seed_chooses() -> None:
    dense = springtide.Embedding(50, 3, seed=8).to_dense()
    assert torch.equal(dense, springtide.EmbeddingBag(50, 3, seed=8, slices=3).to_dense())
    drawn = []
    for _ in range(2):
        torch.manual_seed(4)
        drawn += [springtide.Embedding(50, 3).to_dense(), springtide.Embedding(50, 3).to_dense()]
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: springtide.Embedding(0, 3), UsageError, "num_embeddings is 0"),
        (lambda: springtide.Embedding(5, 0), UsageError, "dim is 0"),
        (lambda: springtide.Embedding(5, 3, 5), UsageError, "padding_idx is 5"),
        (lambda: springtide.Embedding(5, 3, slices=0), UsageError, "slices is 0"),
        (lambda: springtide.Embedding(5, 3, init="xavier"), UsageError, "no initialisation 'xavier'"),
        (lambda: springtide.EmbeddingBag(5, 3, mode="min"), UsageError, "mode is 'min'"),
        (lambda: springtide.Embedding(5, 3)(torch.tensor([5])), IndexError, "id 5 is out of range"),
        (lambda: springtide.Embedding(5, 3)(torch.tensor([-1])), IndexError, "id -1 is out of range"),
        (lambda: springtide.Embedding(5, 3)(torch.tensor([0.5])), UsageError, "ids are integers"),
        (lambda: springtide.Embedding(None, 3).to_dense(), UsageError, "needs num_embeddings"),
    ],
)
def test_what_cannot_be_is_said(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.RMSprop(p), "RMSprop has no sparse counterpart"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum=0.9 would change rows"),
        (lambda p: torch.optim.AdamW(p), "own with weight_decay=0"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "own with amsgrad=False"),
    ],
)
def test_an_optimizer_that_tables_cannot_have_is_refused(make: Any, message: str) -> None:
    table = springtide.Embedding(5, 3)
    optimizer = make(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=message):
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_a_scaler_reaches_rows_without_distribute(set_to_none: bool, fused: bool, unscale: bool) -> None:
    results = []
    for module in pair(False):
        head = torch.nn.Linear(4, 1)
        head.load_state_dict({"weight": torch.ones(1, 4), "bias": torch.zeros(1)})
        dense = isinstance(module, torch.nn.Embedding)
        if dense:
            module.sparse = False
        optimizer = torch.optim.SGD([*module.parameters(), *head.parameters()], lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        for step in range(6):
            # The third step's loss is finite, and its gradient is not: of the rows alone in the table's part.
            rows = module(torch.tensor([step, 7, 7]))
            bad = 1e38 if step == 3 else 1.0
            scaler.scale((rows * bad).sum() + head(module(torch.tensor([2]))).square().sum()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
        table = module.weight if dense else module.to_dense()
        results.append((table.detach(), head.weight.detach(), scaler.get_scale()))
    torch.testing.assert_close(results[0], results[1])
    assert results[0][2] == 512.0  # it grew twice, and backed off once


class Clicks(torch.nn.Module):
    """A table in a model of its own; torch's module with the same values where `dense`."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = springtide.Embedding(20, 4, seed=3)
        self.table: torch.nn.Module = table
        if dense:
            self.table = torch.nn.Embedding.from_pretrained(table.to_dense(), freeze=False)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).mean(1)).squeeze(1)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["none", "scaled", "fused"])
@pytest.mark.parametrize("clip_norm", [None, 0.02])
def test_a_script_without_a_job_trains_as_with_a_dense_table(clip_norm: float | None, scaling: str) -> None:
    generator = torch.Generator().manual_seed(1)
    ids, y = torch.randint(0, 20, (30, 3), generator=generator), torch.randn(30, generator=generator)
    results = []
    for dense in (False, True):
        with library():
            model = Clicks(dense)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=scaling == "fused")
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaling != "none")
            springtide.distribute(model, optimizer, scaler=scaler, clip_norm=clip_norm)
            for number, batch in enumerate(springtide.batches((ids, y), batch_size=8, epochs=2, seed=4)):
                with springtide.step():
                    for micro in batch.split(3):
                        own, wanted = micro
                        loss = (model(own) - wanted).square().mean()
                        # Two passes through the table in one backward.
                        again = (model(own) - wanted).square().mean()
                        if scaling != "none" and number == 3:
                            again = again + (model.table(own[:1]) * 1e38).sum()  # of the rows alone
                        scaler.scale(0.5 * loss + 0.5 * again).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            table = model.table.weight if dense else model.table.to_dense()
            results.append(torch.cat((table.detach().flatten(), model.head.weight.detach().flatten())))
            assert scaling == "none" or scaler.get_scale() == 32.0
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("AllReduce", {}, "use strategy.type Hybrid, or torch.nn.Embedding"),
        ("", {"exact": True}, "use strategy.type Hybrid"),
        ("Hybrid", {"dense": True}, "the model has none: use springtide.Embedding"),
    ],
)
def test_where_tables_cannot_be(strategy: str, options: dict[str, Any], message: str) -> None:
    model = Clicks(options.get("dense", False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(UsageError, match=message):
        declare(
            model,
            optimizer,
            None,
            options.get("tracked", {}),
            in_job=bool(strategy),
            exact=options.get("exact", False),
            strategy=strategy,
        )
