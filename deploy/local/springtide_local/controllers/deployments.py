"""Deployments: one ReplicaSet per version of the template, moved from the old ones to the new one within
surge and unavailability.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from typing import Any, NamedTuple

from springtide_local.clock import micro_timestamp, parse_timestamp
from springtide_local.controllers import replicasets
from springtide_local.controllers.conditions import condition, controller_of, is_active, set_condition
from springtide_local.controllers.loop import Controller
from springtide_local.events import EventRecorder
from springtide_local.informer import Change, Informers
from springtide_local.ports import ApiError, StorePort

Object = dict[str, Any]
_RESOURCE = "deployments.apps"
_REVISION = "deployment.kubernetes.io/revision"
_HASH = "pod-template-hash"
_TOO_LATE = "ProgressDeadlineExceeded"
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


class Sizes(NamedTuple):
    """How many replicas each ReplicaSet shall have; the old ones by name."""

    new: int
    old: dict[str, int]
    reason: str


def template_hash(template: Object) -> str:
    """A short name for a template; equal templates have equal ones."""
    number = int.from_bytes(hashlib.sha256(json.dumps(template, sort_keys=True).encode()).digest()[:6], "big")
    letters = []
    for _ in range(10):
        number, rest = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[rest])
    return "".join(letters)


def rounded(value: int | str, total: int, up: bool) -> int:
    """Return `maxSurge` (rounded up) or `maxUnavailable` (down) as a number of pods.

    Args:
        value: a number, or a percentage such as `25%`.
        total: pods that are wanted.
        up: round up, not down.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, int):
        return value
    if value.endswith("%"):
        share = int(value[:-1]) * total / 100
        return math.ceil(share) if up else math.floor(share)
    return int(value)


def limits(strategy: Object, wanted: int) -> tuple[int, int]:
    """Return the limits of a RollingUpdate.

    Both zero would stand still for ever, so then one may be unavailable, as in Kubernetes.

    Args:
        strategy: of the Deployment.
        wanted: pods that it asks for.

    Returns:
        Pods above that number, and pods of it that may be unavailable.
    """
    rolling = strategy.get("rollingUpdate") or {}
    surge = rounded(rolling.get("maxSurge", "25%"), wanted, up=True)
    unavailable = rounded(rolling.get("maxUnavailable", "25%"), wanted, up=False)
    return (surge, 1) if surge == unavailable == 0 else (surge, unavailable)


def decide(
    wanted: int,
    strategy: Object,
    new: Object | None,
    old: list[Object],
    old_pods_left: bool,
    paused: bool = False,
) -> Sizes:
    """Return the sizes of the next moment, from the ReplicaSets as they are (spec.replicas and
    status.availableReplicas).

    Args:
        wanted: pods that the Deployment asks for.
        strategy: of the Deployment.
        new: the ReplicaSet of the template of now; None: it is not made yet.
        old: those of earlier templates.
        old_pods_left: pods of those are still there, going away perhaps.
        paused: nothing is rolled out.
    """
    sizes = {rs["metadata"]["name"]: _spec(rs) for rs in old}
    current = _spec(new) if new is not None else 0
    total_old = sum(sizes.values())
    if paused:
        return Sizes(current if total_old else wanted if new is not None else 0, sizes, "paused")
    if strategy.get("type") == "Recreate":
        if total_old or old_pods_left:
            return Sizes(current, dict.fromkeys(sizes, 0), "the old pods have to end first")
        return Sizes(wanted, sizes, "no old pods are left")
    surge, unavailable = limits(strategy, wanted)
    if total_old == 0:
        return Sizes(wanted, sizes, "there are no old pods")
    room = wanted + surge - total_old - current
    grown = current if current >= wanted else min(wanted, current + max(room, 0))
    grown = min(grown, wanted)
    available_new = _available(new) if new is not None else 0
    available_all = available_new + sum(_available(rs) for rs in old)
    # Old pods that are not available can go at once; of the others, as many as the new ones have made room
    # for.
    spare_unhealthy = min(
        total_old + current - (wanted - unavailable) - max(current - available_new, 0), total_old
    )
    shrunk = dict(sizes)
    for rs in sorted(old, key=lambda rs: str(rs["metadata"].get("creationTimestamp") or "")):
        name = rs["metadata"]["name"]
        unhealthy = max(shrunk[name] - _available(rs), 0)
        cut = max(min(unhealthy, spare_unhealthy), 0)
        shrunk[name] -= cut
        spare_unhealthy -= cut
    spare = available_all - (wanted - unavailable)
    for rs in sorted(old, key=lambda rs: str(rs["metadata"].get("creationTimestamp") or "")):
        name = rs["metadata"]["name"]
        cut = max(min(shrunk[name], spare), 0)
        shrunk[name] -= cut
        spare -= cut
    return Sizes(grown, shrunk, f"rolling with surge {surge} and at most {unavailable} unavailable")


def _spec(rs: Object) -> int:
    return int(rs["spec"].get("replicas", 1))


def _available(rs: Object) -> int:
    return int((rs.get("status") or {}).get("availableReplicas") or 0)


class Deployments:
    def __init__(self, store: StorePort, informers: Informers) -> None:
        self._store = store
        self._events = EventRecorder(store, "deployment-controller")
        self.controller = Controller("deployments", self._reconcile)
        informers.of(_RESOURCE).on_change(self.controller.on_change)
        informers.of(replicasets.RESOURCE).on_change(self._on_owned)
        self._sets = informers.of(replicasets.RESOURCE)
        informers.of("pods").on_change(self._on_pod)

    def _on_owned(self, change: Change) -> None:
        owner = controller_of(change.object)
        if owner is not None and owner["kind"] == "Deployment":
            self.controller.enqueue(change.object["metadata"]["namespace"], owner["name"])

    def _on_pod(self, change: Change) -> None:
        # Only Recreate waits for pods themselves to be gone.
        owner = controller_of(change.object)
        if change.type == "DELETED" and owner is not None and owner["kind"] == "ReplicaSet":
            owner_set = self._sets.get(change.object["metadata"]["namespace"], owner["name"])
            if owner_set is not None:
                self._on_owned(Change("MODIFIED", owner_set, None))

    def _reconcile(self, namespace: str, name: str) -> float | None:
        try:
            deployment = self._store.get(_RESOURCE, name, namespace)
        except ApiError as error:
            if error.code == 404:
                return None
            raise
        if deployment["metadata"].get("deletionTimestamp"):
            return None
        uid, spec = deployment["metadata"]["uid"], deployment["spec"]
        sets = [
            rs
            for rs in self._store.list(replicasets.RESOURCE, namespace)
            if (controller_of(rs) or {}).get("uid") == uid
        ]
        label = template_hash(spec["template"])
        new = next((rs for rs in sets if (rs["metadata"].get("labels") or {}).get(_HASH) == label), None)
        old = [rs for rs in sets if rs is not new]
        if new is None and not spec.get("paused"):
            new = self._create(deployment, label, old)
        elif new is not None:
            new = self._renumber(deployment, new, old)
        old_names = {rs["metadata"]["uid"] for rs in old}
        pods = [
            p for p in self._store.list("pods", namespace) if (controller_of(p) or {}).get("uid") in old_names
        ]
        wanted = int(spec.get("replicas", 1))
        left = any(is_active(pod) or pod["metadata"].get("deletionTimestamp") for pod in pods)
        sizes = decide(wanted, spec.get("strategy") or {}, new, old, left, bool(spec.get("paused")))
        if new is not None:
            new = self._scale(deployment, new, sizes.new)
        old = [self._scale(deployment, rs, sizes.old[rs["metadata"]["name"]]) for rs in old]
        self._clean_up(deployment, old)
        return self._write_status(deployment, new, old)

    def _create(self, deployment: Object, label: str, old: list[Object]) -> Object:
        metadata, spec = deployment["metadata"], deployment["spec"]
        template = {**spec["template"], "metadata": dict(spec["template"].get("metadata") or {})}
        template["metadata"]["labels"] = {**(template["metadata"].get("labels") or {}), _HASH: label}
        selector = dict(spec["selector"])
        selector["matchLabels"] = {**(selector.get("matchLabels") or {}), _HASH: label}
        owner = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
        replica_set = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {
                "name": f"{metadata['name']}-{label}",
                "labels": template["metadata"]["labels"],
                "annotations": {_REVISION: str(_newest(old) + 1)},
                "ownerReferences": [owner],
            },
            "spec": {
                "replicas": 0,
                "selector": selector,
                "template": template,
                "minReadySeconds": spec.get("minReadySeconds") or 0,
            },
        }
        return self._store.create(replicasets.RESOURCE, replica_set, metadata["namespace"])

    def _renumber(self, deployment: Object, new: Object, old: list[Object]) -> Object:
        """A template that comes back (`kubectl rollout undo`) becomes the newest revision."""
        if _revision(new) > _newest(old):
            return new
        number = str(_newest(old) + 1)
        metadata = new["metadata"]
        return self._store.mutate(
            replicasets.RESOURCE,
            metadata["name"],
            metadata["namespace"],
            lambda rs: rs["metadata"].setdefault("annotations", {}).update({_REVISION: number}),
        )

    def _scale(self, deployment: Object, rs: Object, size: int) -> Object:
        before = _spec(rs)
        if before == size:
            return rs
        metadata = rs["metadata"]
        word = "up" if size > before else "down"
        self._events.normal(
            deployment,
            "ScalingReplicaSet",
            f"Scaled {word} replica set {metadata['name']} from {before} to {size}",
        )
        return self._store.mutate(
            replicasets.RESOURCE,
            metadata["name"],
            metadata["namespace"],
            lambda obj: obj["spec"].update(replicas=size),
        )

    def _clean_up(self, deployment: Object, old: list[Object]) -> None:
        limit = int(deployment["spec"].get("revisionHistoryLimit", 10))
        empty = [rs for rs in old if _spec(rs) == 0 and not (rs.get("status") or {}).get("replicas")]
        for rs in sorted(empty, key=_revision)[: max(len(empty) - limit, 0)]:
            self._store.delete(replicasets.RESOURCE, rs["metadata"]["name"], rs["metadata"]["namespace"])

    def _write_status(self, deployment: Object, new: Object | None, old: list[Object]) -> float | None:
        now = time.time()
        sets = [*old, *([new] if new is not None else [])]
        count = {
            field: sum(int((rs.get("status") or {}).get(field) or 0) for rs in sets)
            for field in ("replicas", "readyReplicas", "availableReplicas")
        }
        updated = int(((new or {}).get("status") or {}).get("replicas") or 0)
        wanted = int(deployment["spec"].get("replicas", 1))
        _, unavailable = limits(deployment["spec"].get("strategy") or {}, wanted)
        if (deployment["spec"].get("strategy") or {}).get("type") == "Recreate":
            unavailable = 0
        complete = updated == wanted and count["replicas"] == wanted and count["availableReplicas"] == wanted
        deadline = deployment["spec"].get("progressDeadlineSeconds", 600)
        failure = next(
            (condition(rs, "ReplicaFailure") for rs in sets if condition(rs, "ReplicaFailure")), None
        )
        again: list[float] = []

        def change(obj: Object) -> None:
            status = obj.setdefault("status", {})
            before = {
                field: status.get(field)
                for field in ("updatedReplicas", "readyReplicas", "availableReplicas")
            }
            status.update(
                **count,
                updatedReplicas=updated,
                unavailableReplicas=max(wanted - count["availableReplicas"], 0),
                observedGeneration=obj["metadata"].get("generation", 0),
            )
            moved = before != {field: status.get(field) for field in before}
            if count["availableReplicas"] >= wanted - unavailable:
                set_condition(
                    status,
                    "Available",
                    "True",
                    "MinimumReplicasAvailable",
                    "Deployment has minimum availability.",
                    now,
                )
            else:
                text = "Deployment does not have minimum availability."
                set_condition(status, "Available", "False", "MinimumReplicasUnavailable", text, now)
            name = new["metadata"]["name"] if new is not None else ""
            progress = condition(obj, "Progressing")
            since = parse_timestamp((progress or {}).get("lastUpdateTime")) or now
            said = (progress or {}).get("reason")
            done = said == "NewReplicaSetAvailable" and f'"{name}"' in (progress or {})["message"]
            if complete or done:
                value, reason, text = (
                    "True",
                    "NewReplicaSetAvailable",
                    f'ReplicaSet "{name}" has successfully progressed.',
                )
            elif not moved and deadline is not None and (said == _TOO_LATE or now - since > deadline):
                value, reason = "False", _TOO_LATE
                text = f'ReplicaSet "{name}" has timed out progressing.'
            else:
                value, reason, text = "True", "ReplicaSetUpdated", f'ReplicaSet "{name}" is progressing.'
                again.append(max(float(deadline or 600) - (now - since), 0.0) + 1.0)
            known = (progress or {}).get("lastUpdateTime")
            kept = (
                known
                if known and not moved and (progress or {}).get("reason") == reason
                else micro_timestamp(now)
            )
            set_condition(status, "Progressing", value, reason, text, now, lastUpdateTime=kept[:19] + "Z")
            if failure is not None:
                set_condition(status, "ReplicaFailure", "True", failure["reason"], failure["message"], now)
            else:
                status["conditions"] = [c for c in status["conditions"] if c["type"] != "ReplicaFailure"]

        metadata = deployment["metadata"]
        self._store.mutate(_RESOURCE, metadata["name"], metadata["namespace"], change, subresource="status")
        revision = (new or {"metadata": {}})["metadata"].get("annotations", {}).get(_REVISION)
        if revision and (metadata.get("annotations") or {}).get(_REVISION) != revision:
            self._store.mutate(
                _RESOURCE,
                metadata["name"],
                metadata["namespace"],
                lambda obj: obj["metadata"].setdefault("annotations", {}).update({_REVISION: revision}),
            )
        return again[0] if again else None


def _revision(rs: Object) -> int:
    return int((rs["metadata"].get("annotations") or {}).get(_REVISION) or 0)


def _newest(sets: list[Object]) -> int:
    return max((_revision(rs) for rs in sets), default=0)
