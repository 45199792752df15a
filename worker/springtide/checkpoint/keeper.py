"""Decides in one process whether to take a checkpoint, takes it, and gets one back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from springtide.checkpoint import names, restore, schedule
from springtide.checkpoint.local_shards import OwnShards
from springtide.checkpoint.location import CheckpointLocation
from springtide.checkpoint.manifest import CorruptError
from springtide.checkpoint.restore import Restored
from springtide.checkpoint.shares import Share
from springtide.checkpoint.staging import Elsewhere, Stage, Staged
from springtide.checkpoint.storage import Storage, StorageError
from springtide.checkpoint.writer import Writer, Written
from springtide.errors import SpringtideError
from springtide_protocol.names import StateName

log = logging.getLogger("springtide")

FLUSH_SECONDS = 600.0
READ_TRIES = 5
READ_PAUSE_SECONDS = 2.0


class Checkpoints:
    """All methods are called from the script's thread, `wish` also in a step's reductions.

    report: told of each share and checkpoint, from the writing thread.
    """

    def __init__(
        self,
        storage_location: CheckpointLocation,
        job: Mapping[str, str],
        present: Callable[[StateName], Collection[str] | None],
        report: Callable[[Written], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.storage_location = storage_location
        self._clock = clock
        self._report = report
        self._stage = Stage()
        self._writer = Writer(
            storage_location.uri,
            storage_location.folder,
            keep=storage_location.keep,
            job=job,
            present=present,
            report=self._written,
        )
        self._last = clock()
        self._failures = 0
        self._taken: tuple[StateName, Share] | None = None
        self.due = False
        self._total = schedule.UNABLE
        """Sum of the members' wishes at the last step, while it may still turn out to be the loop's last."""

    @property
    def able(self) -> bool:
        return bool(self.storage_location.uri)

    @property
    def busy(self) -> bool:
        return self._writer.busy

    @property
    def last_taken(self) -> StateName | None:
        """The state of the last one that was begun here."""
        return self._taken[0] if self._taken is not None else None

    def make_way(self) -> bool:
        """Whether another one can be begun at once: shares of others are not waited for any more."""
        self._writer.abandon()
        return not self._writer.busy

    def started(self) -> None:
        """A generation begins: the interval of the first one counts from here."""
        if self._taken is None:
            self._last = self._clock()

    def wish(self, first: bool) -> float:
        """Return this member's number for the commit vote.

        first: this process is the first member, whose clock counts.
        """
        interval = self.storage_location.interval
        wanted = first and interval > 0
        due = wanted and schedule.due(self._clock(), self._last, interval, self._failures)
        return schedule.contribution(self.able, self.busy, due)

    def committed(self, total: float, ended: bool) -> None:
        """Note that a step is committed, and whether the members agreed to save it (`due`).

        Args:
            total: sum of the members' wishes, from the commit vote.
            ended: it is the last step of its loop.
        """
        self.due = self.able and schedule.take(total, ended)
        self._total = schedule.UNABLE if self.due else total

    def end_early(self) -> None:
        """Note that the step committed last was the last one of its loop, which its vote did not know."""
        if self._total != schedule.UNABLE:
            self.committed(self._total, True)
            self._total = schedule.UNABLE

    def take(
        self,
        state: StateName,
        tree: Callable[[], Any],
        share: Share,
        reason: str,
        take_snapshot: Callable[[str, int], Elsewhere | None] = lambda name, readers: None,
        own_shards: Callable[[Any], OwnShards | None] = lambda tree: None,
    ) -> float:
        """Copy this member's share and let it be written; a state that cannot be saved is reported, not
        raised.

        Args:
            state: name of the state, which the checkpoint gets too.
            tree: makes the state's tree; called at most once, in this call.
            share: which part of the state this member writes.
            reason: why it is taken, for the manifest.
            take_snapshot: has others keep their part of the state as it is; called with the checkpoint's name
                and the number of members that ask for it.
            own_shards: returns which of the tree's tensors are parts of larger ones, and what of them this
                member writes.

        Returns:
            Seconds that the caller was held up.
        """
        began = self._clock()
        self.due = False
        self._last = began
        if self._taken == (state, share):
            return 0.0
        if not self._writer.wait(FLUSH_SECONDS):
            self._written(
                Written(state, self.storage_location.uri, reason, error="the last one is still being written")
            )
            return self._clock() - began
        elsewhere = None
        try:
            elsewhere = take_snapshot(names.folder(state) + share.attempt, share.count)
            state_tree = tree()
            own = self._stage.take(state_tree, share, own_shards(state_tree))
        except (TypeError, RuntimeError) as problem:
            if elsewhere is not None:
                elsewhere.close()
            self._written(Written(state, self.storage_location.uri, reason, error=str(problem)))
            return self._clock() - began
        self._taken = state, share
        seconds = self._clock() - began
        self._writer.begin(Staged(state, share, reason, own, elsewhere, seconds))
        return seconds

    def leave_out(self) -> None:
        """Write nothing of the checkpoint that the members have agreed on; others do."""
        self.due = False
        self._last = self._clock()

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until what was taken is written, or given up; whether it is."""
        if self.busy:
            log.info("waiting for the checkpoint to be written")
        return self._writer.wait(seconds)

    def close(self) -> None:
        self._writer.close()

    def newest(self, must_read: bool, read: restore.Read = restore.read) -> tuple[Restored | None, list[str]]:
        """Find the checkpoint to go on from.

        Args:
            must_read: the job had state before, so it must not begin anew because storage does not answer.
            read: reads one checkpoint.

        Returns:
            The checkpoint, None if there is none; and what is wrong with newer ones.

        Raises:
            SpringtideError: storage does not answer although the job had state, or `checkpoint.restoreFrom`
                names no checkpoint that can be read.
        """
        if self.able:
            found, skipped = self._read(
                self.storage_location.uri, self.storage_location.folder, must_read, read
            )
            if found is not None or must_read or not self.storage_location.restore_from:
                return found, skipped
        if not self.storage_location.restore_from:
            return None, []
        wanted = f"checkpoint.restoreFrom {self.storage_location.restore_from}"
        uri, _, last = self.storage_location.restore_from.rstrip("/").rpartition("/")
        if names.parse(last) is not None:
            try:
                storage = Storage(uri)
                tree, manifest = read(storage, last)
            except (StorageError, CorruptError) as problem:
                raise SpringtideError(f"{wanted}: {problem}") from None
            return Restored(tree, manifest, storage.uri), []
        found, skipped = self._read(self.storage_location.restore_from, "", True, read)
        if found is None:
            raise SpringtideError(
                f"{wanted}: there is no whole checkpoint"
                + (
                    f" ({'; '.join(skipped)})"
                    if skipped
                    else "; name a job's folder, or one checkpoint in it"
                )
            )
        return found, skipped

    def _read(
        self, uri: str, folder: str, must_read: bool, read: restore.Read
    ) -> tuple[Restored | None, list[str]]:
        for attempt in range(READ_TRIES if must_read else 1):
            try:
                return restore.newest(Storage(uri, folder), read)
            except StorageError as problem:
                log.error("%s", problem)
                error = problem
                if must_read and attempt < READ_TRIES - 1:
                    time.sleep(READ_PAUSE_SECONDS)
        if must_read:
            raise SpringtideError(
                f"{error}; the job had state, and does not begin again from nothing while its checkpoints "
                "cannot be read"
            )
        return None, []

    def _written(self, result: Written) -> None:
        if result.error:
            self._failures += 1
        elif result.whole:
            self._failures = 0
        self._report(result)
