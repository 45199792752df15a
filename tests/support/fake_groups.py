"""Groups of the test's own process that do what gloo's do, and fail where the test says: no socket, no time.

Members are threads of which one runs at a time: it keeps the turn until it has to wait for another member. So
a test is the same in each run, and a member can be lost at any chosen call.

Copied from gloo: a collective is over for a member not before all have begun it; what is sent is read
as late as possible, and what is received is full of rubbish until then, so that memory that is touched too
early makes wrong numbers; after a member was lost, collectives that all had begun end well at some of the
others and fail at the rest, and all that are begun later fail.

Threads and locks: each member has a lock that it waits for, and whose release gives it the turn; `_back` is
the scheduler's. Turns strictly alternate between the scheduler and a member, so that plain locks do, which
take less time than events. Only the thread that has the turn touches anything.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

PATIENCE_SECONDS = 60.0


class Dead(BaseException):
    """The member is lost here, as by kill -9: none of its code may handle it."""


class Stuck(AssertionError):
    """Members wait for each other, so that none goes on."""


@dataclass
class Turns:
    """Runs members, one at a time.

    Attributes:
        draw: Of the order in which members run.
    """

    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self._mine = threading.local()
        self._back = threading.Lock()
        self._back.acquire()
        self._moved = False
        self._stuck = False

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all calls, each as a member; return what each returned or raised, in their order.

        Args:
            calls: Of the members.

        Raises:
            Stuck: They wait for each other.
        """
        results: list[Any] = [None] * len(calls)
        turns = [threading.Lock() for _ in calls]
        for turn in turns:
            turn.acquire()
        done = [False] * len(calls)

        def member(number: int) -> None:
            self._mine.turn = turns[number]
            self._get_turn()
            try:
                results[number] = calls[number]()
            except BaseException as error:
                results[number] = error
            done[number] = True
            self._back.release()

        threads = [
            threading.Thread(target=member, args=(number,), daemon=True) for number in range(len(calls))
        ]
        for thread in threads:
            thread.start()
        self._stuck = False
        while not all(done):
            waiting = [number for number in range(len(calls)) if not done[number]]
            self.draw.shuffle(waiting)
            self._moved = False
            for number in waiting:
                turns[number].release()
                came_back = self._back.acquire(timeout=PATIENCE_SECONDS)
                assert came_back, "a member neither ends nor waits in a collective"
                self._moved |= done[number]
            if not self._moved:
                self._stuck = True
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        if self._stuck:
            raise Stuck("members wait for each other")
        return results

    def moved(self) -> None:
        """Note that the member that runs has done something that others may wait for."""
        self._moved = True

    def until(self, ready: Callable[[], bool]) -> None:
        """Let others run until `ready`. Raise Stuck when that cannot come."""
        while not ready():
            self._back.release()
            self._get_turn()
            if self._stuck:
                raise Stuck("members wait for each other")
        self._moved = True

    def _get_turn(self) -> None:
        assert self._mine.turn.acquire(timeout=PATIENCE_SECONDS), "the turn did not come"


@dataclass
class _Operation:
    kind: str
    entries: dict[int, Callable[[], None] | tuple[Any, ...]] = field(default_factory=dict)
    over: bool = False
    well: dict[int, bool] = field(default_factory=dict)


class Network:
    """Have what the members of one group share.

    Attributes:
        sent: By rank, the bytes that it has sent others in exchanges.
        exchanges: How many exchanges have begun.
    """

    def __init__(self, turns: Turns, size: int, seed: int = 0) -> None:
        self.turns, self.size = turns, size
        self.broken = False
        self.sent = [0] * size
        self.exchanges = 0
        self.draw = random.Random(seed)
        self.operations: list[_Operation] = []
        self.groups = [FakeGroup(self, rank) for rank in range(size)]

    def lose(self) -> None:
        """Break all connections."""
        self.broken = True
        self.turns.moved()

    def begin(self, number: int, kind: str, rank: int, entry: tuple[Any, ...]) -> _Operation:
        """Have a member begin its next collective."""
        if number == len(self.operations):
            self.operations.append(_Operation(kind))
        operation = self.operations[number]
        if operation.kind != kind:
            raise AssertionError(
                f"collective {number} is {operation.kind} at others and {kind} at rank {rank}"
            )
        operation.entries[rank] = entry
        self.turns.moved()
        return operation

    def ready(self, operation: _Operation) -> bool:
        """Return whether a member need not wait any more."""
        return operation.over or len(operation.entries) == self.size or self.broken

    def end(self, operation: _Operation, rank: int) -> None:
        """Finish the member's part. Raise RuntimeError when the connections broke before."""
        whole = len(operation.entries) == self.size
        if not self.broken and whole and not operation.over:
            self._carry_out(operation)
            operation.over = True
        if operation.over and not self.broken:
            operation.well[rank] = True
        if rank not in operation.well:
            operation.well[rank] = whole and self.draw.random() < 0.5
            if operation.well[rank] and not operation.over:
                self._carry_out(operation)
                operation.over = True
        if not operation.well[rank]:
            raise RuntimeError(f"connection of rank {rank} closed by peer")

    def _carry_out(self, operation: _Operation) -> None:
        entries: list[Any] = [operation.entries[rank] for rank in range(self.size)]
        if operation.kind == "exchange":
            self._exchange(entries)
            return
        total = entries[0][0].clone()
        for (tensor,) in entries[1:]:
            assert (tensor.shape, tensor.dtype) == (total.shape, total.dtype), "members sum different things"
            total = torch.maximum(total, tensor) if operation.kind == "max" else total + tensor
        for (tensor,) in entries:
            tensor.copy_(total)

    def _exchange(self, entries: Sequence[tuple[torch.Tensor, torch.Tensor, list[int], list[int]]]) -> None:
        self.exchanges += 1
        for rank, (received, _, room, _) in enumerate(entries):
            at = 0
            for sender, (_, sent, _, sizes) in enumerate(entries):
                assert room[sender] == sizes[rank], (
                    f"{sender} sends {sizes[rank]}, {rank} expects {room[sender]}"
                )
                assert sent.dtype == received.dtype
                begin = sum(sizes[:rank])
                received[at : at + room[sender]] = sent[begin : begin + room[sender]]
                at += room[sender]
                if sender != rank:
                    self.sent[sender] += room[sender] * sent.element_size()


class _Work:
    def __init__(self, group: FakeGroup, operation: _Operation) -> None:
        self._group, self._operation = group, operation

    def is_completed(self) -> bool:
        return self._group.network.ready(self._operation)

    def wait(self) -> bool:
        self._group.point()
        network = self._group.network
        network.turns.until(lambda: network.ready(self._operation))
        network.end(self._operation, self._group.rank)
        return True


class FakeGroup:
    """One member's end of a group; it has what the library's `Group` has for sums and exchanges.

    Attributes:
        dies_after: Calls (begun or awaited collectives) after which the member is lost; None: it is not.
        points: Calls so far.
    """

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank, self.size = network, rank, network.size
        self.is_shut = False
        self.dies_after: int | None = None
        self.points = 0
        self._begun = 0
        self.before_next: Callable[[], object] | None = None

    def point(self) -> None:
        """Count a call, and lose the member if it is the one. Raise Dead."""
        if self.dies_after is not None and self.points >= self.dies_after:
            self.network.lose()
            raise Dead
        self.points += 1

    def shut(self) -> None:
        """End all collectives of this group, at all members."""
        self.is_shut = True
        self.network.lose()

    def start_sum(self, tensor: torch.Tensor, *, in_place: bool = False) -> Any:
        """Begin to replace a tensor by its sum over the members; in_place: without memory for what comes."""
        return self._start("sum", (tensor,))

    def start_max(self, tensor: torch.Tensor) -> Any:
        """Begin to replace a tensor by its maximum over the members, by element."""
        return self._start("max", (tensor,))

    def start_exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Any:
        """Begin an exchange; see the library's group."""
        for tensor, sizes in ((received, received_sizes), (sent, sent_sizes)):
            assert tensor.is_contiguous()
            assert tensor.shape == (sum(sizes),)
            assert len(sizes) == self.size
        if received.numel():
            received.view(torch.uint8).random_(0, 256)
        return self._start("exchange", (received, sent, list(received_sizes), list(sent_sizes)))

    def _start(self, kind: str, entry: tuple[Any, ...]) -> Any:
        if self.size > 1 and self.before_next is not None:
            self.before_next()
        self.point()
        if self.size == 1:
            assert kind != "exchange" or not entry[0].numel(), "a member alone exchanges nothing"
            return _Over()
        if self.network.broken:
            raise RuntimeError("connection closed by peer")
        operation = self.network.begin(self._begun, kind, self.rank, entry)
        self._begun += 1
        return _Work(self, operation)


class _Over:
    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def on_members(size: int, call: Callable[[FakeGroup], Any], seed: int = 0) -> tuple[list[Any], Network]:
    """Run a call at each member of a group; return what they returned, by rank, and the network.

    Args:
        size: Members.
        call: Gets the member's group.
        seed: Of the order in which members run.

    Raises:
        BaseException: The first that a member raised.
    """
    turns = Turns(random.Random(seed))
    network = Network(turns, size, seed)
    results = turns.run([lambda group=group: call(group) for group in network.groups])
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results, network
