"""Shards that no server holds any more, made again from what workers have pulled last, without common steps.

Each comes from the worker whose pull has the most batches in it, together with these, so that what came later
is done again. The members agree over the store of the generation that begins. Script's thread only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from springtide.ps.applied_batches import NewestPull, rescue
from springtide.ps.context import PsContext
from springtide.ps.generation import Meeting
from springtide_ps.params.applied import AppliedBatches, IntervalSet
from springtide_ps.wire.frames import Kind
from springtide_ps.wire.keys import INTERVALS_KEY

log = logging.getLogger("springtide")


class ShardRescue:
    """Keep what one worker has pulled, and give of that when a generation begins."""

    def __init__(self, context: PsContext) -> None:
        self._context = context
        self.pulled: dict[str, NewestPull] = {}
        """The newest values of each chunk that are here."""

    def note(self, key: str, said: Mapping[str, Any]) -> None:
        """Note which state of a chunk the values here are of.

        Args:
            key: The chunk's.
            said: The server's description of them, in JSON's types.
        """
        skipped = int(said.get("skipped", 0))
        self.pulled[key] = NewestPull(int(said["applied"]), said[INTERVALS_KEY], skipped=skipped)

    def tear(self, key: str) -> None:
        """Note that newer values of a chunk may have come in half."""
        if key in self.pulled:
            self.pulled[key] = replace(self.pulled[key], torn=True)

    def as_leader(self, meeting: Meeting, await_late: Callable[[], None]) -> Callable[..., dict[str, str]]:
        """Return what has chunks that no server holds made again from newest pulls.

        Args:
            meeting: Of the generation's members.
            await_late: Called first: waits until nothing lands any more.

        Returns:
            An `applied_batches.Rescue`.
        """

        def call(lost: list[str], loads: dict[str, int]) -> dict[str, str]:
            await_late()
            return self._lead(meeting, lost, loads)

        return call

    def _lead(self, meeting: Meeting, lost: list[str], loads: dict[str, int]) -> dict[str, str]:
        """Leave out chunks of which nobody has a pull; all of them, when rows are lost, which nobody has."""
        context, store, rank = self._context, meeting.store, meeting.group.rank
        if rows := [key for key in lost if key not in context.sharding.by_key]:
            log.warning(
                "%d slices of tables are on no server any more: no worker has their rows, so nothing is made "
                "again from what workers have pulled; replication 2 keeps a copy of each",
                len(rows),
            )
            lost = []
        store.set(f"lost/{rank}", json.dumps(lost).encode())
        if not lost:
            return {}
        others = [other for other in range(len(context.generation.start.members)) if other != rank]
        held_by_rank: dict[int, Any] = {rank: self._ranks_of(lost)}
        held_by_rank |= {other: json.loads(store.get(f"pulls/{other}")) for other in others}
        sizes = {key: context.sharding.by_key[key].nbytes for key in lost}
        chosen = rescue(held_by_rank, sizes, loads)
        store.set(f"rescue/{rank}", json.dumps(chosen).encode())
        self._give({key: server for key, (giver, server) in chosen.items() if giver == rank})
        for other in others:
            store.get(f"rescued/{other}")
        return {key: server for key, (_, server) in chosen.items()}

    def follow(self, meeting: Meeting) -> None:
        """Give what the leader asks of this member's pulls. Raise RuntimeError."""
        lost = json.loads(meeting.store.get(f"lost/{meeting.leader}"))
        if not lost:
            return
        rank = meeting.group.rank
        meeting.store.set(f"pulls/{rank}", json.dumps(self._ranks_of(lost)).encode())
        chosen = json.loads(meeting.store.get(f"rescue/{meeting.leader}"))
        self._give({key: server for key, (giver, server) in chosen.items() if giver == rank})
        meeting.store.set(f"rescued/{rank}", b"")

    def _ranks_of(self, keys: list[str]) -> dict[str, tuple[bool, int]]:
        return {key: self.pulled[key].rank() for key in keys if key in self.pulled}

    def _give(self, keys: Mapping[str, str]) -> None:
        """Have servers hold chunks as this worker pulled them last; their optimizers' state begins anew."""
        context, asked = self._context, []
        for key, server in keys.items():
            planned, offer = context.sharding.by_key[key], self.pulled[key]
            values = context.values.of(planned)
            chunk = context.optimizers.make(values, planned.pieces, planned.optimizer)
            chunk.applied_batches = AppliedBatches(
                IntervalSet.from_json(offer.intervals), offer.applied, offer.skipped
            )
            meta, payload = chunk.dump()
            about = {**meta, "k": key, "s": 0}
            asked.append((server, context.ask(server, Kind.LOAD, about, payload)))
        for server, future in asked:
            context.connections.answer(future, server, "values that this worker has pulled")
        if keys:
            log.warning(
                "%d chunks that no server held begin again from what this worker pulled last, without their "
                "optimizer's state; ranges that came later are done again",
                len(keys),
            )
