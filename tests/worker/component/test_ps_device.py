"""Parameters on a device, and servers: a make-believe device whose copies take time, and CUDA if any."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_capabilities import cuda_param, needs_cuda
from ps_members import Store, build, gradients_of, members, together
from ps_servers import TOKEN, names, servers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from worker_ranks import Rank, on_ranks, seeded

from springtide.comm.layout import Field, plan_layout
from springtide.ps.compression import GradientCompression
from springtide.ps.host_memory import CudaCopier, HostMemory

torch.set_num_threads(1)


class SlowCopy:
    """Reads its source when it is let, as a device does that is behind the host."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, let: threading.Event) -> None:
        self._source, self._target, self._let = source, target, let

    def synchronize(self) -> None:
        assert self._let.wait(30)
        self._target.copy_(self._source)


class FakeDevice:
    """A device whose memory is the host's. let: copies from it arrive."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.let.set()
        self.landed = 0
        self._marked = False

    def host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> SlowCopy:
        return SlowCopy(source, target, self.let)

    def mark(self) -> None:
        self._marked = True

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert self._marked, "the last step's backward may still read the parameters"
        target.copy_(source)
        self.landed += 1


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def check_against_one_process(members_: tuple[Any, ...], steps: int, atol: float = 5e-5) -> None:
    reference = build(seed=sum(map(ord, "m0")))
    optimizer = adam(reference)
    for step in range(1, steps + 1):
        gradients_of(reference, step, 0, 1)
        optimizer.step()
    for member in members_:
        for mine, whole in zip(member.values(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.cpu(), whole.detach(), rtol=1e-4, atol=atol)


class Unheld(SlowCopy):
    """A copy on another stream: nothing keeps its source's memory from being used again meanwhile."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, let: threading.Event) -> None:
        super().__init__(target, target, let)
        self._reads = weakref.ref(source)

    def synchronize(self) -> None:
        source = self._reads()
        assert source is not None, "the source went back to the allocator before it was copied"
        self._source = source
        super().synchronize()


class CopiesUnheld(FakeDevice):
    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> SlowCopy:
        return Unheld(source, target, self.let)


def test_gradient_outlives_its_copy_to_the_host() -> None:
    copier, arrived = CopiesUnheld(), list[list[float]]()
    layout = plan_layout([Field("p", (4,), torch.float32)], 1 << 20)
    parameters = [torch.nn.Parameter(torch.zeros(4))]
    with contextlib.closing(HostMemory(parameters, layout, copier)) as memory:
        copier.let.clear()
        for value in (1.0, 2.0):
            # The thread is busy with the first one while the second one's tensor has no other owner.
            made = torch.full((layout.sizes[0],), value)
            memory.send(0, made, lambda host: arrived.append(host.tolist()[:4]))
            del made
        copier.let.set()
        memory.sent()
    assert arrived == [[1.0] * 4, [2.0] * 4]


def test_two_members_with_a_device_equal_one_process() -> None:
    with servers(2) as running, members(2, adam, copier=FakeDevice()) as (a, b):
        store, both = Store(), ["m0", "m1"]
        together(
            lambda: a.begin(1, both, running, store, fresh=True),
            lambda: b.begin(1, both, running, store, fresh=True, holds=False),
        )
        together(a.exchange.resolve, b.exchange.resolve)
        for _ in range(4):
            together(lambda: a.push(0, 2), lambda: b.push(1, 2))
            a.commit()
            b.commit()
        check_against_one_process((a, b), 4)


@pytest.mark.parametrize("kind", ["None", "BF16"])
def test_backward_awaits_no_copies_and_dropped_step_leaves_none(kind: str) -> None:
    copier = FakeDevice()
    with (
        servers(1) as running,
        members(1, adam, copier=copier, compression=lambda: GradientCompression(kind)) as (a,),
    ):
        a.begin(1, ["m0"], running, Store(), fresh=True)
        a.exchange.resolve()
        copier.let.clear()
        a.send(0, 1)  # returns, though nothing has left the device
        prepared = threading.Thread(target=a.exchange.prepare)
        prepared.start()
        prepared.join(0.2)
        assert prepared.is_alive(), "prepared without the gradients"
        copier.let.set()
        prepared.join(30)
        a.commit()
        a.values()
        assert copier.landed == len(a.exchange.chunks)
        # The next step is dropped while its gradients are on their way, and done again in another generation.
        copier.let.clear()
        a.send(0, 1)
        for flat in a.flats:
            flat.fill_(float("nan"))
        begun = threading.Thread(target=lambda: a.begin(2, ["m0"], running, Store(), step=1))
        begun.start()
        begun.join(0.2)
        assert begun.is_alive(), "copies of the dropped step are still under way"
        copier.let.set()
        begun.join(30)
        a.exchange.resolve()
        for _ in range(2):
            a.push(0, 1)
            a.commit()
        check_against_one_process((a,), 3, 1e-3 if kind == "BF16" else 5e-5)


def test_a_server_that_is_gone_is_found_by_prepare() -> None:
    copier = FakeDevice()
    with servers(2) as running, members(1, adam, copier=copier) as (a,):
        a.begin(1, ["m0"], running, Store(), fresh=True)
        a.exchange.resolve()
        copier.let.clear()
        a.send(0, 1)
        running[1].close(30.0)
        copier.let.set()
        with pytest.raises(RuntimeError, match="parameter server"):
            a.exchange.prepare()


on_cuda = cuda_param("servers")


@pytest.mark.parametrize("device", ["cpu", on_cuda])
def test_script_trains_with_scaler_and_average_of_weights(device: str) -> None:
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
    y = torch.randn(24, 3, generator=torch.Generator().manual_seed(2))

    def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, AveragedModel]:
        model = build(seed=4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(device, init_scale=256.0)
        return model, optimizer, scaler, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def make_step(model: Any, optimizer: Any, scaler: Any, average: Any, inputs: Any, wanted: Any) -> None:
        loss = (model(inputs.to(device)) - wanted.to(device)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
        optimizer.zero_grad()

    def script(rank: Rank) -> list[torch.Tensor]:
        with seeded(4):
            model, optimizer, scaler, average = parts()
        rank.distribute(model, optimizer, scaler=scaler, average=average)
        rank.enter_servers(names(running), store)
        for batch in rank.batches((x, y, torch.arange(24)), batch_size=8, epochs=2, seed=0):
            with rank.step():
                inputs, wanted, ids = batch
                mine.setdefault(rank.step_number, []).append(ids)
                make_step(model, optimizer, scaler, average, inputs, wanted)
        rank.runtime.settle(None)
        return [parameter.detach().cpu() for parameter in [*model.parameters(), *average.parameters()]]

    store = Store()
    mine: dict[int, list[torch.Tensor]] = {}
    with servers(2) as running:
        results = on_ranks(2, script, strategy="ParameterServer", token=TOKEN)
    model, optimizer, scaler, average = parts()
    order = [torch.cat(mine[step]) for step in sorted(mine)]
    assert [len(ids) for ids in order] == [8] * 6
    for ids in order:
        make_step(model, optimizer, scaler, average, x[ids], y[ids])
    expected = [parameter.detach().cpu() for parameter in [*model.parameters(), *average.parameters()]]
    for result in results:
        for found, whole in zip(result, expected, strict=True):
            torch.testing.assert_close(found, whole, rtol=1e-4, atol=2e-6)


@needs_cuda("servers")
@pytest.mark.parametrize("kind", ["None", "TopK"])
def test_on_cuda(kind: str) -> None:
    make: Callable[[], GradientCompression] = lambda: GradientCompression(kind, 0.3)  # noqa: E731
    with servers(2) as running, members(2, adam, device="cuda", compression=make) as (a, b):
        store, both = Store(), ["m0", "m1"]
        together(
            lambda: a.begin(1, both, running, store, fresh=True),
            lambda: b.begin(1, both, running, store, fresh=True, holds=False),
        )
        together(a.exchange.resolve, b.exchange.resolve)
        for _ in range(4):
            together(lambda: a.push(0, 2), lambda: b.push(1, 2))
            a.commit()
            b.commit()
        assert all(torch.equal(mine, other) for mine, other in zip(a.values(), b.values(), strict=True))
        if kind == "None":
            check_against_one_process((a, b), 4, 1e-4)


@needs_cuda("streams")
def test_copies_overlap_with_compute_on_cuda() -> None:
    """Gradients leave, and values arrive, while the script's stream is busy with what was queued before."""
    cuda: Any = torch.cuda
    device = torch.device("cuda", 0)
    copier, size = CudaCopier(device), 1 << 22
    made, gone = torch.arange(float(size), device=device), copier.host(size, torch.float32)
    come, held = copier.host(size, torch.float32), torch.zeros(size, device=device)
    come.fill_(7.0)
    cuda.synchronize()

    def busy() -> Any:
        """Some seconds of work on the script's stream, and the event of its end."""
        cuda._sleep(6_000_000_000)  # cycles
        return cuda.current_stream(device).record_event()

    left = copier.to_host(made, gone)
    computed = busy()
    left.synchronize()
    assert not computed.query(), "the copy waited for what came after it"
    computed.synchronize()
    assert torch.equal(gone, made.cpu())

    copier.mark()
    computed = busy()
    copier.to_device(come, held)
    copier.incoming.record_event().synchronize()
    assert not computed.query(), "the copy waited for what does not read the old values"
    assert float(held.min()) == 7.0  # the script's stream goes on behind the copy


@pytest.mark.parametrize("device", ["cpu", on_cuda])
@pytest.mark.parametrize("how", ["plain", "scaled and clipped", "TopK", "of two"])
def test_without_common_steps_values_go_over_the_device_s_copies(device: str, how: str) -> None:
    """One worker equals one process; of two each range counts once, and both end with the same values."""
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
    y = torch.randn(24, 3, generator=torch.Generator().manual_seed(2))
    clip_norm = 0.3 if how == "scaled and clipped" else None
    store, orders = Store(), dict[int, list[torch.Tensor]]()

    def parts() -> tuple[Any, Any, Any]:
        with seeded(4):
            model = build(seed=4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, torch.amp.GradScaler(device, init_scale=64.0, enabled=clip_norm is not None)

    def make_step(model: Any, optimizer: Any, scaler: Any, ids: torch.Tensor) -> None:
        loss = (model(x[ids].to(device)) - y[ids].to(device)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def script(rank: Rank) -> list[torch.Tensor]:
        model, optimizer, scaler = parts()
        if device == "cpu":
            rank.copier = copier = FakeDevice()
        rank.distribute(model, optimizer, scaler=scaler, clip_norm=clip_norm)
        exchange = rank.trainer.servers
        assert exchange is not None
        rank.enter_servers(names(running), store)
        for batch in rank.batches(torch.arange(24), batch_size=8, epochs=2, seed=0):
            with rank.step():
                orders.setdefault(rank.rank, []).append(batch.data)
                make_step(model, optimizer, scaler, batch.data)
        rank.runtime.settle(None)
        assert device != "cpu" or copier.landed >= len(exchange.chunks)
        ledger = rank.runtime.position.ledger.audit()
        assert (ledger["totalSeen"], ledger["repeated"], ledger["lost"]) == (48, 0, 0)
        return [parameter.detach().cpu() for parameter in model.parameters()]

    multi_step = how == "of two"
    more: dict[str, Any] = {"compression": "TopK", "top_k_ratio": 1.0} if how == "TopK" else {}
    with servers(2) as running:
        results = on_ranks(
            1 + multi_step,
            script,
            strategy="ParameterServer",
            consistency="Asynchronous",
            token=TOKEN,
            **more,
        )
    if multi_step:
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        return
    model, optimizer, scaler = parts()
    if clip_norm is not None:

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)

        optimizer.register_step_pre_hook(clip)
    for ids in orders[0]:
        make_step(model, optimizer, scaler, ids)
    for found, whole in zip(results[0], model.parameters(), strict=True):
        torch.testing.assert_close(found, whole.detach().cpu(), rtol=1e-4, atol=2e-6)
