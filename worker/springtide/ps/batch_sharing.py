"""Workers that share one batch, where workers do not step together.

A worker without a group has its batches to itself. In a group everything is as with common steps: a batch is
divided among the members, gradients are summed, and one vote of the members decides whether the step is made.
Towards the servers the group is one worker, its first member: that one takes batches and tells the others
which, pushes the sum, and relays the values that come back. So it is also the one that sends again what had
no answer, whatever it is in the next generation; when it dies, the batch is given out again, and chunks that
have it answer without applying it.

In a body with several steps the first member pushes the substeps made so far when it wants to see their
values, begins another backward pass, or ends the body, and the values pass along in as many portions. A
member that looks at values that it has not got yet waits for the portion that they come in.

The script's thread makes all calls. `_land` runs in the connection's thread that brings an answer, and only
completes a future in `_landed`; the relay chain's thread waits for these. A dictionary of landings is never
changed once it is handed to the chain, but replaced. No lock is held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from springtide import faults
from springtide.comm.process_group import Group
from springtide.embedding.local import merged
from springtide.ps.connections import ServerError
from springtide.ps.context import PsContext
from springtide.ps.generation import Meeting
from springtide.ps.group_rows import gather
from springtide.ps.lease import Lease, decode, encode, encode_nothing
from springtide.ps.tables import table_name
from springtide.ps.worker_groups import GroupRoute, group_of
from springtide_ps.server.lease_table import starting_clocks
from springtide_ps.wire.client import Answer

log = logging.getLogger("springtide")

Reported = Sequence[int | None]
"""Number of steps that the worker of each rank has made; None of a joiner."""
Rows = tuple[torch.Tensor, torch.Tensor]
"""ids int64 [n], each once, or heads; sums float32 [n, dim]."""


class BatchSharing(Protocol):
    """Share the batches of `AsyncBackend` with the other members of a group, or with nobody.

    In a body: `begin_step`, `keep_rows` for each table, `rows` and `norm_squares` when gradients are
    complete, `stepped` after each of several steps; `expect` before something is pushed, `sent` for each
    push, then `relay_substep` or `committed`. Members of a group call the same in the same order.
    """

    @property
    def group(self) -> Group | None:
        """The worker group; None: this worker works alone."""
        ...

    @property
    def follows(self) -> bool:
        """Whether another member takes batches, pushes and fetches for this one."""
        ...

    def begin_generation(self) -> None:
        """Forget what the last generation's batches were about."""
        ...

    def begin_step(self) -> None:
        """Begin a body."""
        ...

    def clocks(self, reported: Reported, meeting: Meeting) -> tuple[dict[str, int], int]:
        """Return by taker of batches the steps that it begins with, and those of this worker's taker.

        Args:
            reported: By rank.
            meeting: Of the generation's members.

        Returns:
            Steps by name of a worker, and this worker's.
        """
        ...

    def lease(self, number: int, take: Callable[[], Lease], clock: Callable[[], int]) -> tuple[Lease, int]:
        """Take a batch to work on.

        Args:
            number: Of the window's first batch.
            take: Takes one from the servers.
            clock: Says how many steps this worker has made; taking a batch may count one.

        Returns:
            The batch, and how many steps have been made.

        Raises:
            RuntimeError: The generation is over.
        """
        ...

    def part(self, settle: Callable[[], None]) -> None:
        """Return when no member waits for another one. settle: waits for all values."""
        ...

    def keep_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> bool:
        """Keep the gradients of a table until all members have theirs.

        Args:
            index: Number of the parameter that stands for the table.
            ids: int64 [n].
            sums: float32 [n, dim].

        Returns:
            False: this worker pushes them itself.
        """
        ...

    def rows(self) -> dict[int, Rows]:
        """Return the gradients of tables that were kept, of all members, for the worker that pushes them."""
        ...

    def norm_squares(self, own: Callable[[], list[tuple[int, float]]]) -> list[tuple[int, float]]:
        """Return sums of squares of gradients with their optimizer's number, the same at all members.

        Args:
            own: Computes them at the worker that pushes.

        Returns:
            (number, sum of squares).
        """
        ...

    def stepped(self, keys: Collection[str]) -> None:
        """Note that one of several optimizers has made its step, which changes these chunks and slices."""
        ...

    def expect(self, keys: Collection[str]) -> None:
        """Note that answers about these chunks and slices are about to be asked for."""
        ...

    def sent(self, key: str, answer: Future[Answer]) -> None:
        """Note that a chunk or slice was pushed or pulled.

        Args:
            key: Its key.
            answer: The answer to come.
        """
        ...

    def forget_relayed(self) -> None:
        """Take no values from others: this worker fetches all for itself."""
        ...

    def refreshed(self) -> None:
        """Note that the newest values of all chunks are asked for, and nothing is on its way."""
        ...

    def relay_substep(self, keys: Collection[str]) -> None:
        """Relay what pushes of these chunks and slices are answered, within a body."""
        ...

    def committed(self, keys: Collection[str]) -> None:
        """Relay what the body's last pushes, of these chunks and slices, are answered."""
        ...

    def await_rows(self, tables: Iterable[int], to_the_end: bool) -> None:
        """Wait until another member's pushes of these tables are in their slices.

        Args:
            tables: Numbers of the parameters that stand for them.
            to_the_end: Wait also when the generation is over.

        Raises:
            ServerError: They are not.
        """
        ...


class OwnBatches:
    """The sharing of a worker that has its batches to itself."""

    group = None
    follows = False

    def __init__(self, context: PsContext) -> None:
        self._context = context

    def begin_generation(self) -> None:
        """Do nothing: nobody else is concerned."""

    def begin_step(self) -> None:
        """Do nothing: nobody else is concerned."""

    def clocks(self, reported: Reported, meeting: Meeting) -> tuple[dict[str, int], int]:
        """Return the steps that each worker begins with, and this one's.

        Args:
            reported: By rank.
            meeting: Of the generation's members.

        Returns:
            Steps by name of a worker, and this worker's.
        """
        members = self._context.generation.start.members
        clocks = starting_clocks(dict(zip(members, reported, strict=True)))
        return clocks, clocks[self._context.settings.me]

    def lease(self, number: int, take: Callable[[], Lease], clock: Callable[[], int]) -> tuple[Lease, int]:
        """Take a batch from the servers.

        Args:
            number: Not used.
            take: Takes it.
            clock: Says how many steps this worker has made; taking a batch may count one.

        Returns:
            The batch, and the clock.
        """
        return take(), clock()

    def part(self, settle: Callable[[], None]) -> None:
        """Do nothing: nobody waits for this worker."""

    def keep_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> bool:
        """Return False: this worker pushes them itself.

        Args:
            index: Not used.
            ids: Not used.
            sums: Not used.

        Returns:
            False.
        """
        return False

    def rows(self) -> dict[int, Rows]:
        """Return nothing: no rows are kept."""
        return {}

    def norm_squares(self, own: Callable[[], list[tuple[int, float]]]) -> list[tuple[int, float]]:
        """Return this worker's own.

        Args:
            own: Computes them.

        Returns:
            (number, sum of squares).
        """
        return own()

    def stepped(self, keys: Collection[str]) -> None:
        """Do nothing: nobody else is concerned."""

    def expect(self, keys: Collection[str]) -> None:
        """Do nothing: nobody waits for this worker's answers."""

    def sent(self, key: str, answer: Future[Answer]) -> None:
        """Do nothing: nobody waits for this worker's answers.

        Args:
            key: Not used.
            answer: Not used.
        """

    def forget_relayed(self) -> None:
        """Do nothing: nothing is relayed."""

    def refreshed(self) -> None:
        """Do nothing: nothing is relayed."""

    def relay_substep(self, keys: Collection[str]) -> None:
        """Do nothing: nothing is relayed."""

    def committed(self, keys: Collection[str]) -> None:
        """Do nothing: nothing is relayed."""

    def await_rows(self, tables: Iterable[int], to_the_end: bool) -> None:
        """Do nothing: only this worker's own pushes count.

        Args:
            tables: Not used.
            to_the_end: Not used.
        """


class GroupBatches:
    """The sharing of a worker in a group, also of one member.

    route: the group's.
    """

    def __init__(self, context: PsContext, route: GroupRoute) -> None:
        self._context, self._route = context, route
        self._landed: dict[str, Future[None]] = {}
        self._rows: dict[int, Rows] = {}
        self._anew = False  # what was relayed may not be what the servers have sent
        self._parameters = {planned.key: planned.parameter for planned in context.tables.slices}
        # Relayed before values: what the batch has done to a table is in it. No chunk is named so.
        self._markers: dict[str, list[str]] = {table_name(index): [] for index in context.tables.handles}
        for planned in context.tables.slices:
            self._markers[table_name(planned.parameter)].append(planned.key)
        self._in_substeps = False  # steps of the body are told apart
        self._coming: dict[str, Future[bool]] = {}  # in parts, of what the body has not changed yet

    @property
    def group(self) -> Group | None:
        """The worker group of the present generation."""
        return self._route.group

    @property
    def follows(self) -> bool:
        """Whether another member takes batches, pushes and fetches for this one."""
        return self._route.follows

    def begin_generation(self) -> None:
        """Forget what the last generation's batches were about."""
        self._landed, self._rows, self._anew = {}, {}, False
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a body."""
        self._in_substeps, self._coming = False, {}

    # ---- batches

    def clocks(self, reported: Reported, meeting: Meeting) -> tuple[dict[str, int], int]:
        """Return the steps that each group begins with, by its first member, and this group's.

        Args:
            reported: By rank.
            meeting: Of the generation's members.

        Returns:
            Steps by name of a worker, and this worker's.
        """
        members, size = self._context.generation.start.members, self._route.size
        of_groups = clocks_of_groups(reported, size)
        clocks = starting_clocks({members[first]: clock for first, clock in of_groups.items()})
        return clocks, clocks[members[group_of(meeting.group.rank, size, len(members)).start]]

    def lease(self, number: int, take: Callable[[], Lease], clock: Callable[[], int]) -> tuple[Lease, int]:
        """Take a batch for the group, as its first member; at the others hear which.

        Args:
            number: Of the window's first batch.
            take: Takes one from the servers.
            clock: Says how many steps the group has made; taking a batch may count one.

        Returns:
            The batch, and how many steps the group has made.

        Raises:
            RuntimeError: The generation is over.
        """
        group = self._route.joined
        if group.rank == 0:
            try:
                found = take()
            except RuntimeError:
                group.shut()  # the others wait for the word
                raise
            word = encode(replace(found, waited=found.waited or self._anew), clock())
        else:
            faults.reach("leasing", number + 1)
            word = encode_nothing()
        group.start_sum(word).wait()
        return decode(word)

    def part(self, settle: Callable[[], None]) -> None:
        """Return when nobody of the group waits for a word of another one any more, nor for values.

        Args:
            settle: Waits for all values.
        """
        with suppress(RuntimeError):  # then it is over anyhow
            self._route.joined.start_sum(torch.zeros(1)).wait()
            settle()
            self._route.finish()

    # ---- gradients

    def keep_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> bool:
        """Keep the gradients of a table: backward reaches tables in no order of its own.

        Args:
            index: Number of the parameter that stands for the table.
            ids: int64 [n].
            sums: float32 [n, dim].

        Returns:
            True.
        """
        self._rows[index] = ids, sums
        return True

    def rows(self) -> dict[int, Rows]:
        """Return the gradients of all members, at the first one. At the same place of all members."""
        handles = self._context.tables.handles
        found = gather(self._route.joined, self._rows, handles)
        self._rows = {}
        return {
            index: merged(parts, handles[index].dim, handles[index].has_counts)
            for index, parts in found.items()
        }

    def norm_squares(self, own: Callable[[], list[tuple[int, float]]]) -> list[tuple[int, float]]:
        """Return those of the group's gradients. At the same place of all members.

        Args:
            own: Computes them at the first member.

        Returns:
            (number, sum of squares), for each optimizer.
        """
        squares = torch.zeros(len(self._context.optimizers.all), dtype=torch.float64)
        if not self.follows:
            for number, square in own():
                squares[number] += square
        self._route.joined.start_sum(squares).wait()
        return list(enumerate(squares.tolist()))

    # ---- what comes back

    def stepped(self, keys: Collection[str]) -> None:
        """Have looks at these chunks and slices wait for the first member, whose step changes them."""
        if self.follows:
            if not self._in_substeps:
                self._coming = self._relay_substeps(())
            self._await_substeps(keys)
        self._in_substeps = True

    def expect(self, keys: Collection[str]) -> None:
        """Have answers about these chunks and slices go on to the group as they come."""
        self._landed = {key: Future() for key in keys}

    def sent(self, key: str, answer: Future[Answer]) -> None:
        """Have an answer go on as it comes, from the thread that brings it.

        Args:
            key: Of a chunk or slice.
            answer: The answer to come.
        """
        if (landed := self._landed.get(key)) is not None:
            answer.add_done_callback(partial(_land, landed))

    def forget_relayed(self) -> None:
        """Take no values from others; what the first one has changed goes to all with the next batch."""
        self._route.expect({})
        self._landed, self._anew = {}, not self.follows

    def refreshed(self) -> None:
        """Begin to relay the newest values of all chunks. At the same place of all members."""
        self._anew = False
        self._relay_all()

    def relay_substep(self, keys: Collection[str]) -> None:
        """Relay what pushes of these are answered, as the first member."""
        self._relay_substeps(keys)

    def committed(self, keys: Collection[str]) -> None:
        """Relay what the body's last pushes are answered; at the others expect it."""
        if not self._in_substeps:
            self._context.values.outdate(None)
            self._relay_all()
        elif self.follows:
            self._await_substeps([key for key in keys if self._name_of(key) in self._coming])
        elif keys:
            self._relay_substeps(keys)

    def await_rows(self, tables: Iterable[int], to_the_end: bool) -> None:
        """Wait until the first member's pushes of these tables are in their slices.

        Args:
            tables: Numbers of the parameters that stand for them.
            to_the_end: Wait also when the generation is over.

        Raises:
            ServerError: They are not.
        """
        for index in tables:
            if (arrived := self._route.take(table_name(index))) is None:
                continue
            try:
                self._context.connections.result(
                    arrived, lambda: "the rows of this worker's group", to_the_end
                )
            except RuntimeError as error:
                if not to_the_end:
                    raise ServerError(str(error)) from None
                log.info("rows are read as they are: %s", error)

    def _relay_all(self) -> None:
        self._route.expect({})
        if not self._route.relays:
            return
        arrived = self._route.pass_on(self._fetch_landed(), self._marker_pieces())
        if not self._route.fetches:
            self._route.expect(arrived)

    def _relay_substeps(self, keys: Collection[str]) -> dict[str, Future[bool]]:
        """Relay these at the first member; at the others begin to receive the values of all substeps."""
        chosen = {self._name_of(key) for key in keys}
        return self._route.pass_on(self._fetch_landed(), self._marker_pieces(), chosen, in_parts=True)

    def _await_substeps(self, keys: Collection[str]) -> None:
        """Expect values of these chunks and slices with a part of the body's: they are not what they were."""
        self._context.values.outdate(keys)
        for name in dict.fromkeys(self._name_of(key) for key in keys):
            self._route.expect_also(name, self._coming.pop(name))

    def _fetch_landed(self) -> Callable[[str], None]:
        landed, markers, connections = self._landed, self._markers, self._context.connections

        def fetch(name: str) -> None:
            for needed in markers.get(name, [name]):
                if name not in markers or needed in landed:
                    connections.result(landed[needed], lambda: "an answer to this worker's group")

        return fetch

    def _marker_pieces(self) -> Mapping[str, torch.Tensor]:
        return {name: torch.zeros(1) for name in self._markers}

    def _name_of(self, key: str) -> str:
        """Return the name under which it is relayed: of a slice, its table's."""
        return table_name(self._parameters[key]) if key in self._parameters else key


def clocks_of_groups(reported: Reported, size: int) -> dict[int, int | None]:
    """Return by each group's first rank the steps that it is held to have made. PURE.

    The fewest of its members', since nobody is to be waited for longer than it was; joiners follow the others
    of their group. All values are fetched anew then, so that whatever is counted, none is older.

    Args:
        reported: By rank.
        size: Workers in a group.

    Returns:
        Steps; None: all of them are joiners.
    """
    found: dict[int, int | None] = {}
    for first in range(0, len(reported), size):
        ranks = group_of(first, size, len(reported))
        found[first] = min(
            (clock for clock in reported[ranks.start : ranks.stop] if clock is not None), default=None
        )
    return found


def _land(landed: Future[None], answered: Future[Answer]) -> None:
    if landed.done():
        return
    error = answered.exception()
    if error is not None:
        landed.set_exception(RuntimeError(str(error)))
    elif not answered.result().meta.get("whole"):
        landed.set_result(None)
