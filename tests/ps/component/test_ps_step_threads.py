"""Several threads make the steps of a server's chunks, and a slow chunk holds up no other one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.server.shard_store import ShardStore
from springtide_ps.server.step_protocol import StaleError

SIZE = 500
GROUPS = ({"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1},)
SPEC = StepSpec(0.5, False, GROUPS)
SECONDS = 30.0


def nobody(*told: Any) -> Any:
    raise ConnectionError("there is no other server")


class Job:
    """A store with chunks `a`, `b`, ... and two members that make their steps by hand."""

    def __init__(self, keys: str = "abcde", threads: int = 2) -> None:
        self.store = ShardStore(nobody, nobody, threads=threads)
        self.keys, self.generation = keys, 0
        self.begin(0)
        for number, key in enumerate(keys):
            values = torch.randn(SIZE, generator=torch.Generator().manual_seed(number))
            self.store.load(self.token, key, 0, Chunk(values, [(number, 0, 0, SIZE)], "adamw", GROUPS))

    @property
    def token(self) -> tuple[int, int, int]:
        return (1, 0, self.generation)

    def begin(self, step: int) -> None:
        self.generation += 1
        self.store.enter(self.token, ["m0", "m1"], step, "one")
        self.store.resolve(self.token, None)

    def stage(self, step: int, member: int, key: str) -> None:
        self.store.stage(self.token, step, f"m{member}", key, gradient(step, member, key))

    def stage_all(self, step: int, members: tuple[int, ...] = (0, 1)) -> None:
        for key in self.keys:
            for member in members:
                self.stage(step, member, key)

    def prepare(self, step: int, member: int, norm: bool) -> Future[Any]:
        answer, done = promise()
        self.store.prepare(self.token, step, f"m{member}", len(self.keys), norm, done)
        return answer

    def finish(self, step: int, norm: bool = False) -> Any:
        answers = [self.prepare(step, member, norm) for member in (0, 1)]
        norms = [answer.result(SECONDS) for answer in answers]
        assert norms[0] == norms[1]
        for member in (0, 1):
            self.store.commit(self.token, step, f"m{member}", SPEC, promise()[1])
        return norms[0]

    def values(self, step: int, key: str) -> torch.Tensor:
        answer, done = promise()
        self.store.fetch(self.token, step, key, done)
        found = answer.result(SECONDS)
        assert isinstance(found, torch.Tensor)
        return found.clone()


def gradient(step: int, member: int, key: str) -> torch.Tensor:
    seed = 1000 * step + 100 * member + ord(key)
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def promise() -> tuple[Future[Any], Callable[[Any, Exception | None], None]]:
    answer: Future[Any] = Future()

    def done(result: Any, error: Exception | None) -> None:
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    return answer, done


@contextmanager
def job(keys: str = "abcde", threads: int = 2) -> Iterator[Job]:
    made = Job(keys, threads)
    try:
        yield made
    finally:
        made.store.close()


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def test_two_threads_make_two_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both, apply = threading.Barrier(2, timeout=SECONDS), Chunk.apply

    def together(chunk: Chunk, *args: Any, **named: Any) -> None:
        both.wait()
        apply(chunk, *args, **named)

    with job("ab") as made:
        made.stage_all(1)
        monkeypatch.setattr(Chunk, "apply", together)
        made.finish(1)
        for key in "ab":
            made.values(1, key)
    assert not both.broken


def test_bits_do_not_depend_on_how_many_threads_there_are() -> None:
    found = []
    for threads in (1, 2, 5):
        with job(threads=threads) as made:
            norms = []
            for step in range(1, 6):
                made.stage_all(step)
                norms.append(made.finish(step, norm=True))
            found.append((norms, [made.values(5, key) for key in made.keys]))
    for norms, values in found[1:]:
        assert norms == found[0][0]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(values, found[0][1], strict=True))


def test_steps_that_pile_up_are_made_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    go, apply = threading.Event(), Chunk.apply

    def later(chunk: Chunk, *args: Any, **named: Any) -> None:
        assert go.wait(SECONDS)
        apply(chunk, *args, **named)

    with job("abc") as undisturbed:
        for step in (1, 2, 3):
            undisturbed.stage_all(step)
            undisturbed.finish(step)
        wanted = [undisturbed.values(3, key) for key in "abc"]
    monkeypatch.setattr(Chunk, "apply", later)
    with job("abc") as made:
        made.stage_all(1)
        made.finish(1)
        threads = ThreadPoolExecutor(1)
        rest = threads.submit(lambda: [(made.stage_all(step), made.finish(step)) for step in (2, 3)])
        go.set()
        rest.result(SECONDS)
        threads.shutdown()
        assert all(torch.equal(made.values(3, k), v) for k, v in zip("abc", wanted, strict=True))


def test_slow_chunk_holds_up_no_gradient_of_another(aside: ThreadPoolExecutor) -> None:
    with job("ab") as made:
        with made.store.shard("a").lock:
            slow = [aside.submit(made.stage, 1, member, "a") for member in (0, 1)]
            aside.submit(lambda: [made.stage(1, member, "b") for member in (0, 1)]).result(SECONDS)
            assert aside.submit(made.values, 0, "b").result(SECONDS) is not None
            assert not any(future.done() for future in slow)
        for future in slow:
            future.result(SECONDS)
        made.finish(1)
        assert torch.isfinite(made.values(1, "a")).all()


def test_prepare_is_answered_when_the_last_gradient_is_added(aside: ThreadPoolExecutor) -> None:
    with job("ab") as made:
        for member in (0, 1):
            made.stage(1, member, "b")
        made.stage(1, 0, "a")
        with made.store.shard("a").lock:
            slow = aside.submit(made.stage, 1, 1, "a")
            counted = aside.submit(wait_until_counted, made)
            answers = counted.result(SECONDS)
            assert not any(answer.done() for answer in answers)
        slow.result(SECONDS)
        assert [answer.result(SECONDS) for answer in answers] == [None, None]


def wait_until_counted(made: Job) -> list[Future[Any]]:
    """Prepare the step as soon as the store says that all gradients have come."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with suppress(ValueError):  # m1 has not sent all
            return [made.prepare(1, member, False) for member in (1, 0)]
        time.sleep(0.001)
    raise TimeoutError("the last gradient is not counted")


@pytest.mark.parametrize("_", range(5))
def test_gradient_of_an_older_generation_is_not_added(_: int, aside: ThreadPoolExecutor) -> None:
    with job("a") as made:
        with made.store.shard("a").lock:
            slow = aside.submit(made.stage, 1, 0, "a")
            begun = aside.submit(made.begin, 0)
        begun.result(SECONDS)
        assert slow.exception(SECONDS) is None or isinstance(slow.exception(), StaleError)
        assert made.store.shard("a").sums == {}
        made.stage_all(1)
        made.finish(1)
        expected = Chunk(
            torch.randn(SIZE, generator=torch.Generator().manual_seed(0)), [(0, 0, 0, SIZE)], "adamw", GROUPS
        )
        expected.apply(gradient(1, 0, "a") + gradient(1, 1, "a"), SPEC)
        assert torch.equal(made.values(1, "a"), expected.values)


def test_norms_are_made_as_sums_close(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, square_norm = [], Chunk.square_norm

    def counted(chunk: Chunk, total: torch.Tensor) -> float:
        calls.append(threading.current_thread().name)
        return square_norm(chunk, total)

    monkeypatch.setattr(Chunk, "square_norm", counted)
    with job() as made:
        made.stage_all(1)
        assert calls == []
        made.finish(1, norm=True)
        assert len(calls) == 5
        made.stage_all(2)
        assert calls[5:] == [threading.current_thread().name] * 5
        norms = made.finish(2, norm=True)
        assert len(calls) == 10
        total = 0.0
        for key in sorted(made.keys):
            total += square_norm(made.store.dense(key), gradient(2, 0, key) + gradient(2, 1, key))
        assert norms == {0: total}
        made.stage_all(3)
        made.finish(3)
        made.stage_all(4)
        made.finish(4)
        assert len(calls) == 15  # of step 3, before anybody said that there is to be none


def test_norm_that_takes_long_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, aside: ThreadPoolExecutor
) -> None:
    go, begun, square_norm = threading.Event(), threading.Event(), Chunk.square_norm

    def slow(chunk: Chunk, total: torch.Tensor) -> float:
        begun.set()
        assert go.wait(SECONDS)
        return square_norm(chunk, total)

    monkeypatch.setattr(Chunk, "square_norm", slow)
    with job("ab") as made:
        made.stage_all(1)
        answers = [aside.submit(made.prepare, 1, m, True).result(SECONDS) for m in (0, 1)]
        assert begun.wait(SECONDS)
        assert aside.submit(made.values, 0, "b").result(SECONDS) is not None
        assert not any(answer.done() for answer in answers)
        go.set()
        assert answers[0].result(SECONDS) == answers[1].result(SECONDS)


def test_norm_that_fails_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(chunk: Chunk, total: torch.Tensor) -> float:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Chunk, "square_norm", broken)
    with job("ab") as made:
        made.stage_all(1)
        for answer in [made.prepare(1, member, True) for member in (0, 1)]:
            with pytest.raises(ValueError, match="the norm of the sum of 'a' could not be made"):
                answer.result(SECONDS)
