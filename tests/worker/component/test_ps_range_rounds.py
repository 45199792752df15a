"""Several backward passes and steps in a body without common steps: one worker makes the numbers of plain
torch, and each range is once in each chunk and slice, whatever becomes of a body between two of its steps.
"""

from __future__ import annotations

import concurrent.futures
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from batch_game import (
    BATCH,
    EPOCHS,
    SAMPLES,
    WORDS,
    Body,
    Clip,
    Game,
    X,
    carried,
    closures,
    gan,
    looked_at,
    one_rests,
    one_word,
    plain,
    play,
    recovers,
    scaled,
)
from batch_sums_by_hand import Loose, assert_equal, undisturbed
from ps_members import Store, together
from ps_servers import TOKEN, servers
from worker_ranks import Rank, on_ranks

from springtide.errors import UsageError
from springtide.ps import async_backend
from springtide.ps.connections import ServerError

torch.set_num_threads(1)
HOW: dict[str, Any] = {"strategy": "ParameterServer", "token": TOKEN}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "consistency", "clip_norm"),
    [
        (gan, "Asynchronous", None),
        (gan, "BoundedStaleness", 0.05),
        (carried, "Asynchronous", None),
        (carried, "Asynchronous", 0.05),
        (looked_at, "Asynchronous", 0.05),
        (looked_at, "BoundedStaleness", None),
        (scaled, "Asynchronous", None),
        (one_rests, "Asynchronous", 0.05),
        (one_word, "Asynchronous", None),
        (recovers, "Asynchronous", None),
        (closures, "Asynchronous", 0.05),
    ],
)
def test_one_worker_makes_the_numbers_of_plain_torch(
    body: Body, consistency: str, clip_norm: float | None
) -> None:
    with servers(2) as running:
        [(game, values, order, audit)] = on_ranks(
            1,
            lambda rank: play(rank, body, clip_norm, running, Store()),
            consistency=consistency,
            **HOW,
        )
    expected = plain(body, order, clip_norm)
    torch.testing.assert_close(values, expected.values(), rtol=0, atol=2e-5)
    assert len(game.seen) == len(expected.seen)
    for mine, theirs in zip(game.seen, expected.seen, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)
    assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (SAMPLES * EPOCHS, 0, 0)
    assert audit["skipped"] == (EPOCHS if body is scaled else 0)


@pytest.mark.parametrize(
    ("body", "consistency"),
    [(gan, "Asynchronous"), (looked_at, "BoundedStaleness"), (carried, "Asynchronous")],
)
def test_of_two_workers_each_range_is_once_in_all(body: Body, consistency: str) -> None:
    store = Store()
    with servers(2) as running:
        results = on_ranks(
            2, lambda rank: play(rank, body, None, running, store), consistency=consistency, **HOW
        )
        pushed = sum(server.counters.batches for server in running)
    chunks = len(running_chunks(results[0][0]))
    assert pushed == chunks * EPOCHS * SAMPLES // BATCH
    for _, values, _, audit in results:
        assert torch.equal(values, results[0][1])
        assert values.isfinite().all()
        assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (SAMPLES * EPOCHS, 0, 0)
    taken = sorted(tuple(ids.tolist()) for _, _, order, _ in results for ids in order)
    assert len(taken) == EPOCHS * SAMPLES // BATCH  # nobody computed a range that another one had


def running_chunks(game: Game) -> set[str]:
    """Names of all chunks and slices of the game: the same for all workers."""
    rank_free: dict[str, set[str]] = {}

    def script(rank: Rank) -> None:
        other = Game()
        rank.distribute(other.models, [other.adagrad, other.sgd])
        servers_of: Any = rank.trainer.servers
        rank_free["keys"] = set(servers_of.async_backend.keys_in_order())

    on_ranks(1, script, consistency="Asynchronous", **HOW)
    return rank_free["keys"]


def twice(game: Game, ids: torch.Tensor, clip: Clip) -> None:
    gan(game, ids, clip)
    game.judge(X[ids], True).backward()
    game.sgd.step()


def test_an_optimizer_makes_one_step_in_a_body() -> None:
    with (
        servers(1) as running,
        pytest.raises(UsageError, match=r"a second step of the same optimizer \(SGD\) in one body"),
    ):
        on_ranks(1, lambda rank: play(rank, twice, None, running, Store()), consistency="Asynchronous", **HOW)


def test_backward_through_stepped_values_fails_as_in_torch() -> None:
    def stale(game: Game, ids: torch.Tensor, clip: Clip) -> None:
        loss = game.judge(game.generator(WORDS[ids]), True)
        game.judge(X[ids], True).backward()
        game.sgd.step()
        loss.backward()

    with servers(1) as running, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        on_ranks(1, lambda rank: play(rank, stale, None, running, Store()), consistency="Asynchronous", **HOW)


# ---- by hand


@pytest.mark.parametrize("table_first", [False, True])
@pytest.mark.parametrize("event", ["generation", "cut", "no room", "unanswered"])
def test_each_batch_is_once_in_each_step_whatever_comes_between(event: str, table_first: bool) -> None:
    wanted = undisturbed(3, table_first)
    with servers(2) as running:
        loose = Loose(table_first=table_first)
        loose.begin(running)
        loose.exchange.resolve()
        total = len(loose.batches.keys_in_order())
        loose.half(0)
        loose.rest()
        loose.half(1, see=event == "generation")
        if event == "no room":
            # What was offered is gone: it is asked for whole. Offers are noted by the thread that reads.
            for server in running:
                for client in server.connections:
                    client.stash.take = lambda *_: None  # type: ignore[method-assign]
        if event == "cut":
            for server in running:
                for client in server.connections:
                    client.stream.abort()
            with pytest.raises((ServerError, ConnectionError)):
                loose.exchange.settle()
        if event == "unanswered":
            # The push is on its way when the generation ends.
            connections: Any = loose.exchange.connections
            connections.answer = lambda *_, **__: (_ for _ in ()).throw(ServerError("it is over"))
            with pytest.raises(ServerError, match="it is over"):
                loose.exchange.settle()
            del connections.answer
        if event != "no room":
            loose.begin(running)  # the body is left, and its range given out anew
            loose.exchange.resolve()
            loose.half(1)
        loose.rest()
        loose.half(2)
        loose.rest()
        assert_equal(loose.values(), wanted)
        assert loose.applied_batches() == {(0, 3)}
        assert sum(server.counters.batches for server in running) == 3 * total
        if event == "generation":
            assert sum(server.counters.repeated for server in running) == len(loose.first_keys)
        loose.exchange.close()


def test_next_generation_does_not_wait_for_a_hanging_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next generation does not wait for the pushes that a hanging server leaves unanswered.

    Shards have copies, so the servers that live answer no push before the hanging one does; the next
    generation is without it.
    """
    left: list[set[Any]] = []

    def wait(futures: Any, seconds: float) -> None:
        left.append(concurrent.futures.wait(futures, 60.0).not_done)

    monkeypatch.setattr(async_backend, "wait", wait)
    wanted = undisturbed(3, table_first=False)
    with servers(2) as running, ExitStack() as stopped:
        loose = Loose(replication=2)
        loose.begin(running)
        loose.exchange.resolve()
        loose.half(0)
        loose.rest()
        loose.exchange.settle()
        commit = loose.exchange.commit

        def stop_and_commit(*args: Any) -> None:
            for held in map(running[1].sync_handler.store.shard, running[1].sync_handler.store.keys):
                stopped.enter_context(held.lock)
            commit(*args)

        loose.exchange.commit = stop_and_commit  # type: ignore[method-assign]
        loose.half(1)
        loose.rest()
        loose.exchange.commit = commit  # type: ignore[method-assign]
        assert loose.batches.under_way
        loose.begin(running[:1])
        assert not any(left)
        stopped.close()
        loose.exchange.resolve()
        loose.half(2)
        loose.rest()
        assert_equal(loose.values(), wanted)
        assert loose.applied_batches() == {(0, 3)}
        loose.exchange.close()


@pytest.mark.parametrize("replication", [1, 2])
def test_batch_of_a_worker_dying_between_steps_is_completed(replication: int) -> None:
    wanted = undisturbed(3, table_first=False)
    with servers(2) as running:
        first, second = Loose("m0", replication=replication), Loose("m1", replication=replication)
        both, store = ("m0", "m1"), Store()
        together(lambda: first.begin(running, both, store), lambda: second.begin(running, both, store))
        together(first.exchange.resolve, second.exchange.resolve)
        first.half(0)
        first.exchange.close()
        second.half(1)
        second.rest()
        second.exchange.settle()
        running_on = running
        if replication == 2:  # one of the two servers dies too
            running[0].close(30.0)
            running_on = running[1:]
        second.begin(running_on, ("m1",))
        second.exchange.resolve()
        second.half(0)
        second.rest()
        second.half(2)
        second.rest()
        assert_equal(second.values(), wanted)
        assert second.applied_batches() == {(0, 3)}
        second.exchange.close()
