"""Exact sums on a device: the bits of the CPU's way, nothing through the host, on a make-believe device; and
the real one where there is CUDA."""

from __future__ import annotations

import contextlib
import math
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exact_world import SHAPES, World, bits, gradients, grouping, layout
from fake_device import DEVICE, Accelerator, There
from gpu_capabilities import needs_cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_groups import wired_stores
from worker_ranks import Rank, on_ranks, seeded

from springtide.comm.combine import Rule
from springtide.comm.nccl import DeviceSums, form_nccl, tame_nccl
from springtide.comm.process_group import Group
from springtide.data.ledger import Contribution
from springtide.errors import UsageError
from springtide.exact import exponents as scale
from springtide.exact.buckets import ExactBuckets
from springtide.exact.buffers import pack_parts
from springtide.exact.on_device import DEVICE_PIECE, DeviceRounder
from springtide.exact.parts import PartContribution
from springtide.exact.rounding import BLOCK
from springtide.exact.settings import CUBLAS_WORKSPACE, OnGpu, check_gpu, describe


def moved(accelerator: Accelerator, made: list[list[Any]]) -> list[list[Any]]:
    return [[None if item is None else accelerator.put(item) for item in own] for own in made]


def here(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    assert all(isinstance(tensor, There) for tensor in tensors)
    return [tensor.here for tensor in tensors if isinstance(tensor, There)]


@settings(max_examples=20, deadline=None)
@given(
    grouping(),
    st.integers(0, 1 << 30),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([0.0, math.nan, math.inf, 1e4]),
)
def test_a_device_s_way_gives_the_bits_of_the_cpu_s(
    case: tuple[int, list[list[int]]], seed: int, dtype: torch.dtype, bad: float
) -> None:
    parts, assignment = case
    scales = [1.0 / (part + 2) for part in range(parts)]
    near = World([list(range(parts))], parts, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("springtide.exact.buckets.Rounder", DeviceRounder)
        far = World(assignment, parts, dtype)
    for step in range(3):
        made = gradients(parts, seed + step, 1 + step)
        made = [[None if g is None else g.to(dtype) for g in own] for own in made]
        if bad and step == 1 and made[-1][1] is not None:
            made[-1][1][300] = bad
        assert bits(far.step(made, scales)) == bits(near.step(made, scales))
        for worker in far.workers:
            assert torch.equal(worker.exponents.values, near.workers[0].exponents.values)


def test_sums_stay_on_the_device() -> None:
    """Values of another scale, missing gradients, and one that is not finite."""
    near = World([[0, 1, 2, 3]], 4)
    with Accelerator() as accelerator:
        far = World([[2, 0], [], [1, 3]], 4, device=DEVICE)
        for step in range(3):
            made = gradients(4, step, 1 + step)
            if step == 1:
                made[2][3] = torch.full(SHAPES[3], math.nan)
            expected = near.step(made, [0.25] * 4)
            assert bits(here(far.step(moved(accelerator, made), [0.25] * 4))) == bits(expected)
            for worker in far.workers:
                assert bits(here([worker.exponents.values])) == bits([near.workers[0].exponents.values])


def test_the_host_waits_for_one_answer_in_a_step() -> None:
    """Whether a value did not fit; and in a step that is done again, whether a block is not finite."""
    made = gradients(4, 3, missing=0.0)
    with Accelerator() as accelerator:
        far = World([[0, 1], [2, 3]], 4, device=DEVICE)
        far.step(moved(accelerator, made), [0.25] * 4)
        assert accelerator.syncs == ["exceeded"] + ["begin"] * 2 + ["exceeded"] * 2
        accelerator.syncs.clear()
        far.step(moved(accelerator, made), [0.25] * 4)
        assert accelerator.syncs == ["exceeded"] * 2


def test_a_large_gradient_is_rounded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(5 * BLOCK + 7)
    found: list[torch.Tensor] = []
    for most in (2 * BLOCK, DEVICE_PIECE):
        monkeypatch.setattr("springtide.exact.on_device.DEVICE_PIECE", most)
        rounder = DeviceRounder(28)
        exponents = torch.full((6,), 3, dtype=torch.int32)
        rounder.begin(exponents, scale.factors(exponents, 8))
        total = torch.zeros(values.numel(), dtype=torch.int32)
        for fresh in (True, False):
            rounder.add(values.view(-1, 1).t(), 0.5, slice(0, 6), total, fresh)
        assert (rounder.needed == scale.LOWEST).all()
        found.append(total)
    assert torch.equal(*found)
    units = scale.units(torch.full((6,), 3, dtype=torch.int32), 8)
    assert torch.allclose(found[0] * units.repeat_interleave(BLOCK)[: values.numel()], values, atol=1e-6)


def test_exponents_come_from_any_device() -> None:
    state = {"exponents": torch.arange(4, dtype=torch.int32)}
    with Accelerator() as accelerator:
        exponents = scale.Exponents(4, DEVICE)
        exponents.load_state_dict(state)
        assert accelerator.syncs == []
        assert here([exponents.values])[0].tolist() == [0, 1, 2, 3]
        home = scale.Exponents(4)
        home.load_state_dict(exponents.state_dict())
        assert home.values.tolist() == [0, 1, 2, 3]
        assert not isinstance(home.values, There)


def test_buffers_of_all_parts_leave_the_device_in_one_copy() -> None:
    committed = [torch.zeros(2), torch.tensor(5), torch.tensor([7.0])]
    left: list[dict[int, torch.Tensor]] = [
        {0: torch.tensor([1.0, -0.0]), 1: torch.tensor(-(6 << 40))},
        {0: torch.tensor([2.0, 4.0]), 1: torch.tensor(9), 2: torch.tensor([11.0])},
    ]

    def kept(number: int, buffers: dict[int, torch.Tensor]) -> PartContribution:
        return PartContribution(number, 1.0, Contribution(0, 0, 0), [True] * 3, buffers)

    rules = [Rule.MEAN, Rule.FIRST, Rule.MEAN]
    expected = pack_parts([kept(n, own) for n, own in enumerate(left)], [0, 1, 2], committed, rules, 4)
    with Accelerator() as accelerator:
        far = [kept(n, {key: accelerator.put(v) for key, v in own.items()}) for n, own in enumerate(left)]
        packed = pack_parts(far, [0, 1, 2], [accelerator.put(item) for item in committed], rules, 4)
        assert accelerator.syncs == ["pack_parts"]
    assert torch.equal(packed, expected)


class Stream:
    def __init__(self, name: str) -> None:
        self.name, self.behind = name, list[str]()

    def wait_stream(self, stream: Any) -> None:
        self.behind.append(stream.name)


def test_streams_rounding_into_a_bucket_run_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    main, side = Stream("main"), Stream("side")
    now = main
    monkeypatch.setattr("springtide.comm.buckets.current_stream_of", lambda device: lambda: now)
    buckets = ExactBuckets(layout(), 2)
    buckets.begin(Group(None, 0, 1, 1.0).start_sum, last=False)
    index = len(SHAPES) - 1
    now = side
    buckets.put(index, torch.ones(SHAPES[index]), 1.0, 0, True)
    assert side.behind == ["main"], "the scales were made there"
    now = main
    buckets.end_part()
    buckets.begin_part(last=True)
    main.behind.clear()
    buckets.put(index, torch.ones(SHAPES[index]), 1.0, 0, True)
    assert "side" in main.behind, "this part is added to what the other stream has rounded"
    buckets.flush()
    now = Stream("third")
    assert buckets.exceeded, "ones do not fit a first step's exponents"
    assert set(now.behind) == {"main", "side"}, "who asks goes behind all that have rounded"


class FarBackend:
    """Sums of the make-believe device, as NCCL takes them: int32, added or their maximum."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.types: set[torch.dtype] = set()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.types.add(tensors[0].dtype)
        return self._backend.allreduce(here(tensors), options)


class Happened:
    def query(self) -> bool:
        return True


def train(rank: Rank, device: torch.device, scaled: bool) -> list[bytes]:
    """Steps of up to five logical parts, with micro-batches, BatchNorm, clipping and Adam."""
    with contextlib.ExitStack() as stack:
        if device == DEVICE:
            stack.enter_context(Accelerator())
        with seeded(1):
            x = torch.randn(37, 6)
            model = torch.nn.Sequential(
                torch.nn.Linear(6, 20), torch.nn.BatchNorm1d(20), torch.nn.ReLU(), torch.nn.Linear(20, 3)
            )
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(parameter.detach().to(device)))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", 2.0**126, 4.0, 2.0**-7, 4, enabled=scaled)
        rank.distribute(model, optimizer, clip_norm=0.5, scaler=scaler)
        group, backend = rank.runtime.group, None
        if device == DEVICE and group.size > 1:
            backend = FarBackend(group.backend)
            group.use_device(DeviceSums(backend, timedelta(seconds=30), None, lambda _: Happened()))
        for batch in rank.batches((x, x[:, :3].argmax(1)), batch_size=16, epochs=2, seed=3):
            with rank.step():
                for inputs, labels in batch.split(2):
                    loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
                    scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert backend is None or backend.types == {torch.int32}, "nothing else of the gradients travels"
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [item for s in optimizer.state.values() for item in s.values()]
        return bits(
            [tensor.here if isinstance(tensor, There) else tensor.detach().cpu() for tensor in tensors]
        )


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
def test_whole_steps_on_a_device_give_the_bits_of_the_cpu(
    scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = on_ranks(1, lambda rank: train(rank, torch.device("cpu"), scaled), logical_workers=5)
    # The make-believe device is of a type that is refused otherwise.
    monkeypatch.setattr("springtide.train_step.validation.check_parameters", lambda *_, **__: None)
    for size in (1, 3):
        found = on_ranks(size, lambda rank: train(rank, DEVICE, scaled), logical_workers=5)
        assert all(tensors == expected for tensors in found), f"{size} workers"


def _gpu(**changed: Any) -> OnGpu:
    right = {"workspace": CUBLAS_WORKSPACE, "deterministic": True, "only_warns": False, "benchmark": False}
    return OnGpu(**(right | changed))


def test_what_a_gpu_s_bits_depend_on_is_asked_for() -> None:
    check_gpu(_gpu())
    for changed, message in (
        ({"workspace": ""}, r"CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment.*it is ''.*before starting"),
        ({"workspace": ":16:8"}, "it is ':16:8'"),
        ({"deterministic": False}, r"leave torch\.use_deterministic_algorithms\(\) out"),
        ({"only_warns": True}, r"leave torch\.use_deterministic_algorithms\(\) out"),
        ({"benchmark": True}, r"cudnn\.benchmark since springtide\.init\(\).*leave that out"),
    ):
        with pytest.raises(UsageError, match=message):
            check_gpu(_gpu(**changed))


def test_members_compare_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    found = set()
    for name in ("one model", "another one"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        found.add(describe(4, gpu))
    assert len(found | {describe(4, cpu)}) == 3
    assert describe(0, gpu) == ""


@needs_cuda("exact")
def test_the_integers_of_a_gpu_are_those_of_the_cpu() -> None:
    device = torch.device("cuda", 0)
    near, far = World([[0, 1, 2, 3]], 4), World([[2, 0], [], [1, 3]], 4, device=device)
    for step in range(4):
        made = gradients(4, step, 1 + step)
        if step == 1:
            made[2][3] = torch.full(SHAPES[3], math.nan)
        there = [[None if item is None else item.to(device) for item in own] for own in made]
        found = [tensor.cpu() for tensor in far.step(there, [0.25] * 4)]
        expected = near.step(made, [0.25] * 4)
        for mine, same in zip(found, expected, strict=True):
            assert torch.equal(mine.nan_to_num(7.0), same.nan_to_num(7.0))
        for worker in far.workers:
            assert torch.equal(worker.exponents.values.cpu(), near.workers[0].exponents.values)


@needs_cuda("exact")
def test_nccl_takes_the_integers_and_their_maximum() -> None:
    tame_nccl()
    device = torch.device("cuda", 0)
    sums = form_nccl(wired_stores(1)[0], 0, 1, device, 30.0)
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        tensor = torch.arange(-500, 500, device=device, dtype=torch.int32)
        sums.start(tensor, operation).wait()
        assert torch.equal(tensor.cpu(), torch.arange(-500, 500, dtype=torch.int32))
    sums.shut()
    assert sums.release()


@needs_cuda("exact")
@pytest.mark.parametrize("scaled", [False, True])
def test_equal_bits_on_a_gpu_at_any_size(scaled: bool) -> None:
    """One, two and three workers share the device; their sums go through gloo."""
    device = torch.device("cuda", 0)
    (expected,) = on_ranks(1, lambda rank: train(rank, device, scaled), logical_workers=5)
    for size in (2, 3):
        found = on_ranks(size, lambda rank: train(rank, device, scaled), logical_workers=5)
        assert all(tensors == expected for tensors in found), f"{size} workers"
