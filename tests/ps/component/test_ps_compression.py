"""Gradients that travel to servers in 16 bits or as their largest elements: bytes, sums, what is owed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection
from typing import Any

import celpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from ps_members import Store, build, gradients_of, members, together
from ps_servers import TOKEN, servers

from springtide.errors import UsageError
from springtide.ps.compression import GradientCompression, Made
from springtide.ps.sharding import PlannedChunk
from springtide.settings import read_settings
from springtide.train_step.validation import declare
from springtide_operator.api.crd import custom_resource_definition
from springtide_ps.params.chunk import Chunk, ChunkError
from springtide_ps.params.sparse_gradient import (
    SparseGradient,
    SparseGradientError,
    count_elements,
    pack,
    unpack,
)
from springtide_ps.wire import frames
from springtide_ps.wire.frames import Frame, Kind
from springtide_ps.wire.stream import connect

ELEMENTS = 12
CHUNK = PlannedChunk("0.0", 0, 0, ELEMENTS, 8 * ELEMENTS, ((0, 0, 0, 5), (1, 0, 6, ELEMENTS)))
"""Two parameters with an element of padding between them."""


@given(st.sets(st.integers(0, 40)), st.sampled_from([torch.float32, torch.float64, torch.float16]))
@settings(deadline=None, max_examples=50)
def test_selected_elements_come_back(numbers: set[int], dtype: torch.dtype) -> None:
    indices = torch.tensor(sorted(numbers), dtype=torch.int32)
    block = pack(SparseGradient(indices, torch.randn(len(numbers)).to(dtype)))
    assert count_elements(block.numel(), dtype, 41) == len(numbers)
    found = unpack(block, dtype, 41)
    dense = torch.zeros(41, dtype=dtype)
    dense[indices] = found.values
    assert torch.equal(found.add_to(torch.zeros(41, dtype=dtype)), dense)
    assert sorted(dense.nonzero().flatten().tolist()) == sorted(numbers)


@given(st.binary(max_size=64))
@settings(deadline=None, max_examples=100)
def test_any_bytes_are_a_selection_or_refused(raw: bytes) -> None:
    payload = (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    )
    total = torch.zeros(5)
    try:
        unpack(payload, torch.float32, 5).add_to(total)
    except SparseGradientError:
        assert not total.any()


@pytest.mark.parametrize("indices", [[-1], [5], [1, 1], [2, 1], [0, 2**31 - 1]])
def test_elements_that_are_not_there_are_refused(indices: list[int]) -> None:
    block = pack(SparseGradient(torch.tensor(indices, dtype=torch.int32), torch.ones(len(indices))))
    with pytest.raises(SparseGradientError, match="from 0 to 4, ascending"):
        unpack(block, torch.float32, 5)


def test_chunk_refuses_misfits_before_memory_is_taken() -> None:
    chunk = Chunk(torch.zeros(5), [(0, 0, 0, 5)], "sgd", [{"lr": 0.1}])
    for nbytes, dtype in ((7, torch.float32), (48, torch.float32)):
        with pytest.raises(SparseGradientError, match="no selection from 5 elements"):
            chunk.check_sparse(nbytes, dtype)
    for other in (torch.float16, torch.int64, None):
        with pytest.raises(ChunkError, match=r"elements of a gradient are .*float32 here"):
            chunk.check_sparse(8, other)


class Owing(RuleBasedStateMachine):
    """One worker with top-k through every end that a body can have. All numbers are whole, so sums are exact.

    Of each element, what was put into the steps that count, plus what is owed, is the sum of the worker's
    gradients in them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wire = GradientCompression("TopK", 0.25)
        self.total = torch.zeros(ELEMENTS, dtype=torch.float64)
        self.applied = torch.zeros(ELEMENTS, dtype=torch.float64)
        self.generation, self.step = 1, 0
        self.made: Made | None = None
        self.gradient = self.sent = torch.zeros(ELEMENTS, dtype=torch.float64)
        self.scale = 1.0
        self.wire.loss_scale = lambda: self.scale

    @initialize()
    def start(self) -> None:
        self.stand((), False)

    def stand(self, unused: tuple[int, ...], skip: bool) -> None:
        self.wire.stand_at(self.made, [(0, unused)], skip)

    def body(self, data: st.DataObject) -> None:
        """Backward and the pushes of one body."""
        numbers = data.draw(st.lists(st.integers(-9, 9), min_size=ELEMENTS, max_size=ELEMENTS))
        self.gradient = torch.tensor(numbers, dtype=torch.float64)
        self.wire.begin(((1, 0, self.generation), self.step + 1))
        self.push()

    def push(self) -> None:
        assert self.wire.residuals is not None
        whole = self.wire.residuals.owed(CHUNK.key, self.gradient * self.scale, self.scale)
        whole[5] = 0.0  # padding
        out = self.wire.outgoing(CHUNK, self.gradient * self.scale)
        dense = torch.zeros(ELEMENTS, dtype=torch.float64)
        self.sent = (out.add_to(dense) if isinstance(out, SparseGradient) else out) / self.scale
        if isinstance(out, SparseGradient):
            assert len(out.indices) == 3
            assert out.values.abs().min() >= (whole - out.add_to(torch.zeros_like(whole))).abs().max()

    def count(self, unused: Collection[int]) -> None:
        for index, _, start, stop in CHUNK.pieces:
            if index not in unused:
                self.total[start:stop] += self.gradient[start:stop]
                self.applied[start:stop] += self.sent[start:stop]

    def advance(self, generation: int) -> None:
        self.step += 1
        self.made = ((1, 0, generation), self.step)

    @rule(data=st.data(), unused=st.sampled_from([(), (0,), (1,), (0, 1)]), skip=st.booleans())
    def commits(self, data: st.DataObject, unused: tuple[int, ...], skip: bool) -> None:
        self.body(data)
        self.advance(self.generation)
        if not skip:
            self.count(unused)
        self.stand(unused, skip)

    @rule(
        data=st.data(),
        rounds=st.lists(
            st.lists(st.sampled_from([(), (0,), (1,), (0, 1)]), max_size=3), min_size=1, max_size=3
        ),
        end=st.sampled_from(["committed", "committed by others", "dropped"]),
    )
    def several_backwards(self, data: st.DataObject, rounds: list[list[tuple[int, ...]]], end: str) -> None:
        """Run one body of several backward passes.

        Args:
            rounds: for each backward pass, the optimizer steps that take its sums, as the optimizers left
                out of each.
            end: how the body ends.
        """
        before = self.total.clone(), self.applied.clone()
        for number, parts in enumerate(rounds):
            if number:
                self.wire.begin_backward_pass(rounds[number - 1])
                numbers = data.draw(st.lists(st.integers(-9, 9), min_size=ELEMENTS, max_size=ELEMENTS))
                self.gradient = torch.tensor(numbers, dtype=torch.float64)
                self.push()
            else:
                self.body(data)
            if parts:  # what several take is owed once
                self.count({0, 1}.intersection(*parts))
        if end == "dropped":
            self.total, self.applied = before
            self.generation += 1
        else:
            self.advance(self.generation)
        if end == "committed by others":
            self.generation += 1
        parts = [(number, unused) for number, own in enumerate(rounds) for unused in own]
        self.wire.stand_at(self.made, parts, False)

    @rule(scale=st.sampled_from([0.25, 1.0, 1024.0]))
    def a_scaler_changes_its_scale(self, scale: float) -> None:
        self.scale = scale

    @rule(data=st.data())
    def is_dropped(self, data: st.DataObject) -> None:
        self.body(data)
        self.generation += 1
        self.stand((), False)

    @rule(data=st.data(), unused=st.sampled_from([(), (0,)]))
    def is_dropped_here_and_committed_by_others(self, data: st.DataObject, unused: tuple[int, ...]) -> None:
        """The others' state has this worker's gradient in it."""
        self.body(data)
        self.advance(self.generation)
        self.count(unused)
        self.generation += 1
        self.stand(unused, False)

    @rule(data=st.data())
    def is_left_out(self, data: st.DataObject) -> None:
        """Drop the body while a generation without this member makes the step: its residual is lost."""
        self.body(data)
        self.advance(self.generation + 1)
        self.generation += 2
        self.stand((), False)
        self.total = self.applied.clone()

    @rule(data=st.data(), unused=st.sampled_from([(), (1,)]), counts=st.booleans())
    def another_one_sends_for_it(self, data: st.DataObject, unused: tuple[int, ...], counts: bool) -> None:
        """Let another member of the worker group push this one's sums: its own residuals stay out of it."""
        numbers = data.draw(st.lists(st.integers(-9, 9), min_size=ELEMENTS, max_size=ELEMENTS))
        self.gradient = torch.tensor(numbers, dtype=torch.float64)
        self.gradient[5] = 0.0
        self.wire.begin(((1, 0, self.generation), self.step + 1))
        sent = self.gradient * self.scale
        self.wire.hand_over([CHUNK], sent)
        self.sent = sent / self.scale
        if counts:
            self.advance(self.generation)
            self.count(unused)
        else:
            self.generation += 1
        self.stand(unused, False)

    @rule(data=st.data())
    def leaves_and_comes_back(self, data: st.DataObject) -> None:
        """Check that the last step before a generation ends pushes all residuals, and then come back."""
        assert not self.wire.ends(False)
        assert not self.wire.ends(True)
        self.body(data)
        assert self.wire.ends(True)
        self.advance(self.generation)
        self.count(())
        self.stand((), False)
        assert torch.equal(self.applied, self.total)
        self.generation += 1
        self.wire.reopen()

    @rule(data=st.data())
    def leaves_after_several_backwards(self, data: st.DataObject) -> None:
        """All that is owed goes in a body that knows it from its first backward on."""
        for last in (False, True):
            for number in range(2):
                if number:
                    self.wire.begin_backward_pass([(1,)])
                    self.push()
                else:
                    self.body(data)
                assert self.wire.ends(not last) is last
                self.count((1 - number,))
            self.advance(self.generation)
            self.wire.stand_at(self.made, [(0, (1,)), (1, (0,))], False)
        assert torch.equal(self.applied, self.total)
        self.generation += 1
        self.wire.reopen()

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.wire.residuals is not None
        self.wire.residuals.begin(((1, 0, self.generation), self.step + 1))
        owed = self.wire.residuals.residual(CHUNK.key)  # as the next body finds it
        if owed is None:
            owed = torch.zeros(ELEMENTS, dtype=torch.float64)
        assert torch.equal(self.applied + owed, self.total)
        assert owed[5] == 0


Owing.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=20)
TestOwing = pytest.mark.slow(Owing.TestCase)


def same_gradients(model: torch.nn.Module, step: int, part: int, parts: int) -> None:
    """Whole numbers that depend on the step and on who computes them, not on the values."""
    generator = torch.Generator().manual_seed(100 * step + part)
    for parameter in model.parameters():
        parameter.grad = torch.randint(-50, 51, parameter.shape, generator=generator).float()


def owed(member: Any) -> torch.Tensor:
    """Return the residuals that the member keeps, as one flat tensor with an element per parameter's
    element.
    """
    flats = [torch.zeros(size) for size in member.layout.sizes]
    for chunk in member.exchange.chunks:
        kept = member.exchange.compression.residuals.residual(chunk.key)
        if kept is not None:
            flats[chunk.bucket][chunk.start : chunk.stop] = kept
    slots = zip(member.layout.fields, member.layout.slots, strict=True)
    return torch.cat([flats[slot.bucket][slot.offset : slot.offset + item.numel] for item, slot in slots])


def flat(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in values])


def expected(steps: list[tuple[int, int, int]]) -> torch.Tensor:
    """Sum of the gradients of (step, part, parts)."""
    model, total = build(), None
    for step, part, parts in steps:
        same_gradients(model, step, part, parts)
        own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]
        total = own if total is None else total + own
    assert total is not None
    return total


def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Whole numbers stay whole: 2**-10 of them is taken off, which float32 holds exactly."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return torch.optim.SGD(model.parameters(), lr=2.0**-10)


@pytest.mark.slow
def test_top_k_remainder_comes_later_through_deaths_and_leaves() -> None:
    make: Callable[[], GradientCompression] = lambda: GradientCompression("TopK", 0.1)  # noqa: E731
    with (
        servers(2) as running,
        members(3, plain, compression=make, gradients=same_gradients, replication=2) as (a, b, c),
    ):
        store, names = Store(), ["m0", "m1"]
        together(
            lambda: a.begin(1, names, running, store, fresh=True),
            lambda: b.begin(1, names, running, store, fresh=True, holds=False),
        )
        together(a.exchange.resolve, b.exchange.resolve)
        counted = []
        for step in (1, 2):
            together(lambda: a.push(0, 2), lambda: b.push(1, 2))
            a.commit()
            b.commit()
            counted += [(step, 0, 2), (step, 1, 2)]
        size = sum(parameter.numel() for parameter in a.model.parameters())
        assert 0.1 * 8 * size * 2 <= a.sent < 0.14 * 8 * size * 2
        # Both have prepared step 3. a has the result of its commit vote, b is away meanwhile and returns.
        together(lambda: a.push(0, 2), lambda: b.push(1, 2))
        a.commit()
        counted += [(3, 0, 2), (3, 1, 2)]
        store, names = Store(), ["m0", "m1", "m2"]
        together(
            lambda: a.begin(2, names, running, store, step=3),
            lambda: b.begin(2, names, running, store, step=3, holds=False),
            lambda: c.begin(2, names, running, store, step=3, holds=False),
        )
        for member in (b, c):
            member.exchange.load_state_dict(a.exchange.state_dict())
        together(*[member.exchange.resolve for member in (a, b, c)])
        assert owed(b).any()
        assert not owed(c).any()
        # Everybody agrees to stop: not after this step, but after the next.
        for last in (False, True):
            together(lambda: a.push(0, 3), lambda: b.push(1, 3), lambda: c.push(2, 3))
            step = a.step + 1
            counted += [(step, part, 3) for part in range(3)]
            for member in (a, b, c):
                assert member.exchange.ends(True) is last
                member.commit()
            values = flat(a.values())
            left = owed(a) + owed(b) + owed(c)
            assert bool(left.any()) is not last
            assert torch.equal(-values * 2.0**10 + left, expected(counted))
        assert torch.equal(flat(b.values()), values)


@pytest.mark.parametrize("kind", ["BF16", "FP16"])
def test_sixteen_bits_are_half_the_bytes_and_nearly_as_exact(kind: str) -> None:
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    with servers(2) as running, members(2, make, compression=lambda: GradientCompression(kind)) as (a, b):
        store, names = Store(), ["m0", "m1"]
        together(
            lambda: a.begin(1, names, running, store, fresh=True),
            lambda: b.begin(1, names, running, store, fresh=True, holds=False),
        )
        together(a.exchange.resolve, b.exchange.resolve)
        reference = build(seed=sum(map(ord, "m0")))
        optimizer = make(reference)
        for step in range(1, 6):
            together(lambda: a.push(0, 2), lambda: b.push(1, 2))
            a.commit()
            b.commit()
            gradients_of(reference, step, 0, 1)
            optimizer.step()
        assert a.sent == 5 * 2 * sum(a.layout.sizes)
        difference = 0.0
        for mine, other, whole in zip(a.values(), b.values(), reference.parameters(), strict=True):
            assert torch.equal(mine, other)
            torch.testing.assert_close(mine, whole.detach(), rtol=0, atol=2e-3)
            difference = max(difference, float((mine - whole.detach()).abs().max()))
        assert difference > 1e-7, "nothing was rounded"


def test_rubbish_in_sparse_gradients_is_refused_server_lives() -> None:
    with servers(1) as running, members(1, plain) as (a,):
        a.begin(1, ["m0"], running, Store(), fresh=True)
        a.exchange.resolve()
        key = a.exchange.chunks[0].key
        about = {"t": [1, 0, 1], "s": 1, "me": "m0", "k": key, "d": "float32"}
        block = pack(SparseGradient(torch.tensor([2**30], dtype=torch.int32), torch.ones(1)))
        stream, _ = connect(("127.0.0.1", running[0].port), TOKEN, 30)
        for meta, payload in (
            (about, block),
            (about, block[:-1].clone()),
            ({**about, "d": "rubbish"}, block),
            ({**about, "k": "nowhere"}, block),
            (about, torch.zeros(1 << 20, dtype=torch.uint8)),
        ):
            stream.send(Frame(Kind.STAGE_SPARSE, 7, meta, payload.numel()), frames.memory(payload))
            header, answer = stream.receive()
            assert header.kind is Kind.REFUSED, json.dumps(answer)
        stream.close()
        a.push(0, 1)
        a.commit()
        a.values()


def test_what_compression_does_not_go_with() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments: dict[str, Any] = {"in_job": True, "exact": False}
    with pytest.raises(
        UsageError, match=r"TopK is not for strategy\.type AllReduce: use BF16, FP16 or Power"
    ):
        declare(model, optimizer, None, {}, compression="TopK", strategy="AllReduce", **arguments)
    with pytest.raises(UsageError, match=r"PowerSGD is not for strategy\.type ParameterServer: use BF16"):
        declare(model, optimizer, None, {}, compression="PowerSGD", strategy="ParameterServer", **arguments)
    scaler = {"scaler": torch.amp.GradScaler("cpu")}
    with pytest.raises(UsageError, match="whose scale PowerSGD's residuals cannot follow"):
        declare(model, optimizer, None, scaler, compression="PowerSGD", strategy="AllReduce", **arguments)
    declare(model, optimizer, None, scaler, compression="TopK", strategy="ParameterServer", **arguments)
    two = {**scaler, "other": torch.amp.GradScaler("cpu")}
    with pytest.raises(UsageError, match="scaler and other are GradScalers, and compression TopK takes one"):
        declare(model, optimizer, None, two, compression="TopK", strategy="ParameterServer", **arguments)
    loose = {**arguments, "consistency": "Asynchronous"}
    declare(model, optimizer, None, scaler, compression="TopK", strategy="ParameterServer", **loose)
    found = read_settings({"SPRINGTIDE_COMPRESSION": "TopK", "SPRINGTIDE_TOP_K_RATIO": "0.05"})
    assert (found.compression, found.top_k_ratio) == ("TopK", 0.05)


@pytest.mark.parametrize(("kind", "allowed"), [("ParameterServer", True), ("AllReduce", False)])
def test_the_manifest_takes_it_with_servers_only(kind: str, allowed: bool) -> None:
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rules = schema["properties"]["spec"]["x-kubernetes-validations"]
    rules = [entry for entry in rules if "oldSelf" not in entry["rule"]]
    texts = [entry["rule"] for entry in rules if "parameterServer.compression" in entry["rule"]]
    assert texts
    cel = celpy.Environment()
    for compression, consistency in itertools.product(
        ("None", "BF16", "TopK"), ("Synchronous", "Asynchronous")
    ):
        strategy = {
            "type": kind,
            "parameterServer": {"compression": compression, "consistency": consistency},
        }
        context = {"self": celpy.json_to_cel({"strategy": strategy})}
        found = all(bool(cel.program(cel.compile(text)).evaluate(context)) for text in texts)
        assert found == (allowed or compression == "None")
