"""The loop of one job: look, plan, write status, act, tell; woken by events, and by time anyhow (`pace`).

Tasks: three in one event loop, without locks. `_plan_for_ever` alone plans and writes (in its turn of the
semaphore, so that a few jobs plan at a time), `_sync_for_ever` alone calls the coordinator,
`_look_out_for_ever` watches pods and nodes while there is doubt. Others wake them by events (`wake` from the
cache, `_sync_wanted` after a plan); between two awaits nothing else changes the job's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

from springtide_kube.errors import ApiError
from springtide_operator import warm_takeover as takeover
from springtide_operator.api import names, reasons
from springtide_operator.api.effective_spec import Reference, template_in_status
from springtide_operator.api.job import InvalidJob, Job
from springtide_operator.cache import Cache, Key
from springtide_operator.cluster import Cluster, is_gone, merge_patch
from springtide_operator.coordinator_connection import CoordinatorConnection, news
from springtide_operator.intervals import backoff_seconds
from springtide_operator.job_credentials import JobCredentials
from springtide_operator.job_spans import JobSpans
from springtide_operator.logs import in_words
from springtide_operator.lookout import LOOK_SECONDS, Lookout
from springtide_operator.perform import Performer
from springtide_operator.plan import conditions, gang, keys, kueue, nodes, progress, training_template
from springtide_operator.plan import coordinator as coordinator_policy
from springtide_operator.plan.actions import Event, Plan
from springtide_operator.plan.coordinator_sync import CoordinatorUpdate, make_sync
from springtide_operator.plan.decide import invalid, plan
from springtide_operator.plan.elasticity import gives_back
from springtide_operator.plan.first_seen import FirstSeen, with_first_seen
from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import Observation, Report, ServiceSeen
from springtide_operator.plan.retry import answers_to
from springtide_operator.priority_semaphore import PrioritySemaphore
from springtide_operator.queues import Queues
from springtide_operator.repeated_events import RepeatedEvents
from springtide_operator.settings import CERTIFICATE_SECONDS
from springtide_operator.status_patch import OutdatedCrdError, missing, status_schema, with_unknown
from springtide_operator.training_templates import TrainingTemplates
from springtide_protocol.tracing import OFF, Tracer

log = logging.getLogger("springtide.operator")

FIRST_RETRY = 0.2
SOON = 10.0  # what is to be looked at again within it keeps a job from being calm
# Reasons of Degraded that only an event changes: the job may be calm.
LASTING = (reasons.QUEUE_LIMITS_SIZE, reasons.QUEUE_UNAVAILABLE, reasons.GANG_UNAVAILABLE)
_WAITS = ("WaitingForReports", "Reconnecting", "Parking", "WaitingForServers")
SETTLE = 0.005  # events of one cause come in bunches
SETTLE_LIMIT = 0.05
SETTLE_SHARE = 0.1  # of the time may go into comparing what the coordinator was told with what is
PROTECTION_SECONDS = 30.0  # between two looks at a job's NetworkPolicy and disruption budget
PROTECTION_PAUSES = 10.0  # and at least so many ordinary looks at the job
TEMPLATE_RETRY = 0.5  # until a template that is missing is looked for again, at first
TEMPLATE_SECONDS = 10.0  # the same, in the end
INVALID_SECONDS = 30.0  # between two looks at a job that only an edit can mend
SURPRISE_SECONDS = 60.0  # between two tries of a job that the operator fails with, in the end


class UnreadableError(Exception):
    """Something of the job's cannot be observed, so that nothing can be decided."""


DOUBT_SECONDS = 1.0  # without an answer, until the operator looks itself


class Meter(Protocol):
    """Counters of a loop."""

    def reconciled(self, result: str, seconds: float) -> None:
        """Count a round.

        Args:
            result: how it ended, in one word.
            seconds: that it took.
        """
        ...

    def surprised(self, where: str) -> None: ...


def calm(old: dict[str, Any], decided: Plan, now: float) -> bool:
    """Return whether a job needs no look soon: it trains or has ended, and its last round found nothing to do
    but to write progress.

    Args:
        old: status before the round.
        decided: by the round.
        now: in unix seconds.
    """
    new = decided.status
    training, rescaling, halted, degraded, *ended = (
        conditions.is_true(new, kind)
        for kind in (
            reasons.RUNNING,
            reasons.RESCALING,
            reasons.SUSPENDED,
            reasons.DEGRADED,
            reasons.SUCCEEDED,
            reasons.FAILED,
        )
    )
    settled = halted or any(ended) or (training and not rescaling)
    return (
        settled
        and not decided.actions
        and not decided.events
        and (decided.wake_at is None or decided.wake_at - now > SOON)
        and (not degraded or halted or conditions.reason_of(new, reasons.DEGRADED) in LASTING)
        and progress.same_but_progress(old, new)
    )


def waits_for_somebody(report: Report | None) -> bool:
    """Whether a coordinator waits for processes that may have gone with their machine: one that took over
    does not know it by itself.
    """
    return report is not None and bool(report.waiting_for) and report.reason in _WAITS


class JobLoop:
    """`wake()` after anything that may matter. Both tasks end by themselves when the job is gone."""

    def __init__(
        self,
        key: Key,
        uid: str,
        cluster: Cluster,
        cache: Cache,
        performer: Performer,
        connection: CoordinatorConnection,
        may_act: Callable[[], bool],
        meter: Meter,
        tick: float = 2.0,
        calm_tick: Callable[[], float] | None = None,
        busy_tick: Callable[[], float] | None = None,
        semaphore: PrioritySemaphore | None = None,
        calls: PrioritySemaphore | None = None,
        patience: float = 0.0,
        crowd: Callable[[Key], tuple[str, ...]] = lambda key: (),
        apis: Callable[[Iterable[str]], Mapping[str, bool]] = lambda needed: {},
        queues: Queues | None = None,
        clock: Callable[[], float] = time.time,
        lookout: Lookout | None = None,
        tls: bool = False,
        credentials: Callable[[Job], JobCredentials] | None = None,
        certificate_seconds: float = CERTIFICATE_SECONDS,
        tracer: Tracer = OFF,
        templates: TrainingTemplates | None = None,
    ) -> None:
        self.key = key
        self.uid = uid
        self.connection = connection
        self._cluster = cluster
        self._cache = cache
        self._performer = performer
        self._may_act = may_act
        self._meter = meter
        self._tick = tick
        self._calm_tick = calm_tick or (lambda: tick)
        self._busy_tick = busy_tick or (lambda: tick)
        self._semaphore = semaphore or PrioritySemaphore()
        self._calls = calls or PrioritySemaphore()
        self._calm = False  # trains or has ended, and the last round changed nothing
        self._apis = apis
        self._queues = queues
        self._patience = patience  # see `takeover`
        self._trust_until = 0.0
        self._trusted: ServiceSeen | None = None
        self._promised = tick  # what the coordinator was told of the next call
        self._crowd = crowd
        self._look: asyncio.TimerHandle | None = None
        self._settle = SETTLE
        self._lookout = lookout or Lookout(*key)
        self._in_doubt = asyncio.Event()
        self._clock = clock
        self._tls = tls  # of jobs that do not say
        self._credentials = credentials
        self._certificate_seconds = certificate_seconds
        self._spans = JobSpans(tracer, *key, uid)
        self._templates = templates or TrainingTemplates(cluster)
        self._template_looks = 0  # in a row that did not find the template of the job
        self._plan_wanted = asyncio.Event()
        self._sync_wanted = asyncio.Event()
        self._first_seen, self._events = FirstSeen(), RepeatedEvents()
        self._said: tuple[str, CoordinatorUpdate] | None = None
        self._retired: set[str] = set()
        self._surprises = 0  # rounds in a row that ended with an error that nobody foresaw
        self._announced = ""  # what the log was told of the last one
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, on_end: Callable[[asyncio.Task[None]], None] = lambda task: None) -> None:
        """Begin; `on_end` is called with a task that ends without being stopped."""
        name = "/".join(self.key)
        self._tasks = [
            asyncio.create_task(self._plan_for_ever(), name=f"plan {name}"),
            asyncio.create_task(self._sync_for_ever(), name=f"sync {name}"),
            asyncio.create_task(self._look_out_for_ever(), name=f"look out {name}"),
        ]
        for task in self._tasks:
            task.add_done_callback(lambda task: None if task.cancelled() else on_end(task))

    async def stop(self) -> None:
        if self._look is not None:
            self._look.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.connection.close()

    def wake(self) -> None:
        """Plan soon; tell the coordinator at once if what it should hear has changed."""
        self._plan_wanted.set()
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(self._settle, self._look_for_news)

    def _look_for_news(self) -> None:
        self._look = None
        began = time.monotonic()
        try:
            self._compare_with_said()
        except Exception as error:  # the round says what is wrong
            log.debug("no word for the coordinator: %s", in_words(error), extra=self._fields())
        self._settle = min(SETTLE_LIMIT, max(SETTLE, (time.monotonic() - began) / SETTLE_SHARE))

    def _compare_with_said(self) -> None:
        job = self._job()
        if job is None:
            return
        observation = self.observe(job)
        ledger = Ledger.from_status(job.status)
        pod = coordinator_policy.current(observation, ledger)
        if pod is not None and self._said != (pod.uid, make_sync(job, observation, ledger.incarnation, 0.0)):
            self._sync_wanted.set()

    def observe(self, job: Job) -> Observation:
        """Return the present facts about the job: of its pods, its objects, its coordinator and its nodes."""
        memory = self._performer.memory
        workers, coordinators = self._cache.pods(self.key, self.uid)
        foreign = self._cache.foreign_names(self.key, self.uid)
        found = Observation(
            workers=workers,
            coordinators=coordinators,
            servers=self._cache.servers(self.key, self.uid),
            server_budget=memory.server_budget,
            service=memory.service,
            service_gone=memory.service_gone,
            secret_made=memory.secret_made,
            secret_made_at=memory.secret_made_at,
            secret_version=memory.secret_version,
            key=self._credentials(job).key if self._credentials is not None else "",
            certificate_seconds=self._certificate_seconds,
            policy_missing=self._performer.policy_missing,
            report=self.connection.report,
            unreachable_since=self.connection.unreachable_since,
            deaf_since=self.connection.deaf_since,
            unreachable_why=self.connection.why,
            refusals=answers_to(memory.refusals, job.generation),
            apis=self._apis([*kueue.api(job), *gang.api(job)]),
            workload=self._queues.seen(self.uid) if self._queues is not None else None,
            workloads_listed=self._queues is not None and self._queues.listed,
            workloads_trouble=self._queues.trouble if self._queues is not None else "",
            pod_group=memory.pod_group,
            pod_group_gone=memory.pod_group_gone,
            taken=foreign | memory.taken,
            nodes=self._cache.nodes(),
            steady=self._cache.clock(),
            sight=self._lookout.seen(),
            heard_at=self._lookout.heard_at,
            listening_since=self._lookout.listening_since,
            tls_default=self._tls,
            coordinator_image=self._performer.coordinator_image,
            server_image=self._performer.server_image,
            crowd=self._crowd(self.key) if gives_back(job) else (),
        )
        return with_first_seen(job, nodes.with_node_health(found, self._clock()), self._first_seen)

    def raw(self) -> dict[str, Any] | None:
        """The job as last heard of; None when it is gone, or another job has its name."""
        job = self._cache.job(self.key)
        return job if job is not None and job["metadata"]["uid"] == self.uid else None

    def _job(self) -> Job | None:
        raw = self.raw()
        if raw is None:
            return None
        try:
            return kueue.limited(Job.parse(raw))
        except InvalidJob:
            return None

    async def _plan_for_ever(self) -> None:
        pause, failures = 0.0, 0
        while True:
            if pause > 0:
                await self._rest(pause)
                await asyncio.sleep(SETTLE)
            began = time.monotonic()
            try:
                async with self._semaphore.turn(self._trains(), self.key[0]):
                    self._plan_wanted.clear()
                    began = time.monotonic()
                    pause = await self.reconcile()
                self._surprises, self._announced, failures = 0, "", 0
                self._meter.reconciled("success", time.monotonic() - began)
            except ApiError as error:
                failures += 1
                pause = backoff_seconds(failures, self._tick)
                self._meter.reconciled("error", time.monotonic() - began)
                log.warning(
                    "a round failed, the next one is in %.0f s: %s", pause, error, extra=self._fields()
                )
            except Exception as error:  # one job that nobody foresaw is that job's trouble alone
                pause = await self._surprised(error)
                self._meter.reconciled("error", time.monotonic() - began)

    async def _rest(self, pause: float) -> None:
        """Wait, until something is to be looked at. After a surprise only an edit of the job is."""
        seen, until = self._generation(), time.monotonic() + pause
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + pause):
                while True:
                    await self._plan_wanted.wait()
                    if not self._surprises or self._generation() != seen or time.monotonic() >= until:
                        return
                    self._plan_wanted.clear()

    def _generation(self) -> object:
        return ((self.raw() or {}).get("metadata") or {}).get("generation")

    async def _surprised(self, error: Exception) -> float:
        """Say in the job's status, and once in the log, what nobody foresaw, or that the CRD is too old.

        Returns seconds until the next try.
        """
        self._surprises += 1
        pause = min(SURPRISE_SECONDS, self._tick * 2.0 ** min(self._surprises - 1, 10))
        outdated = isinstance(error, OutdatedCrdError)
        said = str(error) if outdated else in_words(error)
        if not outdated:
            self._meter.surprised("round")
        if said != self._announced:
            self._announced = said
            log.error("the job cannot be worked with, it is tried again: %s", said, extra=self._fields())
            log.debug("where that came from", exc_info=error, extra=self._fields())
        raw = self.raw()
        if raw is None or not self._may_act():
            return pause
        text = said
        if not outdated:
            text = (
                "the operator fails with this job, and does nothing for it until an edit or a later try "
                f"helps: {said}"
            )
        reason = reasons.OUTDATED_CRD if outdated else reasons.INTERNAL_ERROR
        generation = raw["metadata"].get("generation", 1)
        try:
            decided = invalid(raw.get("status") or {}, generation, text, self._clock(), reason)
            if await self._write_status(raw, decided):
                for event in decided.events:
                    await self._post(raw, event)
        except Exception as second:  # the log has it
            log.debug("nor can that be written: %s", in_words(second), extra=self._fields())
        return pause

    async def reconcile(self) -> float:
        """One look, one plan, one status write, its actions, its events. Returns seconds to wait. Raises
        ApiError.
        """
        raw = self.raw()
        if raw is None or not self._may_act():
            return self._tick
        now = self._clock()
        named = training_template.wanted(raw)
        if named is not None:
            return await self._take_template(raw, named, now)
        job: Job | None = None
        try:
            job = Job.parse(raw)
            self._trust(job, now)
        except InvalidJob as error:
            generation = raw["metadata"].get("generation", 1)
            decided = invalid(raw.get("status") or {}, generation, str(error), now, error.reason)
        else:
            unreadable = [*self._cache.unreadable(self.key, self.uid)]
            if self._queues is not None and self._queues.unreadable(self.uid):
                unreadable.append(self._queues.unreadable(self.uid))
            if unreadable:
                raise UnreadableError("; ".join(unreadable[:3]))
            observation = self.observe(job)
            self._spans.look(job, observation, now)
            decided = plan(job, observation, now)
        if not await self._write_status(raw, decided):
            return 0.0
        created = str(raw["metadata"].get("creationTimestamp", ""))
        self._spans.ended(raw.get("status") or {}, decided.status, created)
        was_calm = self._calm
        self._calm = calm(raw.get("status") or {}, decided, now)
        if was_calm and not self._calm:
            self._sync_wanted.set()
        done = 0
        if job is not None:
            done = await self._performer.perform(replace(job, status=decided.status), decided.actions)
        for event in decided.events:
            await self._post(raw, event)
        if job is not None:  # it may raise, and what status tells is told once
            done += await self._performer.look_after(job, self._protection_seconds())
        if done:
            return 0.0
        if job is None:
            return INVALID_SECONDS
        # Calm jobs are planned half as often as their coordinators are asked: news of theirs wakes the plan.
        wait = 2 * self.pause if self._calm and self.pause > self._tick else self.pause
        if self._trust_until:
            wait = min(wait, max(0.02, self._trust_until - self._clock()))
        if decided.wake_at is not None:
            wait = min(wait, max(0.02, decided.wake_at - self._clock()))
        due = self._performer.protection_due(job, self._protection_seconds())
        return wait if due is None else min(wait, max(0.02, due))

    async def _take_template(self, raw: dict[str, Any], named: Reference, now: float) -> float:
        """Keep the job's template in status, or say why it waits. Returns seconds to wait. Raises
        ApiError.
        """
        decided = await self._templates.plan(raw, named, now)
        if not await self._write_status(raw, decided):
            return 0.0
        for event in decided.events:
            await self._post(raw, event)
        if template_in_status({**raw, "status": decided.status}) is not None:
            self._template_looks = 0
            return 0.0
        self._template_looks += 1
        return backoff_seconds(self._template_looks, TEMPLATE_RETRY, TEMPLATE_SECONDS)

    def _protection_seconds(self) -> float:
        """How long what protects a job is believed to be there where it is not watched: longer, where there
        are many jobs.
        """
        return max(PROTECTION_SECONDS, PROTECTION_PAUSES * self.pause)

    def _trust(self, job: Job, now: float) -> None:
        """Take the objects of a job that trains for made in the first round; check them later."""
        memory = self._performer.memory
        if self._patience > 0:
            self._trust_until, self._patience = now + self._patience, 0.0
            found = takeover.trusted_service(job.status, self.observe(job), now)
            if found is not None:
                self._trusted = memory.service = found
                memory.secret_made, memory.secret_made_at, memory.policy_applied = True, now, True
                memory.secret_version = keys.version(job)
                memory.pod_group = gang.trusted(job)
            else:
                self._trust_until = 0.0
        elif 0 < self._trust_until <= now:
            if memory.service is self._trusted:
                memory.service = None
            memory.secret_made = memory.policy_applied = False
            memory.pod_group = ""
            self._trust_until = 0.0

    async def _write_status(self, raw: dict[str, Any], decided: Plan) -> bool:
        """Write the status before anything is done by it.

        Args:
            raw: the job as it was read.
            decided: with the status that is wanted.

        Returns:
            False if somebody else wrote first: the next round plans from what they wrote.

        Raises:
            ApiError: the API server refuses.
            OutdatedCrdError: it has dropped fields, so what they say would be forgotten.
        """
        old = raw.get("status") or {}
        wanted = with_unknown(old, decided.status, status_schema())
        patch = merge_patch(old, wanted)
        if not patch:
            return True
        meta = raw["metadata"]
        try:
            written = await self._cluster.patch_status(*self.key, self.uid, meta["resourceVersion"], patch)
        except ApiError as error:
            if is_gone(error):
                self._cache.drop_job(raw)
                return False
            if error.code != 409:
                raise
            self._cache.put_job_again(await self._cluster.get_job(*self.key), raw)
            return False
        self._cache.put_job(written)
        if lost := missing(wanted, written.get("status") or {}):
            raise OutdatedCrdError(
                f"the API server has dropped {', '.join(lost[:4])} ({len(lost)} in all) of what was written: "
                "the CustomResourceDefinition is older than this operator. Nothing is done for the job, "
                "whose pods train on, until the one of this version is applied (docs/install.md, Upgrading)"
            )
        return True

    async def _post(self, raw: dict[str, Any], event: Event) -> None:
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        meta = raw["metadata"]
        name = f"{meta['name']}.{uuid.uuid4().hex[:16]}"
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
                "resourceVersion": meta["resourceVersion"],
            },
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "message": event.message[:1024],
            "source": {"component": names.MANAGER},
            "reportingComponent": f"{names.GROUP}/operator",
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        level = logging.WARNING if event.warning else logging.INFO
        log.log(level, "%s: %s", event.reason, event.message, extra=self._fields())
        try:
            if not await self._count_again(event, at):
                await self._cluster.create_event(body)
                self._events.put(event, name, 1, time.monotonic())
        except ApiError as error:
            log.warning("an event could not be posted: %s", error, extra=self._fields())

    async def _count_again(self, event: Event, at: str) -> bool:
        """Count an event that is there already; return whether that was all to be done.

        Args:
            event: that has happened.
            at: when, as an Event says it.

        Raises:
            ApiError: the API server does not get to it.
        """
        known = self._events.known(event, time.monotonic())
        if known is None:
            return False
        try:
            await self._cluster.count_event(self.key[0], known.name, known.count + 1, at)
        except ApiError as error:
            if error.code not in (403, 404):
                raise
            return False
        self._events.put(event, known.name, known.count + 1, time.monotonic())
        return True

    async def _sync_for_ever(self) -> None:
        pause, told = FIRST_RETRY, ""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._sync_wanted.wait()
            wanted = self._sync_wanted.is_set()
            try:
                async with self._calls.turn(wanted, self.key[0]):
                    self._sync_wanted.clear()
                    ok = await self._sync()
            except Exception as error:  # what nobody foresaw must not end the line for ever
                ok, said = False, in_words(error)
                self._meter.surprised("round")
                if said != told:
                    told = said
                    log.error("the coordinator cannot be called: %s", said, extra=self._fields())
            pause = self._promised if ok else min(self._tick, max(FIRST_RETRY, pause * 1.5))

    async def _sync(self) -> bool:
        """One call, if this operator acts and there is somebody to call."""
        # Whether it acts is asked first: one that stands by would read the text of every job each time.
        job = self._job() if self._may_act() else None
        if job is None:
            return True
        observation = self.observe(job)
        ledger = Ledger.from_status(job.status)
        pod = coordinator_policy.current(observation, ledger)
        if pod is None:
            self.connection.nobody()
            return False
        if self._credentials is not None:
            shown = self._credentials(job)
            self.connection.present(shown, names.secret_name(job.name, job.uid, job.keys[0].name))
        before, was_reachable = self.connection.report, self.connection.unreachable_since is None
        self._promised = self.pause
        said = make_sync(job, observation, ledger.incarnation, self._clock(), self._promised)
        self._said = (pod.uid, make_sync(job, observation, ledger.incarnation, 0.0))
        owes = self.connection.shows(pod) and self._lookout.asks(pod)
        # It answers within milliseconds, or not at all.
        doubt = asyncio.get_running_loop().call_later(DOUBT_SECONDS, self._in_doubt.set) if owes else None
        try:
            ok = await self.connection.call(pod, said, job.tls)
        finally:
            if doubt is not None:
                doubt.cancel()
        if ok:
            report = self.connection.report
            self._lookout.answered(report.connected if report is not None else frozenset())
        if (owes and not ok) or waits_for_somebody(self.connection.report):
            self._in_doubt.set()
        for old in observation.coordinators:
            if (
                old.incarnation < ledger.incarnation
                and old.running_since is not None
                and old.uid not in self._retired
            ):
                self._retired.add(old.uid)
                await self.connection.retire(old, said, job.tls)
        if not ok:
            self._said = None
        if news(before, self.connection.report) or was_reachable != ok:
            self._plan_wanted.set()
        return ok

    async def _look_out_for_ever(self) -> None:
        """Watch pods and nodes ourselves while the coordinator does not answer, or waits for somebody."""
        while True:
            await self._in_doubt.wait()
            self._in_doubt.clear()
            try:
                while self._doubtful():
                    began, job = time.monotonic(), self._job()
                    if job is not None and self._may_act():
                        await self._lookout.look(self.observe(job))
                        self.wake()
                    await asyncio.sleep(max(0.05, began + LOOK_SECONDS - time.monotonic()))
            except Exception:  # a look that fails must not be the last one
                log.exception("looking out failed", extra=self._fields())
                await asyncio.sleep(LOOK_SECONDS)
            self._lookout.rest()

    def _doubtful(self) -> bool:
        silent = self._lookout.silence >= DOUBT_SECONDS
        return self._job() is not None and (silent or waits_for_somebody(self.connection.report))

    @property
    def pause(self) -> float:
        """Seconds until the coordinator is asked again where no event asks for it before."""
        return self._calm_tick() if self._calm else self._busy_tick()

    @property
    def calm(self) -> bool:
        return self._calm

    def _trains(self) -> bool:
        status = (self.raw() or {}).get("status") or {}
        return conditions.is_true(status, reasons.RUNNING)

    def _fields(self) -> dict[str, Any]:
        return {"fields": {"job": "/".join(self.key)}}
