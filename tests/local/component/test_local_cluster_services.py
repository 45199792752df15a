"""Deployments and Services of the embedded cluster: rollouts with kubectl, addresses that lead to ready
pods.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
from typing import Any

import pytest
from local_cluster import EXTERNAL, FIXTURES, IMAGE, Kube, alive, pid_of, until

cluster, kube, target_kubeconfig = FIXTURES

embedded = pytest.mark.skipif(
    bool(EXTERNAL), reason="addresses of a real cluster cannot be reached from here"
)
Object = dict[str, Any]
APPS = "apis/apps/v1"
# Says who it is, then sends back what it gets.
ECHO = """
import os, socketserver
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(os.environ["HOSTNAME"].encode() + b"\\n")
        while data := self.request.recv(65536):
            self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
Server((os.environ["SPRINGTIDE_BIND"], 7000), Echo).serve_forever()
"""


def _echo(kube: Kube, name: str, ready: bool = True, labels: dict[str, str] | None = None) -> Object:
    probe = {"tcpSocket": {"port": 7000}} if ready else {"exec": {"command": ["false"]}}
    kube.pod(
        name,
        ["python", "-c", ECHO],
        spec={"labels": labels or {"app": "echo"}, "terminationGracePeriodSeconds": 0},
        readinessProbe={**probe, "periodSeconds": 1},
        ports=[{"name": "echo", "containerPort": 7000}],
    )
    return kube.wait_phase(name, "Running")


def _service(kube: Kube, **spec: Any) -> str:
    body = {"selector": {"app": "echo"}, "ports": [{"port": 7070, "targetPort": "echo"}], **spec}
    made = kube.create("services", {"kind": "Service", "metadata": {"name": "echo"}, "spec": body})
    return str(made["spec"]["clusterIP"])


def _connect(address: str, port: int = 7070) -> socket.socket | None:
    try:
        return socket.create_connection((address, port), timeout=5)
    except ConnectionRefusedError:
        return None


def _accepts(address: str) -> bool:
    connection = _connect(address)
    if connection is None:
        return False
    connection.close()
    return True


def _greeting(connection: socket.socket) -> str:
    with connection.makefile("rb") as file:
        return file.readline().decode().strip()


def _endpoints(kube: Kube) -> tuple[list[str], list[str]]:
    subsets = kube.get("endpoints", "echo").get("subsets") or [] if not kube.gone("endpoints", "echo") else []
    ready = [a["targetRef"]["name"] for s in subsets for a in s.get("addresses") or []]
    return ready, [a["targetRef"]["name"] for s in subsets for a in s.get("notReadyAddresses") or []]


@embedded
def test_a_service_leads_to_ready_pods_in_turn(kube: Kube) -> None:
    address = _service(kube)
    assert _connect(address) is None
    _echo(kube, "one")
    _echo(kube, "two")
    _echo(kube, "unready", ready=False)
    until(lambda: _endpoints(kube) == (["one", "two"], ["unready"]), "endpoints")
    until(lambda: _accepts(address), "the listener")

    def greeted() -> list[str]:
        seen = []
        for _ in range(4):
            connection = _connect(address)
            assert connection is not None
            with connection:
                seen.append(_greeting(connection))
        return sorted(seen)

    # The listener may know the one before it knows the other.
    until(lambda: greeted() == ["one", "one", "two", "two"], "answers of both in turn")
    assert "unready" not in greeted()
    slices = kube.list(
        "endpointslices", "apis/discovery.k8s.io/v1", labelSelector="kubernetes.io/service-name=echo"
    )
    states = {e["targetRef"]["name"]: e["conditions"]["ready"] for e in slices[0]["endpoints"]}
    assert states == {"one": True, "two": True, "unready": False}


@embedded
def test_pods_that_are_not_ready_can_be_published(kube: Kube) -> None:
    address = _service(kube, publishNotReadyAddresses=True)
    _echo(kube, "early", ready=False)

    def greeted() -> str:
        connection = _connect(address)
        if connection is None:
            return ""
        with connection:
            return _greeting(connection)

    assert until(greeted, "an answer") == "early"


@embedded
def test_connection_carries_both_ways_and_ends_with_backend(kube: Kube) -> None:
    address = _service(kube)
    _echo(kube, "one")
    connection = until(lambda: _connect(address), "a connection")
    with connection:
        connection.settimeout(90)
        assert _greeting(connection) == "one"
        sent = bytes(range(256)) * 4096
        connection.sendall(sent[:500_000])
        got = bytearray()
        while len(got) < 500_000:
            got += connection.recv(65536)
        connection.sendall(sent[500_000:])
        connection.shutdown(socket.SHUT_WR)
        while data := connection.recv(65536):
            got += data
        assert bytes(got) == sent
    connection = _connect(address)
    assert connection is not None
    with connection:
        connection.settimeout(90)
        assert _greeting(connection) == "one"
        pid = pid_of(kube.get("pods", "one"))
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    until(lambda: not alive(pid) and not _accepts(address), "new connections to be refused")


@embedded
def test_a_headless_service_has_endpoints_and_no_address(kube: Kube) -> None:
    assert _service(kube, clusterIP="None") == "None"
    _echo(kube, "one")
    until(lambda: _endpoints(kube)[0] == ["one"], "endpoints")


def _deployment(kube: Kube, text: str, strategy: Object | None = None, replicas: int = 3) -> Object:
    container = {
        "name": "main",
        "image": IMAGE,
        "command": ["sh", "-c", f"echo {text}; sleep 300"],
        "readinessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 1},
    }
    template = {
        "metadata": {"labels": {"app": "web"}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
    }
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": "web"}}, "template": template}
    if strategy:
        spec["strategy"] = strategy
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": spec}


def _commands(kube: Kube) -> list[str]:
    pods = [p for p in kube.list("pods") if not p["metadata"].get("deletionTimestamp")]
    return sorted(p["spec"]["containers"][0]["command"][2].split(";")[0] for p in pods)


@pytest.mark.parametrize("strategy", [None, {"type": "Recreate"}], ids=["rolling", "recreate"])
def test_a_deployment_rolls_to_a_new_template_and_back(kube: Kube, strategy: Object | None) -> None:
    kube.create("deployments", _deployment(kube, "first", strategy), APPS)
    done = kube.kubectl("rollout", "status", "deployment/web", "--timeout=90s")
    assert done.returncode == 0, done.stderr
    assert (
        kube.kubectl("wait", "--for=condition=Available", "deployment/web", "--timeout=90s").returncode == 0
    )
    kube.patch(
        "deployments", "web", {"spec": {"template": _deployment(kube, "second")["spec"]["template"]}}, APPS
    )
    done = kube.kubectl("rollout", "status", "deployment/web", "--timeout=90s")
    assert done.returncode == 0, done.stderr
    until(lambda: _commands(kube) == ["echo second"] * 3, "the new pods")
    sets = kube.list("replicasets", APPS)
    assert sorted(s["spec"]["replicas"] for s in sets) == [0, 3]
    undone = kube.kubectl("rollout", "undo", "deployment/web")
    assert undone.returncode == 0, undone.stderr
    until(lambda: _commands(kube) == ["echo first"] * 3, "the old pods again")
    status = until(
        lambda: (s := kube.get("deployments", "web", APPS)["status"]).get("availableReplicas") == 3 and s,
        "the status",
    )
    assert status["observedGeneration"] == kube.get("deployments", "web", APPS)["metadata"]["generation"]


def test_deployment_scales_replaces_lost_pods_and_takes_them(kube: Kube) -> None:
    kube.create("deployments", _deployment(kube, "x", replicas=2), APPS)
    until(lambda: len(_commands(kube)) == 2, "two pods")
    assert kube.kubectl("scale", "deployment/web", "--replicas=3").returncode == 0
    until(lambda: len(_commands(kube)) == 3, "three pods")
    victim = kube.list("pods")[0]["metadata"]["name"]
    kube.delete("pods", victim)
    until(lambda: len(_commands(kube)) == 3 and kube.gone("pods", victim), "a replacement")
    assert kube.kubectl("scale", "deployment/web", "--replicas=1").returncode == 0
    until(lambda: len(_commands(kube)) == 1, "one pod")
    kube.delete("deployments", "web", APPS)
    until(lambda: not kube.list("pods") and not kube.list("replicasets", APPS), "everything to be gone")


def test_a_deployment_whose_pods_cannot_start_is_not_available(kube: Kube) -> None:
    body = _deployment(kube, "x", replicas=1)
    body["spec"]["template"]["spec"]["containers"][0]["image"] = "registry.invalid/nobody/nothing:1"
    body["spec"]["progressDeadlineSeconds"] = 1
    kube.create("deployments", body, APPS)

    def reasons() -> dict[str, str]:
        conditions = kube.get("deployments", "web", APPS).get("status", {}).get("conditions") or []
        return {c["type"]: c["reason"] for c in conditions}

    until(lambda: reasons().get("Progressing") == "ProgressDeadlineExceeded", "the deadline")
    assert reasons()["Available"] == "MinimumReplicasUnavailable"


@embedded
def test_http_through_the_proxy(kube: Kube) -> None:
    script = "import http.server, os; http.server.ThreadingHTTPServer((os.environ['SPRINGTIDE_BIND'], 7000), "
    script += "http.server.SimpleHTTPRequestHandler).serve_forever()"
    kube.pod(
        "web",
        ["python", "-c", script],
        spec={"labels": {"app": "echo"}},
        ports=[{"name": "echo", "containerPort": 7000}],
    )
    address = _service(kube)

    def status() -> int:
        connection = http.client.HTTPConnection(address, 7070, timeout=5)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status
        except (ConnectionRefusedError, ConnectionResetError, http.client.RemoteDisconnected):
            return 0
        finally:
            connection.close()

    assert until(status, "an answer") == 200
