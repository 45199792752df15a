"""Writing beside training: each member its share, then the first of them the manifest, then what is too old
goes.

Threads and locks: `_changed`, one condition, guards the share to be written, and the thread's begin and end.
The script's thread hands a share over and may wait for its end; one writing thread does the work, and holds
the condition only to take a share and when it is done with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from springtide import faults
from springtide.checkpoint import files, names, schedule, shares
from springtide.checkpoint.keep import expendable, unreferenced
from springtide.checkpoint.manifest import (
    CorruptError,
    File,
    Manifest,
    Part,
    Receipt,
    parse,
    parse_receipt,
    refusal,
)
from springtide.checkpoint.staging import Collected, Elsewhere, GoneError, Staged
from springtide.checkpoint.storage import Storage, StorageError
from springtide.checkpoint.waiting import give_up
from springtide_protocol.names import StateName

log = logging.getLogger("springtide")

_POLL_SECONDS = 0.05
_MOST_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Written:
    """Result of one checkpoint on this member.

    Attributes:
        whole: it has a manifest.
        error: "" when it (or this member's share of it) is whole.
        bytes: size of all its files, if it is whole.
        share_bytes: size of this member's.
        seconds: of writing, here.
        written: unix seconds.
    """

    state: StateName
    uri: str
    reason: str
    whole: bool = False
    error: str = ""
    bytes: int = 0
    share_bytes: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    written: float = 0.0


class AbandonedError(Exception):
    """The others' shares are not waited for any more."""


class Writer:
    """Writes staged shares one after the other in a thread of its own.

    keep: checkpoints to leave on storage. job: for the manifest. present(generation): names of the members of
    the current generation, None while it is that one. report: called from the thread, once for each share.
    """

    def __init__(
        self,
        uri: str,
        folder: str,
        *,
        keep: int,
        job: Mapping[str, str],
        present: Callable[[StateName], Collection[str] | None],
        report: Callable[[Written], None],
    ) -> None:
        self._uri, self._folder = uri, folder
        self._keep = keep
        self._job = dict(job)
        self._present = present
        self._report = report
        self._storage: Storage | None = None
        self._changed = threading.Condition()
        self._staged: Staged | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._abandoned = False
        self._tried: list[StateName] = []  # not known to be whole

    @property
    def busy(self) -> bool:
        """Whether a share is being written, or the others' shares are waited for."""
        return self._staged is not None

    def begin(self, staged: Staged) -> None:
        """Write it in the thread. Only while not busy."""
        with self._changed:
            assert self._staged is None
            self._staged, self._abandoned = staged, False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="springtide-checkpoint", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until the writer is not busy, at most so long. Return whether it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: self._staged is None, seconds)

    def abandon(self) -> None:
        """Wait for no others' shares any more: another attempt is wanted."""
        self._abandoned = True

    def close(self) -> None:
        """End the thread if it is idle; what it writes is not waited for."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread if self._staged is None else None
        if thread is not None:
            thread.join(2.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._staged is not None or self._closing)
                staged = self._staged
            if staged is None:
                return
            result = self._written(staged)
            if result.error:
                log.error("checkpoint %s: %s", names.folder(staged.state), result.error)
            elif result.whole:
                log.info(
                    "checkpoint %s: %d bytes in %.3f s (%s)",
                    names.folder(staged.state), result.bytes, result.seconds, staged.reason,
                )  # fmt: skip
            try:
                self._report(result)
            finally:
                with self._changed:
                    self._staged = None
                    self._changed.notify_all()

    def _written(self, staged: Staged) -> Written:
        began = time.monotonic()
        uri, whole, size, share_bytes, error = self._uri, False, 0, 0, ""
        try:
            try:
                storage = self._storage = self._storage or Storage(self._uri, self._folder)
            except StorageError:
                if staged.elsewhere is not None:
                    staged.elsewhere.close()
                raise
            uri = storage.uri
            self._clear(storage, staged)
            parts = {"workers": staged.own}
            if staged.elsewhere is not None:
                parts[staged.elsewhere.kind] = self._collected(storage, staged, staged.elsewhere)
            share_bytes = sum(part.size for part in parts.values())
            receipts = {kind: self._write_share(storage, staged, kind, part) for kind, part in parts.items()}
            if staged.share.index == 0:
                headers = {kind: part.header for kind, part in parts.items()}
                manifest = self._commit(storage, staged, headers, receipts, began)
                whole, size = True, manifest.size
                self._prune(storage, staged.state)
        except AbandonedError:
            log.info("checkpoint %s is given up for another one", names.folder(staged.state))
        except (StorageError, CorruptError, GoneError) as problem:
            error = str(problem)
        except Exception as problem:  # a thread must not end without a word
            log.exception("checkpoint %s", names.folder(staged.state))
            error = f"{type(problem).__name__}: {problem}"
        if not whole:
            self._tried.append(staged.state)
        return Written(
            staged.state,
            uri,
            staged.reason,
            whole,
            error,
            size,
            share_bytes,
            time.monotonic() - began,
            staged.seconds,
            time.time(),
        )

    def _clear(self, storage: Storage, staged: Staged) -> None:
        """Delete what earlier attempts of this generation have left: as long as checkpoints fail, each would
        leave its shares, until the place is full and none can become whole.

        Only where this one was agreed on because nobody writes any more (`schedule`), so that an attempt
        without a manifest gets none.
        """
        if staged.reason != schedule.INTERVAL:
            return
        tried = [state for state in self._tried if state.generation == staged.state.generation]
        self._tried = [state for state in tried if state == staged.state]
        for number, state in enumerate(tried):
            folder = names.folder(state)
            try:
                if state < staged.state and not storage.has(f"{folder}/{names.MANIFEST}"):
                    storage.delete(folder)
            except StorageError as problem:
                log.info("what a checkpoint that failed has left stays: %s", problem)
                self._tried = tried[number:]
                return

    def _collected(self, storage: Storage, staged: Staged, elsewhere: Elsewhere) -> Collected:
        """Return the part of this member's share that others hold. Raise GoneError, and tell the first
        member.
        """
        folder, share = names.folder(staged.state), staged.share
        try:
            faults.reach("collecting", staged.state.step)
            return elsewhere.collect(share.index, share.count)
        except GoneError as problem:
            file = names.share_file(share.attempt, share.index, share.count, elsewhere.kind)
            storage.make_folder(folder)
            storage.put(f"{folder}/{names.receipt_file(file)}", refusal(str(problem)))
            raise
        finally:
            elsewhere.close()

    def _write_share(self, storage: Storage, staged: Staged, kind: str, part: Collected) -> Receipt:
        folder, share, step = names.folder(staged.state), staged.share, staged.state.step
        storage.make_folder(folder)
        name = names.share_file(share.attempt, share.index, share.count, kind)
        with storage.create(f"{folder}/{name}") as stream:
            head = files.header(part.pieces, part.specs)
            file = files.write(stream, name, head, part.memory, lambda: faults.reach("share", step))
        # After the share, which shows others that a checkpoint is under way (`_prune_frozen`).
        try:
            frozen = self._write_blocks(storage, part, step)
        except (CorruptError, StorageError) as problem:
            with contextlib.suppress(StorageError):  # then the first member waits, as for a share
                storage.put(f"{folder}/{names.receipt_file(name)}", refusal(str(problem)))
            raise
        receipt = Receipt(file, shares.layout(part.specs, part.frozen), frozen)
        storage.put(f"{folder}/{names.receipt_file(name)}", receipt.to_json())
        faults.reach("shared", step)
        return receipt

    def _write_blocks(self, storage: Storage, part: Collected, step: int) -> tuple[File, ...]:
        """Return the files of this member's blocks of what does not train; write those that are not there.

        Raise CorruptError when one that was there is gone; the next checkpoint writes it.
        """
        if not part.blocks:
            return ()
        present, written = storage.sizes(names.FROZEN), []
        for block in part.blocks:
            if block.memory is None:
                file = block.file
                assert file is not None
                if present.get(file.path) != file.bytes:
                    block.note(None)
                    raise CorruptError(f"{names.FROZEN}/{file.path} is gone: the next checkpoint writes it")
            else:
                file = files.described(names.frozen_file, block.head, block.memory, names.FROZEN)
                if present.get(file.path) != file.bytes:
                    storage.make_folder(names.FROZEN)
                    with storage.create(f"{names.FROZEN}/{file.path}") as stream:
                        half = partial(faults.reach, "frozen", step)
                        files.write(stream, file.path, block.head, block.memory, half)
                block.note(file)
            written.append(file)
        return tuple(written)

    def _commit(
        self,
        storage: Storage,
        staged: Staged,
        headers: Mapping[str, bytes],
        own: Mapping[str, Receipt],
        began: float,
    ) -> Manifest:
        """Wait for the others' shares, and write the manifest. headers, own: by kind of processes."""
        folder, share = names.folder(staged.state), staged.share
        own_seconds = time.monotonic() - began
        receipts = {(kind, 0): receipt for kind, receipt in own.items()}
        wanted = [(kind, index) for kind in own for index in range(share.count)]
        pause, since = _POLL_SECONDS, time.monotonic()
        while missing := [which for which in wanted if which not in receipts]:
            for kind, index in missing:
                path = names.receipt_file(names.share_file(share.attempt, index, share.count, kind))
                try:
                    receipts[kind, index] = parse_receipt(storage.read(f"{folder}/{path}"))
                except FileNotFoundError:
                    continue
                except CorruptError as problem:
                    raise CorruptError(f"the share of {share.members[index]}: {problem}") from None
            late = {index for kind, index in missing if (kind, index) not in receipts}
            people = [share.members[index] for index in sorted(late)]
            waited = time.monotonic() - since
            if late and self._abandoned:
                raise AbandonedError
            if why := give_up(people, waited, own_seconds, self._present(staged.state)):
                raise CorruptError(why)
            if late:
                time.sleep(pause)
                pause = min(1.5 * pause, _MOST_POLL_SECONDS)
        for (kind, index), receipt in receipts.items():
            _check(storage, folder, receipt, own[kind], share.members[index], share.members[0])
        frozen = {file.path: file for receipt in receipts.values() for file in receipt.frozen}
        _check_frozen(storage, frozen)
        parts = {}
        for kind, header in headers.items():
            path = names.header_file(share.attempt, kind)
            storage.put(f"{folder}/{path}", header)
            parts[kind] = Part(
                File(path, len(header), hashlib.sha256(header).hexdigest()),
                tuple(receipts[kind, index].file for index in range(share.count))
                + (tuple(frozen.values()) if kind == "workers" else ()),
            )
        manifest = Manifest(staged.state, self._job, time.time(), staged.reason, parts)
        faults.reach("manifest", staged.state.step)
        storage.put(f"{folder}/{names.MANIFEST}", manifest.to_json())
        faults.reach("saved", staged.state.step)
        return manifest

    def _prune(self, storage: Storage, own: StateName) -> None:
        """A checkpoint that cannot be deleted is no reason to call the new one a failure."""
        try:
            found = {
                state: whole
                for name, whole in storage.checkpoints().items()
                if (state := names.parse(name)) is not None
            }
            for state in expendable(found, own, self._keep):
                storage.delete(names.folder(state))
                faults.reach("pruned", own.step)
            self._prune_frozen(storage, own)
        except StorageError as problem:
            log.warning("old checkpoints stay: %s", problem)

    def _prune_frozen(self, storage: Storage, own: StateName) -> None:
        """Delete files of what does not train that no manifest refers to; none if one cannot be read."""
        there = storage.sizes(names.FROZEN)
        if not there:
            return
        found = storage.checkpoints()  # after the files: see `keep.unreferenced`
        referenced: set[str] = set()
        try:
            for name, whole in found.items():
                if whole:
                    manifest = parse(storage.read(f"{name}/{names.MANIFEST}"), name)
                    referenced.update(file.path for file in manifest.files if file.folder == names.FROZEN)
        except (CorruptError, FileNotFoundError) as problem:
            log.warning("old files in %s/ stay: %s", names.FROZEN, problem)
            return
        states = [state for name in found if (state := names.parse(name)) is not None]
        for path in unreferenced(there, states, own, referenced):
            storage.remove(f"{names.FROZEN}/{path}")
            faults.reach("pruned", own.step)


def _check_frozen(storage: Storage, frozen: Mapping[str, File]) -> None:
    """Raise CorruptError unless all files of what does not train are there: a manifest refers to them."""
    present = storage.sizes(names.FROZEN) if frozen else {}
    missing = [path for path, file in frozen.items() if present.get(path) != file.bytes]
    if missing:
        raise CorruptError(
            f"{names.FROZEN}/{missing[0]} is not there ({len(missing)} of {len(frozen)} files are not): all "
            "workers must reach the same storage at the checkpoint's URI"
        )


def _check(storage: Storage, folder: str, receipt: Receipt, own: Receipt, who: str, first: str) -> None:
    """Raise CorruptError when a share does not belong to the others, or its file is not what it should be."""
    if receipt.layout != own.layout:
        raise CorruptError(f"the state of {who} has other tensors than that of {first}")
    try:
        size = storage.size(f"{folder}/{receipt.file.path}")
    except FileNotFoundError:
        size = -1
    if size != receipt.file.bytes:
        seen = "none" if size < 0 else str(size)
        raise CorruptError(
            f"the share of {who} ({receipt.file.path}) has {receipt.file.bytes} bytes, and {first} sees "
            f"{seen}: all workers must reach the same storage at the checkpoint's URI"
        )
