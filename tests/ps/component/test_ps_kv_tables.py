"""Embedding tables over real sockets: any number of servers, the same numbers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from ps_servers import TOKEN, names, servers

from springtide import kv
from springtide_ps.wire import frames
from springtide_ps.wire.stream import connect


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_the_same_table_on_any_number_of_servers(optimizer: str) -> None:
    exported = []
    for count in (1, 3):
        generator = torch.Generator().manual_seed(2)
        with servers(count) as running, kv.connect(names(running), TOKEN) as store:
            table = store.table("clicks", 6, optimizer=optimizer, lr=0.1, scale=0.01, seed=9)
            for _ in range(5):
                ids = torch.randint(-50, 50, (4, 7), generator=generator)
                rows = table.lookup(ids)
                assert rows.shape == (4, 7, 6)
                table.push(ids, rows + 1).wait()
            table.push(torch.empty(0, dtype=torch.int64), torch.empty(0, 6)).wait()
            assert table.lookup(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, 6)
            exported.append(table.export())
            assert sum(said["rows"] for said in store.status()) == len(exported[-1][0])
    assert torch.equal(exported[0][0], exported[1][0])
    torch.testing.assert_close(exported[0][1], exported[1][1], rtol=1e-6, atol=1e-7)


def test_a_lookup_gives_each_id_its_row() -> None:
    with servers(2) as running, kv.connect(names(running), TOKEN) as store:
        table = store.table("t", 3, init="zeros", lr=1.0)
        ids = torch.arange(1000)
        table.push(ids, -ids.float()[:, None].expand(-1, 3).contiguous()).wait()
        asked = torch.tensor([[7, 999, 7], [0, 512, 3]])
        pending = table.prefetch(asked)
        assert torch.equal(pending.result(), asked.float()[..., None].expand(-1, -1, 3))
        with pytest.raises(ValueError, match="gradients of shape"):
            table.push(asked, torch.zeros(6, 3))


def test_workers_share_a_table() -> None:
    with servers(2) as running:

        def work() -> None:
            with kv.connect(names(running), TOKEN) as store:
                table = store.table("t", 2, init="zeros", lr=1.0)
                for _ in range(20):
                    table.push(torch.tensor([1, 2, 1]), torch.full((3, 2), -1.0)).wait()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with kv.connect(names(running), TOKEN) as store:
            table = store.table("t", 2, init="zeros", lr=1.0)
            assert table.lookup(torch.tensor([1, 2])).tolist() == [[160, 160], [80, 80]]
            with pytest.raises(kv.RefusedError, match="table 't' is there as"):
                store.table("t", 3)
            with pytest.raises(kv.TableError, match="no optimizer 'lamb'"):
                store.table("u", 3, optimizer="lamb")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 0.5},
        {"max_norm": 0.8, "norm_type": float("inf")},
        {"scale_grad_by_freq": True},
        {"max_norm": 0.5, "norm_type": 1.0, "scale_grad_by_freq": True},
    ],
)
def test_bounds_and_frequencies_are_those_of_torch(count: int, options: dict[str, Any]) -> None:
    """Rows, looked up and after steps, beside torch's Embedding with the same first rows."""
    generator = torch.Generator().manual_seed(4)
    with servers(count) as running, kv.connect(names(running), TOKEN) as store:
        table = store.table("t", 3, optimizer="adagrad", lr=0.1, seed=5, **options)
        first = store.table("first", 3, seed=5).lookup(torch.arange(12))
        alone = torch.nn.Embedding(12, 3, **options)
        with torch.no_grad():
            alone.weight.copy_(first)
        optimizer = torch.optim.Adagrad(alone.parameters(), lr=0.1)
        for _ in range(4):
            ids = torch.randint(12, (3, 5), generator=generator)
            rows = table.lookup(ids)
            expected = alone(ids)
            torch.testing.assert_close(rows, expected)
            gradients = torch.randn(3, 5, 3, generator=generator)
            optimizer.zero_grad()
            expected.backward(gradients)
            optimizer.step()
            table.push(ids, gradients).wait()
        torch.testing.assert_close(table.lookup(torch.arange(12)), alone(torch.arange(12)))
        with pytest.raises(kv.RefusedError, match="table 't' is there as"):
            store.table("t", 3, optimizer="adagrad", lr=0.1, seed=5)
        with pytest.raises(kv.TableError, match="max_norm is -1"):
            store.table("u", 3, max_norm=-1)


def test_requests_for_tables_that_cannot_be_are_refused() -> None:
    with servers(1) as running, kv.connect(names(running), TOKEN) as store:
        store.table("t", 2)
        for kind, meta, expected in (
            (frames.Kind.LOOKUP, {"key": "no", "count": 0}, frames.Kind.REFUSED),
            (frames.Kind.LOOKUP, {"key": "t", "count": 2**39}, frames.Kind.REFUSED),
            (frames.Kind.LOOKUP, {"key": "t", "count": 1}, frames.Kind.REFUSED),
            (frames.Kind.TABLE, {"key": "u", "dim": 10**9}, frames.Kind.REFUSED),
            (frames.Kind.PAGE, {"key": "t", "start": 10**9, "count": 10**9}, frames.Kind.VALUES),
        ):
            stream, _ = connect(("127.0.0.1", running[0].port), TOKEN, 30)
            stream.send(frames.Frame(kind, 1, meta))
            assert stream.receive()[0].kind is expected, (kind, meta)
            stream.close()
