"""Scripts of the kinds that people train with, each written once for plain PyTorch and for Springtide.

`docs/compatibility.md` is made of their titles and outcomes by `python docs/compatibility.py`. As a program
it is the script of a worker process. argv: RESULT_FOLDER JSON_OPTIONS ({"case": NAME}); RESULT_FOLDER/POD.pt
gets what the case returns.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import springtide
from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop

SAMPLES, BATCH, EPOCHS = 24, 8, 3
STRATEGIES = ("AllReduce", "exact", "shards", "exact shards", "ParameterServer")
Tensors = dict[str, torch.Tensor]


class Job:
    """A case's way to the library; `Plain` is its twin of one process."""

    def distribute(self, model: Any, optimizer: Any, **arguments: Any) -> None:
        springtide.distribute(model, optimizer, **arguments)

    def batches(self, data: Any, **arguments: Any) -> Iterable[Any]:
        arguments = {"batch_size": BATCH, "epochs": EPOCHS, "seed": 3} | arguments
        return springtide.batches(data, **arguments)

    def step(self) -> AbstractContextManager[Any]:
        return springtide.step()

    def clip(self, parameters: Iterable[torch.Tensor], norm: float) -> None:
        """`distribute(clip_norm=)` does it."""


class PlainBatch:
    """The whole global batch, undivided."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def split(self, m: int = 1) -> Iterator[PlainBatch]:
        yield self

    def weight(self, n: float) -> None:
        """The loss is the mean over all of them already."""


class Plain(Job):
    """Plain PyTorch: the same batches in the same order, and nothing of the library's in the training."""

    def distribute(self, model: Any, optimizer: Any, **arguments: Any) -> None:
        """Do nothing: a single process has nobody to share with."""

    def batches(self, data: Any, **arguments: Any) -> Iterable[Any]:
        arguments = {"batch_size": BATCH, "epochs": EPOCHS, "seed": 3} | arguments
        plan = plan_loop(data, **{**arguments, "micro_batch": None})
        cursor = Cursor()
        while not plan.ended(cursor):
            yield PlainBatch(plan.source.fetch(plan.global_ids(cursor)))
            cursor = plan.advance(cursor)

    def step(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def clip(self, parameters: Iterable[torch.Tensor], norm: float) -> None:
        nn.utils.clip_grad_norm_(parameters, norm)


@dataclass(frozen=True)
class Case:
    """One kind of script.

    Args:
        name: of its function.
        title: what it is, for the table.
        group: of the table.
        run: train, and return what must be equal.
        tolerance: largest difference of any value to plain PyTorch; None: the workers agree with each other,
            and their numbers depend on how many they are.
        refused: by strategy, a part of the sentence that refuses it; "exact shards" refuses what one of both
            does.
        tolerances: by strategy, where it is another one.
    """

    name: str
    title: str
    group: str
    run: Callable[[Job], Tensors]
    tolerance: float | None = 1e-6
    refused: Mapping[str, str] = field(default_factory=dict)
    tolerances: Mapping[str, float | None] = field(default_factory=dict)

    def refusal(self, strategy: str) -> str:
        """A pattern of the sentence that refuses it; "" where it works."""
        kinds = strategy.split() if strategy == "exact shards" else [strategy]
        return "|".join(f"({self.refused[kind]})" for kind in kinds if kind in self.refused)

    def tolerance_of(self, strategy: str) -> float | None:
        return self.tolerances.get(strategy, self.tolerance)


CASES: dict[str, Case] = {}


def case(
    group: str, title: str, tolerance: float | None = 2e-6, **more: Any
) -> Callable[[Callable[[Job], Tensors]], Callable[[Job], Tensors]]:
    def add(run: Callable[[Job], Tensors]) -> Callable[[Job], Tensors]:
        name = run.__name__
        CASES[name] = Case(name, title, group, run, tolerance, **more)
        return run

    return add


# ---- what the cases are made of


def made(build: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    """The model that `build` makes, the same in every process."""
    torch.manual_seed(seed)
    return build()


def numbers(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, Y = numbers(SAMPLES, 6), numbers(SAMPLES, 2, seed=4)
LABELS = Y.argmax(1)
IMAGES = numbers(SAMPLES, 3, 8, 8, seed=5)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))


def held(*modules: nn.Module) -> Tensors:
    """All parameters and buffers."""
    return {
        f"{number}.{name}": item.detach().clone()
        for number, module in enumerate(modules)
        for name, item in module.state_dict().items()
    }


Loss = Callable[[nn.Module, Any], torch.Tensor]


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def train(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss = squares,
    data: Any = (X, Y),
    arguments: Mapping[str, Any] | None = None,
    after: Sequence[Callable[[], object]] = (),
    clip: float | None = None,
    **tracked: Any,
) -> Tensors:
    """The plain loop. after: what follows each optimizer step. arguments: of `batches`."""
    if clip is not None:
        tracked["clip_norm"] = clip
    job.distribute(model, optimizer, **tracked)
    for batch in job.batches(data, **(arguments or {})):
        with job.step():
            loss(model, batch).backward()
            if clip is not None:
                job.clip(model.parameters(), clip)
            optimizer.step()
            for call in after:
                call()
            optimizer.zero_grad()
    return held(model)


# ---- optimizers

SECOND_ROUND = {"exact": "exact mode takes one backward of each sample and optimizer steps after it"}
NO_CLOSURE = {"exact": "exact mode takes no optimizer.step"}


NO_SERVERS = {"ParameterServer": "parameter servers do not have the optimizer"}
ONE_STEP = {"shards": "a body makes one optimizer step"}
NOT_CUT = {"shards": "is not known to step each element by itself"}


def optimizer_case(
    name: str, title: str, make: Callable[[Any], torch.optim.Optimizer], tolerance: float = 2e-6, **more: Any
) -> None:
    def run(job: Job) -> Tensors:
        model = made(mlp)
        return train(job, model, make(model.parameters()))

    run.__name__ = name
    case("Optimizers", title, tolerance, **more)(run)


def add_optimizers() -> None:
    o = torch.optim
    optimizer_case(
        "sgd", "SGD, Nesterov momentum and weight decay", lambda p: o.SGD(p, 0.1, 0.9, 0, 0.01, True)
    )
    optimizer_case("adam", "Adam, amsgrad", lambda p: o.Adam(p, 0.01, amsgrad=True), 1e-5)
    optimizer_case("adamw_fused", "AdamW, fused", lambda p: o.AdamW(p, 0.01, fused=True), 1e-5)
    optimizer_case("adamw_foreach", "AdamW, foreach", lambda p: o.AdamW(p, 0.01, foreach=True), 1e-5)
    optimizer_case("adagrad", "Adagrad", lambda p: o.Adagrad(p, 0.05), 1e-5)
    optimizer_case(
        "rmsprop", "RMSprop, centered", lambda p: o.RMSprop(p, 0.01, centered=True, momentum=0.5), 1e-4
    )
    optimizer_case("adadelta", "Adadelta", lambda p: o.Adadelta(p, 0.5), 1e-5, refused=NO_SERVERS)
    optimizer_case("adamax", "Adamax", lambda p: o.Adamax(p, 0.01), 1e-5, refused=NO_SERVERS)
    optimizer_case("nadam", "NAdam", lambda p: o.NAdam(p, 0.01), 1e-5, refused=NO_SERVERS)
    optimizer_case("radam", "RAdam", lambda p: o.RAdam(p, 0.01), 1e-5, refused=NO_SERVERS)
    optimizer_case("asgd", "ASGD", lambda p: o.ASGD(p, 0.05), 1e-5, refused=NO_SERVERS)
    optimizer_case(
        "adafactor", "Adafactor", lambda p: o.Adafactor(p, 0.01), 1e-5, refused=NO_SERVERS | NOT_CUT
    )


add_optimizers()


@case("Optimizers", "Rprop", refused=NO_SERVERS)
def rprop(job: Job) -> Tensors:
    model = made(mlp)
    return train(job, model, torch.optim.Rprop(model.parameters(), 0.01))


@case("Optimizers", "a learning rate that is a tensor", 1e-5)
def tensor_rate(job: Job) -> Tensors:
    model = made(mlp)
    return train(job, model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)))


class Decaying(torch.optim.SGD):
    """An optimizer of a script's own, on top of torch's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.999)
        return super().step(closure)


@case("Optimizers", "a subclass whose `step()` calls torch's", refused=NO_SERVERS | NOT_CUT)
def subclass(job: Job) -> Tensors:
    model = made(mlp)
    return train(job, model, Decaying(model.parameters(), lr=0.1, momentum=0.9))


@case("Optimizers", "parameter groups with options of their own", 1e-5)
def groups(job: Job) -> Tensors:
    model = made(mlp)
    parts = [
        {"params": model[0].parameters(), "lr": 0.02},
        {"params": model[2].parameters(), "weight_decay": 0.1},
    ]
    return train(job, model, torch.optim.AdamW(parts, lr=0.01))


@case(
    "Optimizers",
    "`add_param_group` while training",
    1e-5,
    refused={"ParameterServer": "parameter groups of AdamW were changed after distribute"},
)
def added_group(job: Job) -> Tensors:
    model = made(mlp)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    job.distribute(model, optimizer)
    for batch in job.batches((X, Y), epochs=1):
        with job.step():
            squares(model, batch).backward()
            optimizer.step()
            model.zero_grad()
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
    for batch in job.batches((X, Y), seed=4):
        with job.step():
            squares(model, batch).backward()
            optimizer.step()
            model.zero_grad()
    return held(model)


class Factors(nn.Module):
    """A model with many parameters of two elements each.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.randn(2)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x[:, :1] * torch.cat(list(self.factors))).view(len(x), 2, -1).sum(2) / 9.0


@case("Optimizers", "a parameter group for each of 600 parameters, their rates on a schedule", 1e-5)
def group_per_parameter(job: Job) -> Tensors:
    model = made(lambda: Factors(600))
    parts = [
        {"params": [parameter], "lr": 0.02 * 0.998**number, "weight_decay": 0.1 * (number % 3)}
        for number, parameter in enumerate(model.parameters())
    ]
    optimizer = torch.optim.AdamW(parts)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step))
    return train(job, model, optimizer, after=[schedule.step], clip=0.5, schedule=schedule)


@case("Optimizers", "LBFGS with a closure", 1e-4, refused=NO_CLOSURE | NO_SERVERS | NOT_CUT)
def lbfgs(job: Job) -> Tensors:
    model = made(mlp)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3)
    job.distribute(model, optimizer)
    for batch in job.batches((X, Y)):
        with job.step():
            x, y = batch

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
    return held(model)


@case("Optimizers", "two optimizers, each with parameters of its own", 1e-5, refused=ONE_STEP)
def two_optimizers(job: Job) -> Tensors:
    model = made(mlp)
    one = torch.optim.SGD(model[0].parameters(), lr=0.1)
    other = torch.optim.Adam(model[2].parameters(), lr=0.01)
    job.distribute([model], [one, other])
    for batch in job.batches((X, Y)):
        with job.step():
            squares(model, batch).backward()
            one.step()
            other.step()
            model.zero_grad()
    return held(model)


@case(
    "Optimizers",
    "a step up and a step down from there (extragradient)",
    refused=SECOND_ROUND | {"ParameterServer": "is in two optimizers"} | ONE_STEP,
)
def extragradient(job: Job) -> Tensors:
    model = made(mlp)
    climb = torch.optim.SGD(model.parameters(), lr=0.05, maximize=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.distribute([model], [optimizer, climb])
    for batch in job.batches((X, Y)):
        with job.step():
            squares(model, batch).backward()
            climb.step()
            model.zero_grad()
            squares(model, batch).backward()
            optimizer.step()
            model.zero_grad()
    return held(model)


# ---- schedules and averages


def scheduled(job: Job, make: Callable[[torch.optim.Optimizer], Any]) -> Tensors:
    model = made(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    return train(job, model, optimizer, after=[scheduler.step], scheduler=scheduler)


@case("Schedules and averages", "OneCycleLR, which moves the momentum too")
def one_cycle(job: Job) -> Tensors:
    return scheduled(job, lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=12))


@case("Schedules and averages", "SequentialLR of a warm-up and a cosine")
def sequential(job: Job) -> Tensors:
    s = torch.optim.lr_scheduler
    return scheduled(
        job, lambda o: s.SequentialLR(o, [s.LinearLR(o, 0.1, total_iters=3), s.CosineAnnealingLR(o, 6)], [3])
    )


@case("Schedules and averages", "LambdaLR")
def lambda_rate(job: Job) -> Tensors:
    return scheduled(job, lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)))


@case("Schedules and averages", "average of weights (EMA)")
def average(job: Job) -> Tensors:
    model = made(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    trained = train(job, model, optimizer, after=[lambda: ema.update_parameters(model)], ema=ema)
    return trained | {f"ema.{name}": item for name, item in held(ema).items()}


@case("Schedules and averages", "clipping by norm", 1e-5)
def clipping(job: Job) -> Tensors:
    model = made(mlp)
    return train(job, model, torch.optim.AdamW(model.parameters(), lr=0.01), clip=0.1)


# ---- losses and steps


def padded(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of other lengths, and how long each is."""
    rows = [sample[0][: 1 + int(sample[1])] for sample in samples]
    return nn.utils.rnn.pad_sequence(rows, True), torch.tensor([len(row) for row in rows])


@case("Losses and steps", "mean over tokens: `collate_fn` that pads, `batch.weight(n)`")
def tokens(job: Job) -> Tensors:
    model = made(lambda: nn.Linear(1, 1))
    lengths = torch.arange(SAMPLES) % 5

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        rows, counts = batch
        counted = torch.arange(rows.shape[1]) < counts[:, None]
        batch.weight(int(counted.sum()))
        return (model(rows[..., None]).squeeze(-1) - rows.cos())[counted].square().mean()

    data = torch.utils.data.TensorDataset(X, lengths)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(job, model, optimizer, loss, data, {"collate_fn": padded})


def in_pieces(job: Job, pieces: int, **arguments: Any) -> Tensors:
    model = made(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job.distribute(model, optimizer)
    for batch in job.batches((X, Y), **arguments):
        with job.step():
            for micro in batch.split(pieces):
                squares(model, micro).backward()
            optimizer.step()
            optimizer.zero_grad()
    return held(model)


@case("Losses and steps", "gradient accumulation: `split(3)`, uneven")
def accumulation(job: Job) -> Tensors:
    return in_pieces(job, 3)


@case("Losses and steps", "gradient accumulation: `micro_batch=3`, a short last batch")
def micro_batches(job: Job) -> Tensors:
    return in_pieces(job, 1, micro_batch=3, batch_size=7)


BACKWARD_ONCE = {"exact": "exact mode takes one backward of each sample"}


@case("Losses and steps", "losses of two tasks, a `backward()` for each", refused=BACKWARD_ONCE)
def two_losses(job: Job) -> Tensors:
    model = made(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.distribute(model, optimizer)
    for x, y in job.batches((X, Y)):
        with job.step():
            out = model(x)
            F.mse_loss(out, y).backward(retain_graph=True)
            (0.3 * out.abs().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return held(model)


@case(
    "Losses and steps", "DCGAN: real and fake halves, two optimizers", 1e-5, refused=BACKWARD_ONCE | ONE_STEP
)
def dcgan(job: Job) -> Tensors:
    generator = made(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)))
    critic = made(lambda: nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1)), 2)
    o_g = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
    o_c = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.999))
    job.distribute([generator, critic], [o_g, o_c])
    ones, zeros = torch.ones, torch.zeros
    for noise, real in job.batches((X, Y)):
        n = len(noise)
        with job.step():
            critic.zero_grad()
            F.binary_cross_entropy_with_logits(critic(real), ones(n, 1)).backward()
            fake = generator(noise)
            F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros(n, 1)).backward()
            o_c.step()
            generator.zero_grad()
            F.binary_cross_entropy_with_logits(critic(fake), ones(n, 1)).backward()
            o_g.step()
    return held(generator, critic)


@case("Losses and steps", "gradient penalty (`autograd.grad(create_graph=True)`)")
def gradient_penalty(job: Job) -> Tensors:
    model = made(mlp)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()

    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.05), loss)


@case("Losses and steps", "`backward(create_graph=True)`")
def create_graph(job: Job) -> Tensors:
    model = made(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.distribute(model, optimizer)
    warnings.filterwarnings("ignore", "Using backward.. with create_graph=True", UserWarning)
    for batch in job.batches((X, Y)):
        with job.step():
            squares(model, batch).backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    return held(model)


@case("Losses and steps", "activation checkpointing")
def checkpointing(job: Job) -> Tensors:
    model = made(mlp)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(model[2](checkpoint(lambda v: model[1](model[0](v)), x, use_reentrant=False)), y)

    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.1), loss)


@case("Losses and steps", "activation checkpointing, reentrant")
def reentrant(job: Job) -> Tensors:
    model = made(mlp)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        return F.mse_loss(model[2](checkpoint(lambda v: model[1](model[0](v)), x, use_reentrant=True)), y)

    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.1), loss)


@case("Losses and steps", "`torch.func.functional_call` and `vmap`")
def functional(job: Job) -> Tensors:
    model = made(mlp)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        parameters = dict(model.named_parameters())

        def one(sample: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(torch.func.functional_call(model, parameters, (sample,)), target)

        return torch.vmap(one)(x, y).mean()

    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.1), loss)


@case("Losses and steps", "a GradScaler")
def scaler(job: Job) -> Tensors:
    model = made(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", 256.0, growth_interval=3)
    job.distribute(model, optimizer, scaler=scaler)
    for batch in job.batches((X, Y)):
        with job.step():
            scaler.scale(squares(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return held(model)


@case("Losses and steps", "autocast to bfloat16", 2e-3)
def autocast(job: Job) -> Tensors:
    model = made(mlp)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return squares(model, batch)

    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.05), loss)


@case("Losses and steps", "`torch.compile`", 1e-5)
def compiled(job: Job) -> Tensors:
    model = made(mlp)
    fast = torch.compile(model, backend="aot_eager")

    def loss(_: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(fast(x), y)

    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.1), loss)


@case(
    "Losses and steps",
    "gradients that nobody zeroes, which would add up over steps",
    refused=dict.fromkeys(STRATEGIES, "was not zeroed since the last step"),
)
def never_zeroed(job: Job) -> Tensors:
    model = made(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.distribute(model, optimizer)
    for batch in job.batches((X, Y)):
        with job.step():
            squares(model, batch).backward()
            optimizer.step()
    return held(model)


@case(
    "Losses and steps",
    "gradients of two optimizers that nobody zeroes",
    refused=dict.fromkeys(STRATEGIES, "was not zeroed since the last step") | ONE_STEP,
)
def two_never_zeroed(job: Job) -> Tensors:
    model = made(mlp)
    one = torch.optim.SGD(model[0].parameters(), lr=0.1)
    other = torch.optim.SGD(model[2].parameters(), lr=0.1)
    job.distribute([model], [one, other])
    for batch in job.batches((X, Y)):
        with job.step():
            squares(model, batch).backward()
            one.step()
            other.step()
    return held(model)


@case(
    "Losses and steps",
    "two models, of which the second's gradients are zeroed before its own `backward()` only",
    1e-5,
    refused=BACKWARD_ONCE | ONE_STEP,
)
def zeroed_late(job: Job) -> Tensors:
    generator, critic = made(lambda: nn.Linear(6, 2)), made(lambda: nn.Linear(2, 1), 2)
    o_g = torch.optim.Adam(generator.parameters(), lr=0.01)
    o_c = torch.optim.Adam(critic.parameters(), lr=0.01)
    job.distribute([generator, critic], [o_g, o_c])
    for noise, real in job.batches((X, Y)):
        with job.step():
            o_g.zero_grad()
            fake = generator(noise)
            F.softplus(-critic(fake)).mean().backward()
            o_g.step()
            o_c.zero_grad()
            (F.softplus(-critic(real)) + F.softplus(critic(fake.detach()))).mean().backward()
            o_c.step()
    return held(generator, critic)


# ---- models


def classified(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def conv(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        norm(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, 2),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


def on_images(job: Job, model: nn.Module, **arguments: Any) -> Tensors:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **arguments)
    return train(job, model, optimizer, classified, (IMAGES, LABELS))


@case("Models", "convolutions in channels_last, fused AdamW", 1e-5)
def channels_last(job: Job) -> Tensors:
    model = made(lambda: conv(lambda n: nn.GroupNorm(2, n))).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    images = IMAGES.to(memory_format=torch.channels_last)
    return train(job, model, optimizer, classified, (images, LABELS))


@case("Models", "BatchNorm", None)
def batch_norm(job: Job) -> Tensors:
    return on_images(job, made(lambda: conv(nn.BatchNorm2d)))


NO_SYNC = {"exact": "SyncBatchNorm, and exact mode computes the parts"}


@case("Models", "SyncBatchNorm", 1e-5, refused=NO_SYNC)
def sync_batch_norm(job: Job) -> Tensors:
    model = made(lambda: conv(nn.BatchNorm2d))
    if not isinstance(job, Plain):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return on_images(job, model)


@case("Models", "GroupNorm and LayerNorm", 1e-5)
def group_norm(job: Job) -> Tensors:
    return on_images(
        job, made(lambda: conv(lambda n: nn.Sequential(nn.GroupNorm(3, n), nn.LayerNorm((6, 6)))))
    )


@case("Models", "spectral normalization (buffers that each forward moves)", 1e-5)
def spectral(job: Job) -> Tensors:
    model = made(mlp)
    torch.manual_seed(2)
    nn.utils.parametrizations.spectral_norm(model[0])
    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.05))


@case("Models", "weight normalization", 1e-5)
def weight_norm(job: Job) -> Tensors:
    model = made(mlp)
    nn.utils.parametrizations.weight_norm(model[0])
    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.embedding(ids).mean(1))
        return out


@case("Models", "tied weights, an embedding", 1e-5)
def tied(job: Job) -> Tensors:
    model = made(Tied)
    ids = (X.abs() * 10).long() % 7
    return train(job, model, torch.optim.Adam(model.parameters(), lr=0.01), classified, (ids, ids[:, 0]))


@case("Models", "`Embedding(sparse=True)`", refused=dict.fromkeys(STRATEGIES, "sparse"))
def sparse_embedding(job: Job) -> Tensors:
    model = made(lambda: nn.Sequential(nn.Embedding(7, 5, sparse=True), nn.Flatten(), nn.Linear(30, 2)))
    ids = (X.abs() * 10).long() % 7
    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.1), classified, (ids, LABELS))


@case("Models", "frozen layers")
def frozen(job: Job) -> Tensors:
    model = made(mlp)
    model[0].requires_grad_(False)
    return train(job, model, torch.optim.SGD(model[2].parameters(), lr=0.1))


class LowRank(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


@case("Models", "LoRA", 1e-5)
def lora(job: Job) -> Tensors:
    model = made(lambda: nn.Sequential(LowRank(nn.Linear(6, 12)), nn.Tanh(), LowRank(nn.Linear(12, 2))))
    trained = [p for p in model.parameters() if p.requires_grad]
    return train(job, model, torch.optim.AdamW(trained, lr=0.01))


@dataclass
class Outputs:
    """The results of a model by name, as in the libraries of pretrained models."""

    loss: torch.Tensor
    past: list[torch.Tensor]


class Block(nn.Module):
    """Attention over the past and the present, and a perceptron, each added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, past: torch.Tensor | None = None) -> Any:
        q, k, v = self.mix(self.norm(x)).chunk(3, 2)
        present = torch.stack((k, v))
        if past is not None:
            k, v = torch.cat((past, present), 2)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + F.gelu(self.out(x)), present


class Decoder(nn.Module):
    """GPT-2's shape: tied embeddings, keyword arguments, a mask, named outputs, recomputed activations."""

    def __init__(self, width: int = 8, words: int = 7) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("causal", torch.ones(6, 6, dtype=torch.bool).tril()[None], persistent=False)

    def forward(
        self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> Outputs:
        x = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        mask, pasts = self.causal & attention_mask[:, None, :], []
        for block in self.blocks:
            x, present = checkpoint(block, x, mask, use_reentrant=False)
            pasts.append(present)
        scores = self.head(x)[:, :-1].flatten(0, 1)
        return Outputs(F.cross_entropy(scores, labels[:, 1:].flatten()), pasts)


class Encoder(nn.Module):
    """BERT's shape under masked words, and a pooler that this loss does not use; a past in front."""

    def __init__(self, width: int = 8, words: int = 7) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(words, width, padding_idx=0), Block(width)
        self.prefix = nn.Parameter(0.1 * torch.randn(2, 1, 2, width))
        self.head, self.pooler = nn.Linear(width, words), nn.Linear(width, width)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        n, length = input_ids.shape
        seen = F.pad(input_ids != 0, (2, 0), value=True)[:, None, :].expand(n, length, length + 2)
        x, _ = self.block(self.words(input_ids), seen, self.prefix.expand(2, n, 2, -1))
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class Patches(nn.Module):
    """ViT's shape: patches, a class token, places that are a parameter."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token, self.places = (
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.Parameter(torch.randn(1, 5, width)),
        )
        self.block, self.head = Block(width), nn.Linear(width, 2)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.places
        out: torch.Tensor = self.head(self.block(x, torch.ones(5, 5, dtype=torch.bool))[0][:, 0])
        return out


IDS = 1 + (X.abs() * 10).long() % 6


def of_decoder(model: nn.Module, batch: Any) -> torch.Tensor:
    (ids,) = batch
    loss: torch.Tensor = model(input_ids=ids, attention_mask=ids != 1, labels=ids).loss
    return loss


@case("Models", "a decoder: tied embeddings, a mask, named outputs, past keys, checkpointing", 1e-5)
def decoder(job: Job) -> Tensors:
    model = made(Decoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.utils.data.TensorDataset(IDS)
    return train(job, model, optimizer, of_decoder, data, clip=1.0)


@case("Models", "an encoder under masked words, whose pooler nobody uses; a trained prefix", 1e-5)
def encoder(job: Job) -> Tensors:
    model = made(Encoder)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found: torch.Tensor = model(batch[0], labels=batch[0])["loss"]
        return found

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return train(job, model, optimizer, loss, torch.utils.data.TensorDataset(IDS - 1))


@case("Models", "patches of images, a class token", 1e-5)
def patches(job: Job) -> Tensors:
    return on_images(job, made(Patches))


class Adapter(nn.Module):
    """A layer in the place of a frozen one, with trained corrections of low rank by name."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_b = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x) + 2.0 * self.lora_b["default"](self.lora_a["default"](x))
        return out


@case("Models", "adapters of low rank put into a decoder, all else frozen", 1e-5)
def adapters(job: Job) -> Tensors:
    def build() -> nn.Module:
        model = Decoder().requires_grad_(False)
        for block in model.blocks:
            block.mix, block.out = Adapter(block.mix), Adapter(block.out)
        return model

    model = made(build)
    trained = [item for item in model.parameters() if item.requires_grad]
    data = torch.utils.data.TensorDataset(IDS)
    return train(job, model, torch.optim.SGD(trained, lr=0.1, momentum=0.9), of_decoder, data, clip=1.0)


class Experts(nn.Module):
    """Each sample goes to one expert, so in some steps a worker has none for one; nobody takes the last."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 2) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] > 0).long() + (x[:, 0] > 0.5).long()
        out = torch.zeros(len(x), 2)
        for number, expert in enumerate(self.experts):
            if bool((chosen == number).any()):
                out = out.index_put((chosen == number,), expert(x[chosen == number]))
        return out


@case("Models", "experts: parameters that some samples use, and nobody")
def experts(job: Job) -> Tensors:
    model = made(Experts)
    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))


@case(
    "Models",
    "complex parameters",
    1e-5,
    refused={"exact": "exact mode sums float32", "ParameterServer": "complex64"},
)
def complex_parameters(job: Job) -> Tensors:
    model = made(lambda: nn.Linear(6, 2, dtype=torch.complex64))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return (model(x.to(torch.complex64)).abs() - y).square().mean()

    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.05), loss)


@case("Models", "bfloat16 parameters", 0.02)
def bfloat16(job: Job) -> Tensors:
    model = made(mlp).bfloat16()
    data = X.bfloat16(), Y.bfloat16()
    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.05), data=data)


@case("Models", "float64 parameters", 1e-12, refused={"exact": "exact mode sums float32"})
def float64(job: Job) -> Tensors:
    model = made(mlp).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(job, model, optimizer, data=(X.double(), Y.double()))


@case("Models", "LSTM", 1e-5)
def lstm(job: Job) -> Tensors:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(1, 5, batch_first=True)
            self.out = nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(self.recurrent(x[..., None])[0][:, -1])
            return out

    model = made(Net)
    return train(job, model, torch.optim.Adam(model.parameters(), lr=0.01))


@case("Models", "a transformer", 2e-5)
def transformer(job: Job) -> Tensors:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.embed, self.encoder = nn.Linear(1, 8), nn.TransformerEncoder(layer, 2)
            self.out = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(self.encoder(self.embed(x[..., None])).mean(1))
            return out

    model = made(Net)
    # The gradient of the keys' bias is noise around zero, which Adam would take for a direction.
    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.05), clip=1.0)


@case("Models", "parameters without elements, and of none")
def odd_shapes(job: Job) -> Tensors:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = mlp(), nn.Parameter(torch.tensor(1.0))
            self.nothing = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.body(x) * self.scale + self.nothing.sum()
            return out

    model = made(Net)
    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.1))


@case("Models", "a transposed parameter, fused Adam", 1e-5)
def transposed(job: Job) -> Tensors:
    model = made(mlp)
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    return train(job, model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True))


class Watching(nn.Module):
    """An observer's minimum, a counter, and a scale that is made of the first data."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("lowest", torch.tensor(0.0))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lowest = torch.minimum(self.lowest, x.min())
        self.seen += len(x)
        out: torch.Tensor = self.body(x)
        return out


@case("Models", "buffers with rules: a minimum, a count")
def observers(job: Job) -> Tensors:
    model = made(Watching)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(job, model, optimizer, buffers={"lowest": "min", "seen": "sum"})


class DataDependent(nn.Module):
    """ActNorm's way: a buffer is None until the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = 1 / x.detach().std(0, keepdim=True)
        out: torch.Tensor = self.body(x * self.scale)
        return out


@case(
    "Models",
    "a buffer that is made of the first data",
    None,
    refused={"exact": "in exact mode it has to be there before distribute"},
)
def late_buffer(job: Job) -> Tensors:
    model = made(DataDependent)
    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.1))


@case("Models", "lazy layers that have seen no data", refused=dict.fromkeys(STRATEGIES, "has no shape yet"))
def lazy(job: Job) -> Tensors:
    model = made(lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.distribute(model, optimizer)
    return held(model)


# ---- data


@case("Data", "batches that are dicts")
def dicts(job: Job) -> Tensors:
    model = made(mlp)

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            return {"x": X[index], "y": Y[index]}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.1), loss, Rows())


@case("Data", "read in ranges, in order")
def ranges(job: Job) -> Tensors:
    model = made(mlp)

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __iter__(self) -> Iterator[Any]:
            raise NotImplementedError

        def read_range(self, start: int, stop: int) -> Iterator[Any]:
            yield from zip(X[start:stop], Y[start:stop], strict=True)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(job, model, optimizer, data=Stream(), arguments={"shuffle": False})


@case("Data", "drawn by weights, with replacement")
def drawn(job: Job) -> Tensors:
    model = made(mlp)
    arguments = {"weights": 1 + torch.arange(SAMPLES) % 3}
    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.1), arguments=arguments)


@case("Data", "the short last batch left out")
def drop_last(job: Job) -> Tensors:
    model = made(mlp)
    arguments = {"batch_size": 7, "drop_last": True}
    return train(job, model, torch.optim.SGD(model.parameters(), lr=0.1), arguments=arguments)


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.manual_seed(int(os.environ.get("SPRINGTIDE_SLOT", "0")))
    springtide.init()
    result = CASES[options["case"]].run(Job())
    torch.save(result, folder / f"{os.environ['SPRINGTIDE_POD_NAME']}.pt")


def plain(name: str) -> Tensors:
    """Return the tensors that the case gives in one process with plain PyTorch."""
    return copy.deepcopy(CASES[name].run(Plain()))


if __name__ == "__main__":
    main()
