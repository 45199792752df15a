"""The real kubectl on pods and nodes, with a pretended kubelet: logs, cordon, drain, tokens, cut commands."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import yaml
from local_api import Api, EmbeddedServer

from springtide_local.api.logs import LogOptions

pytest_plugins = ["local_api_fixtures"]

MERGE = "application/merge-patch+json"


@pytest.fixture
def node(api: Api, embedded: EmbeddedServer) -> Iterator[str]:
    name = f"node-{uuid.uuid4().hex[:6]}"
    ready = [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}]
    capacity = {"cpu": "4", "memory": "8Gi", "pods": "110"}
    body = {"metadata": {"name": name}, "status": {"conditions": ready, "capacity": capacity}}
    api.ok("POST", "/api/v1/nodes", body)
    yield name
    api.request("DELETE", f"/api/v1/nodes/{name}")


def run_pod(api: Api, namespace: str, name: str, node: str, owner: dict[str, Any] | None = None) -> None:
    """A pod that looks as if it ran and were ready."""
    meta: dict[str, Any] = {"name": name, "labels": {"app": "web"}}
    if owner is not None:
        meta["ownerReferences"] = [owner]
    spec = {"nodeName": node, "containers": [{"name": "c", "image": "x"}], "terminationGracePeriodSeconds": 1}
    path = f"/api/v1/namespaces/{namespace}/pods"
    api.ok("POST", path, {"metadata": meta, "spec": spec})
    status = {
        "phase": "Running",
        "podIP": "127.0.0.9",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [
            {
                "name": "c",
                "ready": True,
                "restartCount": 2,
                "image": "x",
                "imageID": "x",
                "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            }
        ],
    }
    api.ok("PATCH", f"{path}/{name}/status", {"status": status}, MERGE)


def replica_set(api: Api, namespace: str) -> dict[str, Any]:
    labels = {"app": "web"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "x"}]}}
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template}
    body = {"metadata": {"name": "web"}, "spec": spec}
    made = api.ok("POST", f"/apis/apps/v1/namespaces/{namespace}/replicasets", body)
    meta = made["metadata"]
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "name": "web",
        "uid": meta["uid"],
        "controller": True,
    }


class Kubelet:
    """Removes pods that are to go, as a kubelet does when their processes have ended."""

    def __init__(self, embedded: EmbeddedServer, namespace: str) -> None:
        self._embedded, self._namespace = embedded, namespace
        self._task = asyncio.run_coroutine_threadsafe(self._run(), embedded.loop)

    async def _run(self) -> None:
        store = self._embedded.store
        async for event in store.watch("pods", self._namespace):
            if event.type == "MODIFIED" and event.object["metadata"].get("deletionTimestamp"):
                store.delete(
                    "pods", event.object["metadata"]["name"], self._namespace, grace_period_seconds=0
                )

    def stop(self) -> None:
        self._task.cancel()


@pytest.fixture
def kubelet(embedded: EmbeddedServer, namespace: str) -> Iterator[Kubelet]:
    made = Kubelet(embedded, namespace)
    yield made
    made.stop()


def test_pods_and_nodes_have_their_columns(api: Api, namespace: str, node: str) -> None:
    run_pod(api, namespace, "p", node)
    head, row = api.do("get", "pods", "-n", namespace).splitlines()
    assert head.split() == ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]
    assert row.split()[:4] == ["p", "1/1", "Running", "2"]
    wide = api.do("get", "pods", "-n", namespace, "-o", "wide").splitlines()[1].split()
    assert wide[5:7] == ["127.0.0.9", node]
    assert api.do("get", "node", node).splitlines()[1].split()[:2] == [node, "Ready"]
    assert f"{namespace}" in api.do("describe", "node", node)
    assert "Restart Count:  2" in api.do("describe", "pod", "p", "-n", namespace)


def test_a_bound_pod_waits_for_its_kubelet(api: Api, namespace: str, node: str) -> None:
    run_pod(api, namespace, "p", node)
    path = f"/api/v1/namespaces/{namespace}/pods/p"
    marked = api.ok("DELETE", path)
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 1
    assert api.do("get", "pod", "p", "-n", namespace).splitlines()[1].split()[2] == "Terminating"
    api.ok("DELETE", path, {"gracePeriodSeconds": 0})
    assert api.request("GET", path)[0] == 404


def test_logs_come_from_the_provider(api: Api, embedded: EmbeddedServer, namespace: str, node: str) -> None:
    run_pod(api, namespace, "p", node)
    asked: list[LogOptions] = []
    more = threading.Event()

    async def provide(pod: dict[str, Any], options: LogOptions) -> AsyncIterator[bytes]:
        asked.append(options)
        yield b"first\n"
        if options.follow:
            await asyncio.wait_for(asyncio.to_thread(more.wait, 60), 60)
            yield b"second\n"

    embedded.call(lambda: embedded.server.set_log_provider(provide))
    assert api.do("logs", "p", "-n", namespace, "--tail=5", "--timestamps") == "first\n"
    assert (asked[0].container, asked[0].tail_lines, asked[0].timestamps) == ("c", 5, True)
    with api.kubectl_running("logs", "-f", "p", "-n", namespace) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        more.set()
        assert process.stdout.readline() == "second\n"
        assert process.wait(60) == 0
    refused = api.kubectl("logs", "p", "-c", "other", "-n", namespace)
    assert "container other is not valid for pod p" in refused.err


def test_cordon_and_uncordon(api: Api, node: str) -> None:
    assert api.do("cordon", node).strip() == f"node/{node} cordoned"
    assert "Ready,SchedulingDisabled" in api.do("get", "node", node)
    assert api.do("uncordon", node).strip() == f"node/{node} uncordoned"
    assert "SchedulingDisabled" not in api.do("get", "node", node)


def test_drain_evicts_what_a_controller_replaces(
    api: Api, namespace: str, node: str, kubelet: Kubelet
) -> None:
    run_pod(api, namespace, "alone", node)
    refused = api.kubectl("drain", node, "--timeout=60s")
    assert "cannot delete cannot delete Pods that declare no controller" in refused.err or (
        "declare no controller" in refused.err
    )
    api.do("delete", "pod", "alone", "-n", namespace)
    owner = replica_set(api, namespace)
    run_pod(api, namespace, "w1", node, owner)
    done = api.do("drain", node, "--timeout=60s")
    assert f"evicting pod {namespace}/w1" in done
    assert f"node/{node} drained" in done
    assert api.request("GET", f"/api/v1/namespaces/{namespace}/pods/w1")[0] == 404


def test_drain_honours_a_disruption_budget(api: Api, namespace: str, node: str, kubelet: Kubelet) -> None:
    owner = replica_set(api, namespace)
    for name in ("w1", "w2"):
        run_pod(api, namespace, name, node, owner)
    budget = {"spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}}
    path = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    pods = f"/api/v1/namespaces/{namespace}/pods"
    api.ok("POST", path, {"metadata": {"name": "web"}, **budget})

    def allowed(number: int) -> bool:
        return api.ok("GET", f"{path}/web").get("status", {}).get("disruptionsAllowed") == number

    api.until("one allowed disruption", lambda: allowed(1))
    with api.kubectl_running("drain", node, "--timeout=60s") as process:
        assert process.stdout is not None
        refusal = "Cannot evict pod as it would violate the pod's disruption budget."
        assert any(refusal in line for line in process.stdout)
    api.until("one of them to go", lambda: len(api.ok("GET", pods)["items"]) == 1)
    left = api.ok("GET", pods)["items"]
    name = left[0]["metadata"]["name"]
    status, answer, _ = api.request(
        "POST",
        f"/api/v1/namespaces/{namespace}/pods/{name}/eviction",
        {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}},
    )
    assert (status, answer["reason"]) == (429, "TooManyRequests")
    assert answer["details"]["causes"][0]["message"] == (
        "The disruption budget web needs 1 healthy pods and has 1 currently"
    )
    api.until("no allowed disruption", lambda: allowed(0))


def test_an_evicted_pod_says_why_it_goes(api: Api, namespace: str, node: str) -> None:
    run_pod(api, namespace, "p", node)
    path = f"/api/v1/namespaces/{namespace}/pods/p"
    api.ok(
        "POST", f"{path}/eviction", {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}}
    )
    pod = api.ok("GET", path)
    conditions = {c["type"]: c for c in pod["status"]["conditions"]}
    assert conditions["DisruptionTarget"]["reason"] == "EvictionByEvictionAPI"
    assert pod["metadata"]["deletionTimestamp"]
    api.ok("DELETE", path, {"gracePeriodSeconds": 0})


def test_a_pod_is_bound_once(api: Api, namespace: str, node: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods"
    api.ok("POST", path, {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "x"}]}})
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "p"},
        "target": {"kind": "Node", "name": node},
    }
    api.ok("POST", f"{path}/p/binding", binding)
    assert api.ok("GET", f"{path}?fieldSelector=spec.nodeName={node}")["items"][0]["metadata"]["name"] == "p"
    status, answer, _ = api.request("POST", f"{path}/p/binding", binding)
    assert status == 409
    assert "is already assigned to node" in answer["message"]


def test_what_is_cut_says_so(api: Api, namespace: str, node: str) -> None:
    run_pod(api, namespace, "p", node)
    refused = api.kubectl("exec", "p", "-n", namespace, "--", "ls")
    assert refused.code == 1
    for command in ("exec", "attach", "portforward"):
        status, answer, _ = api.request("POST", f"/api/v1/namespaces/{namespace}/pods/p/{command}")
        assert status == 405
        assert f"{command} is not served by the embedded cluster" in answer["message"]
    status, answer, _ = api.request("GET", "/openapi/v2")
    assert status == 406
    assert "OpenAPI v2 is not served by the embedded cluster; use /openapi/v3" in answer["message"]


def test_service_account_tokens_are_users(api: Api, embedded: EmbeddedServer, namespace: str) -> None:
    api.do("create", "serviceaccount", "robot", "-n", namespace)
    token = api.do("create", "token", "robot", "-n", namespace).strip()
    robot = Api(_with_token(api, token))
    assert f"system:serviceaccount:{namespace}:robot" in robot.do("auth", "whoami")
    api.do("create", "role", "r", "--verb=list", "--resource=pods", "-n", namespace)
    api.do("create", "rolebinding", "b", "--role=r", f"--serviceaccount={namespace}:robot", "-n", namespace)
    embedded.call(embedded.server.audit.clear)
    robot.do("get", "pods", "-n", namespace)
    uses = embedded.call(embedded.server.audit.report)
    assert {(use["user"], use["verb"], use["resource"]) for use in uses} == {
        (f"system:serviceaccount:{namespace}:robot", "list", "pods")
    }
    api.do("delete", "serviceaccount", "robot", "-n", namespace)
    assert robot.request("GET", "/api/v1/nodes")[0] == 401


def _with_token(api: Api, token: str) -> Any:
    config = yaml.safe_load(api.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path = api.kubeconfig.with_name(f"token-{uuid.uuid4().hex[:6]}")
    path.write_text(json.dumps(config))
    return path


def test_nobody_unknown_gets_in(api: Api, embedded: EmbeddedServer) -> None:
    forged = base64.urlsafe_b64encode(b"{}").decode().rstrip("=")
    stranger = Api(_with_token(api, f"{forged}.{forged}.{forged}"))
    assert stranger.request("GET", "/api/v1/nodes")[0] == 401
    assert stranger.request("GET", "/apis")[0] == 401
    nobody = Api(_with_token(api, ""))
    nobody.headers.clear()
    assert nobody.request("GET", "/api/v1/nodes")[0] == 401
    assert nobody.request("GET", "/healthz")[:2] == (200, "ok")


def test_an_idle_server_uses_no_time(api: Api, embedded: EmbeddedServer) -> None:
    api.ok("GET", "/api/v1/nodes")
    clock = embedded.call(lambda: time.pthread_getcpuclockid(threading.get_ident()))

    def rests() -> bool:
        before = time.clock_gettime(clock)
        threading.Event().wait(0.4)
        return time.clock_gettime(clock) - before < 0.02

    # What other tests left may still be being cleaned up.
    api.until("an idle moment", rests)
