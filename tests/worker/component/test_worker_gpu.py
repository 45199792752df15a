"""Scripts of the kinds that people train with on GPUs: on the CPU in each run, on a device by `make gpu`."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoint_members import Members, state
from gpu_capabilities import cuda_param, needs_cuda
from torch import nn
from worker_checks import check
from worker_cluster import WorkerCluster, Zygote
from worker_groups import form_groups, together, wired_stores
from worker_ranks import Rank, on_ranks, seeded
from worker_reference import train_alone

from springtide.comm import codec
from springtide.comm.nccl import form_nccl, tame_nccl
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.train_step.buffers import Buffers
from springtide.train_step.state import Position, State

torch.set_num_threads(1)
torch.backends.cudnn.allow_tf32 = False  # two batches would differ from a whole one in the third digit

IMAGES = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = IMAGES[:, :, 0, 0].argmax(1)
POSITION = Position(Cursor(0, 0, 3, 3), Ledger(stage=0, epoch=0, expected=10, count=3), 1.5)


def convolutions(norm: bool = False) -> nn.Module:
    layers: list[nn.Module] = [nn.BatchNorm2d(3)] if norm else []
    layers += [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


@dataclass
class Recipe:
    """A script: what it trains, and with what.

    Args:
        device: type of the device.
        optimizer: makes it of the parameters.
        norm: whether the model begins with a BatchNorm.
        channels_last: memory format of the model and its images.
        autocast: its dtype; None: without.
        scaled: with a GradScaler.
        compiled: the compiler's backend; "": without.
    """

    device: str
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    norm: bool = False
    channels_last: bool = False
    autocast: torch.dtype | None = None
    scaled: bool = False
    compiled: str = ""

    def make(self) -> Script:
        with seeded(4):
            model = convolutions(self.norm).to(self.device)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)
        scaler = torch.amp.GradScaler(self.device, init_scale=256.0, enabled=self.scaled)
        return Script(self, model, self.optimizer(model.parameters()), scaler)


@dataclass
class Script:
    step_spec: Recipe
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any

    def __post_init__(self) -> None:
        self.compute: Any = self.model
        if self.step_spec.compiled:
            self.compute = torch.compile(self.model, backend=self.step_spec.compiled)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        step_spec = self.step_spec
        images, labels = images.to(step_spec.device), labels.to(step_spec.device)
        if step_spec.channels_last:
            images = images.to(memory_format=torch.channels_last)
        with torch.autocast(step_spec.device, step_spec.autocast, enabled=step_spec.autocast is not None):
            loss = F.cross_entropy(self.compute(images).float(), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: item.detach().cpu().clone() for name, item in self.model.state_dict().items()}

    def state(self) -> State:
        return State(dict(self.model.named_parameters()), Buffers(self.model), [self.optimizer], {})


def train_on_ranks(step_spec: Recipe, size: int = 2) -> list[dict[str, torch.Tensor]]:
    """Return what each rank ends with after two epochs; batches of 8."""

    def script(rank: Rank) -> dict[str, torch.Tensor]:
        made = step_spec.make()
        rank.distribute(made.model, made.optimizer, scaler=made.scaler)
        for batch in rank.batches((IMAGES, LABELS), batch_size=8, epochs=2, shuffle=False):
            with rank.step():
                made.step(*batch)
        return made.tensors()

    return on_ranks(size, script)


def train_plainly(step_spec: Recipe) -> dict[str, torch.Tensor]:
    """Return what one process of plain PyTorch ends with."""
    made = step_spec.make()
    for _ in range(2):
        for images, labels in zip(IMAGES.split(8), LABELS.split(8), strict=True):
            made.step(images, labels)
    return made.tensors()


def check_ranks(step_spec: Recipe, atol: float) -> None:
    """Two ranks end with equal bits, and with what plain PyTorch ends with."""
    one, other = train_on_ranks(step_spec)
    assert all(torch.equal(one[name], other[name]) for name in one)
    plain = train_plainly(step_spec)
    for name, value in plain.items():
        torch.testing.assert_close(one[name], value, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


EPS = 1e-3
"""Larger than torch's own, with which the sign of a gradient near zero decides on a whole step of Adam's."""
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=EPS, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=EPS, foreach=True),
    "capturable Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=EPS, capturable=True),
    "learning rate on the device": lambda p: _with_rate_there(list(p)),
}


def _with_rate_there(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate = torch.tensor(0.01, device=parameters[0].device)
    return torch.optim.AdamW(parameters, lr=rate, eps=EPS, fused=True)


def _skip_capturable(kind: str, device: str) -> None:
    if kind == "capturable Adam" and device == "cpu":
        pytest.skip("torch has capturable optimizers for devices only")


@pytest.mark.parametrize("device", ["cpu", cuda_param("optimizers")])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_on_two_ranks_equal_plain_torch(kind: str, device: str) -> None:
    _skip_capturable(kind, device)
    check_ranks(Recipe(device, OPTIMIZERS[kind]), 2e-4)


def travelled(tree: Any) -> Any:
    """Return the tree as it comes out of a transfer: on the CPU, views into one buffer."""
    header, tensors = codec.flatten(tree)
    return codec.unpack(header, codec.pack(tensors))


def check_goes_on(script: Script, other: Script) -> None:
    """Check that both scripts have the same bits now and after two steps, and that their state lies alike."""
    for _ in range(3):
        ours, theirs = script.tensors(), other.tensors()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        for mine, same in zip(script.model.parameters(), other.model.parameters(), strict=True):
            states = script.optimizer.state[mine], other.optimizer.state[same]
            assert states[0].keys() == states[1].keys()
            for name, value in states[0].items():
                copied = states[1][name]
                assert (copied.device, copied.stride()) == (value.device, value.stride()), name
                assert torch.equal(copied, value), name
        script.step(IMAGES[:8], LABELS[:8])
        other.step(IMAGES[:8], LABELS[:8])


@pytest.mark.parametrize("device", ["cpu", cuda_param("optimizers")])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_joiner_s_optimizer_goes_on_as_the_holder_s(kind: str, device: str) -> None:
    _skip_capturable(kind, device)
    step_spec = Recipe(device, OPTIMIZERS[kind], norm=True, channels_last=True)
    holder, joiner = step_spec.make(), step_spec.make()
    for _ in range(3):
        holder.step(IMAGES[8:16], LABELS[8:16])
    joiner.step(IMAGES[16:], LABELS[16:])
    joiner.state().write(travelled(holder.state().read(POSITION, {})), give=True)
    check_goes_on(holder, joiner)


@pytest.mark.parametrize("device", ["cpu", cuda_param("checkpoints")])
@pytest.mark.parametrize("kind", ["fused AdamW", "capturable Adam"])
def test_restored_state_has_the_bits_of_the_saved(kind: str, device: str, tmp_path: Path) -> None:
    """Two members write a share each, and what is trained after that is not in it."""
    _skip_capturable(kind, device)
    step_spec = Recipe(device, OPTIMIZERS[kind], norm=True, channels_last=True)
    script = step_spec.make()
    for _ in range(3):
        script.step(IMAGES[8:16], LABELS[8:16])
    saved = copy.deepcopy(script)
    members = Members(tmp_path, 2)
    members.save(state(3), script.state().read(POSITION, {}))
    script.step(IMAGES[:8], LABELS[:8])
    found, _ = members.all[0].newest(must_read=True)
    assert found is not None
    members.close()
    restored = step_spec.make()
    restored.state().write(found.tree)
    check_goes_on(saved, restored)


@pytest.mark.parametrize("device", ["cpu", cuda_param("channels-last")])
def test_channels_last_with_a_fused_optimizer_trains_right(device: str) -> None:
    check_ranks(Recipe(device, OPTIMIZERS["fused AdamW"], channels_last=True), 2e-4)


@pytest.mark.parametrize(
    ("device", "dtype", "scaled"),
    [
        ("cpu", torch.bfloat16, False),
        ("cpu", torch.float32, True),
        pytest.param("cuda", torch.bfloat16, False, marks=cuda_param("amp").marks),
        pytest.param("cuda", torch.float16, True, marks=cuda_param("amp").marks),
    ],
)
def test_mixed_precision_on_two_ranks_is_near_plain_torch(
    device: str, dtype: torch.dtype, scaled: bool
) -> None:
    autocast = None if dtype == torch.float32 else dtype
    check_ranks(Recipe(device, autocast=autocast, scaled=scaled), 2e-2 if autocast else 1e-5)


@pytest.mark.parametrize("device", ["cpu", cuda_param("batchnorm")])
def test_batchnorm_s_statistics_are_those_of_all_samples(device: str) -> None:
    """The first layer sees the samples themselves: its running mean is plain PyTorch's."""
    step_spec = Recipe(device, norm=True)
    one, other = train_on_ranks(step_spec)
    assert all(torch.equal(one[name], other[name]) for name in one)
    plain = train_plainly(step_spec)
    torch.testing.assert_close(one["0.running_mean"], plain["0.running_mean"], rtol=0, atol=1e-5)
    assert one["0.num_batches_tracked"] == plain["0.num_batches_tracked"] == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=cuda_param("compile").marks)],
)
def test_compiled_model_trains_as_plain_torch_s(device: str, backend: str) -> None:
    torch.compiler.reset()
    step_spec = Recipe(device, compiled=backend)
    compiled, plain = train_on_ranks(step_spec, 1)[0], train_plainly(Recipe(device))
    torch.compiler.reset()
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=2e-4)


# ---- real processes

JOB: dict[str, Any] = {"samples": 160, "batch": 32, "epochs": 6, "pace": 0.02, "optimizer": "fused"}
GLOO = {"SPRINGTIDE_BACKEND": "Gloo"}  # NCCL refuses two ranks on one device


@pytest.mark.parametrize("device", ["cpu", cuda_param("joins")])
def test_joiner_and_survivor_end_with_one_process_s_values(
    device: str, new_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path: Path
) -> None:
    """A worker joins, another is killed in its sums and one takes its place."""
    options = JOB | {"device": device, "model": "plain"}
    alone = tmp_path / "alone"
    alone.mkdir()
    reference = train_alone(zygote, alone, options)
    cluster = new_cluster(options, environment=GLOO)
    (steady,) = cluster.start(1)
    cluster.until_step(4)
    victim = cluster.add(fault="gradients:*:kill")
    cluster.until(lambda: not victim.running, "the joiner's death in its first sums")
    joiner = cluster.add()
    cluster.until_done(steady, joiner)
    check(cluster, reference, [steady, joiner])
    assert len(joiner.commits()) > 0


@needs_cuda("processes")
@pytest.mark.parametrize("more", [{}, {"scaler": True}, {"model": "norm"}, {"compile": "aot_eager"}])
def test_two_processes_share_one_device(
    more: dict[str, Any], new_cluster: Callable[..., WorkerCluster]
) -> None:
    cluster = new_cluster(JOB | {"device": "cuda"} | more, environment=GLOO)
    workers = cluster.start(2)
    cluster.until_done()
    results = [worker.result() for worker in workers]
    assert cluster.finished() == workers, cluster.logs()
    assert results[0] is not None
    assert results[1] is not None
    for key in ("parameters", "buffers", "step"):
        assert results[0][key] == results[1][key]


@needs_cuda("nccl-two", devices=2)
def test_job_over_nccl_survives_a_death_and_a_join(new_cluster: Callable[..., WorkerCluster]) -> None:
    """Two workers, each with a device that is not its process's current one; one dies in its sums."""
    options = JOB | {"device": "cuda by slot", "epochs": 12, "model": "norm"}
    cluster = new_cluster(options, environment={"SPRINGTIDE_BACKEND": "NCCL"})
    steady, victim = cluster.start(2, faults={1: "gradients:6:kill"})
    cluster.until(lambda: not victim.running, "the death in the sums of step 6")
    cluster.add(hold=False).kill()  # its slot is that of the survivor's device
    joiner = cluster.add()
    cluster.until_done(steady, joiner)
    results = [worker.result() for worker in (steady, joiner)]
    assert results[0] is not None, cluster.logs()
    assert results[1] is not None, cluster.logs()
    assert len(joiner.commits()) > 0
    for key in ("parameters", "buffers", "step"):
        assert results[0][key] == results[1][key]


# ---- NCCL itself


def sums_of_one(device: torch.device) -> Any:
    tame_nccl()
    return form_nccl(wired_stores(1)[0], 0, 1, device, 30.0)


def keep_busy(seconds: float) -> None:
    """Have the current stream do nothing for about so long."""
    cuda: Any = torch.cuda
    cuda._sleep(int(seconds * 1.5e9))  # cycles


@needs_cuda("nccl-one")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_nccl_sums_each_type_of_gradients(dtype: torch.dtype) -> None:
    sums = sums_of_one(torch.device("cuda", 0))
    tensors = [torch.arange(128, device="cuda").to(dtype) for _ in range(50)]
    started = [sums.start_sum(tensor) for tensor in tensors]
    for work in started:
        work.wait()
    assert all(torch.equal(tensor.cpu(), torch.arange(128).to(dtype)) for tensor in tensors)
    sums.shut()
    assert sums.release()


@needs_cuda("nccl-one")
def test_nccl_s_work_behaves_as_our_stand_in() -> None:
    """The stand-in of test_worker_device.py: `wait` only queues, and asking for success is an error."""
    tame_nccl()
    tensor = torch.ones(1000, device="cuda")
    options: Any = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=30)
    nccl: Any = dist
    backend = nccl.ProcessGroupNCCL(wired_stores(1)[0], 0, 1, nccl.ProcessGroupNCCL.Options())
    backend.allreduce([tensor], options).wait()  # connects
    torch.cuda.synchronize()
    keep_busy(2.0)
    work = backend.allreduce([tensor], options)
    assert not work.is_completed()
    began = time.monotonic()
    work.wait()
    assert time.monotonic() - began < 1.0
    torch.cuda.synchronize()
    assert work.is_completed()
    assert work.exception() is None
    with pytest.raises(NotImplementedError):
        work.is_success()
    backend.abort()


@needs_cuda("aborts")
def test_shut_releases_a_sum_that_is_stuck_in_nccl() -> None:
    """Behind work of the script's that does not end for a while."""
    device = torch.device("cuda", 0)
    sums = sums_of_one(device)
    tensor = torch.ones(1000, device=device)
    keep_busy(5.0)
    work = sums.start_sum(tensor)
    sums.shut()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="was shut"):
        work.wait()
    assert time.monotonic() - began < 2.0
    assert sums.release(), "the buffers can be used again"
    assert time.monotonic() - began < 25.0
    tensor.fill_(3.0)
    assert float(tensor.sum()) == 3000.0


@pytest.mark.parametrize("device", ["cpu", cuda_param("aborts")])
def test_shut_releases_a_sum_that_a_peer_never_joins(device: str) -> None:
    one, other = form_groups(2)
    tensor = torch.ones(1000, device=device)
    work = one.start_sum(tensor)
    began = time.monotonic()
    other.shut()
    with pytest.raises(RuntimeError):
        work.wait()
    assert one.release(), "the buffers can be used again"
    assert time.monotonic() - began < 15.0
    assert other.release()


@needs_cuda("nccl-two")
def test_nccl_refuses_two_ranks_on_one_device() -> None:
    """Skipped where it does so, with its words: two devices are needed to see more."""
    tame_nccl()
    device = torch.device("cuda", 0)
    stores = wired_stores(2)

    def member(rank: int) -> str:
        try:
            form_nccl(stores[rank], rank, 2, device, 30.0).shut()
        except RuntimeError as error:
            return str(error)
        return ""

    told: Sequence[str] = together([lambda r=rank: member(r) for rank in range(2)], 80.0)
    if not any(told):
        return  # this NCCL allows it
    known = ("Duplicate GPU", "invalid usage", "ncclInvalidUsage")
    assert any(word in text for text in told for word in known), f"two ranks on one device: {told}"
    if torch.cuda.device_count() < 2:
        pytest.skip("Duplicate GPU detected: NCCL refuses two ranks on one device, and there is one only")


@pytest.mark.parametrize("device", ["cpu", cuda_param("gloo")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_gloo_sums_each_type_of_gradients(device: str, dtype: torch.dtype) -> None:
    def member(group: Any) -> torch.Tensor:
        tensors = [torch.arange(64, device=device).to(dtype) for _ in range(20)]
        for work in [group.start_sum(tensor) for tensor in tensors]:
            work.wait()
        highest = torch.tensor([group.rank], device=device, dtype=torch.int32)
        group.start_max(highest).wait()
        assert int(highest) == 1
        assert group.release()
        return torch.stack(tensors).cpu()

    for found in together([lambda g=group: member(g) for group in form_groups(2)]):
        assert torch.equal(found, (2 * torch.arange(64)).to(dtype).expand(20, 64))
