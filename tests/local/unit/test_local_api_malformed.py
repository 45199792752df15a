"""Malformed requests: the answer is an object or a refusal that says why; never a crash."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_local.api import apply
from springtide_local.api.objects import clone, clone_value
from springtide_local.api.patch import strategic_merge
from springtide_local.api.requests import Target
from springtide_local.api.store import Store
from springtide_local.api.writes import Options
from springtide_local.ports import ApiError

VALID = yaml.safe_load("""
pods:
  metadata:
    name: x
    labels: {a: b}
    annotations: {a: b}
    finalizers: [a.b/c]
    ownerReferences: [{apiVersion: v1, kind: Pod, name: y, uid: z, controller: true}]
  spec:
    restartPolicy: Never
    tolerations: [{key: a, operator: Exists}]
    securityContext: {runAsNonRoot: true}
    volumes: [{name: v, secret: {secretName: s}}, {name: w, hostPath: {path: /}}]
    initContainers: [{name: i, image: x}]
    containers:
    - name: c
      image: x
      command: [a]
      env: [{name: A, value: b}, {name: B, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]
      ports: [{containerPort: 80, name: http}]
      resources: {limits: {cpu: 1, memory: 1Gi}, requests: {cpu: 500m}}
      volumeMounts: [{name: v, mountPath: /v}]
      livenessProbe: {httpGet: {port: 80}}
      securityContext: {capabilities: {add: [CHOWN], drop: [ALL]}}
services:
  metadata: {name: x}
  spec: {type: ClusterIP, clusterIP: "", ports: [{name: a, port: 80, targetPort: http}], selector: {a: b}}
configmaps: {metadata: {name: x}, data: {a: b}, binaryData: {c: YQ==}}
secrets: {metadata: {name: x}, type: Opaque, data: {a: YQ==}, stringData: {b: c}}
events:
  metadata: {name: x}
  involvedObject: {kind: Pod, name: x, namespace: default}
  reason: Why
  source: {component: c}
persistentvolumeclaims:
  metadata: {name: x}
  spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
resourcequotas: {metadata: {name: x}, spec: {hard: {pods: "1"}}}
limitranges: {metadata: {name: x}, spec: {limits: [{type: Container, default: {cpu: 1}, max: {cpu: 2}}]}}
deployments.apps:
  metadata: {name: x}
  spec:
    replicas: 1
    selector: {matchLabels: {a: b}, matchExpressions: [{key: a, operator: In, values: [b]}]}
    strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 1}}
    template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: x}]}}
poddisruptionbudgets.policy:
  metadata: {name: x}
  spec: {minAvailable: 50%, selector: {matchLabels: {a: b}}}
horizontalpodautoscalers.autoscaling:
  metadata: {name: x}
  spec: {maxReplicas: 3, scaleTargetRef: {kind: D, name: d}}
leases.coordination.k8s.io: {metadata: {name: x}, spec: {leaseDurationSeconds: 15, holderIdentity: a}}
rolebindings.rbac.authorization.k8s.io:
  metadata: {name: x}
  subjects: [{kind: ServiceAccount, name: a, namespace: b}]
  roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: r}
customresourcedefinitions.apiextensions.k8s.io:
  metadata: {name: things.g.dev}
  spec:
    group: g.dev
    scope: Namespaced
    names: {plural: things, kind: Thing, shortNames: [t]}
    versions:
    - name: v1
      served: true
      storage: true
      subresources: {status: {}, scale: {specReplicasPath: .spec.n, statusReplicasPath: .status.n}}
      additionalPrinterColumns: [{name: N, type: integer, jsonPath: .spec.n}]
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec:
              type: object
              x-kubernetes-validations: [{rule: self.n > 0, message: "too small"}]
              properties: {n: {type: integer, default: 1, minimum: 0}, s: {type: string, pattern: a}}
""")
JUNK: list[Any] = [
    None,
    "",
    "x",
    "-1",
    0,
    -1,
    2**70,
    1.5,
    True,
    [],
    [None],
    ["x"],
    [{}],
    {},
    {"x": None},
    {"a": [1]},
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for name, item in value.items():
            found += places(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += places(item, (*path, index))
    return found


def spoiled(obj: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    made = clone(obj)
    for _ in range(rng.choice((1, 1, 2))):
        path = rng.choice(places(made))
        inner: Any = made
        for step in path[:-1]:
            inner = inner[step]
        if rng.random() < 0.2:
            del inner[path[-1]]
        else:
            inner[path[-1]] = clone_value(rng.choice(JUNK))
        if not places(made):
            break
    return made


def refusal(call: Callable[[], object]) -> ApiError | None:
    try:
        call()
    except ApiError as problem:
        return problem
    return None


def check(problem: ApiError | None, sent: Any) -> None:
    """A refusal is the sender's fault, and says so."""
    undeclared = problem is not None and "field not declared in schema" in problem.message
    if problem is not None and not undeclared:
        assert 400 <= problem.code < 500, (sent, problem.message)
        assert problem.message


def _release(obj: dict[str, Any]) -> None:
    obj["metadata"].pop("finalizers", None)


@pytest.mark.parametrize("resource", sorted(VALID))
def test_spoiled_objects_are_refused_or_stored(resource: str) -> None:
    store = Store()
    rng = random.Random(resource)
    namespace = "default" if store.registry.stored(resource).namespaced else None
    kept = list(store.scan(resource, namespace))
    refused = 0
    for _ in range(120):
        body = spoiled(VALID[resource], rng)
        problem = refusal(lambda body=body: store.create(resource, body, namespace))
        check(problem, body)
        refused += problem is not None
        for obj in store.list(resource, namespace)[len(kept) :]:
            name = obj["metadata"]["name"]
            store.delete(resource, name, namespace, 0)
            # The finalizers, of the object or of a definition, hold it until here.
            refusal(lambda name=name: store.mutate(resource, name, namespace, _release))
        assert store.scan(resource, namespace) == kept
    assert refused > 10


@pytest.mark.parametrize("resource", sorted(VALID))
def test_valid_objects_are_stored_and_written_again_unchanged(resource: str) -> None:
    store = Store()
    namespace = "default" if store.registry.stored(resource).namespaced else None
    made = store.create(resource, VALID[resource], namespace)
    again = store.mutate(resource, made["metadata"]["name"], namespace, lambda obj: None)
    assert again == made


def applied(store: Store, storage: str, name: str, config: dict[str, Any], force: bool) -> ApiError | None:
    kind = store.registry.stored(storage)
    whole = {"apiVersion": kind.api_version, "kind": kind.kind, **config}
    return refusal(lambda: apply.apply(store, Target(kind, "default", name), whole, Options("me"), force))


@pytest.mark.parametrize("resource", ["pods", "deployments.apps", "services", "configmaps"])
def test_spoiled_patches_and_applies_are_refused_or_stored(resource: str) -> None:
    store = Store()
    node = store.registry.stored(resource).node
    store.create(resource, VALID[resource], "default")
    rng = random.Random(resource)

    def patched(patch: dict[str, Any]) -> None:
        merged = clone(strategic_merge(store.get(resource, "x", "default"), patch, node))

        def change(obj: dict[str, Any]) -> None:
            obj.clear()
            obj.update(merged)

        store.mutate(resource, "x", "default", change)

    for _ in range(80):
        patch = spoiled(VALID[resource], rng)
        check(refusal(lambda patch=patch: patched(patch)), patch)
        config = spoiled(VALID[resource], rng)
        check(applied(store, resource, "x", config, rng.random() < 0.5), config)


WIDGET = {
    "metadata": {"name": "w", "labels": {"a": "b"}},
    "spec": {
        "color": "red",
        "size": 2,
        "port": 80,
        "parts": [{"name": "x", "weight": 1}],
        "labels": {"a": "b"},
        "template": {"any": ["thing"]},
    },
    "status": {"size": 1, "conditions": [{"type": "Ready", "status": "True"}]},
}


def test_spoiled_custom_resources_are_refused_or_stored() -> None:
    store = Store()
    path = Path(__file__).resolve().parents[2] / "support" / "local_api_widgets.yaml"
    store.create("customresourcedefinitions.apiextensions.k8s.io", yaml.safe_load(path.read_text()))
    storage = "widgets.widgets.test.springtide.dev"
    rng = random.Random(1)
    store.create(storage, {**clone(WIDGET), "metadata": {"name": "x"}}, "default")
    for _ in range(200):
        body = spoiled(WIDGET, rng)
        check(refusal(lambda body=body: store.create(storage, body, "default")), body)
        status = clone_value(body.get("status"))
        check(refusal(lambda status=status: _set_status(store, storage, status)), body)
        config = spoiled(WIDGET, rng)
        check(applied(store, storage, "x", config, True), config)
        for obj in store.list(storage, "default"):
            if obj["metadata"]["name"] != "x":
                store.delete(storage, obj["metadata"]["name"], "default")


def _set_status(store: Store, storage: str, status: Any) -> None:
    store.mutate(storage, "x", "default", lambda obj: obj.update(status=status), "status")


json_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda below: st.lists(below) | st.dictionaries(st.text(max_size=3), below),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(json_values)
def test_any_metadata_is_refused_or_stored(meta: Any) -> None:
    store = Store()
    check(refusal(lambda: store.create("configmaps", {"metadata": meta}, "default")), meta)
