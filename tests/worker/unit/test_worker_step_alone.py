"""A script without a job: the numbers of plain torch, and an error that says what to do for every misuse."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_capabilities import cuda_param
from worker_alone import Script, library

import springtide
from springtide.elastic.runtime import Runtime


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with library() as runtime:
        yield runtime


def plain_torch(
    script: Script, runtime: Runtime, epochs: int, clip_norm: float | None = None, device: str = "cpu"
) -> torch.Tensor:
    """Parameters after training a twin of the script's model with torch alone, on the same batches."""
    twin = Script.__new__(Script)
    twin.device = device
    torch.manual_seed(3)
    twin.x, twin.y = torch.randn(24, 4), torch.randn(24, 2)
    twin.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    twin.model = twin.model.to(device)
    optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for x, y in script.batches(epochs=epochs):
        with springtide.step():
            script.loss((x, y)).backward()
            script.finish()
        twin.loss((x, y)).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(twin.model.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return twin.parameters()


class HalvesTwice(torch.optim.lr_scheduler.ExponentialLR):
    """Rests afterwards, and torch counts no more."""

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < 2:
            super().step(epoch)


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_script_s_scheduler_is_counted_from_the_begin(runtime: Runtime) -> None:
    """A job may go over to a consistency that needs the count."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = HalvesTwice(optimizer, 0.5)
    springtide.distribute(model, optimizer, scheduler=scheduler)
    for _ in range(4):
        scheduler.step()
    assert scheduler.state_dict()["springtide_steps"] == 5
    assert scheduler.get_last_lr() == [0.25]


def test_a_script_s_sgd_steps_by_fused_code(runtime: Runtime) -> None:
    """A script sees the groups as they are, and others within the step that they are fused."""
    seen: list[list[tuple[int, Any]]] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append(
            [(item.numel(), group["fused"]) for group in optimizer.param_groups for item in group["params"]]
        )

    script = Script()
    script.optimizer.register_step_pre_hook(look)
    before = [dict(group) for group in script.optimizer.param_groups]
    for x, y in script.batches():
        with springtide.step():
            script.loss((x, y)).backward()
            script.optimizer.step()
            assert [dict(group) for group in script.optimizer.param_groups] == before
            script.optimizer.zero_grad()
    assert seen == [[(32, True), (8, True), (16, True), (2, True)]] * 3


on_cuda = cuda_param("steps")


@pytest.mark.parametrize("device", ["cpu", on_cuda])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_equal_to_plain_torch(runtime: Runtime, clip_norm: float | None, device: str) -> None:
    script = Script(clip_norm=clip_norm, device=device)
    expected = plain_torch(script, runtime, 3, clip_norm, device)
    torch.testing.assert_close(script.parameters(), expected, rtol=0, atol=1e-6 if device == "cpu" else 1e-5)
    assert runtime.position.ledger.audit()["totalSeen"] == 72
    assert runtime.position.cursor.step == 9
    assert (springtide.rank(), springtide.world_size(), springtide.local_rank()) == (0, 1, 0)


def test_micro_batches_equal_the_whole_batch(runtime: Runtime) -> None:
    script = Script()
    whole: list[torch.Tensor] = []
    for batch in script.batches():
        with springtide.step():
            for micro in batch.split(3):
                script.loss(micro).backward()
            gradient_before_step = script.model[0].weight.grad.clone()
            script.model[0].weight.grad.requires_grad_(False)
            whole = [gradient_before_step]
            twin = torch.autograd.grad(script.loss(batch), [script.model[0].weight])
            torch.testing.assert_close(whole[0], twin[0], rtol=1e-5, atol=1e-6)
            script.finish()


def test_other_denominator_is_the_mean_over_its_items(runtime: Runtime) -> None:
    script = Script(samples=8)
    for batch in script.batches():
        with springtide.step():
            tokens = [1, 5]
            for micro, n in zip(batch.split(2), tokens, strict=True):
                micro.weight(n)
                script.loss(micro).backward()
            halves = [
                torch.autograd.grad(script.loss((batch[0][a:b], batch[1][a:b])), [script.model[0].weight])[0]
                for a, b in ((0, 4), (4, 8))
            ]
            script.optimizer.step()
            gradient = script.model[0].weight.grad
            expected = (halves[0] * 1 + halves[1] * 5) / 6
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
            script.optimizer.zero_grad()


def test_unused_parameters_keep_no_gradient(runtime: Runtime) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 2), "idle": torch.nn.Linear(4, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    springtide.distribute(model, optimizer)
    before = model["idle"].weight.detach().clone()
    for batch in springtide.batches(torch.randn(8, 4), batch_size=4):
        with springtide.step():
            model["used"](batch.data).sum().backward()
            optimizer.step()
            assert model["idle"].weight.grad is None
            optimizer.zero_grad()
    # Weight decay would have moved it, had it got a gradient of zeros.
    assert torch.equal(model["idle"].weight, before)


def test_dropped_body_is_dealt_again_and_leaves_no_trace(runtime: Runtime) -> None:
    script = Script(norm=True)
    seen: list[list[int]] = []
    rates: list[float] = []
    undisturbed = 0
    for batch in script.batches(epochs=2):
        seen.append(batch.ids.tolist())
        attempt = len(seen)
        with springtide.step():
            loss = script.loss(batch)
            if attempt in (2, 5):
                assert runtime.trainer is not None
                runtime.trainer.drop("the test says so")
            loss.backward()
            assert attempt not in (2, 5), "a library call of a dropped body leaves it"
            rates.append(script.optimizer.param_groups[0]["lr"])
            script.finish()
            undisturbed += 1
    assert undisturbed == 6
    assert seen[1] == seen[2]
    assert seen[4] == seen[5]
    assert rates == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    assert script.model[1].num_batches_tracked.item() == 6
    audit = runtime.position.ledger.audit()
    assert (audit["repeated"], audit["lost"], audit["totalSeen"]) == (0, 0, 48)


def test_script_swallowing_exceptions_keeps_no_dropped_body(runtime: Runtime) -> None:
    script = Script()
    committed = 0
    dropped = False
    for batch in script.batches():
        with springtide.step():
            if not dropped:
                assert runtime.trainer is not None
                runtime.trainer.drop("once")
            dropped = True
            try:
                script.loss(batch).backward()
            except BaseException:
                script.optimizer.step()  # raises again
                raise AssertionError("not reached") from None
            script.finish()
            committed += 1
    assert committed == 3


def test_reported_values_and_the_step_log(tmp_path: Path) -> None:
    with library(step_log=str(tmp_path / "steps")):
        script = Script()
        for batch in script.batches():
            with springtide.step():
                for number, micro in enumerate(batch.split(2)):
                    script.loss(micro).backward()
                    springtide.report(half=number, fixed=torch.tensor(2.0))
                script.finish()
    lines = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["values"] == {"fixed": 2.0, "half": 0.5}
    assert lines[0]["samples"] == 8
    assert lines[0]["member"] == "alone"


# ---- misuse


def one_step(script: Script, body: Any) -> None:
    for batch in script.batches():
        with springtide.step():
            body(batch)


def test_body_without_a_step(runtime: Runtime) -> None:
    script = Script()
    with pytest.raises(springtide.UsageError, match=r"ended without backward\(\) and optimizer.step\(\)"):
        one_step(script, lambda batch: None)


def test_body_without_optimizer_step(runtime: Runtime) -> None:
    script = Script()
    with pytest.raises(springtide.UsageError, match=r"ended without optimizer.step\(\).*batch.split"):
        one_step(script, lambda batch: script.loss(batch).backward())


def test_batch_left_out(runtime: Runtime) -> None:
    script = Script()
    batches = script.batches()
    next(batches)
    with pytest.raises(springtide.UsageError, match=r"batch of step 1 was not trained.*continue"):
        next(batches)


def test_optimizer_step_outside_of_a_step(runtime: Runtime) -> None:
    script = Script()
    with pytest.raises(springtide.UsageError, match=r"optimizer.step\(\) outside of a step"):
        script.optimizer.step()


def test_second_optimizer_step(runtime: Runtime) -> None:
    script = Script()

    def body(batch: Any) -> None:
        script.loss(batch).backward()
        script.optimizer.step()
        script.optimizer.step()

    with pytest.raises(springtide.UsageError, match="one optimizer step"):
        one_step(script, body)


def test_closure(runtime: Runtime) -> None:
    script = Script()

    def body(batch: Any) -> None:
        script.loss(batch).backward()
        script.optimizer.step(lambda: 0.0)

    with pytest.raises(springtide.UsageError, match=r"step\(closure\) has to be declared.*lists"):
        one_step(script, body)


def test_step_without_backward(runtime: Runtime) -> None:
    script = Script()
    with pytest.raises(springtide.UsageError, match=r"8 are missing.*loss.backward\(\)"):
        one_step(script, lambda batch: script.optimizer.step())


def test_missing_micro_batch(runtime: Runtime) -> None:
    script = Script()

    def body(batch: Any) -> None:
        script.loss(next(batch.split(2))).backward()
        script.optimizer.step()

    with pytest.raises(springtide.UsageError, match="4 are missing"):
        one_step(script, body)


def test_gradients_clipped_by_hand(runtime: Runtime) -> None:
    script = Script()

    def body(batch: Any) -> None:
        script.loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(script.model.parameters(), 1e-6)
        script.optimizer.step()

    with pytest.raises(springtide.UsageError, match="clip_norm"):
        one_step(script, body)


def test_gradients_removed_before_the_step(runtime: Runtime) -> None:
    script = Script()

    def body(batch: Any) -> None:
        script.loss(batch).backward()
        script.optimizer.zero_grad()
        script.optimizer.step()

    with pytest.raises(springtide.UsageError, match=r"zero_grad\(\) after optimizer.step\(\)"):
        one_step(script, body)


def test_gradients_from_outside(runtime: Runtime) -> None:
    script = Script()
    script.loss((script.x, script.y)).backward()
    with pytest.raises(springtide.UsageError, match=r"gradient from outside of the step.*zero_grad"):
        one_step(script, lambda batch: None)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_two_backwards_add_up(runtime: Runtime, micro_batches: int) -> None:
    """Two backward passes add up: from the third step on, that step alone is done again."""
    script, twin = Script(), Script.__new__(Script)
    twin.device, twin.model = "cpu", copy.deepcopy(script.model)
    optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    dealt = []
    for batch in script.batches(epochs=2):
        dealt.append(batch.ids)
        with springtide.step():
            for micro in batch.split(micro_batches):
                script.loss(micro).backward()
                if len(dealt) > 2:
                    (0.5 * script.loss(micro)).backward()
            script.finish()
    assert torch.equal(dealt[2], dealt[3])
    assert len(dealt) == 7
    for number, ids in enumerate([*dealt[:2], *dealt[3:]]):
        loss = twin.loss((script.x[ids], script.y[ids]))
        ((1.0 if number < 2 else 1.5) * loss).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    torch.testing.assert_close(script.parameters(), twin.parameters())


@pytest.mark.parametrize("repeated", [False, True])
def test_layers_that_rest_at_first(runtime: Runtime, repeated: bool) -> None:
    """Frozen after distribute(), trained later: whether backward is called once for each step, or twice."""
    script, twin = Script(), Script.__new__(Script)
    twin.device, twin.model = "cpu", copy.deepcopy(script.model)
    optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for model in (script.model, twin.model):
        model[0].requires_grad_(False)
    for number, batch in enumerate(script.batches(epochs=2)):
        if number == 2:
            script.model[0].requires_grad_(True)
            twin.model[0].requires_grad_(True)
        with springtide.step():
            for _ in range(2 if repeated else 1):
                script.loss(batch).backward()
            script.finish()
        for _ in range(2 if repeated else 1):
            twin.loss(batch.data).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    torch.testing.assert_close(script.parameters(), twin.parameters())


def test_report_after_the_step_and_of_no_number(runtime: Runtime) -> None:
    script = Script()

    def body(batch: Any) -> None:
        script.loss(batch).backward()
        script.finish()
        springtide.report(loss=1.0)

    with pytest.raises(springtide.UsageError, match=r"report\(\) before optimizer.step\(\)"):
        one_step(script, body)
    with pytest.raises(springtide.UsageError, match=r"report\(name=\.\.\.\): expected a number.*got str"):
        springtide.report(name="three")


def test_more_than_sixteen_values(runtime: Runtime) -> None:
    script = Script()
    with pytest.raises(springtide.UsageError, match="at most 16"):
        one_step(script, lambda batch: springtide.report(**{f"v{i}": 1.0 for i in range(17)}))


def test_nested_step_and_step_without_a_batch(runtime: Runtime) -> None:
    script = Script()
    with pytest.raises(springtide.UsageError, match="without a batch"), springtide.step():
        pass

    def body(batch: Any) -> None:
        with springtide.step():
            pass

    with pytest.raises(springtide.UsageError, match="inside another one"):
        one_step(script, body)


def test_nothing_goes_on_after_an_exception_in_a_body(runtime: Runtime) -> None:
    script = Script()
    batches = script.batches()
    next(batches)
    with pytest.raises(ZeroDivisionError), springtide.step():
        raise ZeroDivisionError("of the script")
    next(batches)
    with pytest.raises(springtide.UsageError, match="ZeroDivisionError: of the script"), springtide.step():
        pass


def test_two_loops_at_once_and_break(runtime: Runtime) -> None:
    script = Script()
    next(script.batches())
    with pytest.raises(springtide.UsageError, match="before the previous training loop ended"):
        next(script.batches())
    assert "break" in str(runtime.exit.finished())


def test_frozen_parameter_that_is_trained_later(runtime: Runtime) -> None:
    model = torch.nn.Linear(4, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    springtide.distribute(model, optimizer)
    model.bias.requires_grad_(True)
    next(springtide.batches(torch.randn(8, 4), batch_size=4))
    with pytest.raises(springtide.UsageError, match="parameter bias was frozen"), springtide.step():
        pass


def test_distribute_calls_init_where_the_script_has_not() -> None:
    with library() as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setattr(springtide.api, "active_runtime", None)
        patch.setattr(springtide.api, "init", lambda: setattr(springtide.api, "active_runtime", runtime))
        model = torch.nn.Linear(2, 1)
        springtide.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert runtime.trainer is not None


def test_calls_before_init_and_distribute() -> None:
    with pytest.raises(springtide.UsageError, match=r"springtide.batches\(\) before springtide.init\(\)"):
        springtide.batches([1, 2, 3], batch_size=1)
    with library(), pytest.raises(springtide.UsageError, match=r"before springtide.distribute\(\)"):
        springtide.batches([1, 2, 3], batch_size=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": []}, "list of models is empty"),
        ({"optimizer": []}, "list of optimizers is empty"),
        ({"model": 3}, "must be a torch.nn.Module or a list.*got int"),
        ({"optimizer": 3}, "must be a torch.optim.Optimizer or a list.*got int"),
        ({"optimizer": torch.optim.SGD(torch.nn.Linear(1, 1).parameters())}, "not in the model"),
        ({"clip_norm": -1.0}, "clip_norm must be a positive number"),
        ({"other": torch.optim.SGD(torch.nn.Linear(1, 1).parameters())}, "other is another optimizer.*list"),
        ({"average": object()}, "no state_dict"),
    ],
)
def test_what_cannot_be_distributed(runtime: Runtime, change: dict[str, Any], message: str) -> None:
    model = torch.nn.Linear(2, 2)
    arguments = {"model": model, "optimizer": torch.optim.SGD(model.parameters())} | change
    with pytest.raises(springtide.UsageError, match=message):
        springtide.distribute(arguments.pop("model"), arguments.pop("optimizer"), **arguments)


def test_frozen_model_and_second_distribute(runtime: Runtime) -> None:
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(springtide.UsageError, match="requires a gradient"):
        springtide.distribute(model, torch.optim.SGD(model.parameters()))
    Script()
    with pytest.raises(springtide.UsageError, match="called already"):
        Script()


def train_until(script: Script, runtime: Runtime, last: int, **more: Any) -> list[int]:
    """Train until so many steps are committed; return the step at which the question was asked each time."""
    asked: list[int] = []

    def until() -> bool:
        asked.append(runtime.position.cursor.step)
        return asked[-1] >= last

    for batch in script.batches(epochs=3, until=until, **more):
        with springtide.step():
            script.loss(batch).backward()
            script.finish()
    return asked


def test_a_loop_ends_early_in_the_middle_of_a_pass(runtime: Runtime) -> None:
    script = Script()
    assert sorted(set(train_until(script, runtime, 4))) == [0, 1, 2, 3, 4]
    assert (runtime.position.cursor.step, runtime.position.cursor.epoch) == (4, 1)
    # The next loop begins at its begin, and what was left out is not lost.
    assert train_until(script, runtime, 9)[-1] == 9
    ledger = runtime.position.ledger
    assert (runtime.position.cursor.stage, ledger.lost, ledger.repeated, ledger.total_seen) == (1, 0, 0, 72)


def test_a_loop_may_end_before_its_first_step(runtime: Runtime) -> None:
    assert set(train_until(Script(), runtime, 0)) == {0}
    assert runtime.position.cursor.step == 0


def test_until_is_a_function(runtime: Runtime) -> None:
    with pytest.raises(TypeError, match="until must be a function without arguments, got True"):
        Script().batches(until=True)


@pytest.mark.parametrize("norm", [None, 0.01, 1e6])
def test_the_norm_before_clipping_is_known(runtime: Runtime, norm: float | None) -> None:
    script = Script(clip_norm=norm)
    for batch in script.batches():
        with springtide.step():
            script.loss(batch).backward()
            script.optimizer.step()
            after = torch.nn.utils.get_total_norm(
                [p.grad for p in script.model.parameters() if p.grad is not None]
            )
            script.optimizer.zero_grad()
        found = None if runtime.trainer is None else runtime.trainer.gradient_norm
        if norm is None:
            assert found is None
        else:
            assert found is not None
            assert float(after) == pytest.approx(min(norm, float(found)), rel=1e-4)
            assert float(found) > 0.01
            assert runtime.trainer is not None
            assert runtime.trainer.total_weight == 8


def test_values_of_the_newest_step_are_known(runtime: Runtime) -> None:
    script, weights = Script(), iter((3.0, 1.0) * 3)
    for batch in script.batches(micro_batch=4):
        with springtide.step():
            for micro in batch.split():
                weight = next(weights)
                micro.weight(weight)
                script.loss(micro).backward()
                springtide.report(value=weight)
            script.finish()
        assert runtime.steps.committed_values == {"value": pytest.approx((3 * 3 + 1) / 4)}
        assert runtime.trainer is not None
        assert runtime.trainer.total_weight == pytest.approx(4)
