"""Jobs that MultiKueue runs in other clusters: here they have a Workload, and nothing else.

Kueue's controller for several clusters copies such a job, without `spec.managedBy`, to the cluster that
admits it, and copies its status back. It makes the Workload of kinds that are compiled into it only, so the
release of the default class keeps that of ours. Their status is never written here.

Tasks: `run` alone plans; events only set `_wanted`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from springtide_kube.errors import ApiError
from springtide_operator.api import names, reasons
from springtide_operator.api.effective_spec import template_in_status
from springtide_operator.api.job import InvalidJob, Job
from springtide_operator.cache import Cache, Key
from springtide_operator.perform import Performer
from springtide_operator.plan import kueue, training_template
from springtide_operator.plan.observation import Observation
from springtide_operator.plan.retry import answers_to
from springtide_operator.queues import Queues
from springtide_operator.training_templates import TrainingTemplates

log = logging.getLogger("springtide.operator")

Object = dict[str, Any]

LOOK_SECONDS = 30.0  # between two looks where nothing was heard
RETRY_SECONDS = 2.0  # while a refusal waits for its next try


class MultiKueueJobs:
    """Keeps the Workloads of the jobs in a cache of their own.

    `performer(key)` carries actions out for a job; `apis`: which of several APIs are served, as far as is
    known; `acts()`: whether this process acts.
    """

    def __init__(
        self,
        cache: Cache,
        queues: Queues,
        performer: Callable[[Key], Performer],
        apis: Callable[[Iterable[str]], dict[str, bool]],
        acts: Callable[[], bool],
        templates: TrainingTemplates,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._queues = queues
        self._performer = performer
        self._apis = apis
        self._acts = acts
        self._templates = templates
        self._taken: dict[str, Object] = {}  # templates by uid of the job: no status is written here
        self._clock = clock
        self._performers: dict[str, Performer] = {}  # by uid of the job
        self._said: dict[Key, str] = {}
        self._wanted = asyncio.Event()

    def wake(self) -> None:
        """Look soon: something of a job, of its Workload or of Kueue's API has changed."""
        self._wanted.set()

    async def run(self) -> None:
        """Look at all jobs for ever."""
        while True:
            self._wanted.clear()
            pause = await self.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wanted.wait()

    async def look(self) -> float:
        """Plan for each job, and act; return the seconds until the next look."""
        keys = self._cache.job_keys()
        jobs = [(key, job) for key in keys if (job := self._cache.job(key)) is not None]
        there = {str(job["metadata"]["uid"]) for _, job in jobs}
        self._performers = {uid: one for uid, one in self._performers.items() if uid in there}
        self._taken = {uid: one for uid, one in self._taken.items() if uid in there}
        refused = False
        for key, raw in jobs:
            if self._acts():
                refused = await self._look_at(key, raw) or refused
        return RETRY_SECONDS if refused else LOOK_SECONDS

    async def _look_at(self, key: Key, raw: Object) -> bool:
        """Return whether something was refused."""
        uid = str(raw["metadata"]["uid"])
        if not (kueue.concerns({"metadata": raw["metadata"]}) or self._queues.seen(uid)):
            return False
        try:
            job = replace(Job.parse(await self._with_template(raw)), status={})
        except InvalidJob as error:
            self._say(key, f"it cannot be read: {error}")
            return error.reason == reasons.TEMPLATE_NOT_FOUND
        except ApiError as error:
            self._say(key, f"its template cannot be read: {error}")
            return True
        if job.deleting:
            return False
        performer = self._performers.setdefault(job.uid, self._performer(key))
        observation = Observation(
            apis=self._apis(names.KUEUE_APIS),
            workload=self._queues.seen(job.uid),
            workloads_listed=self._queues.listed,
            refusals=answers_to(performer.memory.refusals, job.generation),
        )
        await performer.perform(job, kueue.decide_elsewhere(job, observation, self._clock()))
        refusal = performer.memory.refusals.get(kueue.ROLE)
        self._say(key, f"its Workload is refused: {refusal.message}" if refusal is not None else "")
        return refusal is not None

    async def _with_template(self, raw: Object) -> Object:
        """Return the job with its template in status, as this process first saw it, or as the cluster that
        runs the job copied it here. Raises ApiError.
        """
        named, uid = training_template.wanted(raw), str(raw["metadata"]["uid"])
        if named is None:
            return raw
        if uid not in self._taken:
            decided = await self._templates.plan(raw, named, self._clock())
            if template_in_status({**raw, "status": decided.status}) is None:
                raise InvalidJob(str(decided.status["message"]), reasons.TEMPLATE_NOT_FOUND)
            self._taken[uid] = decided.status[training_template.STATUS]
        return {**raw, "status": {training_template.STATUS: self._taken[uid]}}

    def _say(self, key: Key, text: str) -> None:
        if text and self._said.get(key) != text:
            log.warning("the job %s/%s is MultiKueue's, and %s", *key, text)
        self._said[key] = text
