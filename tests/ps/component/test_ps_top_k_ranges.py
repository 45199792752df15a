"""Top-k where workers do not step together: what is owed, whatever becomes of a push; and the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ps_loose import Loose
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

from springtide.ps.compression import GradientCompression
from springtide.ps.sharding import PlannedChunk
from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.params.sparse_gradient import SparseGradient, pack
from springtide_ps.server.server import Server
from springtide_ps.wire.client import RefusedError, ServerClient
from springtide_ps.wire.frames import Kind
from springtide_ps.wire.stream import parse_address

ELEMENTS = 12
CHUNK = PlannedChunk("0.0", 0, 0, ELEMENTS, 8 * ELEMENTS, ((0, 0, 0, 5), (1, 0, 6, ELEMENTS)))
"""Two parameters with an element of padding between them."""
FIRST = (1, 0, 1)


class OwingByAnswers(RuleBasedStateMachine):
    """One chunk of one worker. All numbers are whole, so sums are exact.

    Of each element, what this worker's applied pushes brought, plus what it owes, is the sum of its gradients
    in them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wire = GradientCompression("TopK", 0.25)
        self.total, self.brought = (torch.zeros(ELEMENTS, dtype=torch.float64) for _ in range(2))
        self.pending: tuple[torch.Tensor, torch.Tensor, tuple[int, ...]] | None = None

    def send_queue(self, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(gradient, what travels of it)."""
        gradient = torch.tensor(numbers, dtype=torch.float64)
        out = self.wire.outgoing(CHUNK, gradient)
        assert isinstance(out, SparseGradient)
        return gradient, out.add_to(torch.zeros(ELEMENTS, dtype=torch.float64))

    gradients = st.lists(st.integers(-9, 9), min_size=ELEMENTS, max_size=ELEMENTS)

    @precondition(lambda self: self.pending is None)
    @rule(numbers=gradients, unused=st.sampled_from([(), (0,), (1,), (0, 1)]))
    def is_sent(self, numbers: list[int], unused: tuple[int, ...]) -> None:
        self.pending = (*self.send_queue(numbers), unused)

    @precondition(lambda self: self.pending is None)
    @rule(numbers=gradients)
    def is_dropped_before_it_is_sent(self, numbers: list[int]) -> None:
        self.send_queue(numbers)

    @rule(step=st.integers(1, 9))
    def another_body_begins(self, step: int) -> None:
        self.wire.begin_update()

    @precondition(lambda self: self.pending is not None)
    @rule(applied=st.booleans(), twice=st.booleans())
    def is_answered(self, applied: bool, twice: bool) -> None:
        assert self.pending is not None
        gradient, sent, unused = self.pending
        for _ in range(1 + twice):
            self.wire.landed(CHUNK.key, unused, applied)
        self.pending = None
        for index, _, start, stop in CHUNK.pieces:
            if applied and index not in unused:
                self.total[start:stop] += gradient[start:stop]
                self.brought[start:stop] += sent[start:stop]

    @rule()
    def training_begins_anew(self) -> None:
        self.wire.forget()
        self.total, self.brought, self.pending = self.brought.clone(), self.brought, None

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.wire.residuals is not None
        owed = self.wire.residuals.residual(CHUNK.key)
        owed = torch.zeros(ELEMENTS, dtype=torch.float64) if owed is None else owed
        assert torch.equal(self.brought + owed, self.total)
        assert owed[5] == 0


OwingByAnswers.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=20)
TestOwingByAnswers = OwingByAnswers.TestCase


# ---- servers


def test_worker_without_common_steps_has_no_last_step() -> None:
    with servers(1) as running:
        loose = Loose(running, "TopK")
        assert [loose.exchange.ends(wanted) for wanted in (False, True)] == [False, True]
        assert not loose.exchange.compression.closing
        loose.exchange.close()


def client_of(server: Server) -> ServerClient:
    client = ServerClient(parse_address(f"127.0.0.1:{server.port}"), TOKEN)
    about = {"me": "a", "members": ["a"], "s": 0, "lineage": "one", "books": True, "skipped": 0}
    client.ask_step(Kind.ENTER, FIRST, about).result(60)
    return client


def push(client: ServerClient, number: int, selected: torch.Tensor, **more: Any) -> dict[str, Any]:
    about = {"k": "k", "r": number, "recipe": StepSpec(0.5, False, ({"lr": 1.0},)).to_json()}
    about |= {"d": "float32", "sel": True, **more}
    return client.ask_step(Kind.PUSH_BATCH, FIRST, about, selected, torch.zeros(4)).result(60).meta


def values(client: ServerClient) -> list[float]:
    out = torch.zeros(4)
    client.ask_step(Kind.PULL_CHUNK, FIRST, {"k": "k"}, out=out).result(60)
    return out.tolist()


def test_selected_elements_count_once_and_reach_the_copy() -> None:
    with servers(2) as running:
        first, copy = (client_of(server) for server in running)
        meta, payload = Chunk(torch.zeros(4), [(0, 0, 0, 4)], "sgd", [{"lr": 1.0}]).dump()
        for client in (first, copy):
            client.ask_step(Kind.LOAD, FIRST, {**meta, "k": "k", "s": 0}, payload).result(60)
        forward = {"forward": {"k": [names(running)[1]]}, "fill": {}, "drop": []}
        first.ask_step(Kind.ARRANGE, FIRST, forward).result(60)
        block = pack(SparseGradient(torch.tensor([1, 3], dtype=torch.int32), torch.tensor([2.0, -4.0])))
        assert push(first, 0, block)["already"] is False
        assert push(first, 0, block)["already"] is True
        assert values(first) == values(copy) == [0.0, -1.0, 0.0, 2.0]
        bad = pack(SparseGradient(torch.tensor([4], dtype=torch.int32), torch.ones(1)))
        for rubbish, more, told in (
            (bad, {}, "named from 0 to 3"),
            (block[:-1].clone(), {}, "no selection"),
            (block, {"d": "float16"}, "elements of a gradient"),
        ):
            with pytest.raises(RefusedError, match=told):
                push(first, 1, rubbish, **more)
        assert push(first, 1, block)["already"] is False  # what was refused left no trace
        assert values(first) == values(copy) == [0.0, -2.0, 0.0, 4.0]
        first.close()
        copy.close()


# ---- workers

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(48, 2, generator=torch.Generator().manual_seed(2))


def train(size: int, consistency: str, taken: bool = False) -> list[tuple[torch.Tensor, dict[str, int], Any]]:
    """Train with TopK compression.

    Args:
        taken: another worker has brought the first batch into chunk 0.0 before.

    Returns:
        for each rank, the parameters, the ledger's audit, and the chunks that have a residual after the
            first step.
    """
    store = Store()

    def script(rank: Rank) -> tuple[torch.Tensor, dict[str, int], Any]:
        with seeded(3):
            layers = [
                torch.nn.Linear(6, 64),
                torch.nn.Tanh(),
                torch.nn.Linear(64, 32),
                torch.nn.Linear(32, 2),
            ]
            model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        rank.distribute(model, optimizer, clip_norm=0.5)
        rank.enter_servers(names(running), store)
        servers_here = rank.trainer.servers
        assert servers_here is not None
        if taken:
            bring_the_first_range(servers_here)
        owed: Any = None
        for x, y in rank.batches((X, Y), batch_size=8, epochs=3, seed=0):
            with rank.step():
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if owed is None:
                rank.runtime.settle(None)
                assert servers_here.compression.residuals is not None
                owed = {
                    c.key
                    for c in servers_here.chunks
                    if servers_here.compression.residuals.residual(c.key) is not None
                }
        rank.runtime.settle(None)
        flat = torch.cat([item.detach().reshape(-1) for item in model.parameters()]).clone()
        return flat, rank.runtime.position.ledger.audit(), owed

    with servers(2) as running:
        how: dict[str, Any] = {"compression": "TopK", "top_k_ratio": 0.2, "consistency": consistency}
        return on_ranks(size, script, strategy="ParameterServer", token=TOKEN, **how)


def bring_the_first_range(exchange: Any) -> None:
    assert exchange.asynchronous
    chunk = next(chunk for chunk in exchange.chunks if chunk.key == "0.0")
    key, size = chunk.key, chunk.stop - chunk.start
    about = {"k": key, "r": 0, "d": "float32", "recipe": StepSpec(1.0, True, ({},)).to_json()}
    asked = exchange.connections.ask(
        exchange.context.generation.homes[key][0], Kind.COPY_BATCH, FIRST, about, torch.zeros(size)
    )
    asked.result(60)


def test_one_worker_has_the_numbers_of_synchronous_steps() -> None:
    [(synchronous, told, owed)] = train(1, "Synchronous")
    [(loose, audit, owed_too)] = train(1, "Asynchronous")
    torch.testing.assert_close(loose, synchronous, rtol=0, atol=1e-6)
    assert owed == owed_too
    assert len(owed) > 1
    assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (144, 0, 0)
    assert audit["totalSeen"] == told["totalSeen"]


def test_nothing_is_owed_to_a_chunk_given_the_batch_by_another() -> None:
    [(_, _, owed)] = train(1, "Asynchronous")
    [(_, audit, owed_then)] = train(1, "Asynchronous", taken=True)
    assert owed - owed_then == {"0.0"}
    assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (144, 0, 0)


def test_several_workers_end_with_one_model_and_every_range() -> None:
    results = train(3, "BoundedStaleness")
    for flat, audit, _ in results:
        assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (144, 0, 0)
        assert bool(flat.isfinite().all())
    assert len({tuple(flat.tolist()) for flat, _, _ in results}) == 1
