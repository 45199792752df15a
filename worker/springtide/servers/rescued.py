"""Chunks that no server holds any more, made again from what workers have pulled last, without common steps.

Each comes from the worker whose pull has the most ranges in it, together with these, so that what came later
is done again. The members agree over the store of the generation that begins.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from springtide.exchange.store import StreamStore
from springtide.ps.books import BookLeader, Offer, rescue
from springtide.ps.generation import Leader, Place
from springtide.ps.tables import PlannedSlice
from springtide.servers.exchange import ServerExchange
from springtide_ps.frames import Kind
from springtide_ps.ranges import Book, RangeSet

log = logging.getLogger("springtide")


class RescuedChunks(ServerExchange):
    """A part of `AsynchronousExchange`, which makes what is named here."""

    _meeting: tuple[StreamStore, int, int] | None
    _pulled: dict[str, Offer]
    _slices: Mapping[str, PlannedSlice]
    _await_late: Callable[[], None]

    def _make_leader(self, place: Place) -> Leader:
        return BookLeader(self.links, place, self._replication, self._rescue)

    def _hear(self, store: StreamStore, leader: int) -> dict[str, Any]:
        """As another member than the leader: give what is asked of this one's pulled values."""
        lost = json.loads(store.get(f"lost/{leader}"))
        if lost:
            assert self._meeting is not None
            rank = self._meeting[1]
            offers = {key: self._pulled[key].rank() for key in lost if key in self._pulled}
            store.set(f"pulls/{rank}", json.dumps(offers).encode())
            chosen = json.loads(store.get(f"rescue/{leader}"))
            own = {key: server for key, (giver, server) in chosen.items() if giver == rank}
            self._give(own)
            store.set(f"rescued/{rank}", b"")
        return super()._hear(store, leader)

    def _rescue(self, lost: list[str], loads: dict[str, int]) -> dict[str, str]:
        """As the leader: have chunks that no server holds made again from newest pulls; server by chunk.

        Chunks of which nobody has a pull are left out; all of them, when rows are lost, which nobody has.
        """
        assert self._meeting is not None
        store, rank, _ = self._meeting
        self._await_late()
        if rows := [key for key in lost if key in self._slices]:
            log.warning(
                "%d slices of tables are on no server any more: no worker has their rows, so nothing is made "
                "again from what workers have pulled; replication 2 keeps a copy of each",
                len(rows),
            )
            lost = []
        store.set(f"lost/{rank}", json.dumps(lost).encode())
        if not lost:
            return {}
        others = [other for other in range(len(self._entered.members)) if other != rank]
        offers = {rank: {key: self._pulled[key].rank() for key in lost if key in self._pulled}}
        offers |= {other: json.loads(store.get(f"pulls/{other}")) for other in others}
        sizes = {key: self._chunks[key].nbytes for key in lost}
        chosen = rescue(offers, sizes, loads)
        store.set(f"rescue/{rank}", json.dumps(chosen).encode())
        self._give({key: server for key, (giver, server) in chosen.items() if giver == rank})
        for other in others:
            store.get(f"rescued/{other}")
        return {key: server for key, (_, server) in chosen.items()}

    def _give(self, keys: dict[str, str]) -> None:
        """Have servers hold chunks as this worker pulled them last; their optimizers' state begins anew."""
        asked = []
        for key, server in keys.items():
            planned, offer = self._chunks[key], self._pulled[key]
            chunk = self.optimizers.make(self._values(planned), planned.pieces, planned.optimizer)
            chunk.book = Book(RangeSet.from_json(offer.ranges), offer.applied, offer.skipped)
            meta, payload = chunk.dump()
            about = {**meta, "k": key, "s": 0}
            asked.append((server, self.links.ask(server, Kind.LOAD, self._entered.token, about, payload)))
        for server, future in asked:
            self.links.answer(future, server, "values that this worker has pulled")
        if keys:
            log.warning(
                "%d chunks that no server held begin again from what this worker pulled last, without their "
                "optimizer's state; ranges that came later are done again",
                len(keys),
            )
