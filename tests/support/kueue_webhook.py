"""Stand-in for Kueue's webhook for pods, with the rights that Kueue's own manifests give it.

It decides as Kueue's sources of August 2026 do (`pkg/controller/jobs/pod/pod_webhook.go`, and in
`pkg/controller/jobframework/reconciler.go` the walk from a pod to the jobs above it). Every read goes to the
API server as Kueue's service account. Where a read is refused, so is the pod: the webhook's failurePolicy is
Fail.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import yaml
from e2e_cluster import E2ECluster

Object = dict[str, Any]

ACCOUNT_NAMESPACE, ACCOUNT = "kueue-system", "kueue-controller-manager"
QUEUE = "kueue.x-k8s.io/queue-name"
GATE = "kueue.x-k8s.io/admission"
# Of Kueue's manager-role: the rules that its webhook for pods needs for what it knows itself.
RIGHTS = f"""
apiVersion: v1
kind: Namespace
metadata: {{name: {ACCOUNT_NAMESPACE}}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {{name: {ACCOUNT}, namespace: {ACCOUNT_NAMESPACE}}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: kueue-manager-role}}
rules:
- {{apiGroups: [""], resources: [namespaces, limitranges, nodes], verbs: [get, list, watch]}}
- {{apiGroups: [""], resources: [pods], verbs: [delete, get, list, patch, update, watch]}}
- {{apiGroups: [apps], resources: [replicasets], verbs: [get, list, watch]}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: kueue-manager-rolebinding}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: kueue-manager-role}}
subjects: [{{kind: ServiceAccount, name: {ACCOUNT}, namespace: {ACCOUNT_NAMESPACE}}}]
"""


@dataclass
class PodWebhook:
    """Kueue as its configuration says.

    Attributes:
        system: the cluster.
        external_frameworks: `Kind.version.group` of jobs that other controllers run.
        without_queue_name: `manageJobsWithoutQueueName`.
        default_queue: the namespace has a LocalQueue called `default`.
    """

    system: E2ECluster
    external_frameworks: tuple[str, ...] = ()
    without_queue_name: bool = False
    default_queue: bool = False

    def install(self) -> None:
        """Make Kueue's account, with its rights."""
        self.system.kubectl("apply", "-f", "-", stdin=RIGHTS)

    def admit(self, pod: Object) -> Object:
        """Return the pod as it would be created. Raises RefusedError where the webhook fails."""
        pod = copy.deepcopy(pod)
        self._get("namespace", pod["metadata"]["namespace"])
        if self._ancestor(pod) is not None:
            return pod
        labels = pod["metadata"].setdefault("labels", {})
        if not labels.get(QUEUE) and self.default_queue:
            labels[QUEUE] = "default"
        if labels.get(QUEUE) or self.without_queue_name:
            labels["kueue.x-k8s.io/managed"] = "true"
            pod["spec"].setdefault("schedulingGates", []).append({"name": GATE})
        return pod

    def _ancestor(self, obj: Object) -> Object | None:
        """The topmost job above an object that is in Kueue's hands."""
        namespace, top = obj["metadata"]["namespace"], None
        while True:
            owners = obj["metadata"].get("ownerReferences") or []
            owner = next((one for one in owners if one.get("controller")), None)
            if owner is None or not self._knows(owner):
                return top
            group, _, version = owner["apiVersion"].rpartition("/")
            kind = f"{owner['kind']}.{version}.{group}" if group else owner["kind"]
            # Its client reads through a cache, which lists and watches all of them.
            self._as_kueue("get", kind, "--all-namespaces", "-o", "name")
            obj = self._get(kind, owner["name"], "-n", namespace)
            if obj["metadata"]["uid"] != owner["uid"]:
                return top
            named = (obj["metadata"].get("labels") or {}).get(QUEUE)
            if kind in self.external_frameworks and (self.without_queue_name or named):
                top = obj

    def _knows(self, owner: Object) -> bool:
        group, _, version = owner["apiVersion"].rpartition("/")
        known = f"{owner['kind']}.{version}.{group}" in self.external_frameworks
        return known or (owner["kind"], owner["apiVersion"]) == ("ReplicaSet", "apps/v1")

    def _get(self, kind: str, name: str, *more: str) -> Object:
        found: Object = json.loads(self._as_kueue("get", kind, name, *more, "-o", "json"))
        return found

    def _as_kueue(self, *arguments: str) -> str:
        return self.system.kubectl(*arguments, "--as", f"system:serviceaccount:{ACCOUNT_NAMESPACE}:{ACCOUNT}")


def grant(system: E2ECluster, objects: list[Object]) -> None:
    """Apply what the chart makes for Kueue."""
    system.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
