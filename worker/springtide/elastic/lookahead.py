"""Have members tell each other what follows in streams of shards, where no vote of a step has told it.

That is so at the begin of a pass, and where a batch would be short although something follows. Only the
script's thread uses it.
"""

from __future__ import annotations

import json

from springtide.comm.gather import gather_bytes
from springtide.comm.process_group import Group, peers_in
from springtide.data.cursor import Cursor
from springtide.data.loop import LoopPlan
from springtide.data.streams import Finding
from springtide.errors import SpringtideError
from springtide.loading.streams import StreamLoader
from springtide.train_step.context import Failure


class GroupFailed(Exception):
    """The members could not tell each other, because their group failed.

    Attributes:
        failure: for the next generation.
    """

    def __init__(self, failure: Failure) -> None:
        """Args: failure: for the next generation."""
        super().__init__(failure.detail)
        self.failure = failure


class Lookahead:
    """Keep what the members of a generation have told each other of the step at the cursor.

    It is no part of the committed state: a member that was lost meanwhile may not have heard it, so the next
    generation does the same again, and comes to the same.
    """

    def __init__(self) -> None:
        self._known: tuple[Group, Cursor, Cursor] | None = None

    def cursor(self, plan: LoopPlan, loader: StreamLoader, cursor: Cursor, group: Group) -> Cursor:
        """Return the cursor with all that the next batch is dealt from; all members call this alike.

        Args:
            plan: of the loop, over shards.
            loader: reads the shards.
            cursor: where the step starts, as it was committed.
            group: of the generation.

        Raises:
            GroupFailed: the group failed.
            SpringtideError: there are no samples, or a shard is not what it was.
        """
        if plan.is_known(cursor):
            return cursor
        if self._known is not None and self._known[0] is group and self._known[1] == cursor:
            return self._known[2]
        order = plan.streams
        assert order is not None
        known = order.opened(cursor)
        # Again where streams turned out to end soon: then more of the others is needed.
        while not plan.is_known(known):
            known = order.extended(known, self._announced(loader, known, group))
        if all(position.is_finished for position in known.streams or ()):
            raise SpringtideError("dataset: none of its shards has a sample: check what reads them")
        self._known = group, cursor, known
        return known

    def _announced(self, loader: StreamLoader, cursor: Cursor, group: Group) -> dict[int, Finding]:
        """Return what all members have found of streams, each in its share of them."""
        own = loader.look(cursor, group.rank, group.size)
        text = json.dumps({stream: finding.to_json() for stream, finding in own.items()}).encode()
        try:
            texts = gather_bytes(group, text) if group.size > 1 else [text]
        except RuntimeError as error:  # as when a sum of the step failed
            raise GroupFailed(Failure(str(error), peers_in(error))) from error
        return {
            int(stream): Finding.from_json(numbers)
            for announced in texts
            for stream, numbers in json.loads(announced).items()
        }
