"""Pods that are needed and that no node takes: for them, jobs give their extra workers and standbys back.

Pods of jobs are known from the watch. Others are listed every ten seconds, only those that no node has taken,
and only while some job has extra workers or standbys.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from springtide_kube.errors import ApiError
from springtide_operator.api import names, reasons
from springtide_operator.api.effective_spec import merged_spec
from springtide_operator.api.elasticity import ElasticityPolicy
from springtide_operator.cache import Cache, Key
from springtide_operator.cluster import Cluster
from springtide_operator.plan.elasticity import HELPED_SECONDS
from springtide_operator.plan.observation import CoordinatorPod, ServerPod
from springtide_operator.plan.observe import pod_problem
from springtide_operator.plan.values import parse_time

log = logging.getLogger("springtide.operator")

Object = dict[str, Any]

LIST_SECONDS = 10.0
FRESH_SECONDS = 1.0


def has_extras(job: Object | None) -> bool:
    """Whether the job has, or tries, workers beyond its replicas, or standbys."""
    status = (job or {}).get("status") or {}
    return bool((status.get("elasticity") or {}).get("extra") or (status.get("standby") or {}).get("asked"))


def may_have_extras(job: Object | None) -> bool:
    """Whether the job's manifest asks for extra workers or standbys."""
    spec = merged_spec(job or {})
    policy = (spec.get("elasticity") or {}).get("policy")
    return policy == ElasticityPolicy.CAPACITY.value or bool((spec.get("workers") or {}).get("standby"))


class UnschedulablePods:
    """`waiting(key)`: names of the pods that job `key` should make room for."""

    def __init__(self, cache: Cache, cluster: Cluster, clock: Callable[[], float] = time.time) -> None:
        self._cache = cache
        self._cluster = cluster
        self._clock = clock
        self._foreign: dict[str, float] = {}  # namespace/name: unix seconds of its creation
        self._known: list[tuple[Key, str]] = []  # pods that are waited for, and the job of each
        self._known_of = (-1, 0.0)  # version of the cache, when
        self._warned = False

    def waiting(self, besides: Key) -> tuple[str, ...]:
        """Return pods of others that no node takes, in an order that does not change. Extra workers of other
        jobs are left out.
        """
        now = self._clock()
        found = [name for name, since in self._foreign.items() if 0 <= now - since < HELPED_SECONDS]
        version, looked_at = self._known_of
        if version != self._cache.stuck_version or not 0 <= now - looked_at < FRESH_SECONDS:
            self._known_of = (self._cache.stuck_version, now)
            self._known = [
                (key, name) for key in self._cache.crowded_jobs() for name in self._needed(key, now)
            ]
        return tuple(sorted([*found, *(name for key, name in self._known if key != besides)]))

    def _needed(self, key: Key, now: float) -> list[str]:
        job = self._cache.job(key)
        if job is None:
            return []
        workers, coordinators = self._cache.pods(key, job["metadata"]["uid"])
        live = [pod for pod in workers if pod.live]
        replicas = int(((job.get("spec") or {}).get("workers") or {}).get("replicas") or 1)
        lacking = max(0, replicas - sum(pod.placed for pod in live))
        stuck = sorted(pod.name for pod in live if not pod.placed and _stuck(pod, now))[:lacking]
        others: list[CoordinatorPod | ServerPod] = [
            *coordinators,
            *self._cache.servers(key, job["metadata"]["uid"]),
        ]
        stuck += sorted(pod.name for pod in others if pod.live and pod.node is None and _stuck(pod, now))
        return [f"{key[0]}/{name}" for name in stuck]

    async def look(self) -> bool:
        """List the pods of others that no node takes, if any job could make room; True if that is news."""
        keys = self._cache.job_keys()
        if not any(has_extras(self._cache.job(key)) for key in keys):
            found: dict[str, float] = {}
        else:
            try:
                listed = (await self._cluster.list_waiting_pods()).items
            except ApiError as error:
                if not self._warned:
                    log.warning("pods that wait for a node cannot be listed: %s", error)
                self._warned = True
                return False
            self._warned = False
            found = {
                f"{pod['metadata']['namespace']}/{pod['metadata']['name']}": since
                for pod in listed
                if (since := _waits_since(pod)) is not None
            }
        changed = found.keys() != self._foreign.keys()
        self._foreign = found
        return changed


def _stuck(pod: Any, now: float) -> bool:
    problem = pod.problem
    said = (
        problem is not None and problem.reason == reasons.UNSCHEDULABLE and problem.cause == "Unschedulable"
    )
    return said and 0 <= now - pod.created_at < HELPED_SECONDS


def _waits_since(pod: Object) -> float | None:
    """Unix seconds of its creation, where the scheduler has said that no node takes it and it is no job's."""
    if names.LABEL_JOB in (pod["metadata"].get("labels") or {}):
        return None
    problem = pod_problem(pod, "")
    if problem is None or problem.reason != reasons.UNSCHEDULABLE or problem.cause != "Unschedulable":
        return None
    return parse_time(pod["metadata"].get("creationTimestamp"))
