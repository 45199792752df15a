"""The operator's parts put together: cache, lease, resync, one loop per job, metrics.

Tasks: one event loop, without locks. kopf's session calls `heard` and `listed`; tasks of this file renew the
lease, list anew and look at queues, each of which ends the process or begins anew when it fails; each job's
loop has three tasks of its own. Two semaphores bound how many jobs plan, and how many coordinators are
called, at a time. Metrics and probes are answered in threads of `web`, which read by way of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from springtide_kube.errors import ApiError
from springtide_operator import rootkey
from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.cache import Cache, Key
from springtide_operator.cluster import Cluster, KubeCluster
from springtide_operator.coordinator_connection import Caller, CoordinatorConnection
from springtide_operator.executor import ClusterExecutor
from springtide_operator.intervals import backoff_seconds, busy_seconds, calm_seconds, resync_seconds
from springtide_operator.job_credentials import JobCredentials
from springtide_operator.job_loop import JobLoop
from springtide_operator.kopf_lists import Lists
from springtide_operator.kube import Kube
from springtide_operator.lease import Lease, Renewal
from springtide_operator.list_versions import ListVersions
from springtide_operator.logs import in_words
from springtide_operator.lookout import Hearing, Leases, Lookout
from springtide_operator.manifests.maker import ManifestMaker
from springtide_operator.metrics import Metrics
from springtide_operator.multikueue import MultiKueueJobs
from springtide_operator.optional_apis import OptionalApis
from springtide_operator.perform import Performer
from springtide_operator.plan.observation import Observation, Sight
from springtide_operator.priority_semaphore import PrioritySemaphore
from springtide_operator.queues import Queues
from springtide_operator.releases import Claim, Releases
from springtide_operator.settings import Settings
from springtide_operator.training_templates import TrainingTemplates
from springtide_operator.unschedulable_pods import (
    FRESH_SECONDS,
    LIST_SECONDS,
    UnschedulablePods,
    may_have_extras,
)
from springtide_operator.warm_takeover import patience
from springtide_operator.web import start_web
from springtide_protocol.bounded_http import BoundedServer
from springtide_protocol.span_export import SpanQueue
from springtide_protocol.span_metrics import SpanCollector
from springtide_protocol.sync_client import SyncClient
from springtide_protocol.tracing import OFF

log = logging.getLogger("springtide.operator")

Object = dict[str, Any]

SILENT_API_SECONDS = 20.0
BUSY_COUNT_SECONDS = 1.0
CALLS_AT_A_TIME = 64  # of coordinators: after a take-over all of them are called
PROTECTION = ("networkpolicies", "poddisruptionbudgets")
LIST_AGAIN_SECONDS = 8.0  # at most, after a list that failed
ROOT_KEY_SECONDS = 10.0  # between two looks whether somebody has replaced it
MOST_SURPRISES = 1000  # that are told apart


class Operator:
    """Feed it lists and events with `take_event` and `listed`. Before it acts, and seldom later, it has
    everything listed anew.
    """

    def __init__(
        self,
        settings: Settings,
        lists: Lists,
        kube: Kube | None = None,
        cluster: Cluster | None = None,
        connect: Callable[..., Caller] = SyncClient,
        on_death: Callable[[str], None] = lambda why: None,
        spans: SpanQueue | None = None,
    ) -> None:
        """Put the parts together; `start` begins.

        Args:
            settings: of the process.
            lists: has kopf list objects anew.
            kube: asks the API server; None: one is made.
            cluster: what is asked for by it; None: one is made.
            connect: makes what calls a coordinator.
            on_death: is told why this process must end.
            spans: take what is traced, and are closed with the operator; None: nothing is.
        """
        self.settings, self._lists = settings, lists
        self._spans = spans
        self._on_death = on_death
        self._deaths: list[str] = []
        self._not_taken_in: dict[Key, Exception] = {}  # by plural and namespace: of the last list
        self._versions = ListVersions()
        self._surprises: dict[str, str] = {}  # what the log was told last, by what it was about
        self._connect = connect
        self.cache = Cache(self._changed, managed_by=settings.managed_by, on_lack=self._list_anew)
        self.metrics = Metrics(self._statuses, lambda: self.acting)
        if spans is not None:
            self.metrics.registry.register(SpanCollector(spans, {}))
        self._kube = kube or Kube(timeout=settings.request_timeout, on_error=self.metrics.api_error)
        self._cluster = cluster or KubeCluster(self._kube, settings.watched)
        self._templates = TrainingTemplates(self._cluster)
        self._unschedulable = UnschedulablePods(self.cache, self._cluster)
        self._stuck_version = 0
        self._crowd_timer: asyncio.TimerHandle | None = None
        claim = Claim(settings.namespace, settings.release, settings.managed_by, settings.watched)
        self._releases, self._looked = Releases(self._cluster, claim), asyncio.Event()
        self._lease = Lease(
            self._cluster,
            settings.namespace,
            settings.identity,
            self._lease_changed,
            self._silent,
            notes=claim.notes,
            obstacle=lambda: self._releases.refused or self._releases.trouble,
        )
        self._apis = OptionalApis(self._cluster, self._meet, announced=not settings.watched)
        self._leases, self._hearing = Leases(self._cluster), Hearing()
        self.metrics.watch_nodes(self._observe_nodes)
        self._queues = Queues(
            self._cluster,
            self.cache,
            self._changed,
            self._queue_api,
            missing=lambda: self._apis.note_definition(names.KUEUE_GROUP),
        )
        self._elsewhere = Cache(lambda key: self._multikueue.wake(), managed_by=names.MULTIKUEUE_CLASS)
        queues = Queues(
            self._cluster, self._elsewhere, lambda key: self._multikueue.wake(), self._elsewhere_api
        )
        self._queues_elsewhere = queues
        self._multikueue = MultiKueueJobs(
            self._elsewhere,
            queues,
            lambda key: self._new_performer(key, queues),
            self._apis.known,
            lambda: bool(self.acting and self._is_default and self._root_key is not None),
            self._templates,
        )
        self._loops: dict[Key, JobLoop] = {}
        self._semaphore = PrioritySemaphore()
        self._calls = PrioritySemaphore(CALLS_AT_A_TIME)
        self._busy, self._busy_counted_at = 0, float("-inf")
        self._tasks: list[asyncio.Task[None]] = []
        self._ends: set[asyncio.Task[None]] = set()
        self._ending = False  # an answer or an event that still comes begins nothing any more
        self._web: BoundedServer | None = None
        self._root_key = settings.root_key
        self._listed = False  # since this process got the lease, or the one before stopped acting
        self._looked_after: Renewal | None = None  # everything was listed after the silence that followed it
        self._changed_at: dict[Key, float] = {}  # by job: when something of it changed last
        self._resync_wanted = asyncio.Event()
        self._started_at = time.monotonic()
        self._trouble: str | None = "has not listed the jobs yet"

    @property
    def web_port(self) -> int | None:
        """Port of metrics and probes; None before `start`."""
        return None if self._web is None else self._web.port

    @property
    def acting(self) -> bool:
        """Holds the lease, and has seen everything since it got it."""
        return self._lease.held and self._listed

    async def start(self) -> None:
        """Begin; needs no API server to return."""
        settings = self.settings
        self._web = start_web(
            self.metrics.registry,
            self.dead,
            self.unhealthy,
            self.unready,
            settings.bind,
            settings.metrics_port,
        )
        self._tasks = [
            asyncio.create_task(self._hold_lease(), name="lease"),
            asyncio.create_task(self._begin_anew("releases", self._look_for_releases), name="releases"),
            asyncio.create_task(self._resync_for_ever(), name="resync"),
            asyncio.create_task(self._begin_anew("root key", self._look_at_root_key), name="root key"),
            asyncio.create_task(self._begin_anew("nodes", self._look_around_for_ever), name="nodes"),
            asyncio.create_task(self._begin_anew("optional APIs", self._apis.run), name="optional APIs"),
            asyncio.create_task(self._begin_anew("queues", self._queues.run), name="queues"),
            asyncio.create_task(self._begin_anew("MultiKueue", self._multikueue.run), name="MultiKueue"),
            asyncio.create_task(
                self._begin_anew("MultiKueue's queues", self._queues_elsewhere.run),
                name="MultiKueue's queues",
            ),
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        log.info(
            "started", extra={"fields": {"identity": settings.identity, "namespace": settings.namespace}}
        )
        if settings.watched:
            log.info("runs named namespaces, so it cannot read nodes: it hears of lost ones from their pods")

    async def stop(self) -> None:
        """End all tasks, give the lease back, close connections."""
        self._ending = True
        if self._crowd_timer is not None:
            self._crowd_timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        loops, self._loops = list(self._loops.values()), {}
        await asyncio.gather(*(loop.stop() for loop in loops), *self._ends)
        await self._lease.release()
        if self._web is not None:
            self._web.close()
        await self._kube.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    async def _begin_anew(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run a task that ends with an error that nobody foresaw again and again, ever more seldom."""
        pause = 1.0
        while True:
            try:
                return await work()
            except Exception as error:
                self._surprised("task", f"the task {name!r}", error)
            await asyncio.sleep(pause)
            pause = min(30.0, pause * 2)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End this process after one of its tasks: without it the lease must not be kept, and another process
        begins.
        """
        if self._ending or self._releases.refused:
            return
        error = None if task.cancelled() else task.exception()
        self._die(f"the task {task.get_name()!r} has ended" + (f": {in_words(error)}" if error else ""))

    def _die(self, why: str) -> None:
        log.critical("%s: this process ends, and Kubernetes starts it again", why)
        self._deaths.append(why)
        self._on_death(why)

    async def _hold_lease(self) -> None:
        await self._looked.wait()
        await self._lease.run()

    async def _look_for_releases(self) -> None:
        """Look for other releases that run the same jobs, and end this process where one came first."""
        while await self._releases.look(self._lease.held):
            self._looked.set()
            await asyncio.sleep(self._releases.pause)
        await self._lease.release()
        self._die(self._releases.refused)

    def _surprised(self, where: str, what: str, error: Exception) -> None:
        """Count what nobody foresaw, and log it once."""
        self.metrics.surprised(where)
        said = in_words(error)
        if self._surprises.get(what) != said:
            if len(self._surprises) >= MOST_SURPRISES:
                self._surprises.clear()
            self._surprises[what] = said
            log.error("%s: %s", what, said)
            log.debug("where that came from", exc_info=error)

    def take_event(self, plural: str, kind: str | None, obj: Object) -> None:
        """Take in an event of a watch.

        Args:
            plural: what objects of that kind are called in URLs.
            kind: ADDED, MODIFIED or DELETED; None: the object was listed.
            obj: as it is, or was last.
        """
        self._versions.note(plural, (obj.get("metadata") or {}).get("resourceVersion"))
        if plural == names.PLURAL:
            self._take_in(kind, obj, self.cache.put_job, self.cache.drop_job)
            self._take_in(kind, obj, self._elsewhere.put_job, self._elsewhere.drop_job)
        elif plural == "pods":
            self._take_in(kind, obj, self.cache.put_pod, self.cache.drop_pod)
        elif plural == "nodes":
            self._take_in(kind, obj, self.cache.put_node, self.cache.drop_node)
        elif plural in PROTECTION:
            put = functools.partial(self.cache.put_protection, plural)
            self._take_in(kind, obj, put, self.cache.drop_protection)
        elif plural == "customresourcedefinitions":
            self._apis.note_definition(str((obj.get("spec") or {}).get("group")))

    def begins(self, plural: str, namespace: str) -> None:
        """Learn that kopf sends for a list.

        Args:
            plural: what objects of that kind are called in URLs.
            namespace: which is listed; "": all of them.
        """
        self._versions.begins(plural, namespace)

    def listed(self, plural: str, namespace: str, uids: set[str], resource_version: str) -> None:
        """Learn that a list of kopf's is whole: what it lacks is gone.

        Args:
            plural: what objects of that kind are called in URLs.
            namespace: which was listed; "": all of them.
            uids: of all objects of the list.
            resource_version: of the list.
        """
        self._not_taken_in.pop((plural, namespace), None)
        if self._versions.went_back(plural, namespace, resource_version):
            self._start_anew(plural, namespace)
            return
        try:
            self._keep(plural, namespace, uids, resource_version)
        except Exception as error:  # or kopf would watch no more
            self._surprised("object", f"the list of {plural}", error)
            self._not_taken_in[plural, namespace] = error

    def _start_anew(self, plural: str, namespace: str) -> None:
        """Believe the next lists whatever they say: the API server's store was restored. Nothing is decided
        until all of them have come, since one kind as it was and another as it is would look like losses.
        """
        self._listed = False
        text = f"{plural} have an older resourceVersion than before: was the cluster's store restored?"
        log.warning("%s They are listed anew, and what was known of them counts no more", text)
        self.cache.distrust(plural)
        self._elsewhere.distrust(plural)
        self._not_taken_in[plural, namespace] = ApiError(0, "WentBack", text)
        self._list_anew()

    def _keep(self, plural: str, namespace: str, uids: set[str], resource_version: str) -> None:
        if plural == names.PLURAL:
            self.cache.keep_jobs(uids, resource_version, namespace)
            self._elsewhere.keep_jobs(uids, resource_version, namespace)
        elif plural == "pods":
            self.cache.keep_pods(uids, resource_version, namespace)
        elif plural == "nodes":
            self.cache.keep_nodes(uids, resource_version)
            self.metrics.nodes_readable(True)
        elif plural in PROTECTION:
            self.cache.keep_protection(plural, uids, resource_version, namespace)

    def _take_in(
        self,
        kind: str | None,
        obj: Object,
        put: Callable[[Object], object],
        drop: Callable[[Object], object],
    ) -> None:
        """One object that cannot be taken in hides no other."""
        try:
            (drop if kind == "DELETED" else put)(obj)
        except Exception as error:
            meta = obj.get("metadata") or {}
            self._surprised("object", f"{obj.get('kind')} {meta.get('namespace')}/{meta.get('name')}", error)

    def dead(self) -> str | None:
        """Return which task of this process has ended that must not, so that it cannot serve its jobs any
        more; None: none.
        """
        return self._deaths[0] if self._deaths else None

    def unhealthy(self) -> str | None:
        """Describe the fault of this process or its world; None without one."""
        for task in self._tasks:
            if task.done():
                return f"the task {task.get_name()!r} has ended"
        answered = self._kube.answered_at
        silent = time.monotonic() - (answered if answered is not None else self._started_at)
        if silent > SILENT_API_SECONDS:
            return (
                f"the API server has not answered for {silent:.0f} s: {self._trouble or self._lease.trouble}"
            )
        return None

    def unready(self) -> str | None:
        """Say what keeps this process from acting or standing by; None for nothing, and while it ends.

        Kubelets ask until a pod has ended, and each No is a Warning event.
        """
        if self._ending:
            return None
        if self._trouble is not None:
            return self._trouble
        if self._lease.held or (self._lease.trouble or "").startswith("stands by"):
            return self.unhealthy()
        return self._lease.trouble

    async def _resync_for_ever(self) -> None:
        """Have everything listed: at the start, and when this process begins to act, since a watch may lag
        behind what another one did; then seldom, in case something was lost without a word.
        """
        failures = 0
        while True:
            self._resync_wanted.clear()
            held, began = self._lease.held, time.monotonic()
            silence = self._lease.last_of_another if self._lease.silent else None
            try:
                await self._read_root_key()
                await self._resync()
                self._trouble = None
                self._listed = self._listed or held
                if silence is not None:
                    self._looked_after = silence
                    if self._lease.held and self._lease.last_of_another == silence:
                        self._listed = True
                        self._resync_wanted.clear()
                self._meet()
            except ApiError as error:
                if self._trouble != str(error):
                    log.warning("cannot list jobs and pods: %s", error)
                self._trouble = str(error)
            except Exception as error:
                self._surprised("task", "cannot list jobs and pods", error)
                self._trouble = f"cannot list jobs and pods: {in_words(error)}"
            pause = resync_seconds(time.monotonic() - began, self.settings.resync)
            failures = 0 if self._trouble is None else failures + 1
            if failures:
                pause = min(backoff_seconds(failures, 1.0, LIST_AGAIN_SECONDS), self.settings.resync)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._resync_wanted.wait()

    async def _read_root_key(self) -> None:
        """Read the root key, where it is not given.

        One that cannot be read any more leaves the one that is known.
        """
        if self.settings.root_key is not None:
            return
        try:
            found = await rootkey.obtain(self._cluster, self.settings.namespace)
        except ApiError as error:
            if self._root_key is None:
                raise
            log.warning("the root key cannot be read again, the one from before holds: %s", error)
            return
        if self._root_key not in (None, found):
            log.warning("the root key is another one: each job gets another key, and another coordinator")
        self._root_key = found

    async def _look_at_root_key(self) -> None:
        """Read the root key again and again, since somebody may replace it, and have every job follow."""
        while True:
            await asyncio.sleep(ROOT_KEY_SECONDS)
            known = self._root_key
            if known is not None:
                await self._read_root_key()
            if self._root_key != known:
                self._meet()

    async def _resync(self) -> None:
        """List jobs first: of a pod whose job is not known only the name is kept."""
        await self._list(names.PLURAL)
        await self._list("pods")
        await self._list_nodes()

    async def _list(self, plural: str) -> None:
        """Have a kind listed, and raise what was in the way of taking that in."""
        await self._lists.anew(plural)
        for (kind, _), error in self._not_taken_in.items():
            if kind == plural:
                raise error

    async def _list_nodes(self) -> None:
        """List the nodes, if they can be read. Jobs do without: Kubernetes deletes the pods of lost nodes,
        only later.
        """
        if self.settings.watched:
            return
        try:
            await self._list("nodes")
        except ApiError as error:
            if error.code != 403:
                raise
            log.warning("nodes cannot be read, so jobs hear of a lost node only from Kubernetes: %s", error)
        self.metrics.nodes_readable(self.cache.nodes() is not None)

    @property
    def _is_default(self) -> bool:
        """Whether this release looks after jobs without a class, and so after those of MultiKueue."""
        return self.settings.managed_by == names.DEFAULT_CLASS

    def _queue_api(self) -> str:
        return self._apis.newest(names.KUEUE_APIS) if self.acting else ""

    def _elsewhere_api(self) -> str:
        return self._queue_api() if self._is_default else ""

    def _lease_changed(self, held: bool) -> None:
        before = self._lease.last_of_another
        self._listed = held and before is not None and self._looked_after == before
        self._looked_after = None
        self._queues.forget()
        self._queues_elsewhere.forget()
        if self._listed:
            self._meet()
            return
        if held:
            self._resync_wanted.set()

    def _silent(self) -> None:
        """Nobody acts until this process or another may: what is listed now is still true then."""
        self._list_anew()

    def _list_anew(self) -> None:
        self._resync_wanted.set()

    async def _look_around_for_ever(self) -> None:
        """See which pods of others wait for a node, for jobs that have extra workers."""
        while True:
            await asyncio.sleep(LIST_SECONDS)
            if self.acting and await self._unschedulable.look():
                self._wake_for_crowd()

    def _wake_for_crowd(self) -> None:
        self._crowd_timer, self._stuck_version = None, self.cache.stuck_version
        for key, loop in self._loops.items():
            if may_have_extras(self.cache.job(key)):
                loop.wake()

    def _changed(self, key: Key) -> None:
        if self.cache.stuck_version != self._stuck_version and self._crowd_timer is None:
            self._crowd_timer = asyncio.get_running_loop().call_later(FRESH_SECONDS, self._wake_for_crowd)
        self._changed_at[key] = time.monotonic()
        loop = self._loops.get(key)
        if loop is not None and loop.raw() is not None:
            loop.wake()
        elif self._trouble is None or self._listed:  # a list that fails later hides no news of a watch
            self._meet(key)

    def _meet(self, key: Key | None = None) -> None:
        """Have one loop for each job that exists, and wake it; what changed last comes first."""
        if self._ending:
            return
        if key is None:
            self._multikueue.wake()
        keys = [key] if key is not None else [*{*self._loops, *self.cache.job_keys()}]
        for one in sorted(keys, key=lambda one: self._changed_at.get(one, 0.0), reverse=True):
            try:
                self._meet_one(one)
            except Exception as error:  # the others have their loops all the same
                self._surprised("object", f"the job {'/'.join(one)}", error)

    def _meet_one(self, one: Key) -> None:
        job = self.cache.job(one)
        loop = self._loops.get(one)
        if job is None:
            self._changed_at.pop(one, None)
        if loop is not None and (job is None or job["metadata"]["uid"] != loop.uid):
            del self._loops[one]
            end = asyncio.create_task(loop.stop(), name=f"end {one}")
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)
            loop = None
        if loop is None and job is not None and self._root_key is not None:
            loop = self._new_loop(one, job["metadata"]["uid"])
            loop.start(self._ended)
            self._loops[one] = loop
        if loop is not None:
            loop.wake()

    def _credentials(self, job: Job) -> JobCredentials:
        assert self._root_key is not None, "nothing is made for a job before the key is there"
        return JobCredentials.of(self._root_key, job)

    def _new_performer(self, key: Key, queues: Queues) -> Performer:
        make = ManifestMaker(
            self._credentials,
            self.settings.coordinator_image,
            self.settings.coordinator_pull_policy,
            self.settings.server_image,
            self.settings.pod_defaults,
            self.settings.doors,
            self.settings.certificate_seconds,
        )
        executor = ClusterExecutor(self._cluster, self.cache, key, make, queues)
        return Performer(executor, lambda: self.acting, self.metrics.acted)

    def _new_loop(self, key: Key, uid: str) -> JobLoop:
        performer = self._new_performer(key, self._queues)
        connection = CoordinatorConnection("", self.settings.sync_timeout, self._connect)
        return JobLoop(
            key,
            uid,
            self._cluster,
            self.cache,
            performer,
            connection,
            lambda: self.acting,
            self.metrics,
            self.settings.tick,
            lambda: calm_seconds(len(self._loops), self.settings.tick),
            self._busy_seconds,
            self._semaphore,
            self._calls,
            patience(uid, len(self.cache.job_keys())),
            self._unschedulable.waiting,
            self._apis.known,
            self._queues,
            lookout=Lookout(*key, self._leases, hearing=self._hearing),
            tls=self.settings.jobs_tls,
            credentials=self._credentials,
            certificate_seconds=self.settings.certificate_seconds,
            tracer=self._spans or OFF,
            templates=self._templates,
        )

    def _observe_nodes(self) -> Observation:
        """Return the nodes, and which coordinators answer, for metrics."""
        unanswered, answering = self._hearing.tally()
        seen = Sight("", unanswered=unanswered, answering=answering)
        return Observation(nodes=self.cache.nodes(), sight=seen)

    def _busy_seconds(self) -> float:
        now = time.monotonic()
        if now - self._busy_counted_at >= BUSY_COUNT_SECONDS:
            self._busy_counted_at = now
            self._busy = sum(not loop.calm for loop in self._loops.values())
        return busy_seconds(self._busy, self.settings.tick)

    def _statuses(self) -> Iterator[tuple[str, str, Object]]:
        """Yield each job's status for metrics: as written, with the coordinator's fresher numbers where there
        are some.
        """
        for key in self.cache.job_keys():
            namespace, name = key
            job = self.cache.job(key)
            if job is None:
                continue
            status = dict(job.get("status") or {})
            loop = self._loops.get((namespace, name))
            report = loop.connection.report if loop is not None else None
            if report is not None and "completionTime" not in status:
                if report.step is not None:
                    status["step"] = report.step
                if report.generation is not None:
                    status["generation"] = report.generation
                status["samplesPerSecond"] = report.samples_per_second
                status["goodput"] = report.goodput
            yield namespace, name, status
