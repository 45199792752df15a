"""Reads templates for jobs.

A job gets the template as it is when it asks: an answer that another job had a moment before may be older
than an edit that its user has made between the two. Only that there is none is believed for a while.

Tasks: used in the operator's event loop alone, without locks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from springtide_kube.errors import ApiError
from springtide_operator.api.effective_spec import Reference
from springtide_operator.api.names import CLUSTER_TEMPLATE_KIND
from springtide_operator.cluster import Cluster
from springtide_operator.plan import training_template
from springtide_operator.plan.actions import Plan

Object = dict[str, Any]
Key = tuple[str, str, str]  # kind, namespace ("" for a kind without), name

LACK_SECONDS = 1.0  # a no is believed so long: a thousand jobs that wait cost one request a second
_REFUSALS = (403, 404)
_MOST_KNOWN = 1024  # refusals kept


class TrainingTemplates:
    """Templates as the API server gives them."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            cluster: that has them.
            clock: seconds that never jump.
        """
        self._cluster = cluster
        self._clock = clock
        self._refusals: dict[Key, tuple[float, ApiError]] = {}

    async def plan(self, job: Object, named: Reference, now: float) -> Plan:
        """Return the plan for a job that needs its template: to keep it, or to wait for it.

        Args:
            job: a TrainingJob as the API server gives it.
            named: its template.
            now: unix seconds.

        Raises:
            ApiError: the API server does not get to an answer.
        """
        namespace = "" if named.kind == CLUSTER_TEMPLATE_KIND else str(job["metadata"]["namespace"])
        key = (named.kind, namespace, named.name)
        at, refusal = self._refusals.get(key, (0.0, None))
        if refusal is None or not 0 <= self._clock() - at < LACK_SECONDS:
            if refusal is not None:
                self._refusals[key] = (self._clock(), refusal)  # this job asks for all that wait
            try:
                found = await self._cluster.get_template(*key)
            except ApiError as error:
                if error.code not in _REFUSALS:
                    raise
                refusal = error
                self._remember(key, error)
            else:
                self._refusals.pop(key, None)
                return training_template.take(job, named, found, now)
        return training_template.lack(job, named, refusal.code, str(refusal), now)

    def _remember(self, key: Key, refusal: ApiError) -> None:
        if len(self._refusals) >= _MOST_KNOWN:
            self._refusals.clear()
        self._refusals[key] = (self._clock(), refusal)
