"""Models with a table of rows and one of bags, trained by several workers on servers and by torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks

BATCH = 8


class Lookups(torch.nn.Module):
    """`rows` and `bags` take the same ids; `head` is a layer."""

    rows: Any
    bags: Any
    head: torch.nn.Linear

    def values(self) -> torch.Tensor:
        """Return the model's output for every id and its layer's parameters, as one flat tensor."""
        everything = torch.arange(self.rows.num_embeddings)
        with torch.no_grad():
            seen = [self.rows(everything), self.bags(everything[:, None])]
        return torch.cat([item.detach().reshape(-1) for item in (*seen, *self.head.parameters())]).clone()


def check_on_servers(
    size: int,
    make: Callable[[], Lookups],
    train: Callable[[Rank, Any, torch.optim.Optimizer, Any], None],
    expected: torch.Tensor,
    x: torch.Tensor,
    *,
    epochs: int,
    strategy: str,
    consistency: str,
    clip_norm: float | None,
) -> None:
    """All of `size` workers get to the expected values. With common steps one body looks rows up, and is
    dropped before its backward. train: of a rank, a model, its optimizer and a batch of places in `x`.
    """
    store = Store()

    def run(rank: Rank) -> torch.Tensor:
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        rank.distribute(net, optimizer, clip_norm=clip_norm)
        rank.enter_servers(names(running), store)
        dropped = False
        for batch in rank.batches(torch.arange(len(x)), batch_size=BATCH, epochs=epochs, seed=0):
            with rank.step():
                if rank.step_number == 2 and not dropped and consistency == "Synchronous":
                    dropped = True
                    net(x[batch.data])
                    rank.drop()
                train(rank, net, optimizer, batch)
        rank.runtime.settle(None)
        return net.values()

    with servers(2) as running:
        results = on_ranks(size, run, token=TOKEN, strategy=strategy, consistency=consistency)
    for values in results:
        assert torch.equal(values, results[0])
        torch.testing.assert_close(values, expected, rtol=0, atol=2e-5)
