"""Kueue's Workloads of all jobs, as last heard of: listed and watched while a job names a queue, and taken
from the answers to own writes.

Watched here and not by kopf: Kueue may be installed or removed at any time, the rights on it may be left out,
and nothing is asked of a cluster whose jobs name no queue. kopf watches what it is told of at its start, and
ends where it may not.

Tasks: `run` alone lists; the watch that it waits for calls `_take_event` in the same event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from springtide_kube.errors import ApiError
from springtide_operator.api import names
from springtide_operator.cache import Cache, Key
from springtide_operator.cluster import Cluster, is_gone
from springtide_operator.logs import in_words
from springtide_operator.plan import kueue
from springtide_operator.plan.workload import WorkloadSeen, flavors_named, job_workload_seen

log = logging.getLogger("springtide.operator")

Object = dict[str, Any]

LIST_SECONDS = 2.0  # until the next try; nothing is asked while no job names a queue
LOOK_SECONDS = 10.0  # between two looks whether a watch is still needed, and a flavor is to be read again
FLAVOR_SECONDS = 300.0  # until a flavor is read again
FLAVOR_RETRY_SECONDS = 10.0


class Queues:
    """`changed(key)` is called for the job whose Workload changed; `api()`: the version of Kueue's API that
    is used, "" where none is served, or this process does not act; `missing()` is called where that version
    was not found, so that somebody looks for another.
    """

    def __init__(
        self,
        cluster: Cluster,
        jobs: Cache,
        changed: Callable[[Key], None],
        api: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        missing: Callable[[], None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._jobs = jobs
        self._changed = changed
        self.api = api
        self._missing = missing
        self._clock = clock
        self._raw: dict[str, dict[str, Object]] = {}  # by uid of the job, then by name
        self._unowned: dict[Key, Object] = {}  # by namespace and name: made for jobs by somebody else
        self._seen: dict[str, WorkloadSeen] = {}
        self._unreadable: dict[str, str] = {}
        self._flavors: dict[str, Object | str] = {}
        self._flavors_due: dict[str, float] = {}
        self._look_wanted = asyncio.Event()  # a flavor that nobody has read is named, or all was forgotten
        self.trouble = ""  # why they cannot be listed
        self.listed = False

    def seen(self, job_uid: str) -> WorkloadSeen | None:
        return self._seen.get(job_uid)

    def raw(self, job_uid: str, name: str = "") -> Object | None:
        """Return a Workload of a job, as the API server gave it.

        Args:
            job_uid: of the job.
            name: of the Workload; "" for the one that the job runs by.
        """
        if not name and (seen := self._seen.get(job_uid)) is not None:
            name = seen.name
        return self._raw.get(job_uid, {}).get(name)

    def unowned(self, namespace: str, name: str) -> Object | None:
        """Return a Workload that was made for a job, and that no job controls yet.

        Args:
            namespace: of the Workload.
            name: of the Workload.
        """
        return self._unowned.get((namespace, name))

    def put(self, workload: Object) -> None:
        """Take one as the API server gave it, unless a newer one is known."""
        uid = _controller(workload)
        name = str(workload["metadata"]["name"])
        key = (str(workload["metadata"]["namespace"]), name)
        if uid is None:
            self._unowned[key] = workload
            self._announce(workload)
            return
        self._unowned.pop(key, None)
        known = self._raw.get(uid, {}).get(name)
        if known is not None and _same(known, workload) and _version(workload) <= _version(known):
            return
        self._raw.setdefault(uid, {})[name] = workload
        self._read(uid)

    def _replace(self, workload: Object) -> None:
        """Forget the version of a Workload that is known, so that `put` takes this one."""
        uid, name = _controller(workload), str(workload["metadata"]["name"])
        if uid is not None:
            self._raw.get(uid, {}).pop(name, None)

    def unreadable(self, job_uid: str) -> str:
        """Why the job's Workload cannot be read; "" where it can."""
        return self._unreadable.get(job_uid, "")

    def drop(self, job_uid: str, name: str) -> None:
        """Forget a Workload of a job that was deleted.

        Args:
            job_uid: of the job.
            name: of the Workload.
        """
        gone = self._raw.get(job_uid, {}).pop(name, None)
        if gone is None:
            return
        if not self._raw[job_uid]:
            del self._raw[job_uid]
            self._unreadable.pop(job_uid, None)
            self._seen.pop(job_uid, None)
        else:
            self._read(job_uid)
        self._announce(gone)

    def forget(self) -> None:
        """Another process has acted meanwhile, or will."""
        self.listed = False
        self._look_wanted.set()

    async def run(self) -> None:
        """List and watch for ever."""
        failures = 0
        while True:
            version = await self.look()
            if version is None:
                failures = failures + 1 if self.trouble else 0
                await asyncio.sleep(LIST_SECONDS * min(15, 2**failures))
                continue
            failures = 0
            await self._follow(version, self.api())
            await asyncio.sleep(LIST_SECONDS)

    async def _follow(self, version: str, api: str) -> None:
        """Watch from a list's version on, as long as it is of use and the server goes on."""
        if not api:
            return
        watch = asyncio.ensure_future(self._cluster.watch_workloads(api, version, self._take_event))
        try:
            while self.listed and self.api() == api and self._queued():
                wanted = asyncio.ensure_future(self._look_wanted.wait())
                await asyncio.wait({watch, wanted}, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                wanted.cancel()
                if watch.done():
                    watch.result()
                    return
                await self._read_flavors()
        except ApiError as error:
            log.info("the watch of Workloads has ended, they are listed anew: %s", error)
            if is_gone(error):
                self._missing()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def _take_event(self, kind: str, workload: Object) -> None:
        uid, name = _controller(workload), str(workload["metadata"]["name"])
        if kind != "DELETED":
            self.put(workload)
        elif uid is None:
            self._unowned.pop((str(workload["metadata"]["namespace"]), name), None)
        elif (known := self.raw(uid, name)) is not None and _same(known, workload):
            self.drop(uid, name)
        if any(name not in self._flavors for name in _flavors(workload)):
            self._look_wanted.set()

    async def look(self) -> str | None:
        """List what there is, and read the flavors that it names. A failure is tried again.

        Returns:
            The resourceVersion of the list; None where there is none.
        """
        api = self.api()
        if not api or not self._queued():
            self.forget()  # what is known grows old
            return None
        newest = max((_version(known) for _, _, known in self._all()), default=0)
        try:
            found = await self._cluster.list_workloads(api)
        except ApiError as error:
            if is_gone(error):
                self._missing()
            if str(error) == self.trouble:
                return None
            log.warning("cannot list Workloads, so no queued job starts: %s", error)
            self.trouble = str(error)
            self._announce_all()
            return None
        news, self.trouble, self.listed = bool(self.trouble) or not self.listed, "", True
        self._unowned.clear()
        restored = int(found.resource_version) < newest  # the store was: what is known counts no more
        if restored:
            log.warning("Workloads have an older resourceVersion than before: was their store restored?")
        for workload in found.items if restored else ():
            self._replace(workload)
        for workload in found.items:
            self.put(workload)
        there = {workload["metadata"]["uid"] for workload in found.items}
        for uid, name, known in self._all():
            older = restored or _version(known) <= int(found.resource_version)
            if known["metadata"]["uid"] not in there and older:
                self.drop(uid, name)
        await self._read_flavors()
        if news:
            self._announce_all()
        return found.resource_version

    async def _read_flavors(self) -> None:
        self._look_wanted.clear()
        for name in sorted({name for _, _, raw in self._all() for name in _flavors(raw)}):
            await self._read_flavor(name)

    async def _read_flavor(self, name: str) -> None:
        api = self.api()
        if not api or self._clock() < self._flavors_due.get(name, float("-inf")):
            return
        before = self._flavors.get(name)
        if not names.is_name(name):
            self._flavors[name] = f"no ResourceFlavor can be called {name[:80]!r}"
            self._flavors_due[name] = float("inf")
            return
        try:
            self._flavors[name] = await self._cluster.get_flavor(api, name)
            self._flavors_due[name] = self._clock() + FLAVOR_SECONDS
        except ApiError as error:
            self._flavors_due[name] = self._clock() + FLAVOR_RETRY_SECONDS
            if not isinstance(before, dict):
                self._flavors[name] = f"the ResourceFlavor {name} cannot be read: {error}"
        if self._flavors.get(name) != before:
            for uid in {uid for uid, _, raw in self._all() if name in _flavors(raw)}:
                self._read(uid)

    def _all(self) -> list[tuple[str, str, Object]]:
        """(uid of the job, name, Workload) of each."""
        return [(uid, name, raw) for uid, of_job in self._raw.items() for name, raw in of_job.items()]

    def _read(self, uid: str) -> None:
        before, raws = self._unreadable.pop(uid, None), self._raw[uid]
        try:
            seen = job_workload_seen(raws.values(), self._flavors)
        except Exception as error:  # one Workload that nobody foresaw must not hide the others
            self._unreadable[uid] = f"the Workload {', '.join(raws)} cannot be read ({in_words(error)})"
            if before is None:
                self._announce(next(iter(raws.values())))
            return
        if seen is not None and self._seen.get(uid) != seen:
            self._seen[uid] = seen
            self._announce(next(iter(raws.values())))

    def _announce(self, workload: Object) -> None:
        meta = workload["metadata"]
        self._changed((meta["namespace"], (meta.get("labels") or {}).get(names.LABEL_JOB, "")))

    def _announce_all(self) -> None:
        for key in self._queued():
            self._changed(key)

    def _queued(self) -> list[Key]:
        """Jobs that have to do with a queue."""
        found = ((key, self._jobs.job(key)) for key in self._jobs.job_keys())
        return [key for key, job in found if job is not None and kueue.concerns(job)]


def _flavors(raw: Object) -> set[str]:
    try:
        return flavors_named(raw)
    except (AttributeError, KeyError, TypeError):
        return set()  # `_read` has said what is wrong


def _controller(obj: Object) -> str | None:
    references = obj["metadata"].get("ownerReferences") or []
    return next((str(one["uid"]) for one in references if one.get("controller")), None)


def _same(one: Object, other: Object) -> bool:
    return bool(one["metadata"]["uid"] == other["metadata"]["uid"])


def _version(obj: Object) -> int:
    text = obj["metadata"].get("resourceVersion", "0")
    return int(text) if text.isdigit() else 0
