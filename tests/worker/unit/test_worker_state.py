"""The committed state as a tree, written into another process's objects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from springtide.comm import codec
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.errors import SpringtideError
from springtide.memory.optimizer_state import measured_state_bytes
from springtide.memory.ready import ReadyMemory, missing_state
from springtide.train_step.buffers import Buffers
from springtide.train_step.state import Position, State

POSITION = Position(Cursor(1, 2, 3, 4), Ledger(stage=1, epoch=2, expected=10, count=3), 1.5)


def make(seed: int, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> tuple[Any, Any, Any, State]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    state = State(dict(model.named_parameters()), Buffers(model), [optimizer], {"scheduler": scheduler})
    return model, optimizer, scheduler, state


def train(model: Any, optimizer: Any, scheduler: Any, steps: int) -> None:
    torch.manual_seed(9)
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def travelled(state: State) -> Any:
    header, tensors = codec.flatten(state.read(POSITION, {"samples": 10}))
    return codec.unpack(header, codec.pack(tensors))


def test_a_joiner_goes_on_as_the_holder_does() -> None:
    model, optimizer, scheduler, state = make(1)
    train(model, optimizer, scheduler, 3)
    tree = travelled(state)
    other_model, other_optimizer, other_scheduler, other = make(2)
    assert other.check(tree) == POSITION
    other.write(tree)
    for _ in range(2):
        for ours, theirs in zip(model.state_dict().values(), other_model.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)
        assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]
        assert scheduler.state_dict() == other_scheduler.state_dict()
        train(model, optimizer, scheduler, 2)
        train(other_model, other_optimizer, other_scheduler, 2)


def test_optimizer_state_is_not_cast() -> None:
    model, optimizer, _, state = make(1)
    model.to(torch.bfloat16)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "master": torch.randn(parameter.shape)}
    other_model, other_optimizer, _, other = make(2)
    other_model.to(torch.bfloat16)
    other.write(travelled(state))
    for ours, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        assert other_optimizer.state[theirs]["master"].dtype == torch.float32
        assert torch.equal(optimizer.state[ours]["master"], other_optimizer.state[theirs]["master"])


def test_state_of_fresh_holder_empties_survivors_optimizer() -> None:
    *_, state = make(1)
    model, optimizer, scheduler, other = make(2)
    train(model, optimizer, scheduler, 1)
    other.write(travelled(state))
    assert not optimizer.state


def test_received_tensors_do_not_keep_the_transfer_buffer() -> None:
    model, optimizer, scheduler, state = make(1)
    train(model, optimizer, scheduler, 1)
    tree = travelled(state)
    for give in (False, True):
        _, other_optimizer, _, other = make(2)
        other.write(tree, give=give)
        held = [value for values in other_optimizer.state.values() for value in values.values()]
        assert len(held) == 12
        assert {value.untyped_storage().nbytes() - value.nbytes for value in held} == {0}


def test_what_is_given_away_is_not_copied_and_what_is_kept_is() -> None:
    model, optimizer, scheduler, state = make(1)
    train(model, optimizer, scheduler, 1)
    for give in (False, True):
        header, tensors = codec.flatten(state.read(POSITION, {"samples": 10}))
        tree = codec.unflatten(header, [tensor.clone() for tensor in tensors])
        other_model, other_optimizer, other_scheduler, other = make(2)
        other.write(tree, give=give)
        for parameter, values in zip(other_model.parameters(), tree["optimizer"]["state"], strict=True):
            held = other_optimizer.state[parameter]
            assert (held["exp_avg"].data_ptr() == values["exp_avg"].data_ptr()) == give
            assert held["step"].data_ptr() != values["step"].data_ptr()
        twin, twin_optimizer, twin_scheduler, _ = make(1)
        train(twin, twin_optimizer, twin_scheduler, 1)
        for members in (
            (twin, twin_optimizer, twin_scheduler),
            (other_model, other_optimizer, other_scheduler),
        ):
            train(*members, 2)
        for ours, theirs in zip(twin.state_dict().values(), other_model.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)


def outlined(state: State) -> tuple[Any, codec.Flattened, list[codec.Placed]]:
    flat = codec.flatten_in_place(state.read(POSITION, {"samples": 10}))
    outline, placed = codec.outline(flat.header, codec.specs(flat.header, 1 << 30))
    return outline, flat, placed


def test_places_are_the_live_memory_and_new_memory() -> None:
    model, optimizer, scheduler, state = make(1)
    train(model, optimizer, scheduler, 1)
    outline, _, _ = outlined(state)
    other_model, other_optimizer, _, other = make(2)
    other.check(outline)
    places = other.places(outline)
    for name, parameter in other_model.named_parameters():
        place = places[id(outline["parameters"][name])]
        assert place.live
        assert place.tensor.data_ptr() == parameter.data_ptr()
    for name, buffer in other_model.named_buffers():
        assert places[id(outline["buffers"][name])].tensor.data_ptr() == buffer.data_ptr()
    for values in outline["optimizer"]["state"]:
        assert not places[id(values["exp_avg"])].live
        assert id(values["step"]) not in places
    assert not other_optimizer.state  # it is not part of the state before that is whole


def test_state_that_came_in_place_is_seen_as_changed() -> None:
    """Memory that was written by a connection tells nobody: what looks for changes asks for the version."""
    model, optimizer, scheduler, state = make(1)
    train(model, optimizer, scheduler, 1)
    outline, flat, placed = outlined(state)
    other_model, _, _, other = make(2)
    places = other.places(outline)
    tensors = [tensor.clone() for tensor in flat.tensors]
    for item in placed:
        if (place := places.get(id(item.outline))) is not None:
            codec.as_bytes(place.tensor).numpy()[:] = codec.as_bytes(tensors[item.index]).numpy()
            tensors[item.index] = place.tensor
    buffers = Buffers(other_model.eval())  # in training mode a norm layer's always count as moved
    losses = [parameter.square().sum() for parameter in other_model.parameters()]
    other.write(codec.unflatten(flat.header, tensors), give=True)
    assert all(buffers.moved())
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    for ours, theirs in zip(model.state_dict().values(), other_model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


class Keeper:
    """A tracked object that shows what it has, and keeps what it is given."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.value = values["value"]


def test_what_objects_share_with_the_model_is_not_given_to_them() -> None:
    """An average that begins as the very weights would otherwise follow them in a joiner for ever."""
    model = torch.nn.Linear(3, 3)
    keeper = Keeper(model.weight.detach())
    state = State(dict(model.named_parameters()), Buffers(model), [], {"average": keeper})
    outline, flat, placed = outlined(state)
    other_model, constant = torch.nn.Linear(3, 3), torch.zeros(3, 3)
    other_keeper = Keeper(constant)
    other = State(dict(other_model.named_parameters()), Buffers(other_model), [], {"average": other_keeper})
    places = other.places(outline)
    assert all(place.tensor.data_ptr() != constant.data_ptr() for place in places.values())
    tensors = list(flat.tensors)
    for item in placed:
        if (place := places.get(id(item.outline))) is not None:
            place.tensor.copy_(tensors[item.index])
            tensors[item.index] = place.tensor
    other.write(codec.unflatten(flat.header, tensors), give=True)
    assert torch.equal(other_keeper.value, model.weight)
    assert other_keeper.value.data_ptr() != other_model.weight.data_ptr()
    assert not constant.any()


def test_places_follow_the_groups_that_the_job_has() -> None:
    """A script has added a group while it trained; a joiner has not come there yet."""
    model, *_ = make(1)
    first, *rest = model.parameters()
    optimizer = torch.optim.Adam(rest, lr=0.1)
    optimizer.add_param_group({"params": [first]})
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    state = State(dict(model.named_parameters()), Buffers(model), [optimizer], {})
    other_model, _, _, _ = make(2)
    other_first, *other_rest = other_model.parameters()
    other_optimizer = torch.optim.Adam([*other_rest, other_first], lr=0.1)
    other = State(dict(other_model.named_parameters()), Buffers(other_model), [other_optimizer], {})
    outline, _, _ = outlined(state)
    other.check(outline)
    places = other.places(outline)
    shapes = [places[id(values["exp_avg"])].tensor.shape for values in outline["optimizer"]["state"]]
    assert shapes == [parameter.shape for parameter in (*other_rest, other_first)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.update(format=9), "format 9"),
        (lambda tree: tree["parameters"].pop("0.bias"), "parameter 0.bias is .* in this worker and missing"),
        (
            lambda tree: tree["parameters"].update(more=torch.zeros(1)),
            "parameter more is missing in this worker",
        ),
        (
            lambda tree: tree["parameters"].update({"0.bias": torch.zeros(5)}),
            r"0.bias is \(4,\) .* and \(5,\)",
        ),
        (lambda tree: tree["buffers"].clear(), "buffer 1.running_mean"),
        (lambda tree: tree["optimizer"]["groups"].append({}), "other parameter groups"),
        (
            lambda tree: tree["optimizer"].update(kinds=["SGD", "Adam"]),
            "optimizer is SGD and Adam and this worker's Adam: is the script",
        ),
        (lambda tree: tree.update(tracked={"ema": {}}), r"tracks \['ema'\] and this worker \['scheduler'\]"),
    ],
)
def test_state_of_another_script_is_refused(change: Any, message: str) -> None:
    *_, state = make(1)
    tree = copy.deepcopy(travelled(state))
    change(tree)
    with pytest.raises(SpringtideError, match=message):
        state.check(tree)


def test_state_that_names_no_optimizer_is_taken() -> None:
    *_, state = make(1)
    tree = copy.deepcopy(travelled(state))
    del tree["optimizer"]["kinds"]
    assert state.check(tree) == POSITION


def on_meta(capturable: bool) -> tuple[torch.optim.Optimizer, State]:
    """A script whose model is on a device: one that holds no numbers, but says where tensors are."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to("meta")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, capturable=capturable)
    return optimizer, State(dict(model.named_parameters()), Buffers(model), [optimizer], {})


@pytest.mark.parametrize(("capturable", "device"), [(True, "meta"), (False, "cpu")])
def test_step_counts_of_a_joiner_are_where_torch_has_them(capturable: bool, device: str) -> None:
    """Kernels of fused and capturable optimizers read them on the device; others on the CPU."""
    model, optimizer, scheduler, _ = make(1)
    train(model, optimizer, scheduler, 1)
    for values in optimizer.state.values():
        values["history"] = [torch.ones(3), {"of": torch.ones(2)}]
    holder = State(dict(model.named_parameters()), Buffers(model), [optimizer], {})
    other_optimizer, other = on_meta(capturable)
    tree = travelled(holder)
    for group in tree["optimizer"]["groups"]:
        group["capturable"] = capturable
    other.write(tree)
    for values in other_optimizer.state.values():
        assert values["step"].device.type == device
        assert values["exp_avg"].device.type == "meta"
        assert [values["history"][0].device.type, values["history"][1]["of"].device.type] == ["meta", "meta"]


def test_state_that_a_holder_keeps_on_the_host_stays_there() -> None:
    """State that a holder keeps on the host stays there.

    A holder on a device says which state that is, whatever the optimizer's options are.
    """
    model, optimizer, scheduler, _ = make(1)
    train(model, optimizer, scheduler, 1)
    tree = travelled(State(dict(model.named_parameters()), Buffers(model), [optimizer], {}))
    assert tree["optimizer"]["on_host"] is None
    tree["optimizer"]["on_host"] = [["exp_avg"]]
    other_optimizer, other = on_meta(capturable=True)
    other.write(tree)
    for values in other_optimizer.state.values():
        assert (values["exp_avg"].device.type, values["exp_avg_sq"].device.type) == ("cpu", "meta")
    assert other.read(POSITION, {})["optimizer"]["on_host"] == [["exp_avg"]]


def convolution(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, State]:
    torch.manual_seed(seed)
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    return model, optimizer, State(dict(model.named_parameters()), Buffers(model), [optimizer], {})


def test_state_of_a_joiner_lies_as_its_parameters_do() -> None:
    """Fused kernels walk through raw memory: other strides would pair other numbers with each other."""

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(9)
        for _ in range(3):
            model(torch.randn(2, 3, 8, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, state = convolution(1)
    steps(model, optimizer)
    other_model, other_optimizer, other = convolution(2)
    other.write(travelled(state))
    weight = next(other_model.parameters())
    assert other_optimizer.state[weight]["exp_avg"].stride() == weight.stride() != (27, 9, 3, 1)
    for members in ((model, optimizer), (other_model, other_optimizer)):
        steps(*members)
    for ours, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Tracked:
    """A script's object with a small tensor of its own."""

    def __init__(self) -> None:
        self.value = torch.zeros(4)

    def state_dict(self) -> dict[str, Any]:
        return {"list": [self.value], "pair": (self.value + 1, 2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.other = state["list"][0], state["pair"][0]


def test_small_tensors_do_not_keep_the_transfer_buffer() -> None:
    """A list in an optimizer's state, a learning rate, and what a tracked object takes."""
    scripts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = torch.nn.Linear(30, 40)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5 / seed))
        tracked = Tracked()
        state = State(dict(model.named_parameters()), Buffers(model), [optimizer], {"mine": tracked})
        scripts.append((model, optimizer, tracked, state))
    model, optimizer, tracked, state = scripts[0]
    optimizer.state[model.weight] = {"history": [torch.ones(3)], "named": {"a": torch.ones(2)}}
    other_model, other_optimizer, other_tracked, other = scripts[1]
    rate = other_optimizer.param_groups[0]["lr"]
    other.write(travelled(state))
    values = other_optimizer.state[other_model.weight]
    held = [values["history"][0], values["named"]["a"], other_tracked.value, other_tracked.other]
    assert [tensor.untyped_storage().nbytes() - tensor.nbytes for tensor in held] == [0, 0, 0, 0]
    assert other_optimizer.param_groups[0]["lr"] is rate, "the script may hold it"
    assert float(rate) == 0.5


def test_what_does_not_take_a_state_is_named_as_this_workers_own() -> None:
    """No trouble of the network: and nobody goes on with half of a state."""
    model, optimizer, scheduler, state = make(1)
    train(model, optimizer, scheduler, 1)
    tree = travelled(state)
    _, _, other_scheduler, other = make(2)
    other_scheduler.load_state_dict = lambda state: 1 / 0
    with pytest.raises(
        SpringtideError, match=r"tracked object 'scheduler' .* ZeroDivisionError: .*This worker ends"
    ):
        other.write(tree)
    expanded = torch.nn.Linear(3, 4)
    expanded.register_buffer("z", torch.zeros(1, 1).expand(4, 4))
    optimizers = [torch.optim.SGD(expanded.parameters(), lr=0.1)]
    own = State(dict(expanded.named_parameters()), Buffers(expanded), optimizers, {})
    with pytest.raises(SpringtideError, match="the model and its optimizers of this worker did not take"):
        own.write(travelled(own))


def test_errors_of_servers_are_not_this_workers_own() -> None:
    model, optimizer, _, _ = make(1)

    class Servers(Tracked):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("connection lost")

    parts = dict(model.named_parameters()), Buffers(model), [optimizer], {"servers": Servers()}
    state = State(*parts, remote={"servers"})
    with pytest.raises(RuntimeError, match="connection lost"):
        state.write(travelled(state))


def unfreezing(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, State]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model[1].parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = State(dict(model.named_parameters()), Buffers(model), [optimizer], {"scheduler": scheduler})
    return model, optimizer, scheduler, state


def test_groups_added_during_training_come_with_the_state() -> None:
    """Gradual unfreezing: a joiner's script has not added them, and goes on as the holder does."""
    model, optimizer, scheduler, state = unfreezing(1)
    train(model, optimizer, scheduler, 2)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    scheduler.base_lrs.append(0.01)
    train(model, optimizer, scheduler, 2)
    other_model, other_optimizer, other_scheduler, other = unfreezing(2)
    tree = travelled(state)
    other.check(tree)
    other.write(tree)
    assert [len(group["params"]) for group in other_optimizer.param_groups] == [2, 2]
    # Its script comes to where the holder's has added them.
    other_optimizer.add_param_group({"params": other_model[0].parameters(), "lr": 0.5})
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [group["lr"] for group in other_optimizer.param_groups] == rates
    with pytest.raises(ValueError, match="more than one parameter group"):
        other_optimizer.add_param_group({"params": other_model[0].parameters(), "lr": 0.5})
    for members in ((model, optimizer, scheduler), (other_model, other_optimizer, other_scheduler)):
        train(*members, 2)
    for ours, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    # And back: a survivor that is ahead of the holder.
    fresh = travelled(unfreezing(3)[-1])
    other.check(fresh)
    other.write(fresh)
    assert [len(group["params"]) for group in other_optimizer.param_groups] == [2]
    assert not other_optimizer.state
    other_optimizer.add_param_group({"params": other_model[0].parameters(), "lr": 0.5})
    assert [len(group["params"]) for group in other_optimizer.param_groups] == [2, 2]


def test_groups_of_unknown_parameters_are_refused() -> None:
    *_, state = unfreezing(1)
    tree = travelled(state)
    tree["optimizer"]["members"] = [[["elsewhere", "1.bias"]]]
    with pytest.raises(SpringtideError, match="other parameter groups"):
        state.check(tree)


class Giving(ReadyMemory):
    """Remembers where the memory lies that was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.given: set[int] = set()

    def take(self, form: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        found = super().take(form, dtype)
        if found is not None:
            self.given.add(found.data_ptr())
        return found


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_state_is_received_into_ready_memory(kind: type[torch.optim.Optimizer]) -> None:
    model, optimizer, scheduler, state = make(1, kind)
    train(model, optimizer, scheduler, 1)
    tree = travelled(state)
    _, other_optimizer, _, other = make(2, kind)
    other.ready = ready = Giving()
    ready.make(missing_state([other_optimizer]))
    assert ready.nbytes == measured_state_bytes(optimizer)
    places = other.places(tree)
    assert ready.nbytes == 0, "all of it, and of the right form"
    assert {place.tensor.data_ptr() for place in places.values() if not place.live} == ready.given


def test_ready_memory_is_for_what_is_missing_alone() -> None:
    model, optimizer, scheduler, _ = make(1)
    assert len(missing_state([optimizer])) == 2 * len(list(model.parameters()))
    train(model, optimizer, scheduler, 1)
    assert missing_state([optimizer]) == []  # it is there
    other = torch.optim.LBFGS(model.parameters())
    assert missing_state([other]) == []  # nobody knows what it keeps
