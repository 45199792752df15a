"""How a worker's gradients get to the servers, and values back: directly, or through its worker group.

In groups, gradients are summed within a group, and its first member sends them on and fetches the values for
all. This is the topology of MXNet's MPI mode: servers receive one gradient per group instead of one per
worker, and send one copy of the values, which the group relays (`value_chain`). Groups are runs of `size`
consecutive ranks of a generation; the last one may be smaller. All members still prepare and commit for
themselves, so that the rules of a step are those of workers without groups. A group that lost a member is
made anew with the next generation, like everything that knows ranks; what a member lacks then it fetches for
itself.

Values that a body looks at between its steps each member fetches for itself, as it looks: whether the others
do, and at what, is their scripts' affair. With the commit the first member relays what it has not seen.

The script's thread makes all calls. The relay chain has a thread of its own: at the first member it calls
the `fetch` that it was given, which waits for answers that the script's thread has asked for and leaves to
it, and it alone completes the futures in `_arrived`. Values arrive in `_scratch` and are copied to where the
script reads by the script's thread. No lock is held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Protocol

import torch

from springtide.comm.process_group import Group, Work, form
from springtide.ps.compression import Pushed
from springtide.ps.connections import ServerError
from springtide.ps.context import GroupSettings, PsContext
from springtide.ps.generation import GenerationStart, Meeting
from springtide.ps.sharding import PlannedChunk
from springtide.ps.value_chain import RelayChain, scratch_for

log = logging.getLogger("springtide")

Send = Callable[[torch.Tensor, int], Pushed]
"""(gradients of a bucket, its number)."""
"""Sends a bucket's gradients to the servers."""


def group_of(rank: int, size: int, world: int) -> range:
    """Return the ranks of the worker group of `rank`. PURE.

    Args:
        rank: One of a generation.
        size: Workers in a group.
        world: Workers in the generation.

    Returns:
        A run of ranks.
    """
    first = rank - rank % size
    return range(first, min(first + size, world))


class GradientRoute(Protocol):
    """The way of gradients to the servers and of values back.

    In a generation: `form`, then for each backward pass `begin_pass`, `push` for each bucket (in order unless
    it `takes_any_order`) and `end_sums`; after a commit `relay`, then `receive` for each chunk. `rest` at a
    boundary, `leave` at the generation's end.
    """

    @property
    def group(self) -> Group | None:
        """The worker group, of which each member calls the same; None: this worker goes alone."""
        ...

    @property
    def fetches(self) -> bool:
        """Whether this worker gets new values from the servers itself, and not along a relay chain."""
        ...

    @property
    def takes_any_order(self) -> bool:
        """Whether buckets may come in any order, since nobody sums them on the way."""
        ...

    def form(self, start: GenerationStart, meeting: Meeting) -> None:
        """Meet the members of the group.

        Args:
            start: Where the generation begins.
            meeting: Of the generation's members.

        Raises:
            RuntimeError: They do not come.
        """
        ...

    def leave(self) -> None:
        """End what the group has under way; it is over."""
        ...

    def begin_pass(self) -> None:
        """Begin a backward pass."""
        ...

    def push(self, gradients: torch.Tensor, bucket: int, send: Send, without: Collection[str] = ()) -> Pushed:
        """Have a bucket's gradients reach the servers.

        Args:
            gradients: Flat.
            bucket: Its number.
            send: Sends them from this worker.
            without: Chunks that are left out.

        Returns: The gradients that this worker sends.

        Raises:
            RuntimeError: A server or a member fails.
        """
        ...

    def end_sums(self, send: Send) -> None:
        """Send what has not been sent yet. Raise RuntimeError."""
        ...

    def carried(self, index: int, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        """Return this worker's part of what the script leaves of a gradient, which the next one adds to.

        Args:
            index: Number of the parameter.
            gradient: As it is left, multiplied by `factor` since the sum was made.
            factor: The factor that it was multiplied by.

        Returns:
            This worker's part.
        """
        ...

    def relay(self, chunks: Collection[PlannedChunk], fetch: Callable[[str], None]) -> None:
        """Begin to relay a step's values.

        Args:
            chunks: Those that the step has changed.
            fetch: Waits for a chunk's values at the member that fetches them.
        """
        ...

    def receive(self, key: str, to_the_end: bool, ask: Callable[[Collection[PlannedChunk]], object]) -> bool:
        """Wait for values that are relayed.

        Args:
            key: A chunk's.
            to_the_end: Wait also when the generation is over.
            ask: Asks servers for values that are not relayed after all.

        Returns:
            False: they come from the servers.

        Raises:
            ServerError: They do not come.
        """
        ...

    def rest(self, settle: Callable[[], None]) -> None:
        """End, at a boundary, what the next generation would cut off. settle: waits for all values."""
        ...


class DirectRoute:
    """The route of a worker that speaks to the servers for itself."""

    group = None
    fetches = True
    takes_any_order = True

    def form(self, start: GenerationStart, meeting: Meeting) -> None:
        """Do nothing: there is no group.

        Args:
            start: Not used.
            meeting: Not used.
        """

    def leave(self) -> None:
        """Do nothing: there is no group."""

    def begin_pass(self) -> None:
        """Do nothing: no sums are under way."""

    def push(self, gradients: torch.Tensor, bucket: int, send: Send, without: Collection[str] = ()) -> Pushed:
        """Send the gradients.

        Args:
            gradients: Flat.
            bucket: Its number.
            send: Sends them.
            without: Left out by `send` itself.

        Returns:
            The gradients that are sent.
        """
        return send(gradients, bucket)

    def end_sums(self, send: Send) -> None:
        """Do nothing: no sums are under way."""

    def carried(self, index: int, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the gradient: it is this worker's own.

        Args:
            index: Number of the parameter.
            gradient: As it is left.
            factor: The factor that it was multiplied by.

        Returns:
            The gradient.
        """
        return gradient

    def relay(self, chunks: Collection[PlannedChunk], fetch: Callable[[str], None]) -> None:
        """Do nothing: values are for this worker.

        Args:
            chunks: Those that the step has changed.
            fetch: Not called.
        """

    def receive(self, key: str, to_the_end: bool, ask: Callable[[Collection[PlannedChunk]], object]) -> bool:
        """Return False: values come from the servers.

        Args:
            key: A chunk's.
            to_the_end: Not used.
            ask: Not called.

        Returns:
            False.
        """
        return False

    def rest(self, settle: Callable[[], None]) -> None:
        """Do nothing: nobody waits for this worker."""


class GroupRoute:
    """The route of a worker in a group, also of one member."""

    takes_any_order = False

    def __init__(self, context: PsContext, settings: GroupSettings) -> None:
        self._context, self._settings = context, settings
        self._group: Group | None = None
        self._summed: list[tuple[Work, torch.Tensor, int]] = []
        self._chain: RelayChain | None = None
        self._arrived: dict[str, Future[bool]] = {}
        self._scratch: list[torch.Tensor] = []

    @property
    def size(self) -> int:
        """Workers in a group, but for the last one."""
        return self._settings.size

    @property
    def group(self) -> Group | None:
        """The worker group of the present generation."""
        return self._group

    @property
    def joined(self) -> Group:
        """The worker group. Raise ServerError when none has been formed."""
        if self._group is None:
            raise ServerError("no worker group has been formed")
        return self._group

    @property
    def follows(self) -> bool:
        """Whether another member speaks to the servers for this one."""
        return self.joined.rank > 0

    @property
    def relays(self) -> bool:
        """Whether the group has a relay chain: it has more than one member."""
        return self._chain is not None

    @property
    def relayed(self) -> bool:
        """Whether everything that the chain has begun to relay is over."""
        return self._chain is None or self._chain.ended

    @property
    def fetches(self) -> bool:
        """Whether this worker gets new values from the servers itself."""
        return self._chain is None or not self._chain.receives

    def form(self, start: GenerationStart, meeting: Meeting) -> None:
        """Meet the members of the group.

        Args:
            start: Of the generation.
            meeting: Of all its members.

        Raises:
            RuntimeError: A member does not come.
        """
        ranks = group_of(meeting.group.rank, self._settings.size, meeting.group.size)
        group = form(
            meeting.store.with_prefix(f"worker-group/{ranks.start}/"),
            ranks.index(meeting.group.rank),
            len(ranks),
            self._settings.address,
            connect_seconds=self._context.settings.connect_seconds,
            collective_seconds=self._settings.collective_seconds,
        )
        self._group = group
        self._chain = RelayChain(group) if group.size > 1 else None
        meeting.group.on_shut(group.shut)

    def leave(self) -> None:
        """End what the group has under way; it is over."""
        if self._chain is not None:
            self._context.connections.over("this worker's group is over")
            self._chain.end()
        if self._group is not None:
            if not self._group.release() or (self._chain is not None and not self._chain.ended):
                self._scratch = []  # something may still come into it
            self._group, self._summed = None, []
        self._chain, self._arrived = None, {}

    # ---- gradients

    def begin_pass(self) -> None:
        """Begin a backward pass."""
        self._summed = []

    def push(self, gradients: torch.Tensor, bucket: int, send: Send, without: Collection[str] = ()) -> Pushed:
        """Begin to sum the next bucket within the group; the first member sends on what is summed.

        Args:
            gradients: Flat; replaced by the sum.
            bucket: Its number; they come in their order.
            send: Sends a bucket to the servers.
            without: Chunks that are left out.

        Returns:
            The gradients that this worker puts in.

        Raises:
            RuntimeError: A server or a member fails.
        """
        group = self.joined
        if group.rank:
            # It may have been the first of its group before.
            chunks = self._context.sharding.by_bucket[bucket]
            self._context.compression.hand_over([c for c in chunks if c.key not in without], gradients)
        self._summed.append((group.start_sum(gradients), gradients, bucket))
        while self._summed and self._summed[0][0].is_completed():
            self._send_on(group, send)
        return Pushed(gradients.nbytes)

    def end_sums(self, send: Send) -> None:
        """Wait for the sums that are under way, and send them on. Raise RuntimeError."""
        while self._summed:
            self._send_on(self.joined, send)

    def _send_on(self, group: Group, send: Send) -> None:
        work, gradients, bucket = self._summed.pop(0)
        work.wait()
        if group.rank == 0:
            send(gradients, bucket)

    def carried(self, index: int, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        """Return this worker's part: every member has the group's sum, and one of them carries it.

        Args:
            index: Number of the parameter.
            gradient: As it is left, multiplied by `factor` since the sum was made.
            factor: The factor that it was multiplied by.

        Returns:
            The gradient at the first member; elsewhere the amount to take back of this one's debt.
        """
        if self._group is None or self._group.rank == 0:
            return gradient
        own, sharding = torch.zeros_like(gradient), self._context.sharding
        for key in sharding.keys_of([index]):
            if (handed := self._context.compression.handed_over(key)) is None:
                continue
            # It is in the sum, and has been paid with it, or is handed over once more.
            begin = sharding.by_key[key].start - sharding.layout.slots[index].offset
            for number, _, start, stop in sharding.by_key[key].pieces:
                if number == index:
                    paid = handed[start:stop].to(own.device, own.dtype)
                    own.view(-1)[begin + start : begin + stop] -= factor * paid
        return own

    # ---- values

    def relay(self, chunks: Collection[PlannedChunk], fetch: Callable[[str], None]) -> None:
        """Begin to relay a step's values; what the first member has seen within the body comes besides.

        Args:
            chunks: Those that the step has changed.
            fetch: Waits for a chunk's values, at the first member.
        """
        if self._chain is None:
            return
        lacking = [chunk.key for chunk in chunks]
        arrived = self.pass_on(fetch, chosen=frozenset(lacking))
        self.expect({key: arrived[key] for key in lacking})

    def pass_on(
        self,
        fetch: Callable[[str], None],
        first: Mapping[str, torch.Tensor] | None = None,
        chosen: Collection[str] | None = None,
        in_parts: bool = False,
    ) -> dict[str, Future[bool]]:
        """Begin to pass values along the chain; as `RelayChain.begin`.

        Args:
            fetch: Waits for a piece's values, at the first member.
            first: Pieces that come before all chunks.
            chosen: Which pieces come; None: all.
            in_parts: The first member begins several times.

        Returns:
            By piece, whether it comes, when it is there; nothing without a chain.
        """
        if self._chain is None:
            return {}
        if self._chain.receives and not self._scratch:
            self._scratch = scratch_for(self._context.memory.values)
        memory = self._scratch if self._chain.receives else self._context.memory.values
        chunks = self._context.sharding.chunks
        pieces = {chunk.key: memory[chunk.bucket][chunk.start : chunk.stop] for chunk in chunks}
        return self._chain.begin({**(first or {}), **pieces}, fetch, chosen, in_parts)

    def expect(self, arriving: Mapping[str, Future[bool]]) -> None:
        """Take these pieces, and no others, from the chain."""
        self._arrived = dict(arriving)

    def expect_also(self, name: str, arriving: Future[bool]) -> None:
        """Take another piece from the chain.

        Args:
            name: The piece's.
            arriving: Whether it comes.
        """
        self._arrived[name] = arriving

    def take(self, name: str) -> Future[bool] | None:
        """Return the arrival of a piece that is expected, and expect it no longer."""
        return self._arrived.pop(name, None)

    def receive(self, key: str, to_the_end: bool, ask: Callable[[Collection[PlannedChunk]], object]) -> bool:
        """Wait for values that are relayed.

        Args:
            key: A chunk's.
            to_the_end: Wait also when the generation is over.
            ask: Asks servers for values that do not come, or all that are missing when the group is over.

        Returns:
            False: they come from the servers.

        Raises:
            ServerError: They do not come.
        """
        arrived, chain = self.take(key), self._chain
        if arrived is None or chain is None:
            return False
        by_key = self._context.sharding.by_key
        try:
            comes = self._context.connections.result(
                arrived, lambda: "the step's values from this worker's group"
            )
        except RuntimeError as error:
            if not to_the_end:
                raise ServerError(str(error)) from None
        else:
            if not comes:
                ask([by_key[key]])
                return False
            if chain.receives:
                bucket, start, stop = by_key[key].span
                self._context.memory.values[bucket][start:stop] = self._scratch[bucket][start:stop]
            return True
        # The group is over, and the body that has committed the step goes on: it asks the servers for itself.
        chain.end()
        lacking = [key, *(other for other, came in self._arrived.items() if not _has_come(came))]
        for other in lacking[1:]:
            del self._arrived[other]
        ask([by_key[other] for other in lacking if other in by_key])
        return False

    def rest(self, settle: Callable[[], None]) -> None:
        """Let the last step's values pass the whole group.

        Values that are cut off, each member fetches for itself in the next generation.

        Args:
            settle: Waits for all values.
        """
        if self._chain is None:
            return
        try:
            settle()
        except ServerError as error:
            log.info("not all values of the last step are here: %s", error)
        else:
            self._chain.finish()

    def finish(self) -> None:
        """Wait until what has come is passed on."""
        if self._chain is not None:
            self._chain.finish()


def _has_come(future: Future[bool]) -> bool:
    return future.done() and future.exception() is None and future.result()
