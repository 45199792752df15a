"""The chart's FlowSchema is about the very requests that the operator makes for its Lease."""

from __future__ import annotations

from typing import Any

from chart_render import pick, render

from springtide_kube.errors import ApiError
from springtide_operator.cluster import KubeCluster
from springtide_operator.lease import Lease

VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Recorder:
    """A `Kube` that has no Lease at first, and tells what was asked for."""

    def __init__(self) -> None:
        self.asked: set[tuple[str, ...]] = set()
        self.lease: dict[str, Any] = {}

    async def request(self, method: str, path: str, body: Any = None, *_: Any, **__: Any) -> Any:
        _, apis, group, _, _, namespace, resource, *_ = path.split("/")
        assert apis == "apis"
        self.asked.add((VERBS[method], group, resource, namespace))
        if body is not None:
            self.lease = {**body, "metadata": {**body["metadata"], "uid": "u", "resourceVersion": "1"}}
        if not self.lease:
            raise ApiError(404, "NotFound", "there is none")
        return self.lease


async def test_every_request_on_the_lease_has_the_flow() -> None:
    objects = render({"fullnameOverride": "tide"}, namespace="system")
    flow, pod = pick(objects, "FlowSchema"), pick(objects, "Deployment")["spec"]["template"]["spec"]
    kube = Recorder()
    lease = Lease(KubeCluster(kube), "system", "one")  # type: ignore[arg-type]
    await lease.step()  # makes it
    await lease.step()  # renews it
    await lease.release()
    assert {verb for verb, *_ in kube.asked} >= {"get", "create", "update"}
    (rules,) = flow["spec"]["rules"]
    (subject,) = rules["subjects"]
    assert subject["serviceAccount"] == {"name": pod["serviceAccountName"], "namespace": "system"}
    for verb, group, resource, namespace in kube.asked:
        assert any(
            verb in rule["verbs"]
            and group in rule["apiGroups"]
            and resource in rule["resources"]
            and namespace in rule["namespaces"]
            for rule in rules["resourceRules"]
        ), (verb, group, resource, namespace)
