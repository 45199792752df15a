"""Gradients of tables' rows in 16 bits, and the dense ones of Hybrid: bytes, rounding, equal replicas."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import job_object
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

import springtide
from springtide.errors import SpringtideError, UsageError
from springtide.settings import read_settings
from springtide.train_step.validation import declare
from springtide_operator.api.job import Job
from springtide_operator.manifests.worker import worker_pod
from springtide_ps.params.embedding import TableSpec
from springtide_ps.params.embedding_shard import ROW_DTYPES, Slice, record_bytes, records, unpack, widened
from springtide_ps.server.step_protocol import StepProtocolError
from springtide_ps.server.sync_handler import SyncHandler
from springtide_ps.wire.frames import FrameError, Header, Kind

NARROW = [torch.bfloat16, torch.float16]
IDS = torch.randint(0, 12, (24, 3), generator=torch.Generator().manual_seed(1))
X = torch.randn(24, 40, generator=torch.Generator().manual_seed(2))
Y = torch.randn(24, 12, generator=torch.Generator().manual_seed(3))
RATE = 0.02


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=9),
    st.integers(1, 6),
    st.sampled_from(NARROW),
)
@settings(deadline=None, max_examples=60)
def test_narrow_records_arrive_as_what_was_rounded(ids: list[int], dim: int, dtype: torch.dtype) -> None:
    names = torch.tensor(ids, dtype=torch.int64)
    gradients = torch.randn(len(ids), dim).to(dtype)
    sent = records(names, gradients)
    assert sent.nbytes == len(ids) * record_bytes(dim, dtype) == len(ids) * (8 + 2 * dim)
    found, rows = unpack(widened(sent.view(-1).view(torch.uint8), dim, dtype), dim)
    assert torch.equal(found, names)
    assert torch.equal(rows, gradients.to(torch.float32))


def test_server_refuses_misfit_rows_before_it_takes_memory() -> None:
    steps = SyncHandler(lambda address: pytest.fail("no other server is needed"))
    try:
        steps.store.enter((1, 0, 1), ["a"], 0, "L")
        steps.store.load((1, 0, 1), "t0.0", 0, Slice(TableSpec(3, "sgd"), 0, 0, [{"lr": 0.1}]))
        about = {"t": [1, 0, 1], "s": 1, "me": "a", "k": "t0", "p": [0], "n": [2]}
        for name, dtype in ROW_DTYPES.items():
            size = 2 * record_bytes(3, dtype)
            steps.check(Header(Kind.STAGE_ROWS, 0, 0, size), {**about, "d": name})
            with pytest.raises(StepProtocolError, match=f"bring {size + 2} bytes, {size} belong there"):
                steps.check(Header(Kind.STAGE_ROWS, 0, 0, size + 2), {**about, "d": name})
        for wrong in ("float64", "int32", 7, "x" * 9000):
            with pytest.raises(FrameError, match=r"one of float32, bfloat16, float16, not '.{1,32}'$"):
                steps.check(Header(Kind.STAGE_ROWS, 0, 0, 40), {**about, "d": wrong})
    finally:
        steps.close()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = springtide.Embedding(None, 12, seed=3, scale=0.5, slices=4)
        self.dense = torch.nn.Linear(40, 12)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.table(ids).mean(1) + self.dense(x)


def train(
    strategy: str, dense: str = "None", rows: str = "None", clip_norm: float | None = None, drop: int = 0
) -> list[dict[str, Any]]:
    """Twelve steps on two workers; drop: number of the step whose body is left once. By worker: the values,
    and of the first step what it put into each row.
    """
    store = Store()
    compression = {"compression": dense, "rows_compression": rows}
    if strategy == "ParameterServer":
        compression = {"compression": rows}

    def script(rank: Rank) -> dict[str, Any]:
        with seeded(2):
            model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        rank.distribute(model, optimizer, clip_norm=clip_norm)
        rank.enter_servers(names(running), store)
        exchange, put, dropped = rank.trainer.servers, dict[int, torch.Tensor](), False
        assert exchange is not None
        stage, first = exchange.stage_rows, dict[str, torch.Tensor]()

        def spy(index: int, ids: torch.Tensor, sums: torch.Tensor) -> None:
            put.update(zip(ids.tolist(), sums.clone(), strict=True))
            stage(index, ids, sums)

        exchange.stage_rows = spy  # type: ignore[method-assign]
        for ids, x, y in rank.batches((IDS, X, Y), batch_size=8, epochs=4, seed=0):
            with rank.step():
                if rank.step_number == drop and not dropped:
                    dropped = True
                    rank.drop()
                (model(ids, x) - y).square().sum(1).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if not first:
                assert exchange.sync_backend.step_spec is not None
                first = {"rows": model.table(torch.arange(12)).detach().clone()}
                scale = exchange.sync_backend.step_spec.scale
            exchange.stage_rows = stage  # type: ignore[method-assign]
        return {
            "dense": torch.cat([p.detach().reshape(-1) for p in model.dense.parameters()]),
            "rows": model.table(torch.arange(12)).detach().clone(),
            "put": put,
            "first": first["rows"],
            "scale": scale,
        }

    with servers(2) as running:
        return on_ranks(2, script, strategy=strategy, token=TOKEN, **compression)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return train("Hybrid")[0]


@pytest.mark.parametrize(
    ("strategy", "dense", "rows", "atol"),
    [
        ("Hybrid", "BF16", "None", 3e-2),
        ("Hybrid", "None", "BF16", 3e-2),
        ("Hybrid", "FP16", "FP16", 4e-3),
        ("ParameterServer", "BF16", "BF16", 3e-2),
    ],
)
def test_values_match_uncompressed_ones_within_the_rounding(
    plain: dict[str, Any], strategy: str, dense: str, rows: str, atol: float
) -> None:
    results = train(strategy, dense, rows)
    for part in ("dense", "rows"):
        assert torch.equal(results[0][part], results[1][part])
        torch.testing.assert_close(results[0][part], plain[part], rtol=0, atol=atol)
        assert not torch.equal(results[0][part], plain[part])


@pytest.mark.parametrize("kind", ["None", "BF16", "FP16"])
def test_row_gradients_are_rounded_once_and_rows_return_exact(kind: str) -> None:
    wire = {"None": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}[kind]
    results = train("Hybrid", rows=kind)
    with seeded(2):
        rows = Net().table(torch.arange(12)).detach().clone()
    for i in range(12):
        for result in results:
            rows[i] -= RATE * result["put"].get(i, torch.zeros(12)).to(wire).float() * result["scale"]
    for result in results:
        torch.testing.assert_close(result["first"], rows, rtol=0, atol=1e-6)


def test_a_dropped_body_changes_no_bit() -> None:
    once, again = (train("Hybrid", "PowerSGD", "BF16", clip_norm=1.0, drop=drop) for drop in (0, 3))
    for part in ("dense", "rows"):
        assert torch.equal(once[0][part], again[0][part])
        assert torch.equal(again[0][part], again[1][part])


def test_thin_matrices_train_the_dense_part_beside_tables(plain: dict[str, Any]) -> None:
    def loss(result: dict[str, Any]) -> float:
        weight, bias = result["dense"][:480].view(12, 40), result["dense"][480:]
        return float((result["rows"][IDS].mean(1) + X @ weight.T + bias - Y).square().sum(1).mean())

    results = train("Hybrid", "PowerSGD")
    assert torch.equal(results[0]["dense"], results[1]["dense"])
    assert not torch.equal(results[0]["dense"], plain["dense"])
    with seeded(2):
        model = Net()
    start = float((model(IDS, X) - Y).square().sum(1).mean().detach())
    assert loss(results[0]) < 0.7 * start
    assert loss(plain) < 0.7 * start


def test_what_hybrid_does_not_take_is_refused() -> None:
    model = Net()
    with pytest.raises(
        UsageError, match=r"TopK is not for strategy\.type Hybrid: use BF16, FP16 or PowerSGD"
    ):
        declare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            None,
            {},
            in_job=True,
            exact=False,
            compression="TopK",
            strategy="Hybrid",
        )
    with pytest.raises(SpringtideError, match="ROWS_COMPRESSION must be one of None, BF16, FP16, got 'TopK'"):
        read_settings({"SPRINGTIDE_ROWS_COMPRESSION": "TopK"})


@pytest.mark.parametrize(
    ("kind", "dense", "pushes", "expected"),
    [
        ("Hybrid", "PowerSGD", "BF16", ("PowerSGD", "BF16")),
        ("Hybrid", "None", "FP16", ("None", "FP16")),
        ("Hybrid", "BF16", "None", ("BF16", "None")),
        ("ParameterServer", "None", "TopK", ("TopK", "None")),
        ("AllReduce", "FP16", "None", ("FP16", "None")),
    ],
)
def test_the_operator_tells_workers_what_travels_how(
    kind: str, dense: str, pushes: str, expected: tuple[str, str]
) -> None:
    obj = job_object(2)
    obj["spec"]["strategy"] = {
        "type": kind,
        "allReduce": {"compression": dense},
        "parameterServer": {"compression": pushes},
    }
    pod = worker_pod(Job.parse(json.loads(json.dumps(obj))), 0, 0, "a:1")
    entries = pod["spec"]["containers"][0]["env"]
    found = read_settings({e["name"]: e["value"] for e in entries if "COMPRESSION" in e["name"]})
    assert (found.compression, found.rows_compression) == expected
    assert any("TOP_K" in entry["name"] for entry in entries) == (pushes == "TopK")
