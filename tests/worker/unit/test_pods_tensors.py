"""Divided tensors in one process that stands for each process of a pod in turn: no collective is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.errors import UsageError
from springtide.pods.checks import check_model, check_settings, check_steps
from springtide.pods.dims import MeshShape, mesh_shape
from springtide.pods.fully_shard import reshard
from springtide.pods.tensors import as_dtensor, is_dtensor, lies_along, local_shard, runs_of, shard_count
from springtide.settings import Settings
from springtide.train_step.buffers import Buffers
from springtide.train_step.state import Position, State


@pytest.fixture
def mesh_of() -> Iterator[Callable[[MeshShape, int], Any]]:
    """Return the mesh as the process with a local rank sees it."""

    def make(shape: MeshShape, rank: int) -> Any:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape.processes)
        return init_device_mesh("cpu", shape.sizes, mesh_dim_names=shape.names)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("names", "sizes", "placements", "shape"),
    [
        (("dp_shard",), (2,), [Shard(0)], (5, 3)),
        (("dp_shard",), (4,), [Shard(0)], (3, 2)),  # the last process has nothing
        (("tp",), (3,), [Shard(1)], (4, 6)),
        (("tp",), (2,), [Shard(1)], (2, 5, 3)),
        (("dp_shard", "tp"), (2, 2), [Shard(0), Shard(1)], (5, 6)),
        (("dp_shard", "tp"), (2, 2), [Shard(0), Shard(0)], (7, 2)),
        (("dp_shard", "tp"), (2, 2), [Shard(0), Replicate()], (4,)),
        (("dp_replicate", "dp_shard"), (2, 2), [Replicate(), Shard(0)], (6, 2)),
    ],
)
def test_cut_names_the_elements_that_torch_keeps_here(
    mesh_of: Callable[[MeshShape, int], Any],
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    placements: list[Any],
    shape: tuple[int, ...],
) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    mesh_form, owned = MeshShape(names, sizes), []
    for rank in range(mesh_form.processes):
        mesh = mesh_of(mesh_form, rank)
        tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        assert is_dtensor(tensor)
        assert lies_along(tensor) == list(names)
        cut, part = runs_of(tensor, is_first=True), local_shard(tensor)
        runs = [np.arange(a, b) for a, b in zip(cut.starts, cut.stops, strict=True)]
        elements = [int(number) for run in runs for number in run]
        assert part.flatten().tolist() == elements
        assert (cut.shape, cut.local_shape) == (shape, tuple(part.shape))
        owned += elements if cut.is_owner else []
        other = as_dtensor(part + 1, tensor)
        assert (other.shape, local_shard(other).flatten().tolist()) == (shape, [n + 1 for n in elements])
    assert sorted(owned) == list(range(whole.numel()))
    divisions = [size for size, item in zip(sizes, placements, strict=True) if not item.is_replicate()]
    assert shard_count(tensor) == np.prod(divisions)


def test_state_keeps_parts_and_gives_them_back(mesh_of: Callable[[MeshShape, int], Any]) -> None:
    mesh = mesh_of(MeshShape(("dp_shard",), (2,)), 1)
    model = torch.nn.Linear(3, 5)
    for name, parameter in list(model.named_parameters()):
        divided = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        model.register_parameter(name, torch.nn.Parameter(divided))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = as_dtensor(torch.ones_like(local_shard(parameter)), parameter)
    optimizer.step()
    state = State(dict(model.named_parameters()), Buffers(model, None), [optimizer], {})
    tree = state.read(Position(Cursor(), Ledger()), {})
    assert tree["parameters"]["weight"].shape == (2, 3)
    assert tree["optimizer"]["state"][0]["exp_avg"].shape == (2, 3)
    kept = {name: value.clone() for name, value in tree["parameters"].items()}
    average = tree["optimizer"]["state"][0]["exp_avg"].clone()
    copied = {**tree, "parameters": kept}
    copied["optimizer"] = {
        **tree["optimizer"],
        "state": [{key: value.clone() for key, value in item.items()} for item in tree["optimizer"]["state"]],
    }
    for _, parameter in model.named_parameters():
        local_shard(parameter).zero_()
    optimizer.state.clear()
    state.check(copied)
    state.write(copied)
    assert local_shard(model.weight).equal(kept["weight"])
    restored = optimizer.state[model.weight]["exp_avg"]
    assert is_dtensor(restored)
    assert local_shard(restored).equal(average)
    assert not is_dtensor(optimizer.state[model.weight]["step"])
    pairs = state.divided(copied, whole=False)
    assert len(pairs) == 6  # both parameters, and two averages of each
    optimizer.step()


def test_whole_parameters_are_freed_after_an_evaluation(
    mesh_of: Callable[[MeshShape, int], Any],
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4))
    fully_shard(model, mesh=mesh_of(MeshShape(("dp_shard",), (2,)), 0))
    with torch.no_grad():
        model(torch.zeros(1, 3))
    assert not is_dtensor(model[0].weight)
    reshard([model, torch.nn.Linear(1, 1)])
    assert is_dtensor(model[0].weight)


def test_parameter_that_nobody_sums_over_the_pod_is_refused(
    mesh_of: Callable[[MeshShape, int], Any],
) -> None:
    shape = mesh_shape(("dp_shard", "tp"), (2, 2), 4)
    mesh = mesh_of(shape, 0)
    model = torch.nn.Linear(4, 4)
    with pytest.raises(UsageError, match="the gradient of weight would not be summed over dp_shard"):
        check_model([model], shape)
    check_model([model], mesh_shape("tp", None, 4))
    for name, parameter in list(model.named_parameters()):
        divided = distribute_tensor(parameter.detach(), mesh, [Shard(0), Replicate()], src_data_rank=None)
        model.register_parameter(name, torch.nn.Parameter(divided))
    check_model([model], shape)
    model.register_buffer("table", local_shard(model.weight).clone())
    check_model([model], shape)
    model.table = distribute_tensor(torch.zeros(4), mesh, [Shard(0), Replicate()], src_data_rank=None)
    with pytest.raises(UsageError, match="the buffer table is divided"):
        check_model([model], shape)
    with pytest.raises(UsageError, match="0 is a SyncBatchNorm"):
        check_model([torch.nn.Sequential(torch.nn.SyncBatchNorm(3))], mesh_shape("tp", None, 4))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"coordinator": "c:1", "strategy": "Hybrid"}, "strategy.type Hybrid keeps parameters on servers"),
        ({"coordinator": "c:1", "strategy": "ParameterServer"}, "use strategy.type AllReduce"),
        ({"coordinator": "c:1", "shard": "Gradients"}, "set shard to None"),
        ({"coordinator": "c:1", "logical_workers": 8}, "set strategy.allReduce.exact to false"),
        ({"coordinator": "c:1", "compression": "PowerSGD"}, "use BF16 or FP16"),
        ({"local_world_size": 2}, "without a job there is one process, and this is one of 2"),
    ],
)
def test_job_that_does_not_go_with_a_mesh_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        check_settings(Settings(**fields))
    check_settings(Settings())
    check_settings(Settings(coordinator="c:1", compression="BF16", local_world_size=4))


def test_steps_that_do_not_go_with_a_mesh_are_refused(mesh_of: Callable[[MeshShape, int], Any]) -> None:
    with pytest.raises(UsageError, match="give one optimizer, not a list"):
        check_steps({}, True, masters=False)
    with pytest.raises(UsageError, match="scaler is a GradScaler"):
        check_steps({"scaler": torch.amp.GradScaler("cpu", enabled=True)}, False, masters=False)
    check_steps({"scaler": torch.amp.GradScaler("cpu", enabled=False)}, False, masters=False)
    with pytest.raises(UsageError, match="master_weights copies parameters"):
        check_steps({}, False, masters=True)
    mesh = mesh_of(MeshShape(("tp",), (2,)), 0)
    holder = torch.nn.Linear(2, 2)
    check_steps({"average": holder}, False, masters=False)
    holder.weight = torch.nn.Parameter(
        distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)], src_data_rank=None)
    )
    with pytest.raises(UsageError, match="average holds tensors that are divided"):
        check_steps({"average": holder}, False, masters=False)
